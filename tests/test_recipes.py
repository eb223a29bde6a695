"""Every recipe in the repository is one that Temper accepts and could run where it says, with data and models that
stand in for those it would fetch; and what it says of itself is so."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from temper.build import check_stages
from temper.catalogue import source_of
from temper.commands.plan import plan_stages
from temper.commands.training import preflight
from temper.config import load_recipe
from temper.envs.env import find_env
from temper.rewards.registry import REWARDS, make_reward
from temper.runs.metrics import METRICS, describe
from tests.fakes.selection import mostly_heavy
from tests.fakes.stand_ins import SPEECH, speech_of, with_stand_ins

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))
OWN = [path for path in RECIPES if path.parent.name != "models"]
OF_GPUS = [path for path in OWN if path.stem.startswith(("qwen_", "smollm2_"))]
"""Recipes of one H200."""
OFTEN = {"qwen_gsm8k", "smollm2_distill", "qwen3_0p6b", "smollm3_3b", "gemma3_1b"}
"""Tried in the default tests, too: a tenth of a second each."""
DOUBTS = {"repair": 2}
"""Lines that a dry run doubts: its modules have a few dozen functions, which resemble each other."""
SOON = 16384
"""Tokens that are few for an answer that thinks."""
FAMILIES = sorted({metric.name.partition("/")[0] for metric in METRICS})


def often(paths: list[Path]) -> list[Any]:
    return mostly_heavy(paths, keep=[path for path in paths if path.stem in OFTEN])


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Published shapes, by names on the hub."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import recipes

    published: dict[str, dict[str, Any]] = recipes.PUBLISHED
    return published


def head_of(path: Path) -> str:
    """The comment that a recipe begins with, in one line."""
    lines = path.read_text().splitlines()
    end = next(place for place, line in enumerate(lines) if not line.startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_accepted(path: Path) -> None:
    stages = load_recipe(path)
    check_stages(stages)
    for config in stages:
        for source in (*config.train, *config.heldout):
            if source.path or source.options.get("path"):
                continue  # the user's own file
            task = source_of(source).task(0)
            find_env(config.env.name or task.env, config.env.options)
        for part in config.reward:
            if part.kind in REWARDS:
                asyncio.run(make_reward(part.kind, part.options).close())


@pytest.mark.parametrize("path", often(RECIPES), ids=lambda path: path.stem)
def test_a_recipe_passes_its_dry_run(
    path: Path, shapes: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are rendered by templates of the family, gold answers are scored, environments played, stages checked."""
    if 'generator = "reasoning_gym"' in path.read_text():
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(ROOT)  # examples/ and the like
    monkeypatch.setattr(preflight, "this_gpu", lambda: None)  # whatever this machine has
    found = preflight.dry_run(with_stand_ins(path, tmp_path, shapes))
    assert preflight.count_doubts(found) == DOUBTS.get(path.stem, 0), found
    assert found.count("prompt ") >= len(load_recipe(path))


@pytest.mark.parametrize("path", often(OF_GPUS), ids=lambda path: path.stem)
def test_a_recipe_fits_where_it_says_it_ran(path: Path, shapes: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    if 'generator = "reasoning_gym"' in path.read_text():
        pytest.importorskip("reasoning_gym")
    assert "one H200" in head_of(path)
    planned = plan_stages(with_stand_ins(path, tmp_path, shapes), gpu="h200")
    assert [stage.plan.fits for stage in planned] == [True] * len(load_recipe(path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_where_it_ran_or_that_it_has_not(path: Path) -> None:
    """The other way round it would be found out after a day on somebody's GPU."""
    assert re.search(r"\b(Ran on \w|Not run yet)", head_of(path)), head_of(path)


def test_the_page_of_recipes_lists_every_one() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert [path.stem for path in RECIPES if not re.search(rf"\b{path.stem}\b", page)] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_models_that_think_unless_told_otherwise_are_told_or_have_room_to(path: Path) -> None:
    """Else most answers are cut before they say anything, and that is what is learned."""
    for config in load_recipe(path):
        name = config.model.path
        if name.count("/") == 1 and not name.startswith("models/") and "enable_thinking" in SPEECH[speech_of(name)][0]:
            is_told = config.prompt.chat_options.get("enable_thinking") is False
            assert is_told or config.sampling.max_new_tokens >= SOON


def test_the_stand_ins_of_models_that_think_are_asked_not_to(
    shapes: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "this_gpu", lambda: None)
    path = with_stand_ins(ROOT / "recipes" / "models" / "qwen3_0p6b.toml", tmp_path, shapes)
    closed = r"<think>\n\n</think>\n\n'"
    assert closed in preflight.dry_run(path)
    path.write_text(re.sub("chat_options.*", "", path.read_text()))
    assert closed not in preflight.dry_run(path)


def test_metrics_that_recipes_and_pages_name_exist() -> None:
    named = set()
    for path in RECIPES:
        comments = "\n".join(line.partition("#")[2] for line in path.read_text().splitlines())
        names = re.findall(rf"(?<![\w/.-])(?:{'|'.join(FAMILIES)})/\w+(?![\w/.-])", comments)
        named |= {(path.name, name) for name in names if not name.startswith("data/")}  # a folder of rows
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        names = re.findall(rf"`((?:{'|'.join(FAMILIES)})/[\w/*]+)`", path.read_text())
        named |= {(path.name, name) for name in names}
    assert {("qwen3_8b.toml", "gen/truncation_rate"), ("reading_a_run.md", "gen/len_mean")} <= named
    assert [(file, name) for file, name in sorted(named) if describe(name) is None] == []
