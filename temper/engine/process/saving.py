"""What long answers have drawn so far, told on the way: who asked goes on elsewhere when this process dies.

Owns: when an answer has grown enough to be told again. Refuses: making one completion of the pieces (engine/pieces.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from temper.engine.process.wire import Frame, completion_frame
from temper.types import Completion

LOOK_SECONDS = 1.0
"""Between two looks."""
LEAST_TOKENS = 256
"""Shorter answers are drawn anew, sooner than they would have been told."""
GROWTH = 1.5
"""An answer is told whole, with its prompt, when it is so many times as long as when it was told last: all its tellings
together have at most three times its tokens, and its prompt ten times for 8,000 of them. What is lost is about a third
of it, or what a second drew where that is more."""
VERB = "so_far"


class Saver:
    """Of one sampler process. Close run() by cancelling it."""

    def __init__(
        self, so_far: Callable[[Mapping[str, int]], Mapping[str, Completion]], send: Callable[[Frame], None]
    ) -> None:
        """so_far: what was drawn of requests, where it is at least so many tokens."""
        self._so_far, self._send = so_far, send
        self._calls: dict[str, int] = {}
        self._least: dict[str, int] = {}
        """Tokens at which a request is told next."""

    @contextmanager
    def drawing(self, call: int, request_id: str) -> Iterator[None]:
        """While it is open, this request is drawn. A second one of the same name is not: the engine refuses it."""
        if request_id in self._calls:
            yield
            return
        self._calls[request_id], self._least[request_id] = call, LEAST_TOKENS
        try:
            yield
        finally:
            del self._calls[request_id], self._least[request_id]

    async def run(self) -> None:
        """Waits for: nothing but time. Unblocked by: being cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        for request_id, completion in self._so_far(self._least).items():
            self._least[request_id] = int(GROWTH * len(completion.token_ids))
            self._send(completion_frame(self._calls[request_id], completion, VERB))
