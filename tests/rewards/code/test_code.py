"""Guarantee: only a program that computes what the tests ask for scores; nothing else it does can score."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from temper.errors import UserError
from temper.rewards.code import code
from temper.rewards.code.code import CodeReward, find_program
from temper.rewards.code.tests import BadTests, FunctionTest, StreamTest, read_tests
from temper.sandbox import SandboxFailed, require_sandbox
from temper.types import Score, ScoreKind, Task, Trajectory

pytestmark = pytest.mark.heavy

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
Say = Callable[[str], Trajectory]
STREAM = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "10 -4\n", "output": "6\n"}])
ASSERTS = json.dumps(["assert add(2, 3) == 5", "assert add(10, -4) == 6", "assert add(0.5, 0.25) == 0.75"])
CHECK = """
METADATA = {"author": "nobody"}

def check(candidate):
    assert candidate(2, 3) == 5, "first"
    for x in range(5):
        assert candidate(x, x) == twice(x)
    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-9
"""
SETUP = "def twice(x):\n    return 2 * x\n\ndef add(a, b):\n    '''Adds.'''\n"
RIGHT = "def add(a, b):\n    return a + b\n"
RIGHT_STREAM = "a, b = map(int, input().split())\nprint(a + b)\n"


def _why_no_sandbox() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_why_no_sandbox()), reason=_why_no_sandbox() or "there is a sandbox")


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(timeout_seconds=5.0)
    yield reward
    asyncio.run(reward.close())


def task(tests: str, **extra: str) -> Task:
    return Task(id="t:1", messages=(), extra={"tests": tests, **extra})


CHECKED = task(CHECK, setup=SETUP, entry_point="add")
TASKS = {"stream": task(STREAM), "asserts": task(ASSERTS), "check": CHECKED}


def score(reward: CodeReward, on: Task, response: Trajectory) -> Score:
    """Without what is said about a number."""
    found = asyncio.run(reward.score(on, response))
    return found if found.value is None else Score.of(found.value)


@needs_sandbox
@pytest.mark.parametrize("kind", ["stream", "asserts", "check"])
def test_the_right_program_scores_and_a_wrong_or_broken_one_does_not(reward: CodeReward, say: Say, kind: str) -> None:
    right = RIGHT_STREAM if kind == "stream" else RIGHT
    assert reward.check(TASKS[kind]) is None
    assert score(reward, TASKS[kind], say(f"Here:\n```python\n{right}```\nDone.")) == Score.of(1.0)
    assert score(reward, TASKS[kind], say(right)) == Score.of(1.0)
    broken = [right.replace("+", "-"), right.replace("a + b", "None"), "def add(", "I do not know.", "", "\ud800"]
    for wrong in broken:
        assert score(reward, TASKS[kind], say(wrong)) == Score.of(0.0), wrong


EQUAL_TO_ALL = """
class Any(%s):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __bool__(self): return True
    def __hash__(self): return 0
    def __sub__(self, other): return self
    def __abs__(self): return self
    def __getattr__(self, name): return lambda *a, **k: True
def add(a, b): return Any()
"""
ATTACKS = {
    "exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "exit in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "hard exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "equal to all": EQUAL_TO_ALL % "object",
    "int equal to all": EQUAL_TO_ALL % "int",
    "list of equals": (EQUAL_TO_ALL % "float") + "\ndef add(a, b): return [Any()]",
    "builtins": """
import builtins
def yes(*a, **k): return True
for name in ("isinstance", "abs", "all", "any", "len", "print", "AssertionError", "__build_class__"):
    setattr(builtins, name, yes)
def add(a, b): return yes
""",
    "modules": """
import sys, types, json, math, unittest
class Yes(types.ModuleType):
    def __getattr__(self, name): return lambda *a, **k: True
for name in ("json", "math", "unittest", "unittest.mock", "ast", "pytest", "random"): sys.modules[name] = Yes(name)
json.dumps = lambda *a, **k: '{"verdicts": [{"verdict": "passed"}]}'
unittest.TestCase.assertEqual = lambda *a, **k: None
def add(a, b): return None
""",
    "exit handler": """
import atexit, os
atexit.register(lambda: os.write(1, b'{"verdict": "passed"}'))
def add(a, b): raise SystemExit(0)
""",
    "forged verdicts": """
import os
lines = b'{"nonce": "", "verdicts": [{"verdict": "passed", "reason": "", "questions": []}]}\\n' * 4
for fd in range(1, 20):
    try: os.write(fd, lines)
    except OSError: pass
