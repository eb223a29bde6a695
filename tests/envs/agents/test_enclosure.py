"""An agent behind the wall reaches the model and nothing else, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from temper.envs.agents.agent import AgentEnv
from temper.envs.agents.launch import MODEL_SOCKET, AgentEnd, Nursery
from temper.errors import UserError
from temper.sandbox import require_sandbox
from temper.sandbox.enclosure import enclose, show_files

TASK = {"id": "t", "prompt": "hello", "messages": [], "seed": 0}
PORT = 18997
ASK = """
import json, os, sys, urllib.request
def ask():
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat", json.load(sys.stdin)["prompt"].encode())
    return urllib.request.urlopen(request, timeout=20).read().decode()
"""


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    body = await reader.readexactly(int(found[1]) if found else 0)
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body.upper())
    await writer.drain()
    writer.close()


def run_agent(
    folder: Path,
    text: str,
    seconds: float = 40.0,
    *,
    name: str = "agent.py",
    closed: Sequence[str] = (),
    hide: Any = (),
    command: str = "",
) -> AgentEnd:
    """The agent's end; TimeoutError when it takes longer, and is ended."""
    (folder / name).write_text(text)
    command = command or f"{sys.executable} {folder / name}"
    settings = AgentEnv(command=command, sandbox=True, hide=hide).settings

    async def play() -> AgentEnd:
        place = str(folder / "socket")
        server = await asyncio.start_unix_server(answer, place)
        nursery = Nursery(settings, closed)
        try:
            variables = {"OPENAI_BASE_URL": f"http://127.0.0.1:{PORT}/v1", MODEL_SOCKET: place}
            return await asyncio.wait_for(nursery.run(TASK, variables), seconds)
        finally:
            await nursery.close()
            server.close()

    return asyncio.run(play())


def marked(mark: str) -> list[int]:
    """Living processes that have this word among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def wait_until_none(mark: str) -> list[int]:
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return marked(mark)


def test_an_agent_reaches_the_model_through_its_own_address(tmp_path: Path) -> None:
    end = run_agent(tmp_path, f"{ASK}\nprint(ask())")
    assert (end.problem, end.result) == (None, "HELLO")


def test_an_agent_reaches_nothing_else(tmp_path: Path) -> None:
    text = f"""{ASK}
import socket
def tell(name, act):
    try:
        print(name, "DONE", act())
    except BaseException as error:
        print(name, "denied", type(error).__name__)
tell("model", ask)
tell("host", lambda: socket.create_connection(("127.0.0.1", PORT_OF_HOST), 2))
tell("outside", lambda: socket.create_connection(("1.1.1.1", 80), 2))
tell("own file", lambda: open("{tmp_path}/mine", "w"))
tell("working folder", lambda: open("mine", "w"))
tell("home", lambda: os.listdir("{Path.home()}/.ssh"))
tell("passwords", lambda: open("/etc/passwd").read())
tell("processes", lambda: len([name for name in os.listdir("/proc") if name.isdigit()]) > 9 or 1 / 0)
tell("mount", lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else 1 / 0)
tell("scratch", lambda: open("/tmp/mine", "w").write("x"))
"""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        text = text.replace("PORT_OF_HOST", str(listening.getsockname()[1]))
        end = run_agent(tmp_path, text)
    assert end.problem is None
    said = dict(line.split(" DONE " if " DONE " in line else " denied ", 1) for line in end.result.splitlines())
    done = {line.split(" DONE ")[0] for line in end.result.splitlines() if " DONE " in line}
    assert done == {"model", "scratch"}, said


LOOK = """
import os, pathlib, sys
def seen(*paths):
    for path in map(pathlib.Path, paths):
        try:
            print(path, sorted(os.listdir(path)) if path.is_dir() else path.read_text())
        except OSError as error:
            print(path, type(error).__name__)
