"""Starting a sampler process.

Owns: the socket and the memory between the two, and who gets which end. Refuses: what it opens (build/ says).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping

from temper.cluster.child import Child
from temper.engine.process.client import ProcessSampler
from temper.engine.process.weights import SharedWeights, anonymous_file

MAIN = "temper.cluster.sampler_main"


def start_sampler(
    order: str,
    *,
    environment: Mapping[str, str] | None = None,
    closed: Callable[[], None] = lambda: None,
    main: str = MAIN,
) -> ProcessSampler:
    """A sampler process that opens what the order says, and whoever asks it. It is stale until weights are published.

    closed: called once, when the sampler was closed.
    """
    ours, theirs = socket.socketpair()
    weights = anonymous_file()
    try:
        child = Child(
            "the sampler process",
            main,
            [str(theirs.fileno()), str(weights)],
            descriptors=(theirs.fileno(), weights),
            environment=environment,
        )
    except BaseException:
        ours.close()
        os.close(weights)
        raise
    finally:
        theirs.close()
    return ProcessSampler(ours, SharedWeights(weights), child, order=order, closed=closed)
