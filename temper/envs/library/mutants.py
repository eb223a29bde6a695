"""Small modules of ours and the ways in which a rule breaks them, for tasks that ask to mend them.

Owns: reading the modules, mutation of their syntax trees, the proof which mutants their tests tell apart, and the table
of those. Refuses: running a mutant anywhere but in the sandbox; some of them never end.

python -m temper.envs.library.mutants      writes the table anew; a test compares it with the rule
"""

from __future__ import annotations

import ast
import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from temper.sandbox import Limits, Program, Sandbox

SAMPLES = Path(__file__).parent / "samples"
TABLE = SAMPLES / "repair_mutants.jsonl"
MODULES = ("clock", "counts", "lists", "money", "shapes", "words")
NUM_VISIBLE = 2
"""Tests of each function that a policy sees: the first. The others are hidden."""
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
PROGRAM = """
import json, signal
def stop(*_):
    raise TimeoutError
signal.signal(signal.SIGPROF, stop)
verdicts = []
for source, tests in json.loads(input()):
    failed, space = [], {}
    exec(source, space)
    for number, test in enumerate(tests):
        signal.setitimer(signal.ITIMER_PROF, 0.1)
        try:
            exec(test, space)
        except (Exception, MemoryError):
            failed.append(number)
        signal.setitimer(signal.ITIMER_PROF, 0)
    verdicts.append(failed)
print(json.dumps(verdicts))
"""


@dataclass(frozen=True, slots=True)
class SampleModule:
    """Functions that call none of each other, and their tests."""

    name: str
    functions: Mapping[str, str]
    """Source by name, as ast.unparse writes it."""
    tests: Mapping[str, tuple[str, ...]]
    """Assertions by the function that they are about."""

    def source(self, broken: Mapping[str, str] | None = None) -> str:
        """All of the module, with some of its functions replaced."""
        return "\n\n\n".join({**self.functions, **(broken or {})}.values()) + "\n"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function that is wrong in one place, and is told from the right one by tests of both sorts."""

    module: str
    function: str
    kind: str
    source: str
    fails: tuple[int, ...]
    """Places of the function's tests that it fails."""


@functools.cache
def read_modules() -> Mapping[str, SampleModule]:
    modules = {}
    for name in MODULES:
        code, _, tests = (SAMPLES / f"repair_{name}.txt").read_text(encoding="utf-8").partition("# tests\n")
        functions = {node.name: ast.unparse(node) for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
        by_function: dict[str, list[str]] = {function: [] for function in functions}
        for test in tests.splitlines():
            by_function[test.removeprefix("assert ").partition("(")[0]].append(test)
        modules[name] = SampleModule(name, functions, {one: tuple(found) for one, found in by_function.items()})
    return modules


@functools.cache
def read_mutants() -> tuple[Mutant, ...]:
    rows = map(json.loads, TABLE.read_text(encoding="utf-8").splitlines())
    return tuple(Mutant(**{**row, "fails": tuple(row["fails"])}) for row in rows)


def mutate(source: str) -> Iterator[tuple[str, str]]:
    """(kind, source) of every way in which the rule breaks a function."""
    tree = ast.parse(source)
    for place, node in enumerate(ast.walk(tree)):
        for number, (kind, _) in enumerate(_changes(node)):
            broken = copy.deepcopy(tree)
            target = next(one for i, one in enumerate(ast.walk(broken)) if i == place)
            fields = list(_changes(target))[number][1]
            for name, value in fields.items():
                setattr(target, name, value)
            yield kind, ast.unparse(broken)


def _changes(node: ast.AST) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(kind, fields to set) of every change to this node."""
    match node:
        case ast.BinOp() | ast.AugAssign() if isinstance(node.op, ARITHMETIC):
            yield from (("operator", {"op": other()}) for other in ARITHMETIC if not isinstance(node.op, other))
        case ast.Compare(ops=[one]) if isinstance(one, COMPARISONS):
            yield from (("operator", {"ops": [other()]}) for other in COMPARISONS if not isinstance(one, other))
        case ast.BoolOp():
            yield "operator", {"op": ast.Or() if isinstance(node.op, ast.And) else ast.And()}
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield from (("constant", {"value": other}) for other in (value - 1, value + 1) if other >= 0)
        case ast.Call(args=[first, second, *others]):
            yield "arguments", {"args": [second, first, *others]}
        case ast.Call(args=[only], func=ast.Name(id="range")):
            fewer = ast.BinOp(left=only, op=ast.Sub(), right=ast.Constant(value=1))
            yield "off by one", {"args": [fewer]}
            yield "off by one", {"args": [ast.Constant(value=1), only]}
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.FloorDiv | ast.Mod):
        yield "arguments", {"left": node.right, "right": node.left}
    if isinstance(node, ast.If):
        yield "condition", {"test": ast.UnaryOp(op=ast.Not(), operand=node.test)}
    body = getattr(node, "body", None)
    if isinstance(body, list):
        for place, statement in enumerate(body):
            if isinstance(statement, ast.If) and len(body) > 1:
                yield "missing branch", {"body": [*body[:place], *statement.orelse, *body[place + 1 :]]}


def prove(sandbox: Sandbox) -> list[Mutant]:
    """All mutants that fail both a visible and a hidden test of theirs. Raises AssertionError if an original fails."""
    found = []
    for module in read_modules().values():
        for name, source in module.functions.items():
            kinds = {text: kind for kind, text in mutate(source)}
            kinds.pop(source, None)
            tests = module.tests[name]
            original, *verdicts = _failures(sandbox, [source, *kinds], tests)
            assert not original, f"{module.name}.{name} fails {[tests[place] for place in original]}"
            for (text, kind), fails in zip(kinds.items(), verdicts, strict=True):
                if any(place < NUM_VISIBLE for place in fails) and any(place >= NUM_VISIBLE for place in fails):
                    found.append(Mutant(module.name, name, kind, text, tuple(fails)))
    return found


def _failures(sandbox: Sandbox, sources: Sequence[str], tests: Sequence[str]) -> list[list[int]]:
    """Places of the tests that each source fails."""
    job = json.dumps([[source, tests] for source in sources])
    outcome = sandbox.run_sync(Program(PROGRAM, stdin=job), Limits(wall_seconds=300.0, cpu_seconds=60.0))
    assert outcome.status == "ok", outcome
    verdicts: list[list[int]] = json.loads(outcome.stdout)
    return verdicts


def write_table(mutants: Sequence[Mutant]) -> str:
    return "".join(json.dumps(asdict(mutant)) + "\n" for mutant in mutants)


if __name__ == "__main__":
    pool = Sandbox()
    TABLE.write_text(write_table(prove(pool)), encoding="utf-8")
    pool.close()
