"""What a model's description says of how it can be shared out; test_preflight.py has every refusal in a dry run."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.errors import UserError
from temper.models.tiny import make_tiny_model
from temper.trainer.ranks.layout import TrainerLayout, require_layout


def test_a_model_of_which_every_trainer_has_a_copy_is_not_looked_at(tmp_path: Path) -> None:
    require_layout(tmp_path / "nowhere", TrainerLayout(trainers=4))


def test_experts_of_a_model_that_has_none_are_refused_and_its_parts_are_not(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path / "dense", layers=1, width=32, heads=2, kv_heads=2, mlp_width=64, context=32, alphabet="ab", seed=0
    )
    for layout in (
        TrainerLayout(trainers=3, parts=True),
        TrainerLayout(trainers=2, parts=True, tensor=2),
        TrainerLayout(trainers=4, context=2),
    ):
        require_layout(folder, layout)
    with pytest.raises(UserError, match=r"dense is a model without experts. Use cluster.experts = false"):
        require_layout(folder, TrainerLayout(trainers=2, parts=True, experts=True))
