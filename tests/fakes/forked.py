"""A sampler process that is forked and not started anew: importing torch for each of fifty would take an hour."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from typing import Any

from temper.children import die_with_parent
from temper.cluster.sampler_main import open_sampler
from temper.engine.process.client import ProcessSampler
from temper.engine.process.server import serve
from temper.engine.process.weights import SharedWeights


class ForkedChild:
    """Implements engine.process.client.Process."""

    def __init__(self, pid: int) -> None:
        self.pid, self.name, self._ended = pid, f"the forked sampler (pid {pid})", ""

    def wait(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while not self._ended:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                self._ended = "it ended"
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.002)
        return self._ended

    def kill(self) -> None:
        if not self._ended:
            os.kill(self.pid, signal.SIGKILL)


def fork_sampler(order: str, weights: SharedWeights, **_: Any) -> ProcessSampler:
    """Takes the place of cluster.samplers.start_sampler."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            die_with_parent(parent)
            asyncio.run(serve(theirs, SharedWeights(weights.descriptor), open_sampler))
        finally:
            os._exit(0)
    theirs.close()
    return ProcessSampler(ours, weights, ForkedChild(pid), order=order)
