"""Recipes for models that people use: each fits where it says, and the table of the page is made of them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from temper.planning.shape import decoder_shape

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "models").glob("*.toml"))
BILLIONS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-32B": 32.762,
    "Qwen/Qwen3-30B-A3B": 30.532,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030,
    "HuggingFaceTB/SmolLM3-3B": 3.075,
    "allenai/OLMo-2-0425-1B-Instruct": 1.485,
    "google/gemma-3-1b-it": 1.000,
}
"""Parameters as published: a shape that was written down wrongly does not add up to them."""


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import recipes

    return recipes


def test_shapes_add_up_to_the_parameters_that_were_published(recipes: ModuleType) -> None:
    found = {name: round(decoder_shape(shape).parameters / 1e9, 3) for name, shape in recipes.PUBLISHED.items()}
    assert found == pytest.approx(BILLIONS, abs=0.001)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_model_recipe_fits_where_it_says_without_weights_or_tokenizer(
    path: Path, recipes: ModuleType, tmp_path: Path
) -> None:
    recipe = recipes.read_recipe(path)
    plan = recipes.plan(recipe, tmp_path)
    assert plan.fits
    assert plan.layout.gpus == recipe.gpus
    assert plan.work.prompt_tokens > 20, "prompts are counted although there is no tokenizer"


def test_the_table_of_the_page_is_what_the_recipes_say(recipes: ModuleType) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert recipes.with_table(page) == page, "run python benchmarks/recipes.py --out docs"
