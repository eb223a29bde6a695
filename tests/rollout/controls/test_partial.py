"""Partial rollouts: interrupted answers go on, each token with the version and log-probability it was drawn with."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import torch

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.rollout.controls.joined import JoinedSampler, Pauses
from temper.simulate.clock import run_virtual
from temper.types import Completion, Finish, Publication, Request, SamplingParams
from tests.fakes.models import make_family_model
from tests.fakes.rolling import Flow, Run, train
from tests.fakes.tail import STOP, TailSampler, heavy_tail


class Watched(TailSampler):
    """Notes how many requests are under way when new weights come."""

    def __init__(self) -> None:
        super().__init__(heavy_tail(0.1))
        self.at_load: list[int] = []

    async def load(self, publication: Publication) -> None:
        self.at_load.append(len(self._running))
        await super().load(publication)


def run(controls: list[Any], steps: int = 16, **flow: Any) -> tuple[Run, Watched]:
    sampler = Watched()

    async def work() -> Run:
        source = Flow(groups_per_step=8, controls=controls, **flow).open(sampler)
        return await train(source, sampler, range(1, steps + 1), train_seconds=2.0)

    return run_virtual(work()), sampler


TRUNCATED = {"top_k": 3, "top_logprobs": 2}


def test_nothing_is_under_way_while_the_trainer_works_and_nothing_is_lost() -> None:
    without, busy = run([], staleness=4)
    partial, idle = run(["partial"], staleness=4)
    assert max(busy.at_load) > 0
    assert set(idle.at_load) == {0}
    assert max(partial.ages) <= 4
    length_of = heavy_tail(0.1)
    wanted = [length_of(f"{g.task.id}#{g.draw}") for batch in partial.batches for g in batch.groups for _ in range(2)]
    assert partial.lengths == wanted
    assert "flow/interrupted" not in without.batches[0].system
    assert sum(batch.system["flow/interrupted"] for batch in partial.batches) > 20
    assert max(batch.system["flow/prefilled_again"] for batch in partial.batches) > 0.5


def test_with_oversampling_a_heavy_tail_takes_half_the_time_of_a_synchronous_run() -> None:
    """And each answer is drawn once: what is thrown away is nothing."""
    plain, _ = run([], staleness=0, order="draw")
    partial, sampler = run([{"name": "oversample", "factor": 2.0}, "partial"], staleness=4)
    assert partial.seconds < 0.5 * plain.seconds
    under_way = sampler.tokens_drawn - sum(partial.lengths)
    assert under_way <= 8 * 2 * 64


def test_every_token_keeps_the_version_and_the_figures_it_was_drawn_with() -> None:
    partial, _ = run(["partial"], staleness=4, params=TRUNCATED)
    mixed = 0
    for batch in partial.batches:
        for completion in [t.turns[0].completion for g in batch.groups for t in g.trajectories]:
            first, count = len(completion.prompt_ids), len(completion.token_ids)
            assert all(a <= b for a, b in pairwise(completion.versions))
            assert list(completion.logprobs) == [-1.0 - 0.125 * ((first + i) % 8) for i in range(count)]
            assert completion.keep_ids is not None
            assert [len(kept) for kept in completion.keep_ids] == [1 + (first + i) % 3 for i in range(count)]
            assert completion.top_ids is not None
            assert [list(row) for row in completion.top_ids] == [[token, token + 1] for token in completion.token_ids]
            assert completion.finish is Finish.STOP
            assert completion.token_ids[-1] == STOP
            mixed += len(set(completion.versions)) > 1
    assert mixed > 10


def test_kill_and_resume_lose_nobody() -> None:
    async def work() -> list[int]:
        flow = Flow(staleness=2, controls=["partial", {"name": "oversample", "factor": 2.0}])
        sampler, consumed, state = TailSampler(heavy_tail(0.2)), list[int](), None
        for first in range(1, 13, 3):
            source = flow.open(sampler, version=first - 1)
            if state is not None:
                source.load_state(state)
            part = await train(source, sampler, range(first, first + 3), 2.0)
            consumed += part.consumed
            state = part.state
        return consumed

    consumed = run_virtual(work())
    assert len(consumed) == len(set(consumed)) == 48
    assert len(set(range(max(consumed) + 1)) - set(consumed)) <= 4


def test_an_interrupted_answer_of_the_engine_is_the_answer_it_would_have_been() -> None:
    """Under the same weights, through any number of pauses: tokens, log-probabilities and keep-sets."""
    settings = EngineSettings(
        seed=0, block_size=4, num_blocks=64, max_running=8, tokens_per_step=64, max_length=64, cuda_graphs=False
    )
    request = Request(id="a", prompt_ids=(3, 4, 5), params=SamplingParams(max_new_tokens=24, top_k=12, top_logprobs=2))

    async def draw(pauses_at: tuple[int, ...]) -> tuple[Completion, tuple[int, int]]:
        engine, pauses = LocalEngine(make_family_model(dtype=torch.float64), settings), Pauses()
        answer = asyncio.ensure_future(JoinedSampler(engine, pauses, None).generate(request))
        for turns in pauses_at:
            for _ in range(turns):
                await asyncio.sleep(0)
            await pauses.start()
            await asyncio.sleep(0)
            pauses.end()
        try:
            return await answer, pauses.counts()
        finally:
            await engine.close()

    (whole, none), (pieces, (num_interrupted, again)) = asyncio.run(draw(())), asyncio.run(draw((0, 9, 20, 31)))
    assert none == (0, 0)
    assert num_interrupted >= 3
    assert again > num_interrupted * 3
    assert list(pieces.token_ids) == list(whole.token_ids)
    assert list(pieces.logprobs) == pytest.approx(list(whole.logprobs), abs=1e-6)
    assert pieces.keep_ids == whole.keep_ids
    assert pieces.top_ids == whole.top_ids
    assert pieces.params == request.params
    assert pieces.finish is whole.finish is Finish.LENGTH


def test_somebody_elses_interruption_is_not_taken_for_a_pause() -> None:
    async def work() -> Completion:
        sampler = TailSampler(lambda name: 50)
        request = Request(id="stage 0/t#0/0/0", prompt_ids=(5,), params=SamplingParams(max_new_tokens=100))
        answer = asyncio.ensure_future(JoinedSampler(sampler, Pauses(), None).generate(request))
        await asyncio.sleep(10)
        await sampler.interrupt(request.id)
        return await answer

    completion = run_virtual(work())
    assert (completion.finish, len(completion.token_ids)) == (Finish.INTERRUPT, 10)
