"""Starting a sampler process.

Owns: the socket and the memory between the two, and who gets which end. Refuses: what it opens (build/ says).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from temper.cluster.child import Child
from temper.engine.process.client import ProcessSampler
from temper.engine.process.weights import SharedWeights

MAIN = "temper.cluster.sampler_main"


def start_sampler(
    order: str,
    weights: SharedWeights,
    *,
    name: str = "the sampler process",
    environment: Mapping[str, str] | None = None,
    main: str = MAIN,
) -> ProcessSampler:
    """A sampler process that opens what the order says, and whoever asks it. It is stale until weights are published.

    weights: where they will be written; the process has them open, too.
    """
    ours, theirs = socket.socketpair()
    try:
        child = Child(
            name,
            main,
            [str(theirs.fileno()), str(weights.descriptor)],
            descriptors=(theirs.fileno(), weights.descriptor),
            environment=environment,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ProcessSampler(ours, weights, child, order=order)
