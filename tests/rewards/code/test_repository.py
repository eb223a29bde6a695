"""Guarantee: of a task with files, only a repository that computes what the hidden tests ask for scores.

The tests are in no sandbox that holds the policy's files, so there is nothing to alter; what a module does to the
process that calls it is its own affair.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator

import pytest

from temper.errors import UserError
from temper.rewards.code.code import CodeReward, Solution
from temper.sandbox import require_sandbox
from temper.sandbox.repository import apply_changes, write_changes
from temper.types import Score, ScoreKind, Task, Trajectory

FILES = {
    "calc.py": "from core import minus\n\n\ndef add(a, b):\n    return minus(a, b)\n\n\ndef word():\n    return 'x'\n",
    "core.py": "def minus(a, b):\n    return a - b\n",
    "test_calc.py": "from calc import add\n\nassert add(2, 3) == 5\n",
}
SECRET = "nobody-knows-this-word"
TESTS = ["assert add(2, 3) == 5", "assert add(10, -4) == 6", "assert [add(x, 1) for x in (1, 2)] == [2, 3]"]
RIGHT = "def add(a, b):\n    return a + b\n"
TASK = Task(
    id="t",
    messages=(),
    env="shell",
    extra={"files": json.dumps(FILES), "module": "calc", "hidden_tests": json.dumps(TESTS)},
)


def missing() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(missing()), reason=missing() or "the sandbox is there")


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(timeout_seconds=1.0, all_or_nothing=False)
    yield reward
    asyncio.run(reward.close())


def judge(reward: CodeReward, changes: dict[str, str | None] | str, task: Task = TASK) -> Score:
    result = changes if isinstance(changes, str) else json.dumps(changes)
    episode = dataclasses.replace(Trajectory.saying("t", "done"), result=result)
    return asyncio.run(reward.score(task, episode))


@needs_sandbox
def test_the_share_of_hidden_tests_is_paid(reward: CodeReward) -> None:
    assert judge(reward, {"calc.py": RIGHT}).value == 1.0
    assert judge(reward, {"core.py": "def minus(a, b):\n    return a + b\n"}).value == 1.0
    assert judge(reward, {}).value == 0.0
    assert judge(
        reward, {"calc.py": "def add(a, b):\n    return 5 if a == 2 else a + b - (b < 0)\n"}
    ).value == pytest.approx(1 / 3)
    untouched = Trajectory.saying("t", "def add(a, b): return a + b")
    assert asyncio.run(reward.score(TASK, untouched)).value == 0.0, "words are no files"


@needs_sandbox
def test_what_several_members_of_a_group_write_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = CodeReward(timeout_seconds=1.0)
    judged = []

    async def judge_once(tests: object, solution: Solution) -> Score:
        judged.append(solution)
        await asyncio.sleep(0.01)
        return Score.of(1.0) if "+" in str(solution.files) else Score.error("busy")

    async def score(*changes: dict[str, str]) -> list[Score]:
        said = [dataclasses.replace(Trajectory.saying("t", ""), result=json.dumps(one)) for one in changes]
        return await asyncio.gather(*(reward.score(TASK, one) for one in said))

    monkeypatch.setattr(reward, "_judge", judge_once)
    right, other = {"calc.py": RIGHT}, {"calc.py": RIGHT + "#"}
    assert asyncio.run(score(right, right, other, right)) == [Score.of(1.0)] * 4
    assert len(judged) == 2
    asyncio.run(score({}, {}))
    assert len(judged) == 4, "an error is no verdict: it is tried again"
    asyncio.run(reward.close())


ATTACKS: dict[str, dict[str, str | None]] = {
    "exit": {"calc.py": "import sys\nsys.exit(0)\n"},
    "exit at once": {"calc.py": "import os\nos._exit(0)\n"},
    "exit when called": {"calc.py": "import os\ndef add(a, b):\n    os._exit(0)\n"},
    "equal to all": {
        "calc.py": "class Yes(int):\n    __eq__ = lambda *_: True\n    __hash__ = int.__hash__\n"
        "def add(a, b):\n    return Yes(0)\n"
    },
    "assert and unittest": {
        "calc.py": "import builtins, unittest\nbuiltins.AssertionError = ValueError\n"
        "unittest.TestCase.assertEqual = lambda *_: None\nunittest.TestCase.run = lambda *_: None\n"
        "def add(a, b):\n    raise AssertionError\n"
    },
    "conftest and friends": dict.fromkeys(
        ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.py", "unittest.py", "json.py", "ast.py"),
        "import os\nos._exit(0)\n",
    ),
    "the driver's own files": dict.fromkeys(
        ("main.py", "solution.py", "wire.py", "temper/rewards/code/wire.py", "temper/__init__.py"),
        "def add(a, b):\n    return a + b\ndef encode(value, depth=0):\n    return ['int', hex(5)]\n",
    ),
    "a forged verdict": {
        "calc.py": "import os, json\n"
        "line = json.dumps({'nonce': '', 'verdicts': [{'verdict': 'passed', 'reason': '', 'questions': []}] * 3})\n"
        "for place in range(3, 64):\n"
        "    try:\n        os.write(place, line.encode() + b'\\n')\n    except OSError:\n        pass\n"
        "for name in ('result.json', '../result.json', '../job.json', '../answers.jsonl'):\n"
        "    open(name, 'w').write(line)\n"
        "os._exit(0)\n"
    },
    "a test that says yes": {"test_calc.py": "", "tests.py": "", "hidden_tests.py": "def add(a, b): return a + b\n"},
    "fork bomb": {"calc.py": "import os\nwhile True:\n    os.fork()\n"},
    "for ever": {"calc.py": "while True: pass\n"},
    "memory": {"calc.py": "x = [0] * (1 << 40)\n"},
    "stops the test": {"calc.py": "def add(a, b):\n    raise StopIteration\n"},
    "gone": {"calc.py": None},
    "links out": {"calc.py": "import os\nos.symlink('/', 'r')\nfrom r.core import add\n"},
}


@needs_sandbox
@pytest.mark.heavy
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_verdict_scores_nothing(name: str, reward: CodeReward) -> None:
    score = judge(reward, ATTACKS[name])
    assert (score.kind, score.value) == (ScoreKind.VALUE, 0.0), score
    assert judge(reward, {**ATTACKS[name], "calc.py": RIGHT, "json.py": None, "ast.py": None}).value == 1.0, (
        "the same repository scores when its module computes what is asked"
    )


SEARCH = """
import os
def word():
    for folder, _, names in os.walk("/tmp"):
        for path in [os.path.join(folder, name) for name in names]:
            text = open(path, errors="replace").read()
            if "nobody-knows" in text:
                return text[text.index("nobody-knows"):][:22]
    for process in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ", "maps", "mem"):
            try:
                text = open(f"/proc/{process}/{name}", errors="replace").read()
            except OSError:
                continue
            if "nobody-knows-" in text:
                return text[text.index("nobody-knows"):][:22]
