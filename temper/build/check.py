"""What can be said against a recipe before any data or weights are read.

Owns: rules that need to know the kinds of stages, and the order of the checks. Refuses: keys and values (config/), what
goes together in an objective (objective.py), and data (stages/reading/).
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.build.agents import check_agent, check_judge
from temper.build.environments import check_cost, check_place
from temper.build.objective import resolve_objective
from temper.build.routers import check_routers
from temper.config import DATA_KEYS, FIRST, Reference, RunConfig, references
from temper.config.cluster import ClusterConfig
from temper.errors import UserError, did_you_mean
from temper.models.lora.targets import EXPERTS
from temper.objectives import Objective, PolicyObjective
from temper.rollout.controls.registry import read_controls
from temper.runs.alarms.rules import configure
from temper.stages.kinds import KINDS, kind_of
from temper.stages.reading.choosing import check_choosers
from temper.stages.recorded import check_recorded
from temper.stages.sampling import setting_of


def check_stages(stages: Sequence[RunConfig]) -> list[Objective]:
    """The objectives of a recipe's stages. Raises UserError for every mistake that shows without data and models: what
    is wrong with the last stage must not wait until that begins."""
    objectives = []
    for number, config in enumerate(stages, start=1):
        try:
            objectives.append(check_stage(config))
        except UserError as error:
            if len(stages) == 1:
                raise
            raise UserError(f"stage {number} ({config.stage}): {error}") from error
    _check_references(stages)
    check_routers(stages, objectives)
    _check_cluster([config.cluster for config in stages])
    if stages[0].cluster.is_on_ray and not any(_has_processes(config) for config in stages):
        raise UserError(
            "a Ray cluster places sampler processes and trainers, and there are none (samplers by address stand where "
            'they are): set engine.place = "process" or cluster.trainers'
        )
    return objectives


def _check_cluster(clusters: Sequence[ClusterConfig]) -> None:
    """Trainers begin once, and stay from the first stage to the last."""
    said_once = ["place", "address", "trainers", "parts", "experts", "context", "tensor", "rank_seconds"]
    if clusters[0].trainers > 1:
        said_once.append("max_restarts")  # of all of them; of samplers each stage may have its own
    differing = [name for name in said_once if len({getattr(cluster, name) for cluster in clusters}) > 1]
    if differing:
        raise UserError(
            f"{', '.join(f'cluster.{name}' for name in differing)}: those of all stages. Say it once, outside [[stage]]"
        )


def _has_processes(config: RunConfig) -> bool:
    """Whether the run starts any: samplers by address are somebody else's."""
    has_samplers = config.engine.place == "process" and not config.cluster.sampler_addresses
    return has_samplers or config.cluster.trainers > 1


def check_stage(config: RunConfig) -> Objective:
    """The objective of one stage."""
    kind = kind_of(config)
    configure(config.alarms)
    read_controls(config.rollout.controls, setting_of(config))
    # Held-out pairs need no judge; whether they are pairs, data says.
    must_judge = bool(config.heldout) and kind.reading.compares is None
    is_judged_here = kind.is_rewarded and not config.is_recorded
    if (is_judged_here or must_judge) and not config.reward:
        raise UserError('no reward: add a [[reward]] table, e.g. kind = "exact"')
    check_agent(config)
    check_judge(config)
    check_place(config.env)
    check_cost(config)
    objective = resolve_objective(config)
    kind.check(config, objective)
    if config.is_recorded:
        if kind.reading.needs_of_records is None:
            raise UserError(
                f"a stage of kind {config.stage} does not train on records. Use kind rl, preference, or rejection, "
                f'whose rows a stage of kind sft reads: train = [{{path = "stage:rejection"}}]'
            )
        check_recorded(config, objective)
    check_choosers(config, is_judged=kind.may_choose)
    if config.model.lora is not None and config.model.lora.base == "4bit":
        _check_four_bits(config, objective)
    if config.cluster.parts:
        _check_parts(config, objective)
    if config.cluster.together > 1:
        _check_together(config, objective)
    if config.cluster.tensor > 1:
        _check_tensor(config)
    if config.cluster.experts and not config.cluster.parts:
        raise UserError("cluster.experts: all but the experts is held in parts. Set cluster.parts = true, too")
    if config.cluster.experts and config.model.lora is not None:
        raise UserError("cluster.experts: an adapter leaves experts as they are. Leave out one of both")
    return objective


def _check_four_bits(config: RunConfig, objective: Objective) -> None:
    if (problem := problem_with_four_bits(config, objective)) is not None:
        raise UserError(f'model.lora.base="4bit": {problem}, or use base = "full"')


def problem_with_four_bits(config: RunConfig, objective: Objective) -> str | None:
    """What cannot be done over a base in 4 bits, and what to do; None: all can. Its family is looked at when it is
    read."""
    problem = None
    if config.engine.kind != "local":
        problem = f'engine.kind="{config.engine.kind}" reads merged weights in full. Use engine.kind="local"'
    elif config.engine.weights == "fp8":
        problem = 'sampler and trainer share the base as it is held. Leave out engine.weights = "fp8"'
    elif objective.reference is not None:
        problem = "a reference that moves needs weights of its own. Leave out objective.reference"
    elif "scores" in objective.needs:
        problem = "a reward model is read in full by the stages that use it. Train it over the full model"
    return problem


