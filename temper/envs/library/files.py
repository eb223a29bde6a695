"""A file system in memory: list, read, write, replace, move, copy, delete. The files at the end are judged.

Owns: environment and generator "files". Refuses: the disk; no path leads out of the dictionary that an episode gets.
And more than MAX_CHARACTERS: each replace() could multiply a file by the length of a call, and a few of them fill a
machine.
"""

from __future__ import annotations

import json
import posixpath
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from temper.envs.permissions import Permissions
from temper.envs.tool_calls import Calls
from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import Effect, Tool, ToolError, make_tool
from temper.errors import TaskError, UserError
from temper.types import Message, Task

WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet", "juniper", "kelp", "larch",
    "maple", "nettle", "otter", "pebble", "quartz", "reed", "sorrel", "thistle", "umber", "violet", "willow", "yarrow",
)  # fmt: skip
FOLDERS = ("notes", "logs", "drafts", "reports")
ENDINGS = ("txt", "log", "md")
ACTIONS: dict[str, Effect] = {
    "list": "read",
    "read": "read",
    "write": "write",
    "replace": "write",
    "move": "write",
    "copy": "write",
    "delete": "write",
}
"""Methods of FileSystem that a policy may call."""
MAX_CHARACTERS = 1_000_000
"""Most characters that all paths and texts of an episode have together."""


