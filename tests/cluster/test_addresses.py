"""Samplers that stand somewhere and runs that call them: who is let in, who is not, and what an end looks like."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from temper.cluster import addresses, handshake, listener
from temper.cluster.addresses import Visitor, reach_sampler
from temper.cluster.listener import Listener, stand_at
from temper.config.cluster import ClusterConfig
from temper.engine.fleet.member import SamplerLost
from temper.errors import UserError
from temper.types import Publication, Request, SamplingParams

VISITOR = Visitor(key="secret", run="a", silent_seconds=30.0)
SECONDS = 30.0


@dataclass
class Standing:
    """A sampler that listens in this process; what draws are real processes with a fake engine."""

    address: str
    told: list[str]
    listener: Listener

    @property
    def pid(self) -> int:
        at_work = self.listener._at_work
        assert at_work is not None
        return at_work[2].pid


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    monkeypatch.setattr(listener, "MAIN", "tests.cluster.fake_main")
    monkeypatch.setattr(addresses, "CALL_SECONDS", 2.0)
    monkeypatch.setattr(addresses, "POLL_SECONDS", 0.05)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as bound:
        made = Listener(bound, "secret", None, told.append)
        threading.Thread(target=made.listen, daemon=True).start()
        yield Standing(f"127.0.0.1:{bound.getsockname()[1]}", told, made)


def asked(prompt: int) -> Request:
    return Request(id="a", prompt_ids=(prompt,), params=SamplingParams())


def weights(version: int) -> Publication:
    return Publication(version=version, tensors={"a": torch.zeros(2)})


async def draw_once(standing: Standing, visitor: Visitor = VISITOR) -> int:
    """The version of what draws there, from the first word to the last."""
    sampler = reach_sampler(standing.address, "", visitor)
    try:
        await sampler.load(weights(3))
        return (await sampler.generate(asked(0))).versions[0]
    finally:
        await sampler.close()


def test_one_run_after_the_other_draws_at_one_address(standing: Standing) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b"):
        assert asyncio.run(draw_once(standing, replace(VISITOR, run=name))) == 3
    assert [line for line in standing.told if "draws for" in line] == ["draws for a run from 127.0.0.1"] * 2
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "the last connection may still be closing"


def test_who_has_another_key_is_told_so_and_gets_nothing(standing: Standing) -> None:
    with pytest.raises(UserError, match=rf'"{standing.address}": the key is another\. Set TEMPER_SAMPLER_KEY'):
        asyncio.run(draw_once(standing, replace(VISITOR, key="guessed")))
    assert standing.listener._at_work is None
    assert asyncio.run(draw_once(standing)) == 3


def test_a_sampler_without_the_key_gets_no_weights(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets everybody in, to see what comes."""
    monkeypatch.setattr(handshake.hmac, "compare_digest", lambda ours, theirs: len(ours) == 4 or ours == theirs)
    monkeypatch.setattr(listener, "greet", lambda caller, key: replace_welcome(handshake.greet(caller, "secret")))
    with pytest.raises(UserError, match="does not have the key of TEMPER_SAMPLER_KEY: it gets no weights"):
        asyncio.run(draw_once(standing))


def replace_welcome(guest: handshake.Guest) -> handshake.Guest:
    return replace(guest, welcome={"proof": "0" * 64})


def test_another_temper_is_refused_with_both_versions(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    here = handshake.own_version()
    answers = iter(["0.0.9, code 1", here])  # first the sampler speaks
    monkeypatch.setattr(handshake, "own_version", lambda: next(answers, here))
    with pytest.raises(
        UserError, match=rf"it runs Temper 0\.0\.9, code 1, and this is Temper {here}: install the same"
    ):
        asyncio.run(draw_once(standing))


def test_who_is_no_sampler_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:

        def answer() -> None:
            caller, _ = bound.accept()
            with caller:
                caller.sendall(b"\0\0\0\2hi")

        threading.Thread(target=answer, daemon=True).start()
        sampler = reach_sampler(f"127.0.0.1:{bound.getsockname()[1]}", "", VISITOR)
        with pytest.raises(UserError, match="is no `temper sampler`"):
            asyncio.run(sampler.opened())


def test_a_sampler_draws_for_one_run_at_a_time_and_for_the_next_when_that_is_gone(standing: Standing) -> None:
    async def use() -> None:
        first = reach_sampler(standing.address, "", VISITOR)
        await first.load(weights(1))
        with pytest.raises(SamplerLost, match="it draws for another run"):
            await draw_once(standing, replace(VISITOR, run="b"))
        # Stopped, it does not see that its run hangs up: who comes next ends it.
        os.kill(standing.pid, signal.SIGSTOP)
        with pytest.raises(SamplerLost, match=r"did not answer within 0\.2 s"):
            await first.ping(0.2)
        await first.close()
        assert await draw_once(standing, replace(VISITOR, run="b")) == 3

    asyncio.run(use())


def test_a_run_that_comes_back_is_let_in_at_once(standing: Standing) -> None:
    """A network that was cut has not told the sampler yet."""

    async def use() -> None:
        first = reach_sampler(standing.address, "", VISITOR)
        await first.load(weights(1))
        assert await draw_once(standing, VISITOR) == 3
        with pytest.raises(SamplerLost, match="it hung up"):
            await first.ping(SECONDS)
        await first.close()

    asyncio.run(use())


def test_one_that_is_killed_while_it_draws_is_lost_at_once(standing: Standing) -> None:
    async def use() -> None:
        sampler = reach_sampler(standing.address, "", VISITOR)
        await sampler.load(weights(1))
        asking = asyncio.create_task(sampler.generate(asked(1)))
        await asyncio.sleep(0.2)
        os.kill(standing.pid, signal.SIGKILL)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(SamplerLost, match=f"the sampler at {standing.address}: it hung up"):
                await asking
        await sampler.close()

    asyncio.run(use())


def test_where_nobody_listens_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "CALL_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        address = f"127.0.0.1:{bound.getsockname()[1]}"
    with pytest.raises(SamplerLost, match=r"refused.*Start it there with `temper sampler --listen`"):
        asyncio.run(reach_sampler(address, "", VISITOR).opened())


@pytest.mark.parametrize("address", ["29600", "here:", ":29600", "here:http"])
def test_an_address_to_listen_at_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(UserError, match="is no address: use HOST:PORT"):
        stand_at(address, None, print)


@pytest.mark.parametrize(
    ("samplers", "problem"),
    [
        (0, "at least 1, or a list of addresses"),
        ("gpu7:29600", "at least 1, or a list of addresses"),
        ([], "at least 1, or a list of addresses"),
        (["gpu7"], '"gpu7" is no address: use "host:port"'),
        (["gpu7:29600", "gpu7:29600"], "stands here twice"),
    ],
)
def test_samplers_are_a_number_or_addresses(samplers: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ClusterConfig(samplers=samplers)  # type: ignore[arg-type]
    assert ClusterConfig(samplers=["gpu7:29600", "[::1]:29600"]).num_samplers == 2
