"""Who draws the tokens of a stage.

Owns: choosing the engine and its size. Refuses: combinations that an engine cannot honour.
"""

from __future__ import annotations

import copy
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from temper.asking.endpoint import read_key
from temper.build.agents import may_stop_at_text
from temper.build.memory import enough_kv_tokens
from temper.build.models import adapter_settings
from temper.build.policy import size_engine
from temper.build.routers import require_telling
from temper.cluster.addresses import Visitor, reach_sampler
from temper.cluster.devices import sampler_devices, sampler_gpus
from temper.cluster.handshake import KEY_VARIABLE
from temper.cluster.ray import RayPlace
from temper.cluster.samplers import start_sampler
from temper.cluster.threads import Threads, share_threads
from temper.config import RunConfig
from temper.config.cluster import ClusterConfig
from temper.config.memory import settled_choice
from temper.engine.fleet.fleet import Fleet, FleetSettings
from temper.engine.fleet.kept import KeptFleet
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.mixture import Opponent
from temper.engine.none import NoSampler
from temper.engine.pieces import Decode
from temper.engine.process.client import ProcessSampler
from temper.engine.process.description import describe_model
from temper.engine.process.order import LocalOrder
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.engine.sampler_model import sampler_model
from temper.engine.sglang.checkpoints import Checkpoints
from temper.engine.sglang.engine import IDLE_SECONDS, UPDATE_SECONDS, SglangSettings
from temper.engine.sglang.member import SglangMember
from temper.engine.told_routes import ToldRoutes
from temper.engine.vllm.engine import VllmEngine
from temper.engine.vllm.layout import EXPERT_FAMILIES
from temper.engine.vllm.order import VllmOrder
from temper.engine.vllm.start import VllmSettings, least_kv_tokens
from temper.errors import UserError
from temper.models.decoder import is_dense, lay_end_to_end
from temper.models.experts.routing import has_experts
from temper.models.float8.layers import float8_names
from temper.models.lora.materialize import whole
from temper.objectives import DirectLoss, Objective
from temper.protocols import Sampler
from temper.stages.reading.data import StageData
from temper.terminal import print_line
from temper.trainer.ranks.sums import rank_and_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """What sampler processes need beside a recipe."""

    note: Callable[[str], None] = print_line
    """Told what becomes of them."""
    ray: RayPlace | None = None
    """Where they are started; None: on this machine."""
    kept: KeptFleet = field(default_factory=KeptFleet)
    """Where those are that outlived the trainers before these."""


def make_sampler(
    config: RunConfig,
    objective: Objective,
    data: StageData,
    model: Any,
    model_folder: Path,
    hosting: Hosting = Hosting(),
) -> tuple[Sampler, torch.nn.Module | None]:
    """The sampler, and the module whose weights it holds, when that is in this process."""
    if "scores" in objective.needs:
        return NoSampler(), None
    kind = config.engine.kind
    if kind != "local" and config.engine.numerics == "exact":
        raise UserError(f'engine.numerics="exact" needs engine.kind="local", not "{config.engine.kind}"')
    replays_routes = config.model.replay_routes is not False and data.is_rolling
    if replays_routes:
        require_telling(config)
    if kind == "sglang":
        return _servers(config, ToldRoutes.of(model) if replays_routes else None, model_folder, hosting), None
    if config.engine.place == "process" and (data.is_rolling or config.cluster.parts):
        return _in_processes(config, objective, data, model, model_folder, hosting), None
    if kind == "vllm":
        return VllmEngine(_vllm_settings(config, data, model, model_folder, is_here=True)), None
    drawing = sampler_model(
        model,
        weights=config.engine.weights if data.is_rolling else "model",
        runs_ahead=config.rollout.max_staleness > 0 and data.is_rolling,
    )
    decode = data.renderer.decode if may_stop_at_text(config) else None
    return LocalEngine(drawing, _engine_settings(config, data), decode=decode), drawing


