"""What a sampler process runs in tests that are about processes: the real server over a sampler without torch."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from temper.children import die_with_parent
from temper.engine.process.server import serve
from temper.errors import EngineLost
from temper.types import Completion, Finish, Publication, Request

if TYPE_CHECKING:
    from temper.engine.local.warming import ExpectedRequests


class NoWeights:
    """Takes the place of SharedWeights: tells the version alone."""

    def put(self, start: int, data: Any, size: int) -> None:
        """Pieces that are sent are not kept."""

    def read(self, told: Mapping[str, Any]) -> Publication:
        return Publication(version=told["version"], tensors={})


class FakeSampler:
    """A prompt's first token says what happens: 0 an answer at once, 1 none for a long time, 2 a step that blocks the
    whole process for a long time, 3 a crash, 4 an engine that is lost."""

    def __init__(self) -> None:
        self.version = 0

    async def generate(self, request: Request) -> Completion:
        if request.prompt_ids[0] == 1:
            await asyncio.sleep(600)
        if request.prompt_ids[0] == 2:
            print("a long step begins", flush=True)
            time.sleep(600)
        if request.prompt_ids[0] == 3:
            print("the ceiling came down", file=sys.stderr, flush=True)
            os._exit(5)
        if request.prompt_ids[0] == 4:
            raise EngineLost("the cellar is flooded")
        return Completion(prompt_ids=(0,), token_ids=[1], logprobs=[-1.0], versions=[self.version], finish=Finish.STOP)

    async def load(self, publication: Publication) -> None:
        self.version = publication.version

    def stats(self) -> dict[str, float]:
        return {}

    def so_far(self, least: Mapping[str, int]) -> dict[str, Completion]:
        return {}

    async def abort(self, request_id: str) -> None:
        """There is nothing to end."""

    async def interrupt(self, request_id: str) -> None:
        """There is nothing to end."""

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None:
        """One kernel for each row, a second for each token of a prompt, and the process does nothing else meanwhile."""
        for done in range(expected.num_rows):
            tell(done, expected.num_rows)
            time.sleep(expected.prompt_tokens)

    async def close(self) -> None:
        """There is nothing to close."""


async def open_fake(order: str) -> FakeSampler:
    if order == "slow":
        time.sleep(600)
    return FakeSampler()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[2])), NoWeights(), open_fake))  # type: ignore[arg-type]
