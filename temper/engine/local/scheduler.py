"""What runs next: chunked prefill and decode under one token budget, over paged blocks.

Owns: waiting requests, rows, blocks; admission behind a known prefix, preemption by recomputation, sharing of one
prefill by equal prompts, which keys and values were computed by which weights.
Refuses: tensors and the model (runner.py). Out of blocks is never a failure: the youngest sequence gives way.
Shapes: _R rows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import BlockPool, Blocks
from temper.engine.local.prefix import PrefixCache
from temper.engine.local.rows import TOKEN, Rows, Rows_R
from temper.engine.local.sequence import NO_ROW, Sequence
from temper.models.experts.routes import Recorded
from temper.types import Completion, Finish

ReadRoutes = Callable[[Blocks, int, int], Recorded]
"""(blocks of a row, first position, position behind the last) -> experts of these tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One engine step. Prefill arrays are parallel; decode rows compute exactly their last token."""

    decode_R: Rows_R
    prefill_R: Rows_R
    start_R: NDArray[np.int64]
    """First position each prefill row computes."""
    count_R: NDArray[np.int64]
    steps: int = 1
    """Tokens each decode row computes and draws before the host looks again."""

    @property
    def is_empty(self) -> bool:
        return not len(self.decode_R) and not len(self.prefill_R)


@dataclass(slots=True)
class Counters:
    """Counts since the start of the engine."""

    preemptions: int = 0
    shared_prefills: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that were looked up in the prefix cache."""
    found_tokens: int = 0
    """Prompt tokens that were found in the prefix cache and need not be computed."""
    ends: Counter[Finish] = field(default_factory=Counter)


class Leaders:
    """Requests with the same prompt that wait for its prefill: the first leads, the others follow."""

    def __init__(self) -> None:
        self._by_prompt: dict[tuple[int, ...], Sequence] = {}

    def join(self, sequence: Sequence) -> bool:
        """Whether there is one to follow; otherwise this one leads."""
        leader = self._by_prompt.setdefault(sequence.request.prompt_ids, sequence)
        if leader is not sequence:
            leader.followers.append(sequence)
        return leader is not sequence

    def dissolve(self, sequence: Sequence) -> list[Sequence]:
        """Who followed this sequence; it no longer leads."""
        if self._by_prompt.get(sequence.request.prompt_ids) is not sequence:
            return []
        del self._by_prompt[sequence.request.prompt_ids]
        followers, sequence.followers = sequence.followers, []
        return followers

    def leave(self, follower: Sequence) -> None:
        self._by_prompt[follower.request.prompt_ids].followers.remove(follower)