def make_opponent(
    config: RunConfig, objective: Objective, data: StageData, reference: torch.nn.Module | None, drawing: Any
) -> Opponent | None:
    """Whom a stage that samples compares its policy with; None: nobody. drawing: what its sampler draws with."""
    share = objective.loss.opponent_share if isinstance(objective, DirectLoss) else None
    if share is None or not data.is_rolling:
        return None
    assert reference is not None, "an objective with opponents needs a reference"
    if config.engine.weights == "fp8":
        raise UserError(
            'engine.weights="fp8" cannot draw for an objective with opponents. Use engine.weights = "model"'
        )
    # Used while the trainer uses it, or on the CPU between passes: then the opponent needs one of its own.
    is_shared = config.rollout.max_staleness == 0 and not config.model.offload
    own = reference
    if not is_shared:
        own = copy.deepcopy(reference).to(next(drawing.parameters()).device)
        lay_end_to_end(own)
    return Opponent(
        drawing,
        own,
        _engine_settings(config, data),
        share=share,
        decode=data.renderer.decode if may_stop_at_text(config) else None,
        follows=None if is_shared or objective.reference is None else reference,
    )


def _servers(config: RunConfig, routes: ToldRoutes | None, model_folder: Path, hosting: Hosting) -> Fleet:
    """SGLang servers, one or several: they are there already, and may come back when they were lost."""
    cluster, addresses, silent_seconds = config.cluster, config.engine.addresses, config.cluster.silent_seconds
    settings = SglangSettings(
        seed=config.seed,
        control_seconds=silent_seconds,
        update_seconds=max(UPDATE_SECONDS, silent_seconds),
        idle_seconds=max(IDLE_SECONDS, silent_seconds),
        routes=routes,
        api_key=read_key(config.engine.key_variable),
    )
    # What a server is fed late it reads from the disk, whatever the trainer has done since.
    fleet_settings = FleetSettings(max_restarts=cluster.max_restarts, silent_seconds=silent_seconds, feeds_late=True)

    def make() -> Fleet:
        # A folder of its own: another run may publish the same weights, and remove them.
        folder = Path(tempfile.gettempdir()) / "temper-published" / secrets.token_hex(8)
        checkpoints = Checkpoints(like=whole(model_folder), folder=folder)
        return Fleet(
            lambda place: SglangMember(addresses[place], settings, checkpoints),
            len(addresses),
            fleet_settings,
            note=hosting.note,
            closed=checkpoints.close,
        )

    return hosting.kept.take((addresses, str(model_folder), settings, fleet_settings), make)


def _in_processes(
    config: RunConfig, objective: Objective, data: StageData, model: Any, folder: Path, hosting: Hosting
) -> Sampler:
    """Opens there what would be opened here, and shares out the threads until it is closed."""
    if isinstance(objective, DirectLoss) and objective.loss.opponent_share is not None:
        raise UserError(
            'engine.place="process" cannot draw for an objective with opponents, which share the weights of the '
            'trainer\'s process. Use engine.place = "here"'
        )
    parameter, is_vllm = next(model.parameters()), config.engine.kind == "vllm"
    threads = _threads(config, parameter.is_cuda)
    make_orders = _vllm_orders if is_vllm else _local_orders
    orders = tuple(order.to_json() for order in make_orders(config, data, model, folder, threads.sampler, hosting))
    is_copied = (is_vllm or not parameter.is_cuda) and not (hosting.ray or config.cluster.sampler_addresses)
    settings = FleetSettings(
        max_restarts=config.cluster.max_restarts,
        silent_seconds=config.cluster.silent_seconds,
        feeds_late=feeds_late(config, is_copied=is_copied),
        quantized=float8_names(model) if config.engine.weights == "fp8" and is_dense(model) else frozenset(),
    )
    environment = {"OMP_NUM_THREADS": str(threads.sampler)}
    # vLLM's own processes take weights from the host.
    start = partial(
        _start_fleet, config.cluster, orders, settings, hosting, environment, data.renderer.decode, on_host=is_vllm
    )
    fleet = hosting.kept.take((orders, config.cluster, settings), start)
    torch.set_num_threads(threads.trainer)
    return fleet


