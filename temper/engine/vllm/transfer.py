"""Temper's engine of vLLM's weight transfer: a publication is received and checked whole, then committed or dropped.

Owns: what was received and is not taken over yet, and the names under which vLLM knows the engine. Refuses: moving
weights (engine/process/weights.py) and deciding when (engine.py). Written against vLLM 0.32.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from temper.engine.digests import Digests
from temper.engine.manifest import Manifest, check_received, manifest_of_tensors
from temper.engine.process.weights import SharedWeights
from temper.engine.vllm.layout import join_shares, plan_of
from temper.errors import BackendError
from temper.models.experts.stored import as_stored

BACKEND = "temper"
"""Its name in vLLM's WeightTransferConfig."""
Gather = Callable[[Tensor], Sequence[Tensor]]
"""What every rank has of a parameter of this one's; all ranks ask in the same order."""


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What a rank is told once."""

    memory: str
    """File under which it opens the memory that publications are written to."""


@dataclass(frozen=True, slots=True)
class UpdateInfo:
    """What a rank is told of a publication."""

    told: dict[str, Any] | None
    """Where its tensors lie. None: the publication is dropped."""
    manifest: str


class WeightUpdate:
    """What one rank of vLLM does with publications.

    No verb raises: of ranks that fail vLLM reads the first answer alone, and takes those of the others for answers to
    what it asks next (multiproc_executor.py in 0.32.0). So a problem is kept and told when asked for.
    """

    def __init__(self, model: Any, num_ranks: int = 1, family: str = "") -> None:
        """family: model_type, by which files of a model name experts."""
        self.problem = ""
        """Why the last verb failed on this rank; empty: it did not."""
        self._model, self._num_ranks, self._family = model, num_ranks, family
        self._memory: SharedWeights | None = None
        self._received: tuple[Manifest, Mapping[str, Tensor]] | None = None

    def open(self, memory: str) -> None:
        with _Kept(self):
            self.close()
            self._memory = SharedWeights(os.open(memory, os.O_RDWR))

    def receive(self, told: Mapping[str, Any] | None, manifest: str) -> None:
        """Finds the place of every tensor and changes nothing yet."""
        self._received = None
        with _Kept(self):
            if told is None:
                return
            if self._memory is None:
                raise BackendError("the memory of publications is not open")
            expected, tensors = Manifest.from_json(manifest), self._memory.read(told).tensors
            check_received(expected, _manifest(expected, tensors.items()))
            plan_of(expected.tensors, *self._layout(), self._num_ranks)
            self._received = expected, tensors

    def commit(self) -> None:
        """Takes over what was received, if anything was."""
        received, self._received = self._received, None
        if received is None:
            return
        manifest, tensors = received
        with _Kept(self), _Warnings() as warnings:
            # As files hold them: vLLM looks for experts one by one.
            self._model.load_weights(as_stored(tensors, self._family))
            if warnings.texts:
                raise BackendError(f"vLLM warned while it loaded {manifest.version}: {'; '.join(warnings.texts)}")

    def held(self, manifest: str, gather: Gather) -> str:
        """What the ranks' models hold together now, as a manifest under the names of `manifest`; empty: see
        `problem`."""
        with _Kept(self):
            expected = Manifest.from_json(manifest)
            return _manifest(expected, self._joined(expected, gather)).to_json()
        return ""

    def digests(self, manifest: str, gather: Gather) -> dict[str, str]:
        """The same, in the sums of engine/digests.py."""
        with _Kept(self):
            digests = Digests()
            for name, tensor in self._joined(Manifest.from_json(manifest), gather):
                digests.add(name, tensor)
            return digests.read()
        return {}

    def close(self) -> None:
        self._received = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _joined(self, expected: Manifest, gather: Gather) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors as they were published, each put together from all ranks."""
        parameters, packed = self._layout()
        for target, names in plan_of(expected.tensors, parameters, packed, self._num_ranks).items():
            pieces = {name: expected.tensors[name] for name in names}
            yield from join_shares(target, pieces, gather(parameters[target].detach()))

    def _layout(self) -> tuple[dict[str, Tensor], Mapping[str, list[str]]]:
        return dict(self._model.named_parameters()), getattr(self._model, "packed_modules_mapping", {})


def _manifest(expected: Manifest, tensors: Iterable[tuple[str, Tensor]]) -> Manifest:
    """Of these tensors, to be compared with what was expected."""
    return manifest_of_tensors(expected.version, tensors, is_summed=expected.is_summed)


class _Kept:
    """Keeps the problem of a verb instead of raising it."""

    def __init__(self, update: WeightUpdate) -> None:
        self._update = update

    def __enter__(self) -> None:
        self._update.problem = ""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, Exception):
            self._update.problem = str(error) if isinstance(error, BackendError) else repr(error)
        return isinstance(error, Exception)


class _Warnings(logging.Handler):
    """A warning during a load is how vLLM says that weights were left out, so it counts as a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> _Warnings:
        logging.getLogger("vllm").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("vllm").removeHandler(self)


def register() -> None:
    """Makes the engine known to vLLM in this process; each process of vLLM has a registry of its own."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # type: ignore[import-not-found]

    with suppress(ValueError):  # it is known already
        WeightTransferEngineFactory.register_engine(BACKEND, _transfer_class())


def init_request(memory: str) -> Any:
    """As vLLM's AsyncLLM.init_weight_transfer_engine takes it."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest  # type: ignore[import-not-found]

    return WeightTransferInitRequest(init_info={"memory": memory})


def update_request(told: Mapping[str, Any] | None, manifest: str = "") -> Any:
    """As vLLM's AsyncLLM.update_weights takes it."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # type: ignore[import-not-found]

    return WeightTransferUpdateRequest(update_info={"told": told, "manifest": manifest})


def _transfer_class() -> type:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine  # type: ignore[import-not-found]

    class TemperTransfer(WeightTransferEngine):  # type: ignore[misc]
        """vLLM's verbs, told to a WeightUpdate."""

        init_info_cls, update_info_cls = MemoryInfo, UpdateInfo
        supports_draft_weight_update = False

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            super().__init__(config, vllm_config, device, model)
            family = vllm_config.model_config.hf_text_config.model_type
            self.update = WeightUpdate(model, vllm_config.parallel_config.tensor_parallel_size, family)

        def init_transfer_engine(self, init_info: MemoryInfo) -> None:
            self.update.open(init_info.memory)

        def start_weight_update(self) -> None:
            self.update.receive(None, "")

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))  # vLLM's own waits for a GPU, where one may be

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self.update.receive(update_info.told, update_info.manifest)

        def finish_weight_update(self) -> None:
            self.update.commit()

        def shutdown(self) -> None:
            self.update.close()

    return TemperTransfer
