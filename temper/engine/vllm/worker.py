"""What Temper adds to vLLM's worker processes: its engine of weight transfer, and questions about the weights.

Owns: what a worker answers. Refuses: raising in a worker (transfer.py says why). Written against vLLM 0.32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from temper.engine.vllm.transfer import WeightUpdate, register


class WeightsExtension:
    """Mixed into vLLM's worker (worker_extension_cls); its methods are called over collective_rpc."""

    model_runner: Any
    parallel_config: Any
    weight_transfer_engine: Any

    def temper_problem(self) -> str:
        """Why the last verb of a weight update failed on this rank; empty: it did not."""
        return self._temper_update().problem

    def temper_manifest(self, manifest: str) -> tuple[str, str]:
        """(what all ranks hold together, under the names of `manifest`; why that cannot be told)."""
        held = self._temper_update().held(manifest, self._temper_gather)
        return held, self._temper_update().problem

    def temper_digests(self, manifest: str) -> tuple[dict[str, str], str]:
        """(the same in sums, by name; why that cannot be told)."""
        held = self._temper_update().digests(manifest, self._temper_gather)
        return held, self._temper_update().problem

    def temper_scramble(self, name: str, rank: int | None = None) -> None:
        """Spoils one of vLLM's own parameters, on one rank or all: for drills of what a publication must repair."""
        if rank in (None, self.parallel_config.rank):
            self.model_runner.get_model().get_parameter(name).data.neg_().add_(0.5)

    def _temper_update(self) -> WeightUpdate:
        update: WeightUpdate = self.weight_transfer_engine.update
        return update

    def _temper_gather(self, own: Tensor) -> Sequence[Tensor]:
        if self.parallel_config.tensor_parallel_size == 1:
            return [own]
        from vllm.distributed import get_tp_group  # type: ignore[import-not-found]

        return list(get_tp_group().all_gather(own.contiguous().unsqueeze(0), dim=0))


def _keep_weights_in_the_open() -> None:
    """On a CPU vLLM packs weights for oneDNN and drops the originals. Packed copies cannot be read back, and that of a
    tied head is forgotten when weights change (seen in 0.32.0: new body, old head). So packing is off."""
    if operations := sys.modules.get("vllm._custom_ops"):
        operations._supports_onednn = False  # type: ignore[attr-defined]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    if current_platform.is_cpu():
        _keep_experts_in_the_open()


def _keep_experts_in_the_open() -> None:
    """Stacks of experts are packed in place, in the same shape: new weights would lie there as they are and be read as
    packed ones (seen in 0.32.0). So they are packed for every pass, in a copy."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # type: ignore[import-not-found]

    experts = cpu_moe.CPUUnquantizedExperts
    apply, pack = experts.apply, cpu_moe.cpu_prepack_moe_weight

    def packed(self: Any, *, w1: Tensor, w2: Tensor, **others: Any) -> None:
        apply(self, w1=pack(w1, self.isa), w2=pack(w2, self.isa), **others)

    experts.apply = packed
    # Widths that are not a multiple of 32 are padded, and publications then refused for their shape.
    experts.process_weights_after_loading = experts._pad_moe_intermediate


# vLLM imports this module in each worker before it builds the model; everywhere else vLLM is not there yet.
if "vllm" in sys.modules:
    _keep_weights_in_the_open()
    register()
