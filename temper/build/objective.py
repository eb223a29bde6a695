"""Which objective a stage trains with, and whether the two fit.

Owns: combinations of a stage and an objective that would train something else than they say.
Refuses: the objectives themselves (objectives/).
"""

from __future__ import annotations

from typing import Any

from temper.build.agents import answers_env
from temper.config import RunConfig
from temper.envs.agents.agent import NAME as AGENT
from temper.errors import UserError
from temper.objectives import DirectLoss, Objective, PolicyObjective, check_objective, resolve
from temper.objectives.advantage.critics import pretraining_steps
from temper.objectives.combinations import SAMPLER_WEIGHTS, corrects_staleness, notices_moving, wants_time_order
from temper.objectives.resolve import REGISTRY
from temper.stages.kinds import kind_of


def resolve_objective(config: RunConfig) -> Objective:
    """The objective of a stage, with the rules that need no data."""
    config = with_sampler_correction(config)
    objective = _resolve_alone(config)
    _require_fit(config, objective)
    check_objective(objective, group_size=config.rollout.group_size)
    if objective.needs & {"teacher", "teacher_top_k", "divergence"} and not config.model.taught_by:
        raise UserError(f"objective {objective.name} needs a teacher. Set model.teacher to a checkpoint directory")
    sampling = config.sampling
    is_truncated = sampling.top_k or sampling.top_p < 1 or sampling.min_p
    if isinstance(objective, PolicyObjective) and objective.step is not None and is_truncated:
        raise UserError(
            f"objective {objective.name} bounds the change of the whole distribution, which a truncated sampler does "
            f"not show. Use sampling.top_k = 0, top_p = 1 and min_p = 0"
        )
    if "step_values" in objective.needs and config.env.name == "agent":
        raise UserError(
            f"objective {objective.name} plays episodes anew from their turns, and an agent that leads its own cannot "
            f"be taken back to one. Use an advantage without step values"
        )
    has_opponent = isinstance(objective, DirectLoss) and objective.loss.opponent_share is not None
    if answers_env(config) and (has_opponent or "step_values" in objective.needs):
        raise UserError(
            f"objective {objective.name} has episodes that the policy does not play from the start: the run cannot "
            f"answer their environments alike. Give env.options.judge the address of a model"
        )
    for check in _CHECKS:
        if (problem := check(config, objective)) is not None:
            raise UserError(problem)
    return objective


def _resolve_alone(config: RunConfig) -> Objective:
    wanted = config.objective
    overrides = {kind: getattr(wanted, kind) for kind in REGISTRY}
    return resolve(wanted.preset or kind_of(config).preset, overrides)


def with_sampler_correction(config: RunConfig) -> RunConfig:
    """The recipe with truncated importance weights written into it, where matrices in fp8 draw for a policy gradient
    that has nothing against it, or whoever was recorded. A recipe that says what corrects, or that nothing does, keeps
    that."""
    is_another = config.engine.weights == "fp8" or config.is_recorded
    if not is_another or config.objective.corrections is not None:
        return config
    objective = _resolve_alone(config)
    if not isinstance(objective, PolicyObjective) or corrects_staleness(objective):
        return config
    own: list[Any] = [{"name": factor.name, **dict(factor.arguments)} for factor in objective.corrections]
    written = config.objective.model_copy(update={"corrections": [*own, "token_tis"]})
    return config.model_copy(update={"objective": written})


def doubts_about(config: RunConfig, objective: Objective) -> list[str]:
    """What a user should know before a stage trains, in sentences; it may be what they want."""
    is_quantized = config.engine.weights == "fp8"
    if not (config.rollout.max_staleness or is_quantized or config.is_recorded) or not kind_of(config).trains:
        return []
    if not isinstance(objective, PolicyObjective) or corrects_staleness(objective):
        return []
    known = ", ".join(sorted(SAMPLER_WEIGHTS | {"opsm"}))
    if config.is_recorded:
        return [
            f"records were drawn by another policy than is trained, and objective {objective.name} has nothing against "
            f"it. Leave objective.corrections out, or name one of {known}"
        ]
    if is_quantized:
        return [
            f'engine.weights="fp8" draws from other weights than are trained, and objective {objective.name} has '
            f"nothing against it. Leave objective.corrections out, or name one of {known}"
        ]
    return [
        f"rollout.max_staleness={config.rollout.max_staleness} trains on samples of older weights, and objective "
        f"{objective.name} compares with the trainer's own policy alone: nothing corrects for their age. Add "
        f'objective.corrections = ["token_tis"] (or one of {known}), take the ratio against the sampler with '
        f'objective.proximal = "behavior", or use a preset made for it: decoupled_ppo, a3po, olmorl, scalerl, prime_rl'
    ]


