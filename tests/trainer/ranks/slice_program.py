"""One rank of test_tensor.py, started by start_ranks.py: reads its slices of every model and writes them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from temper.models.save import saved_tensors
from temper.trainer.ranks.context import go_together
from temper.trainer.ranks.parts import WholeTensors, own_part
from temper.trainer.ranks.reading import load_cut
from temper.trainer.ranks.writing import write_states, write_weights
from temper.trainer.weights import whole_weights
from tests.trainer.ranks.test_tensor import FAMILIES


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    go_together(2, 100.0)
    held = {}
    for family in FAMILIES:
        model: Any = load_cut(folder / family, torch.float32, torch.device("cpu"), tensor=2)
        weights = whole_weights(model)
        (folder / f"{family}-written").mkdir(exist_ok=True)
        dist.barrier()
        write_weights(weights, folder / f"{family}-written", model.config.model_type)
        held[family] = sum(own_part(tensor).numel() for tensor in saved_tensors(model).values())
    moments = {f"m.{name}": tensor * 2 for name, tensor in weights._tensors.items()}
    likes = {f"m.{name}": tensor for name, tensor in weights._tensors.items()}
    write_states(WholeTensors(moments, likes), folder, "optimizer")
    torch.save(held, folder / f"{rank}.pt")
    dist.destroy_process_group()
