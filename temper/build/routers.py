"""What a recipe asks of the routers of its models, and of their replay, held against what its stages and models have.

Owns: that question for all stages, before the first begins. Refuses: models that are not on this machine yet: those are
asked again when they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from temper.build.models import pick_device
from temper.build.objective import resolve_objective
from temper.config import FIRST, RunConfig
from temper.errors import UserError
from temper.models.experts.balance import BalanceSettings, require_balance, require_biases, require_routers
from temper.models.experts.routes import require_routes
from temper.models.experts.routing import EXPERT_FAMILIES
from temper.models.load import read_config
from temper.objectives import Objective, PolicyObjective
from temper.stages.kinds import kind_of
from temper.trainer.passes.routers import require_softmax_routers

STAGE = "stage:"


def check_routers(stages: Sequence[RunConfig], objectives: Sequence[Objective], first: Path | None = None) -> None:
    """Raises UserError for a setting about routers that the stages or their models cannot follow, and for one that does
    nothing in any of them. first: the directory of the first model, where it is known; else a model on the hub, which
    is not fetched for this, is taken to have what is asked for."""
    if not any(map(_asks_of_routers, stages, objectives)):
        return
    models = _models(stages, first)
    for number, (config, objective, model) in enumerate(zip(stages, objectives, models, strict=True), start=1):
        try:
            _check_stage(config, objective, model)
        except UserError as error:
            if len(stages) == 1:
                raise
            raise UserError(f"stage {number} ({config.stage}): {error}") from error
    pairs = list(zip(stages, objectives, strict=True))
    _require_replay(pairs)
    _require_balancing(pairs)


def check_first_model(stages: Sequence[RunConfig], first: Path) -> None:
    """The same, once the first model is on this machine."""
    check_routers(stages, [resolve_objective(config) for config in stages], first)


def may_replay(config: RunConfig, objective: Objective) -> bool:
    """Whether a stage may train on what its policy draws. Of pairs only their data says whether they are given."""
    kind = kind_of(config)
    if not kind.trains or config.is_recorded or kind.reading.share_sampled(objective, ()) == 0:
        return False
    return bool(config.reward) or not kind.may_choose  # pairs that nobody judges are given


def require_telling(config: RunConfig) -> None:
    """Raises UserError for an engine that does not tell its routes."""
    if config.engine.kind == "vllm" and pick_device(config.model.device).type == "cpu":
        raise UserError(
            "model.replay_routes: vLLM tells its routes on a GPU alone, from its model runner V2. Use engine.kind = "
            '"local", or an objective over sequences, such as gspo, that needs no routes'
        )


def require_settings(config: RunConfig, objective: Objective) -> None:
    """Raises UserError for settings of routers that a stage cannot follow, whatever its model is."""
    routers = config.model.routers
    if routers is None:
        return
    if config.model.lora is not None:
        raise UserError("model.routers: with model.lora routers are frozen already. Leave one of both out")
    if routers.bias and isinstance(objective, PolicyObjective) and objective.step is not None:
        raise UserError(f'model.routers.bias: objective "{objective.name}" takes steps of its own. Leave bias out')


def _asks_of_routers(config: RunConfig, objective: Objective) -> bool:
    model = config.model
    is_replayed = model.replay_routes is not False
    return is_replayed or model.routers is not None or config.cluster.experts or "router" in objective.needs


def _check_stage(config: RunConfig, objective: Objective, model: Any) -> None:
    """model: the configuration of the one that it starts from; None: not known yet."""
    require_settings(config, objective)
    replays = config.model.replay_routes is not False and may_replay(config, objective)
    # Whether pairs are drawn, their data says: of a stage that draws for sure it is asked now.
    if replays and not kind_of(config).reading.compares:
        require_telling(config)
    if model is None or not kind_of(config).trains:
        return
    if config.cluster.experts and model.model_type not in EXPERT_FAMILIES:
        raise UserError("cluster.experts: this is a model without experts. Use cluster.experts = false")
    if (routers := config.model.routers) is not None:
        require_routers(model)
        require_balance(model, BalanceSettings(balance=routers.balance, z=routers.z))
        require_biases(model, routers.bias)
    if replays:
        require_routes(model)
    if "router" in objective.needs:
        require_softmax_routers(model, objective.name)


def _require_replay(stages: Sequence[tuple[RunConfig, Objective]]) -> None:
    """Raises UserError where routes, or those of the reference, are replayed in no stage that asks for it."""
    asking = [(config, objective) for config, objective in stages if config.model.replay_routes is not False]
    replaying = [(config, objective) for config, objective in asking if may_replay(config, objective)]
    if asking and not replaying:
        kinds = ", ".join(dict.fromkeys(config.stage for config, _ in asking))
        raise UserError(
            f"model.replay_routes would do nothing: it replays routes of answers that the policy has just drawn, and "
            f"no stage with it trains on such ({kinds}). Leave it out, or set it in a stage of kind rl"
        )
    wanting = [objective for config, objective in replaying if config.model.replay_routes == "reference"]
    if wanting and not any("reference" in objective.needs for objective in wanting):
        names = ", ".join(dict.fromkeys(objective.name for objective in wanting))
        raise UserError(
            f'model.replay_routes = "reference": there is no reference (objective {names}) whose routes could be '
            f"replayed. Use model.replay_routes = true"
        )


def _require_balancing(stages: Sequence[tuple[RunConfig, Objective]]) -> None:
    """Raises UserError where routers are trained or frozen, balanced or moved in no stage that asks for it."""
    asking = [(config, objective) for config, objective in stages if config.model.routers is not None]
    if not asking:
        return
    if not any(kind_of(config).trains for config, _ in asking):
        raise UserError(
            f"model.routers would do nothing: a stage of kind {asking[0][0].stage} trains nothing. Leave it out"
        )
    for key in ("balance", "z", "bias"):
        own = [(config, objective) for config, objective in asking if getattr(config.model.routers, key)]
        # A model that scores is trained by a pass of its own, which looks at no router.
        if own and all("scores" in objective.needs or not kind_of(config).trains for config, objective in own):
            raise UserError(
                f"model.routers.{key} would do nothing: routers of a reward model are not looked at. Leave it out, or "
                f"use model.routers = {{frozen = true}}"
            )


def _models(stages: Sequence[RunConfig], first: Path | None) -> list[Any]:
    """The configuration of the model that each stage starts from; None where it is not on this machine."""
    own = stages[0].model
    policy = _made(own.new.experts) if own.new is not None else _read(Path(own.path).expanduser())
    if first is not None:
        policy = _read(first)
    left, found = {FIRST: policy}, []
    for config in stages:
        model = policy
        if config.model.path not in ("", own.path):
            path = config.model.path
            model = left.get(path.removeprefix(STAGE)) if path.startswith(STAGE) else _read(Path(path).expanduser())
        found.append(model)
        kind = kind_of(config)
        left[kind.name] = model
        if kind.leaves == "policy":
            policy = model
    return found


def _made(experts: int) -> Any:
    """As models/tiny.py makes them."""
    return AutoConfig.for_model("qwen3_moe" if experts else "llama")


def _read(folder: Path) -> Any:
    return read_config(folder).get_text_config() if (folder / "config.json").is_file() else None
