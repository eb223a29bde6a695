"""Guarantee: a suite is a few lines of TOML; mistakes in it are named; the published data is read as it is published.

Planted faults: rows whose text looks like a slot, answers that differ only in writing, a changed template.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from temper import catalogue
from temper.errors import UserError
from temper.evals import suites
from temper.evals.knights import stated_roles
from temper.evals.suites import answer_of, line_answer, load_suite, math_answer, prompts_sha256, read_tasks, suite_names
from temper.rewards.form.instructions import InstructionReward
from temper.types import Message, Task

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
OWN = """
about = "sums"
answer = "math"

[data]
path = "rows.jsonl"
columns.prompt = "{left} + {right} = ?"
columns.answer = "{sum}"

[[reward]]
kind = "math"
"""
MADE = """
[data]
generator = "chain_sum"
size = 5
seed = 3

[[reward]]
kind = "exact"
"""


def write_suite(folder: Path, text: str = OWN, rows: list[Any] | None = None) -> str:
    (folder / "own.toml").write_text(text)
    rows = [{"left": 1, "right": "2", "sum": 3}, {"left": 4, "right": "{left}", "sum": 8}] if rows is None else rows
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "own.toml")


def test_the_suites_of_the_package_are_complete() -> None:
    names = suite_names()
    assert names == ["gsm8k", "humaneval", "ifeval", "knights", "math500", "mbpp", "reasoning_gym", "svamp"]
    for name in names:
        suite = load_suite(name)
        assert suite.name == name
        assert all((suite.about, suite.source, suite.license)), f"{name}: say what it is, whose, under which terms"
        assert callable(answer_of(suite))
        if not suite.data.generator:
            assert suite.is_sample
            assert len(read_tasks(suite)) >= 12, f"{name}: works without a download"


def test_a_user_adds_a_suite_without_code(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))
    tasks = read_tasks(suite)
    assert (suite.name, suite.is_sample) == ("own", False)
    assert [task.messages[0].content for task in tasks] == ["1 + 2 = ?", "4 + {left} = ?"], "rows are no templates"
    assert [task.answer for task in tasks] == ["3", "8"]
    assert [task.id for task in tasks] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert len(read_tasks(suite, limit=1)) == 1


@pytest.mark.parametrize("ending", [".json", ".jsonl.gz", ".parquet"])
def test_rows_may_be_a_list_compressed_or_parquet(tmp_path: Path, ending: str) -> None:
    rows = [{"left": 1, "right": "2", "sum": 3}]
    path = tmp_path / f"other{ending}"
    if ending == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        text = json.dumps(rows) if ending == ".json" else json.dumps(rows[0])
        path.write_bytes(gzip.compress(text.encode()) if ending == ".jsonl.gz" else text.encode())
    tasks = read_tasks(load_suite(write_suite(tmp_path), data=path))
    assert [(task.messages[0].content, task.answer) for task in tasks] == [("1 + 2 = ?", "3")]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('about = "sums"', 'abuot = "sums"', "abuot"),
        ('path = "rows.jsonl"', 'path = "rows.jsonl"\ngenerator = "chain_sum"', "exactly one of"),
        ('path = "rows.jsonl"', 'generator = "chain_sum"', "size is missing"),
        ('path = "rows.jsonl"', 'problems = "gsm9k"', "gsm9k"),
        ("[[reward]]", "[decoding]\ntemperature = 0\n[[reward]]", "same answer"),
        ('[[reward]]\nkind = "math"', "", "reward"),
        ('about = "sums"', "about = sums", "not valid TOML"),
        ("[[reward]]", '[env]\nname = "agent"\n[[reward]]', r'env.name = "agent": .* temper train .* \[heldout\]'),
    ],
)
def test_mistakes_in_a_suite_are_named_with_the_file(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_suite(write_suite(tmp_path, OWN.replace(old, new)))
    assert "own.toml" in str(caught.value)


def test_an_unknown_suite_lists_the_known_ones_and_how_to_add_one() -> None:
    with pytest.raises(UserError, match=r'Did you mean "gsm8k"\? Known: gsm8k, .*svamp.*TOML file'):
        load_suite("gsmk8")


def test_mistakes_in_rows_are_named_with_file_and_row(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, rows=[{"left": 1, "right": 2, "sum": 3}, {"left": 1, "sum": 3}]))
    with pytest.raises(UserError, match=r"rows.jsonl, row 2: there is no column 'right'"):
        read_tasks(suite)
    text = OWN.replace('columns.answer = "{sum}"', 'answer_field = "total"')
    with pytest.raises(UserError, match=r'rows.jsonl, line 1: there is no column "total"') as caught:
        read_tasks(load_suite(write_suite(tmp_path, text)))
    assert str(tmp_path / "rows.jsonl") in str(caught.value), "the user's file, not the one it was converted to"


def test_an_answer_rule_that_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'Did you mean "math"'):
        answer_of(load_suite(write_suite(tmp_path, OWN.replace('answer = "math"', 'answer = "maths"'))))


def test_options_can_be_changed_from_outside_and_data_is_refused_where_it_is_made() -> None:
    suite = load_suite("reasoning_gym", overrides=["data.options.family=leg_counting", "data.size=7"])
    assert (suite.data.options["family"], suite.data.size) == ("leg_counting", 7)
    with pytest.raises(UserError, match="makes its tasks"):
        load_suite("reasoning_gym", data=Path("rows.jsonl"))


def test_generated_tasks_are_the_first_of_the_seed(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, MADE))
    assert [task.id for task in read_tasks(suite, limit=2)] == ["chain_sum:3:0", "chain_sum:3:1"]
    assert len(read_tasks(suite)) == 5


def test_tasks_that_share_an_id_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(index: int, seed: int) -> Task:
        return Task(id="same", messages=(Message(role="user", content=str(index)),))

    monkeypatch.setitem(catalogue.GENERATORS, "chain_sum", same)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="several tasks"):
        read_tasks(load_suite(write_suite(tmp_path, MADE)))


def test_the_hash_changes_with_everything_that_is_asked(tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path))
    tasks = read_tasks(suite)
    known = prompts_sha256(suite, tasks)
    other_template = load_suite(write_suite(tmp_path, OWN + '\n[prompt]\ntemplate = "Q: {prompt}"'))
    renamed = [Task(id="x", messages=task.messages, answer=task.answer, extra=task.extra) for task in tasks]
    assert prompts_sha256(suite, renamed) == known, "where the file lies does not matter"
    assert len({known, prompts_sha256(suite, tasks[:1]), prompts_sha256(other_template, tasks)}) == 3
    harder = [Task(id=task.id, messages=task.messages, answer="9", extra=task.extra) for task in tasks]
    assert prompts_sha256(suite, harder) != known


def test_answers_that_differ_only_in_writing_vote_together() -> None:
    assert math_answer("The answer is $1,200.") == math_answer(r"so \boxed{1200}") == "1200"
    assert math_answer(r"\boxed{\frac{1}{2}}") == math_answer("#### 0.5")
    assert math_answer("The answer is 50%.") != math_answer("The answer is 50.")
    assert math_answer("I do not know.") is None
    assert math_answer(r"\boxed{1} or \boxed{2}") is None, "two answers are none"
    assert line_answer("thought\n<answer> A  b </answer> bye") == line_answer("x\nA B\n") == "a b"
    assert line_answer("  ") is None


def test_roles_are_read_from_the_one_answer() -> None:
    thinking = "Assume Ann is a knave. <answer>(1) Ann is a knight\n(2) Bob is a knave</answer>"
    assert stated_roles(thinking) == stated_roles("Bob is not a knight. Ann is a knight.") == "Ann=knight Bob=knave"
    assert stated_roles("Ann is a knight. Ann is a knave.") is None, "both at once is no answer"
    assert stated_roles("<answer>Ann is a knight</answer><answer>Ann is a knave</answer>") is None
    assert stated_roles("nobody knows") is None


def holds(claim: Any, world: list[bool]) -> bool:
    match claim:
        case ("telling-truth", person):
            return world[person]
        case ("lying", person):
            return not world[person]
        case ("not", inner):
            return not holds(inner, world)
        case (joint, *parts):
            left, *right = [holds(part, world) for part in parts]
            both = [left, *right]
            return {"and": all(both), "or": any(both), "->": not left or both[-1], "<=>": left == both[-1]}[joint]
    raise AssertionError(claim)


def test_the_sample_puzzles_have_exactly_the_solution_they_give() -> None:
    rows = [json.loads(line) for line in (suites.FOLDER / "knights.jsonl").read_text().splitlines()]
    for row in rows:
        claims = ast.literal_eval(row["statements"])
        worlds = [[bool(bits >> i & 1) for i in range(len(claims))] for bits in range(2 ** len(claims))]
        found = [w for w in worlds if all(holds(claim, w) == w[i] for i, claim in enumerate(claims))]
        assert found == [row["solution"]]
        said = dict(zip(row["names"], row["solution"], strict=True))
        gold = stated_roles(row["solution_text_format"])
        assert gold == " ".join(f"{name}={'knight' if said[name] else 'knave'}" for name in sorted(said))


def test_the_sample_instructions_can_all_be_checked() -> None:
    reward = InstructionReward()
    assert [reward.check(task) for task in read_tasks(load_suite("ifeval"))] == [None] * 16


@pytest.mark.parametrize(
    ("name", "file", "count"),
    [
        ("gsm8k", "gsm8k/test.jsonl", 1319),
        ("math500", "math500/test.jsonl", 500),
        ("svamp", "svamp/SVAMP.json", 1000),
        ("humaneval", "humaneval/HumanEval.jsonl.gz", 164),
        ("mbpp", "mbpp/mbpp.jsonl", 974),
        ("mbpp", "mbpp/sanitized-mbpp.json", 427),
        ("ifeval", "ifeval/input_data.jsonl", 541),
        ("knights", "knights_knaves/3ppl_test.parquet", 100),
        ("knights", "knights_knaves/5ppl_test.parquet", 100),
    ],
)
def test_the_published_files_are_read_whole(name: str, file: str, count: int) -> None:
    if not (DATA / file).is_file():
        pytest.skip(f"{file} is not there: set TEMPER_TEST_DATA to the folder with the published sets")
    suite = load_suite(name, data=DATA / file)
    tasks = read_tasks(suite)
    assert (len(tasks), suite.is_sample) == (count, False)
    if name == "ifeval":
        assert {InstructionReward().check(task) for task in tasks} == {None}
    if name == "knights":
        people = int(file.split("/")[1][0])
        assert {(stated_roles(task.answer or "") or "").count("=") for task in tasks} == {people}