def feeds_late(config: RunConfig, *, is_copied: bool) -> bool:
    """Whether a sampler that comes back between two publications may be fed the last one. Where that is not copied it
    gets the trainer's own tensors. Whole ones may be on their way to the next version; then they have other sums, by
    which the fleet knows. Parts are gathered by all trainers, who have something else to do."""
    return is_copied or config.rollout.max_staleness == 0 or not config.cluster.parts


def _threads(config: RunConfig, is_on_gpu: bool) -> Threads:
    before, wanted = torch.get_num_threads(), config.engine.threads
    if config.cluster.sampler_addresses:  # other machines: 0 is what is chosen there
        return Threads(sampler=0 if wanted == "auto" else wanted, trainer=before)
    if is_on_gpu:
        return Threads(sampler=before, trainer=before)
    takes_turns = config.rollout.max_staleness == 0
    return share_threads(before, wanted, takes_turns=takes_turns, num_samplers=config.cluster.num_samplers)


def _local_orders(
    config: RunConfig, data: StageData, model: Any, folder: Path, num_threads: int, hosting: Hosting
) -> list[LocalOrder]:
    lora, parameter, num = config.model.lora, next(model.parameters()), config.cluster.num_samplers
    order = LocalOrder(
        folder=str(folder.resolve()),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        numerics=config.engine.numerics,
        weights=config.engine.weights,
        settings=_engine_settings(config, data),
        four_bit_adapter=adapter_settings(config) if lora is not None and lora.base == "4bit" else None,
        has_stop_texts=may_stop_at_text(config),
        num_threads=num_threads,
        description=_description(config, model, folder),
    )
    gpus = torch.cuda.device_count() if parameter.is_cuda else 0
    devices = sampler_devices(order.device, num, gpus, rank_and_world()[1])
    if hosting.ray is not None or config.cluster.sampler_addresses:
        devices = [parameter.device.type] * num  # each sees the GPU that it was given, and no other
    return [replace(order, device=device) for device in devices]


def _vllm_orders(
    config: RunConfig, data: StageData, model: Any, folder: Path, num_threads: int, hosting: Hosting
) -> list[VllmOrder]:
    if hosting.ray is not None:
        raise UserError(
            'cluster.place = "ray" starts samplers with Temper\'s own engine alone. For engine.kind = "vllm" use '
            'cluster.place = "processes", or start `temper sampler` elsewhere and give cluster.samplers its addresses'
        )
    parameter, num = next(model.parameters()), config.cluster.num_samplers
    is_elsewhere = bool(config.cluster.sampler_addresses)
    settings = replace(
        _vllm_settings(config, data, model, folder, is_here=not is_elsewhere),
        answer_seconds=config.cluster.silent_seconds,
    )
    order = VllmOrder(
        settings=replace(settings, folder=settings.folder.resolve()),
        num_threads=0 if parameter.is_cuda else num_threads,
        description=_description(config, model, settings.folder),
    )
    if is_elsewhere or not parameter.is_cuda:
        return [order] * num
    gpus, each = torch.cuda.device_count(), config.engine.tensor_parallel
    taken = sampler_gpus(str(parameter.device), num, gpus, rank_and_world()[1], each)
    return [replace(order, gpus=group) for group in taken]


def _description(config: RunConfig, model: Any, folder: Path) -> dict[str, Any] | None:
    return describe_model(model.config, folder) if config.cluster.sampler_addresses else None


