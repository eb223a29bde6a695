from __future__ import annotations

import asyncio
import gzip
import json
import os
from pathlib import Path

import pytest

from temper.envs.library.problems import PROBLEMS, READERS, last_boxed, read_problems, shuffled
from temper.errors import UserError
from temper.rewards.code.code import CodeReward
from temper.rewards.code.tests import read_tests
from temper.rewards.mathematics.math import MathReward
from temper.sandbox import require_sandbox
from temper.tasks.dataset import fingerprint
from temper.tasks.generators import make_source
from temper.types import Completion, Finish, Message, Score, Status, Task, Trajectory, Turn

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[4] / "shared" / "data"))
PUBLISHED = [
    ("gsm8k", "gsm8k/train.jsonl", 7473),
    ("gsm8k", "gsm8k/test.jsonl", 1319),
    ("math", "math/train.jsonl", 7498),  # of 7,500: two have an empty box
    ("math", "math/test.jsonl", 5000),
    ("math", "math500/test.jsonl", 500),
    ("svamp", "svamp/SVAMP.json", 1000),
    ("mbpp", "mbpp/mbpp.jsonl", 974),
    ("mbpp", "mbpp/sanitized-mbpp.json", 427),
    ("humaneval", "humaneval/HumanEval.jsonl.gz", 164),
]


def said(text: str) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    score = Score.unscorable("not scored yet")
    return Trajectory(task_id="t", group_id="g", index=0, turns=(turn,), status=Status.COMPLETED, score=score)


@pytest.mark.parametrize("kind", READERS)
def test_every_set_has_a_sample_whose_rows_are_different_problems(kind: str) -> None:
    source = make_source(kind, {}, seed=0, size=0, generators=PROBLEMS)
    count = len(read_problems(kind))
    assert 10 <= count <= 50
    assert len({fingerprint(source.task(index)) for index in range(count)}) == count
    assert all(task.env == "single_turn" and task.answer for task in read_problems(kind))


@pytest.mark.parametrize(("kind", "name", "rows"), PUBLISHED)
def test_published_files_are_read_whole(kind: str, name: str, rows: int) -> None:
    if not (DATA / name).is_file():
        pytest.skip(f"{DATA / name} is not there; set TEMPER_TEST_DATA")
    tasks = read_problems(kind, str(DATA / name))
    assert len(tasks) == rows
    if kind in ("mbpp", "humaneval"):
        assert all(read_tests(task, only_hidden=kind == "humaneval") for task in tasks)


def test_gold_answers_are_what_the_rows_say() -> None:
    firsts = {kind: read_problems(kind)[0] for kind in READERS}
    assert firsts["gsm8k"].answer == "40"
    assert firsts["math"].answer == "6"
    assert firsts["svamp"].answer == "18"
    assert firsts["svamp"].messages[0].content.endswith("Ben takes 7. How many plums are left in the basket?")


def test_the_gold_answers_of_the_samples_score_1_with_the_math_reward() -> None:
    pytest.importorskip("math_verify")
    tasks = [task for kind in ("gsm8k", "math", "svamp") for task in read_problems(kind)]

    async def go() -> list[Score]:
        reward = MathReward()
        try:
            assert [reward.check(task) for task in tasks] == [None] * len(tasks)
            return [await reward.score(task, said(f"So it is \\boxed{{{task.answer}}}.")) for task in tasks]
        finally:
            await reward.close()

    assert asyncio.run(go()) == [Score.of(1.0)] * len(tasks)


def test_hidden_tests_are_not_shown() -> None:
    for task in read_problems("mbpp"):
        shown, hidden = task.messages[0].content, json.loads(str(task.extra["hidden_tests"]))
        assert json.loads(str(task.extra["tests"]))[0] in shown
        assert len(hidden) == 2
        assert not any(test in shown for test in hidden)
        assert task.extra["entry_point"] in shown
    for task in read_problems("humaneval"):
        assert json.loads(str(task.extra["tests"])) == []
        assert "def check" not in task.messages[0].content
        assert "check" in str(task.extra["hidden_tests"])


