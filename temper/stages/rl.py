"""Reinforcement learning: the policy answers, a reward judges, a policy gradient learns.

Owns: the kind "rl". Refuses: all the rest, which other kinds share (sampling.py, rollout/, objectives/).
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.envs.agents.agent import NAME as AGENT
from temper.errors import UserError
from temper.objectives import Objective, PolicyObjective
from temper.objectives.combinations import wants_time_order
from temper.protocols import BatchSource
from temper.stages.kind import StageKind, require_whole_updates
from temper.stages.parts import Parts
from temper.stages.reading.data import Reading, StageData
from temper.stages.reading.recorded import RecordNeeds
from temper.stages.sampling import credit_by_objective, group_source


def _source(parts: Parts) -> BatchSource:
    return group_source(parts, credit_by_objective(parts))


def _require_turn_credit(config: RunConfig, objective: Objective, data: StageData) -> None:
    """Refuses payments by turn that no credit would see, and credit for payments that nobody makes."""
    assert isinstance(objective, PolicyObjective), "rewards are climbed by a policy gradient"
    if config.env.name == AGENT and objective.advantage.name == "turn_returns" and not data.rubric.pays_turns:
        raise UserError(
            f'objective {objective.name} credits turns by what each is paid, and env "{AGENT}" pays none: what it '
            "hands in is judged as a whole. Add a part of the reward with options.by_turn = true, or use "
            'objective.advantage = "group_mean" or "state_returns"'
        )
    if data.rubric.pays_turns and "turns" not in objective.credit_needs:
        raise UserError(
            f"a part of the reward pays turns (by_turn = true), and advantage {objective.advantage.name} of objective "
            f"{objective.name} gives credit to whole episodes: what it pays would be lost. Use objective.advantage = "
            f'"turn_returns", or by_turn = false'
        )


KIND = StageKind(
    name="rl",
    preset="grpo",
    losses=(None,),
    reading=Reading(
        share_sampled=lambda objective, tasks: 1.0,
        needs_of_records=lambda objective: RecordNeeds(
            min_members=objective.min_group, behavior=True, time_order=bool(wants_time_order(objective))
        ),
    ),
    make_source=_source,
    is_rewarded=True,
    may_choose=True,
    ready_after=frozenset({"sft"}),
    check=lambda config, objective: require_whole_updates(config),
    check_data=_require_turn_credit,
)