class FileSystem:
    """Texts by path. Folders are there when something is in them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

    def list(self, folder: str = "") -> str:
        """Lists the paths of all files in a folder and below it.

        folder: a path; empty: everything
        """
        below = "" if folder.strip("/. ") == "" else _clean(folder) + "/"
        return "\n".join(path for path in sorted(self.files) if path.startswith(below)) or "no files"

    def read(self, path: str) -> str:
        """Shows a file.

        path: of the file
        """
        return self.files[self._existing(path)]

    def write(self, path: str, text: str) -> None:
        """Writes a file; what it held before is lost.

        path: of the file
        text: all that it shall hold
        """
        place = self._target(path)
        self._require_room(len(place) + len(text), lost=self._size(place))
        self.files[place] = text

    def replace(self, path: str, old: str, new: str) -> str:
        """Replaces every occurrence of a text in a file.

        path: of the file
        old: what to look for
        new: what to write instead
        """
        found = self._existing(path)
        count = self.files[found].count(old) if old else 0
        if not count:
            raise ToolError(f"{found} does not hold {old!r:.40}")
        self._require_room(count * len(new), lost=count * len(old))
        self.files[found] = self.files[found].replace(old, new)
        return f"{count} replaced"

    def move(self, source: str, target: str) -> None:
        """Moves or renames a file; a file at the target is lost.

        source: path of the file
        target: its new path
        """
        found, place = self._existing(source), self._target(target)
        self._require_room(len(place), lost=len(found))
        self.files[place] = self.files.pop(found)

    def copy(self, source: str, target: str) -> None:
        """Copies a file; a file at the target is lost.

        source: path of the file
        target: path of the copy
        """
        place, text = self._target(target), self.files[self._existing(source)]
        self._require_room(len(place) + len(text), lost=self._size(place))
        self.files[place] = text

    def delete(self, path: str) -> None:
        """Deletes a file for good.

        path: of the file
        """
        del self.files[self._existing(path)]

    def _size(self, path: str) -> int:
        return len(path) + len(self.files[path]) if path in self.files else 0

    def _require_room(self, characters: int, *, lost: int) -> None:
        """Raises ToolError unless `characters` more fit when `lost` of those there go."""
        if sum(map(self._size, self.files)) - lost + characters > MAX_CHARACTERS:
            raise ToolError(f"the disk is full: all files together may have {MAX_CHARACTERS} characters")

    def _existing(self, path: str) -> str:
        if (clean := _clean(path)) not in self.files:
            raise ToolError(f"there is no file {clean!r:.80}; list() shows all")
        return clean

    def _target(self, path: str) -> str:
        clean = _clean(path)
        if any(other.startswith(f"{clean}/") for other in self.files):
            raise ToolError(f"{clean!r:.80} is a folder; give the path of a file")
        if any(clean.startswith(f"{other}/") for other in self.files):
            raise ToolError(f"{clean!r:.80} lies below a file")
        return clean


def _clean(path: str) -> str:
    clean = posixpath.normpath(path.strip().lstrip("/"))
    if clean in ("", ".", "..") or clean.startswith("../"):
        raise ToolError(f"{path!r:.80} is no path of a file")
    return clean


def judge(start: Mapping[str, str], end: Mapping[str, str], goal: Mapping[str, str], mistake_cost: float) -> float:
    """1 when all files are as they should be, else 0; each text that should have been kept and is gone costs."""
    lost = (Counter(start.values()) & Counter(goal.values())) - Counter(end.values())
    return max(float(end == goal) - mistake_cost * lost.total(), -1.0)


def files(index: int, seed: int, *, num_files: int = 8, max_jobs: int = 2) -> Task:
    """Files and one to max_jobs things to do with them, in order. The goal is what extra "solution" leaves behind."""
    if not 2 <= num_files <= len(WORDS) or not 1 <= max_jobs <= 4:
        raise UserError(f"num_files={num_files} must lie in 2 to {len(WORDS)}, max_jobs={max_jobs} in 1 to 4.")
    draw = random.Random(f"files/{seed}/{index}")
    start = {
        f"{draw.choice(FOLDERS)}/{name}.{draw.choice(ENDINGS)}": " ".join(draw.choices(WORDS, k=6)) + f" {number}"
        for number, name in enumerate(draw.sample(WORDS, num_files))
    }
    system, jobs, calls = FileSystem(start), list[str](), Calls()
    for _ in range(draw.randint(1, max_jobs)):
        job, steps = draw.choice(JOBS)(system, draw)
        for name, arguments in steps:
            getattr(system, name)(**arguments)
        jobs.append(job)
        calls += steps
        if not system.files:
            break
    prompt = (
        f"Files: {', '.join(sorted(start))}.\nDo this: {'; then '.join(jobs)}. Change nothing else. "
        "Say done when you are done."
    )
    return Task(
        id=f"files:{seed}:{index}",
        messages=(Message(role="user", content=prompt),),
        env="files",
        extra={"start": json.dumps(start), "goal": json.dumps(system.files), "solution": json.dumps(calls)},
    )


def _rename(system: FileSystem, draw: random.Random) -> tuple[str, Calls]:
    path = draw.choice(sorted(system.files))
    target = f"{posixpath.dirname(path)}/renamed_{draw.randrange(10**6)}.{path.rpartition('.')[2]}"
    return f"rename {path} to {target}", [("move", {"source": path, "target": target})]


def _back_up(system: FileSystem, draw: random.Random) -> tuple[str, Calls]:
    path = draw.choice(sorted(system.files))
    stem, _, ending = posixpath.basename(path).rpartition(".")
    target = (
        f"backup/{stem}_copy.{ending}"  # a name of its own: gathered with the original, neither overwrites the other
    )
    return f"copy {path} to {target}", [("copy", {"source": path, "target": target})]


def _gather(system: FileSystem, draw: random.Random) -> tuple[str, Calls]:
    ending = draw.choice(sorted(system.files)).rpartition(".")[2]
    found = [path for path in sorted(system.files) if path.endswith(f".{ending}") and not path.startswith("archive/")]
    moves: Calls = [("move", {"source": path, "target": f"archive/{posixpath.basename(path)}"}) for path in found]
    return f"move every .{ending} file to the folder archive and keep its name", moves


def _purge(system: FileSystem, draw: random.Random) -> tuple[str, Calls]:
    word = draw.choice(system.files[draw.choice(sorted(system.files))].split()[:6])
    found = [path for path in sorted(system.files) if word in system.files[path].split()]
    return f'delete every file that holds the word "{word}"', [("delete", {"path": path}) for path in found]


def _reword(system: FileSystem, draw: random.Random) -> tuple[str, Calls]:
    path = draw.choice(sorted(system.files))
    old, new = draw.choice(system.files[path].split()[:6]), f"word{draw.randrange(1000):03d}"
    wish = f'in {path}, write "{new}" wherever it says "{old}"'
    return wish, [("replace", {"path": path, "old": old, "new": new})]


JOBS: tuple[Callable[[FileSystem, random.Random], tuple[str, Calls]], ...] = (
    _rename, _back_up, _gather, _purge, _reword,
)  # fmt: skip


class FilesEnv(ToolEnv):
    """One session over the files of its task; see judge() for what it is paid."""

    def __init__(
        self,
        *,
        max_calls: int = 24,
        mistake_cost: float = 0.25,
        call_format: str = "auto",
        show_tools: str = "auto",
    ) -> None:
        if mistake_cost < 0:
            raise UserError(f'env "files": mistake_cost={mistake_cost} must not be below 0.')
        self._mistake_cost = mistake_cost
        super().__init__(
            self._open,
            limits=ToolLimits(calls_per_turn=max_calls, calls_per_episode=max_calls),
            permissions=Permissions(effects=frozenset({"read", "write"})),
            presentation=Presentation(call_format=call_format, show_tools=show_tools),
        )

    def reward(self, answer: str) -> float | None:
        return judge(self._start, self._system.files, self._goal, self._mistake_cost)

    def _open(self, task: Task, seed: int) -> Iterable[Tool]:
        try:
            self._start, self._goal = (json.loads(str(task.extra[name])) for name in ("start", "goal"))
        except (KeyError, ValueError) as error:
            raise TaskError(f'task {task.id} does not come from the generator "files": {error}') from error
        self._system = FileSystem(self._start)
        return [make_tool(getattr(self._system, name), effect=effect) for name, effect in ACTIONS.items()]
