"""Ranks that write their own rows leave the files that one process writes, to the byte."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from temper.models.experts.stored import stored_entries
from temper.models.save import saved_tensors
from temper.trainer.ranks.parts import Cut
from temper.trainer.ranks.writing import held_stretches, lay_out
from tests.fakes.models import make_family_model

PROGRAM = Path(__file__).with_name("write_program.py")
SPLIT = "qwen2"
FAMILIES = (SPLIT, "qwen3_moe", "mixtral", "tied_llama")
"""One in several files, two whose files hold every expert by itself, one whose head is its embedding."""


def test_a_file_is_laid_out_as_the_library_does_it(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.ones(3, dtype=torch.bfloat16),
        "z é": torch.zeros(2, dtype=torch.int64),
        "c": torch.ones(1, dtype=torch.float16),
        "scalar": torch.tensor(2.0),
        "empty": torch.ones(0, 4),
        "flags": torch.ones(5, dtype=torch.uint8),
    }
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, tmp_path / "file", metadata=metadata)
        written, layout = (tmp_path / "file").read_bytes(), lay_out(tensors, metadata)
        assert written.startswith(layout.head)
        assert len(written) == layout.size
        start = layout.starts["b"]
        assert written[start : start + 24] == tensors["b"].numpy().tobytes()


@pytest.mark.parametrize(("rows", "world"), [(5, 2), (8, 4), (2, 3), (0, 2)])
def test_ranks_hold_every_byte_once(rows: int, world: int) -> None:
    outline, covered = torch.empty(rows, 3, device="meta"), []
    for rank in range(world):
        covered += [byte for stretch in held_stretches(outline, Cut(0, rank, world)) for byte in range(*stretch)]
    assert covered == list(range(rows * 12))
    assert list(held_stretches(outline, Cut(0, 1, 1))) == [], "what is not cut is the first rank's"


@pytest.mark.parametrize("shape", [(3, 8), (2, 4, 5), (1, 4)])
def test_ranks_hold_every_column_once(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).reshape(shape)
    for rank in range(4):
        held = [byte for stretch in held_stretches(numbers, Cut(1, rank, 4)) for byte in range(*stretch)]
        assert held == numbers.chunk(4, 1)[rank].flatten().tolist()


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3_moe", "mixtral", "tied_llama"])
def test_tensors_are_named_and_shaped_as_the_family_stores_them(family: str, tmp_path: Path) -> None:
    model = make_family_model(family).float()
    model.config._attn_implementation = None
    model.save_pretrained(tmp_path)
    stored, own = load_file(tmp_path / "model.safetensors"), saved_tensors(model)
    entries = stored_entries(own, model.config.model_type)
    assert entries.keys() == stored.keys()
    for name, entry in entries.items():
        data = own[entry.source].detach().numpy().tobytes()[entry.start :][: entry.outline.nbytes]
        assert data == stored[name].numpy().tobytes(), name
        assert entry.outline.shape == stored[name].shape


@pytest.mark.heavy
def test_three_ranks_write_what_one_process_writes_and_say_when_they_cannot(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    for family in FAMILIES:
        model = make_family_model(family).float()
        model.config._attn_implementation = None
        model.save_pretrained(tmp_path / family, max_shard_size="20KB" if family == SPLIT else "50GB")
    run_ranks(PROGRAM, tmp_path, [(rank, 3) for rank in range(3)])
    for family in FAMILIES:
        expected = {path.name: path.read_bytes() for path in (tmp_path / family).glob("*.safetensors")}
        written = {path.name: path.read_bytes() for path in (tmp_path / f"{family}-written").glob("*.safetensors")}
        assert written == expected
    index = "model.safetensors.index.json"
    ours, theirs = (json.loads((tmp_path / name / index).read_text()) for name in (f"{SPLIT}-written", SPLIT))
    assert ours["weight_map"] == theirs["weight_map"]
    assert len({*ours["weight_map"].values()}) > 1
    moments, weights = (
        load_file(tmp_path / "optimizer.safetensors"),
        load_file(tmp_path / "tied_llama/model.safetensors"),
    )
    assert moments.keys() == {f"m.{name}" for name in weights}
    assert all(torch.equal(moments[f"m.{name}"], 2 * weights[name]) for name in weights)
    first, *others = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(3)]
    assert first[0].startswith(f"OSError {errno.ENOSPC}")
    assert "No space left on device (trainer rank 2)" in first[0]
    assert "does not hold what rank 2 wrote" in first[1]
    assert all(line.startswith("NotWritten") for other in others for line in other)
