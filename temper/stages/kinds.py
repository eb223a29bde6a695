"""Every kind of stage, by name.

Owns: the table. A new kind is a file with its record, and a line here.
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.errors import UserError, did_you_mean
from temper.objectives import PRESETS, DirectLoss
from temper.stages import distill, preference, rejection, reward_model, rl, sft
from temper.stages.kind import StageKind

KINDS: dict[str, StageKind] = {
    kind.name: kind for kind in (rl.KIND, sft.KIND, reward_model.KIND, rejection.KIND, preference.KIND, distill.KIND)
}

OTHER_KINDS = {
    **dict.fromkeys(("rlhf", "rlvr", "reinforcement"), "rl"),
    **dict.fromkeys(("finetune", "fine_tuning", "supervised", "instruct"), "sft"),
    **dict.fromkeys(("rm", "reward"), "reward_model"),
    **dict.fromkeys(("best_of_n", "rft"), "rejection"),
    **dict.fromkeys(("distillation", "kd"), "distill"),
}
"""Other words for kinds of stage."""


def kind_of(config: RunConfig) -> StageKind:
    """The kind of a stage. Raises UserError for a name that is none, or that is an objective's."""
    name = config.stage
    if name in KINDS:
        return KINDS[name]
    known = f"Kinds: {', '.join(KINDS)}."
    if name in PRESETS:
        kind = kinds_for(name)[0]
        raise UserError(f'"{name}" is a preset. Write kind = "{kind}" and objective = {{ preset = "{name}" }}. {known}')
    meant = f' Did you mean "{OTHER_KINDS[name]}"?' if name in OTHER_KINDS else did_you_mean(name, KINDS)
    raise UserError(f'"{name}" is no kind of stage.{meant} {known} "temper presets" lists the algorithms of each.')


def kinds_for(preset: str) -> list[str]:
    """Kinds of stage that may train with a preset."""
    objective = PRESETS[preset]
    loss = objective.loss.name if isinstance(objective, DirectLoss) else None
    return [kind.name for kind in KINDS.values() if loss in kind.losses and kind.trains]
