"""What a step had to compute: shared prompts once, rows without credit forward alone, nothing for recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

from temper.batching.pack import pack
from temper.models.load import load_model
from temper.models.lora.wrapping import AdapterSettings, add_adapter
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS, Objective
from temper.runs.flops import ModelSize
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.work import size_of, work_of
from temper.types import Batch, Sample

WIDTH, MLP, VOCABULARY, LAYERS, HEADS, KV_HEADS = 32, 48, 40, 2, 4, 2
ATTENTION = WIDTH * WIDTH * 2 + 2 * WIDTH * WIDTH // 2
"""Queries and output of one width, keys and values of half of it."""
INSIDE = LAYERS * (ATTENTION + 3 * WIDTH * MLP)
SIZE = ModelSize(
    trained=INSIDE, frozen=0, head=VOCABULARY * WIDTH, is_head_trained=True, attention_width=WIDTH, windows=(None,) * 2
)
Maker = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("model")
    save_model(AutoModelForCausalLM.from_config(config), character_tokenizer("abc"), made)
    return made


def load(folder: Path) -> Any:
    return load_model(folder, torch.float32, torch.device("cpu"))


def row(prompt: Sequence[int], drawn: int, index: int, advantage: float = 1.0) -> Sample:
    mask = [0] * len(prompt) + [1] * drawn
    return Sample(
        group_id="g", index=index, token_ids=[*prompt, *range(drawn)], loss_mask=mask,
        behavior_logprobs=[0.0] * len(mask), versions=[m - 1 for m in mask],
        advantages=[advantage * m for m in mask], weights=[0.1 * m for m in mask],
    )  # fmt: skip


def flops_of(model: Any, rows: Sequence[Sample], *, objective: Objective = PRESETS["grpo"], **settings: Any) -> float:
    made = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=0.0), temperature=1.0, total_steps=9, traces=False, **settings
    )
    packing = partial(pack, tokens_per_microbatch=1000)
    trainer = LocalTrainer(model, character_tokenizer("abc"), objective, made, pack=packing)
    first = trainer.step(Batch(updates=(tuple(rows),))).model_flops
    assert trainer.step(Batch(updates=(tuple(rows),))).model_flops == first, "a step counts its own passes alone"
    return first


def test_a_model_is_taken_apart_into_layers_and_head(folder: Path) -> None:
    assert size_of(load(folder)) == SIZE
    assert size_of(load(folder), has_head=False).head == 0


def test_the_window_and_the_experts_of_mixtral_are_counted() -> None:
    """Router and two of four experts of 3 x 16 x 24, and attention, in each of two layers."""
    config = MixtralConfig(
        vocab_size=8, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
    )  # fmt: skip
    size = size_of(AutoModelForCausalLM.from_config(config))
    assert size.windows == (8, 8)
    assert size.trained == 2 * (2 * 16 * (16 + 8) + 4 * 16 + 2 * 3 * 16 * 24)


def test_a_shared_prompt_is_computed_once(folder: Path) -> None:
    """Three rows of a prompt of 4 and 2 drawn tokens: 4 + 3 x 2 tokens, which see 1 + 2 + 3 + 4 and thrice 5 + 6."""
    rows = [row([3, 1, 4, 1], 2, index) for index in range(3)]
    (microbatch,) = pack(rows, 1000)
    shared = work_of(microbatch, shares=True, has_backward=True)
    assert sorted(shared.positions.tolist()) == [0, 1, 2, 3, 4, 4, 4, 5, 5, 5]
    assert len(work_of(microbatch, shares=False, has_backward=True).positions) == 18
    by_hand = 3 * (2 * INSIDE * 10 + 2 * SIZE.head * 6 + 4 * WIDTH * LAYERS * (10 + 3 * 11))
    assert flops_of(load(folder), rows) == by_hand


def test_rows_without_credit_have_a_forward_pass_alone(folder: Path) -> None:
    """One row of 5 tokens that is trained, and one of 3 that is not, in a microbatch of its own."""
    rows = [row([7, 7, 7], 2, 0), row([9, 8], 1, 1, advantage=0.0)]
    trained = 3 * (2 * INSIDE * 5 + 2 * SIZE.head * 2 + 4 * WIDTH * LAYERS * 15)
    only_read = 2 * INSIDE * 3 + 2 * SIZE.head * 1 + 4 * WIDTH * LAYERS * 6
    assert flops_of(load(folder), rows) == trained + only_read
    assert flops_of(load(folder), [rows[0], replace(rows[1], advantages=[0.0, 0.0, 1.0])]) == trained + 3 * only_read


def test_recomputing_activations_is_no_progress(folder: Path) -> None:
    rows = [row([3, 1, 4, 1], 2, index) for index in range(3)]
    assert flops_of(load(folder), rows, gradient_checkpointing=True) == flops_of(load(folder), rows)


def test_an_adapter_saves_the_gradients_of_the_weights(folder: Path) -> None:
    rows, rank = [row([3, 1, 4], 2, 0)], 2
    adapted = add_adapter(load(folder), AdapterSettings(rank=rank, alpha=4.0), folder)
    factors = LAYERS * rank * (2 * 2 * WIDTH + 2 * (WIDTH + WIDTH // 2) + 3 * (WIDTH + MLP))
    layers = 2 * (INSIDE + factors) * 5
    by_hand = 2 * layers + 2 * factors * 5 + 2 * 2 * SIZE.head * 2 + 3 * 4 * WIDTH * LAYERS * 15
    assert flops_of(adapted, rows) == by_hand


def test_a_proximal_policy_is_one_more_forward_pass(folder: Path) -> None:
    model, first, second = load(folder), row([3, 1, 4], 2, 0), row([5, 9], 3, 1)
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.0), temperature=1.0, total_steps=9)
    packing = partial(pack, tokens_per_microbatch=1000)
    trainer = LocalTrainer(model, character_tokenizer("abc"), PRESETS["grpo"], settings, pack=packing)
    one = trainer.step(Batch(updates=((first, second),))).model_flops
    two = trainer.step(Batch(updates=((first,), (second,)))).model_flops
    assert two == pytest.approx(one * 4 / 3)