def _check_parts(config: RunConfig, objective: Objective) -> None:
    if (problem := problem_with_parts(config, objective)) is not None:
        raise UserError(f"cluster.parts: {problem}, or use cluster.parts = false")


def problem_with_parts(config: RunConfig, objective: Objective) -> str | None:
    """What cannot be done with a model whose layers are shared out over trainers, and what to do; None: all can."""
    problem = None
    if config.engine.kind == "local" and config.engine.place == "here":
        problem = 'this process does not hold a whole model to draw with. Set engine.place = "process"'
    elif config.model.lora is not None and config.model.lora.base == "4bit":
        problem = 'a base in 4 bits is held whole. Use model.lora.base = "full"'
    elif config.model.lora is not None and EXPERTS in config.model.lora.targets:
        problem = 'adapters on experts are held whole. Leave "experts" out of model.lora.targets'
    elif config.model.offload:
        problem = "a part of a reference stays where it is. Leave out model.offload"
    elif config.optim.states == "8bit":
        problem = 'a block of 8-bit states may lie on two trainers. Use optim.states = "bfloat16"'
    elif isinstance(objective, PolicyObjective) and objective.step is not None:
        problem = f'objective "{objective.name}" takes steps of its own, over whole weights. Use another objective'
    elif len(config.model.taught_by) > 1:
        problem = "trainers would call their teachers in different orders. Use one model.teacher"
    return problem


WHOLE_ROWS = {
    "scores": "a reward model reads whole rows",
    "values": "a critic reads whole rows",
    "noise": "noise on embeddings is drawn for whole rows",
    "uniform": "label smoothing reads states of all tokens",
    "divergence": "whole distributions are compared with states of all tokens",
    "teacher_top_k": "a teacher's most likely tokens are read from states of all tokens",
    "policy_top_k": "the policy's most likely tokens are read from states of all tokens",
    "router": "routers are read from states of all tokens",
}
"""By what an objective needs: why trainers do not go over rows together for it."""


def _check_together(config: RunConfig, objective: Objective) -> None:
    """Raises UserError for what looks at whole rows elsewhere than in attention and the loss."""
    cluster, sampling = config.cluster, config.sampling
    problem = next((why for need, why in WHOLE_ROWS.items() if need in objective.needs), None)
    if problem is not None:
        problem = f'{problem} (objective "{objective.name}"). Use another objective'
    elif isinstance(objective, PolicyObjective) and objective.step is not None:
        problem = f'objective "{objective.name}" takes steps of its own, over whole rows. Use another objective'
    elif cluster.experts or config.model.replay_routes or config.model.routers is not None:
        problem = "routers are read from whole rows. Leave out cluster.experts, model.replay_routes and model.routers"
    elif sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        problem = (
            "sets of tokens that could be drawn are kept for whole rows. Leave out sampling.top_k, top_p and min_p"
        )
    if problem is not None:
        raise UserError(f"{cluster.together_key}: {problem}, or use {cluster.together_key} = 1")


def _check_tensor(config: RunConfig) -> None:
    """Raises UserError for what slices of layers are not made for. The model itself is looked at when it is read."""
    problem = None
    if config.cluster.context > 1:
        problem = "trainers that compute layers together go over rows together already. Leave out cluster.context"
    elif not config.cluster.parts:
        problem = "all but matrices of layers is held in parts. Set cluster.parts = true, too"
    elif config.model.lora is not None:
        problem = "an adapter is not shared out by heads and columns. Leave out model.lora"
    elif config.engine.numerics == "exact":
        problem = 'sums over trainers never have the bits of a sampler. Use engine.numerics = "fast"'
    if problem is not None:
        raise UserError(f"cluster.tensor: {problem}, or use cluster.tensor = 1")


def _check_references(stages: Sequence[RunConfig]) -> None:
    """Raises UserError when a stage reads from one that does not come before it, or from one that leaves nothing of
    the sort, and when a later stage asks for a new model."""
    earlier = [FIRST]
    for number, config in enumerate(stages, start=1):
        where = f"stage {number} ({config.stage})"
        for reference in references(config):
            if reference.kind not in earlier:
                raise UserError(
                    f'{where}: {reference.key} is "stage:{reference.kind}", and no stage before it is of that kind.'
                    f"{did_you_mean(reference.kind, earlier)} Before it: {', '.join(dict.fromkeys(earlier))}."
                )
            if problem := _misuse(config, reference):
                raise UserError(f'{where}: {reference.key} is "stage:{reference.kind}", {problem}')
        if config.model.new not in (None, stages[0].model.new):
            raise UserError(f"{where}: only the first stage can make a model, and model.new is another one here")
        earlier.append(config.stage)


def _misuse(config: RunConfig, reference: Reference) -> str | None:
    """Why what that stage leaves cannot be read here; None: it can."""
    left = "policy" if reference.kind == FIRST else KINDS[reference.kind].leaves
    if (left == "rows") != (reference.key in DATA_KEYS):
        makers = " or ".join(kind.name for kind in KINDS.values() if kind.leaves == "rows")
        return (
            "which leaves rows and no model. Give a stage that trains one"
            if left == "rows"
            else f"which leaves a model and no rows. Rows come from a stage of kind {makers}"
        )
    if left == "scorer" and reference.key.startswith("model.") and kind_of(config).leaves != "scorer":
        return "which leaves a reward model, and that can neither answer nor teach. Give the stage before it"
    return None
