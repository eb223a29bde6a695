"""Shared by all tests: where the optional data files are, and a recipe small enough to train in seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton, which transformers does

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tiny_recipe() -> dict[str, Any]:
    """Supervised and RL on a model of 30 thousand parameters: everything a run does, a second or two of work."""
    return {
        "name": "tiny",
        "model": {"new": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32,
                          "alphabet": "abcdefghijklmnopqrstuvwxyz"}},
        "train": [{"generator": "spell_backward", "seed": 1, "options": {"min_letters": 1, "max_letters": 2}}],
        "heldout": {"generator": "spell_backward", "seed": 2, "size": 8,
                    "options": {"min_letters": 2, "max_letters": 2}},
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 4},
        "checkpoint": {"every": 2},
        "stage": [
            {"kind": "sft", "steps": 6, "optim": {"learning_rate": 3e-3}, "trainer": {"examples_per_step": 8}},
            {"kind": "rl", "steps": 8, "optim": {"learning_rate": 1e-3},
             "rollout": {"groups_per_step": 4, "group_size": 4}, "evaluation": {"every": 3}},
        ],
    }  # fmt: skip