def test_what_the_prompt_of_humaneval_defines_is_set_up_for_its_tests_but_never_the_function_itself(
    tmp_path: Path,
) -> None:
    prompt = 'import math\n\ndef double(x):\n    return 2 * x\n\ndef halve(x):\n    """Undo double()."""\n'
    test = "def check(candidate):\n    assert candidate(double(3)) == 3\n"
    row = {"prompt": prompt, "entry_point": "halve", "canonical_solution": "    return x / 2\n", "test": test}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    task = read_problems("humaneval", str(file))[0]
    assert "def double" in str(task.extra["setup"])
    assert "halve" not in str(task.extra["setup"])
    assert read_tests(task, only_hidden=True)


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"so \boxed{5}", "5"), (r"\boxed{1} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed 7$", "7"),
        (r"\fbox{x}", "x"), (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{", None), ("5", None), (r"\boxed{}", ""),
    ],
)  # fmt: skip
def test_the_last_box_counts_with_its_inner_braces(text: str, gold: str | None) -> None:
    assert last_boxed(text) == gold


def test_rows_come_in_a_new_seeded_order_each_epoch_and_every_row_once() -> None:
    epochs = [[shuffled(epoch * 50 + place, 3, 50) for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [shuffled(place, 4, 50) for place in range(50)]
    assert PROBLEMS["gsm8k"](7, 1) == PROBLEMS["gsm8k"](7, 1)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("gsm8k", '{"question": "?", "answer": "42"}', "####"),
        ("gsm8k", '{"question": "?"}', "'answer' is missing"),
        ("gsm8k", "[1]", "row 1"),
        ("gsm8k", "", "no rows"),
        ("gsm8k", "{", "JSON"),
        ("math", '{"problem": "?", "solution": "42"}', "boxed"),
        ("svamp", '{"Body": "?", "Question": "?", "Answer": "many", "Type": "x"}', "row 1"),
        ("mbpp", '{"text": "?", "code": "def f(", "test_list": ["assert f()"]}', "row 1"),
        ("mbpp", '{"text": "?", "code": "", "test_list": []}', "row 1"),
    ],
)
def test_a_row_that_is_no_problem_is_named_when_the_file_is_opened(
    kind: str, text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        make_source(kind, {"path": str(file)}, seed=0, size=0, generators=PROBLEMS)


def test_files_may_be_compressed_or_one_list_and_missing_ones_are_named(tmp_path: Path) -> None:
    row = {"question": "Line\u2028separator?", "answer": "so\n#### 1,234"}
    packed, whole = tmp_path / "a.jsonl.gz", tmp_path / "b.json"
    packed.write_bytes(gzip.compress(json.dumps(row, ensure_ascii=False).encode()))
    whole.write_text(json.dumps([row]))
    tasks: list[Task] = [read_problems("gsm8k", str(file))[0] for file in (packed, whole)]
    assert [task.answer for task in tasks] == ["1234", "1234"]
    with pytest.raises(UserError, match="no such file"):
        read_problems("gsm8k", str(tmp_path / "none.jsonl"))


def sandbox_problem() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.heavy
@pytest.mark.skipif(bool(sandbox_problem()), reason=f"no sandbox: {sandbox_problem()}")
@pytest.mark.parametrize("kind", ["mbpp", "humaneval"])
def test_reference_programs_of_the_samples_pass_all_tests_and_the_program_of_another_row_does_not(kind: str) -> None:
    tasks = read_problems(kind)
    others = [*tasks[1:], tasks[0]]

    async def go() -> tuple[list[Score], list[Score]]:
        reward = CodeReward()
        try:
            own = [await reward.score(task, said(f"Here:\n{task.answer}")) for task in tasks]
            swapped = [await reward.score(a, said(str(b.answer))) for a, b in zip(tasks[:4], others, strict=False)]
            return own, swapped
        finally:
            await reward.close()

    own, swapped = asyncio.run(go())
    assert own == [Score.of(1.0)] * len(tasks)
    assert [score.value for score in swapped] == [0.0] * 4
