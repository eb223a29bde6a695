"""One rank of test_writing.py, started by start_ranks.py: writes its rows of every model, well and badly."""

from __future__ import annotations

import datetime
import errno
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from temper.trainer.ranks import writing
from temper.trainer.ranks.parts import WholeTensors
from temper.trainer.ranks.reading import load_cut
from temper.trainer.ranks.writing import NotWritten, write_states, write_weights
from temper.trainer.weights import whole_weights
from tests.trainer.ranks.test_writing import FAMILIES, SPLIT


def outcome(work: Any) -> str:
    try:
        work()
    except (OSError, NotWritten) as error:
        return f"{type(error).__name__} {getattr(error, 'errno', '')} {error}"
    return "written"


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(str(folder / "store"), world), datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    for family in FAMILIES:
        model: Any = load_cut(folder / family, torch.float32, torch.device("cpu"))
        weights = whole_weights(model)
        writing.WEIGHTS_BYTES = "20KB" if family == SPLIT else "50GB"
        (folder / f"{family}-written").mkdir(exist_ok=True)
        dist.barrier()
        write_weights(weights, folder / f"{family}-written", model.config.model_type)
    moments = {f"m.{name}": tensor * 2 for name, tensor in weights._tensors.items()}
    likes = {f"m.{name}": tensor for name, tensor in weights._tensors.items()}
    write_states(WholeTensors(moments, likes), folder, "optimizer")
    # The last rank's disk is full; then its writes are lost on the way.
    write_at, is_last = writing._write_at, rank == world - 1

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reports = []
    for broken in (full, lambda *_: None):
        writing._write_at = broken if is_last else write_at  # type: ignore[attr-defined]
        reports.append(outcome(lambda: write_states(WholeTensors(moments, likes), folder, "broken")))
    (folder / f"{rank}.txt").write_text("\n".join(reports))
    dist.destroy_process_group()
