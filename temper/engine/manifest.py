"""What a publication holds, tensor by tensor, so that an engine elsewhere can prove that it took over exactly that.

Owns: hashes of weights and their comparison. Refuses: moving them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from temper.errors import BackendError
from temper.types import Publication

HASHING_THREADS = 8
MAX_NAMED = 5
"""Differences written out in an error; the others are counted."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    shape: tuple[int, ...]
    dtype: str
    """Without "torch.", e.g. "bfloat16"."""
    sha256: str
    """Hash of the tensor's bytes in row-major order, whatever its device and strides."""


@dataclass(frozen=True)
class Manifest:
    version: int
    tensors: Mapping[str, TensorFacts]
    sha256: str
    """Hash over the names and facts of all tensors, whatever their order; the version does not change it."""

    def to_json(self) -> str:
        facts = {name: asdict(self.tensors[name]) for name in sorted(self.tensors)}
        return json.dumps({"version": self.version, "sha256": self.sha256, "tensors": facts})

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises BackendError for text that is not a manifest, or a manifest that does not fit its own hash."""
        try:
            data = json.loads(text)
            tensors = {
                str(name): TensorFacts(
                    tuple(int(size) for size in facts["shape"]), str(facts["dtype"]), str(facts["sha256"])
                )
                for name, facts in data["tensors"].items()
            }
            version, written = int(data["version"]), str(data["sha256"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BackendError(f"this is no manifest of weights: {text[:80]!r}") from error
        if written != hash_of_all(tensors):
            raise BackendError(f"the manifest of version {version} does not fit its own hash: it was changed or cut")
        return Manifest(version, tensors, written)


def manifest_of(publication: Publication) -> Manifest:
    return manifest_of_tensors(publication.version, publication.tensors.items())


def manifest_of_tensors(version: int, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """The manifest of any named tensors: what was sent, or what an engine found in itself."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:  # hashing lets go of the interpreter lock
        facts = dict(threads.map(lambda item: (item[0], facts_of(item[1])), tensors))
    return Manifest(version, facts, hash_of_all(facts))


def facts_of(tensor: Tensor) -> TensorFacts:
    plain = tensor.detach().contiguous().cpu()
    # As bytes: numpy knows no bfloat16. Flat first: a scalar cannot be viewed as another dtype.
    raw = plain.reshape(-1).view(torch.uint8).numpy()
    dtype = str(plain.dtype).removeprefix("torch.")
    return TensorFacts(tuple(plain.shape), dtype, hashlib.sha256(raw.data).hexdigest())


def hash_of_all(tensors: Mapping[str, TensorFacts]) -> str:
    lines = [[name, *asdict(tensors[name]).values()] for name in sorted(tensors)]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def differences(expected: Manifest, actual: Manifest) -> list[str]:
    """One sentence for each way in which `actual` is not `expected`; none: they are the same weights."""
    found = []
    if expected.version != actual.version:
        found.append(f"version is {actual.version} and should be {expected.version}")
    for name in sorted(expected.tensors.keys() | actual.tensors.keys()):
        wanted, got = expected.tensors.get(name), actual.tensors.get(name)
        if got is None:
            found.append(f"{name} is missing")
        elif wanted is None:
            found.append(f"{name} was not published")
        elif (wanted.shape, wanted.dtype) != (got.shape, got.dtype):
            found.append(f"{name} is {got.shape} {got.dtype} and should be {wanted.shape} {wanted.dtype}")
        elif wanted.sha256 != got.sha256:
            found.append(f"{name} holds other numbers")
    return found


def check_received(manifest: Manifest, received: Manifest) -> None:
    """Raises BackendError unless the engine acknowledged exactly what was published."""
    if found := differences(manifest, received):
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise BackendError(f"publication {manifest.version} did not arrive: {'; '.join(found[:MAX_NAMED])}{more}")
