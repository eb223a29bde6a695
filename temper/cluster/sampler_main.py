"""The main of a sampler process: `python -m temper.cluster.sampler_main PARENT SOCKET WEIGHTS`.

Owns: how such a process begins and ends. PARENT is the process that it dies with, SOCKET and WEIGHTS are descriptors
that it inherits. Refuses: everything else; what it opens and draws is said over the socket (engine/process/).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from temper.engine.process.server import ServedSampler, serve
from temper.engine.process.weights import SharedWeights
from temper.rewards.workers.program import die_with_parent


def open_sampler(order: str) -> ServedSampler:
    """Imported only now: a process whose parent is gone already need not load torch."""
    from temper.engine.process.order import SamplerOrder, open_engine

    return open_engine(SamplerOrder.from_json(order))


def main() -> None:
    parent, connection, weights = map(int, sys.argv[1:4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent closes this one in order
    asyncio.run(serve(socket.socket(fileno=connection), SharedWeights(weights), open_sampler))


if __name__ == "__main__":
    main()
