"""Whatever happens to a request on its way, it tells the experts that a plain pass over its text chooses."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.pieces import PiecedAnswer
from temper.types import Completion, Finish, Request, SamplingParams
from tests.models.experts.test_routes import make_model, own_routes, recorded

NUM_TOKENS = 59
LONGEST = 56
SEEDS = (0, 6, 9, 13, 17, 29)


@cache
def model() -> Any:
    return make_model()


@dataclass
class Crowd:
    """Episodes of one or two turns at one engine, whose prompts begin alike and which are interrupted now and then."""

    seed: int

    def __post_init__(self) -> None:
        self._draw = draw = random.Random(self.seed)
        settings = EngineSettings(
            seed=self.seed, max_length=LONGEST, routes=True, prefix_cache=draw.random() < 0.8, block_size=4,
            num_blocks=draw.choice([15, 16, 40]), max_running=draw.choice([2, 4, 6]),
            tokens_per_step=draw.choice([6, 16, 64]),
        )  # fmt: skip
        self.engine = LocalEngine(model(), settings)
        self._starts = [self._text(draw.randrange(1, 20)) for _ in range(3)]
        self.answers: list[Completion] = []

    def _text(self, length: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(NUM_TOKENS) for _ in range(length))

    async def run(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(self._episode(number) for number in range(self._draw.randrange(4, 9))))

    async def _episode(self, number: int) -> None:
        draw = self._draw
        prompt = draw.choice(self._starts)
        if draw.random() < 0.3:
            prompt += self._text(draw.randrange(1, 4))
        for turn in range(draw.randrange(1, 3)):
            most = draw.choice([1, 1, 3, 16])
            if len(prompt) + most >= LONGEST - 2:
                return
            params = SamplingParams(max_new_tokens=most, stop_ids=(draw.randrange(NUM_TOKENS),))
            answer = await self._answer(Request(id=f"{number}/{turn}", prompt_ids=prompt, params=params))
            self.answers.append(answer)
            prompt = (*answer.prompt_ids, *answer.token_ids, *self._text(draw.randrange(3)))

    async def _answer(self, request: Request) -> Completion:
        pieces, cuts = PiecedAnswer(request, None), 0
        while True:
            piece = asyncio.create_task(self.engine.generate(rest := pieces.rest()))
            if self._draw.random() < 0.5 and cuts < 2:
                cuts += 1
                for _ in range(self._draw.randrange(40)):
                    await asyncio.sleep(0)
                await self.engine.interrupt(rest.id)
            answer = pieces.add(await piece)
            if answer.finish is not Finish.INTERRUPT:
                return answer


def test_every_token_of_a_crowd_tells_the_experts_that_a_plain_pass_chooses() -> None:
    seen: dict[str, float] = {}
    for seed in SEEDS:
        crowd = Crowd(seed)
        asyncio.run(crowd.run())
        for answer in crowd.answers:
            ids = [*answer.prompt_ids, *answer.token_ids]
            assert np.array_equal(recorded(answer), own_routes(model(), ids)[:-1]), f"seed {seed}"
        for name, count in crowd.engine.stats().items():
            seen[name] = seen.get(name, 0) + count
    assert seen["preemptions"] > 0, "crowds meet what can go wrong"
    assert seen["prefix_hit_rate"] > 0


def test_a_request_that_is_interrupted_before_it_runs_tells_that_it_has_no_routes_yet() -> None:
    settings = EngineSettings(
        seed=5, max_length=100, routes=True, block_size=8, num_blocks=100, max_running=1, tokens_per_step=8
    )
    engine, params = LocalEngine(model(), settings), SamplingParams(max_new_tokens=12)

    async def run() -> Completion:
        async with asyncio.timeout(60):
            ahead = asyncio.create_task(engine.generate(Request(id="a", prompt_ids=(1, 2, 3), params=params)))
            waiting = asyncio.create_task(engine.generate(Request(id="b", prompt_ids=(4, 5), params=params)))
            await asyncio.sleep(0)
            await engine.interrupt("b")
            await ahead
            return await waiting

    interrupted = asyncio.run(run())
    assert not interrupted.token_ids
    assert [list(route) for route in interrupted.routes or ()] == [[], []]