"""


@needs_sandbox
def test_no_test_is_where_the_policys_code_could_read_it(reward: CodeReward) -> None:
    task = dataclasses.replace(TASK, extra={**TASK.extra, "hidden_tests": json.dumps([f"assert word() == '{SECRET}'"])})
    assert judge(reward, {"calc.py": SEARCH}, task).value == 0.0
    assert judge(reward, {"calc.py": f"def word():\n    return '{SECRET}'\n"}, task).value == 1.0


@needs_sandbox
def test_a_program_of_several_files_is_run_on_the_input_of_a_test(reward: CodeReward) -> None:
    tests = json.dumps([{"input": "4\n", "output": "5\n"}])
    task = dataclasses.replace(TASK, extra={**TASK.extra, "hidden_tests": tests})
    assert judge(reward, {"calc.py": "from core import minus\nprint(minus(int(input()), -1))\n"}, task).value == 1.0
    assert judge(reward, {"calc.py": "print(4)\n"}, task).value == 0.0


@needs_sandbox
@pytest.mark.parametrize(
    "result",
    ["", "no", "[]", '{"../x": ""}', '{"a": 1}', '{"calc.py/x": ""}', json.dumps({"x": "y" * 5_000_000}), "[" * 10**5],
)
def test_a_result_that_cannot_be_read_scores_nothing(result: str, reward: CodeReward) -> None:
    score = judge(reward, result)
    assert (score.kind, score.value) == (ScoreKind.VALUE, 0.0)


@needs_sandbox
def test_a_task_whose_module_is_not_named_is_refused(reward: CodeReward) -> None:
    task = dataclasses.replace(TASK, extra={"files": json.dumps(FILES), "hidden_tests": json.dumps(TESTS)})
    assert '"module"' in str(reward.check(task))
    assert judge(reward, {}, task).kind is ScoreKind.ERROR
    assert reward.check(TASK) is None


def test_changes_are_applied_to_what_they_were_made_from() -> None:
    before = {"a": b"1", "b/c": b"2", "gone": b"3"}
    after = {"a": b"1", "b/c": b"\xff\xfe", "d\udcff": b""}
    assert apply_changes(before, write_changes(before, after)) == after
    assert write_changes(before, before) == "{}"
