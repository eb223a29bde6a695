"""Two processes that may die at any instant: nobody waits for the dead, and nobody survives the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.cluster.child import Child
from temper.cluster.samplers import start_sampler
from temper.engine.fleet.member import SamplerLost
from temper.engine.local.warming import ExpectedRequests
from temper.engine.process import client as client_module
from temper.engine.process.client import ProcessSampler
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.errors import BackendError
from temper.types import Publication, Request, SamplingParams

MAIN = "tests.cluster.fake_main"
SECONDS = 30.0
ROOT = Path(__file__).parents[2]


def asked(prompt: int, name: str = "a") -> Request:
    return Request(id=name, prompt_ids=(prompt,), params=SamplingParams())


def weights(version: int) -> Publication:
    return Publication(version=version, tensors={"a": torch.zeros(2)})


def with_sampler(use: Callable[[ProcessSampler, Child], Awaitable[Any]], order: str = "") -> Any:
    async def run() -> Any:
        shared = SharedWeights(anonymous_file())
        sampler = start_sampler(order, shared, main=MAIN)
        child = sampler._process
        assert isinstance(child, Child)
        try:
            return await use(sampler, child)
        finally:
            await sampler.close()
            shared.close()
            assert child.wait(0) is not None, "closed is ended"

    return asyncio.run(run())


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def ends(pid: int, seconds: float = SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(pid)


def test_a_sampler_process_answers_and_leaves_nothing_behind() -> None:
    before = sorted(os.listdir("/proc/self/fd"))

    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(3))
        drawn = await sampler.generate(asked(0))
        assert (list(drawn.versions), list(drawn.logprobs)) == ([3], [-1.0])
        assert is_alive(child.pid)

    with_sampler(use)
    assert sorted(os.listdir("/proc/self/fd")) == before, "every descriptor was given back"


@pytest.mark.parametrize("prompt", [1, 2], ids=["waiting", "in a step"])
def test_a_sampler_killed_while_it_draws_ends_its_requests_with_what_happened(prompt: int) -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(1))
        asking = [asyncio.create_task(sampler.generate(asked(prompt, f"{n}"))) for n in range(3)]
        await asyncio.sleep(0.2)
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            ended = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(error) for error in ended} == {SamplerLost}
        assert f"(pid {child.pid}): it was killed by SIGKILL" in str(ended[0])
        with pytest.raises(BackendError, match="killed by SIGKILL"):
            await sampler.load(weights(2))

    with_sampler(use)


def test_a_sampler_stopped_before_a_publication_is_ended_within_the_seconds_that_it_has() -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(1))
        os.kill(child.pid, signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(SamplerLost, match=r"did not take over publication 2 within 0.3 s, and was ended"):
                await sampler.load(weights(2), 0.3)
        assert ends(child.pid)

    with_sampler(use)


def test_a_sampler_that_crashes_is_quoted() -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(1))
        with pytest.raises(BackendError, match=r"it ended with code 5\. Its last lines:\nthe ceiling came down"):
            await sampler.generate(asked(3))

    with_sampler(use)


def test_a_sampler_ends_with_its_engine_and_says_so_to_everyone_who_waits() -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(1))
        waiting = asyncio.create_task(sampler.generate(asked(1)))
        for lost in (sampler.generate(asked(4, "b")), waiting, sampler.load(weights(2))):
            with pytest.raises(
                SamplerLost, match=r"it ended with code 1\..*\nthe engine is lost: the cellar is flooded"
            ):
                await lost
        assert ends(child.pid)

    with_sampler(use)


@pytest.mark.parametrize("prompt", [1, 2], ids=["waiting", "in a step"])
def test_a_sampler_process_dies_with_a_driver_that_is_killed(prompt: int) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.fake_driver", str(prompt)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    try:
        child = int(driver.stdout.readline())
        assert is_alive(child)
    finally:
        driver.kill()
        driver.communicate(timeout=SECONDS)
    assert ends(child)


def test_a_sampler_process_that_nobody_closes_ends_with_its_client() -> None:
    async def forget() -> int:
        sampler = start_sampler("", SharedWeights(anonymous_file()), main=MAIN)
        await sampler.load(weights(1))
        assert isinstance(sampler._process, Child)
        return sampler._process.pid

    assert ends(asyncio.run(forget()))


def test_a_sampler_that_is_stopped_is_ended_when_it_owes_an_answer_for_too_long() -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        await sampler.load(weights(1))
        await sampler.ping(SECONDS)
        asking = asyncio.create_task(sampler.generate(asked(1)))
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(SamplerLost, match=r"did not answer within 0\.3 s, and was ended"):
            await sampler.ping(0.3)
        with pytest.raises(SamplerLost):
            await asking
        assert ends(child.pid)

    with_sampler(use)


def test_a_program_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        with pytest.raises(BackendError, match=r"No module named temper\.nothing"):
            await sampler.load(weights(1))

    async def run() -> None:
        sampler = start_sampler("", SharedWeights(anonymous_file()), main="temper.nothing")
        assert isinstance(sampler._process, Child)
        await use(sampler, sampler._process)
        await sampler.close()

    asyncio.run(run())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(BackendError, match=r"could not be started: .*No such file"):
        start_sampler("", SharedWeights(anonymous_file()), main=MAIN)


def test_a_sampler_that_is_stopped_while_it_opens_its_model_is_ended_after_the_silent_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "LEAST_SILENT_SECONDS", 0.0)

    async def use(sampler: ProcessSampler, child: Child) -> None:
        opening = asyncio.create_task(sampler.opened(1.5))
        await asyncio.sleep(2.5)
        assert not opening.done(), "it opens, and says so"
        os.kill(child.pid, signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(SamplerLost, match=r"it did not say a word for 1\.5 s, and was ended"):
                await opening
        assert ends(child.pid)

    with_sampler(use, order="slow")


def expect(num_rows: int, seconds: int) -> ExpectedRequests:
    return ExpectedRequests(num_rows=num_rows, num_prompts=1, prompt_tokens=seconds, longest=8, params=SamplingParams())


def test_a_sampler_that_is_stopped_while_it_warms_up_is_ended_after_the_silent_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "LEAST_SILENT_SECONDS", 0.0)

    async def use(sampler: ProcessSampler, child: Child) -> None:
        told: list[tuple[int, int]] = []
        await sampler.load(weights(1))
        await asyncio.sleep(4.5)  # it owes nothing, and says nothing
        warming = asyncio.create_task(sampler.warm_up(expect(2, 600), lambda *far: told.append(far), 4.0))
        async with asyncio.timeout(SECONDS):  # torch is imported for it
            while not told:
                await asyncio.sleep(0.05)
        await asyncio.sleep(5.0)
        assert not warming.done(), "it warms up, and says so"
        os.kill(child.pid, signal.SIGSTOP)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(SamplerLost, match=r"it did not say a word for 4 s, and was ended"):
                await warming
        assert ends(child.pid)

    with_sampler(use)


def test_who_warms_up_says_how_far_it_is_and_answers_afterwards() -> None:
    async def use(sampler: ProcessSampler, child: Child) -> None:
        told: list[tuple[int, int]] = []
        await sampler.load(weights(1))
        await sampler.warm_up(expect(15, 0), lambda *far: told.append(far), SECONDS)
        assert told == [(done, 15) for done in range(15)]
        await sampler.load(weights(2))
        assert list((await sampler.generate(asked(0))).versions) == [2]

    with_sampler(use)
