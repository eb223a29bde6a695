"""Starts the ranks of a program that has main(rank, world, folder): python start_ranks.py PROGRAM FOLDER 0of2 1of2.

One process imports what all of them need, and each rank is a copy of it: importing is most of what a rank does.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path


def main(program: Path, folder: Path, places: list[str]) -> int:
    """The number of ranks that failed."""
    specification = importlib.util.spec_from_file_location("program", program)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    children = []
    for place in places:
        rank, world = map(int, place.split("of"))
        if child := os.fork():
            children.append(child)
            continue
        try:
            module.main(rank, world, folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
