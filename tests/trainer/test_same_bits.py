"""Two equal trainings on a GPU end with equal weights, to the bit, for every policy gradient.

Needs a GPU, and two minutes of it; also a program: `python tests/trainer/test_same_bits.py` prints what differs.
Adding trajectories up by index_add makes rloo, gspo and sequence_mis differ, attention without an order gmpo.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from temper.batching.pack import pack
from temper.models.load import prepare
from temper.models.tiny import character_tokenizer
from temper.objectives import POLICY_GRADIENTS, Objective, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Sample

VOCABULARY = 64
OPTIMIZER = OptimizerSettings(learning_rate=1e-3, max_grad_norm=1e6)
CHANGES: dict[str, Any] = {
    "vapo": {"critic": {"pretraining_steps": 0}},
    "clip_cov": {"corrections": [{"name": "clip_cov", "share": 0.1, "low": 0.0}]},
}
NAMES = [name for name, preset in POLICY_GRADIENTS.items() if preset.step is None and "router" not in preset.needs]
"""trpo is for small models in float32, and rspo needs a mixture of experts, whose sums are not ours."""
PAIRS = ["dpo", "simpo", "nash_md"]
SHAPES = [(torch.float32, 40), (torch.bfloat16, 40), (torch.bfloat16, 400), (torch.float32, 400)]
"""Precision, and longest answer: attention of more than 128 tokens adds up its gradients from several blocks."""


def make_model(dtype: torch.dtype) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return prepare(LlamaForCausalLM(config).to(dtype).cuda())


def make_rows(longest: int, *, are_pairs: bool) -> list[Sample]:
    """Groups that share a prompt, one row of two trajectories; every column that an objective may read."""
    draw, rows = random.Random(1), []
    for group in range(4):
        prompt = [draw.randrange(VOCABULARY) for _ in range(30)]
        rows += [row_of(draw, prompt, f"g{group}", index, longest) for index in range(2 if are_pairs else 4)]
    return rows


def row_of(draw: random.Random, prompt: list[int], group: str, index: int, longest: int) -> Sample:
    drawn = [draw.randrange(VOCABULARY) for _ in range(draw.randint(longest // 2, longest))]
    mask = [0] * len(prompt) + [int(place % 7 != 3) for place in range(len(drawn))]
    tops = [draw.sample(range(VOCABULARY), 20) if is_drawn else [] for is_drawn in mask]
    advantage = draw.uniform(-1, 1)

    def near(middle: float, width: float) -> list[float]:
        return [draw.uniform(middle - width, middle + width) * is_drawn for is_drawn in mask]

    return Sample(
        group_id=group,
        index=index,
        token_ids=[*prompt, *drawn],
        loss_mask=mask,
        behavior_logprobs=near(-4.2, 0.5),
        versions=[is_drawn - 1 for is_drawn in mask],
        advantages=[advantage * is_drawn for is_drawn in mask],
        weights=[is_drawn / 1000 for is_drawn in mask],
        reward=float(index == 0),
        reference_logprobs=near(-4.2, 0.5),
        teacher_logprobs=near(-4.2, 0.5),
        values=near(0.3, 0.2),
        targets=near(0.5, 0.5),
        top_ids=tops,
        top_logprobs=[sorted((draw.uniform(-5, -3) for _ in top), reverse=True) for top in tops],
    )


def trained(model: Any, objective: Objective, rows: list[Sample], together: Any) -> dict[str, Tensor]:
    """Weights after a step of two updates and one of a single update."""
    model = deepcopy(model)
    critic = None if objective.critic is None else Critic(deepcopy(model), OPTIMIZER, total_steps=10)
    trainer = LocalTrainer(
        model,
        character_tokenizer("abc"),
        objective,
        TrainerSettings(optimizer=OPTIMIZER, temperature=0.9, total_steps=10, is_ordered=True),
        pack=partial(pack, tokens_per_microbatch=1500, together=together),
        others=AuxiliaryModels(critic=critic),
    )
    half = len(rows) // 2
    for updates in ((tuple(rows[:half]), tuple(rows[half:])), (tuple(rows),)):
        trainer.step(Batch(updates=updates))
    return {name: tensor.clone() for name, tensor in trainer.publish().tensors.items()}


def differing(dtype: torch.dtype, longest: int, repeats: int = 1) -> dict[str, int]:
    """By objective that differs: how many tensors are not equal to the bit in some repetition."""
    model, found = make_model(dtype), {}
    for name in (*NAMES, *PAIRS):
        is_pair = name in PAIRS
        objective = resolve(name, CHANGES.get(name))
        rows = make_rows(longest, are_pairs=is_pair)
        if is_pair:
            rows = [replace(row, top_ids=None, top_logprobs=None) for row in rows]
        together = "group" if is_pair else "trajectory"
        first = trained(model, objective, rows, together)
        for _ in range(repeats):
            again = trained(model, objective, rows, together)
            if count := sum(not torch.equal(tensor, again[key]) for key, tensor in first.items()):
                found[name] = max(count, found.get(name, 0))
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU sums have an order; this asks a GPU")
@pytest.mark.parametrize(("dtype", "longest"), SHAPES)
def test_equal_trainings_end_with_equal_bits(dtype: torch.dtype, longest: int) -> None:
    assert differing(dtype, longest) == {}


if __name__ == "__main__":
    torch.set_num_threads(2)  # small tensors: more threads wait for each other
    for shape in SHAPES:
        print(*shape, "differ:", differing(*shape) or "none", flush=True)
