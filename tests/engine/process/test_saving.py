"""What a sampler process has drawn is told on the way, and another goes on behind it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from temper.engine.fleet.fleet import Fleet, FleetSettings
from temper.engine.fleet.member import SamplerLost
from temper.engine.local.engine import LocalEngine
from temper.engine.process import saving
from temper.engine.process.client import ProcessSampler
from temper.engine.process.order import LocalOrder, open_engine
from temper.engine.process.saving import Saver
from temper.models.tiny import make_tiny_model
from temper.types import Completion, Finish, Publication, Request, SamplingParams, array_of
from tests.engine.process.conftest import publication
from tests.engine.process.test_client import Opener, same, until, with_client
from tests.fakes.served import serve_in_a_thread

LONG = 40


def asked(name: str, **params: Any) -> Request:
    return Request(id=name, prompt_ids=(3, 4, 5, 6), params=SamplingParams(max_new_tokens=LONG, **params))


REQUESTS = [
    asked("plain"),
    asked("greedy", temperature=0.0),
    asked("told", top_logprobs=3, entropy=True),
    asked("cut", top_p=0.7, top_k=4),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(saving, "LEAST_TOKENS", 4)


async def undisturbed(order: LocalOrder, weights: Publication) -> list[Completion]:
    engine = open_engine(order)
    await engine.load(weights)
    return await asyncio.gather(*(engine.generate(request) for request in REQUESTS))


def test_one_that_ends_has_told_the_beginning_of_each_answer_to_the_bit(order: LocalOrder, folder: Path) -> None:
    weights, opener = publication(folder, 1), Opener()

    async def use(sampler: ProcessSampler) -> list[BaseException | Completion]:
        await sampler.load(weights)
        asking = [asyncio.create_task(sampler.generate(request)) for request in REQUESTS]
        await opener.has_drawn(24)
        await until(lambda: len(sampler._questions._saved) == len(REQUESTS))
        sampler._process.kill()
        return await asyncio.gather(*asking, return_exceptions=True)

    ends = asyncio.run(with_client(order, use, opener=opener))
    for end, whole in zip(ends, asyncio.run(undisturbed(order, weights)), strict=True):
        assert isinstance(end, SamplerLost)
        assert end.so_far is not None
        assert end.so_far.finish is Finish.INTERRUPT
        told = len(end.so_far.token_ids)
        assert 4 <= told < LONG
        for name in ("token_ids", "logprobs", "versions", "entropies", "top_ids", "top_logprobs", "keep_ids"):
            ours, theirs = getattr(end.so_far, name), getattr(whole, name)
            assert ours == (None if theirs is None else theirs[:told]), name


def experts_order(folder: Path, order: LocalOrder) -> LocalOrder:
    path = make_tiny_model(
        folder / "experts", layers=2, width=32, heads=2, kv_heads=1, mlp_width=24, context=512, alphabet="abcdefgh",
        experts=4, seed=3,
    )  # fmt: skip
    return dataclasses.replace(order, folder=str(path), settings=dataclasses.replace(order.settings, routes=True))


class Hosts:
    """Starts sampler threads, and ends them."""

    def __init__(self, order: LocalOrder) -> None:
        self._order, self.openers, self.started = order.to_json(), list[Opener](), list[ProcessSampler]()

    def start(self, _: int) -> ProcessSampler:
        self.openers.append(Opener())
        self.started.append(serve_in_a_thread(self._order, opener=self.openers[-1]))
        return self.started[-1]


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_an_answer_that_two_samplers_drew_after_two_deaths_is_that_of_one(
    order: LocalOrder, folder: Path, tmp_path: Path, kind: str
) -> None:
    order = order if kind == "dense" else experts_order(tmp_path, order)
    weights = publication(Path(order.folder), 3)
    settings = FleetSettings(max_restarts=3, silent_seconds=30.0, feeds_late=True)

    async def run() -> tuple[list[Completion], Mapping[str, float]]:
        hosts = Hosts(order)
        fleet = Fleet(hosts.start, 1, settings)
        await fleet.load(weights)
        asking = [asyncio.create_task(fleet.generate(request)) for request in REQUESTS]
        for number in range(2):
            await until(lambda number=number: len(hosts.started) > number)  # type: ignore[misc]
            sampler = hosts.started[number]
            await until(lambda sampler=sampler: len(sampler._questions._saved) == len(REQUESTS))  # type: ignore[misc]
            sampler._process.kill()
        drawn = await asyncio.gather(*asking)
        told = fleet.stats()
        await fleet.close()
        return drawn, told

    drawn, told = asyncio.run(run())
    whole = asyncio.run(undisturbed(order, weights))
    assert [same(*pair) for pair in zip(drawn, whole, strict=True)] == [True] * len(REQUESTS)
    assert told["reissued"] == 2 * len(REQUESTS)
    assert told["rescued"] >= 2 * len(REQUESTS) * 4
    assert (drawn[0].routes is not None) == (kind == "experts")


def test_looking_at_what_runs_changes_nothing_of_it(order: LocalOrder, folder: Path) -> None:
    weights = publication(folder, 1)

    async def run() -> tuple[list[Completion], list[dict[str, Completion]]]:
        engine, looks = open_engine(order), list[dict[str, Completion]]()
        await engine.load(weights)
        asking = asyncio.gather(*(engine.generate(request) for request in REQUESTS))
        while not asking.done():
            await asyncio.sleep(0)
            looks.append(engine.so_far({request.id: 1 for request in REQUESTS}))
        return await asking, looks

    drawn, looks = asyncio.run(run())
    whole = asyncio.run(undisturbed(order, weights))
    assert [same(*pair) for pair in zip(drawn, whole, strict=True)] == [True] * len(REQUESTS)
    assert len(looks) > LONG / 2
    told = next(look["told"] for look in looks if "told" in look)
    assert told.top_ids is not None
    assert len(told.top_ids) == len(told.token_ids) < LONG, "it has not grown since"
    assert LocalEngine.so_far(open_engine(order), {"nobody": 0}) == {}


def test_a_sampler_that_cannot_tell_what_it_drew_ends_and_is_replaced(
    order: LocalOrder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, so_far = list[str](), LocalEngine.so_far

    def breaks_once(self: LocalEngine, least: Mapping[str, int]) -> dict[str, Completion]:
        if not told and least:
            raise RuntimeError("planted")
        return so_far(self, least)

    monkeypatch.setattr(LocalEngine, "so_far", breaks_once)

    async def run() -> list[Completion]:
        fleet = Fleet(
            Hosts(order).start,
            1,
            FleetSettings(max_restarts=3, silent_seconds=30.0, feeds_late=True),
            note=told.append,
        )
        await fleet.load(publication(folder, 3))
        drawn = await asyncio.gather(*(fleet.generate(request) for request in REQUESTS))
        await fleet.close()
        return drawn

    drawn = asyncio.run(run())
    whole = asyncio.run(undisturbed(order, publication(folder, 3)))
    assert [same(*pair) for pair in zip(drawn, whole, strict=True)] == [True] * len(REQUESTS)
    assert len(told) == 1


def test_all_tellings_of_an_answer_are_at_most_three_times_as_long_as_it_is() -> None:
    length, told = 0, list[int]()

    def so_far(least: Mapping[str, int]) -> dict[str, Completion]:
        if length < least["a"]:
            return {}
        columns = {name: [1] * length for name in ("token_ids", "versions")}
        return {
            "a": Completion(prompt_ids=(1,), logprobs=np.zeros(length).tolist(), finish=Finish.INTERRUPT, **columns)
        }

    saver = Saver(so_far, lambda frame: told.append(len(frame.arrays[1])))
    with saver.drawing(7, "a"):
        for length in range(2000):
            before = sum(told)
            saver.look()
            assert sum(told) <= 3 * length + saving.LEAST_TOKENS, (before, length)
            assert not told or told[-1] * saving.GROWTH >= length, "a third of it at most is lost"
    assert told[0] == saving.LEAST_TOKENS
    assert array_of(told).max() < 2000
    assert saver._least == {}
