"""Models are read one at a time: transformers changes functions of all models while it reads one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from temper.errors import UserError
from temper.models.load import load_model
from tests.fakes.models import make_family_model

CPU = torch.device("cpu")


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    make_family_model("tied_llama", torch.float32, is_plain=True).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def test_threads_that_load_at_once_leave_tying_as_it_was(tied: Path) -> None:
    tie = PreTrainedModel.tie_weights
    try:
        with ThreadPoolExecutor(8) as threads:
            loaded: list[Any] = list(threads.map(lambda _: load_model(tied, torch.float32, CPU), range(32)))
        assert PreTrainedModel.tie_weights is tie
    finally:
        PreTrainedModel.tie_weights = tie  # else a failure here would be one of every test after it
    for model in loaded:
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_that_lacks_weights_is_refused_by_name(tied: Path) -> None:
    file = tied / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights model\.layers\.0\.mlp\.up_proj\.weight \(1 in all\)"):
        load_model(tied, torch.float32, CPU)