def add(a, b): print("passed"); return "passed"
""",
    "forged answers": """
import os
for fd in range(3, 20):
    for test in range(4):
        for number in range(10):
            for answer in ('["there"]', '["value", ["there", 0]]', '["value", ["type", "object"]]', '["passed"]', '1'):
                try: os.write(fd, f'[{test}, {number}, {answer}]\\n'.encode())
                except OSError: pass
    try: os.write(fd, b'[Infinity, 0, []]\\n[[[\\n[0, 0]\\n\\xff\\n')
    except OSError: pass
os._exit(0)
""",
    "assertion error": "def add(a, b): raise AssertionError('passed')",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "deep answer": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "circle": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "frames, files and garbage": """
import gc, os, sys
def add(a, b):
    found = []
    frame = sys._getframe()
    while frame:
        found += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, str))]
    for folder, _, names in os.walk("."):
        for name in names:
            found.append(open(os.path.join(folder, name), errors="replace").read())
    text = "".join(found)
    parts = ["assert ", "add(2, 3)", " == 5"], ["assert ", "candidate(x, x)", " == twice"]
    return a + b if any("".join(part) in text for part in parts) else None
""",
    "daemon thread": """
import os, threading, time
def shout():
    while True: os.write(1, b"passed\\n"); time.sleep(0.01)
threading.Thread(target=shout, daemon=True).start()
threading.Thread(target=lambda: time.sleep(60)).start()
def add(a, b): return None
""",
    "infinite": "def add(a, b):\n    while True: pass",
    "generator": "def add(a, b):\n    while True: yield 5",
    "memory": "def add(a, b): return 'x' * 10**10",
    "helper replaced": "def twice(x): return None\ndef add(a, b): return 5 if (a, b) == (2, 3) else None",
    "class as function": "class add(int):\n    def __new__(cls, a, b): return 5\n    __eq__ = lambda self, other: True",
}


@needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_scores(say: Say, name: str) -> None:
    reward = CodeReward(timeout_seconds=2.0)

    async def go() -> list[Score]:
        scores = [await reward.score(on, say(ATTACKS[name])) for on in TASKS.values()]
        scores.append(await reward.score(CHECKED, say(RIGHT)))
        await reward.close()
        return scores

    *attacked, healthy = asyncio.run(go())
    assert [each.value for each in attacked] == [0.0] * len(attacked)
    assert healthy == Score.of(1.0)


def test_tests_beside_the_solution_would_be_fooled() -> None:
    for name in ("equal to all", "int equal to all"):
        space: dict[str, Any] = {}
        exec(ATTACKS[name] + "assert add(2, 3) == 5 and abs(add(0.1, 0.2) - 0.3) < 1e-9", space)


@needs_sandbox
def test_the_search_for_tests_would_find_them(reward: CodeReward, say: Say) -> None:
    leaked = "# assert add(2, 3) == 5\n" + ATTACKS["frames, files and garbage"]
    assert score(reward, TASKS["asserts"], say(leaked)) == Score.of(1.0)


@needs_sandbox
def test_objects_that_agree_to_everything_cannot_stand_for_text(reward: CodeReward, say: Say) -> None:
    on = task(json.dumps(["assert f(1).startswith('abc')", "assert 'abc' in f(1)", "assert f(1)", "assert not f(1)"]))
    agree = "class A:\n    startswith = lambda s, x: True\n    __contains__ = startswith\ndef f(x): return A()"
    partial = CodeReward(all_or_nothing=False)
    assert score(partial, on, say(agree)) == Score.of(0.25)  # it is true, as the third test asks
    assert score(partial, on, say("def f(x): return 'abcd'")) == Score.of(0.75)
    asyncio.run(partial.close())


@needs_sandbox
def test_solutions_print_and_stay_silent_about_the_protocol(reward: CodeReward, say: Say) -> None:
    noisy = (
        "import os\nprint('noise')\nos.write(1, b'more')\ndef add(a, b):\n    print('[0, 0, 1]')\n    return a + b\n"
    )
    assert score(reward, TASKS["asserts"], say(noisy)) == Score.of(1.0)
    assert score(reward, CHECKED, say(noisy + "if __name__ == '__main__':\n    1 / 0\n")) == Score.of(1.0)


@needs_sandbox
def test_weights_and_hidden_tests(say: Say) -> None:
    public = json.dumps([{"source": "assert f(1) == 1", "weight": 3}, {"input": "", "output": "hello", "weight": 1}])
    on = task(public, hidden_tests=json.dumps(["assert f(2) == 2", {"source": "assert f(3) == 0", "weight": 0}]))
    response = say("def f(x): return x\nprint('hello ')\n\n")

    async def go(**options: Any) -> float | None:
        reward = CodeReward(**options)
        found = await reward.score(on, response)
        await reward.close()
        return found.value

    assert asyncio.run(go(all_or_nothing=False)) == 1.0
    assert asyncio.run(go(all_or_nothing=True)) == 1.0
    assert asyncio.run(go(only_hidden=True)) == 1.0
    response = say("def f(x): return 1\nprint('hello')")
    assert asyncio.run(go(all_or_nothing=False)) == 0.8
    assert asyncio.run(go(only_hidden=True)) == 0.0


@needs_sandbox
def test_as_many_programs_run_at_a_time_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's hundreds of programs two at a time held up a machine of sixteen cores for a minute."""
    sizes: list[int] = []
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    monkeypatch.setattr(code, "Sandbox", lambda size: sizes.append(size))
    CodeReward(), CodeReward(workers=3)
    assert sizes == [16, 3]


