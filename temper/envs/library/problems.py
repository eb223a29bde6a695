"""Problem sets with one question and one answer, as they are published: GSM8K, MATH, SVAMP, MBPP, HumanEval.

Owns: reading their rows into tasks; every row is checked when the file is opened. Refuses: judging (rewards "math",
"code"), and downloads. Without a path the small samples that ship with the package are read.
"""

from __future__ import annotations

import ast
import functools
import gzip
import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.types import Message, Scalar, Task

SAMPLES = Path(__file__).parent / "samples"
Row = Mapping[str, Any]
Parsed = tuple[str, str | None, dict[str, Scalar]]
"""Prompt, gold answer, and what else the reward reads."""


def problem(kind: str, index: int, seed: int, *, path: str = "") -> Task:
    """Problem number `index` of a set: all rows in a seeded order, then all of them in another, and so on."""
    tasks = read_problems(kind, path)
    return tasks[shuffled(index, seed, len(tasks))]


def read_problems(kind: str, path: str = "") -> tuple[Task, ...]:
    """All problems of a file (.jsonl, .jsonl.gz, or .json with one list), in its order."""
    file = Path(path).expanduser() if path else SAMPLES / SAMPLE_FILES[kind]
    return _read(kind, file.resolve())


def shuffled(index: int, seed: int, count: int) -> int:
    """The row to take: a new seeded permutation of all rows for every `count` indices."""
    epoch, place = divmod(index, count)
    return _order(seed, epoch, count)[place]


@functools.lru_cache(maxsize=64)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    return random.Random(f"rows/{seed}/{epoch}").sample(range(count), count)


@functools.lru_cache(maxsize=16)
def _read(kind: str, file: Path) -> tuple[Task, ...]:
    tasks = []
    for number, row in enumerate(read_rows(file), start=1):
        try:
            parsed = READERS[kind](row)
        except (AttributeError, LookupError, SyntaxError, TypeError, ValueError) as error:
            columns = ", ".join(row) if isinstance(row, dict) else repr(row)[:60]
            what = f"column {error} is missing" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{file}, row {number}: not a problem of {kind}: {what}. It has: {columns}.") from error
        if parsed is None:
            continue
        prompt, answer, extra = parsed
        messages = (Message(role="user", content=prompt),)
        tasks.append(Task(id=f"{kind}:{file.name}:{number}", messages=messages, answer=answer, extra=extra))
    if not tasks:
        raise UserError(f"{file}: the file has no rows. Give one with at least one problem.")
    return tuple(tasks)


def read_rows(file: Path) -> list[Any]:
    """What the file holds, unchecked."""
    if not file.is_file():
        raise UserError(f"{file}: no such file. Give the path of a .jsonl, .jsonl.gz or .json file, or none: a sample.")
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
        if file.suffix == ".json":
            rows = json.loads(text)
            return rows if isinstance(rows, list) else [rows]
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({error}). Use .jsonl, .jsonl.gz or .json.") from error


def _gsm8k(row: Row) -> Parsed:
    _, mark, gold = row["answer"].rpartition("####")
    if not mark or not gold.strip():
        raise ValueError('the answer has no "#### " before its result')
    return row["question"], gold.strip().replace(",", ""), {}


def _math(row: Row) -> Parsed | None:
    gold = row["answer"] if "answer" in row else last_boxed(row["solution"])
    if gold is None:
        raise ValueError(r"the solution has no \boxed{} result")
    if not str(gold).strip():
        return None  # two solutions of the published training set end in an empty box
    about = {key: row[key] for key in ("level", "type", "subject") if isinstance(row.get(key), str | int)}
    return row["problem"], str(gold).strip(), about


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{} (or \fbox{}) holds, with its inner braces; None when there is none or it never closes."""
    starts = [found.end() for found in re.finditer(r"\\f?boxed\s*|\\fbox\s*", text)]
    if not starts:
        return None
    rest = text[starts[-1] :]
    if not rest.startswith("{"):
        return rest[:1].strip() or None  # "\boxed 5" is TeX for \boxed{5}
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place]
    return None


def _svamp(row: Row) -> Parsed:
    body = row["Body"].strip()
    joint = " " if body.endswith((".", "?", "!", ",")) else ", "
    answer = float(row["Answer"])
    gold = str(int(answer)) if answer.is_integer() else str(answer)
    return f"{body}{joint}{row['Question'].strip()}", gold, {"type": row["Type"]}


def _mbpp(row: Row) -> Parsed:
    """The first test is shown, for the function's name; the others are hidden."""
    tests = list(row["test_list"])
    if not tests:
        raise ValueError("it has no tests")
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports", ()))
    hidden = [*tests[1:], *row.get("challenge_test_list", ())]
    asked = row["text"] if "text" in row else row["prompt"]
    prompt = f"{asked}\nAnswer with a Python program in a ```python block. It must pass:\n{tests[0]}"
    extra: dict[str, Scalar] = {"tests": json.dumps(tests[:1]), "hidden_tests": json.dumps(hidden), "setup": setup}
    called = {name for source in (*tests, setup) for name in _names(source)} & _defined(row["code"])
    if len(called) == 1:  # some rows also use a class of the solution; then every name is the solution's
        extra["entry_point"] = called.pop()
    return prompt, _block(row["code"]), extra


def _humaneval(row: Row) -> Parsed:
    """All tests are hidden; what the prompt defines beside the function is set up for them."""
    shown = ast.parse(row["prompt"])
    shown.body = [node for node in shown.body if getattr(node, "name", "") != row["entry_point"]]
    extra: dict[str, Scalar] = {
        "tests": "[]",
        "hidden_tests": json.dumps([row["test"]]),
        "setup": ast.unparse(shown),
        "entry_point": row["entry_point"],
    }
    prompt = f"Complete this function. Answer with all of it in a ```python block.\n{_block(row['prompt'])}"
    return prompt, _block(row["prompt"] + row["canonical_solution"]), extra


def _block(source: str) -> str:
    return "```python\n" + source.replace("\r\n", "\n").strip("\n") + "\n```"


def _names(source: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}


def _defined(source: str) -> set[str]:
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


READERS: dict[str, Callable[[Row], Parsed | None]] = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "math": _math,
    "mbpp": _mbpp,
    "svamp": _svamp,
}
SAMPLE_FILES = {kind: f"{kind}.json" if kind == "svamp" else f"{kind}.jsonl" for kind in READERS}
PROBLEMS: dict[str, Callable[..., Task]] = {kind: functools.partial(problem, kind) for kind in READERS}
"""Generators by name, each (index, seed, *, path="")."""
