"""What a sampler process is told to open: a model folder and the settings of an engine.

Owns: the order of Temper's own engine, on both sides of the socket, and which kind an order is of. Refuses: recipes;
build/ reads them. The order of vLLM: engine/vllm/order.py.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.process.description import describe_model, model_found_here, require_same_model
from temper.engine.sampler_model import SamplerWeights, sampler_model
from temper.engine.vllm.order import VllmOrder
from temper.errors import UserError
from temper.models.decoder import Numerics
from temper.models.load import load_model, load_tokenizer
from temper.models.lora.wrapping import AdapterSettings, add_adapter, load_base
from temper.tasks.render import decode_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOrder:
    """Temper's own engine in a process of its own. It holds the weights of `folder` until it is given those of the
    trainer."""

    kind: ClassVar[Literal["local"]] = "local"

    folder: str
    dtype: str
    """Of the weights, without "torch."."""
    device: str
    numerics: Numerics
    weights: SamplerWeights
    settings: EngineSettings
    four_bit_adapter: AdapterSettings | None = None
    """The trained adapter, where it lies over a base in 4 bits: the engine computes with its factors. None: it draws
    from whole weights, merged ones where an adapter is trained."""
    has_stop_texts: bool = False
    """Whether requests may have stop texts, for which the engine needs the tokenizer."""
    num_threads: int = 0
    """Of torch on a CPU; 0: as torch chooses."""
    description: dict[str, Any] | None = None
    """Of the model that is trained, where the sampler may find another under the name of its folder. None: it sees
    the same files."""

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, **dataclasses.asdict(self)})

    @staticmethod
    def from_told(told: dict[str, Any]) -> LocalOrder:
        adapter = told.pop("four_bit_adapter")
        if adapter is not None:
            adapter = AdapterSettings(**{**adapter, "targets": tuple(adapter["targets"])})
        return LocalOrder(**{**told, "settings": EngineSettings(**told["settings"])}, four_bit_adapter=adapter)

    def found_here(self, own_folder: str) -> LocalOrder:
        """The order on the machine where it is carried out. own_folder: that machine's copy of the model; empty: the
        folder that the order names."""
        if own_folder and self.four_bit_adapter is not None:
            raise UserError(
                "a base in 4 bits is not sent to samplers, so they must read the trainer's own files. Start this one "
                'without MODEL, where it sees them, or use model.lora.base = "full"'
            )
        return replace(self, folder=str(model_found_here(own_folder or self.folder)))

    async def open(self) -> LocalEngine:
        return open_engine(self)


SamplerOrder = LocalOrder | VllmOrder
KINDS: dict[str, type[LocalOrder | VllmOrder]] = {order.kind: order for order in (LocalOrder, VllmOrder)}


def read_order(text: str) -> SamplerOrder:
    told = json.loads(text)
    return KINDS[told.pop("kind")].from_told(told)


def open_engine(order: LocalOrder) -> LocalEngine:
    """Loads the model as the trainer does, and makes the engine's own of it."""
    if order.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"the model is trained on a GPU, and {socket.gethostname()} has none that torch can use")
    if order.num_threads:
        torch.set_num_threads(order.num_threads)
    folder, device, dtype = Path(order.folder), torch.device(order.device), getattr(torch, order.dtype)
    load = partial(load_model, numerics=order.numerics)
    if order.four_bit_adapter is None:
        model = load(folder, dtype, device)
    else:
        model = add_adapter(load_base(folder, dtype, device, load=load, base="4bit"), order.four_bit_adapter, folder)
    if order.description is not None:
        require_same_model(order.description, describe_model(model.config, folder), folder)
    model = sampler_model(model.requires_grad_(False), weights=order.weights, runs_ahead=False)
    decode = partial(decode_ids, load_tokenizer(folder)) if order.has_stop_texts else None
    return LocalEngine(model, order.settings, decode=decode)