"""


def test_an_agent_sees_nothing_of_the_temporary_files_beside_its_own(tmp_path: Path) -> None:
    """Among them lie the sockets of this run: whoever reaches that of the nursery starts programs outside."""
    folder = Path(tempfile.gettempdir())
    name = f"agent-{secrets.token_hex(8)}.py"
    try:
        end = run_agent(folder, f"{LOOK}\nseen('{folder}')\nopen('/tmp/mine', 'w').write('x')", name=name)
    finally:
        (folder / name).unlink()
        (folder / "socket").unlink(missing_ok=True)
    assert (end.problem, end.result) == (None, f"{folder} ['{name}']")


def test_temporary_files_in_the_working_folder_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as short:  # the path of a socket has 108 bytes at most
        folder = Path(short)
        (folder / "scratch" / "inner").mkdir(parents=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "scratch"))
        end = run_agent(folder, f"{LOOK}\nseen('scratch')")
        monkeypatch.undo()
    assert (end.problem, end.result) == (None, "scratch []")


def test_of_tls_only_certificates_are_seen(tmp_path: Path) -> None:
    end = run_agent(tmp_path, "import os\nprint(sorted(os.listdir('/etc/ssl')), sorted(os.listdir('/etc')))")
    shown = {"alternatives", "hosts", "ld.so.cache", "localtime", "nsswitch.conf", "ssl"}
    tls, other = end.result.split("] [")
    assert set(re.findall(r"'([^']+)'", tls)) <= {"certs", "openssl.cnf"}
    assert set(re.findall(r"'([^']+)'", other)) <= shown


WRITE = """
import os
def tell(path, flags):
    try:
        os.close(os.open(path, flags | os.O_WRONLY | os.O_NONBLOCK))
        print(path)
    except OSError:
        pass
for folder, folders, files in os.walk("/"):
    if folder in ("/proc", "/usr", "/root", os.getcwd()):
        folders[:] = [name for name in folders if folder == "/proc" and not name.isdigit()]
    for name in files:
        if not os.path.islink(os.path.join(folder, name)):
            tell(os.path.join(folder, name), 0)
    tell(os.path.join(folder, "mine"), os.O_CREAT)
tell("/proc/self/comm", 0)
"""


def test_an_agent_writes_only_where_it_has_its_own_room(tmp_path: Path) -> None:
    """Settings of the machine in /proc/sys belong to root, and so to what root starts, whatever its capabilities."""
    end = run_agent(tmp_path, WRITE)
    assert end.problem is None
    places = {line for line in end.result.splitlines() if not line.startswith("/tmp/")}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "pts/ptmx")}
    assert places - devices == {"/dev/shm/mine"}


FILL = """
for folder in ("/tmp", "/dev/shm"):
    with open(folder + "/large", "wb", buffering=0) as file:
        for count in range(400):
            try:
                file.write(bytes(1 << 20))
            except OSError as error:
                print(folder, count, error.errno)
                break
