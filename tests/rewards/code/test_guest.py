"""What tests may do with a solution: shapes of tests that must pass for right solutions, and for these only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest

from temper.errors import UserError
from temper.rewards.code.code import CodeReward
from temper.rewards.code.tests import BadTests, read_tests
from temper.sandbox import Limits, Outcome, Program, require_sandbox
from temper.types import Score, ScoreKind, Task, Trajectory

Say = Callable[[str], Trajectory]


def why_no_sandbox() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.heavy, pytest.mark.skipif(bool(why_no_sandbox()), reason=why_no_sandbox() or "there is one")]


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(timeout_seconds=3.0)
    yield reward
    asyncio.run(reward.close())


def score(reward: CodeReward, test: str, response: Trajectory, **extra: str) -> Score:
    on = Task(id="t:1", messages=(), extra={"tests": json.dumps([test]), **extra})
    return asyncio.run(reward.score(on, response))


SHAPES = {
    "a function called check": (
        "assert check(4) == True",
        "def check(n): return n % 2 == 0",
        "def check(n): return n % 2 == 1",
    ),
    "sorted in place": (
        "x = [3, 1, 2]\nsort(x)\nassert x == [1, 2, 3]",
        "def sort(x): x.sort()",
        "def sort(x): return sorted(x)",
    ),
    "sorted in place and returned": (
        "x = list(range(3, 0, -1))\nsort(x)\nassert x == [1, 2, 3]",
        "def sort(x):\n    x.sort()\n    return x",
        "def sort(x): return sorted(x)",
    ),
    "a value and a change": (
        "x = [3, 1, 2]\nassert take(x) == 3\nassert x == [1, 2]",
        "def take(x): return x.pop(0)",
        "def take(x): return x[0]",
    ),
    "changed twice": (
        "d = {}\nput(d, 'a', [1])\nput(d, 'b', 2)\nput(d, 'a', 3)\nassert d == {'a': 3, 'b': 2}",
        "def put(d, key, value): d[key] = value",
        "def put(d, key, value): d = {key: value}",
    ),
    "changed deep inside, by name": (
        "m = [[0, 0], [0, 0]]\nfill(row=1, matrix=m)\nassert m == [[0, 0], [1, 1]]",
        "def fill(matrix, row): matrix[row][:] = [1, 1]",
        "def fill(matrix, row): matrix = [[1, 1]]",
    ),
    "an exception is wanted": (
        "try:\n    root(-1)\n    assert False\nexcept ValueError:\n    pass",
        "def root(x): raise ValueError('negative')",
        "def root(x): return 0",
    ),
    "an exception is wanted, any": (
        "try:\n    root(-1)\n    assert False, 'no error'\nexcept Exception:\n    pass",
        "def root(x): raise ValueError('negative')",
        "def root(x): return 0",
    ),
    "an exception is wanted, else": (
        "try:\n    root(-1)\nexcept ValueError as error:\n    assert 'negative' in str(error)\nelse:\n    assert False",
        "def root(x): raise ValueError('negative')",
        "def root(x): raise ValueError('wrong')",
    ),
    "an exception is wanted, or else one is raised": (
        "try:\n    root(-1)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError('no error')",
        "def root(x): raise ValueError('negative')",
        "def root(x): return 0",
    ),
    "an exception of the solution's own": (
        "try:\n    root(-1)\n    assert False\nexcept NegativeError:\n    pass",
        "class NegativeError(Exception): pass\ndef root(x): raise NegativeError(x)",
        "class NegativeError(Exception): pass\ndef root(x): raise ValueError(x)",
    ),
    "an exception that inherits from a builtin one": (
        "try:\n    root(-1)\n    assert False\nexcept ValueError as error:\n    assert error.args == (-1, 'negative')",
        "class NegativeError(ValueError): pass\ndef root(x): raise NegativeError(x, 'negative')",
        "def root(x): raise KeyError(x, 'negative')",
    ),
    "an exception of five arguments": (
        "try:\n    read(b'\\xff')\n    assert False\nexcept UnicodeDecodeError:\n    pass",
        "def read(data): return data.decode()",
        "def read(data): return data",
    ),
    "a generator to its end": (
        "g = count(2)\nassert next(g) == 1\nassert next(g) == 2\n"
        "try:\n    next(g)\n    assert False\nexcept StopIteration:\n    pass",
        "def count(n): yield from range(1, n + 1)",
        "def count(n): yield from range(1, n + 2)",
    ),
    "a loop over a generator by hand": (
        "g, seen = count(3), []\nwhile True:\n    try:\n        seen.append(next(g))\n    except StopIteration:\n"
        "        break\nassert seen == [1, 2, 3]",
        "def count(n): yield from range(1, n + 1)",
        "def count(n): yield from range(n)",
    ),
    "helpers that the solution defines": (
        "assert decode(encode('abc')) == 'abc'\nassert encode('abc') != 'abc'",
        "def encode(s): return s[::-1]\ndef decode(s): return s[::-1]",
        "def encode(s): return s\ndef decode(s): return s",
    ),
    "a helper of the solution handed to it": (
        "assert apply(double, 4) == 8",
        "def double(x): return 2 * x\ndef apply(f, x): return f(x)",
        "def double(x): return 2 * x\ndef apply(f, x): return x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_right_solution_scores_and_a_wrong_one_does_not(reward: CodeReward, say: Say, name: str) -> None:
    test, right, wrong = SHAPES[name]
    assert score(reward, test, say(right)) == Score.of(1.0)
    found = score(reward, test, say(wrong))
    assert (found.value, bool(found.reason)) == (0.0, True), found


HACKS = {
    "the argument is emptied to change what it is compared with": (
        "x = [3, 1, 2]\nassert sort(x) == sorted(x)", "def sort(x):\n    x.clear()\n    return []",
    ),
    "the same, over two statements": (
        "x = [3, 1, 2]\nfound = sort(x)\nassert found == sorted(x)", "def sort(x):\n    x.clear()\n    return []",
    ),
    "the end of the cases is forged": (
        "assert all(map(is_even, [2, 4, 5]))", "def is_even(n): raise StopIteration",
    ),
    "an assertion that is swallowed": (
        "try:\n    assert f(1) == 2\nexcept Exception as error:\n    print(error)", "def f(x): return 1",
    ),
    "an exception instead of an answer": (
        "try:\n    assert f(1) == 2\nexcept Exception as error:\n    print(error)", "def f(x): raise ValueError",
    ),
}  # fmt: skip
CHOSEN_ERRORS = {
    "a huge range": ("n = f(3)\nassert sum(1 for _ in range(n)) == 3", "def f(x): return 10 ** 15"),
    "a huge power": ("assert 7 ** f(3) == 343", "def f(x): return 10 ** 9"),
    "a huge text": ("assert f(3) * 1000 == 'abc'", "def f(x): return 'a' * 900_000"),
    "no case": ("for x in f(3):\n    assert x > 0", "def f(x): return []"),
    "another answer each time": (
        "assert g(f(1) + 'a') == 1", "import os\ndef f(x): return os.urandom(4).hex()\ndef g(x): return 1",
    ),
    "never done": (
        "while not done():\n    step()\nassert done()", "def done(): return False\ndef step(): return 1",
    ),
    "a deep answer": (
        "assert g([[f(1)]]) == 1",
        "def f(x):\n    made = []\n    for _ in range(60): made = [made]\n    return made\ndef g(x): return 2",
    ),
    "sleep": ("assert f(1) == 1", "import time\ndef f(x): time.sleep(3600)"),
    "waiting for itself": ("assert f(1) == 1", "import threading\ndef f(x): threading.Event().wait()"),
    "spinning": ("assert f(1) == 1", "def f(x):\n    while True: pass"),
    "too much said": ("assert f(1) == 1", "def f(x): return list(range(10 ** 7))"),
}  # fmt: skip


@pytest.mark.parametrize("name", {**HACKS, **CHOSEN_ERRORS})
def test_what_the_response_causes_is_zero_with_a_reason(reward: CodeReward, say: Say, name: str) -> None:
    """An error is left out of the means: a policy would rather have that than 0."""
    found = score(reward, *(part if i == 0 else say(part) for i, part in enumerate({**HACKS, **CHOSEN_ERRORS}[name])))
    assert (found.value, bool(found.reason)) == (0.0, True), found


def test_tests_that_break_by_themselves_are_errors(reward: CodeReward, say: Say) -> None:
    hungry = score(reward, "x = 'a' * 10 ** 10\nassert f(1) == 1", say("def f(x): return 1"))
    assert hungry.kind in (ScoreKind.ERROR, ScoreKind.VALUE)
    assert score(reward, "while True: pass\nassert f(1) == 1", say("def f(x): return 1")).kind is ScoreKind.ERROR


def test_a_program_that_the_machine_has_no_time_for_is_tried_again_and_then_an_error(say: Say) -> None:
    """A right solution on a busy machine: out of wall time, not of processor time."""
    reward, tries = CodeReward(timeout_seconds=1.0), []
    run = reward._sandbox.run

    async def starved(program: Program, limits: Limits | None = None) -> Outcome:
        assert limits is not None
        tries.append(limits.wall_seconds)
        if len(tries) <= num_starved:
            return Outcome("timeout", None, "", "", limits.wall_seconds, cpu_seconds=0.2, is_starved=True)
        return await run(program, limits)

    reward._sandbox.run = starved  # type: ignore[method-assign]
    num_starved = 1
    assert score(reward, "assert f(1) == 1", say("def f(x): return 1")) == Score.of(1.0)
    assert tries[1] > tries[0]
    tries.clear()
    num_starved = 2
    found = score(reward, "assert f(1) == 2", say("def f(x): return 1"))
    assert found.kind is ScoreKind.ERROR
    assert "machine is too busy" in (found.reason or "")
    asyncio.run(reward.close())


def test_several_functions_may_be_asked_for_beside_an_entry_point(reward: CodeReward, say: Say) -> None:
    test = "def check(candidate):\n    assert decode(candidate('abc')) == 'abc'"
    solution = say("def encode(s): return s[::-1]\ndef decode(s): return s[::-1]")
    assert score(reward, test, solution, entry_point="encode, decode") == Score.of(1.0)
    with pytest.raises(BadTests, match='name it in "entry_point" too'):
        read_tests(Task(id="t", messages=(), extra={"tests": json.dumps([test]), "entry_point": "encode"}))
