"""The table of families says what trying them says: the common ones in every run, some of
the others among the heavy tests, and all of them among the slow ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.fakes.selection import mostly_heavy, mostly_slow

FOLDER = Path(__file__).parents[2]
TABLE = json.loads((FOLDER / "temper" / "models" / "families.json").read_text())
COMMON = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "olmo2", "olmoe", "glm4_moe",
    "deepseek_v3", "smollm3", "gpt2", "granite",
)  # fmt: skip
WRONG = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "jamba", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h",
    "olmo_hybrid", "minimax", "diffllama", "doge", "codegen", "gptj", "falcon", "bloom",
)  # fmt: skip
"""Seen to give other text than transformers' generate."""
OTHERS = sorted({*TABLE["tried"], *TABLE["refused"]} - {*COMMON})


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER / "benchmarks")
    import families

    return families


@pytest.mark.parametrize("name", mostly_heavy(COMMON, keep=COMMON[::4]))
def test_a_common_family_is_computed_as_transformers_computes_it(name: str, families: ModuleType) -> None:
    assert name in TABLE["tried"]
    assert families.try_family(name, seeds=(0,)).verdict == "tried"


def test_a_family_that_gives_other_text_than_transformers_is_refused(families: ModuleType) -> None:
    assert not {*WRONG} - {*TABLE["refused"]}
    assert families.try_family("diffllama", seeds=(0,)).verdict == "refused"


def test_the_documentation_lists_every_family_of_the_table() -> None:
    page = (FOLDER / "docs" / "engine.md").read_text()
    missing = [name for name in (*TABLE["tried"], *TABLE["refused"]) if f"`{name}`" not in page]
    assert not missing


@pytest.mark.heavy
@pytest.mark.parametrize("name", mostly_slow(OTHERS, keep=OTHERS[::6]))
def test_every_family_of_the_table_is_what_the_table_says(name: str, families: ModuleType) -> None:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("not in this version of transformers")
    assert families.try_family(name).verdict == ("tried" if name in TABLE["tried"] else "refused")
