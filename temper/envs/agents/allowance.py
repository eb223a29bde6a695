"""What an agent, or an environment that asks a model, may still ask for and draw in its episode.

Owns: how many calls and tokens are left, and which call waits for those of others. Refuses: drawing, and statuses of
episodes (rollout/agents.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from temper.errors import TaskError
from temper.types import Status

LOOK_SECONDS = 15.0
"""For news that do not come: how long a call waits before it looks again."""


class LimitReached(TaskError):
    """The episode may draw nothing more. The agent is told, and may still hand in a result."""

    def __init__(self, message: str, status: Status | None) -> None:
        """status: that an episode has which was refused for what it has used up. None: it asked for more than any
        episode has, which is nothing that the policy did."""
        super().__init__(message)
        self.status = status


class Allowance:
    """Calls and tokens of one episode. A call under way holds the most that it may draw until it has ended.

    A call that finds too little beside what others hold waits for them, the first that came first: most draw less than
    they hold. So no answer is shortened, and none is refused, for tokens that nobody draws.
    """

    def __init__(self, *, max_calls: int, max_tokens: int, told: str, seconds: float) -> None:
        """max_tokens: 0: no limit. told: what a client hears when none are left. seconds: longest that a call waits,
        the time of the episode."""
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._told = told
        self._seconds = seconds
        self._num_calls = self._num_drawn = self._num_held = 0
        self._waiting: list[object] = []
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_over = False

    async def take(self, longest: Sequence[int]) -> list[int]:
        """Most tokens that each of these calls may draw, at least one, held until end_call() or give_back(). Raises
        LimitReached, and TaskError once the episode is over; then nothing is taken."""
        self._require_calls(len(longest))
        place = object()
        self._waiting.append(place)
        try:
            deadline = time.monotonic() + self._seconds
            while self._waiting[0] is not place or self._must_wait(sum(longest)):
                left = deadline - time.monotonic()
                if self._is_over or left <= 0:
                    raise TaskError("the episode is over")
                await asyncio.wait((self._news,), timeout=min(left, LOOK_SECONDS))
            return self._share(longest)
        finally:
            self._waiting.remove(place)
            self._tell()

    def end_call(self, held: int, drawn: int) -> None:
        """Counts what a call has drawn, and gives back the rest of what it held."""
        self._num_held -= held
        self._num_drawn += drawn
        self._tell()

    def give_back(self, held: int) -> None:
        """Takes back a call that no sampler has answered: it uses nothing up."""
        self._num_calls -= 1
        self.end_call(held, 0)

    def end(self) -> None:
        """From now on nobody waits."""
        self._is_over = True
        self._tell()

    def _tell(self) -> None:
        self._news.set_result(None)
        self._news = asyncio.get_running_loop().create_future()

    @property
    def _left(self) -> int:
        """Tokens that nobody has drawn or holds, where they are limited."""
        return self._max_tokens - self._num_drawn - self._num_held

    def _must_wait(self, wanted: int) -> bool:
        return bool(self._max_tokens) and self._left < wanted and self._num_held > 0

    def _share(self, longest: Sequence[int]) -> list[int]:
        """Shortened evenly where too little is left; what one does not want goes to those behind it."""
        count = len(longest)
        self._require_calls(count)
        if self._max_tokens and self._left < count:
            status = Status.TRUNCATED_LENGTH if count <= self._max_tokens else None
            raise LimitReached(self._told + _but(self._left, count), status)
        granted: list[int] = []
        for place, wish in enumerate(longest):
            share = (self._left - sum(granted)) // (count - place) if self._max_tokens else wish
            granted.append(min(wish, share))
        self._num_calls += count
        self._num_held += sum(granted)
        return granted

    def _require_calls(self, wanted: int) -> None:
        left = self._max_calls - self._num_calls
        if wanted > left:
            told = f"the episode has made its {self._max_calls} calls (rollout.max_turns)"
            status = Status.TRUNCATED_TURNS if wanted <= self._max_calls else None
            raise LimitReached(told + _but(left, wanted), status)


def _but(left: int, wanted: int) -> str:
    return f", but for {left}, and {wanted} answers are asked for at once" if left > 0 else ""
