"""Which objective a stage trains with, and whether the two fit.

Owns: what a stage trains with when a recipe does not say, and combinations that would train something else than they
say. Refuses: the objectives themselves (objectives/).
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.errors import UserError
from temper.objectives import Objective, check_objective, resolve
from temper.objectives.advantage.critics import pretraining_steps
from temper.objectives.combinations import SAMPLER_WEIGHTS, corrects_staleness
from temper.objectives.losses.table import LOSSES_OF
from temper.objectives.resolve import REGISTRY
from temper.rewards.composite import CompositeReward

PRESETS = {
    "rl": "grpo",
    "rejection": "grpo",
    "sft": "sft",
    "preference": "dpo",
    "reward_model": "reward_model",
    "distill": "gkd",
}
"""What a stage trains with when the recipe names no preset."""


def resolve_objective(config: RunConfig) -> Objective:
    """The objective of a stage, with the rules that need no data."""
    wanted = config.objective
    overrides = {kind: getattr(wanted, kind) for kind in REGISTRY}
    objective = resolve(wanted.preset or PRESETS[config.stage], overrides)
    _require_fit(config, objective)
    check_objective(objective, group_size=config.rollout.group_size)
    if objective.needs & {"teacher", "teacher_top_k", "divergence"} and not config.model.taught_by:
        raise UserError(f"objective {objective.name} needs a teacher. Set model.teacher to a checkpoint directory")
    sampling = config.sampling
    if objective.step is not None and (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        raise UserError(
            f"objective {objective.name} bounds the change of the whole distribution, which a truncated sampler does "
            f"not show. Use sampling.top_k = 0, top_p = 1 and min_p = 0"
        )
    if "step_values" in objective.needs and config.rollout.max_turns > 1:
        raise UserError(
            f"objective {objective.name} rolls out from inside an answer, and an environment of several turns cannot "
            f"be forked. Use rollout.max_turns = 1"
        )
    for check in _CHECKS:
        if (problem := check(config, objective)) is not None:
            raise UserError(problem)
    return objective


def doubts_about(config: RunConfig, objective: Objective) -> list[str]:
    """What a user should know before a stage trains, in sentences; it may be what they want."""
    is_sampled = config.stage in ("rl", "distill") and objective.loss is None
    if not config.rollout.max_staleness or not is_sampled or corrects_staleness(objective):
        return []
    known = ", ".join(sorted(SAMPLER_WEIGHTS | {"opsm"}))
    return [
        f"rollout.max_staleness={config.rollout.max_staleness} trains on samples of older weights, and objective "
        f"{objective.name} compares with the trainer's own policy alone: nothing corrects for their age. Add "
        f'objective.corrections = ["token_tis"] (or one of {known}), take the ratio against the sampler with '
        f'objective.proximal = "behavior", or use a preset made for it: decoupled_ppo, a3po, olmorl, scalerl, prime_rl'
    ]


def require_turn_credit(config: RunConfig, objective: Objective, rubric: CompositeReward) -> None:
    """Refuses payments by turn that no credit would see."""
    if config.stage == "rl" and rubric.pays_turns and "turns" not in objective.credit_needs:
        raise UserError(
            f"a part of the reward pays turns (by_turn = true), and advantage {objective.advantage.name} of objective "
            f"{objective.name} gives credit to whole episodes: what it pays would be lost. Use objective.advantage = "
            f'"turn_returns", or by_turn = false'
        )


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
    if patience and config.heldout is not None and config.evaluation.every:
        return None
    waits = " and waits for held-out evaluations, of which there are none on the way" if patience else ""
    return (
        f"objective.reference = {rule} would never move the reference: the stage has {config.steps} steps{waits}. Use "
        f"e.g. objective.reference = {{every = {max(1, config.steps // 4)}}}"
        f'{", or [heldout] with evaluation.every" if patience else ""}; "none" holds it still'
    )


def _check_kl_cov(config: RunConfig, objective: Objective) -> str | None:
    is_own = objective.proximal.name == "current" or (
        objective.proximal.name == "trainer" and config.trainer.updates_per_batch == 1
    )
    if not is_own or objective.loss is not None or all(term.name != "kl_cov" for term in objective.regularizers):
        return None
    return (
        f"objective {objective.name}: kl_cov would do nothing. It pulls back to the policy that the batch started "
        f"with, and with trainer.updates_per_batch=1 that is the policy itself. Use trainer.updates_per_batch = 2 or "
        f'more with objective.proximal = "trainer"'
    )


def _check_teaching(config: RunConfig, objective: Objective) -> str | None:
    """Samples of a distillation stage have no reward: without a teacher in the objective there is nothing to learn."""
    if config.stage != "distill" or objective.loss is not None or "teacher" in objective.needs:
        return None
    return (
        f"a stage of kind distill has no reward, and objective {objective.name} reads no teacher: it would learn "
        f'nothing. Use objective.preset = "opd" or "gkd", or a stage of kind rl'
    )


_CHECKS = (_check_critic_steps, _check_reference_rule, _check_kl_cov, _check_teaching)


def _require_fit(config: RunConfig, objective: Objective) -> None:
    """Pairs cannot be trained by a policy gradient, nor rollouts by a loss of pairs."""
    allowed = LOSSES_OF[config.stage]
    name = None if objective.loss is None else objective.loss.name
    if name not in allowed:
        known = ", ".join("a policy gradient" if direct_loss is None else direct_loss for direct_loss in allowed)
        raise UserError(
            f"a stage of kind {config.stage} cannot train with objective {objective.name} "
            f"({'a policy gradient' if name is None else f'loss {name}'}). It takes: {known}. Change "
            f"objective.preset or the stage's kind"
        )
