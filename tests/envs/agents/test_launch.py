"""An agent is started with its task, ends in time, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.envs.agents.agent import AgentEnv, result_of, task_for_agent
from temper.envs.agents.launch import AgentEnd, Nursery, ProcessEnd
from temper.envs.agents.nursery import LOOK_SECONDS
from temper.errors import TaskError, UserError
from temper.types import Message, Task

HERE = Path(__file__).parent
TASK = {"id": "t", "prompt": "hello", "messages": [], "seed": 0}


def script(folder: Path, text: str, name: str = "agent.py") -> str:
    path = folder / name
    path.write_text(text)
    return f"{sys.executable} {path}"


def run_agent(seconds: float = 20.0, **options: Any) -> AgentEnd:
    async def play() -> AgentEnd:
        nursery = Nursery(AgentEnv(**options).settings)
        try:
            return await asyncio.wait_for(nursery.run(TASK, {"OPENAI_API_KEY": "key-1"}), seconds)
        finally:
            await nursery.close()

    return asyncio.run(play())


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_command_gets_its_task_and_its_key_and_prints_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    text = "import json, os, sys\ntask = json.load(sys.stdin)\n"
    text += "print(task['prompt'], os.environ['OPENAI_API_KEY'], os.environ.get('SECRET_TOKEN'))"
    end = run_agent(command=script(tmp_path, text))
    assert (end.problem, end.result) == (None, "hello key-1 None")
    allowed = run_agent(command=script(tmp_path, text), variables=["SECRET_TOKEN"])
    assert allowed.result == "hello key-1 s3cret"


def test_a_function_is_imported_once_and_called_in_a_process_of_its_own(tmp_path: Path) -> None:
    script(
        tmp_path, "seen = []\nasync def solve(task):\n    seen.append(1)\n    print('noise')\n    return len(seen)\n"
    )
    settings = AgentEnv(function=f"{tmp_path / 'agent.py'}:solve").settings

    async def play() -> list[str]:
        nursery = Nursery(settings)
        try:
            ends = await asyncio.gather(*(nursery.run(TASK, {}) for _ in range(3)))
            assert all(end.problem is None for end in ends)
            return [end.result for end in ends]
        finally:
            await nursery.close()

    assert asyncio.run(play()) == ["1", "1", "1"], "what one episode leaves in memory, another finds"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise ValueError('no luck')", "exit code 1.*no luck"),
        ("import os\nos.kill(os.getpid(), 9)", "signal 9"),
        ("while True: print('x' * 100000)", "printed more than"),
    ],
)
def test_an_agent_that_does_not_end_well_says_why(tmp_path: Path, text: str, problem: str) -> None:
    end = run_agent(command=script(tmp_path, text))
    assert end.problem is not None
    assert re.search(problem, end.problem, re.DOTALL), end.problem


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("then", ["", "time.sleep(600)"])
def test_an_agent_that_forks_is_an_error_and_nothing_of_it_is_left(tmp_path: Path, then: str) -> None:
    note = tmp_path / "pid"
    command = f"{script(tmp_path, DAEMON + then)} {note}"
    if then:  # it hangs, too
        with pytest.raises(TimeoutError):
            run_agent(seconds=2.0, command=command)
    else:
        assert "left 1 processes running" in str(run_agent(command=command).problem)
    assert not is_running(int(note.read_text())), "a grandchild in a session of its own outlived its agent"


@pytest.mark.parametrize("is_last", [False, True])
def test_an_agent_that_kills_its_supervisor_is_an_error_and_nothing_of_it_is_left(
    tmp_path: Path, is_last: bool
) -> None:
    """What loses its supervisor falls to the nursery, which kills it and nothing of the episodes beside."""
    note, other = tmp_path / "pid", tmp_path / "other"
    killer = AgentEnv(command=f"{script(tmp_path, DAEMON + 'os.kill(os.getppid(), 9)')} {note}").settings
    beside = f"import os, time\nopen('{other}', 'w').close()\nwhile os.path.exists('{other}'): time.sleep(0.01)"

    async def play() -> None:
        nursery = Nursery(killer)
        try:
            if is_last:
                with pytest.raises(TaskError, match="supervisor died"):
                    await asyncio.wait_for(nursery.run(TASK, {}), 20)
                return
            nursery._settings = AgentEnv(command=script(tmp_path, beside, "beside.py")).settings
            living = asyncio.ensure_future(nursery.run(TASK, {}))
            await until(other.exists)
            nursery._settings = killer
            with pytest.raises(TaskError, match="supervisor died"):
                await asyncio.wait_for(nursery.run(TASK, {}), 20)
            await until(lambda: not is_running(int(note.read_text())))
            other.unlink()
            assert (await asyncio.wait_for(living, 20)).problem is None, "an episode beside it was ended, too"
        finally:
            await nursery.close()

    asyncio.run(play())
    assert not is_running(int(note.read_text())), "a grandchild outlived the nursery"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.01)


def test_what_a_module_starts_when_it_is_imported_stays_through_all_episodes(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = "import os, subprocess\nnowhere = subprocess.DEVNULL\n"
    text += "started = subprocess.Popen(['sleep', '60'], stdin=nowhere, stdout=nowhere)\n"
    text += f"with open('{note}', 'w') as file: file.write(str(started.pid))\n"
    script(tmp_path, f"{text}def solve(task):\n    return os.path.exists('/proc/' + open('{note}').read())\n")
    settings = AgentEnv(function=f"{tmp_path / 'agent.py'}:solve").settings

    async def play() -> list[str]:
        nursery = Nursery(settings)
        try:
            first = await nursery.run(TASK, {})
            await asyncio.sleep(2 * LOOK_SECONDS)
            return [first.result, (await nursery.run(TASK, {})).result]
        finally:
            await nursery.close()

    try:
        assert asyncio.run(play()) == ["true", "true"]
    finally:
        os.kill(int(note.read_text()), 9)


def test_an_agent_of_too_many_processes_is_ended_with_all_of_them(tmp_path: Path) -> None:
    text = "import os, sys, time\nwhile True:\n    child = os.fork()\n    if child == 0: time.sleep(600)\n"
    text += "    with open(sys.argv[1], 'a') as file: file.write(f'{child}\\n')\n    time.sleep(0.001)\n"
    note = tmp_path / "pids"
    assert "more than 256 processes" in str(run_agent(command=f"{script(tmp_path, text)} {note}").problem)
    started = [*map(int, note.read_text().split())]
    assert len(started) >= 256
    assert not [process for process in started if is_running(process)]


def test_agents_end_when_temper_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = f"{script(tmp_path, DAEMON + 'time.sleep(600)')} {note}"
    child = os.fork()
    if child == 0:
        try:
            run_agent(seconds=60.0, command=command)
        finally:
            os._exit(0)
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    while is_running(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(int(note.read_text()))


def test_a_nursery_that_was_killed_is_started_anew(tmp_path: Path) -> None:
    async def play() -> list[str]:
        nursery = Nursery(AgentEnv(command=script(tmp_path, "print('here')")).settings)
        try:
            first = await nursery.run(TASK, {})
            assert nursery._process is not None
            nursery._process.kill()
            await asyncio.wait_for(nursery._process.wait(), 10)
            return [first.result, (await nursery.run(TASK, {})).result]
        finally:
            await nursery.close()

    assert asyncio.run(play()) == ["here", "here"]


def test_a_function_that_cannot_be_imported_is_the_users_mistake(tmp_path: Path) -> None:
    script(tmp_path, "import nothing_of_this_name")
    with pytest.raises(UserError, match=r"cannot be started: ModuleNotFoundError: .*nothing_of_this_name"):
        run_agent(function=f"{tmp_path / 'agent.py'}:solve")


def test_an_import_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    slow = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    script(tmp_path, slow + "def solve(task): return 1")
    with pytest.raises(TimeoutError):
        run_agent(seconds=2.0, function=f"{tmp_path / 'agent.py'}:solve")
    assert not is_running(int(note.read_text()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "options.command"),
        ({"command": "x", "function": "a:b"}, "options.command"),
        ({"command": "no-such-program --x"}, "there is no program 'no-such-program'"),
        ({"command": "python x.py 'one"}, r"options.command = \"python x.py 'one\" cannot be .* No closing quotation"),
        ({"command": "python x.py \\"}, r"options.command = .* No escaped character"),
        ({"command": " "}, "options.command = ' ' names no program"),
        ({"command": "python no_such_agent.py"}, "no_such_agent.py, which options.command names, is not there"),
        ({"command": f"{sys.executable} -u {HERE}/test_lunch.py x"}, "Did you mean .*/test_launch.py"),
        ({"function": "solve"}, "package.module:name"),
        ({"function": "no/such.py:solve"}, "no/such.py is not there"),
        ({"command": "python x.py", "max_running": 0}, "max_running=0"),
        ({"function": "json:loads", "sandbox": True}, "takes a command"),
        ({"command": "python x.py", "tools": "hermse"}, "call_format"),
        ({"command": "python x.py", "python": "/no/python"}, "python='/no/python'"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AgentEnv(**options)


@pytest.mark.parametrize(
    "command", ["python -m x.py", "python -c 1 x.py", "python -W ignore x.py", "bash x.py", "python x", "python"]
)
def test_a_command_whose_script_is_not_clear_is_left_to_the_dry_run(command: str) -> None:
    AgentEnv(command=command)


def test_how_an_agent_ended_is_heard_also_when_it_is_ended_from_here(tmp_path: Path) -> None:
    heard: list[ProcessEnd] = []
    said = "import sys, time\nprint('last words', file=sys.stderr, flush=True)\n"

    async def play(then: str) -> None:
        settings = AgentEnv(command=script(tmp_path, said + then)).settings
        nursery = Nursery(settings, heard=heard.append)
        try:
            await asyncio.wait_for(nursery.run(TASK, {}), 2.0)
        finally:
            await nursery.close()

    asyncio.run(play("sys.exit(3)"))
    with pytest.raises(TimeoutError):
        asyncio.run(play("time.sleep(60)"))
    assert [end.last_words for end in heard] == ["last words", "last words"]
    assert [end.how for end in heard] == ["ended with exit code 3", "was ended: hung up"]


def test_an_agent_is_not_played_as_an_environment() -> None:
    env, task = AgentEnv(command="python"), Task(id="t", messages=(Message(role="user", content="hello"),))
    for act in (env.start(task, 0), env.step(task.messages[0])):
        with pytest.raises(TaskError, match="an agent asks for itself"):
            asyncio.run(act)


def test_the_gold_answer_is_not_told() -> None:
    task = Task(id="t", messages=(Message(role="user", content="6*7"),), answer="42", extra={"hidden": "42"})
    assert "42" not in str(task_for_agent(task, task.messages, 0))


@pytest.mark.parametrize(
    ("printed", "result"),
    [
        ("42\n", "42"),
        ('log line\n{"result": "42"}\n', "42"),
        ('{"result": {"a": 1}}', '{"a": 1}'),
        ('first\n{"other": 1}', 'first\n{"other": 1}'),
        ("", ""),
    ],
)
def test_a_result_is_the_last_line_when_that_says_so_and_else_everything(printed: str, result: str) -> None:
    assert result_of(printed) == result
