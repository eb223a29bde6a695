"""Acts a hostile program may try. Each is denied, leaves the host unchanged and the pool healthy."""

from __future__ import annotations

import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from temper.errors import UserError
from temper.sandbox import Limits, Program, Sandbox, SandboxFailed, boundary
from temper.sandbox.filter import ARCHITECTURES, CLONE3, DENIED

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("healthy")]

Outside = Callable[..., str]


class Mark(Protocol):
    source: str

    def living(self) -> list[int]: ...


SHORT = Limits(wall_seconds=1.0)
TRY = """
def attempt(act, *arguments):
    try:
        print("DONE", act(*arguments))
    except BaseException as error:
        print("denied", type(error).__name__)
"""


@contextmanager
def server(family: int, address: object) -> Iterator[tuple[object, list[bytes]]]:
    """A listening server of this test, and what reached it."""
    heard: list[bytes] = []
    with socket.socket(family) as listening:
        listening.bind(address)
        listening.listen()
        listening.settimeout(0.05)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5.0)
                    heard.append(connection.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname(), heard
        stop.set()
        thread.join(timeout=10.0)


CALL_HOME = "import socket\ns = socket.socket({family})\ns.connect({address!r})\ns.sendall(b'secret')\nprint('reached')"


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, f"\0temper-test-{os.getpid()}")],
    ids=["loopback", "abstract unix socket"],
)
def test_the_network_is_out_of_reach(sandbox: Sandbox, outside: Outside, family: int, address: object) -> None:
    with server(family, address) as (bound, heard):
        source = CALL_HOME.format(family=int(family), address=bound)
        assert outside(source) == "reached\n"
        outcome = sandbox.run_sync(Program(source))
    assert outcome.status == "error"
    assert outcome.stdout == ""
    assert heard == [b"secret"], "only the control reached the server"


def test_socket_families_other_than_unix_do_not_exist(sandbox: Sandbox, outside: Outside) -> None:
    source = TRY + "import socket\nfor family in (2, 10, 16, 1):\n    attempt(lambda: socket.socket(family, 2).family)"
    assert outside(source).count("DONE") >= 3
    lines = sandbox.run_sync(Program(source)).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["denied", "denied", "denied", "DONE"]