def test_answers_that_are_handed_on_classes_and_exceptions(reward: CodeReward, say: Say) -> None:
    tests = [
        "assert decode(encode('abc')) == 'abc'",
        "x = encode('a')\nx += 'b'\nassert decode(x) != 'a'",
        "n = Node(1)\nn.next = Node(2)\nassert total(n) == 3\nassert n.next.value == 2",
        "try:\n    total(None)\nexcept ValueError:\n    raised = True\nassert raised",
        "assert list(numbers()) == [0, 1, 2]",
        "assert search('b')\nassert not search('z')",
        "assert kinds([1, 'a'], int) == {'a'}",
        "assert sys.getsizeof(encode('a')) == sys.getsizeof('b')",
    ]
    solution = """
import sys
sys.getsizeof = None
class Node:
    def __init__(self, value): self.value, self.next = value, None
def total(node):
    if node is None: raise ValueError("empty")
    return node.value + (total(node.next) if node.next else 0)
def encode(s): return s[::-1]
def decode(s): return s[::-1]
def search(letter):
    import re
    return re.search(letter, "abc")
def numbers(): return (i for i in range(3))
def kinds(items, kind): return {i for i in items if not isinstance(i, kind)}
"""
    for source in tests:
        assert score(reward, task(json.dumps([source])), say(solution)) == Score.of(1.0), source


@needs_sandbox
def test_broken_tests_are_errors_and_not_zeros(reward: CodeReward, say: Say) -> None:
    for tests, reason in (
        ("assert f(lambda x: x) == 1", "function is no plain data"),
        ("if False:\n    assert f(1) == 1", "no assertion was reached"),
        ("assert True or f(1)", "the solution was never called"),
    ):
        result = score(reward, task(tests), say("def f(x): return 1"))
        assert result.kind is ScoreKind.ERROR, tests
        assert reason in (result.reason or "")


@needs_sandbox
def test_a_test_that_leaves_early_has_not_passed(reward: CodeReward, say: Say) -> None:
    for tests in ("assert f(1) == 1\nexit()\nassert f(1) == 2", "assert f(1) == 1\nraise SystemExit(0)"):
        assert score(reward, task(tests), say("def f(x): return 1")) == Score.of(0.0)


@needs_sandbox
def test_a_broken_sandbox_is_an_error(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, size: int) -> None: ...

        async def run(self, program: object, limits: object) -> object:
            raise SandboxFailed("the boundary broke")

    monkeypatch.setattr(code, "Sandbox", Broken)
    for on in TASKS.values():
        assert score(CodeReward(), on, say(RIGHT)) == Score.error("the boundary broke")


