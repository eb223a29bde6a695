"""Which objective a stage trains with, and whether the two fit.

Owns: what a stage trains with when a recipe does not say, and combinations that would train something else than they
say. Refuses: the objectives themselves (objectives/).
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.errors import UserError
from temper.objectives import Objective, check_objective, resolve
from temper.objectives.lessons import LESSONS_OF
from temper.objectives.resolve import REGISTRY
from temper.rewards.rubric import Rubric

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
    if objective.needs & {"teacher", "teacher_top_k", "divergence"} and not config.model.teacher:
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
    return objective


def require_turn_credit(config: RunConfig, objective: Objective, rubric: Rubric) -> None:
    """Refuses payments by turn that no credit would see."""
    if config.stage == "rl" and rubric.pays_turns and "turns" not in objective.credit_needs:
        raise UserError(
            f"a part of the reward pays turns (by_turn = true), and advantage {objective.advantage.name} of objective "
            f"{objective.name} gives credit to whole episodes: what it pays would be lost. Use objective.advantage = "
            f'"turn_returns", or by_turn = false'
        )


def _require_fit(config: RunConfig, objective: Objective) -> None:
    """Pairs cannot be trained by a policy gradient, nor rollouts by a loss of pairs."""
    allowed = LESSONS_OF[config.stage]
    name = None if objective.lesson is None else objective.lesson.name
    if name not in allowed:
        known = ", ".join("a policy gradient" if lesson is None else lesson for lesson in allowed)
        raise UserError(
            f"a stage of kind {config.stage} cannot train with objective {objective.name} "
            f"({'a policy gradient' if name is None else f'lesson {name}'}). It takes: {known}. Change "
            f"objective.preset or the stage's kind"
        )
