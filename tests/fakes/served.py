"""A sampler process without a process: the same server over the same socket and memory, in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from typing import Any

from temper.cluster.sampler_main import open_sampler
from temper.engine.process.client import ProcessSampler
from temper.engine.process.server import Open, serve
from temper.engine.process.weights import SharedWeights, anonymous_file


class ServingThread:
    """Implements engine.process.client.Process."""

    def __init__(self, connection: socket.socket, weights: SharedWeights, opener: Open) -> None:
        self.name = "the sampler thread"
        self._connection = connection
        self._thread = threading.Thread(target=self._serve, args=(weights, opener), daemon=True)
        self._thread.start()

    def _serve(self, weights: SharedWeights, opener: Open) -> None:
        with contextlib.suppress(SystemExit):  # of a process it would be the end
            asyncio.run(serve(self._connection, weights, opener))
        weights.close()

    def wait(self, seconds: float) -> str | None:
        self._thread.join(seconds)
        return None if self._thread.is_alive() else "it ended"

    def kill(self) -> None:
        """What its peer sees of a kill: the socket closes."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)


def serve_in_a_thread(
    order: str, weights: SharedWeights | None = None, *, opener: Open = open_sampler, **_: Any
) -> ProcessSampler:
    """Takes the place of cluster.samplers.start_sampler."""
    ours, theirs = socket.socketpair()
    weights = weights or SharedWeights(anonymous_file())
    thread = ServingThread(theirs, SharedWeights(os.dup(weights.descriptor)), opener)
    return ProcessSampler(ours, weights, thread, order=order)
