"""Every loss that is no policy gradient, by name, and the stages that may train with it.

Owns: the two tables. Refuses: the losses themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from temper.objectives.losses.divergences import DIVERGENCE_LESSONS
from temper.objectives.losses.likelihood import LIKELIHOOD_LESSONS
from temper.objectives.losses.pairs import PAIR_LESSONS
from temper.objectives.losses.scores import SCORE_LESSONS
from temper.objectives.objective import Lesson

LESSONS: dict[str, Callable[..., Lesson]] = {
    **LIKELIHOOD_LESSONS,
    **PAIR_LESSONS,
    **SCORE_LESSONS,
    **DIVERGENCE_LESSONS,
}

WEIGHED_LESSONS = frozenset({*LIKELIHOOD_LESSONS, *DIVERGENCE_LESSONS})
"""Those whose tokens the objective's weighting weighs; pairs and scores all count the same."""

LESSONS_OF: Mapping[str, tuple[str | None, ...]] = {
    "rl": (None,),
    "rejection": (None,),
    "sft": tuple(LIKELIHOOD_LESSONS),
    "preference": tuple(PAIR_LESSONS),
    "reward_model": tuple(SCORE_LESSONS),
    "distill": (None, *DIVERGENCE_LESSONS),
}
"""By kind of stage; None is the policy gradient."""


def stages_for(lesson: str) -> tuple[str, ...]:
    """Kinds of stage that may train with it."""
    return tuple(stage for stage, lessons in LESSONS_OF.items() if lesson in lessons)
