"""One sandbox, for one program: started ahead, fed once, watched, killed.

Owns: the host's side of the wall: descriptors, deadlines, the output cap, the verdict. Refuses: a second program, and
any word of the program about how it ended.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import platform
import select
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field

from temper.sandbox.boundary import Boundary
from temper.sandbox.cgroup import ControlGroup, Homes
from temper.sandbox.filter import filter_program
from temper.sandbox.program import MAX_FILES, Command, Limits, Outcome, Program, SandboxFailed, Status
from temper.sandbox.watch import measure

START_SECONDS = 30.0
"""Time to build the sandbox and start Python in it; not part of a program's deadline."""
WATCH_SECONDS = 0.05
DEATH_SECONDS = 10.0
GRACE_SECONDS = 1.0
CHUNK_BYTES = 1 << 16
HEADER_BYTES = 32
"""Longest line with the lengths of a file's name and content."""
INTERPRETER_BYTES = 64 << 20
"""Address space of the interpreter and its libraries, on top of what the program may use."""


class Cell:
    """kill() may come from any thread; everything else from the one that made it.

    Linux ties "die with parent" to the thread that started the child, so that thread must outlive the cell.
    """

    def __init__(self, boundary: Boundary, homes: Homes | None, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self._homes = homes
        self._group: ControlGroup | None = None
        self._watching: _Watching | None = None
        self._supervisor = 0
        self._pidfd = -1
        self._is_closed = False
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        self._info, info = os.pipe()
        seccomp = _readable(filter_program(platform.machine()))
        try:
            self._process = subprocess.Popen(
                boundary.command(seccomp=seccomp, info=info, control=theirs.fileno(), file_bytes=file_bytes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(), info, seccomp),
                bufsize=0,
                cwd="/",
                env={},
            )
        except OSError as error:
            self._control.close()
            os.close(self._info)
            raise SandboxFailed(f"bubblewrap could not be started: {error}") from error
        finally:
            theirs.close()
            for descriptor in (info, seccomp):
                os.close(descriptor)
        self._bwrap_pidfd = os.pidfd_open(self._process.pid)

    def wait_ready(self) -> None:
        """Returns when the supervisor inside waits for its program. Raises SandboxFailed with bubblewrap's reason."""
        if self._pidfd >= 0:
            return
        self._control.settimeout(START_SECONDS)
        try:
            line = self._control.recv(CHUNK_BYTES)
            if line != b"ready\n":
                raise SandboxFailed(f"the sandbox could not be built: {self._complaint()}")
            self._supervisor = int(json.loads(os.read(self._info, CHUNK_BYTES))["child-pid"])
            self._pidfd = os.pidfd_open(self._supervisor)
            if self._homes:
                self._group = ControlGroup(self._homes)
                self._group.add(self._supervisor)
        except (OSError, ValueError, KeyError) as error:
            raise SandboxFailed(f"the sandbox could not be built: {error or type(error).__name__}") from error

    def execute(self, program: Program | Command, limits: Limits) -> None:
        """Sends the program, watches until it ended or must end, and kills everything in the sandbox."""
        try:
            if self._group:
                self._group.limit(limits)
            self._watching = _Watching(limits, self._group)
            self._send(program, limits)
            self._watch(self._watching)
            if isinstance(program, Command) and self._watching.verdict is None:
                self._watching.files = self._receive_files(self._watching.rest, program.keep_bytes)
        except OSError as error:
            raise SandboxFailed(f"the sandbox broke: {type(error).__name__}: {error}") from error
        finally:
            self.kill()

    def conclude(self) -> Outcome:
        """After execute(): waits until every process is gone, then judges. Apart from it because dying takes a while
        and costs no processor time."""
        assert self._watching
        self._wait_gone()
        try:
            self._drain(self._watching)
            if self._group and self._group.has_run_out_of_memory():
                self._watching.verdict = "memory"  # also when the supervisor itself was the one to die
        except OSError as error:
            raise SandboxFailed(f"the sandbox broke: {type(error).__name__}: {error}") from error
        return self._watching.outcome()

    def kill(self) -> None:
        """SIGKILL for every process of a ready sandbox. From any thread, any number of times.

        One that is still being built is left to its own thread's close(): killing bubblewrap at that point can leave
        its half-made child waiting for ever.
        """
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:  # process 1 of the namespace: the kernel kills all others before it lets it end
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Kills, returns when every process is gone, gives descriptors and control group back. Only by its thread."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(SandboxFailed):
            self.wait_ready()
        self.kill()
        self._wait_gone()
        if self._group:
            self._group.remove()
        self._control.close()
        with self._lock:
            for descriptor in (self._info, self._bwrap_pidfd, self._pidfd):
                if descriptor >= 0:
                    os.close(descriptor)
            self._pidfd = -1
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def _wait_gone(self) -> None:
        if self._pidfd >= 0:
            _wait_readable(self._pidfd, DEATH_SECONDS)
        # Bubblewrap ends by itself once it has buried its child; killed earlier it would leave a zombie to the host.
        _wait_readable(self._bwrap_pidfd, GRACE_SECONDS)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=DEATH_SECONDS)

    def is_alive(self) -> bool:
        return self._pidfd >= 0 and not _wait_readable(self._pidfd, 0.0)

    @property
    def process_ids(self) -> list[int]:
        return [self._process.pid, *([self._supervisor] if self._supervisor else [])]

    def _send(self, program: Program | Command, limits: Limits) -> None:
        job = {
            **program.as_job(),
            "max_files": MAX_FILES,
            "cpu_seconds": limits.cpu_seconds,
            "file_bytes": limits.file_bytes,
            # With a control group the address space is a second line: some programs map far more than they touch.
            "address_bytes": limits.memory_bytes * (2 if self._group else 1) + INTERPRETER_BYTES,
            "tasks": limits.processes + 1 if _counts_tasks_per_namespace() else 0,
        }
        self._control.settimeout(limits.wall_seconds)
        self._control.sendall(marshal.dumps(job))
        self._control.shutdown(socket.SHUT_WR)

    def _watch(self, watching: _Watching) -> None:
        """Until the supervisor reports, or a limit is passed."""
        poller = select.poll()
        streams = self._streams(watching)
        for descriptor in (*streams, self._control.fileno()):
            poller.register(descriptor, select.POLLIN)
        while watching.verdict is None and not watching.report:
            for descriptor, _ in poller.poll(1000 * watching.patience()):
                if descriptor == self._control.fileno():
                    watching.hear(self._control.recv(CHUNK_BYTES))
                elif not watching.take(streams[descriptor], os.read(descriptor, CHUNK_BYTES)):
                    poller.unregister(descriptor)
            watching.check(self._supervisor)

    def _receive_files(self, data: bytes, keep_bytes: int) -> dict[str, bytes] | None:
        """What the supervisor sends of the folder behind its report, of which `data` came with that. None: too much."""
        received, most = bytearray(data), keep_bytes + MAX_FILES * HEADER_BYTES
        deadline = time.monotonic() + DEATH_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(received) <= most:
            self._control.settimeout(left)
            if not (part := self._control.recv(CHUNK_BYTES)):
                return _read_files(bytes(received))
            received += part
        raise SandboxFailed(f"the sandbox did not hand its files over in {DEATH_SECONDS:g} s")

    def _drain(self, watching: _Watching) -> None:
        """What was written before the end and not yet read. All writers are dead, so this ends."""
        for descriptor, target in self._streams(watching).items():
            while _wait_readable(descriptor, DEATH_SECONDS) and watching.take(target, os.read(descriptor, CHUNK_BYTES)):
                pass

    def _streams(self, watching: _Watching) -> dict[int, bytearray]:
        assert self._process.stdout
        assert self._process.stderr
        return {self._process.stdout.fileno(): watching.stdout, self._process.stderr.fileno(): watching.stderr}

    def _complaint(self) -> str:
        self._wait_gone()
        assert self._process.stderr
        text = os.read(self._process.stderr.fileno(), CHUNK_BYTES).decode(errors="replace").strip()
        return text or f"bwrap ended with exit code {self._process.returncode}"


