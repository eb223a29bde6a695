"""The main of a sampler process: `python -m temper.cluster.sampler_main PARENT SOCKET WEIGHTS [MODEL]`.

Owns: how such a process begins and ends. PARENT is the process that it dies with, SOCKET and WEIGHTS are descriptors
that it inherits, MODEL is this machine's copy of the model that it is told to open. Refuses: everything else; what it
opens and draws is said over the socket (engine/process/).
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from functools import partial

from temper.children import die_with_parent
from temper.engine.process.server import ServedSampler, serve
from temper.engine.process.weights import SharedWeights


async def open_sampler(order: str, own_folder: str = "") -> ServedSampler:
    """Imported only now: a process whose parent is gone already need not load torch."""
    from temper.engine.process.order import read_order

    return await read_order(order).found_here(own_folder).open()


def main() -> None:
    parent, connection, weights = map(int, sys.argv[1:4])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both; the parent closes this one in order
    opener = partial(open_sampler, own_folder=sys.argv[4]) if len(sys.argv) > 4 else open_sampler
    asyncio.run(serve(socket.socket(fileno=connection), SharedWeights(weights), opener))


if __name__ == "__main__":
    main()
