"""A sampler in a process of its own changes where tokens are drawn, and not one of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.build import sampler as build_sampler
from temper.build.policy import size_engine
from temper.cluster.sampler_main import open_sampler
from temper.commands.checkpoints import evaluate_checkpoint
from temper.commands.plan import plan_recipe
from temper.commands.training import ranks
from temper.commands.training import train as training
from temper.config import resolve, to_toml
from temper.engine.fleet.fleet import FleetSettings
from temper.engine.local.engine import LocalEngine
from temper.engine.process.client import ProcessSampler
from temper.engine.process.order import LocalOrder, open_engine, read_order
from temper.engine.process.weights import SharedWeights
from temper.engine.vllm import order as vllm_order
from temper.engine.vllm.engine import VllmEngine
from temper.engine.vllm.start import VllmSettings
from temper.engine.wrapped import WrappedSampler
from temper.errors import BackendError, EngineLost, UserError
from temper.models.save import saved_tensors
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader
from temper.types import Completion, Publication, Request
from tests.fakes.served import serve_in_a_thread

SERVER = {"kind": "sglang", "address": "http://127.0.0.1:30000"}


def short(recipe: dict[str, Any], place: str, **engine: Any) -> dict[str, Any]:
    """The stage that draws alone, two steps of it."""
    stage = {**recipe["stage"][1], "steps": 2, "evaluation": {"every": 1}}
    return {**recipe, "checkpoint": {"every": 1}, "engine": {"place": place, **engine}, "stage": [stage]}


def run(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Everything that a run leaves, but its recipe and its clocks."""
    training.train_stages(resolve(table, (), where="test"), run=folder)
    weights = sorted((folder / "checkpoints").glob("*/step-*/**/*.safetensors"))
    assert weights
    with RunReader(folder) as reader:
        assert reader.is_finished
        digests = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in weights}
        return {**reader.fingerprint(), **digests}


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "exact": ({}, {"numerics": "exact"}, {}),
    "keep-sets and stop texts": ({}, {"numerics": "exact"}, {"top_p": 0.8, "stop": ["ab", "ba"]}),
    "adapter": ({"lora": {"rank": 2}}, {"numerics": "exact"}, {}),
    "adapter over 4 bits": ({"lora": {"rank": 2, "base": "4bit"}}, {}, {}),
    "fp8": ({}, {"weights": "fp8"}, {}),
}
QUICK = ("exact",)


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.heavy) for k in KINDS])
def test_a_synchronous_run_has_the_same_bits_wherever_it_draws(
    kind: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine, sampling = KINDS[kind]
    tiny_recipe["model"] |= model
    tiny_recipe["sampling"] |= sampling
    here = run(short(tiny_recipe, "here", **engine), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "before")  # an adapter records where its model lies
    started = []

    def start(order: str, *shared: Any, **more: Any) -> Any:
        started.append(order)
        return serve_in_a_thread(order, *shared, **more)

    monkeypatch.setattr(build_sampler, "start_sampler", start)
    assert run(short(tiny_recipe, "process", **engine), tmp_path / "run") == here
    assert len(started) == 1, "the other run must have drawn elsewhere"


SPOILED = "model.layers.1.mlp.down_proj.weight"


class Spoiled:
    """Opens an engine that holds something else in one tensor from its second publication on."""

    def __init__(self, *, when: str) -> None:
        """when: before it tells what it holds ("taking over"), or after ("drawing")."""
        self._when = when

    async def __call__(self, text: str) -> LocalEngine:
        engine = open_engine(read_order(text))
        load, digests = engine.load, engine.digests
        tensor = saved_tensors(engine._model)[SPOILED]

        async def load_spoiled(publication: Publication) -> None:
            await load(publication)
            if publication.version and self._when == "taking over":
                tensor.view(torch.int32)[3, 5] ^= 1  # no canary would see it

        async def tell_and_spoil() -> Mapping[str, str]:
            told = await digests()
            if engine.version and self._when == "drawing":
                tensor.zero_()
            return told

        engine.load, engine.digests = load_spoiled, tell_and_spoil  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("taking over", rf"^sampler process 2 of 2 holds other numbers than publication 1 in {SPOILED}\."),
        ("drawing", rf"canary/0/1,.* The sampler holds a stale tensor, {SPOILED} of sampler process 2 of 2"),
    ],
)
def test_one_of_two_samplers_that_holds_other_weights_ends_the_run_and_is_named(
    when: str, message: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(order: str, weights: SharedWeights, *, name: str, **_: Any) -> ProcessSampler:
        opener = Spoiled(when=when) if "2 of 2" in name else open_sampler
        sampler = serve_in_a_thread(order, weights, opener=opener)
        sampler.name = name
        return sampler

    monkeypatch.setattr(build_sampler, "start_sampler", start)
    with pytest.raises(BackendError, match=message):
        run({**short(tiny_recipe, "process"), "cluster": {"samplers": 2}}, tmp_path / "run")


def test_a_synchronous_run_has_the_same_bits_with_three_samplers(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run(short(tiny_recipe, "here", numerics="exact"), tmp_path / "here")
    drawn: Counter[int] = Counter()

    def start(order: str, *shared: Any, name: str, **more: Any) -> Any:
        sampler = serve_in_a_thread(order, *shared, **more)
        generate, number = sampler.generate, int(name.split()[2])

        async def counted(request: Any) -> Any:
            drawn[number] += 1
            return await generate(request)

        sampler.generate = counted  # type: ignore[method-assign]
        return sampler

    monkeypatch.setattr(build_sampler, "start_sampler", start)
    table = {**short(tiny_recipe, "process", numerics="exact"), "cluster": {"samplers": 3}}
    assert run(table, tmp_path / "three") == here
    assert sorted(drawn) == [1, 2, 3]
    assert min(drawn.values()) * 3 >= max(drawn.values()), f"all have work: {drawn}"


def test_a_table_about_processes_needs_processes(tiny_recipe: dict[str, Any]) -> None:
    for keys, message in {
        ("samplers", 2): r'cluster.samplers is about sampler processes: set engine.place = "process"',
        ("max_restarts", 1): r'cluster.max_restarts is about sampler processes: set engine.place = "process"',
    }.items():
        with pytest.raises(UserError, match=message):
            resolve({**tiny_recipe, "cluster": dict([keys])}, (), where="test")
    resolve({**tiny_recipe, "cluster": {"trainers": 2, "max_restarts": 1}}, (), where="test")
    with pytest.raises(UserError, match=r'of a Ray cluster, and cluster.place = "processes": leave one of them out'):
        resolve({**tiny_recipe, "cluster": {"place": "processes", "address": "auto"}}, (), where="test")


@pytest.mark.parametrize(
    ("parts", "max_staleness", "is_copied", "expected"),
    [
        (False, 0, False, True),
        (False, 2, False, True),
        (True, 0, False, True),
        (True, 2, False, False),
        (True, 2, True, True),
    ],
)  # fmt: skip
def test_only_parts_that_are_not_copied_cannot_be_read_while_the_trainers_work(
    parts: bool, max_staleness: int, is_copied: bool, expected: bool, tiny_recipe: dict[str, Any]
) -> None:
    tiny_recipe["cluster"] = {"trainers": 2, "parts": parts}
    tiny_recipe["stage"][1]["rollout"]["max_staleness"] = max_staleness
    config = resolve(tiny_recipe, (), where="test")[1]
    assert build_sampler.feeds_late(config, is_copied=is_copied) is expected


def test_a_recipe_with_a_sampler_process_can_be_planned_and_evaluated_without_one(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **more: Any) -> Any:
        pytest.fail("nothing is trained here: a process of its own would only wait for weights")

    monkeypatch.setattr(build_sampler, "start_sampler", refuse)
    table = {**short(tiny_recipe, "process"), "model": {"path": str(tiny_folder(tmp_path))}}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(resolve(table, (), where="test")))
    plans, misfits = plan_recipe(recipe, gpu="h200")
    assert (len(plans), misfits) == (1, [])
    greedy, *_ = evaluate_checkpoint(tmp_path / "tiny", recipe)
    assert greedy.num_prompts == 8


def tiny_folder(folder: Path) -> Path:
    shape = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 32, "context": 32}
    return make_tiny_model(folder / "tiny", **shape, alphabet="abcdefghijklmnopqrstuvwxyz", seed=0)


