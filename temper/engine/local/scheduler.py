"""What runs next: chunked prefill and decode under one token budget, over paged blocks.

Owns: waiting requests, rows, blocks; admission, preemption by recomputation, sharing of one prefill by equal prompts.
Refuses: tensors and the model (runner.py). Out of blocks is never a failure: the youngest sequence gives way.
Shapes: _R rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import BlockPool
from temper.engine.local.rows import Rows, Rows_R
from temper.engine.local.sequence import Sequence
from temper.types import Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One engine step. Prefill arrays are parallel; decode rows compute exactly their last token."""

    decode_R: Rows_R
    prefill_R: Rows_R
    start_R: NDArray[np.int64]
    """First position each prefill row computes."""
    count_R: NDArray[np.int64]

    @property
    def is_empty(self) -> bool:
        return not len(self.decode_R) and not len(self.prefill_R)


@dataclass(slots=True)
class Counters:
    """Since they were last read."""

    preemptions: int = 0
    shared_prefills: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks whose contents must be copied before the next step."""


class Scheduler:
    def __init__(
        self, *, max_running: int, block_size: int, num_blocks: int, tokens_per_step: int, max_length: int
    ) -> None:
        self.rows = Rows(max_running, block_size)
        self.pool = BlockPool(num_blocks)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self._leaders: dict[tuple[int, ...], Sequence] = {}
        self._block_size = block_size
        self._tokens_per_step = tokens_per_step
        self._max_length = max_length

    def add(self, sequence: Sequence) -> None:
        """Queues a request. If an equal prompt is still waiting for its prefill, this one follows it."""
        leader = self._leaders.get(sequence.request.prompt_ids)
        if leader is not None:
            leader.followers.append(sequence)
            self.counters.shared_prefills += 1
            return
        self._leaders[sequence.request.prompt_ids] = sequence
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or bool(self.rows.is_active.any())

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(len(leader.followers) for leader in self._leaders.values())

    def schedule(self) -> Schedule:
        """Decode first, then prefills that go on, then new ones, as far as rows, blocks and the budget reach."""
        self._extend_decode_rows()
        decode_R = np.flatnonzero(self._is_decode())
        budget = self._tokens_per_step - len(decode_R)
        chunks: list[tuple[int, int, int]] = []
        for row in np.flatnonzero(self.rows.is_active & ~self._is_decode()).tolist():
            budget -= self._schedule_chunk(row, budget, chunks)
        while self.waiting and budget > 0:
            admitted = self._admit(self.waiting[0])
            if admitted is None:
                if self.rows.is_active.any() or not self._reclaim():
                    break
                continue
            self.waiting.popleft()
            # One that starts from a shared prefill has a single token left to compute: it decodes from the next step.
            if self.rows.num_computed[admitted] == 0:
                budget -= self._schedule_chunk(admitted, budget, chunks)
        rows, starts, counts = np.asarray(chunks, dtype=np.int64).reshape(-1, 3).T
        return Schedule(decode_R=decode_R, prefill_R=rows, start_R=starts, count_R=counts)

    def advance(self, schedule: Schedule) -> Rows_R:
        """Marks the step as computed; returns the rows that draw a token now, decode rows first."""
        rows = self.rows
        rows.num_computed[schedule.decode_R] += 1
        rows.num_computed[schedule.prefill_R] += schedule.count_R
        done_R = schedule.prefill_R[rows.num_computed[schedule.prefill_R] == rows.length[schedule.prefill_R]]
        return np.concatenate((schedule.decode_R, done_R))

    def followers_of(self, rows_R: Rows_R) -> list[tuple[int, Sequence]]:
        """(place in rows_R, sequence) of every request that may start from a prompt just computed."""
        found = []
        for place, row in enumerate(rows_R.tolist()):
            leader = self.rows.sequences[int(row)]
            assert leader is not None, "a row that draws holds a sequence"
            if self._leaders.get(leader.request.prompt_ids) is leader:
                del self._leaders[leader.request.prompt_ids]
                found += [(place, follower) for follower in leader.followers]
                leader.followers = []
        return found

    def fork(self, row: int, follower: Sequence) -> None:
        """Gives a follower the leader's prompt blocks; it waits with its first token already drawn."""
        num_prompt = follower.num_prompt
        follower.blocks = self.rows.blocks[row, : -(-num_prompt // self._block_size)].copy()
        follower.num_computed = num_prompt
        self.pool.share(follower.blocks)

    def park(self, followers: list[Sequence]) -> None:
        """Followers go before everything else that waits: they hold blocks."""
        self.waiting.extendleft(reversed(followers))

    def finish(self, row: int, finish: Finish) -> None:
        sequence, blocks = self.rows.leave(row)
        self.pool.release(blocks)
        sequence.complete(finish)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is. The followers of an aborted leader go on without it."""
        for row, running in enumerate(self.rows.sequences):
            if running is not None and running.request.id == request_id:
                self._drop_leader(running)
                self.finish(row, Finish.ABORT)
                return
        for sequence in list(self.waiting):
            if sequence.request.id == request_id:
                self.waiting.remove(sequence)
                self._drop_leader(sequence)
                self.release(sequence)
                sequence.complete(Finish.ABORT)
                return
        for leader in self._leaders.values():
            for follower in leader.followers:
                if follower.request.id == request_id:
                    leader.followers.remove(follower)
                    follower.complete(Finish.ABORT)
                    return

    def release(self, sequence: Sequence) -> None:
        """Gives back the blocks a waiting sequence holds."""
        self.pool.release(sequence.blocks)
        sequence.blocks = sequence.blocks[:0]
        sequence.num_computed = 0

    def limit_of(self, sequence: Sequence) -> int:
        """Longest this sequence may become, prompt included."""
        return min(sequence.num_prompt + sequence.request.params.max_new_tokens, self._max_length)

    def _is_decode(self) -> NDArray[np.bool_]:
        rows = self.rows
        return rows.is_active & (rows.length - rows.num_computed == 1) & (rows.num_computed > 0)

    def _extend_decode_rows(self) -> None:
        """A block for every decode row whose next token starts one; the youngest rows give way when there are none."""
        rows = self.rows
        while True:
            lacking_R = np.flatnonzero(self._is_decode() & (rows.num_blocks * self._block_size < rows.length))
            if len(lacking_R) <= self.pool.num_free:
                break
            self._preempt_youngest()
        fresh = self.pool.take(len(lacking_R))
        rows.blocks[lacking_R, rows.num_blocks[lacking_R]] = fresh
        rows.num_blocks[lacking_R] += 1

    def _preempt_youngest(self) -> None:
        active = np.flatnonzero(self.rows.is_active)
        row = int(active[np.argmax(self.rows.arrival[active])])
        sequence, blocks = self.rows.leave(row)
        self.pool.release(blocks)
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _schedule_chunk(self, row: int, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        start = int(self.rows.num_computed[row])
        count = min(int(self.rows.length[row]) - start, budget)
        if count <= 0:
            return 0
        chunks.append((row, start, count))
        return count

    def _admit(self, sequence: Sequence) -> int | None:
        """Moves a waiting sequence into a row with blocks for its known tokens, or None if there is no room."""
        length, held = len(sequence.token_ids), len(sequence.blocks)
        shares_tail = held > 0 and sequence.num_computed % self._block_size != 0
        needed = -(-length // self._block_size) - held + int(shares_tail)
        if self.rows.num_free == 0 or needed > self.pool.num_free:
            return None
        row = self.rows.enter(sequence, self.limit_of(sequence))
        fresh = self.pool.take(needed)
        if shares_tail:
            # Copy on write, done now because the very next token is written into this block.
            tail = int(self.rows.blocks[row, held - 1])
            self.counters.copies.append((tail, int(fresh[0])))
            self.rows.blocks[row, held - 1] = fresh[0]
            self.pool.release(np.asarray([tail]))
            fresh = fresh[1:]
        self.rows.add_blocks(row, fresh)
        sequence.blocks = sequence.blocks[:0]
        return row

    def _reclaim(self) -> bool:
        """Nothing runs and the first in line does not fit: the last that waits with blocks gives them up."""
        for sequence in reversed(self.waiting):
            if len(sequence.blocks):
                self.release(sequence)
                return True
        return False

    def _drop_leader(self, sequence: Sequence) -> None:
        """An aborted leader hands its followers to the first of them."""
        prompt = sequence.request.prompt_ids
        if self._leaders.get(prompt) is not sequence:
            return
        del self._leaders[prompt]
        if sequence.followers:
            heir, *rest = sequence.followers
            heir.followers, sequence.followers = rest, []
            self._leaders[prompt] = heir
            self.waiting.append(heir)