class RouteKeeper:
    """Takes the routes of experts from the device before the blocks of a row are given away."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.read: ReadRoutes | None = None
        """None: they are not recorded."""
        self._none: Recorded | None = None
        """Those of no token, once they were read."""

    @property
    def none(self) -> Recorded | None:
        """What a request begins with. One that ends before it runs tells that it has no routes yet, not that nobody
        records them: text that is joined to it keeps its own."""
        if self._none is None and self.read is not None:
            self._none = self.read(np.empty(0, dtype=np.int64), 0, 0)
        return self._none

    def keep(self, row: int) -> None:
        """Those of what was computed since the last look. A token that is computed again, after preemption or under new
        weights, keeps its first: by that the token behind it was drawn."""
        if self.read is None:
            return
        rows, sequence = self._rows, self._rows.sequence(row)
        assert sequence.routes is not None, "a sequence begins with those of no token"
        known = len(sequence.routes)
        fresh = self.read(rows.blocks[row], known, max(known, int(rows.num_computed[row])))
        sequence.routes = np.concatenate((sequence.routes, fresh))

    def lend(self, row: int, follower: Sequence) -> None:
        """Those of the leader's prompt are the follower's own, whatever becomes of the blocks."""
        self.keep(row)
        if (routes := self._rows.sequence(row).routes) is not None:
            follower.routes = routes[: follower.num_prompt]


class Scheduler:
    def __init__(
        self, *, max_running: int, block_size: int, num_blocks: int, tokens_per_step: int, max_length: int,
        steps_per_sync: int = 1, prefix_cache: bool = True,
    ) -> None:  # fmt: skip
        self.rows = Rows(max_running, block_size, overshoot=steps_per_sync)
        self.routes = RouteKeeper(self.rows)
        self.pool = BlockPool(num_blocks)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.live: dict[str, Sequence] = {}
        """Every request that has not ended, by id."""
        self.copies: list[tuple[int, int]] = []
        """(from, to): blocks whose contents must be copied before the next step."""
        self._leaders = Leaders()
        self._prefixes = PrefixCache(self.pool, block_size) if prefix_cache else None
        self._weights = 0
        """How often the weights changed. Not their version: one version may be loaded twice, with other tensors."""
        self._block_size = block_size
        self._tokens_per_step = tokens_per_step
        self._max_length = max_length
        self._steps_per_sync = steps_per_sync

    def add(self, sequence: Sequence) -> None:
        """Queues a request. If an equal prompt is still waiting for its prefill, this one follows it."""
        assert sequence.request.id not in self.live, "the id of a request that has not ended"
        self.live[sequence.request.id] = sequence
        if self._leaders.join(sequence):
            self.counters.shared_prefills += 1
        else:
            self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    @property
    def num_running(self) -> int:
        return len(self.rows.is_active) - self.rows.num_free

    @property
    def num_waiting(self) -> int:
        return len(self.live) - self.num_running

    def schedule(self) -> Schedule:
        """Decode first, then prefills that go on, then new ones, as far as rows, blocks and the budget reach."""
        self._extend_decode_rows(1)
        is_decode = self.rows.is_decode()
        budget = self._tokens_per_step - int(is_decode.sum())
        chunks: list[tuple[int, int, int]] = []
        for row in np.flatnonzero(self.rows.is_active & ~is_decode).tolist():
            budget -= self._schedule_chunk(row, budget, chunks)
        while self.waiting and budget > 0:
            admitted = self._admit(self.waiting[0])
            if admitted is None:
                if self.rows.is_active.any() or not self._reclaim():
                    break
                continue
            self.waiting.popleft()
            is_prefill = self.rows.is_prefill(admitted)
            budget -= self._schedule_chunk(admitted, budget, chunks) if is_prefill else 1
        steps = self._reserve_burst(may_preempt=not chunks)
        rows, starts, counts = np.asarray(chunks, dtype=np.int64).reshape(-1, 3).T
        decode_R = np.flatnonzero(self.rows.is_decode())
        return Schedule(decode_R=decode_R, prefill_R=rows, start_R=starts, count_R=counts, steps=steps)

    def advance(self, schedule: Schedule) -> Rows_R:
        """Marks the prefill as computed; returns the rows that draw their first token now."""
        rows = self.rows
        rows.num_computed[schedule.prefill_R] += schedule.count_R
        done_R = schedule.prefill_R[rows.num_computed[schedule.prefill_R] == rows.length[schedule.prefill_R]]
        for row in done_R.tolist():
            self._remember(row)
        return done_R

    def followers_of(self, rows_R: Rows_R) -> list[tuple[int, Sequence]]:
        """(place in rows_R, sequence) of every request that may start from a prompt just computed."""
        found = []
        for place, row in enumerate(rows_R.tolist()):
            found += [(place, follower) for follower in self._leaders.dissolve(self.rows.sequence(row))]
        return found

    def fork(self, row: int, follower: Sequence) -> None:
        """Gives a follower the leader's prompt blocks; it waits with its first token already drawn."""
        num_prompt = follower.num_prompt
        follower.blocks = self.rows.blocks[row, : -(-num_prompt // self._block_size)].copy()
        follower.num_computed, follower.weights = num_prompt, self.rows.sequence(row).weights
        self.pool.share(follower.blocks)

    def park(self, followers: list[Sequence]) -> None:
        """Followers go before everything else that waits: they hold blocks."""
        self.waiting.extendleft(reversed(followers))

    def finish(self, row: int, finish: Finish) -> None:
        self.end(self._leave(row), finish)

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """Ends a sequence, which holds no blocks and no row any more."""
        del self.live[sequence.request.id]
        self.counters.ends[finish] += 1
        sequence.deliver(sequence.completion(finish))

    def stop(self, request_id: str, finish: Finish) -> None:
        """Ends a request wherever it is. The followers of a stopped leader go on without it."""
        sequence = self.live.get(request_id)
        if sequence is None:
            return
        if sequence.row != NO_ROW:
            self._leave(sequence.row)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.release(sequence)
        else:
            self._leaders.leave(sequence)
        self._drop_leader(sequence)
        self.end(sequence, finish)

    def change_weights(self, *, recompute: bool) -> None:
        """What was computed so far is not found again; with `recompute` nothing of it is used again either."""
        self._weights += 1
        if recompute:
            while self.rows.is_active.any():
                self._preempt_youngest()
            for sequence in self.waiting:
                self.release(sequence)
        for row in np.flatnonzero(self.rows.is_active).tolist():
            # A part of its prompt is of the old weights: requests that follow it start afresh.
            self._drop_leader(self.rows.sequence(row))
        if self._prefixes is not None:
            self._prefixes.clear()

    def release(self, sequence: Sequence) -> None:
        """Gives back the blocks a waiting sequence holds."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = sequence.blocks[:0], 0

    def limit_of(self, sequence: Sequence) -> int:
        """Longest this sequence may become, prompt included."""
        return min(sequence.num_prompt + sequence.request.params.max_new_tokens, self._max_length)

    def _reserve_burst(self, *, may_preempt: bool) -> int:
        """How many tokens every decode row draws at once. Those beyond its limit go to the scratch block."""
        rows, steps, decode_R = self.rows, self._steps_per_sync, np.flatnonzero(self.rows.is_decode())
        is_plain = len(decode_R) > 0 and rows.draws(decode_R).is_plain
        if steps == 1 or not is_plain or not self._extend_decode_rows(steps, may_preempt=may_preempt):
            return 1
        decode_R = np.flatnonzero(self.rows.is_decode())
        return min(steps, int((rows.limit[decode_R] - rows.length[decode_R]).max(initial=1)))

    def _extend_decode_rows(self, steps: int, *, may_preempt: bool = True) -> bool:
        """Blocks for the next tokens of every decode row; the youngest rows give way when there are none, unless one of
        them is about to be prefilled. False: several steps are more than there is room for."""
        rows = self.rows
        while True:
            decode_R = np.flatnonzero(self.rows.is_decode())
            # The last token a row may draw is never computed.
            ahead_R = np.minimum(steps, rows.limit[decode_R] - rows.length[decode_R]) - 1
            blocks_R = -(-(rows.length[decode_R] + ahead_R) // self._block_size)
            lacking_R = np.maximum(blocks_R - rows.num_blocks[decode_R], 0)
            if (needed := int(lacking_R.sum())) <= self.pool.num_free:
                break
            if not may_preempt or (steps > 1 and self.num_running == 1):
                return False
            self._preempt_youngest()
            self.counters.preemptions += 1
        if needed:
            rows.extend(decode_R, lacking_R, self.pool.take(needed))
        return True

    def _preempt_youngest(self) -> None:
        active = np.flatnonzero(self.rows.is_active)
        row = int(active[np.argmax(self.rows.arrival[active])])
        self.waiting.appendleft(self._leave(row))

    def _leave(self, row: int) -> Sequence:
        """Takes a sequence out of its row. Its full blocks can be found again."""
        self._remember(row)
        self.routes.keep(row)
        sequence, blocks = self.rows.leave(row)
        self.pool.release(blocks)
        return sequence

    def _remember(self, row: int) -> None:
        """Registers the full blocks of a row, unless the weights changed since the first of them."""
        rows = self.rows
        if self._prefixes is not None and rows.sequence(row).weights == self._weights:
            blocks = rows.blocks[row, : rows.num_blocks[row]]
            self._prefixes.register(rows.tokens[row, : rows.num_computed[row]], blocks, self._weights)

    def _schedule_chunk(self, row: int, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        start = int(self.rows.num_computed[row])
        count = min(int(self.rows.length[row]) - start, budget)
        if count > 0:
            chunks.append((row, start, count))
        return max(count, 0)

    def _admit(self, sequence: Sequence) -> int | None:
        """Moves a waiting sequence into a row with blocks for its known tokens, or None if there is no room."""
        if self.rows.num_free == 0:
            return None
        known = self._known(sequence)
        length, held = len(sequence.token_ids), len(sequence.blocks) or len(known)
        shares_tail = len(sequence.blocks) > 0 and sequence.num_computed % self._block_size != 0
        needed = -(-length // self._block_size) - held + int(shares_tail)
        if needed + self.pool.num_idle(known) > self.pool.num_free:
            return None
        if not len(sequence.blocks):
            self._start_behind(sequence, known)
        row = self.rows.enter(sequence, self.limit_of(sequence))
        fresh = self.pool.take(needed)
        if shares_tail:
            # Copy on write, done now because the very next token is written into this block.
            tail = int(self.rows.blocks[row, held - 1])
            self.copies.append((tail, int(fresh[0])))
            self.rows.blocks[row, held - 1] = fresh[0]
            self.pool.release(np.asarray([tail]))
            fresh = fresh[1:]
        self.rows.add_blocks(row, fresh)
        sequence.blocks = sequence.blocks[:0]
        return row

    def _known(self, sequence: Sequence) -> Blocks:
        """Blocks of the longest known prefix of a sequence that holds none, without its last token: that is computed
        in any case, to draw the next one."""
        if self._prefixes is None or len(sequence.blocks):
            return np.empty(0, dtype=np.int64)
        return self._prefixes.find(np.asarray(sequence.token_ids[:-1], dtype=TOKEN), self._weights)

    def _start_behind(self, sequence: Sequence, known: Blocks) -> None:
        self.pool.share(known)
        sequence.blocks, sequence.weights = known, self._weights
        sequence.num_computed = len(known) * self._block_size
        if len(sequence.token_ids) == sequence.num_prompt:
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.found_tokens += sequence.num_computed

    def _reclaim(self) -> bool:
        """Nothing runs and the first in line does not fit: the last that waits with blocks gives them up."""
        for sequence in reversed(self.waiting):
            if len(sequence.blocks):
                self.release(sequence)
                return True
        return False

    def _drop_leader(self, sequence: Sequence) -> None:
        """Whoever follows this sequence does without it: the first of them leads the others."""
        for place, follower in enumerate(self._leaders.dissolve(sequence)):
            self._leaders.join(follower)
            if place == 0:
                self.waiting.append(follower)


def so_far(scheduler: Scheduler, request_id: str, least: int) -> Completion | None:
    """What a request that goes on has drawn; None: less than so many tokens, or there is no such request."""
    sequence = scheduler.live.get(request_id)
    if sequence is None:
        return None
    if (row := sequence.row) != NO_ROW:
        if scheduler.rows.length[row] - sequence.num_prompt < least:
            return None
        scheduler.routes.keep(row)
        sequence = scheduler.rows.look(row)
    is_long = len(sequence.token_ids) - sequence.num_prompt >= least
    return sequence.completion(Finish.INTERRUPT) if is_long else None