@dataclass
class _Watching:
    """What is known about a running program, and the verdict as soon as there is one."""

    limits: Limits
    group: ControlGroup | None
    started: float = field(default_factory=time.monotonic)
    checked: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    cpu_seconds: float = 0.0
    idle_seconds: float = 0.0
    is_starved: bool = False
    verdict: Status | None = None
    report: bytes = b""
    rest: bytes = b""
    """What came with the report, from behind it."""
    files: dict[str, bytes] | None = None
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)

    def patience(self) -> float:
        """Seconds until something must be looked at again."""
        left = self.started + self.limits.wall_seconds - time.monotonic()
        return max(0.0, min(left, WATCH_SECONDS)) + 0.001

    def take(self, target: bytearray, data: bytes) -> bool:
        """False at the end of the stream, or when no more is wanted."""
        room = self.limits.output_bytes - len(self.stdout) - len(self.stderr)
        target += data[:room]
        if len(data) > room and self.verdict is None:
            self.verdict = "output"
        return bool(data) and len(data) <= room

    def hear(self, data: bytes) -> None:
        self.ended = time.monotonic()
        self.report, _, self.rest = (data or b"lost").partition(b"\n")

    def check(self, supervisor: int) -> None:
        """Wall time always; what the processes use, every WATCH_SECONDS."""
        now = time.monotonic()
        if self.verdict or self.report:
            return
        if now - self.started >= self.limits.wall_seconds:
            self.verdict, self.is_starved = "timeout", True
        elif now - self.checked >= WATCH_SECONDS:
            usage = measure(supervisor)
            self.cpu_seconds = usage.cpu_seconds
            # No more than was looked at: a watcher that got no time itself must not take the gap for sleep.
            self.idle_seconds += min(now - self.checked, 2 * WATCH_SECONDS) if usage.is_idle else 0.0
            self.checked = now
            if usage.cpu_seconds > self.limits.cpu_seconds or self.idle_seconds > self.limits.idle_seconds:
                self.verdict = "timeout"
            elif usage.tasks > self.limits.processes:
                self.verdict = "killed"
            elif self.has_run_out_of_memory(usage.memory_bytes):
                self.verdict = "memory"

    def has_run_out_of_memory(self, counted_bytes: int) -> bool:
        """The kernel's word where there is a control group; otherwise what was counted."""
        return self.group.has_run_out_of_memory() if self.group else counted_bytes > self.limits.memory_bytes

    def outcome(self) -> Outcome:
        exit_code = None
        if self.verdict is None:
            self.verdict, exit_code = self._judge()
        return Outcome(
            status=self.verdict,
            exit_code=exit_code,
            stdout=self.stdout.decode(errors="replace"),
            stderr=self.stderr.decode(errors="replace"),
            seconds=(self.ended or time.monotonic()) - self.started,
            cpu_seconds=self.cpu_seconds,
            is_starved=self.is_starved and self.verdict == "timeout",
            files=self.files,
        )

    def _judge(self) -> tuple[Status, int]:
        """From the supervisor's report, which the program can neither write nor change."""
        kind, _, rest = self.report.decode(errors="replace").strip().partition(" ")
        if kind != "exit":
            raise SandboxFailed(f"the sandbox ended without a result: {rest or kind}")
        code_text, cpu_text, peak_text = rest.split()
        code, self.cpu_seconds = int(code_text), max(self.cpu_seconds, float(cpu_text))
        if float(cpu_text) >= self.limits.cpu_seconds:
            return "timeout", code
        if self.has_run_out_of_memory(int(peak_text)):
            return "memory", code
        if code == 1 and self.stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
            return "memory", code  # the address space ended before the memory did
        return ("ok" if code == 0 else "error" if code > 0 else "killed"), code


def _read_files(data: bytes) -> dict[str, bytes] | None:
    """guest.send_files() taken apart; None where its end is missing."""
    files, place = dict[str, bytes](), 0
    while (end := data.find(b"\n", place)) >= 0:
        header, place = data[place:end], end + 1
        if header == b"end":
            return files
        name_bytes, size = map(int, header.split())
        name, place = os.fsdecode(data[place : place + name_bytes]), place + name_bytes
        files[name], place = data[place : place + size], place + size
    return None


def _readable(content: bytes) -> int:
    """A descriptor from which `content` can be read once. Must fit a pipe."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading


def _wait_readable(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


def _counts_tasks_per_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts within the user namespace; before, all of the host user's processes."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)
