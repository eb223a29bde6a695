"""Files of a cut model that all ranks write at once: each its own rows, at the bytes where they lie in the file.

Owns: how a safetensors file is laid out before its numbers are known, and that all ranks are done or rank 0 says why
not. Refuses: gathering: rows of a tensor are one stretch of bytes, columns many, so what comes out is what one process
would write, and no rank needs memory for more than one of its own parts. That a part arrived the next rank proves: it
reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from temper.models.experts.stored import StoredEntry, stored_entries
from temper.trainer.adamw.files import batches_of
from temper.trainer.ranks.parts import Cut, WholeTensors

WEIGHTS, WEIGHTS_BYTES = "model{suffix}.safetensors", "50GB"
KINDS = {
    torch.float64: "F64", torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16",
    torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""In the order in which the library safetensors writes them: the widest first."""


class NotWritten(Exception):
    """Some rank could not write. Rank 0 raises what it said."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Of one file."""

    head: bytes
    starts: Mapping[str, int]
    """First byte of each tensor."""
    size: int


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
    """As safetensors.torch.save_file writes them, to the byte. Only shapes and types are looked at."""
    order = {dtype: place for place, dtype in enumerate(KINDS)}
    told: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name in sorted(tensors, key=lambda name: (order[tensors[name].dtype], name)):
        tensor = tensors[name]
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        told[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        starts[name] = start
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return FileLayout(head, {name: len(head) + start for name, start in starts.items()}, len(head) + end)


def write_weights(tensors: WholeTensors, folder: Path, family: str) -> None:
    """As transformers' save_pretrained names and splits them, with its index where there are several files."""
    entries = stored_entries(tensors.outlines(), family)
    outlines = {name: entry.outline for name, entry in entries.items()}
    plan = split_torch_state_dict_into_shards(outlines, filename_pattern=WEIGHTS, max_shard_size=WEIGHTS_BYTES)
    for file, names in plan.filename_to_tensors.items():
        _write_file(tensors, {name: entries[name] for name in names}, folder / file, {"format": "pt"})
    if plan.is_sharded and dist.get_rank() == 0:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_states(tensors: WholeTensors, folder: Path, stem: str) -> None:
    """What adamw/files.py writes of whole tensors."""
    for path, batch in batches_of(tensors.outlines(), folder, stem):
        _write_file(tensors, {name: StoredEntry(name, outline) for name, outline in batch.items()}, path)


def do_together(work: Callable[[], None]) -> None:
    """All ranks do it, each its own. NotWritten on all where one of them cannot; on rank 0 the error itself, as if it
    were its own: a disk that is full is told in one way, whoever finds it so."""
    problem: tuple[int, str] | None = None
    try:
        work()
    except OSError as error:
        problem = error.errno or 0, f"{error.strerror or error} (trainer rank {dist.get_rank()})"
    said: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, problem)
    if (first := next((each for each in said if each is not None), None)) is not None:
        raise OSError(*first) if dist.get_rank() == 0 else NotWritten(first[1])


def _write_file(
    tensors: WholeTensors, entries: Mapping[str, StoredEntry], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    layout = lay_out({name: entry.outline for name, entry in entries.items()}, metadata)
    rank, world, wholes = dist.get_rank(), dist.get_world_size(), tensors.outlines()
    digest = hashlib.sha256()

    def pieces(rank: int) -> Iterator[tuple[str, list[tuple[int, slice]]]]:
        """Tensor of the model; where bytes go in the file, and which of those that the rank holds."""
        for name, entry in entries.items():
            found, done = [], 0
            for start, end in held_stretches(wholes[entry.source], tensors.cut(entry.source, rank)):
                first, last = max(start, entry.start), min(end, entry.start + entry.outline.nbytes)
                if first < last:
                    of_own = slice(done + first - start, done + last - start)
                    found.append((layout.starts[name] + first - entry.start, of_own))
                done += end - start
            if found:
                yield entry.source, found

    def begin() -> None:
        if rank == 0:
            with path.open("wb") as file:
                file.write(layout.head)
                file.truncate(layout.size)

    def write_own() -> None:
        with path.open("r+b", buffering=0) as file:
            for source, found in pieces(rank):
                first = found[0][1].start
                data = _bytes_of(tensors.own(source), slice(first, found[-1][1].stop))
                for start, of_own in found:
                    digest.update(piece := data[of_own.start - first : of_own.stop - first])
                    _write_at(file.fileno(), piece, start)
            os.fsync(file.fileno())

    def read_neighbours() -> None:
        before, found = (rank - 1) % world, hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            for _, stretches in pieces(before):
                for start, part in stretches:
                    for piece in _read_at(file.fileno(), start, part.stop - part.start):
                        found.update(piece)
        if found.hexdigest() != digests[before]:
            raise OSError(0, f"{path} does not hold what rank {before} wrote: its file system loses writes of others")

    do_together(begin)
    do_together(write_own)
    digests = [""] * world
    dist.all_gather_object(digests, digest.hexdigest())
    do_together(read_neighbours)


def held_stretches(outline: Tensor, cut: Cut) -> Iterator[tuple[int, int]]:
    """First and last bytes, in a whole tensor, of what a rank holds of it: its rows are one stretch, its columns one of
    every row."""
    if cut.place >= cut.size:
        return
    length = outline.shape[cut.dim] if outline.dim() else 1
    start, end = cut.own(length)
    above = math.prod(outline.shape[: cut.dim])
    size = outline.nbytes // max(above * length, 1)
    for row in range(above):
        yield (row * length + start) * size, (row * length + end) * size


def _bytes_of(tensor: Tensor, part: slice) -> memoryview:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    assert part.stop <= len(data), "not cut as was thought"
    return data[part].cpu().numpy().data


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):  # the kernel takes at most 2 GiB at a time
        done += os.pwrite(descriptor, data[done:], start + done)


def _read_at(descriptor: int, start: int, size: int, piece: int = 16 << 20) -> Iterator[bytes]:
    while size > 0:
        data = os.pread(descriptor, min(size, piece), start)
        if not data:
            return  # shorter than what was written: other digests
        yield data
        start, size = start + len(data), size - len(data)
