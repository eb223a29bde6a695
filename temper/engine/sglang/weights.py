"""Weights on their way into an SGLang server, and proven to have arrived.

Owns: the update, reading weights back. Refuses: writing them (checkpoints.py), deciding who may draw meanwhile.
Written against SGLang 0.5.23: srt/managers/scheduler_components/weight_updater.py, srt/models/llama.py
(get_weights_by_name), srt/utils/weight_checker.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from temper.engine.manifest import MAX_NAMED
from temper.engine.sglang.checkpoints import ROWS_READ_BACK, PublishedCheckpoint
from temper.engine.sglang.client import SglangClient
from temper.errors import BackendError

SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
READERS = 16


async def take_over(
    client: SglangClient,
    published: PublishedCheckpoint,
    *,
    changed: set[str] | None,
    seconds: float,
    update_seconds: float,
) -> None:
    """Makes a server without requests draw by the published weights, under the name of their folder. Raises
    BackendError when anything on the way is not as it should be; the server's weights are then unknown and it may be
    paused."""
    before, folder = await read_before(client, published, seconds=seconds), published.folder
    await client.post("/pause_generation", {"mode": "abort"}, seconds=seconds)
    body = {"model_path": str(folder.resolve()), "weight_version": folder.name, "flush_cache": True}
    answer = await client.post(
        "/update_weights_from_disk", {**body, "abort_all_requests": True}, seconds=update_seconds
    )
    if not isinstance(answer, Mapping) or answer.get("success") is not True:
        raise BackendError(f"SGLang at {client.address} did not acknowledge {folder.name}: {str(answer)[:300]}")
    await client.post("/flush_cache", {}, seconds=seconds)
    await prove_arrival(client, published, before, changed=changed, seconds=seconds)
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


async def read_before(client: SglangClient, published: PublishedCheckpoint, *, seconds: float) -> ServerReading:
    if await tells_rows(client, published, seconds=seconds):
        return ServerReading(True, {})
    return ServerReading(False, await _checksums(client, seconds))


async def prove_arrival(
    client: SglangClient,
    published: PublishedCheckpoint,
    before: ServerReading,
    *,
    changed: set[str] | None,
    seconds: float,
) -> None:
    """Raises BackendError unless the server holds what was published.

    `changed` names the tensors that differ from the last publication, for servers that do not hand out tensors of this
    model: their checksums must differ for exactly those. None: the last publication is unknown.
    """
    if before.is_by_name:
        if wrong := await differing_rows(client, published, seconds=seconds):
            raise BackendError(_partial(published.version, wrong, "hold other numbers on the server"))
        return None
    after = await _checksums(client, seconds)
    if changed is None:
        return None
    moved = {name.split("/", 1)[1] for name in after if after[name] != before.checksums.get(name)}
    # Fused tensors have names of the server's own; they count for the question whether anything moved at all.
    known = {name.split("/", 1)[1] for name in after} & published.rows.keys()
    if wrong := sorted((moved ^ changed) & known):
        raise BackendError(_partial(published.version, wrong, "did not change as published, by the server's checksums"))
    if bool(moved) != bool(changed):
        raise BackendError(
            f"publication {published.version} changes {len(changed)} tensors and the server's checksums {len(moved)}"
        )
    return None


async def tells_rows(client: SglangClient, published: PublishedCheckpoint, *, seconds: float) -> bool:
    """Whether it hands out tensors by name."""
    return await _rows(client, next(iter(published.rows)), seconds) is not None


async def differing_rows(client: SglangClient, published: PublishedCheckpoint, *, seconds: float) -> list[str]:
    """Names of tensors whose first rows are others on the server than were published."""
    limit = asyncio.Semaphore(READERS)

    async def read(name: str) -> Any:
        async with limit:
            return await _rows(client, name, seconds)

    names = list(published.rows)
    rows = dict(zip(names, await asyncio.gather(*(read(name) for name in names)), strict=True))
    # A server may keep weights in another dtype than the trainer's, but then all of them.
    return min(
        ([name for name in names if not _is_same(published.rows[name], rows[name], dtype)] for dtype in SERVED_DTYPES),
        key=len,
    )


def _is_same(tensor: Tensor, rows: Any, dtype: torch.dtype) -> bool:
    if rows is None:
        return False
    wanted = tensor.to(dtype).to(torch.float32)
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
