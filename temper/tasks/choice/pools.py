"""pools: easy, middle and hard prompts in shares that move over the steps, a curriculum by running pass rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from temper.errors import UserError
from temper.tasks.choice.chooser import Chooser, Look, StageFacts
from temper.types import Group, PromptHistory

EASY, MIDDLE, HARD, UNSEEN = "easy", "middle", "hard", "unseen"
POOLS = (EASY, MIDDLE, HARD)


class Pools(Chooser):
    """Every draw asks for one pool, by the shares of its step: they go in a straight line from those of the start to
    those of the end, and what easy and hard leave is the middle's. Prompts that were never seen belong to all pools.
    The share of a pool without prompts goes to the others."""

    name = "pools"

    def __init__(
        self,
        *,
        easy_from: float = 0.75,
        hard_to: float = 0.25,
        easy_start: float = 0.5,
        easy_end: float = 0.1,
        hard_start: float = 0.1,
        hard_end: float = 0.4,
        steps: int = 0,
    ) -> None:
        """`easy_from`, `hard_to`: prompts with at least that running pass rate are easy, with at most this one hard.
        `easy_start`, `easy_end`, `hard_start`, `hard_end`: shares of draws. `steps`: from the first shares to the last;
        0: as many as the stage has."""
        if not 0 <= hard_to < easy_from <= 1:
            raise UserError(
                f"data.choose: {self.name}: hard_to={hard_to:g} must be below easy_from={easy_from:g}, both within 0 "
                f"and 1"
            )
        if steps < 0:
            raise UserError(f"data.choose: {self.name}: steps={steps} must be 0 (those of the stage) or more")
        self._easy_from, self._hard_to, self._steps = easy_from, hard_to, steps
        self._ends = (self._whole(easy_start, hard_start, "start"), self._whole(easy_end, hard_end, "end"))
        self._shares: dict[str, dict[str, float]] = {}
        """By source: a draw has its source before it asks for a pool, and a pool may be empty in one of them alone."""

    def _whole(self, easy: float, hard: float, when: str) -> dict[str, float]:
        if min(easy, hard) < 0 or easy + hard > 1:
            raise UserError(
                f"data.choose: {self.name}: easy_{when}={easy:g} and hard_{when}={hard:g} are shares of draws: neither "
                f"is below 0, and together they are at most 1"
            )
        return {EASY: easy, MIDDLE: max(0.0, 1 - easy - hard), HARD: hard}

    def open(self, facts: StageFacts) -> None:
        self._steps = self._steps or facts.steps

    def pool_of(self, history: PromptHistory | None) -> str:
        if history is None or history.rate is None:
            return UNSEEN
        return EASY if history.rate >= self._easy_from else HARD if history.rate <= self._hard_to else MIDDLE

    def look_around(self, known: Collection[PromptHistory], step: int) -> None:
        sizes = Counter((history.source, self.pool_of(history)) for history in known)
        # The first draws are of step 1: a curriculum of n steps begins there and ends with step n.
        done = min(1.0, step / max(1, self._steps - 1))
        first, last = self._ends
        shares = {pool: (1 - done) * first[pool] + done * last[pool] for pool in POOLS}
        for source in {history.source for history in known}:
            there = {pool: shares[pool] if sizes[source, pool] else 0.0 for pool in POOLS}
            self._shares[source] = there if sum(there.values()) > 0 else shares

    def wants(self, look: Look) -> bool:
        pool = self.pool_of(look.history)
        if look.history is None or pool == UNSEEN:
            return True
        return pool == _pick(self._shares[look.history.source], look.chance_of_draw(self.name))

    def learn(self, groups: Sequence[Group], before: Mapping[str, PromptHistory]) -> dict[str, float]:
        drawn = Counter(self.pool_of(before.get(group.task.id)) for group in groups)
        return {f"data/pool_{pool}": drawn[pool] / max(1, len(groups)) for pool in (*POOLS, UNSEEN)}


def _pick(shares: Mapping[str, float], chance: float) -> str:
    left = chance * sum(shares.values())
    for pool, share in shares.items():
        left -= share
        if left < 0:
            return pool
    return max(shares, key=lambda pool: shares[pool])  # rounding has left nothing
