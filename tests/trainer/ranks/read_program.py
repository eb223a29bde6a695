"""One rank of test_reading.py, started by start_ranks.py: reads its part of every model, and tells what all have."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from temper.models import load as loading
from temper.models.save import saved_tensors
from temper.trainer.passes.forward import score_drawn
from temper.trainer.ranks.parts import own_part, within
from temper.trainer.ranks.reading import load_cut
from temper.trainer.weights import whole_weights
from tests.trainer.ranks.test_reading import DTYPE, FAMILIES, STAYING, WHOLE, microbatch


def refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("the model was read whole")


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    read_pretrained = loading.read_pretrained
    reports = {}
    for family in FAMILIES:
        loading.read_pretrained = read_pretrained if family in WHOLE else refuse  # type: ignore[attr-defined]
        model: Any = load_cut(folder / family, DTYPE, torch.device("cpu"), experts=family in STAYING)
        held = sum(own_part(tensor).numel() for tensor in saved_tensors(model).values())
        with torch.no_grad():
            said = within(model, lambda model=model: score_drawn(model, microbatch(), 1.0)).logprobs
        reports[family] = {
            "weights": dict(whole_weights(model)),
            "held": held,
            "said": said,
            "end": model.generation_config.eos_token_id,
        }
    torch.save(reports, folder / f"{rank}.pt")
    dist.destroy_process_group()