def _check_critic_steps(config: RunConfig, objective: Objective) -> str | None:
    alone = pretraining_steps(objective)
    if alone and alone >= config.steps:
        return (
            f"objective.critic trains the critic alone for {alone} steps, and the stage has {config.steps}: the policy "
            f"would never be trained. Use more steps, or e.g. objective.critic = {{pretraining_steps = "
            f"{config.steps // 5}}}"
        )
    if config.optim.warmup_steps > config.steps - alone:
        return (
            f"optim.warmup_steps={config.optim.warmup_steps} is more than the {config.steps - alone} steps in which "
            f"the policy is trained; the {alone} before them train the critic alone. Use fewer"
        )
    return None


def _check_reference_rule(config: RunConfig, objective: Objective) -> str | None:
    """A rule whose time never comes would hold the reference still without a word."""
    rule = objective.reference
    if rule is None or 0 < rule.argument("every") < config.steps:
        return None
    patience = dict(rule.arguments).get("patience")
    if patience and config.heldout and config.evaluation.every:
        return None
    waits = " and waits for held-out evaluations, of which there are none on the way" if patience else ""
    return (
        f"objective.reference = {rule} would never move the reference: the stage has {config.steps} steps{waits}. Use "
        f"e.g. objective.reference = {{every = {max(1, config.steps // 4)}}}"
        f'{", or [heldout] with evaluation.every" if patience else ""}; "none" holds it still'
    )


def _check_kl_cov(config: RunConfig, objective: Objective) -> str | None:
    if not isinstance(objective, PolicyObjective):
        return None
    is_own = objective.proximal.name == "current" or (
        objective.proximal.name == "trainer" and config.trainer.updates_of_batch == 1
    )
    if not is_own or all(term.name != "kl_cov" for term in objective.regularizers):
        return None
    return (
        f"objective {objective.name}: kl_cov would do nothing. It pulls back to the policy that the batch started "
        f"with, and with trainer.updates_per_batch=1 that is the policy itself. Use trainer.updates_per_batch = 2 or "
        f'more, or trainer.epochs = 2, with objective.proximal = "trainer"'
    )


def _check_float16(config: RunConfig, objective: Objective) -> str | None:
    if config.model.dtype != "float16" or not isinstance(objective, PolicyObjective):
        return None
    if objective.critic is None and objective.step is None:
        return None
    what = "a critic" if objective.critic is not None else "a step of its own"
    return (
        f"objective {objective.name} has {what}, whose loss is not scaled for float16. Use model.dtype = "
        f'"{"bfloat16" if objective.step is None else "float32"}", or an objective without it, such as grpo'
    )


def _check_epochs(config: RunConfig, objective: Objective) -> str | None:
    """A second pass trains on samples of a policy that the first has left: something must notice."""
    if config.trainer.epochs == 1:
        return None
    start = f"trainer.epochs={config.trainer.epochs} trains on each batch again"
    if not kind_of(config).trains:
        return f"{start}, and a stage of kind {config.stage} trains nothing. Leave it out"
    if not isinstance(objective, PolicyObjective):
        return (
            f"{start}, and objective {objective.name} is no policy gradient: its rows come again as often as `steps` "
            f"lets them. Use more steps, and trainer.epochs = 1"
        )
    if objective.step is not None:
        return (
            f"{start}, and objective {objective.name} goes to the edge of its trust region in one step. Use "
            f"trainer.epochs = 1"
        )
    if notices_moving(objective):
        return None
    return (
        f"{start}, and objective {objective.name} would not notice that the policy has moved since it was drawn: gate "
        f'{objective.gate.name}, proximal {objective.proximal.name}. Use objective.gate = "clip" with objective.'
        f'proximal = "trainer" (as grpo and ppo have), preset = "reinforce_is", or trainer.epochs = 1'
    )


def _check_agent_order(config: RunConfig, objective: Objective) -> str | None:
    """Credit along tokens goes along the rows, and an agent's rows do not stand in the order of time."""
    if config.env.name != AGENT or not (changes := wants_time_order(objective)):
        return None
    return (
        f"objective {objective.name} gives credit along tokens in the order in which they stand, and the conversations "
        f"of an agent stand one after the other, whichever came first. Use {'; '.join(changes)}. Or use credit by "
        'turn, which goes by time, e.g. objective.advantage = "state_returns"'
    )


_CHECKS = (
    _check_agent_order,
    _check_float16,
    _check_critic_steps,
    _check_reference_rule,
    _check_kl_cov,
    _check_epochs,
)


def _require_fit(config: RunConfig, objective: Objective) -> None:
    """Pairs cannot be trained by a policy gradient, nor rollouts by a loss of pairs."""
    allowed = kind_of(config).losses
    name = objective.loss.name if isinstance(objective, DirectLoss) else None
    if name not in allowed:
        known = ", ".join("a policy gradient" if loss is None else loss for loss in allowed)
        raise UserError(
            f"a stage of kind {config.stage} cannot train with objective {objective.name} "
            f"({'a policy gradient' if name is None else f'loss {name}'}). It takes: {known}. Change "
            f"objective.preset or the stage's kind"
        )
