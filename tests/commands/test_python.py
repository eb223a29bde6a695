"""Temper from Python: the same recipes, the same messages, in scripts and inside a running event loop."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import temper
from temper.commands.init import init
from temper.commands.python import as_messages, make_table, write_rows
from temper.config import resolve
from temper.errors import UserError
from temper.plugins import name_function
from temper.runs.reader import RunReader

NEW = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 24, "alphabet": "abcd"}
ROWS = [{"prompt": word, "answer": word[::-1]} for word in ("ab", "cd", "abc", "dab", "bcd", "ca")]
SMALL: dict[str, Any] = {
    "model": {"new": NEW},
    "sampling": {"max_new_tokens": 3},
    "rollout": {"groups_per_step": 2, "group_size": 2},
    "steps": 2,
}


def starts_with_a(prompt: str, response: str, answer: str | None) -> float:
    return float(response.startswith("a"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_importing_temper_needs_no_torch_and_every_name_is_found() -> None:
    program = "import sys, temper; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
    for name in temper.__all__:
        assert getattr(temper, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = temper.trian


def test_a_function_and_a_list_of_rows_train_a_model_that_then_answers(here: Path) -> None:
    run = temper.train(data=ROWS, reward=starts_with_a, preset="dr_grpo", heldout=ROWS[:2], **SMALL)
    with RunReader(run.folder) as reader:
        assert reader.is_finished
        assert [record.step for record in reader.steps()] == [1, 2]
    assert run.folder == Path("runs/run")
    assert run.best == run.last
    assert run.last.name == "step-2"
    assert "finished" in str(run)
    with temper.load(run.best) as policy:
        answers = policy.generate(["ab", "cd"], n=3, max_new_tokens=3)
        assert [len(each) for each in answers] == [3, 3]
        assert isinstance(policy.chat("ab", max_new_tokens=3), str)
        assert policy.chat("ab", max_new_tokens=3) == policy.chat(as_messages("ab"), max_new_tokens=3)
    with pytest.raises(UserError, match="was closed"):
        policy.chat("ab")


def test_it_works_where_an_event_loop_runs_already(here: Path) -> None:
    async def notebook_cell() -> list[list[str]]:
        run = temper.train(data=ROWS, reward=lambda prompt, response, answer: len(response), **SMALL)
        with temper.load(run.last) as policy:
            return policy.generate(["ab"], n=2, max_new_tokens=2)

    assert len(asyncio.run(notebook_cell())[0]) == 2


def test_files_beside_a_recipe_are_found_from_anywhere(here: Path) -> None:
    init(here / "mine")
    stages = [{"kind": "sft", "steps": 1}]
    run = temper.train(recipe="mine/recipe.toml", stage=stages, optim={"learning_rate": 1e-3})
    assert (run.folder / "checkpoints" / "0-sft" / "step-1").is_dir()


def test_a_failed_start_leaves_neither_rows_nor_a_name_behind(here: Path) -> None:
    for wrong in ({"reward": "exakt"}, {"optim": {"lr": 1}}):
        with pytest.raises(UserError):
            temper.train("nowhere", [{"prompt": "a", "answer": "b"}], **{"reward": "exact", **wrong})
    assert list(here.glob("runs/*")) == []


def test_keyword_arguments_are_checked_like_a_recipe(here: Path) -> None:
    with pytest.raises(UserError, match=r'key "optim.lr" is unknown.*Allowed here'):
        temper.train(data=ROWS, reward="exact", optim={"lr": 1e-3}, **SMALL)
    with pytest.raises(UserError, match="no reward"):
        temper.train(data=ROWS, **SMALL)
    with pytest.raises(UserError, match="row 2 of the data"):
        temper.train(data=[ROWS[0], "ab"], reward="exact", **SMALL)  # type: ignore[list-item]
    assert not (here / "runs").exists() or not list((here / "runs").glob("*/run.db"))


def test_several_processes_of_a_launcher_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes were started"):
        temper.train(recipe="none.toml")


def test_everything_given_becomes_a_key_of_the_recipe(tmp_path: Path) -> None:
    given = {"model": "m", "data": "train.jsonl", "reward": ["math", starts_with_a], "preset": "dapo", "steps": 3,
             "heldout": {"generator": "g", "size": 4}}  # fmt: skip
    assert make_table({"steps": 9, "seed": 1}, given, tmp_path) == {
        "model": {"path": "m"},
        "train": [{"path": "train.jsonl"}],
        "reward": [{"kind": "math"}, {"kind": name_function(starts_with_a)}],
        "objective": {"preset": "dapo"},
        "steps": 3,
        "seed": 1,
        "heldout": {"generator": "g", "size": 4},
    }


def test_other_rows_than_those_of_the_run_are_not_resumed_with(tmp_path: Path) -> None:
    write_rows(ROWS, tmp_path / "train.jsonl")
    write_rows(ROWS, tmp_path / "train.jsonl")
    with pytest.raises(UserError, match="other rows"):
        write_rows(ROWS[1:], tmp_path / "train.jsonl")


SCRIPT = """
import temper

