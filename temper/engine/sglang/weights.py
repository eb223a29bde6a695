"""Weights on their way into an SGLang server: written aside as a checkpoint, then proven to have arrived.

Owns: the folder of one publication, the update, reading weights back. Refuses: deciding who may draw meanwhile.
Written against SGLang 0.5.23: srt/managers/scheduler_components/weight_updater.py, srt/models/llama.py
(get_weights_by_name), srt/utils/weight_checker.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from temper.engine.manifest import MAX_NAMED, Manifest
from temper.engine.sglang.client import SglangClient
from temper.errors import BackendError, UserError
from temper.types import Publication

WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS_READ_BACK = 1
"""Rows of each tensor that are read back. A tensor that was not loaded differs in its first row already."""
READERS = 16


def weight_names(checkpoint: Path) -> set[str]:
    """Names of the tensors in a checkpoint's safetensors files; empty when it has none."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def write_checkpoint(publication: Publication, manifest: Manifest, *, like: Path, folder: Path) -> Path:
    """A Hugging Face directory with the published weights and everything else as in `like`. Appears at once or not."""
    from safetensors.torch import save_file

    _require_known_names(publication, like)
    final = folder / f"version-{publication.version}-{manifest.sha256[:12]}"
    aside = folder / f".writing-{final.name}"
    for old in (aside, final):
        shutil.rmtree(old, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_ENDINGS):
            shutil.copy2(file, aside / file.name)
    # Copies: tensors of a model may share storage, which the format does not allow.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in publication.tensors.items()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "manifest.json").write_text(manifest.to_json())
    os.replace(aside, final)
    return final


def _require_known_names(publication: Publication, like: Path) -> None:
    known, ours = weight_names(like), set(publication.tensors)
    config = json.loads((like / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        known, ours = known - {"lm_head.weight"}, ours - {"lm_head.weight"}
    if known and (differing := sorted(known ^ ours)):
        raise UserError(
            f"the model's tensors have other names than those in {like} ({', '.join(differing[:3])}), and SGLang reads "
            'by name: this model family cannot be published to SGLang. Use engine.kind = "local"'
        )


async def take_over(
    client: SglangClient,
    publication: Publication,
    folder: Path,
    *,
    changed: set[str] | None,
    seconds: float,
    update_seconds: float,
) -> None:
    """Makes a server without requests draw by the weights in `folder`, under its name. Raises BackendError when
    anything on the way is not as it should be; the server's weights are then unknown and it may be paused."""
    before = await read_before(client, publication, seconds=seconds)
    await client.post("/pause_generation", {"mode": "abort"}, seconds=seconds)
    body = {"model_path": str(folder.resolve()), "weight_version": folder.name, "flush_cache": True}
    answer = await client.post(
        "/update_weights_from_disk", {**body, "abort_all_requests": True}, seconds=update_seconds
    )
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        raise BackendError(f"SGLang at {client.address} did not acknowledge {folder.name}: {str(answer)[:300]}")
    await client.post("/flush_cache", {}, seconds=seconds)
    await prove_arrival(client, publication, before, changed=changed, seconds=seconds)
    await client.post("/continue_generation", {}, seconds=seconds)
    told = (await client.get("/model_info", seconds=seconds)).get("weight_version")
    if told != folder.name:
        raise BackendError(
            f"SGLang at {client.address} says that it serves {told!r}, after {folder.name!r} was published"
        )


@dataclass(frozen=True, slots=True)
class ServerReading:
    """What a server said about its weights before an update."""

    is_by_name: bool
    """Whether it hands out tensors by name, so that they can be compared with what was published."""
    checksums: Mapping[str, str]
    """The server's own checksums, by rank and its own names; read only when it hands out no tensors by name."""


async def read_before(client: SglangClient, publication: Publication, *, seconds: float) -> ServerReading:
    name = next(iter(publication.tensors))
    if await _rows(client, name, seconds) is not None:
        return ServerReading(True, {})
    return ServerReading(False, await _checksums(client, seconds))


async def prove_arrival(
    client: SglangClient, publication: Publication, before: ServerReading, *, changed: set[str] | None, seconds: float
) -> None:
    """Raises BackendError unless the server holds what was published.

    `changed` names the tensors that differ from the last publication, for servers that do not hand out tensors of this
    model: their checksums must differ for exactly those. None: the last publication is unknown.
    """
    if before.is_by_name:
        return await _compare_rows(client, publication, seconds)
    after = await _checksums(client, seconds)
    if changed is None:
        return None
    moved = {name.split("/", 1)[1] for name in after if after[name] != before.checksums.get(name)}
    # Fused tensors have names of the server's own; they count for the question whether anything moved at all.
    known = {name.split("/", 1)[1] for name in after} & publication.tensors.keys()
    if wrong := sorted((moved ^ changed) & known):
        raise BackendError(
            _partial(publication.version, wrong, "did not change as published, by the server's checksums")
        )
    if bool(moved) != bool(changed):
        raise BackendError(
            f"publication {publication.version} changes {len(changed)} tensors and the server's checksums {len(moved)}"
        )
    return None


async def _compare_rows(client: SglangClient, publication: Publication, seconds: float) -> None:
    limit = asyncio.Semaphore(READERS)

    async def read(name: str) -> Any:
        async with limit:
            return await _rows(client, name, seconds)

    names = list(publication.tensors)
    rows = dict(zip(names, await asyncio.gather(*(read(name) for name in names)), strict=True))
    # A server may keep weights in another dtype than the trainer's, but then all of them.
    wrong = min(
        (
            [name for name in names if not _is_same(publication.tensors[name], rows[name], dtype)]
            for dtype in SERVED_DTYPES
        ),
        key=len,
    )
    if wrong:
        raise BackendError(_partial(publication.version, wrong, "hold other numbers on the server"))


def _is_same(tensor: Tensor, rows: Any, dtype: torch.dtype) -> bool:
    if rows is None:
        return False
    wanted = tensor.detach()[:ROWS_READ_BACK].to("cpu").to(dtype).to(torch.float32)
    got = torch.tensor(rows, dtype=torch.float32)
    return wanted.shape == got.shape and bool(torch.equal(wanted, got))


def _partial(version: int, names: list[str], what: str) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"publication {version} arrived in part: {', '.join(names[:MAX_NAMED])}{more} {what}"


async def _rows(client: SglangClient, name: str, seconds: float) -> Any:
    """None: the server does not hand out this tensor; it answers 400 or null then."""
    try:
        body = {"name": name, "truncate_size": ROWS_READ_BACK}
        return await client.post("/get_weights_by_name", body, seconds=seconds)
    except BackendError as error:
        if "refused (400)" not in str(error):
            raise
        return None


async def _checksums(client: SglangClient, seconds: float) -> dict[str, str]:
    answer = await client.post("/weights_checker", {"action": "checksum"}, seconds=seconds)
    return {
        f"{place}/{name}": str(value)
        for place, rank in enumerate(answer.get("ranks") or [])
        for name, value in rank["checksums"].items()
    }
