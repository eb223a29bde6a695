"""Random arrivals, groups, turns, aborts, interrupts, weight changes, bursts and tiny budgets: every request ends,
nothing leaks, and the text is what the request would get alone.

The model is a fake whose next token is a hash of the ids it reads back through the block table, so that a block that is
shared, copied or found wrongly changes the text.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.engine.local import prefix
from temper.engine.local.blocks import SCRATCH_BLOCK, BlockPool
from temper.engine.local.prefix import PrefixCache
from temper.engine.local.rows import TOKEN, Rows
from temper.engine.local.sampling import Drawn, Draws, Table
from temper.engine.local.scheduler import Schedule, Scheduler
from temper.engine.local.sequence import Sequence
from temper.engine.local.step import Stepper
from temper.types import Completion, Finish, Request, SamplingParams

STOP = 0
MAX_LENGTH = 24
LIVES = range(100)
"""Seeds of the random lives that are played."""


def next_token(ids: list[int], weights: int) -> int:
    """Depends on all ids and on the weights, stops now and then."""
    return zlib.crc32(np.asarray([*ids, weights], dtype=np.int64).tobytes()) % 11


class FakeRunner:
    """Speaks the seam of Runner. Its cache holds, for each place, the id and the weights that computed it."""

    def __init__(self, scheduler: Scheduler, num_blocks: int, block_size: int, *, recompute: bool) -> None:
        self._scheduler = scheduler
        self._ids = np.full((num_blocks, block_size), -1)
        self._by = np.full((num_blocks, block_size), -1)
        self._recompute = recompute
        self.weights = 0
        self.arrived: dict[str, int] = {}
        """Weights at the arrival of each request: nothing older may be read for it."""
        self.bursts = 0
        self.bursts_beside_a_prefill = 0

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        source, target = np.asarray(copies).T
        self._ids[target], self._by[target] = self._ids[source], self._by[source]

    def decode(self, decode_R: np.ndarray, rows: Rows, steps: int) -> Table:
        tokens_RS = np.zeros((len(decode_R), steps), dtype=np.int64)
        self.bursts += steps > 1
        for place, row in enumerate(decode_R.tolist()):
            position = int(rows.length[row]) - 1
            token = int(rows.tokens[row, position])
            for step in range(steps):
                self._write(rows, row, position + step, token)
                token = tokens_RS[place, step] = self._next(rows, row, position + step)
        return self._table(torch.from_numpy(tokens_RS))

    def prefill(self, schedule: Schedule, rows: Rows) -> torch.Tensor:
        spans = list(
            zip(schedule.prefill_R.tolist(), schedule.start_R.tolist(), schedule.count_R.tolist(), strict=True)
        )
        total = sum(count for _, _, count in spans) + len(schedule.decode_R)
        assert total <= self._scheduler._tokens_per_step
        self.bursts_beside_a_prefill += schedule.steps > 1
        for row, start, count in spans:
            for position in range(start, start + count):
                self._write(rows, row, position, int(rows.tokens[row, position]))
        done = [(row, start + count - 1) for row, start, count in spans if start + count == rows.length[row]]
        return torch.tensor([[self._next(rows, row, position)] for row, position in done], dtype=torch.int64)

    def draw(self, hidden_RD: torch.Tensor, draws: Draws) -> Table:
        assert len(draws.position_R) == len(hidden_RD)
        return self._table(hidden_RD)

    def fetch(self, tables: list[Table]) -> list[Drawn]:
        return [
            Drawn(
                tokens_RS=table.tokens_RS.numpy(),
                logprobs_RS=table.logprobs_RS.numpy(),
                entropy_R=table.logprobs_RS[:, 0].numpy(),
            )
            for table in tables
        ]

    def check_known(self) -> None:
        """Blocks that can be found hold what they are found by, computed by one version of the weights."""
        known = self._scheduler._prefixes._keys if self._scheduler._prefixes is not None else {}
        for block, (_, ids) in known.items():
            assert np.frombuffer(ids, dtype=TOKEN).tolist() == self._ids[block].tolist(), "not what the block holds"
            assert len(set(self._by[block].tolist())) == 1, "the work of two versions"

    def _table(self, tokens_RS: torch.Tensor) -> Table:
        return Table(tokens_RS=tokens_RS, logprobs_RS=-tokens_RS.float() / 8)

    def _write(self, rows: Rows, row: int, position: int, token: int) -> None:
        block = int(rows.blocks[row, position // rows.block_size])
        if block == SCRATCH_BLOCK:
            assert position >= rows.limit[row] - 1, "a token that counts was written to the scratch block"
            return
        users = np.flatnonzero(rows.is_active & (rows.blocks == block).any(1))
        assert users.tolist() == [row], "two running sequences use a block that one of them writes"
        # A leader may append behind a prompt that parked followers share: they copy before they write.
        is_own = self._scheduler.pool._references[block] == 1
        assert is_own or position >= rows.num_prompt[row], "a shared prompt token was overwritten"
        self._ids[block, position % rows.block_size] = token
        self._by[block, position % rows.block_size] = self.weights

    def _next(self, rows: Rows, row: int, position: int) -> int:
        if position >= rows.limit[row] - 1:
            return STOP + 1  # beyond the limit: drawn by the device, dropped by the host
        blocks = rows.blocks[row, : position // rows.block_size + 1]
        by = self._by[blocks].reshape(-1)[: position + 1]
        oldest = self.weights if self._recompute else self.arrived[rows.sequence(row).request.id]
        assert (by >= oldest).all(), "keys and values of old weights were read"
        return next_token(self._ids[blocks].reshape(-1)[: position + 1].tolist(), self.weights)


class Driver:
    """A scheduler, the real step and the fake runner; checks the books after every step."""

    def __init__(self, *, recompute: bool = False, **limits: Any) -> None:
        self.scheduler = Scheduler(**limits)
        self.runner = FakeRunner(self.scheduler, limits["num_blocks"], limits["block_size"], recompute=recompute)
        self.stepper = Stepper(self.scheduler, self.runner)  # type: ignore[arg-type]
        self.recompute = recompute
        self.requests: dict[str, Request] = {}
        self.pieces: dict[str, list[Completion]] = {}
        self.paused: list[str] = []
        self.watched: dict[str, list[int]] = {}

    def add(self, request: Request, *, watch: bool) -> None:
        self.requests.setdefault(request.id, request)
        pieces = self.pieces.setdefault(request.id, [])
        if watch:
            self.watched.setdefault(request.id, [])

        def deliver(completion: Completion) -> None:
            assert not pieces or pieces[-1].finish is Finish.INTERRUPT, "delivered twice"
            pieces.append(completion)
            if completion.finish is Finish.INTERRUPT:
                self.paused.append(request.id)

        def see(token_ids: list[int], logprobs: list[float]) -> None:
            assert len(token_ids) == len(logprobs) > 0
            self.watched[request.id] += token_ids

        self.runner.arrived[request.id] = self.runner.weights
        self.scheduler.add(Sequence(request, 0, deliver, watch=see if watch else None))

    def resume(self, request_id: str) -> None:
        """As a new request: what was drawn is part of the prompt now."""
        self.paused.remove(request_id)
        first, drawn = self.requests[request_id], self.drawn(request_id)
        params = SamplingParams(max_new_tokens=first.params.max_new_tokens - len(drawn), stop_ids=(STOP,))
        prompt = (*first.prompt_ids, *drawn)
        self.add(Request(id=request_id, prompt_ids=prompt, params=params), watch=request_id in self.watched)

    def drawn(self, request_id: str) -> list[int]:
        return [token for piece in self.pieces[request_id] for token in piece.token_ids]

    def change_weights(self) -> None:
        self.runner.weights += 1
        self.scheduler.change_weights(recompute=self.recompute)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """`meanwhile` happens while a burst is under way."""
        if (burst := self.stepper.begin(self.runner.weights)) is not None:
            meanwhile()
            self.stepper.end(burst)
        self.check_books()

    def check_books(self) -> None:
        """Every reference has a holder, and the other way round."""
        rows, pool = self.scheduler.rows, self.scheduler.pool
        held = Counter(block for sequence in self.scheduler.waiting for block in sequence.blocks.tolist())
        for row in np.flatnonzero(rows.is_active):
            held.update(rows.blocks[row, : rows.num_blocks[row]].tolist())
        assert held == {block: count for block, count in enumerate(pool._references.tolist()) if count}, (
            "a block leaked"
        )
        assert pool.num_free == pool.num_blocks - 1 - len(held)
        free = [*pool._stack[: pool._top].tolist(), *pool._idle]
        assert len(set(free) | set(held)) == pool.num_blocks - 1
        self.runner.check_known()

    def finish_all(self) -> None:
        for _ in range(3000):
            for request_id in list(self.paused):
                self.resume(request_id)
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "the scheduler does not come to an end"

    def check_outputs(self, aborted: set[str]) -> None:
        for request_id, request in self.requests.items():
            drawn, finish = self.drawn(request_id), self.pieces[request_id][-1].finish
            versions = [version for piece in self.pieces[request_id] for version in piece.versions]
            ids = list(request.prompt_ids)
            for token, version in zip(drawn, versions, strict=True):
                assert ids[-1] != STOP or len(ids) == len(request.prompt_ids), "drawn after a stop token"
                assert token == next_token(ids, version), "not what the request draws alone"
                ids.append(token)
            limit = min(len(request.prompt_ids) + request.params.max_new_tokens, MAX_LENGTH)
            natural = Finish.STOP if drawn and ids[-1] == STOP else Finish.LENGTH
            assert finish is (Finish.ABORT if request_id in aborted else natural)
            assert len(ids) == limit or finish is not Finish.LENGTH
            assert versions == sorted(versions)
            for piece in self.pieces[request_id]:
                assert piece.logprobs == [-token / 8 for token in piece.token_ids]
                assert piece.entropies is None or piece.entropies == piece.logprobs
            assert self.watched.get(request_id, drawn) == drawn
        assert not self.scheduler.pool._references.any(), "a block leaked"
        assert not self.scheduler.live
        assert self.scheduler.num_waiting == 0


def meddle(driver: Driver, random: Random, aborted: set[str]) -> None:
    """What may happen to requests at any time."""
    if random.random() < 0.3 and driver.scheduler.live:
        victim = random.choice(sorted(driver.scheduler.live))
        finish = random.choice((Finish.ABORT, Finish.INTERRUPT))
        driver.scheduler.stop(victim, finish)
        aborted |= {victim} if finish is Finish.ABORT else set()
    if driver.paused and random.random() < 0.5:
        driver.resume(random.choice(driver.paused))
    if random.random() < 0.2:
        driver.change_weights()


def play(random: Random) -> Driver:
    """A random life of an engine, from the first request to the last."""
    block_size = random.randint(1, 5)
    driver = Driver(
        max_running=random.randint(1, 5),
        block_size=block_size,
        num_blocks=-(-MAX_LENGTH // block_size) + 1 + random.randint(0, 8),
        tokens_per_step=random.randint(5, 40),
        max_length=MAX_LENGTH,
        steps_per_sync=random.choice((1, 2, 5)),
        prefix_cache=random.random() < 0.8,
        recompute=random.random() < 0.5,
    )
    aborted: set[str] = set()
    prompts = [(1,)]
    for number in range(random.randint(1, 14)):
        kind = random.random()
        if kind < 0.5:  # a new text, or one that goes on from an old one
            start = random.choice(prompts) if kind < 0.25 else ()
            prompts.append((*start, *(random.randint(1, 3) for _ in range(random.randint(1, 6))))[: MAX_LENGTH - 3])
        params = SamplingParams(
            max_new_tokens=random.randint(1, 14),
            stop_ids=(STOP,) * random.randint(1, 2),
            entropy=random.random() < 0.15,
        )
        request = Request(id=str(number), prompt_ids=random.choice(prompts), params=params)
        driver.add(request, watch=random.random() < 0.2)
        for _ in range(random.randint(0, 3)):
            driver.step(meanwhile=lambda: meddle(driver, random, aborted))
        meddle(driver, random, aborted)
        done = [pieces[-1] for pieces in driver.pieces.values() if pieces and pieces[-1].finish is not Finish.ABORT]
        if done:  # the next turn of a conversation
            said = random.choice(done)
            prompts.append((*said.prompt_ids, *said.token_ids, random.randint(1, 3))[: MAX_LENGTH - 3])
    driver.finish_all()
    driver.check_outputs(aborted)
    return driver


def play_all() -> list[Driver]:
    return [play(Random(seed)) for seed in LIVES]


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_every_request_ends_with_the_text_it_has_alone(random: Random) -> None:
    play(random)


def test_the_random_lives_exercise_everything() -> None:
    lives = play_all()
    counters = [driver.scheduler.counters for driver in lives]
    assert sum(c.preemptions for c in counters) > 20
    assert sum(c.shared_prefills for c in counters) > 20
    assert sum(c.found_tokens for c in counters) > 20
    assert sum(c.ends[Finish.INTERRUPT] for c in counters) > 20
    assert sum(driver.runner.bursts for driver in lives) > 20
    assert sum(driver.runner.bursts_beside_a_prefill for driver in lives) > 20
    assert sum(driver.runner.weights for driver in lives) > 20


def skip_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeRunner, "copy_blocks", lambda self, copies: None)


def write_into_shared_tails(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._admit

    def admit(self: Scheduler, sequence: Sequence) -> int | None:
        sequence.num_computed -= sequence.num_computed % self._block_size  # the tail looks full: no copy
        return real(self, sequence)

    patch.setattr(Scheduler, "_admit", admit)


def forget_a_release(patch: pytest.MonkeyPatch) -> None:
    real, calls = BlockPool.release, Counter[str]()

    def release(self: BlockPool, blocks: np.ndarray) -> None:
        calls["release"] += 1
        real(self, blocks[: len(blocks) - (calls["release"] % 7 == 0)])

    patch.setattr(BlockPool, "release", release)


def register_a_partly_filled_block(patch: pytest.MonkeyPatch) -> None:
    def remember(self: Scheduler, row: int) -> None:
        rows = self.rows
        if self._prefixes is not None and rows.sequence(row).weights == self._weights:
            blocks = rows.blocks[row, : rows.num_blocks[row]]
            self._prefixes.register(rows.tokens[row, : rows.length[row]], blocks, self._weights)

    patch.setattr(Scheduler, "_remember", remember)


def ignore_the_version_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "_root", lambda weights: -1)
    patch.setattr(PrefixCache, "clear", lambda self: None)


def register_what_two_versions_computed(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._remember

    def remember(self: Scheduler, row: int) -> None:
        self.rows.sequence(row).weights = self._weights
        real(self, row)

    patch.setattr(Scheduler, "_remember", remember)


def keep_what_comes_after_a_stop(patch: pytest.MonkeyPatch) -> None:
    real = Rows.cut

    def cut(self: Rows, rows_R: np.ndarray, tokens_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        _, is_stop_R = real(self, rows_R, tokens_RS)
        return np.minimum(self.limit[rows_R] - self.length[rows_R], tokens_RS.shape[1]), is_stop_R

    patch.setattr(Rows, "cut", cut)


def count_dropped_tokens_as_computed(patch: pytest.MonkeyPatch) -> None:
    real = Rows.append

    def append(self: Rows, rows_R: np.ndarray, tokens_RS: np.ndarray, *rest: Any) -> None:
        before = self.num_computed[rows_R]
        real(self, rows_R, tokens_RS, *rest)
        if tokens_RS.shape[1] > 1:
            self.num_computed[rows_R] = before + tokens_RS.shape[1]

    patch.setattr(Rows, "append", append)


def take_what_was_drawn_for_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Stepper, "_still_there", lambda self, flight, drawn: (flight.schedule.decode_R, drawn))


def preempt_what_is_about_to_be_prefilled(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._reserve_burst
    patch.setattr(Scheduler, "_reserve_burst", lambda self, *, may_preempt: real(self, may_preempt=True))


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    skip_copies,
    write_into_shared_tails,
    forget_a_release,
    register_a_partly_filled_block,
    ignore_the_version_key,
    register_what_two_versions_computed,
    keep_what_comes_after_a_stop,
    count_dropped_tokens_as_computed,
    preempt_what_is_about_to_be_prefilled,
    take_what_was_drawn_for_another,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        play_all()
