"""The average of checkpoints: one model whose every parameter is the mean of theirs.

Owns: which checkpoints fit together, sums in float64, an ordinary Hugging Face directory with a record of where it came
from. Refuses: loading a model; tensors are read one after the other, so memory stays small.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from temper.errors import UserError
from temper.models.load import find_checkpoint, load_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROVENANCE = "provenance.json"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
NOT_COPIED = (INDEX, PROVENANCE, "state.json", "manifest.json", "kept.jsonl")
FREE_KEYS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
"""Keys of config.json that may differ between checkpoints of one model."""


def average_checkpoints(folders: Sequence[Path], out: Path, *, facts: Mapping[str, Any] | None = None) -> Path:
    """Writes the mean of the checkpoints, each with the same weight; one that is given twice counts twice.

    Sums are float64 and rounded once, to the checkpoints' own type (float32 when theirs differ). `facts` go into the
    record beside the sources. `out` must not exist yet; a failure leaves nothing.
    """
    if not folders:
        raise UserError("there is no checkpoint to average. Give at least one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty. Give a new directory")
    sources = list(dict.fromkeys(find_checkpoint(str(folder)) for folder in folders))
    counts = Counter(find_checkpoint(str(folder)) for folder in folders)
    shares = {source: counts[source] / len(folders) for source in sources}
    places = {source: _places(source) for source in sources}
    _require_alike(sources, places)
    unfinished = out.with_name(f".tmp-{out.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            readers = {source: _reader(stack, source, places[source]) for source in sources}
            dtypes = _write_weights(readers, places[sources[0]], {s: counts[s] for s in sources}, unfinished)
        _write_rest(sources[0], unfinished, dtypes)
        _write_provenance(shares, places, unfinished, facts or {})
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return out


def _places(folder: Path) -> dict[str, str]:
    """Which file of the directory holds each tensor."""
    if (folder / INDEX).is_file():
        return dict(json.loads((folder / INDEX).read_text())["weight_map"])
    if not (folder / WEIGHTS).is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        advice = 'It is an adapter: merge it first, with "temper export"' if is_adapter else "Write it as safetensors"
        raise UserError(f"{folder} has no {WEIGHTS}, so its parameters cannot be averaged. {advice}")
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read: {error}") from error


def _require_alike(sources: Sequence[Path], places: Mapping[Path, Mapping[str, str]]) -> None:
    first = sources[0]
    config, tokenizer = _config(first), _tokenizer_of(first)
    for other in sources[1:]:
        theirs = _config(other)
        keys = sorted(key for key in {*config, *theirs} if config.get(key) != theirs.get(key))
        if keys:
            listed = ", ".join(f"{key} {config.get(key)!r} and {theirs.get(key)!r}" for key in keys[:3])
            raise UserError(f"{first} and {other} are different models and have no average: {listed:.300}")
        if _tokenizer_of(other) != tokenizer:
            raise UserError(
                f"{first} and {other} have different tokenizers or chat templates: a token of one is not that of the "
                f"other, and the average would read neither. Average checkpoints of one model"
            )
        if missing := sorted(places[first].keys() ^ places[other].keys()):
            raise UserError(f"{first} and {other} have different tensors: {len(missing)} differ, e.g. {missing[0]}")


def _config(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in table.items() if key not in FREE_KEYS}


def _tokenizer_of(folder: Path) -> tuple[dict[str, int], int | None, str]:
    tokenizer = load_tokenizer(folder)
    return tokenizer.get_vocab(), tokenizer.eos_token_id, str(tokenizer.chat_template)


Reader = Callable[[str], Tensor]


def _reader(stack: ExitStack, folder: Path, places: Mapping[str, str]) -> Reader:
    files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in set(places.values())}
    return lambda name: files[places[name]].get_tensor(name)


def _write_weights(
    readers: Mapping[Path, Reader], layout: Mapping[str, str], counts: Mapping[Path, int], out: Path
) -> set[torch.dtype]:
    """Writes the means into files named as in the first checkpoint. Returns the types written."""
    sizes: dict[str, int] = {}
    written: set[torch.dtype] = set()
    for file in sorted(set(layout.values())):
        tensors = {name: _mean(name, readers, counts) for name in sorted(layout) if layout[name] == file}
        sizes |= {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        written |= {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        save_file(tensors, out / file, metadata={"format": "pt"})
    if set(layout.values()) != {WEIGHTS}:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(layout.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2))
    return written


def _mean(name: str, readers: Mapping[Path, Reader], counts: Mapping[Path, int]) -> Tensor:
    """The mean over all checkpoints, summed in float64: in bfloat16 the third summand would already be rounded."""
    tensors = {source: read(name) for source, read in readers.items()}
    first_source, first = next(iter(tensors.items()))
    for source, tensor in tensors.items():
        if tensor.shape != first.shape:
            raise UserError(
                f"{name} has shape {list(first.shape)} in {first_source} and {list(tensor.shape)} in {source}: "
                f"these are different models"
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise UserError(f"{name} of {source} has values that are not finite. Leave this checkpoint out")
        if not tensor.is_floating_point() and not torch.equal(tensor, first):
            raise UserError(f"{name} is not a number with decimals and differs between {first_source} and {source}")
    if not first.is_floating_point() or len(tensors) == 1:
        return first.clone()
    dtypes = {tensor.dtype for tensor in tensors.values()}
    total = torch.zeros(first.shape, dtype=torch.float64)
    for source, tensor in tensors.items():
        total += tensor.to(torch.float64) * counts[source]
    return (total / sum(counts.values())).to(dtypes.pop() if len(dtypes) == 1 else torch.float32)


def _write_rest(source: Path, out: Path, dtypes: set[torch.dtype]) -> None:
    """Configuration, tokenizer and chat template, as they are in the first checkpoint."""
    for file in _files(source):
        shutil.copy2(file, out / file.name)
    config = json.loads((out / "config.json").read_text())
    dtype = str(max(dtypes, key=lambda each: each.itemsize)).removeprefix("torch.")
    if config.get("dtype", config.get("torch_dtype")) != dtype:
        config.pop("torch_dtype", None)
        (out / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))


def _files(source: Path) -> Iterator[Path]:
    for pattern in COPIED:
        yield from (file for file in sorted(source.glob(pattern)) if file.name not in NOT_COPIED)


def _write_provenance(
    shares: Mapping[Path, float], places: Mapping[Path, Mapping[str, str]], out: Path, facts: Mapping[str, Any]
) -> None:
    sources = [
        {
            "path": str(source),
            "share": share,
            "sha256": {name: _sha256(source / name) for name in sorted(set(places[source].values()))},
        }
        for source, share in shares.items()
    ]
    record = {"made_by": "equal-weight average, sums in float64", "sources": sources, **facts}
    (out / PROVENANCE).write_text(json.dumps(record, indent=1, allow_nan=False))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
