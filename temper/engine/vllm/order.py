"""What a sampler process is told when it is to draw with vLLM.

Owns: the order of vLLM, on both sides of the socket, and what of a machine it may use: GPUs and cores. Refuses:
recipes; build/ reads them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from temper.engine.process.description import describe_model, model_found_here, require_same_model
from temper.engine.told_routes import ToldRoutes
from temper.engine.vllm.engine import VllmEngine
from temper.engine.vllm.start import VllmSettings
from temper.errors import UserError
from temper.models.load import read_config

GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOrder:
    """vLLM below a process of its own. It holds the weights of `settings.folder` until it is given those of the
    trainer."""

    kind: ClassVar[Literal["vllm"]] = "vllm"
    settings: VllmSettings
    gpus: tuple[int, ...] = ()
    """Those that it has, among those that the trainer's process sees. Empty: all that the sampler process sees."""
    num_threads: int = 0
    """Of vLLM on a CPU; 0: as vLLM chooses, which takes every core for itself."""
    description: dict[str, Any] | None = None
    """Of the model that is trained, where the sampler may find another under the name of its folder. None: it sees
    the same files."""

    def to_json(self) -> str:
        settings = dataclasses.asdict(self.settings)
        told = {**dataclasses.asdict(self), "settings": {**settings, "folder": str(self.settings.folder)}}
        return json.dumps({"kind": self.kind, **told})

    @staticmethod
    def from_told(told: dict[str, Any]) -> VllmOrder:
        settings = {**told["settings"], "folder": Path(told["settings"]["folder"])}
        if settings["routes"] is not None:
            settings["routes"] = ToldRoutes.from_told(settings["routes"])
        return VllmOrder(**{**told, "settings": VllmSettings(**settings), "gpus": tuple(told["gpus"])})

    def found_here(self, own_folder: str) -> VllmOrder:
        """The order on the machine where it is carried out. own_folder: that machine's copy of the model; empty: the
        folder that the order names."""
        folder = model_found_here(own_folder or str(self.settings.folder))
        return replace(self, settings=replace(self.settings, folder=folder))

    async def open(self) -> VllmEngine:
        """vLLM's processes inherit what they may use, so that is said to this process before they start."""
        settings = self.settings
        if self.gpus:
            os.environ[GPUS] = visible(self.gpus, os.environ.get(GPUS, ""))
        if settings.device == "cuda" and torch.cuda.device_count() < settings.tensor_parallel:
            raise UserError(
                f"vLLM needs {settings.tensor_parallel} GPUs for this sampler, and {socket.gethostname()} has "
                f"{torch.cuda.device_count()} that torch can use"
            )
        if settings.device == "cpu" and self.num_threads:
            # Else vLLM binds a thread to every core, and so do the other samplers.
            os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(self.num_threads)}
        if self.description is not None:
            found = describe_model(read_config(settings.folder), settings.folder)
            require_same_model(self.description, found, settings.folder)
        engine = VllmEngine(settings)
        await engine.start()
        return engine


def visible(gpus: tuple[int, ...], seen: str) -> str:
    """CUDA_VISIBLE_DEVICES of a process that has these of the GPUs that its parent sees; `seen` is the parent's."""
    names = seen.split(",") if seen else None
    return ",".join(str(gpu) if names is None else names[gpu].strip() for gpu in gpus)
