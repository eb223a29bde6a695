"""Tiny models and rows that the trainer's tests share."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.models.load import prepare
from temper.types import Sample

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied_llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL),
    "olmo2": lambda: Olmo2Config(**{key: value for key, value in SMALL.items() if key != "head_dim"}),
    "gemma3": lambda: Gemma3TextConfig(
        **SMALL, sliding_window=3, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    ),
}


@pytest.fixture(params=["llama", "qwen3", "gemma3", "olmo2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    def make(family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, is_plain: bool = False) -> Any:
        """`is_plain`: with transformers' own attention instead of Temper's."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa")
            for parameter in model.parameters():  # larger than transformers' 0.02: rows must matter to each other
                torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
        model = model.to(dtype)
        return model.eval() if is_plain else prepare(model)

    return make


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., list[Sample]]:
    def make(num_groups: int = 3, group_size: int = 3, seed: int = 0) -> list[Sample]:
        """Rows of 3 to 17 tokens with observations inside, one trajectory in two rows, weights of a token mean."""
        draw = random.Random(seed)
        rows = []
        for group in range(num_groups):
            for index in range(group_size):
                num_rows = 2 if (group, index) == (1, 1) else 1
                rows += [row(draw, f"g{group}", index) for _ in range(num_rows)]
        total = sum(r.num_actions for r in rows)
        return [with_weight(r, 1 / total) for r in rows]

    return make


def row(draw: random.Random, group_id: str, index: int) -> Sample:
    length = draw.randint(3, 17)
    mask = [0] + [int(draw.random() < 0.7) for _ in range(length - 2)] + [1]
    advantage = draw.uniform(-1, 1)
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=[draw.randrange(40) for _ in range(length)],
        loss_mask=mask,
        behavior_logprobs=[draw.uniform(-5, -2) * m for m in mask],
        versions=[m - 1 for m in mask],
        advantages=[advantage * m for m in mask],
        weights=[0.0] * length,
    )


def with_weight(sample: Sample, weight: float) -> Sample:
    return replace(sample, weights=[weight * m for m in sample.loss_mask])


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., None]:
    def run(program: Path, folder: Path, ranks: Sequence[tuple[int, int]] = ((0, 2), (1, 2))) -> None:
        """Runs `python PROGRAM RANK WORLD FOLDER` for all pairs at once; the first to fail shows its errors."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(program.parents[2])}
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), str(rank), str(world), str(folder)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, world in ranks
        ]
        try:
            for process in processes:
                _, errors = process.communicate(timeout=240)
                assert process.returncode == 0, errors
        finally:
            for process in processes:
                process.kill()

    return run
