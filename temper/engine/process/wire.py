"""Frames between a sampler process and whoever asks it: JSON, and columns of numbers as the bytes they are.

Owns: how requests, completions and errors look on the way. Refuses: pickles; neither side runs what the other wrote.
Floats never become text, so that a log-probability arrives with every bit. Importing it does not import torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.errors import BackendError, ContextFull, OutOfMemory, TaskError, TemperError, UserError
from temper.types import Column, Completion, Finish, Ragged, Request, SamplingParams

HEAD = struct.Struct("<IQ")
"""Bytes of JSON, bytes of arrays."""
MOST_BYTES = 1 << 34
"""Of one frame. Weights do not travel in frames; more than this is a broken head."""
COLUMNS = ("token_ids", "logprobs", "versions", "entropies")
RAGGED = ("top_ids", "top_logprobs", "keep_ids", "routes")
KINDS: dict[str, type[TemperError]] = {
    kind.__name__: kind for kind in (UserError, TaskError, ContextFull, BackendError)
}


@dataclass(slots=True)
class Frame:
    """One message. `fields` name arrays by their place."""

    verb: str
    call: int = 0
    """Number of the question that this is, or answers."""
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: list[NDArray[Any]] = field(default_factory=list)

    def put(self, array: NDArray[Any]) -> int:
        """Takes an array along; returns its place."""
        self.arrays.append(np.ascontiguousarray(array))
        return len(self.arrays) - 1


def to_bytes(frame: Frame) -> bytes:
    listed = [[array.dtype.str, array.size] for array in frame.arrays]
    head = json.dumps({"verb": frame.verb, "call": frame.call, "fields": frame.fields, "arrays": listed}).encode()
    body = b"".join(array.tobytes() for array in frame.arrays)
    return HEAD.pack(len(head), len(body)) + head + body


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None when the other side has hung up.

    Waits for: the other side. Unblocked by: its death, which closes the socket; over a network also by silence of the
    other machine, of which the kernel tells as an OSError (cluster/remote.py).
    """
    try:
        sizes = HEAD.unpack(await reader.readexactly(HEAD.size))
        if max(sizes) > MOST_BYTES:
            raise BackendError(f"a frame announces {max(sizes)} bytes: the stream is out of step")
        head, body = await reader.readexactly(sizes[0]), await reader.readexactly(sizes[1])
    except (asyncio.IncompleteReadError, OSError):
        return None
    return from_bytes(head, body)


def from_bytes(head: bytes, body: bytes) -> Frame:
    told, arrays, start = json.loads(head), [], 0
    for kind, count in told["arrays"]:
        arrays.append(np.frombuffer(body, dtype=np.dtype(kind), count=count, offset=start))
        start += arrays[-1].nbytes
    return Frame(told["verb"], told["call"], told["fields"], arrays)


def request_frame(asked: Sequence[tuple[int, Request]]) -> Frame:
    """Requests that are to be admitted together, each with its number."""
    frame = Frame("generate")
    frame.fields["requests"] = [
        {
            "call": call,
            "id": request.id,
            "prompt": frame.put(np.asarray(request.prompt_ids, dtype=np.int64)),
            "params": dataclasses.asdict(request.params),
        }
        for call, request in asked
    ]
    return frame


def requests_of(frame: Frame) -> list[tuple[int, Request]]:
    return [
        (
            told["call"],
            Request(
                id=told["id"],
                prompt_ids=tuple(frame.arrays[told["prompt"]].tolist()),
                params=params_of(told["params"]),
            ),
        )
        for told in frame.fields["requests"]
    ]


def params_of(told: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**{**told, "stop_ids": tuple(told["stop_ids"]), "stop": tuple(told["stop"])})


def completion_frame(call: int, completion: Completion, verb: str = "completion") -> Frame:
    frame = Frame(verb, call)
    frame.fields |= {
        "prompt": frame.put(np.asarray(completion.prompt_ids, dtype=np.int64)),
        "finish": completion.finish.value,
        "params": None if completion.params is None else dataclasses.asdict(completion.params),
    }
    for name in COLUMNS:
        if isinstance(column := getattr(completion, name), Column):
            frame.fields[name] = frame.put(column.array)
    for name in RAGGED:
        if isinstance(lists := getattr(completion, name), Ragged):
            frame.fields[name] = [frame.put(lists.flat), frame.put(lists.counts)]
    return frame


def completion_of(frame: Frame) -> Completion:
    told, arrays = frame.fields, frame.arrays
    columns: dict[str, Any] = {name: Column(arrays[told[name]]) for name in COLUMNS if name in told}
    for name in RAGGED:
        if name in told:
            values, counts = told[name]
            columns[name] = Ragged.of_counts(arrays[values], arrays[counts])
    return Completion(
        prompt_ids=tuple(arrays[told["prompt"]].tolist()),
        finish=Finish(told["finish"]),
        params=None if told["params"] is None else params_of(told["params"]),
        **columns,
    )


def error_frame(call: int, error: BaseException) -> Frame:
    """What one of Temper's own errors says. Any other is a broken engine."""
    if isinstance(error, OutOfMemory):
        return Frame("error", call, {"kind": "OutOfMemory", "phase": error.phase, "text": str(error)})
    kind = next((name for name, known in KINDS.items() if type(error) is known), "BackendError")
    text = str(error) if isinstance(error, TemperError) else f"the sampler failed: {error!r}"
    return Frame("error", call, {"kind": kind, "text": text})


def error_of(frame: Frame) -> TemperError:
    text = str(frame.fields["text"])
    if frame.fields["kind"] == "OutOfMemory":
        phase = str(frame.fields["phase"])
        return OutOfMemory(phase, text.removeprefix(str(OutOfMemory(phase, ""))))
    return KINDS[frame.fields["kind"]](text)
