"""`temper init`: a folder to start from, with a commented recipe, a reward and five rows of data.

Owns: copying the files below starter/. Refuses: overwriting anything.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from temper.errors import UserError

STARTER = Path(__file__).parent / "starter"
FILES = ("recipe.toml", "reward.py", "train.jsonl")


def init(folder: Path) -> list[Path]:
    """Writes the files into a folder, which is made if it is not there, and returns their paths."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Give a folder")
    if taken := [name for name in FILES if (folder / name).exists()]:
        raise UserError(f"{folder} already has {', '.join(taken)}. Give another folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(STARTER / name, folder / name)) for name in FILES]
