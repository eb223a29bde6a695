"""The supervisor inside a sandbox: process 1 of its namespace. Its text is handed to a bare interpreter with -c.

Owns: writing the program's files, its rlimits, one forked child that becomes the program, its wait status.
Refuses: a second program. When it ends the kernel kills everything left in the namespace.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]
import _sitebuiltins
import builtins
import marshal
import os
import resource
import sys

# Every import here is paid once per program: the private modules spare enum, typing and re, half of the start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

FOLDER = "/tmp/box"
SET_DUMPABLE = 4
OPEN_FILES = 256


def set_dumpable(value: int) -> bool:
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    return bool(_ctypes.call_function(prctl, (SET_DUMPABLE, value, 0, 0, 0)) == 0)


def report(control: int, line: str) -> None:
    os.write(control, f"{line}\n".encode(errors="replace"))


def receive(control: int) -> dict[str, Any]:
    parts = []
    while part := os.read(control, 1 << 16):
        parts.append(part)
    if not parts:
        os._exit(0)  # the host closed the pool before it had a program for us
    job: dict[str, Any] = marshal.loads(b"".join(parts))
    return job


def write_files(job: dict[str, Any]) -> int:
    """Returns a descriptor to read stdin from: a file, so that nobody has to feed a pipe while the program runs."""
    for name, content in job["files"].items():
        path = os.path.join(FOLDER, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb", opener=open_executable) as file:
            file.write(content)
    with open("/tmp/stdin", "wb") as file:
        file.write(job["stdin"])
    descriptor = os.open("/tmp/stdin", os.O_RDONLY)
    os.unlink("/tmp/stdin")
    return descriptor


def open_executable(path: str, flags: int) -> int:
    """Modes are not kept from one sandbox to the next, and a script may be meant to be run."""
    return os.open(path, flags, 0o755)


def supervise(control: int, program: int, job: dict[str, Any]) -> None:
    """Reaps every orphan; reports how the program ended and how much it used; ends the namespace."""
    while True:
        pid, status, usage = os.wait4(-1, 0)
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            cpu = usage.ru_utime + usage.ru_stime
            report(control, f"exit {code} {cpu:.3f} {usage.ru_maxrss * 1024}")
            if job["keep_bytes"]:
                end_others()
                send_files(control, job["keep_bytes"], job["max_files"])
            os._exit(0)


def end_others() -> None:
    """Nothing may write while files are read: what the program left running ends first."""
    try:
        while True:
            os.kill(-1, _signal.SIGKILL)  # all but this one, which is process 1
            os.waitpid(-1, 0)
    except (ChildProcessError, ProcessLookupError):
        pass  # nobody is left


def send_files(control: int, keep_bytes: int, max_files: int) -> None:
    """Each regular file as a line with the lengths of name and content, then both; the line "end" after the last.

    What the program made is not trusted: no link is followed, no special file opened, and the sum is bounded before
    anything is read. With too much of it, or paths too long to be opened, "end" never comes.
    """
    try:
        found = find_files(keep_bytes, max_files)
    except OSError:
        return
    for name, size in found:
        path = os.path.join(os.fsencode(FOLDER), name)
        os.chmod(path, 0o755)
        send(control, b"%d %d\n" % (len(name), size) + name)
        with open(path, "rb") as file:
            send(control, file.read())
    send(control, b"end\n")


def find_files(keep_bytes: int, max_files: int) -> list[tuple[bytes, int]]:
    """(path, size) of all regular files. Raises OSError when they are too much."""
    folders, found, room = [b""], [], keep_bytes
    for folder in folders:  # grows as it goes
        place = os.path.join(os.fsencode(FOLDER), folder)
        os.chmod(place, 0o755)
        with os.scandir(place) as entries:
            for entry in entries:
                name = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                elif entry.is_file(follow_symlinks=False):
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append((name, size))
                    room -= len(name) + size
                if room < 0 or len(found) > max_files or len(folders) > max_files:
                    raise OSError("too much to keep")
    return found


def send(control: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(control, view) :]


def limit(job: dict[str, Any]) -> None:
    cpu_seconds = int(job["cpu_seconds"]) + 1  # the host counts fractions
    chosen = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: job["address_bytes"],
        resource.RLIMIT_FSIZE: job["file_bytes"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if job["tasks"]:
        chosen[resource.RLIMIT_NPROC] = job["tasks"]
    for kind, value in chosen.items():
        _, hard = resource.getrlimit(kind)  # the host may allow less than that; no one may raise it
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def become_program(job: dict[str, Any], stdin: int) -> dict[str, Any]:
    """Makes this process look like `python main.py`; returns the namespace of its __main__."""
    os.dup2(stdin, 0)
    set_dumpable(1)
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    limit(job)
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    sys.argv = ["main.py", *job["arguments"]]
    sys.path.insert(0, FOLDER)
    sys.excepthook = show
    main = type(sys)("__main__")
    main.__dict__.update(__file__=f"{FOLDER}/main.py", __builtins__=__builtins__)
    sys.modules["__main__"] = main
    return main.__dict__


def close_descriptors() -> None:
    """All but stdin, stdout and stderr, whatever their numbers: the one to the host keeps its number from there."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            os.closerange(int(name), int(name) + 1)


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tracebacks start in main.py, not here."""
    inner = trace.tb_next if trace else None
    sys.__excepthook__(kind, error.with_traceback(inner), inner)


def start(control: int) -> tuple[bytes, dict[str, Any]]:
    """Comes back only in the forked child."""
    # The program runs under the same user id: without this it could rewrite our memory or take our descriptors
    # through /proc/1 and forge its own wait status.
    if not set_dumpable(0):
        os._exit(1)
    _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
    report(control, "ready")
    job = receive(control)
    try:
        stdin = write_files(job)
        program = os.fork()
        if program:
            os.close(stdin)
            supervise(control, program, job)
        namespace = become_program(job, stdin)
        close_descriptors()
    except Exception as error:  # no word of the program yet: whatever fails up to here is the sandbox's failure
        report(control, f"failed {type(error).__name__}: {error}")
        os._exit(1)
    return job["source"], namespace


if __name__ == "__main__":
    source, namespace = start(int(sys.argv[1]))
    # At the top level and uncaught: the interpreter itself handles exit codes, threads, atexit and flushing.
    exec(compile(source, f"{FOLDER}/main.py", "exec"), namespace)
