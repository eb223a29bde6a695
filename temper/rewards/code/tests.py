"""The tests of a programming task, as its data gives them.

Owns: reading them and refusing those that could not judge anything. Refuses: running them (code.py).
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
from dataclasses import dataclass, fields
from typing import Any

from temper.types import Task

FIELDS = frozenset({"input", "output", "source", "weight"})


class BadTests(ValueError):
    """Why the tests of a task cannot judge a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTest:
    """The whole program is run on the input; what it prints must be the output."""

    input: str
    output: str
    weight: float = 1.0

    def accepts(self, printed: str) -> bool:
        """Space at the ends of lines and empty lines at the end do not count."""
        return _lines(printed) == _lines(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTest:
    """Assertions on functions of the solution."""

    source: str
    setup: str = ""
    """Trusted code run before the test, e.g. helpers that the prompt shows."""
    entry_point: str = ""
    """The function handed to check(candidate), when the test defines one."""
    weight: float = 1.0
    names: tuple[str, ...] = ()
    """What the test takes from the solution."""
    exceptions: tuple[str, ...] = ()
    """Exceptions that the solution defines and the test catches."""
    modules: tuple[str, ...] = ()
    """Modules of the standard library that the test uses without an import."""
    defines_check: bool = False
    compares: bool = True
    """Some assertion is about a value. Else all the test wants is an exception: `assert False` behind a call."""
    catches_stop: bool = False
    """It waits for a StopIteration."""
    looks_at_arguments: bool = False
    """It compares something that it wrote down itself with something else that it wrote down: a call between the two
    may have changed the first."""

    def as_job(self) -> dict[str, Any]:
        """For the process that runs it."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "weight"}


Test = StreamTest | FunctionTest


def read_tests(task: Task, *, entry_point: str = "", only_hidden: bool = False) -> list[Test]:
    """The tests in extra "tests" (else the answer) and "hidden_tests". Raises BadTests.

    Each is a JSON list whose entries are source with assertions, {source, weight} or {input, output, weight}; or it is
    Python source itself. Extra "setup" and "entry_point" hold for all of them; the latter may name several functions,
    the one to be checked first.
    """
    hidden, public = _text(task, "hidden_tests"), _text(task, "tests") or task.answer or ""
    if only_hidden and not hidden:
        raise BadTests('it has no "hidden_tests"')
    setup, entry_point = _text(task, "setup"), entry_point or _text(task, "entry_point")
    entries = [*([] if only_hidden else _entries(public)), *_entries(hidden)]
    if not entries:
        raise BadTests('it has no tests: give them as "tests" or as the answer')
    tests = [_test(entry, setup, entry_point) for entry in entries]
    if not sum(test.weight for test in tests) > 0:
        raise BadTests("the weights of its tests are all 0")
    return tests


def _text(task: Task, name: str) -> str:
    value = task.extra.get(name, "")
    if not isinstance(value, str):
        raise BadTests(f'"{name}" is {value!r:.60}; it must be text')
    return value


def _entries(text: str) -> list[Any]:
    if not text.strip():
        return []
    if not text.lstrip().startswith("["):
        return [text]
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTests(f"its tests are no valid JSON: {error}") from error
    assert isinstance(entries, list), "JSON that starts with a bracket is a list"
    return entries


def _test(entry: Any, setup: str, entry_point: str) -> Test:
    fields = {"source": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not set(fields) <= FIELDS or ("source" in fields) == ("input" in fields):
        raise BadTests(f"a test is {entry!r:.80}; it must be source, {{source, weight}} or {{input, output, weight}}")
    weight = fields.get("weight", 1.0)
    if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise BadTests(f"a test has weight {weight!r}; it must be a number of at least 0")
    if "input" in fields:
        if not isinstance(fields["input"], str) or not isinstance(fields.get("output"), str):
            raise BadTests(f"a test is {entry!r:.80}; input and output must be text")
        return StreamTest(input=fields["input"], output=fields["output"], weight=weight)
    if not isinstance(fields["source"], str) or "output" in fields:
        raise BadTests(f"a test is {entry!r:.80}; source must be text, and has no output")
    return _function_test(fields["source"], setup, entry_point, weight)


def _function_test(source: str, setup: str, entry_point: str, weight: float) -> FunctionTest:
    tree, setup_tree = _parse(source, "a test"), _parse(setup, '"setup"')
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise BadTests(f"a test asserts nothing: {source!r:.80}")
    entries = entry_point.replace(",", " ").split()
    defines_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    if defines_check and not entries:
        raise BadTests('a test defines check(candidate); "entry_point" must name the function to check')
    unbound = _loaded(tree, setup_tree) - _bound(tree, setup_tree) - set(vars(builtins))
    exceptions = unbound & _caught(tree)
    modules = unbound & sys.stdlib_module_names - _called(tree, setup_tree)  # a function may be called "numbers"
    names = unbound - modules - exceptions
    if entries and (others := sorted(names - set(entries))):
        # Taken from the solution they would be the solution's to define, and it would define them to its advantage.
        raise BadTests(
            f'a test uses {", ".join(others)}, which nothing defines. Put it into "setup"; or, if the solution is to '
            f'define it, name it in "entry_point" too'
        )
    # Some tasks ask for a function that is named like a builtin.
    names |= set(entries) if entries else (set() if names else _asserted_calls(tree))
    if not names:
        raise BadTests(f"a test calls nothing of the solution: {source!r:.80}")
    return FunctionTest(
        source=source,
        setup=setup,
        entry_point=entries[0] if entries else "",
        weight=weight,
        names=tuple(sorted(names)),
        exceptions=tuple(sorted(exceptions)),
        modules=tuple(sorted(modules)),
        defines_check=defines_check,
        compares=any(isinstance(node, ast.Assert) and not _is_literal(node.test) for node in ast.walk(tree)),
        catches_stop="StopIteration" in _caught(tree),
        looks_at_arguments=_looks_at_arguments(tree),
    )


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"{what} is no valid Python: {error}") from error


def _loaded(*trees: ast.Module) -> set[str]:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _called(*trees: ast.Module) -> set[str]:
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _asserted_calls(tree: ast.Module) -> set[str]:
    """f, in `assert f(...) == ...`."""
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    calls = [test.left if isinstance(test, ast.Compare) else test for test in tests]
    return {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def _caught(tree: ast.Module) -> set[str]:
    """X and Y, in `except (X, Y)`."""
    types = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type]
    return {node.id for kind in types for node in ast.walk(kind) if isinstance(node, ast.Name)}


def _looks_at_arguments(tree: ast.Module) -> bool:
    """`x = [3, 1]`, and later `assert x == [1, 3]`."""
    nodes = list(ast.walk(tree))
    given = [node for node in nodes if isinstance(node, ast.Assign) and _is_literal(node.value)]
    written = {target.id for node in given for target in node.targets if isinstance(target, ast.Name)}
    compared = [node.test for node in nodes if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare)]
    return any(
        isinstance(side, ast.Name) and side.id in written and _is_literal(other)
        for test in compared
        for side, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left))
    )


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _bound(*trees: ast.Module) -> set[str]:
    """Every name that the code itself gives a value, anywhere."""
    names: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