def _start_fleet(
    cluster: ClusterConfig,
    orders: Sequence[str],
    settings: FleetSettings,
    hosting: Hosting,
    environment: Mapping[str, str],
    decode: Decode,
    *,
    on_host: bool,
) -> Fleet:
    """One process for each order. on_host: they are given weights there, wherever the trainer has them."""
    weights, before = SharedWeights(anonymous_file(), on_host=on_host), torch.get_num_threads()
    addresses = cluster.sampler_addresses
    visitor = Visitor(
        key=os.environ.get(KEY_VARIABLE, ""), run=secrets.token_hex(8), silent_seconds=cluster.silent_seconds
    )

    def start(place: int) -> ProcessSampler:
        if addresses:
            return reach_sampler(addresses[place], orders[place], visitor)
        name = "the sampler process" if len(orders) == 1 else f"sampler process {place + 1} of {len(orders)}"
        if hosting.ray is not None:
            return hosting.ray.start_sampler(place, name, orders[place], environment, cluster.silent_seconds)
        return start_sampler(orders[place], weights, name=name, environment=environment)

    def closed() -> None:
        weights.close()
        # A fleet that outlived its trainers may find more of them given back already.
        torch.set_num_threads(max(before, torch.get_num_threads()))

    try:
        return Fleet(start, len(orders), settings, note=hosting.note, closed=closed, decode=decode)
    except BaseException:
        closed()
        raise


def _vllm_settings(
    config: RunConfig, data: StageData, model: Any, model_folder: Path, *, is_here: bool
) -> VllmSettings:
    """is_here: on this machine."""
    parameter, size = next(model.parameters()), _engine_settings(config, data)
    device: Literal["cpu", "cuda"] = "cuda" if parameter.is_cuda else "cpu"
    _require_vllm_can(config, data, model, model_folder)
    _require_room_in_vllm(config, device, size.max_length)
    ranks = config.engine.tensor_parallel
    if is_here and parameter.is_cuda and torch.cuda.device_count() < ranks:
        raise UserError(f"engine.tensor_parallel={ranks}, and this machine has {torch.cuda.device_count()} GPUs")
    return VllmSettings(
        folder=whole(model_folder),
        seed=config.seed,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=device,
        max_running=size.max_running,
        tokens_per_step=size.tokens_per_step,
        max_length=size.max_length,
        kv_tokens=size.num_blocks * size.block_size,
        kv_after_load=config.engine.kv_after_load,
        cuda_graphs=size.cuda_graphs,
        tensor_parallel=ranks,
        routes=ToldRoutes.of(model) if size.routes else None,
    )


def _require_vllm_can(config: RunConfig, data: StageData, model: Any, folder: Path) -> None:
    """Take over this model, on as many ranks."""
    ranks, heads = config.engine.tensor_parallel, data.shape.num_kv_heads
    if has_experts(model) and (family := model.config.get_text_config().model_type) not in EXPERT_FAMILIES:
        raise UserError(
            f'engine.kind="vllm" cannot take over the experts of {folder}: they are found again there in the '
            f'families {", ".join(EXPERT_FAMILIES)}, and this is a {family}. Use engine.kind = "local"'
        )
    if has_experts(model) and ranks > 1:
        raise UserError(
            f"engine.tensor_parallel: experts of {folder} are found again on one rank of vLLM alone. Use "
            f"engine.tensor_parallel = 1"
        )
    if heads % ranks:
        raise UserError(
            f"engine.tensor_parallel={ranks} does not divide the {heads} heads for keys and values of {folder}. "
            f"Use a divisor of {heads}"
        )


def _require_room_in_vllm(config: RunConfig, device: str, max_length: int) -> None:
    asked, least = config.engine.kv_tokens, least_kv_tokens(device, max_length)
    if isinstance(asked, int) and 0 < asked < least:
        raise UserError(
            f"engine.kv_tokens={asked} is less than vLLM needs on a CPU for sequences of {max_length} tokens: {least}. "
            f'Use so many or more, or "auto"'
        )


def _engine_settings(config: RunConfig, data: StageData) -> EngineSettings:
    engine = config.engine
    settings = size_engine(
        seed=config.seed,
        max_running=engine.max_running,
        max_length=data.shape.max_context,
        kv_tokens=settled_choice(config).kv_tokens or enough_kv_tokens(config, data),
        tokens_per_step=engine.tokens_per_step,
    )
    return replace(
        settings,
        steps_per_sync=engine.steps_per_sync if engine.graphs else 1,
        cuda_graphs=engine.graphs,
        kv_after_load=engine.kv_after_load,
        routes=config.model.replay_routes is not False and data.is_rolling,
    )
