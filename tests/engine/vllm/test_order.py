"""What a sampler process is told when it is to draw with vLLM, and what it makes of its machine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.engine.process.description import describe_model
from temper.engine.process.order import LocalOrder, read_order
from temper.engine.told_routes import ToldRoutes
from temper.engine.vllm import order as order_module
from temper.engine.vllm.order import VllmOrder, visible
from temper.engine.vllm.start import VllmSettings
from temper.errors import UserError
from temper.models.experts.routes import RouteShape
from temper.models.load import load_model
from temper.models.tiny import make_tiny_model

SHAPE = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 32, "seed": 0}


class Started:
    """In place of VllmEngine: what its processes would inherit when it is started."""

    def __init__(self, settings: VllmSettings) -> None:
        self.settings = settings

    async def start(self) -> None:
        self.environment = dict(os.environ)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmOrder:
    monkeypatch.setattr(order_module, "VllmEngine", Started)
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
    settings = VllmSettings(
        folder=make_tiny_model(tmp_path / "tiny", **SHAPE, alphabet="abc"), seed=1, dtype="float32", device="cpu",
        max_running=4, tokens_per_step=64, max_length=32, kv_tokens=128, answer_seconds=7.0,
    )  # fmt: skip
    return VllmOrder(settings=settings)


def open_order(order: VllmOrder) -> Any:
    return asyncio.run(order.open())


def test_an_order_arrives_as_it_was_given_and_is_of_its_kind(order: VllmOrder) -> None:
    whole = replace(order, gpus=(2, 3), num_threads=2, description={"tokens": "a"})
    assert read_order(whole.to_json()) == whole
    assert read_order(order.to_json()) == order
    routes = ToldRoutes(RouteShape(layers=(1, 2), num_chosen=2, num_experts=8), num_layers=3)
    telling = replace(order, settings=replace(order.settings, routes=routes))
    assert read_order(telling.to_json()) == telling
    assert not isinstance(read_order(order.to_json()), LocalOrder)


def test_samplers_on_a_cpu_have_the_threads_that_they_were_given_and_bind_none(order: VllmOrder) -> None:
    engine = open_order(replace(order, num_threads=3))
    told = {name: engine.environment[name] for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")}
    assert told == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert engine.settings == order.settings


def test_a_sampler_sees_its_own_gpus_alone(order: VllmOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible((2, 3), "") == "2,3"
    assert visible((1, 0), "4, 7") == "7,4", "those of its parent, by their place"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    shared = replace(order.settings, device="cuda", tensor_parallel=2)
    assert open_order(replace(order, settings=shared, gpus=(2, 3))).environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"vLLM needs 2 GPUs for this sampler, and .* has 1 that torch can use"):
        open_order(replace(order, settings=shared, gpus=(2,)))


def test_a_machine_that_has_another_model_or_none_is_refused(order: VllmOrder, tmp_path: Path) -> None:
    trained = order.settings.folder
    described = describe_model(load_model(trained, torch.float32, torch.device("cpu")).config, trained)
    told = replace(order, description=described)
    open_order(told)
    copied = make_tiny_model(tmp_path / "copy", **SHAPE, alphabet="abc")
    assert open_order(told.found_here(str(copied))).settings.folder == copied
    wider = make_tiny_model(tmp_path / "wider", **{**SHAPE, "width": 32}, alphabet="abc")
    with pytest.raises(UserError, match=f"{wider} is another model"):
        open_order(told.found_here(str(wider)))
    with pytest.raises(UserError, match=r"gone is not there on .*temper sampler MODEL"):
        told.found_here(str(tmp_path / "gone"))
