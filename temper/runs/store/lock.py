"""One writer per run directory. Owns: the lock file. The kernel frees it when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from temper.errors import UserError


class RunLock:
    """An exclusive flock, held from seize() to release()."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def seize(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"{self._path.parent} is being written by process {holder}. Wait for it, stop it, or use another --run."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor
        # A forked child shares the lock: a verifier that outlived its killed parent would keep the run locked.
        release = weakref.WeakMethod(self.release)
        os.register_at_fork(after_in_child=lambda: (found := release()) and found())

    def release(self) -> None:
        """Closes this process's handle. The lock goes with the last handle."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
