"""A tiny model on disk, an order that opens it, and publications of other weights for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from temper.engine.local.engine import EngineSettings
from temper.engine.process.order import LocalOrder
from temper.models.load import load_model
from temper.models.tiny import make_tiny_model
from temper.trainer.weights import publish
from temper.types import Publication


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=512,
        alphabet="abcdefgh", seed=3,
    )  # fmt: skip


@pytest.fixture
def order(folder: Path) -> LocalOrder:
    settings = EngineSettings(
        seed=7, block_size=16, num_blocks=80, max_running=8, tokens_per_step=256, max_length=512, steps_per_sync=1
    )
    return LocalOrder(
        folder=str(folder), dtype="float32", device="cpu", numerics="exact", weights="model", settings=settings
    )


def publication(folder: Path, version: int) -> Publication:
    """Weights that differ from version to version, and not only by rounding."""
    model = load_model(folder, torch.float32, torch.device("cpu"), "exact")
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return publish(model, version)
