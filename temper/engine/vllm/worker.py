"""What Temper adds to vLLM's worker process: taking over weights as a transaction, proven by reading them back.

Owns: which of vLLM's parameters hold which published tensor. Refuses: models whose tensors it cannot find again
one by one, before anything is changed. Written against vLLM 0.32.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from temper.engine.manifest import Manifest, TensorFacts, check_received, manifest_of_tensors
from temper.errors import BackendError

PADDING = 64
"""Rows of embedding and head in vLLM are a multiple of this; nobody draws or reads the added ones."""


class WeightsExtension:
    """Mixed into vLLM's worker (worker_extension_cls); its methods are called over collective_rpc."""

    model_runner: Any
    _prepared: Any = None

    def temper_prepare(self, file: str, manifest: str) -> str:
        """Reads a file of tensors and finds the place of each. Changes nothing yet; answers with what it received."""
        from safetensors.torch import load_file

        expected = Manifest.from_json(manifest)
        tensors = load_file(Path(file))
        received = manifest_of_tensors(expected.version, tensors.items())
        check_received(expected, received)
        plan_of(received.tensors, *self._layout())
        self._prepared = received, tensors
        return received.to_json()

    def temper_commit(self) -> str:
        """Takes over what was prepared. Answers with the manifest of what the model holds then, in the same names."""
        (expected, tensors), self._prepared = self._prepared, None
        with _Warnings() as warnings:
            self.model_runner.get_model().load_weights(iter(tensors.items()))
        if warnings.texts:
            raise BackendError(f"vLLM warned while it loaded version {expected.version}: {'; '.join(warnings.texts)}")
        return self.temper_manifest(expected.to_json())

    def temper_manifest(self, manifest: str) -> str:
        """What the model holds now, under the names of `manifest`."""
        expected = Manifest.from_json(manifest)
        parameters, packed = self._layout()
        found: dict[str, Tensor] = {}
        for target, names in plan_of(expected.tensors, parameters, packed).items():
            start = 0
            for name in names:
                end = start + expected.tensors[name].shape[0]
                found[name] = parameters[target][start:end]
                start = end
        return manifest_of_tensors(expected.version, found.items()).to_json()

    def temper_scramble(self, name: str) -> None:
        """Spoils one of vLLM's own parameters: for tests and drills of what a publication must repair."""
        self.model_runner.get_model().get_parameter(name).data.neg_().add_(0.5)

    def _layout(self) -> tuple[dict[str, Tensor], Mapping[str, list[str]]]:
        model = self.model_runner.get_model()
        return dict(model.named_parameters()), getattr(model, "packed_modules_mapping", {})


def plan_of(
    tensors: Mapping[str, TensorFacts], parameters: Mapping[str, Tensor], packed: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """For each of vLLM's parameters the published tensors that are stacked in it, first to last.

    Raises BackendError unless every tensor has its one place and every parameter is filled.
    """
    plan: dict[str, list[str]] = {}
    order = {part: place for parts in packed.values() for place, part in enumerate(parts)}
    for name in sorted(tensors, key=lambda name: max(order.get(word, 0) for word in name.split("."))):
        plan.setdefault(_target_of(name, parameters, packed), []).append(name)
    if left := sorted(parameters.keys() - plan.keys()):
        raise BackendError(f"nothing was published for {left[:3]} of vLLM's model; nothing was loaded")
    for target, names in plan.items():
        own, pieces = parameters[target], [tensors[name] for name in names]
        rows = sum(piece.shape[0] for piece in pieces)
        is_vocabulary = "embed" in target or "lm_head" in target
        fits = own.shape[0] == (-(-rows // PADDING) * PADDING if is_vocabulary else rows)
        wanted = (tuple(own.shape[1:]), str(own.dtype).removeprefix("torch."))
        if not fits or any((piece.shape[1:], piece.dtype) != wanted for piece in pieces):
            published = ", ".join(f"{tensors[name].shape} {tensors[name].dtype}" for name in names)
            raise BackendError(
                f"{target} of vLLM's model is {tuple(own.shape)} {wanted[1]}, and {names} are {published}; nothing was "
                f"loaded. Tensor parallelism and models that vLLM stores in another layout are not supported"
            )
    return plan


def _target_of(name: str, parameters: Mapping[str, Tensor], packed: Mapping[str, list[str]]) -> str:
    if name in parameters:
        return name
    for fused, parts in packed.items():
        for part in parts:
            target = name.replace(f".{part}.", f".{fused}.")
            if target != name and target in parameters:
                return target
    raise BackendError(f"vLLM's model has no place for {name}; nothing was loaded")


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


def _keep_weights_in_the_open() -> None:
    """On a CPU vLLM packs weights for oneDNN and drops the originals. Packed copies cannot be read back, and that of a
    tied head is forgotten when weights change (seen in 0.32.0: new body, old head). So packing is off.

    vLLM imports this module in each worker before it builds the model; everywhere else this does nothing.
    """
    if operations := sys.modules.get("vllm._custom_ops"):
        operations._supports_onednn = False  # type: ignore[attr-defined]


_keep_weights_in_the_open()
