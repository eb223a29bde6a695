"""Sizes that keep the code readable. Raising a number here is a one-line change with a reason beside it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from temper.config import RunConfig, section_of

ROOT = Path(__file__).parent.parent
FILE_LINES, CLASS_LINES, FUNCTION_LINES, P90_FUNCTION_LINES, PARAMETERS, SECTION_KEYS = 400, 250, 60, 35, 7, 20
FOLDER_FILES = 16
LONGER_FUNCTIONS: dict[str, int] = {}
RECIPE_LINES, ONE_FILE_LINES = 45, 280  # a recipe with two stages needs more than 25
STAGE_LINES = 9  # and a pipeline of many stages this for each
MORE_PARAMETERS = {
    "models/tiny.py:make_tiny_model": 11,  # a model shape: all keyword-only, all numbers of one table
    # One per option of the command line.
    "cli/serve.py:serve": 13,
    "cli/rollouts.py:rollouts": 9,
    "cli/planning/simulate.py:simulate": 13,
    "cli/judging/evaluate.py:evaluate": 16,
    "cli/judging/compare.py:compare": 12,
    "cli/judging/scale.py:scale": 15,
    "cli/judging/best.py:best": 15,
    "cli/judging/choose.py:choose": 12,
    "cli/judging/label_steps.py:label_steps": 12,
    "cli/judging/score_records.py:score_records": 10,
    "envs/adapters/gymnasium.py:__init__": 8,  # one per option of a recipe, as the next two
    "envs/adapters/mcp.py:__init__": 8,
    "envs/agents/agent.py:__init__": 14,
    # What a kernel reads and writes, tensor by tensor: a bundle of them would only be taken apart again.
    "models/kernels/tiled_attention.py:paged_attention": 9,
    "models/kernels/tiled_attention.py:packed_attention": 8,
    "models/kernels/tiled_attention.py:decode_attention": 9,  # with its role in a chain, as the next but one
    "models/kernels/rope.py:rotate_and_store": 8,
    "models/kernels/decode_step.py:rotate_and_store_parts": 8,
}
UNBOUNDED = {"get", "join", "wait", "result", "acquire", "recv", "communicate"}


@cache
def definitions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Classes and functions of all files, by file and name; read once, without what is inside them."""
    found = []
    for path in sorted((ROOT / "temper").rglob("*.py")):
        name = str(path.relative_to(ROOT / "temper"))
        found += [
            (f"{name}:{node.name}", node)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
    for _, node in found:
        node.body = []
    return found


def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [(name, node) for name, node in definitions() if not isinstance(node, ast.ClassDef)]


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


def test_files_stay_short() -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / "temper").rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > FILE_LINES} == {}


def test_folders_stay_small() -> None:
    """Whoever looks for a thing reads the names of one folder. A larger folder should be split."""
    folders = {path.parent for path in (ROOT / "temper").rglob("*.py")}
    counts = {str(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > FOLDER_FILES} == {}


def test_every_package_has_its_tests_where_one_looks_for_them() -> None:
    packages = [path.parent.name for path in (ROOT / "temper").glob("*/__init__.py")]
    assert [name for name in packages if not (ROOT / "tests" / name).is_dir()] == []


def test_classes_stay_short() -> None:
    sizes = {name: length(node) for name, node in definitions() if isinstance(node, ast.ClassDef)}
    assert {name: size for name, size in sizes.items() if size > CLASS_LINES} == {}


def test_functions_stay_short() -> None:
    sizes = {name: length(node) for name, node in functions()}
    assert {n: s for n, s in sizes.items() if s > LONGER_FUNCTIONS.get(n, FUNCTION_LINES)} == {}
    ordered = sorted(sizes.values())
    assert ordered[int(0.9 * len(ordered))] <= P90_FUNCTION_LINES


def test_functions_take_few_parameters() -> None:
    counts = {}
    for name, node in functions():
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue  # a launch's pointers and strides
        arguments = node.args
        every = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        counts[name] = len([a for a in every if a not in ("self", "cls", "ctx")])
    too_many = {n: c for n, c in counts.items() if c > MORE_PARAMETERS.get(n, PARAMETERS)}
    assert too_many == {}


def test_no_section_of_a_recipe_has_too_many_keys() -> None:
    """What a user must learn at once is a section. A limit on all keys together once bent the interface: three numbers
    became a tuple, a table became a string."""
    sizes: dict[str, int] = {}

    def count(section: type[BaseModel]) -> None:
        inner = [section_of(field.annotation) for field in section.model_fields.values()]
        sizes[section.__name__] = sum(part is None for part in inner)
        for part in inner:
            if part is not None and part.__name__ not in sizes:
                count(part)

    count(RunConfig)
    assert {name: size for name, size in sizes.items() if size > SECTION_KEYS} == {}


def test_recipes_stay_short() -> None:
    for path in (ROOT / "recipes").glob("*.toml"):
        text = path.read_text()
        assert text.count("\n") <= max(RECIPE_LINES, STAGE_LINES * text.count("[[stage]]")), path
    assert (ROOT / "recipes" / "grpo_in_one_file.py").read_text().count("\n") <= ONE_FILE_LINES


def unbounded_waits(source: str) -> list[int]:
    """Lines with a blocking call and no arguments at all: .get(), .join(), .wait() ..., or timeout=None."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        names_timeout = any(
            k.arg == "timeout" and isinstance(k.value, ast.Constant) and k.value.value is None for k in node.keywords
        )
        is_blocking = isinstance(node.func, ast.Attribute) and node.func.attr in UNBOUNDED
        if names_timeout or (is_blocking and not node.args and not node.keywords):
            lines.append(node.lineno)
    return lines


DONE_ALREADY = {
    # Reads of finished asyncio tasks and futures: they return at once or raise.
    ("rollout/group.py", "member.result()"),
    ("rollout/source.py", "taking.result()"),
    ("rollout/agents.py", "calls.broken.result()"),
    ("rollout/agents.py", "posted.result()"),
    ("envs/agents/service.py", "asking.result()"),
    ("envs/agents/service.py", "posted.result()"),
    ("rollout/judged.py", "calls.broken.result()"),
    ("evals/evaluate.py", "member.result()"),
    ("engine/local/engine.py", "future.result()"),
    ("engine/local/engine.py", "self._may_step.wait()"),  # under a deadline, like the next
    ("rollout/controls/joined.py", "self._may_draw.wait()"),
    ("engine/fleet/fleet.py", "self._changed.wait()"),
    ("envs/agents/launch.py", "process.wait()"),
    ("engine/vllm/engine.py", "queue.get()"),  # awaited in slices, under a deadline without progress
}


def test_no_wait_is_without_a_deadline() -> None:
    found = []
    for path in sorted((ROOT / "temper").rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(ROOT / "temper"))
        for line in unbounded_waits(text):
            code = text.splitlines()[line - 1]
            if not any(name == file and call in code for file, call in DONE_ALREADY):
                found.append(f"{name}:{line}: {code.strip()}")
    assert found == []


def test_an_unbounded_wait_would_be_found() -> None:
    assert unbounded_waits("queue.get()") == [1]
    assert unbounded_waits("process.wait(timeout=None)") == [1]
    assert unbounded_waits("queue.get(timeout=3)\nqueue.get(True, 3)") == []
