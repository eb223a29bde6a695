"""How Python runs during training, and that it runs as before afterwards."""

from __future__ import annotations

import subprocess
import sys

from temper.interpreter import quick_turns

PROGRAM = """
import gc
from temper.interpreter import OBJECTS_PER_COLLECTION, seldom_collected

before = gc.get_threshold()
try:
    with seldom_collected():
        assert gc.get_freeze_count() > 1_000
        assert gc.get_threshold()[0] == OBJECTS_PER_COLLECTION
        with seldom_collected():
            pass
        assert gc.get_freeze_count() > 1_000, "the inner one thawed what the outer one froze"
        assert gc.get_threshold()[0] == OBJECTS_PER_COLLECTION
        raise ZeroDivisionError
except ZeroDivisionError:
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    with seldom_collected():
        assert gc.get_freeze_count() > 1_000, "a second stage"
    print("as before")
"""


def test_what_was_imported_is_not_searched_for_garbage_while_a_stage_runs() -> None:
    """In a process of its own: all tests run inside one that is open."""
    finished = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert finished.stdout == "as before\n", finished.stderr


def test_threads_take_turns_sooner_while_a_stage_runs() -> None:
    before = sys.getswitchinterval()
    with quick_turns():
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before