"""


def test_what_an_agent_may_write_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("temper.sandbox.enclosure.TMP_BYTES", 8 << 20)
    end = run_agent(tmp_path, FILL)
    assert end.result.splitlines() == [f"{folder} 8 {errno.ENOSPC}" for folder in ("/tmp", "/dev/shm")]


def test_of_a_prefix_of_many_programs_only_programs_and_libraries_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    local, outer = tmp_path / "home" / ".local", tmp_path / "home" / "own"
    for name in ("bin", "lib", "share/keyrings", "etc"):
        (local / name).mkdir(parents=True)
        (local / name / "file").write_text(name)
    outer.mkdir()
    program = local / "bin" / "agent"
    program.write_text(f"#!{sys.executable}\n{LOOK}\nseen('{local}', '{local}/lib/file')")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{local / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(outer)
    end = run_agent(tmp_path, "", command="agent")
    assert (end.problem, end.result) == (None, f"{local} ['bin', 'lib']\n{local}/lib/file lib")


def test_a_file_of_a_wide_folder_is_shown_alone() -> None:
    def shown(*words: str, python: str = sys.executable) -> list[str]:
        arguments = show_files(words, python)
        return [arguments[place + 1] for place, word in enumerate(arguments) if word == "--ro-bind"]

    assert "/etc/passwd" in shown("python", "/etc/passwd")
    assert "/etc" not in shown("python", "/etc/passwd")
    local = shown("python", python="/usr/local/bin/python3")
    assert "/usr/local/bin" in local, "it is no folder of the system's, and programs there did not start"
    assert not {"/usr", "/usr/local", "/usr/local/etc"} & set(local)


def test_folders_of_runs_are_empty_but_for_what_the_command_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "agents"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.db").write_text("gold")
    monkeypatch.chdir(tmp_path)
    look = f"{LOOK}\nseen('runs', 'runs/demo/run.db', 'runs/agents/agent.py', '.')\nopen('runs/mine', 'w')"
    closed = [str(tmp_path / "runs")]
    end = run_agent(tmp_path, look, closed=closed)
    assert "exit code 1" in str(end.problem)
    assert "Read-only file system: 'runs/mine'" in str(end.problem)
    look = look.partition("\nopen(")[0]
    assert run_agent(tmp_path, look, closed=closed).result.splitlines() == [
        "runs []",
        "runs/demo/run.db FileNotFoundError",
        "runs/agents/agent.py FileNotFoundError",
        ". ['agent.py', 'runs', 'socket']",
    ]
    within = run_agent(tmp_path / "runs" / "agents", "import os\nprint(os.listdir('runs'))", closed=closed)
    assert within.result == "['agents']"
    beside = run_agent(tmp_path / "runs", "import os\nprint(os.listdir('runs'))", closed=closed)
    assert beside.result == "['agent.py']"


def test_what_a_recipe_hides_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/train.jsonl", "answers.txt", "notes.txt"):
        (tmp_path / name).write_text("gold")
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    look = f"{LOOK}\nseen('data', 'link', 'answers.txt', 'notes.txt')"
    assert run_agent(tmp_path, look).result.count("gold") == 2
    for hide in (["data", "answers.txt"], [str(tmp_path / "link"), "answers.txt"]):
        end = run_agent(tmp_path, look, hide=hide)
        assert end.problem is None
        assert end.result.splitlines() == ["data []", "link []", "answers.txt PermissionError", "notes.txt gold"]


def test_hiding_is_refused_where_it_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for options, problem in (
        ({"hide": ["agent.py"]}, "sandbox = true, or leave it out"),
        ({"hide": ["agents.py"], "sandbox": True}, r"'agents.py', and that is not there. Did you mean"),
        ({"hide": ["."], "sandbox": True}, "the agent needs"),
        ({"hide": [sys.prefix], "sandbox": True}, "the agent needs"),
        ({"hide": ["agent.py"], "sandbox": True}, "the agent needs"),
    ):
        with pytest.raises(UserError, match=problem):
            AgentEnv(command=f"{sys.executable} agent.py", **options)
    with pytest.raises(UserError, match="hide is for agents that Temper starts"):
        AgentEnv(url="http://127.0.0.1:9/x", hide=["agent.py"])


def test_a_crash_is_told_with_its_words_and_code(tmp_path: Path) -> None:
    assert re.search("exit code 1.*no luck", str(run_agent(tmp_path, "raise ValueError('no luck')").problem), re.DOTALL)
    killed = run_agent(tmp_path, "import os\nos.kill(os.getpid(), 9)")
    assert "exit code 137" in str(killed.problem)


def test_what_an_agent_leaves_running_ends_with_it(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    left = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99) # {mark}'],"
    end = run_agent(tmp_path, f"{left} start_new_session=True)\nprint('bye')")
    assert (end.problem, end.result) == (None, "bye")
    assert wait_until_none(mark) == []


def test_an_agent_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    text = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99) # {mark}"], start_new_session=True)
print("started", flush=True)
time.sleep(99)
"""
    with pytest.raises(TimeoutError):
        run_agent(tmp_path, text, seconds=4.0)
    assert wait_until_none(mark) == []


@pytest.mark.heavy
def test_a_fork_bomb_is_the_end_of_its_episode_alone(tmp_path: Path) -> None:
    text = "import os\nwhile True:\n    os.fork()\n"
    problem = str(run_agent(tmp_path, text).problem)
    assert "Resource temporarily unavailable" in problem or "more than 256 processes" in problem, problem
    assert wait_until_none(str(tmp_path / "agent.py")) == []
    assert run_agent(tmp_path, f"{ASK}\nprint(ask())").result == "HELLO", "the next is not harmed"


@pytest.mark.parametrize("folder", ["/", "/etc", str(Path.home()), str(Path.home().parent), "/tmp"])
def test_a_folder_that_would_show_everything_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="the agent's own folder"):
        enclose("python agent.py", python=sys.executable, socket="/s", port=1)
