"""When and how the reference follows the policy, so that a KL penalty does not hold a long run back for ever.

Owns: the rules. Refuses: moving weights (the trainer does) and counting evaluations (the loop does).
"""

from __future__ import annotations

from collections.abc import Callable

from temper.objectives.factor import factor, require
from temper.objectives.objective import Moment, ReferenceRule, Refresh

ReferenceRuleFn = Callable[[Moment], Refresh | None]


@factor(needs=("reference",))
def reset(every: int = 0, patience: int = 0) -> ReferenceRuleFn:
    """reference <- policy, and a fresh optimiser: every `every` steps, or after `patience` held-out evaluations without
    a better score, or both. 0 switches a condition off.

    ProRL, arXiv 2505.24864.
    """
    require(
        every >= 0 and patience >= 0 and every + patience > 0,
        f"reset: every={every} steps and patience={patience} evaluations must not be negative, and one must be set, "
        f"e.g. every=500",
    )

    def rule(moment: Moment) -> Refresh | None:
        is_stalled = patience > 0 and moment.stalled_evaluations >= patience
        return Refresh(mix=1.0, resets_optimizer=True) if is_stalled or _is_turn(moment.step, every) else None

    return rule


@factor(needs=("reference",))
def soft_update(mix: float = 0.6, every: int = 512) -> ReferenceRuleFn:
    """reference <- mix policy + (1 - mix) reference, every `every` steps; the optimiser goes on.

    TR-DPO, arXiv 2404.09656.
    """
    require(0 < mix <= 1, f"soft_update: mix={mix} must lie in (0, 1], e.g. mix=0.6")
    require(every >= 1, f"soft_update: every={every} steps must be at least 1, e.g. every=512")

    def rule(moment: Moment) -> Refresh | None:
        return Refresh(mix=mix, resets_optimizer=False) if _is_turn(moment.step, every) else None

    return rule


def _is_turn(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


REFERENCE_RULES: dict[str, Callable[..., ReferenceRule]] = {"reset": reset, "soft_update": soft_update}
