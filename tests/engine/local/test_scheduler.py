"""Random arrivals, aborts and tiny budgets: every request ends, nothing leaks, and the text is what it is alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from temper.engine.local.scheduler import Scheduler
from temper.engine.local.sequence import Sequence
from temper.types import Completion, Finish, Request, SamplingParams

STOP = 0


def next_token(tokens: list[int]) -> int:
    """A deterministic stand-in for the model: depends on the whole sequence, stops now and then."""
    return (sum(tokens) * 7 + len(tokens)) % 11


def alone(request: Request, max_length: int) -> list[int]:
    tokens = list(request.prompt_ids)
    while len(tokens) < min(len(request.prompt_ids) + request.params.max_new_tokens, max_length):
        tokens.append(next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt_ids) :]


class Driver:
    """Runs a scheduler without a model. A shadow of every block proves that cached tokens are the right ones."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = Scheduler(**limits)
        self.block_size = limits["block_size"]
        self.cache = np.full((limits["num_blocks"], self.block_size), -1)
        self.done: dict[str, Completion] = {}

    def add(self, request: Request) -> None:
        def deliver(completion: Completion) -> None:
            assert request.id not in self.done, "delivered twice"
            self.done[request.id] = completion

        self.scheduler.add(Sequence(request, 0, deliver, list(request.prompt_ids)))

    def step(self) -> None:
        scheduler, rows = self.scheduler, self.scheduler.rows
        schedule = scheduler.schedule()
        for source, target in scheduler.counters.copies:
            self.cache[target] = self.cache[source]
        scheduler.counters.copies.clear()
        spans = [(r, rows.length[r] - 1, 1) for r in schedule.decode_R]
        spans += list(zip(schedule.prefill_R, schedule.start_R, schedule.count_R, strict=True))
        assert sum(count for _, _, count in spans) <= scheduler._tokens_per_step
        for row, start, count in spans:
            for position in range(start, start + count):
                block = rows.blocks[row, position // self.block_size]
                # A leader may append behind a prompt that parked followers share: they copy before they write.
                is_own = scheduler.pool._references[block] == 1
                assert is_own or position >= rows.num_prompt[row], "a shared prompt token was overwritten"
                self.cache[block, position % self.block_size] = rows.tokens[row, position]
        drawing = scheduler.advance(schedule)
        self._check_cache(drawing)
        followers = scheduler.followers_of(drawing)
        parked = []
        for place, follower in followers:
            follower.token_ids.append(next_token(follower.token_ids))
            follower.logprobs.append(0.0)
            follower.versions.append(0)
            if follower.token_ids[-1] == STOP or len(follower.token_ids) >= scheduler.limit_of(follower):
                follower.complete(Finish.STOP)
            else:
                scheduler.fork(int(drawing[place]), follower)
                parked.append(follower)
        scheduler.park(parked)
        tokens = np.asarray([next_token(rows.tokens[r, : rows.length[r]].tolist()) for r in drawing], dtype=np.int64)
        rows.append(drawing, tokens, np.zeros(len(drawing), dtype=np.float32), 0)
        for row, token in zip(drawing.tolist(), tokens.tolist(), strict=True):
            if token == STOP or rows.length[row] >= rows.limit[row]:
                scheduler.finish(row, Finish.STOP)

    def _check_cache(self, drawing: np.ndarray) -> None:
        """Every token before the drawn one is in the row's blocks: what attention will read."""
        rows = self.scheduler.rows
        for row in drawing.tolist():
            length = int(rows.length[row])
            cached = self.cache[rows.blocks[row, : rows.num_blocks[row]]].reshape(-1)[:length]
            assert cached.tolist() == rows.tokens[row, :length].tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_with_the_text_it_has_alone(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    max_length = 24
    driver = Driver(
        max_running=data.draw(st.integers(1, 5)),
        block_size=block_size,
        num_blocks=-(-max_length // block_size) + 1 + data.draw(st.integers(0, 6)),
        tokens_per_step=data.draw(st.integers(16, 40)),
        max_length=max_length,
    )
    requests, aborted = [], set()
    for number in range(data.draw(st.integers(1, 12))):
        prompt = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=9)))
        new = data.draw(st.integers(1, 12))
        request = Request(
            id=str(number), prompt_ids=prompt, params=SamplingParams(max_new_tokens=new, stop_ids=(STOP,))
        )
        requests.append(request)
        driver.add(request)
        for _ in range(data.draw(st.integers(0, 3))):
            driver.step()
        if data.draw(st.integers(0, 5)) == 0:
            victim = str(data.draw(st.integers(0, number)))
            if victim not in driver.done:
                aborted.add(victim)
                driver.scheduler.abort(victim)
    for _ in range(2000):
        if not driver.scheduler.has_work:
            break
        driver.step()
    assert not driver.scheduler.has_work, "the scheduler does not come to an end"
    assert driver.done.keys() == {request.id for request in requests}
    for request in requests:
        completion = driver.done[request.id]
        expected = alone(request, max_length)
        if request.id in aborted:
            assert completion.finish is Finish.ABORT
            expected = expected[: len(completion.token_ids)]
        assert completion.token_ids == expected
    assert not driver.scheduler.pool._references.any(), "a block leaked"
