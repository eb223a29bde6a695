"""Programs of the policy run in the sandbox; however they end, it is an observation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from temper.envs.library.python_tool import Python, describe
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_calls import write_call
from temper.envs.tools import ToolError, ToolTimeout
from temper.errors import UserError
from temper.protocols import EnvReply
from temper.sandbox import Limits, Outcome, Program, Sandbox, SandboxFailed, require_sandbox
from temper.types import EventKind, Message, Task

TASK = Task(id="t", messages=(Message(role="user", content="go"),), env="python")


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(size=2)
    yield made
    made.close()


def call(code: str) -> str:
    return write_call("hermes", "python", {"code": code})


async def steps(env: Python, *said: str) -> list[EnvReply]:
    await env.start(TASK, 0)
    return [await env.step(Message(role="assistant", content=text)) for text in said]


def kinds(reply: EnvReply) -> list[EventKind]:
    return [event.kind for event in reply.events]


@needs_sandbox
def test_a_program_is_run_and_nothing_is_kept_between_calls(sandbox: Sandbox) -> None:
    env = Python(sandbox=sandbox)
    first, second, done = asyncio.run(steps(env, call("x = 6 * 7; print(x)"), call("print(x)"), "42"))
    assert "\n42\n" in first.messages[0].content
    assert kinds(first) == [EventKind.TOOL_CALL]
    assert "NameError" in second.messages[0].content
    assert kinds(second) == [EventKind.TOOL_CALL, EventKind.TOOL_ERROR]
    assert done.is_done


@needs_sandbox
def test_a_program_that_hangs_is_a_timeout_for_the_policy_to_read(sandbox: Sandbox) -> None:
    env = Python(seconds=0.5, sandbox=sandbox)
    (reply,) = asyncio.run(steps(env, call("print('so far', flush=True)\nwhile True: pass")))
    assert "error: the program ran longer than 0.5 s" in reply.messages[0].content
    assert kinds(reply) == [EventKind.TOOL_CALL, EventKind.TOOL_TIMEOUT]
    assert not reply.is_done


@needs_sandbox
def test_episodes_share_nothing(sandbox: Sandbox) -> None:
    write = call("open('/tmp/left', 'w').write('x'); print('ok')")
    look = call("import os; print(sorted(os.listdir('/tmp')))")
    asyncio.run(
        check_isolation_of_episodes(lambda: Python(sandbox=sandbox), TASK, said=(look, "done"), other=(write, "done"))
    )


class FakeSandbox(Sandbox):
    """No processes: the outcome or failure it was given."""

    def __init__(self, outcome: Outcome | Exception) -> None:
        self._outcome = outcome

    async def run(self, program: Program, limits: Limits | None = None) -> Outcome:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def test_a_broken_sandbox_fails_the_episode_and_is_never_shown_as_the_programs_fault() -> None:
    env = Python(sandbox=FakeSandbox(SandboxFailed("the boundary broke")))
    with pytest.raises(SandboxFailed):
        asyncio.run(steps(env, call("print(1)")))


def outcome(status: str, stdout: str = "", stderr: str = "") -> Outcome:
    return Outcome(status=status, exit_code=1, stdout=stdout, stderr=stderr, seconds=0.1)  # type: ignore[arg-type]


def test_outcomes_read_well_and_are_cut_where_they_say_least() -> None:
    limits = Limits()
    assert describe(outcome("ok", "3\n"), limits, 100) == "3"
    assert describe(outcome("ok"), limits, 100) == "(no output, use print)"
    assert describe(outcome("ok", "x" * 200), limits, 100) == "x" * 100 + "... (100 characters cut)"
    with pytest.raises(ToolError, match=r"the end of the traceback$"):
        describe(outcome("error", "", "x" * 500 + "the end of the traceback"), limits, 100)
    with pytest.raises(ToolTimeout, match="longer than 5 s\noutput before that:\nso far"):
        describe(outcome("timeout", "so far"), limits, 100)
    for status, reason in (("memory", "256 MiB"), ("output", "64 KiB"), ("killed", "was killed")):
        with pytest.raises(ToolError, match=reason):
            describe(outcome(status), limits, 100)


def test_bad_options_are_refused() -> None:
    fake = FakeSandbox(outcome("ok"))
    with pytest.raises(UserError, match="max_calls=0"):
        Python(max_calls=0, sandbox=fake)
    with pytest.raises(UserError, match="show_tools='yes'"):
        Python(show_tools="yes", sandbox=fake)