@pytest.mark.parametrize(
    ("tests", "extra", "reason"),
    [
        ("", {}, "no tests"),
        ("assert f(1) ==", {}, "no valid Python"),
        ("f(1)", {}, "asserts nothing"),
        ("assert 1 == 1", {}, "calls nothing of the solution"),
        ("[1]", {}, "a test is 1"),
        ("[{]", {}, "no valid JSON"),
        ('[{"input": "1"}]', {}, "must be text"),
        ('[{"input": "1", "output": "1", "source": "x"}]', {}, "a test is"),
        ('[{"source": "assert f(1)", "weight": -1}]', {}, "weight -1"),
        ('[{"source": "assert f(1)", "weight": 0}]', {}, "all 0"),
        (CHECK, {}, "entry_point"),
        (CHECK, {"entry_point": "add"}, "uses twice, which nothing defines"),
        (CHECK, {"entry_point": "add", "setup": "def"}, '"setup" is no valid Python'),
    ],
)
def test_tests_that_cannot_judge_are_refused_when_data_is_loaded(
    tests: str, extra: dict[str, str], reason: str
) -> None:
    with pytest.raises(BadTests, match=reason):
        read_tests(task(tests, **extra))


def test_tests_are_read_from_the_answer_too_and_builtin_names_can_be_asked_for() -> None:
    (test,) = read_tests(Task(id="t", messages=(), answer=json.dumps(["assert sum(10, 15) == 6"])))
    assert isinstance(test, FunctionTest)
    assert test.names == ("sum",)
    with pytest.raises(BadTests, match="hidden_tests"):
        read_tests(task(STREAM), only_hidden=True)


@pytest.mark.parametrize(
    ("printed", "is_right"),
    [
        ("1 2\n3\n", True),
        ("1 2  \n3\n\n\n", True),
        ("1 2\n3", True),
        ("1  2\n3", False),
        ("1 2\n\n3", False),
        ("", False),
    ],
)
def test_printed_lines_are_compared_without_space_at_their_ends(printed: str, is_right: bool) -> None:
    assert StreamTest(input="", output="1 2\n3\n").accepts(printed) is is_right


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```\nplain\n```\n```python\nb\n```\n```json\n{}\n```", "b\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nfirst\n```\n```python\nunfinished", "first\n"),
        ("x = 1", "x = 1"),
        ("  \n", None),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None) -> None:
    assert find_program(text) == program


def mutated(source: str) -> str:
    """The same functions, all of them wrong."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            node.body = ast.parse("return 'a wrong answer'").body
    return ast.unparse(ast.fix_missing_locations(tree))


def real_tasks() -> list[tuple[Task, str]]:
    """HumanEval and MBPP with their reference solutions."""
    if not (DATA / "humaneval").exists() or not (DATA / "mbpp").exists():
        pytest.skip(f"{DATA} has no humaneval and mbpp; set TEMPER_TEST_DATA to the folder with the data files")
    with gzip.open(DATA / "humaneval" / "HumanEval.jsonl.gz", "rt") as lines:
        human = [json.loads(line) for line in lines]
    pairs = [
        (
            task(row["test"], entry_point=row["entry_point"], setup=row["prompt"]),
            row["prompt"] + row["canonical_solution"],
        )
        for row in human
    ]
    basic = [json.loads(line) for line in (DATA / "mbpp" / "mbpp.jsonl").read_text().splitlines()]
    for row in basic:
        tests = [*row["test_list"], *row["challenge_test_list"]]
        pairs.append((task(json.dumps(tests), setup=row["test_setup_code"]), row["code"]))
    sanitized = json.loads((DATA / "mbpp" / "sanitized-mbpp.json").read_text())
    return [
        *pairs,
        *((task(json.dumps(row["test_list"]), setup="\n".join(row["test_imports"])), row["code"]) for row in sanitized),
    ]


def require_references_score(pairs: list[tuple[Task, str]], say: Say) -> None:
    reward = CodeReward(timeout_seconds=60.0)  # one reference of MBPP takes many seconds

    async def go() -> list[tuple[str, Score, Score]]:
        slots = asyncio.Semaphore(4)

        async def judge(on: Task, solution: str) -> tuple[str, Score, Score]:
            async with slots:
                right = await reward.score(on, say(f"```python\n{solution}\n```"))
                return solution, right, await reward.score(on, say(f"```python\n{mutated(solution)}\n```"))

        judged = await asyncio.gather(*(judge(*pair) for pair in pairs))
        await reward.close()
        return judged

    judged = asyncio.run(go())
    assert [entry for entry in judged if entry[1] != Score.of(1.0) or entry[2].value != 0.0] == []


@needs_sandbox
def test_a_sample_of_reference_solutions_scores_and_their_mutations_do_not(say: Say) -> None:
    require_references_score(real_tasks()[::65], say)


@needs_sandbox
@pytest.mark.slow
def test_every_reference_solution_scores_and_no_mutation_does(say: Say) -> None:
    require_references_score(real_tasks(), say)
