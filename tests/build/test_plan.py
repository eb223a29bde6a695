"""What a stage says before its first step."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from temper.build import Listeners, build_stage, first_model, make_plan
from temper.config import resolve
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer


def saved(family: str, folder: Path) -> Path:
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = character_tokenizer(letters)
    config = AutoConfig.for_model(
        family, vocab_size=len(tokenizer), hidden_size=32, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=1, **({} if family == "llama" else {"num_local_experts": 4, "num_experts_per_tok": 2}),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(AutoModelForCausalLM.from_config(config), tokenizer, folder)
    return folder


@pytest.mark.parametrize(("family", "is_told"), [("granitemoe", True), ("mixtral", False), ("llama", False)])
def test_experts_that_nobody_watches_are_told_of_once(
    tiny_recipe: dict[str, Any], tmp_path: Path, family: str, is_told: bool
) -> None:
    notes: list[str] = []
    model = {"path": str(saved(family, tmp_path / "model"))}
    (config,) = resolve({**tiny_recipe, "model": model, "stage": tiny_recipe["stage"][:1]}, [], where="test")
    stage = build_stage(config, 0, first_model(config, tmp_path), listeners=Listeners(note=notes.append))

    async def prove() -> None:
        await make_plan(stage, first_step=1, recorders=(), checkpoint=lambda step: None).parity()
        await stage.close()

    asyncio.run(prove())
    assert sum("experts of a granitemoe are not watched: no route/load_max" in note for note in notes) == is_told
    assert is_told or not any("not watched" in note for note in notes)