def test_host_files_cannot_be_read(sandbox: Sandbox, outside: Outside, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    secret.chmod(0o644)
    read = TRY + f"attempt(lambda: open({str(secret)!r}).read())"
    assert outside(read) == "DONE the secret\n"
    assert sandbox.run_sync(Program(read)).stdout == "denied FileNotFoundError\n"
    for path in ("/etc/shadow", "/etc/passwd", "/etc/hostname", str(Path.home() / ".ssh"), str(Path(__file__))):
        source = TRY + f"import os\nattempt(os.stat, {path!r})"
        assert sandbox.run_sync(Program(source)).stdout == "denied FileNotFoundError\n", path


def test_the_file_system_holds_only_the_interpreter_and_the_libraries(sandbox: Sandbox) -> None:
    source = (
        "import os\nprint(sorted(os.listdir('/')))\nprint(sorted(os.listdir('/usr')), os.listdir('/etc'))\n"
        f"path = {sys.base_prefix!r}\n"
        "while path not in ('/', '/usr'):\n"
        "    print(sorted(os.listdir(path)))\n    path = os.path.dirname(path)"
    )
    root, system, *above = sandbox.run_sync(Program(source)).stdout.splitlines()
    first = sys.base_prefix.split("/")[1]
    assert set(eval(root)) <= {"dev", "etc", "lib", "lib32", "lib64", "proc", "tmp", "usr", first}
    assert "ld.so.cache" in system or "[]" in system
    if not sys.base_prefix.startswith("/usr"):
        assert set(eval(above[0])) <= {"bin", "lib", "lib64"}
        assert all(len(eval(line)) == 1 for line in above[1:]), "nothing beside the interpreter's own folder"


def test_environment_secrets_do_not_come_along(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, has_sandbox: None
) -> None:
    monkeypatch.setenv("TEMPER_TEST_SECRET", "hunter2")
    source = TRY + (
        "import os\nprint(dict(os.environ))\n"
        "for pid in ('self', '1'):\n    attempt(lambda: open(f'/proc/{pid}/environ').read())"
    )
    assert "hunter2" in outside(source)
    fresh = Sandbox(size=1)
    try:
        outcome = fresh.run_sync(Program(source))
    finally:
        fresh.close()
    assert outcome.status == "ok"
    assert "hunter2" not in outcome.stdout
    assert "denied PermissionError" in outcome.stdout, "nor those of the supervisor"


def test_nothing_outside_the_folder_can_be_written(sandbox: Sandbox, outside: Outside, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mark = tmp_path / "planted"
    write = TRY + f"attempt(lambda: open({str(mark)!r}, 'w').write('x'))"
    assert outside(write).startswith("DONE")
    mark.unlink()
    assert sandbox.run_sync(Program(write)).stdout.startswith("denied")
    assert not mark.exists()
    library = os.path.dirname(os.__file__)
    for path in ("/planted", "/usr/lib/planted", "/etc/planted", "/dev/planted", f"{library}/planted",
                 "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/oom_score_adj"):  # fmt: skip
        source = TRY + f"attempt(lambda: open({path!r}, 'w').write('x'))"
        assert sandbox.run_sync(Program(source)).stdout.startswith("denied"), path
    assert not os.path.exists(f"{library}/planted")


@pytest.mark.parametrize("path", ["../planted", "/tmp/planted", "a/../../planted", "", "main.py", "a\0b"])
def test_program_files_stay_in_the_folder(path: str) -> None:
    with pytest.raises(UserError, match="not allowed"):
        Program("", files={path: "x"})


def test_symlinks_lead_nowhere(sandbox: Sandbox, outside: Outside, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    source = TRY + (
        f"import os\nos.symlink({str(secret)!r}, 'link')\nattempt(lambda: open('link').read())\n"
        f"attempt(lambda: open('/proc/self/root' + {str(secret)!r}).read())\n"
        f"attempt(lambda: open('/proc/self/cwd/' + '../' * 20 + {str(secret)!r}).read())"
    )
    assert outside(source).count("DONE the secret") == 3
    assert "DONE" not in sandbox.run_sync(Program(source)).stdout
    assert secret.read_text() == "the secret"


def test_a_fork_bomb_stays_within_its_process_limit(sandbox: Sandbox, mark: Mark) -> None:
    bomb = "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    outcome = sandbox.run_sync(Program(mark.source + bomb), SHORT)
    assert outcome.status in ("timeout", "killed")
    assert mark.living() == []
    count = (
        "import os, time\nmade = 0\nwhile made < 200:\n    try:\n"
        "        if os.fork() == 0:\n            time.sleep(60)\n        made += 1\n"
        "    except OSError:\n        break\nprint(made)"
    )
    for processes in (4, 16):
        outcome = sandbox.run_sync(Program(count), Limits(wall_seconds=30.0, processes=processes))
        assert (outcome.status, int(outcome.stdout)) == ("ok", processes - 1)


GREEDY = "parts = []\nfor _ in range(128):\n    parts.append(bytearray(b'x') * (8 << 20))\nprint('got it all')"
MANY_GREEDY = (
    "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        kept = bytearray(b'x') * (64 << 20)\n"
    "        time.sleep(60)\ntime.sleep(60)"
)


@pytest.mark.parametrize("source", [GREEDY, MANY_GREEDY], ids=["one process", "eight processes"])
@pytest.mark.parametrize("guard", ["control group", "watcher"])
def test_a_memory_bomb_ends_with_status_memory(has_sandbox: None, source: str, guard: str) -> None:
    pool = Sandbox(size=1, limits=Limits(wall_seconds=20.0))
    try:
        if guard == "watcher":
            pool._homes = None
        elif pool._homes is None:
            pytest.skip("no control group is writable here")
        assert pool.run_sync(Program(source)).status == "memory"
        assert pool.run_sync(Program(source), Limits(wall_seconds=3.0, memory_bytes=2 << 30)).status != "memory"
    finally:
        pool.close()


FILL = """
import os
written = 0
for folder in ("/tmp/box", "/tmp", "/dev/shm"):
    for number in range(64):
        try:
            with open(f"{folder}/fill{number}", "wb", buffering=0) as file:
                for _ in range(64):
                    written += file.write(b"x" * (1 << 16))
        except OSError as error:
            print(folder, error.errno)
            break
print(written)
"""


def test_the_disk_cannot_be_filled(sandbox: Sandbox) -> None:
    before = os.statvfs("/tmp").f_bavail
    outcome = sandbox.run_sync(Program(FILL), Limits(wall_seconds=30.0, file_bytes=4 << 20))
    assert outcome.status == "ok"
    assert int(outcome.stdout.split()[-1]) <= 2 * (4 << 20), "the folder and /dev/shm have one limit each"
    big = "file = open('big', 'wb')\nfor _ in range(9):\n    file.write(b'x' * (1 << 20))"
    assert sandbox.run_sync(Program(big), Limits(wall_seconds=30.0, file_bytes=4 << 20)).status == "error"
    assert sandbox.run_sync(Program(big), Limits(wall_seconds=30.0, file_bytes=32 << 20)).status == "ok"
    assert os.statvfs("/tmp").f_bavail > before - (1 << 20), "not a host file system"


def test_signals_do_not_reach_the_parent(sandbox: Sandbox, outside: Outside) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        source = TRY + (
            "import os, signal\n"
            f"attempt(os.kill, {victim.pid}, signal.SIGTERM)\n"
            "for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):\n"
            "    for pid in (1, os.getppid(), -1):\n"
            "        try:\n            os.kill(pid, number)\n        except OSError:\n            pass\n"
            "print('still here')"
        )
        outcome = sandbox.run_sync(Program(source))
        assert (outcome.status, outcome.stdout) == ("ok", "denied ProcessLookupError\nstill here\n")
        assert victim.poll() is None
        assert outside(TRY + f"import os\nattempt(os.kill, {victim.pid}, 15)") == "DONE None\n"
        assert victim.wait(timeout=30) == -signal.SIGTERM
    finally:
        victim.kill()


KEEPS_PIPE = (
    "if os.fork() == 0:\n    if os.fork() == 0:\n        import time\n        time.sleep({seconds})\n    os._exit(0)"
)


def test_a_grandchild_that_keeps_the_pipe_open_does_not_delay_the_outcome(
    sandbox: Sandbox, outside: Outside, mark: Mark, wait_until: Callable[[Callable[[], bool]], bool]
) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        outside(mark.source + KEEPS_PIPE.format(seconds=3), seconds=1.0)
    assert mark.living() != [], "outside, the grandchild lives on"
    assert wait_until(lambda: mark.living() == [])
    outcome = sandbox.run_sync(Program(mark.source + KEEPS_PIPE.format(seconds=60)), Limits(wall_seconds=20.0))
    assert outcome.status == "ok"
    assert mark.living() == []


def test_a_child_in_its_own_session_that_ignores_hangup_dies_too(sandbox: Sandbox, mark: Mark) -> None:
    source = mark.source + (
        "import signal, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    os.close(1); os.close(2)\n    while True:\n        time.sleep(1)\n"
        "time.sleep(0.1)"
    )
    outcome = sandbox.run_sync(Program(source))
    assert outcome.status == "ok"
    assert mark.living() == []


LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def test_ptrace_and_foreign_memory_are_denied(sandbox: Sandbox, outside: Outside) -> None:
    trace = LIBC + "print(libc.ptrace(0, 0, 0, 0), ctypes.get_errno())"
    assert outside(trace) == "0 0\n"
    assert sandbox.run_sync(Program(trace)).stdout == "-1 1\n"
    peek = LIBC + (
        "class Part(ctypes.Structure):\n    _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]\n"
        "source, target = ctypes.create_string_buffer(b'x' * 8), ctypes.create_string_buffer(8)\n"
        "there, here = Part(ctypes.addressof(source), 8), Part(ctypes.addressof(target), 8)\n"
        "print(libc.process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0))"
    )
    assert outside(peek) == "8\n"
    assert sandbox.run_sync(Program(peek)).stdout == "-1\n"


def test_mounting_and_new_namespaces_are_denied(sandbox: Sandbox, outside: Outside) -> None:
    fork_into = LIBC + "print(libc.unshare(0x10000000), ctypes.get_errno())"
    assert outside(fork_into) == "0 0\n"
    assert sandbox.run_sync(Program(fork_into)).stdout == "-1 1\n"
    mount = LIBC + "print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), ctypes.get_errno())"
    assert sandbox.run_sync(Program(mount)).stdout == "-1 1\n"


def test_every_denied_call_is_denied_by_the_kernel(sandbox: Sandbox) -> None:
    column = list(ARCHITECTURES).index(platform.machine())
    numbers = {name: pair[column] for name, pair in DENIED.items() if pair[column] is not None}
    source = LIBC + (
        f"for name, number in {numbers!r}.items():\n"
        "    ctypes.set_errno(0)\n    print(name, libc.syscall(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno())\n"
        f"print('clone3', libc.syscall({CLONE3[column]}, 0, 0), ctypes.get_errno())"
    )
    lines = sandbox.run_sync(Program(source)).stdout.splitlines()
    assert lines == [*(f"{name} -1 1" for name in numbers), "clone3 -1 38"]


def test_proc_shows_nothing_of_the_host_or_the_supervisor(sandbox: Sandbox, outside: Outside) -> None:
    source = TRY + (
        "import os\nprint(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))\n"
        "print([os.readlink(f'/proc/self/fd/{number}').split(':')[0] for number in range(3)])\n"
        "for number in range(3, 256):\n"
        "    try:\n        os.fstat(number)\n        print('open', number)\n    except OSError:\n        pass\n"
        "for name in ('mem', 'environ', 'maps'):\n    attempt(lambda: open(f'/proc/1/{name}', 'rb').read(1))\n"
        "attempt(os.listdir, '/proc/1/fd')\nattempt(os.listdir, '/proc/1/root')\nattempt(os.readlink, '/proc/1/cwd')\n"
        f"attempt(os.stat, '/proc/{os.getpid()}')"
    )
    assert outside(f"import os; print(os.path.exists('/proc/{os.getpid()}'))") == "True\n"
    pids, links, *attempts = sandbox.run_sync(Program(source)).stdout.splitlines()
    assert pids == "[1, 2]"
    assert links == "['/tmp/stdin (deleted)', 'pipe', 'pipe']"
    assert len(attempts) == 7
    assert all(line.startswith("denied") for line in attempts), attempts


FORGE = """
import os, signal
for number in [*range(3, 64), *(f"/proc/1/fd/{n}" for n in range(64))]:
    try:
        os.write(number if isinstance(number, int) else os.open(number, os.O_WRONLY), b"exit 0 0 0\\n")
    except OSError:
        pass
try:
    libc = __import__("ctypes").CDLL(None)
    control = int(open("/proc/1/cmdline").read().split("\\0")[-2])
    libc.syscall(438, libc.syscall(434, 1, 0), control, 0)
    # The supervisor's memory: change the word its report begins with.
    maps = [line.split() for line in open("/proc/1/maps") if " rw-p " in line]
    with open("/proc/1/mem", "r+b", buffering=0) as memory:
        for part in maps:
            start, end = (int(edge, 16) for edge in part[0].split("-"))
            memory.seek(start)
            content = memory.read(end - start)
            place = content.find(b"exit ")
            while place >= 0:
                memory.seek(start + place)
                memory.write(b"EXIT ")
                place = content.find(b"exit ", place + 1)
except OSError:
    pass
os.kill(1, signal.SIGINT)
print("exit 0 0 0", flush=True)
os._exit(7)
"""


def test_the_status_cannot_be_forged(sandbox: Sandbox) -> None:
    outcome = sandbox.run_sync(Program(FORGE))
    assert (outcome.status, outcome.exit_code, outcome.stdout) == ("error", 7, "exit 0 0 0\n")


def test_a_supervisor_that_left_its_memory_open_would_be_caught(
    has_sandbox: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault for the test above: the same program changes what an unprotected supervisor says."""
    open_guest = boundary._guest_text().replace("if not set_dumpable(0):", "if False:")
    assert open_guest != boundary._guest_text()
    monkeypatch.setattr(boundary, "_guest_text", lambda: open_guest)
    weak = Sandbox(size=1)
    try:
        with pytest.raises(SandboxFailed, match="without a result: 7"):  # "exit 7" has become "EXIT 7"
            weak.run_sync(Program(FORGE))
    finally:
        weak.close()


def test_no_descriptor_of_the_host_comes_along_whatever_its_number(has_sandbox: None) -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(600)]
    for descriptor in held:
        os.set_inheritable(descriptor, True)
    pool = Sandbox(size=1)
    try:
        source = (
            "import os\nfound = []\nfor number in range(3, 5000):\n"
            "    try:\n        os.fstat(number)\n        found.append(number)\n    except OSError:\n        pass\n"
            "print(found)"
        )
        assert pool.run_sync(Program(source)).stdout == "[]\n"
    finally:
        pool.close()
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_is_cut_at_the_cap(sandbox: Sandbox, stream: str) -> None:
    source = f"import sys\nwhile True:\n    sys.{stream}.write('x' * 65536)"
    outcome = sandbox.run_sync(Program(source))
    assert (outcome.status, outcome.exit_code) == ("output", None)
    assert len(outcome.stdout) + len(outcome.stderr) == sandbox.limits.output_bytes
    exactly = sandbox.run_sync(Program("print('x' * 99)"), Limits(wall_seconds=30.0, output_bytes=100))
    assert (exactly.status, len(exactly.stdout)) == ("ok", 100)


STUBBORN = {
    "sleeps through every signal": (
        "import signal, time\nfor number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    time.sleep(60)"
    ),
    "a power tower in C": "print(len(str(10 ** 10 ** 8)))",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "stopped itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "waits for input for ever": "import os\nr, w = os.pipe()\nos.read(r, 1)",
}


@pytest.mark.parametrize("source", STUBBORN.values(), ids=STUBBORN.keys())
def test_what_does_not_end_is_ended(sandbox: Sandbox, mark: Mark, source: str) -> None:
    outcome = sandbox.run_sync(Program(mark.source + source), SHORT)
    assert (outcome.status, outcome.exit_code) == ("timeout", None)
    assert mark.living() == []


def test_processor_time_of_all_processes_is_limited(sandbox: Sandbox) -> None:
    spin = "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    pass"
    outcome = sandbox.run_sync(Program(spin), Limits(wall_seconds=60.0, cpu_seconds=1.0))
    assert outcome.status == "timeout"
    assert outcome.seconds < 60.0
    ignores = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass"
    assert sandbox.run_sync(Program(ignores), Limits(wall_seconds=60.0, cpu_seconds=0.5)).status == "timeout"
