"""Broken code to mend, made by rule: small modules of ours with one or two places changed, and tests that notice.

Owns: generators "repair" and "repair_demo". Refuses: making mutants (mutants.py), and tasks without a proof: every
original passes all its tests, every mutant fails visible and hidden ones of its own.

Mutants are shared out by the parity of the seed: tasks of an odd seed have none in common with those of an even one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence

from temper.envs.library.mutants import MODULES, NUM_VISIBLE, Mutant, SampleModule, read_modules, read_mutants
from temper.envs.library.problems import shuffled
from temper.envs.tool_calls import write_call
from temper.errors import UserError, did_you_mean
from temper.types import Message, Scalar, Task

LEVELS = (1, 2, 3, 4)


def repair(
    index: int, seed: int, *, level: int = 1, modules: list[Scalar] | None = None, max_characters: int = 0
) -> Task:
    """Level 1: one operator of a function of two lines, shown with the lines' numbers; 2: anything in one function;
    3: one place in a module; 4: two places in six modules. Train on odd seeds, hold out even ones, or reverse.

    max_characters: only break functions that are then no longer than this; 0: all.
    """
    mutants = _draw(index, seed, level, tuple(MODULES if modules is None else map(str, modules)), max_characters)
    known = read_modules()
    if level < 3:
        files = {f"{mutants[0].module}.py": f"{mutants[0].source}\n"}
    else:
        names = MODULES if level == 4 else (mutants[0].module,)
        broken = {name: {one.function: one.source for one in mutants if one.module == name} for name in names}
        files = {f"{name}.py": known[name].source(broken[name]) for name in names}
    prompt = _numbered(mutants[0])
    if level > 1:
        tests = {
            f"test_{one.module}.py": _visible(known[one.module], one.function if level == 2 else "") for one in mutants
        }
        files = {**files, **tests}
        runs = " and ".join(f"python {name}" for name in tests)
        prompt = (
            f"Files: {', '.join(sorted(files))}.\nWith {runs} an assertion fails. Find what is wrong in the code, mend "
            "it and change nothing else: more tests will be run. Say done when you are done."
        )
    return Task(
        id=f"repair:{level}:{seed}:{index}",
        messages=(Message(role="user", content=prompt),),
        env="shell",
        extra={
            "files": json.dumps(files),
            "module": ",".join(sorted({mutant.module for mutant in mutants})),
            "hidden_tests": json.dumps([test for mutant in mutants for test in _hidden(mutant, is_alone=level < 3)]),
            "solution": json.dumps({f"{one.module}.py": _mended(one, is_alone=level < 3) for one in mutants}),
        },
    )


def repair_demo(
    index: int, seed: int, *, modules: list[Scalar] | None = None, max_characters: int = 0, call_format: str = "plain"
) -> Task:
    """Turns of right episodes of level 1 as single-turn examples: the call; in every fourth, the word after it."""
    task = repair(index, seed, modules=modules, max_characters=max_characters)
    right, wrong = (next(iter(json.loads(str(task.extra[name])).values())) for name in ("solution", "files"))
    lines = zip(right.splitlines(), wrong.splitlines(), strict=True)
    number, text = next((place, one) for place, (one, other) in enumerate(lines, start=1) if one != other)
    call = write_call(call_format, "line", {"number": number, "text": text.strip()})
    name = f"repair_demo:{seed}:{index}"
    if index % 4 < 3:
        return Task(id=name, messages=task.messages, env="shell", answer=call, extra=task.extra)
    said = (Message(role="assistant", content=call), Message(role="tool", content="done", name="line"))
    return Task(id=name, messages=(*task.messages, *said), env="shell", answer="done", extra=task.extra)


def _draw(index: int, seed: int, level: int, modules: tuple[str, ...], max_characters: int) -> list[Mutant]:
    pool = _pool(seed % 2, level, modules, max_characters)
    first = pool[shuffled(index, seed, len(pool))]
    if level < 4:
        return [first]
    # In another module, so that neither can make up for the other.
    others = [mutant for mutant in pool if mutant.module != first.module]
    if not others:
        raise UserError("level=4 breaks two modules: give at least two in `modules`.")
    return [first, random.Random(f"repair/{seed}/{index}").choice(others)]


@functools.lru_cache(maxsize=64)
def _pool(parity: int, level: int, modules: tuple[str, ...], max_characters: int) -> Sequence[Mutant]:
    if level not in LEVELS:
        raise UserError(f"level={level} is unknown. Known: {', '.join(map(str, LEVELS))}.")
    for name in modules:
        if name not in MODULES:
            raise UserError(f'module "{name}" is unknown.{did_you_mean(name, MODULES)} Known: {", ".join(MODULES)}.')
    own = [mutant for mutant in read_mutants() if mutant.module in modules and parity_of(mutant) == parity]
    if level == 1:
        own = [mutant for mutant in own if mutant.kind == "operator" and mutant.source.count("\n") == 1]
    if max_characters:
        own = [mutant for mutant in own if len(mutant.source) <= max_characters]
    if not own:
        within = f" within max_characters={max_characters}" if max_characters else ""
        raise UserError(
            f"modules={list(modules)} have no mutants of level {level}{within}. Name more of {', '.join(MODULES)}"
            f"{', or allow more characters' if max_characters else ''}."
        )
    return own


def parity_of(mutant: Mutant) -> int:
    """The parity of the seeds that have this mutant."""
    return hashlib.blake2b(mutant.source.encode(), digest_size=1).digest()[0] % 2


def _numbered(mutant: Mutant) -> str:
    """The lines of the function, and the first test that it fails of those that may be seen."""
    lines = [f"{place} {line}" for place, line in enumerate(mutant.source.splitlines(), start=1)]
    test = read_modules()[mutant.module].tests[mutant.function][mutant.fails[0]]
    return "\n".join([*lines, test.removeprefix("assert ")])


def _visible(module: SampleModule, function: str) -> str:
    """A file of visible tests: of one function, or, where none is named, of all."""
    chosen = [function] if function else list(module.functions)
    tests = [test for name in chosen for test in module.tests[name][:NUM_VISIBLE]]
    return f"from {module.name} import {', '.join(chosen)}\n\n" + "\n".join(tests) + "\n"


def _hidden(mutant: Mutant, *, is_alone: bool) -> list[str]:
    """One test for each assertion that the mutant fails; it holds all that pass besides, so that a change which mends
    one thing and breaks another is worth nothing, and no change is worth nothing."""
    module = read_modules()[mutant.module]
    own = module.tests[mutant.function]
    passed = [test for place, test in enumerate(own) if place not in mutant.fails]
    others = [test for name, tests in module.tests.items() if name != mutant.function for test in tests]
    kept = passed if is_alone else [*passed, *others]
    return ["\n".join([*kept, own[place]]) for place in mutant.fails]


def _mended(mutant: Mutant, *, is_alone: bool) -> str:
    module = read_modules()[mutant.module]
    return f"{module.functions[mutant.function]}\n" if is_alone else module.source()
