from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from temper.envs.adapters.openenv import OpenEnv
from temper.envs.env import find_env
from temper.errors import TaskError, UserError, install_line
from temper.types import EventKind, Message, Task

core = pytest.importorskip("openenv.core")
uvicorn = pytest.importorskip("uvicorn")


class Guess(core.Action):  # type: ignore[misc, name-defined]
    number: int


class Hint(core.Observation):  # type: ignore[misc, name-defined]
    text: str


class GuessEnvironment(core.Environment):  # type: ignore[misc, name-defined]
    """Guess seed % 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    open_sessions = 0

    def __init__(self) -> None:
        super().__init__()
        self.target = 0
        type(self).open_sessions += 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self.target = (seed or 0) % 10
        return Hint(text=f"Guess a digit. Level {options.get('level', 1)}.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        if action.number == 99:
            raise RuntimeError("the dice rolled off the table")
        if action.number == 77:
            time.sleep(3.0)
        is_right = action.number == self.target
        return Hint(text="yes" if is_right else "no", done=is_right, reward=1.0 if is_right else 0.0)

    @property
    def state(self) -> Any:
        return core.State()

    def close(self) -> None:
        type(self).open_sessions -= 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = core.create_fastapi_app(GuessEnvironment, Guess, Hint, max_concurrent_envs=16)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()  # from now on clients queue, also before the server runs
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    server.force_exit = True
    thread.join(timeout=10.0)


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


def task(name: str = "t", **extra: Any) -> Task:
    return Task(id=name, messages=(), extra=extra)


def test_an_episode_is_reset_with_its_seed_stepped_and_paid(url: str) -> None:
    async def go() -> None:
        env = OpenEnv(url=url)
        opening = await env.start(task(episode_seed=27), 0)
        assert opening.messages[0].content == "Guess a digit. Level 1."
        wrong = await env.step(say('I think {"number": 3}'))
        right = await env.step(say('{"number": 7}'))
        await env.close()
        assert (wrong.messages[0].content, wrong.reward, wrong.is_done) == ("no", 0.0, False)
        assert (right.messages[0].content, right.reward, right.is_done) == ("yes", 1.0, True)

    asyncio.run(go())


def test_task_fields_reach_the_servers_reset(url: str) -> None:
    async def go() -> str:
        env = OpenEnv(url=url, reset_fields=["level"])
        opening = await env.start(task(level=4), 0)
        await env.close()
        with pytest.raises(TaskError, match="has no level"):
            await env.start(task(), 0)
        return opening.messages[0].content

    assert asyncio.run(go()) == "Guess a digit. Level 4."


@pytest.mark.parametrize("text", ["seven", '{"number": "many"}', '{"digit": 7}', '["number"]', '{"number": 7'])
def test_an_action_that_does_not_fit_is_the_policys_mistake_and_the_episode_goes_on(url: str, text: str) -> None:
    async def go() -> None:
        env = OpenEnv(url=url)
        await env.start(task(episode_seed=7), 0)
        reply = await env.step(say(text))
        assert [event.kind for event in reply.events] == [EventKind.BAD_CALL]
        assert reply.reward is None
        assert not reply.is_done
        assert (await env.step(say('{"number": 7}'))).reward == 1.0
        await env.close()

    asyncio.run(go())


def test_an_exception_of_the_environment_is_a_task_error_with_its_words(url: str) -> None:
    async def go() -> None:
        env = OpenEnv(url=url)
        await env.start(task(), 0)
        with pytest.raises(TaskError, match="rolled off the table"):
            await env.step(say('{"number": 99}'))
        await env.close()

    asyncio.run(go())


def test_a_step_that_hangs_ends_its_own_episode_and_no_other(url: str) -> None:
    async def hang() -> None:
        env = OpenEnv(url=url, step_seconds=0.3)
        await env.start(task(), 0)
        with pytest.raises(TaskError):
            await env.step(say('{"number": 77}'))
        await env.close()

    async def play() -> float | None:
        env = OpenEnv(url=url, step_seconds=20.0)
        await env.start(task(episode_seed=5), 0)
        reply = await env.step(say('{"number": 5}'))
        await env.close()
        return reply.reward

    async def go() -> list[Any]:
        return await asyncio.gather(hang(), play(), play())

    assert asyncio.run(go())[1:] == [1.0, 1.0]


def test_sessions_are_closed_on_the_server(url: str) -> None:
    async def go() -> None:
        before = GuessEnvironment.open_sessions
        env = OpenEnv(url=url)
        await env.start(task(), 0)
        assert GuessEnvironment.open_sessions == before + 1
        await env.close()
        await env.close()
        for _ in range(200):
            if GuessEnvironment.open_sessions <= before:
                return
            await asyncio.sleep(0.05)
        pytest.fail("the server still holds the session")

    asyncio.run(go())


def test_a_server_that_is_not_there_is_a_task_error_that_names_the_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"

    async def go() -> None:
        env = OpenEnv(url=address, connect_seconds=2.0)
        with pytest.raises(TaskError, match=address):
            await env.start(task(), 0)
        await env.close()

    asyncio.run(go())


def test_mistakes_in_options_are_named() -> None:
    envs = {"openenv": OpenEnv}
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:8000"):
        find_env("openenv", {"url": "localhost"}, envs)()
    with pytest.raises(UserError, match='"url" is missing'):
        find_env("openenv", {}, envs)
    with pytest.raises(UserError, match="not both"):
        OpenEnv(url="http://x", parser="json:loads", action_field="text")


def test_a_missing_field_of_the_observation_is_named(url: str) -> None:
    async def go() -> None:
        env = OpenEnv(url=url, observation_field="board")
        with pytest.raises(TaskError, match=r'no field "board"\. It has: text'):
            await env.start(task(), 0)
        await env.close()

    asyncio.run(go())


def test_without_the_package_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match=re.escape(install_line("openenv"))):
        asyncio.run(OpenEnv(url="http://127.0.0.1:1").start(task(), 0))
