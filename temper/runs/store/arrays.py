"""Token arrays of run.db as bytes and back. Imports nothing heavy: the dashboard reads them too.

Owns: the type of every array and how it is compressed. Bytes of equal rank lie together (all lowest bytes, then all
second ones ...), because high bytes of ids and exponents of floats hardly change; then deflate, which finds their runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ARRAY_TYPES = {
    "token_ids": "<i4",
    "loss_mask": "u1",
    "behavior_logprobs": "<f4",
    "versions": "<i4",
    "policy_logprobs": "<f4",
    "advantages": "<f4",
    "weights": "<f4",
    "entropies": "<f4",
}
RAW, PLANES = "raw", "planes"
"""What a row's `codec` says: as older layouts hold arrays, and as above."""


def pack_array(values: NDArray[Any], name: str) -> bytes:
    """The array of this name as PLANES."""
    array = np.ascontiguousarray(values, dtype=ARRAY_TYPES[name])
    planes = array.view(np.uint8).reshape(-1, array.itemsize).T.tobytes()
    # Runs only: what longer matches would save of log-probabilities is nothing, and takes twice the time.
    deflate = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return deflate.compress(planes) + deflate.flush()


def pack_loads(loads: Sequence[Sequence[int]]) -> bytes:
    """Tokens of each expert, layer after layer."""
    return zlib.compress(np.array(loads, dtype="<i4").tobytes())


def unpack_loads(blob: bytes, num_layers: int) -> NDArray[Any]:
    """[layers, experts]."""
    return np.frombuffer(zlib.decompress(blob), dtype="<i4").reshape(num_layers, -1)


def unpack_array(blob: bytes, name: str, codec: str) -> NDArray[Any]:
    dtype = np.dtype(ARRAY_TYPES[name])
    if codec == RAW:
        return np.frombuffer(blob, dtype=dtype)
    assert codec == PLANES, f"arrays are {RAW} or {PLANES}, not {codec}"
    planes = np.frombuffer(zlib.decompress(blob), dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
