"""A shell behind the wall: an episode is its files; whatever a command leaves running or breaks is gone with it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence

import pytest

from temper.envs.library.shell import ShellEnv
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_calls import write_call
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.sandbox import require_sandbox
from temper.types import EventKind, Message, Status, Task

FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "data/one.txt": "1\n"}
TASK = Task(
    id="t", messages=(Message(role="user", content="mend calc.py"),), env="shell", extra={"files": json.dumps(FILES)}
)


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")


def call(name: str, **arguments: object) -> str:
    return write_call("hermes", name, arguments)


def play(*said: str, **options: object) -> list[EnvReply]:
    async def go() -> list[EnvReply]:
        env = ShellEnv(**options)  # type: ignore[arg-type]
        await env.start(TASK, 0)
        replies = [await env.step(Message(role="assistant", content=text)) for text in said]
        await env.close()
        return replies

    return asyncio.run(go())


def shown(reply: EnvReply) -> str:
    return "\n".join(message.content for message in reply.messages)


def changes(reply: EnvReply) -> dict[str, str | None]:
    assert reply.result is not None
    return dict(json.loads(reply.result))


def kinds(reply: EnvReply) -> list[EventKind]:
    return [event.kind for event in reply.events]


EDITS: Sequence[tuple[str, dict[str, object], dict[str, str | None]]] = [
    ("write", {"path": "new.py", "text": "x = 1"}, {"new.py": "x = 1"}),
    ("replace", {"path": "calc.py", "old": "a - b", "new": "a + b"}, {"calc.py": "def add(a, b):\n    return a + b\n"}),
    (
        "line",
        {"number": 2, "text": "return b", "path": "calc.py"},
        {"calc.py": "def add(a, b):\n    return b\n"},
    ),
    ("line", {"number": 1, "text": "\tx", "path": "data/one.txt"}, {"data/one.txt": "\tx\n"}),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), EDITS)
def test_files_are_changed_without_a_process(
    name: str, arguments: dict[str, object], expected: dict[str, str | None]
) -> None:
    (reply,) = play(call(name, **arguments), tools=["read", "write", "replace", "line"])
    assert changes(reply) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("write", {"path": "../out", "text": ""}, "no path"),
        ("write", {"path": "/etc/passwd", "text": ""}, "no path"),
        ("write", {"path": "a\0b", "text": ""}, "no path"),
        ("write", {"path": "x" * 300, "text": ""}, "no path"),
        ("write", {"path": "data/one.txt/below", "text": ""}, "below a file"),
        ("write", {"path": "large", "text": "x" * 2_000_000}, "full"),
        ("read", {"path": "no.py"}, "there is no file"),
        ("line", {"number": 9, "text": "", "path": "calc.py"}, "lines 1 to 3"),
        ("line", {"number": 1, "text": ""}, "there are 2 files"),
    ],
)
def test_what_no_folder_can_hold_is_told_and_changes_nothing(
    name: str, arguments: dict[str, object], words: str
) -> None:
    (reply,) = play(call(name, **arguments), tools=["read", "write", "line"])
    assert words in shown(reply)
    assert changes(reply) == {}


def test_only_the_named_tools_are_there_and_options_are_checked() -> None:
    (reply,) = play(call("run", command="ls"), tools=["line"])
    assert kinds(reply) == [EventKind.BAD_CALL]
    with pytest.raises(UserError, match='Did you mean "line"'):
        ShellEnv(tools=["lime"])
    with pytest.raises(UserError, match="seconds=0"):
        ShellEnv(tools=["line"], seconds=0)


@pytest.mark.parametrize("extra", [{}, {"files": "{}"}, {"files": "[1]"}, {"files": '{"/a": ""}'}, {"files": "no"}])
def test_a_task_without_files_fails_its_episode_with_the_reason(extra: dict[str, str]) -> None:
    async def start() -> None:
        await ShellEnv(tools=["line"]).start(Task(id="t", messages=TASK.messages, extra=extra), 0)

    with pytest.raises(TaskError, match='needs "files"'):
        asyncio.run(start())


def test_episodes_share_nothing() -> None:
    said, other = (call("line", number=2, text="return 1", path="calc.py"), "done"), ("done", "done")

    def make() -> ShellEnv:
        return ShellEnv(tools=["line"])

    asyncio.run(check_isolation_of_episodes(make, TASK, said=said, other=other))


@needs_sandbox
def test_commands_see_the_files_and_what_they_leave_is_seen_by_the_next() -> None:
    first, second, third = play(
        call(
            "run",
            command="cat data/*; sed -i 's/a - b/a + b/' calc.py; rm -r data; printf x > $(printf 'n\\377'); exit 3",
        ),
        call("run", command='python -c "from calc import add; print(add(2, 3))"; ls; cat data/one.txt'),
        "done",
    )
    assert "\n1\nexit code 3\n" in shown(first)
    assert kinds(first) == [EventKind.TOOL_CALL, EventKind.SIDE_EFFECT]
    assert "\n5\ncalc.py\n" in shown(second)
    assert "No such file" in shown(second)
    assert "__pycache__" not in str(changes(second))
    assert changes(third) == {"calc.py": FILES["calc.py"].replace("-", "+"), "data/one.txt": None, "n\udcff": "x"}
    assert (third.is_done, third.status) == (True, None)


@needs_sandbox
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sleep 60", "slept as long"),
        ("while true; do :; done", "of the processor"),
        ("python -c 'x = bytearray(1 << 30)'; tail /dev/zero", "more than 64 MiB"),
        ("yes", "printed more than"),
        ("head -c 3000000 /dev/zero > large", "more than 1024 KiB of files"),
        ("i=0; while [ $i -lt 2000 ]; do : > $i; i=$((i+1)); done", "more than 1024 KiB of files"),
        ("mkfifo pipe; ln -s / root; chmod 000 calc.py; truncate -s 60m sparse", "more than 1024 KiB of files"),
    ],
)
def test_a_command_over_a_limit_is_told_and_undone(command: str, words: str) -> None:
    first, second = play(
        call("run", command=f"echo gone > gone; {command}"), call("run", command="ls"), seconds=0.5, memory_mib=64
    )
    assert words in shown(first)
    assert "nothing that it changed is kept" in shown(first)
    assert kinds(first)[1] is EventKind.TOOL_ERROR
    assert first.status is None, "the policy goes on: its world is as it was"
    assert "\ncalc.py\ndata\n" in shown(second)
    assert changes(second) == {}


@needs_sandbox
def test_a_fork_bomb_ends_with_its_command() -> None:
    bomb = "bomb() { bomb | bomb & }; bomb; sleep 5"
    first, second = play(call("run", command=bomb), call("run", command="ps ax | wc -l; ls"), seconds=2.0)
    assert "SIDE_EFFECT" in str([kind.name for kind in kinds(first)])
    assert "\ncalc.py\ndata\n" in shown(second)
    assert changes(second) == {}


@needs_sandbox
def test_nothing_that_a_command_leaves_running_changes_files_later() -> None:
    late = "(setsid sh -c 'while true; do echo bad >> late; echo bad > calc.py; done' > /dev/null 2>&1 &) ; sleep 0.1"
    started = time.monotonic()
    first, second = play(call("run", command=f"{late}; cp calc.py x"), call("run", command="sleep 0.3; cat calc.py"))
    assert time.monotonic() - started < 60
    kept = changes(first)
    assert changes(second) == kept, "what it wrote while its command ran is its own; nothing came after"
    assert "bad" in str(kept["late"])


@needs_sandbox
def test_behind_the_wall_are_neither_network_nor_host() -> None:
    (reply,) = play(
        call("run", command="ls / /home /root 2>&1; id -u; cat /proc/net/dev | wc -l; python -c 'import numpy'")
    )
    text = shown(reply)
    assert "No module named 'numpy'" in text
    assert "work" not in text
    assert "1000\n3\n" in text, "two lines of header, and a loopback of its own"


@needs_sandbox
def test_a_tool_call_that_no_program_can_take_is_told() -> None:
    first, second = play(call("run", command="echo \0"), call("run", command="echo \ud83d"))
    assert "null character" in shown(first)
    assert second.status is not Status.TOOL_ERROR
    assert "?" in shown(second)
