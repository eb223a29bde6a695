"""A sampler whose answers are of very different lengths: each of them takes as many seconds as it has tokens.

Owns: time, versions by token, interruption and resumption as in a real engine; no model. Needs a virtual clock.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping

from temper.types import Completion, Finish, Publication, Request

LETTER, STOP = 120, 1


def heavy_tail(share: float = 0.1, short: int = 8, factor: int = 8) -> Callable[[str], int]:
    """Lengths by name: a share of all is `factor` times as long as the others, which are `short` or a little less."""

    def length(name: str) -> int:
        random_ = random.Random(name)
        return (short - random_.randrange(short // 2)) * (factor if random_.random() < share else 1)

    return length


def draw_of(request_id: str) -> str:
    """'stage 0/task#7/1/0' is of 'task#7': all answers of one group are equally long."""
    return request_id.split("/")[1]


class TailSampler:
    """Implements protocols.Sampler. A token is drawn in a second, whoever else is drawn for."""

    def __init__(self, length_of: Callable[[str], int], name_of: Callable[[str], str] = draw_of) -> None:
        self._length_of, self._name_of = length_of, name_of
        self._loaded_at, self._versions = [-1.0], [0]
        """When each publication came, and its version."""
        self._prompts: dict[str, int] = {}
        """Length of the prompt that a request had when it was first seen."""
        self._running: dict[str, asyncio.Future[Finish]] = {}
        self.requests: list[Request] = []
        self.tokens_drawn = 0
        self.most_running = 0
        self.counted: dict[str, float] = {}
        """What stats() says."""

    @property
    def version(self) -> int:
        return self._versions[-1]

    async def generate(self, request: Request) -> Completion:
        assert request.id not in self._running, f"{request.id} is running already"
        self.requests.append(request)
        before = len(request.prompt_ids) - self._prompts.setdefault(request.id, len(request.prompt_ids))
        wanted = self._length_of(self._name_of(request.id)) - before
        count = min(wanted, request.params.max_new_tokens)
        ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()
        natural = Finish.STOP if count == wanted else Finish.LENGTH
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.seconds_of(count), lambda: ended.done() or ended.set_result(natural))
        self._running[request.id], started = ended, loop.time()
        self.most_running = max(self.most_running, len(self._running))
        try:
            finish = await ended
        finally:
            timer.cancel()
            del self._running[request.id]
            drawn = count if ended.done() and ended.result() is natural else min(int(loop.time() - started), count)
            self.tokens_drawn += drawn
        tokens = [
            STOP if finish is Finish.STOP and place == count - 1 else LETTER + place % 2 for place in range(drawn)
        ]
        first = len(request.prompt_ids)
        params = request.params
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=[-1.0 - 0.125 * ((first + place) % 8) for place in range(drawn)],
            versions=[self._version_at(started + place) for place in range(drawn)],
            finish=finish,
            top_ids=[[token, token + 1] for token in tokens] if params.top_logprobs else None,
            top_logprobs=[[-0.5, -1.0]] * drawn if params.top_logprobs else None,
            keep_ids=[list(range(token, token + 1 + (first + place) % 3)) for place, token in enumerate(tokens)]
            if params.is_truncated
            else None,
            params=params,
        )  # fmt: skip

    def seconds_of(self, count: int) -> float:
        """How long so many tokens take if they begin now."""
        return float(count)

    def _version_at(self, seconds: float) -> int:
        """Of the weights that draw the token that is begun then."""
        return self._versions[bisect_right(self._loaded_at, seconds) - 1]

    async def abort(self, request_id: str) -> None:
        self._end(request_id, Finish.ABORT)

    async def interrupt(self, request_id: str) -> None:
        self._end(request_id, Finish.INTERRUPT)

    def _end(self, request_id: str, finish: Finish) -> None:
        if request_id in self._running and not self._running[request_id].done():
            self._running[request_id].set_result(finish)

    async def load(self, publication: Publication) -> None:
        self._loaded_at.append(asyncio.get_running_loop().time())
        self._versions.append(publication.version)

    def stats(self) -> Mapping[str, float]:
        return dict(self.counted)

    async def close(self) -> None:
        """Nothing to close."""