def short(prompt, response, answer):
    return -len(response)

if __name__ == "__main__":
    temper.train(data={rows!r}, reward=short, **{small!r})
"""


def test_a_script_s_reward_is_found_again_by_its_file(here: Path) -> None:
    script = here / "my_run.py"
    script.write_text(SCRIPT.format(rows=ROWS, small=SMALL))
    subprocess.run([sys.executable, str(script)], check=True, timeout=120, capture_output=True)
    config = (here / "runs/run/config.toml").read_text()
    assert f'kind = "{script}:short"' in config
    resumed = temper.train(run="runs/run", resume=True, steps=3)
    with RunReader(resumed.folder) as reader:
        assert [record.step for record in reader.steps()] == [1, 2, 3]


def test_a_function_that_no_file_holds_is_refused_by_name_when_it_is_gone(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = temper.train(data=ROWS, reward=lambda prompt, response, answer: 1.0, **SMALL)
    monkeypatch.setattr("temper.plugins._GIVEN", {})
    with pytest.raises(UserError, match=r"python:<lambda>.*stands in no file"):
        temper.train(run=run.folder, resume=True, steps=3)


def test_a_script_that_trains_when_it_is_imported_is_told_what_to_do(here: Path) -> None:
    script = here / "careless.py"
    script.write_text(
        textwrap.dedent("""
        import temper

        def short(prompt, response, answer):
            return -len(response)

        temper.train(reward=short)
    """)
    )
    with pytest.raises(UserError, match="__main__"):
        temper.train(data=ROWS, reward=f"{script}:short", **SMALL)


def test_a_function_that_hangs_or_exits_is_an_error_and_never_a_reward(here: Path) -> None:
    import time

    def hangs(prompt: str, response: str, answer: str | None) -> float:
        time.sleep(30)
        return 1.0

    def leaves(prompt: str, response: str, answer: str | None) -> float:
        sys.exit(0)

    for function, reason in ((hangs, "timeout"), (leaves, "SystemExit")):
        judge = {"kind": function, "options": {"deadline_seconds": 0.1}}
        with pytest.raises(temper.TemperError, match=reason):
            temper.train(data=ROWS, reward=judge, name=function.__name__, **SMALL)


DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = (DOCS / "python.md").read_text()


def test_every_translation_from_trl_is_a_recipe_that_is_accepted(here: Path) -> None:
    page = (DOCS / "tutorials/from_trl.md").read_text()
    rows = [line.split(" | ")[1] for line in page.splitlines() if line.startswith("| `") and " | " in line]
    snippets = [code for row in rows for code in re.findall(r"`(\w+=[^`]+)`", row)]
    assert len(snippets) >= 18
    for code in snippets:
        given = eval(f"dict({code})", {"f": starts_with_a, "g": starts_with_a})
        full = {"model": "m", "data": "train.jsonl", "reward": "exact", **given}
        if full.get("stage") in ("preference", "reward_model"):
            full["reward"] = None
        resolve(make_table({}, full, here), (), where="docs/tutorials/from_trl.md")


def test_the_first_lines_of_the_page_are_a_recipe_that_is_accepted(here: Path) -> None:
    block = PAGE.split("```python\n")[1].split("```")[0]
    call = next(node for node in ast.walk(ast.parse(block)) if ast.unparse(node).startswith("temper.train("))
    assert isinstance(call, ast.Call)
    given = {word.arg: word.value for word in call.keywords}
    given = {name: ast.literal_eval(value) for name, value in given.items() if not isinstance(value, ast.Name)}
    (config,) = resolve(make_table({}, {**given, "reward": starts_with_a}, here), (), where="docs/python.md")
    assert (config.steps, config.objective.preset, config.rollout.group_size) == (100, "dapo", 16)
