"""What a publication holds, tensor by tensor, so that an engine elsewhere can prove that it took over exactly that.

Owns: hashes of weights and their comparison. Refuses: moving them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from temper.engine.digests import sum_of
from temper.errors import BackendError
from temper.types import Publication

HASHING_THREADS = 8
HASHING_SECONDS = 600.0
"""Longest wait for the hash of one tensor."""
SUM = "sum "
MAX_NAMED = 5
"""Differences written out in an error; the others are counted."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    shape: tuple[int, ...]
    dtype: str
    """Without "torch.", e.g. "bfloat16"."""
    sha256: str
    """Hash of the tensor's bytes in row-major order, whatever its device and strides; or "sum" and their sum
    (digests.py), which a GPU makes without bringing them to the host."""


@dataclass(frozen=True)
class Manifest:
    version: int
    tensors: Mapping[str, TensorFacts]
    sha256: str
    """Hash over the names and facts of all tensors, whatever their order; the version does not change it."""

    @property
    def is_summed(self) -> bool:
        """Whether tensors are told apart by their sums."""
        return any(facts.sha256.startswith(SUM) for facts in self.tensors.values())

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


def manifest_of_tensors(version: int, tensors: Iterable[tuple[str, Tensor]], *, is_summed: bool = False) -> Manifest:
    """The manifest of any named tensors: what was sent, or what an engine found in itself."""
    hashing = Hashing(is_summed=is_summed)
    for name, tensor in tensors:
        hashing.add(name, tensor)
    return hashing.manifest(version)


class Hashing:
    """Hashes tensors beside whoever has them. Holds on to no more of them than it has threads: they may have been made
    to be hashed, and all of them be more than there is room for."""

    def __init__(self, *, is_summed: bool = False) -> None:
        self._is_summed = is_summed
        self._threads = ThreadPoolExecutor(HASHING_THREADS)  # hashing lets go of the interpreter lock
        self._free = threading.Semaphore(HASHING_THREADS)
        self._facts: dict[str, Future[TensorFacts]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        if not self._free.acquire(timeout=HASHING_SECONDS):
            raise BackendError(f"no tensor before {name} was hashed within {HASHING_SECONDS:g} seconds")
        self._facts[name] = self._threads.submit(facts_of, tensor, is_summed=self._is_summed)
        self._facts[name].add_done_callback(lambda _: self._free.release())

    def manifest(self, version: int) -> Manifest:
        facts = {name: hashed.result(timeout=HASHING_SECONDS) for name, hashed in self._facts.items()}
        self._threads.shutdown()
        return Manifest(version, facts, hash_of_all(facts))


class HashedTensors(Mapping[str, Tensor]):
    """Tensors of a publication, each hashed when it is asked for: some are made then, and should be made once."""

    def __init__(self, tensors: Mapping[str, Tensor], *, is_summed: bool = False) -> None:
        self._tensors = tensors
        self.hashing = Hashing(is_summed=is_summed)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        self.hashing.add(name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def facts_of(tensor: Tensor, *, is_summed: bool = False) -> TensorFacts:
    if is_summed:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorFacts(tuple(tensor.shape), dtype, f"{SUM}{int(sum_of(tensor)) % 2**64:016x}")
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
