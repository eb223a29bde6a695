"""A process of ours beside this one: started, listened to, ended.

Owns: its life, its last lines, that it never outlives this process. Refuses: what it does, and what is said to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from temper.errors import BackendError

LAST_LINES = 30
START_SECONDS = 60.0
"""For the system to start a program."""


class Child:
    """A Python program that is started with the number of this process as its first argument, and calls
    die_with_parent(). Constructed running."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str] = (),
        *,
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """descriptors: files that it inherits under their numbers."""
        self.name = name
        self._command = [sys.executable, "-m", module, str(os.getpid()), *arguments]
        self._descriptors = tuple(descriptors)
        # The same Temper as here, whatever else is installed and wherever this process was started.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        self._environment = {**os.environ, **(environment or {}), "PYTHONPATH": path}
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._refused = ""
        self._started, self._ended = threading.Event(), threading.Event()
        # The kernel ends a child with the thread that started it, so this thread lives as long as the child.
        threading.Thread(target=self._keep, name=f"keeper of {name}", daemon=True).start()
        if not self._started.wait(START_SECONDS) or self._process is None:
            raise BackendError(f"{name} could not be started: {self._refused or f'nothing for {START_SECONDS:g} s'}")
        self.name = f"{name} (pid {self._process.pid})"

    @property
    def pid(self) -> int:
        assert self._process is not None, "a child that was not started is no child"
        return self._process.pid

    def wait(self, seconds: float) -> str | None:
        """How it ended, with its last lines. None: it still runs."""
        return self._describe_end() if self._ended.wait(seconds) else None

    def kill(self) -> None:
        """Ends it at once; nothing happens to one that has ended."""
        if self._process is not None:
            self._process.kill()

    def _keep(self) -> None:
        try:
            self._process = process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=self._descriptors,
                env=self._environment,
            )
        except OSError as error:
            self._refused = str(error)
            return
        finally:
            self._started.set()
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append(line.rstrip())
        try:
            process.wait(timeout=START_SECONDS)  # it has closed its output: it is ending
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=START_SECONDS)
        self._ended.set()

    def _describe_end(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is not None and code < 0:
            known = {number.value for number in signal.Signals}
            how = f"it was killed by {signal.Signals(-code).name if -code in known else f'signal {-code}'}"
            how += " (out of memory, or somebody's kill)" if -code == signal.SIGKILL else ""
        else:
            how = f"it ended with code {code}"
        said = "\n".join(line for line in self._lines if line)
        return f"{how}. Its last lines:\n{said}\n" if said else f"{how}, without a word"
