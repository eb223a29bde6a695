"""A process that does nothing for a minute, unless its parent is gone."""

from __future__ import annotations

import sys
import time

from temper.children import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    time.sleep(60)