@pytest.mark.heavy
def test_a_synchronous_run_through_a_real_process_has_the_same_bits(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    here = run(short(tiny_recipe, "here", numerics="exact"), tmp_path / "here")
    assert run(short(tiny_recipe, "process", numerics="exact"), tmp_path / "process") == here


def test_threads_are_given_back_when_the_run_is_over(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_sampler, "start_sampler", serve_in_a_thread)
    table, before, seen = short(tiny_recipe, "process", threads=1), torch.get_num_threads(), []
    table["stage"][0] |= {"steps": 1, "rollout": {"groups_per_step": 2, "group_size": 2, "max_staleness": 1}}
    share = build_sampler.share_threads
    monkeypatch.setattr(
        build_sampler, "share_threads", lambda total, *args, **more: seen.append(args) or share(3, *args, **more)
    )
    set_threads, asked = torch.set_num_threads, []
    monkeypatch.setattr(torch, "set_num_threads", lambda number: asked.append(number) or set_threads(1))
    training.train_stages(resolve(table, (), where="test"), run=tmp_path / "run")
    set_threads(before)
    assert seen == [(1,)]
    assert sorted(asked) == sorted([1, 2, before]), "the sampler's, the trainer's, and those of before"
    assert asked[-1] == before


def test_an_objective_with_opponents_is_refused_by_name(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    table = short(tiny_recipe, "process")
    table["stage"] = [{"kind": "preference", "steps": 1, "objective": {"preset": "nash_md"}}]
    with pytest.raises(UserError, match=r'engine\.place="process" cannot draw for an objective with opponents'):
        training.train_stages(resolve(table, (), where="test"), run=tmp_path / "run")


@pytest.mark.parametrize(
    ("engine", "complaint"),
    [
        (
            {"place": "process", "kind": "sglang", "address": "http://127.0.0.1:30000"},
            'place = "process" starts samplers, and a server of kind "sglang" is started by somebody else',
        ),
        ({"threads": 2}, "threads are those of a sampler process"),
        ({"place": "process", "threads": 0}, "at least 1"),
        ({"tensor_parallel": 2}, 'tensor_parallel is vLLM\'s: set kind = "vllm"'),
        (SERVER | {"steps_per_sync": 4}, "steps_per_sync is what a server is started with"),
        (SERVER | {"kv_after_load": "recompute"}, "kv_after_load is what a server is started with"),
        (SERVER | {"graphs": False}, "graphs is what a server is started with"),
        (SERVER | {"tokens_per_step": 64}, "tokens_per_step is what a server is started with"),
        ({"kind": "vllm", "steps_per_sync": 4}, "steps_per_sync is not vLLM's"),
        ({"key_variable": "KEY"}, "key_variable is for SGLang servers"),
    ],
)
def test_what_cannot_act_is_refused(engine: dict[str, Any], complaint: str, tiny_recipe: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=complaint):
        resolve({**tiny_recipe, "engine": engine}, (), where="test")


def test_settings_of_the_cluster_hold_for_sglang_servers_too(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ["http://127.0.0.1:1", "http://127.0.0.1:2/"]
    monkeypatch.setenv("SERVERS_KEY", "not-a-real-key")
    tiny_recipe["engine"] = {"kind": "sglang", "address": addresses, "key_variable": "SERVERS_KEY"}
    tiny_recipe["cluster"] = {"max_restarts": 7, "silent_seconds": 3.0}
    config = resolve(tiny_recipe, (), where="test")[0]
    assert resolve(tiny_recipe, ("engine.address=http://127.0.0.1:1",), where="test")[0].engine.addresses == (
        "http://127.0.0.1:1",
    )
    fleet = build_sampler._servers(config, None, tmp_path, build_sampler.Hosting())
    assert fleet._settings == FleetSettings(max_restarts=7, silent_seconds=3.0, feeds_late=True)
    members: list[Any] = [place.sampler for place in fleet._places]
    assert [member.name for member in members] == ["SGLang at http://127.0.0.1:1", "SGLang at http://127.0.0.1:2"]
    assert {member._engine._settings.control_seconds for member in members} == {3.0}
    assert {member._engine._client._http.headers["authorization"] for member in members} == {"Bearer not-a-real-key"}
    assert "not-a-real-key" not in repr(members[0]._engine._settings)
    asyncio.run(fleet.close())


class InPlaceOfVllm(WrappedSampler):
    """Temper's own engine where an order of vLLM is carried out. It is lost with one of its requests."""

    asked, lost_with = 0, 60

    def __init__(self, settings: VllmSettings) -> None:
        self.digests = self._open(settings).digests

    def _open(self, settings: VllmSettings) -> LocalEngine:
        size = size_engine(
            seed=settings.seed, max_running=settings.max_running, max_length=settings.max_length,
            kv_tokens=settings.kv_tokens, tokens_per_step=settings.tokens_per_step,
        )  # fmt: skip
        told = {"numerics": "fast", "weights": "model", "settings": size}
        engine = open_engine(
            LocalOrder(folder=str(settings.folder), dtype=settings.dtype, device=settings.device, **told)  # type: ignore[arg-type]
        )
        super().__init__(engine)
        return engine

    async def start(self) -> None:
        """It was opened."""

    def so_far(self, least: Any) -> dict[str, Completion]:
        return {}

    async def generate(self, request: Request) -> Completion:
        InPlaceOfVllm.asked += 1
        if InPlaceOfVllm.asked == self.lost_with:
            raise EngineLost("vLLM made no step")
        return await super().generate(request)


def test_a_run_with_two_samplers_of_vllm_goes_on_when_the_engine_of_one_is_lost(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")  # an order sets them, here for all of this process
    monkeypatch.setattr(vllm_order, "VllmEngine", InPlaceOfVllm)
    monkeypatch.setattr(InPlaceOfVllm, "asked", 0)
    orders = []

    def start(order: str, *shared: Any, **more: Any) -> ProcessSampler:
        orders.append(read_order(order))
        return serve_in_a_thread(order, *shared, **more)

    monkeypatch.setattr(build_sampler, "start_sampler", start)
    table = {**short(tiny_recipe, "process", kind="vllm"), "cluster": {"samplers": 2, "silent_seconds": 50.0}}
    table["stage"][0]["steps"] = 4
    training.train_stages(resolve(table, (), where="test"), run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        assert reader.is_finished
        restarts, reissued = (reader.metric(f"sys/{name}") for name in ("sampler_restarts", "reissued"))
    assert [sum(point.value or 0 for point in each) > 0 for each in (restarts, reissued)] == [True, True]
    assert [order.kind for order in orders] == ["vllm"] * 3, "two, and one in place of the lost one"
    assert orders[0].settings.answer_seconds == 50.0, "a silent vLLM is a silent sampler"


def test_samplers_of_vllm_are_refused_where_ray_would_start_them(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def found(*_: Any) -> Iterator[object]:
        yield object()

    monkeypatch.setattr(ranks, "_ray", found)
    table = {**short(tiny_recipe, "process", kind="vllm"), "cluster": {"place": "ray"}}
    with pytest.raises(UserError, match=r'cluster.place = "ray" starts samplers with Temper\'s own engine alone'):
        training.train_stages(resolve(table, (), where="test"), run=tmp_path / "run")


def test_ranks_of_vllm_are_as_many_as_the_recipe_says_and_share_the_heads(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_engine: VllmEngine, settings: VllmSettings) -> None:
        raise UserError(f"started with {settings.tensor_parallel}")

    monkeypatch.setattr(VllmEngine, "__init__", stop)
    table = {**tiny_recipe, "engine": {"kind": "vllm", "tensor_parallel": 2}}
    with pytest.raises(UserError, match="does not divide the 1 heads for keys and values"):
        training.train_stages(resolve(table, (), where="test"), run=tmp_path / "one head")
    with pytest.raises(UserError, match="started with 2"):
        training.train_stages(resolve(table, ("model.new.kv_heads=2",), where="test"), run=tmp_path / "two heads")


def test_a_cache_that_is_too_small_for_vllm_is_refused_and_not_made_larger_without_a_word(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_engine: VllmEngine, settings: VllmSettings) -> None:
        raise UserError(f"started with {settings.kv_tokens}")

    monkeypatch.setattr(VllmEngine, "__init__", stop)
    table = {**tiny_recipe, "engine": {"kind": "vllm"}}
    for asked, told in (("200", "kv_tokens=200 is less than vLLM needs on a CPU"), ("4096", "started with")):
        with pytest.raises(UserError, match=told):
            training.train_stages(
                resolve(table, (f"engine.kv_tokens={asked}",), where="test"), run=tmp_path / f"run {asked}"
            )
