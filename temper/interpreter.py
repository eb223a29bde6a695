"""How Python itself runs during training: when it looks for cycles, how soon threads take turns.

Owns: these two settings, and that they are as they were afterwards.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS_PER_COLLECTION = 50_000
"""That Python makes before it looks for cycles among them."""


SECONDS_PER_TURN = 0.0005
"""Of a thread that holds the interpreter while another waits for it."""


_is_seldom = False
"""Whether `seldom_collected` is open."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Python looks for cycles rarely, and never among what was there before. Inside another one nothing changes.

    A step makes lists of hundreds of thousands of numbers and no cycles; looking for some took a twentieth of a second
    of every step of 256 completions, and a fifth whenever Python went through all that was imported.
    """
    global _is_seldom
    if _is_seldom:
        yield
        return
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *before[1:])
    _is_seldom = True
    try:
        yield
    finally:
        _is_seldom = False
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def quick_turns() -> Iterator[None]:
    """Threads that compute in Python hand the interpreter on sooner than every 5 ms.

    An engine in the event loop lets go of it a thousand times in a step, and while credit is computed beside it would
    wait for its turn each time, with an idle device.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SECONDS_PER_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
