"""Another model under the name of the one that is trained is seen before it draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.engine.process.description import describe_model, require_same_model
from temper.engine.process.order import LocalOrder, open_engine
from temper.errors import UserError
from temper.models.load import load_model
from temper.models.lora.wrapping import AdapterSettings
from temper.models.tiny import make_tiny_model

SMALL: dict[str, Any] = {
    "layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 32, "alphabet": "abc", "seed": 0
}  # fmt: skip


def test_a_model_of_another_shape_or_with_other_tokens_is_named(tmp_path: Path) -> None:
    trained, same = (make_tiny_model(tmp_path / name, **SMALL | {"seed": n}) for n, name in enumerate("ab"))
    wider = make_tiny_model(tmp_path / "wider", **SMALL | {"width": 32})
    spoken = make_tiny_model(tmp_path / "spoken", **SMALL | {"alphabet": "abd"})
    own = described(trained)
    require_same_model(own, described(same), same)  # weights are sent; their values do not matter
    with pytest.raises(UserError, match=rf"{wider} is another model .* hidden_size is 32 and not 16"):
        require_same_model(own, described(wider), wider)
    with pytest.raises(UserError, match="tokens is"):
        require_same_model(own, described(spoken), spoken)


def described(folder: Path) -> dict[str, Any]:
    return describe_model(load_model(folder, torch.float32, torch.device("cpu")).config, folder)


def test_an_order_is_carried_out_with_the_copy_of_the_machine(order: LocalOrder, tmp_path: Path) -> None:
    assert order.found_here(str(tmp_path)).folder == str(tmp_path)
    gone = replace(order, folder=str(tmp_path / "gone"))
    with pytest.raises(UserError, match=r"gone is not there on .*temper sampler MODEL"):
        gone.found_here("")


def test_an_order_for_another_model_is_refused_when_it_is_opened(order: LocalOrder, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", **SMALL)
    told = replace(order, description=described(Path(order.folder)))
    open_engine(told)
    with pytest.raises(UserError, match=f"{other} is another model"):
        open_engine(told.found_here(str(other)))


def test_a_base_in_four_bits_must_be_the_trainers_own(order: LocalOrder, folder: Path) -> None:
    """It is not sent, so another copy could hold other weights."""
    adapter = AdapterSettings(rank=2, alpha=4.0, targets=("q_proj",), seed=0)
    with pytest.raises(UserError, match="without MODEL"):
        replace(order, four_bit_adapter=adapter).found_here(str(folder))
