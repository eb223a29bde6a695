"""The thinking budget of a stage or of a suite, from what is written and the tokenizer.

Owns: the closing text in tokens, and whether it can do what it is for. Refuses: interrupting answers
(rollout/thinking.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.config import RunConfig
from temper.config.thinking import ThinkingConfig
from temper.errors import UserError
from temper.objectives import Objective
from temper.rollout.thinking import Thinking
from temper.tasks.render import Renderer


def make_thinking(config: RunConfig, objective: Objective, renderer: Renderer) -> Thinking | None:
    """Raises UserError for a budget that could never act, or a text that could not close anything."""
    wanted, where = config.rollout.thinking, "rollout.thinking"
    if wanted is None:
        return None
    limits = {"sampling.max_new_tokens": config.sampling.max_new_tokens}
    if config.heldout and config.evaluation.max_new_tokens is not None:
        limits["evaluation.max_new_tokens"] = config.evaluation.max_new_tokens
    found = [
        read_thinking(wanted, renderer, longest=longest, key=key, stop=config.sampling.stop, where=where)
        for key, longest in limits.items()
    ]
    if "step_values" in objective.needs:
        raise UserError(
            f"{where}: objective {objective.name} rolls out from inside an answer, and would not know how much of the "
            f"budget is left there. Use another objective, or no budget"
        )
    return found[0]


def read_thinking(
    wanted: ThinkingConfig, renderer: Renderer, *, longest: int, key: str, stop: Sequence[str], where: str
) -> Thinking:
    """For answers of up to `longest` tokens, which is what `key` says, that end at the texts `stop`. Raises UserError,
    whose text begins with `where`."""
    closing, end = tuple(renderer.encode(wanted.closing)), tuple(renderer.encode(wanted.end))
    thinking = Thinking(budget=wanted.budget, closing_ids=closing, end=wanted.end, end_ids=end)
    if not thinking.has_room(longest):
        raise UserError(
            f"{where}: budget={thinking.budget} and the {len(closing)} tokens of the closing text leave nothing of "
            f"{key}={longest} for an answer. Use a smaller budget, or max_new_tokens = "
            f"{2 * thinking.budget + len(closing)}"
        )
    holds = f"{where}: closing={wanted.closing!r} holds"
    if set(renderer.stop_ids) & set(closing):
        raise UserError(f"{holds} a token that ends the turn, and no answer could follow. Leave it out")
    if stopping := [text for text in stop if text in wanted.closing]:
        raise UserError(f"{holds} the stop text {stopping[0]!r}, and no answer could follow. Change one of them")
    return thinking


def with_budget(wanted: ThinkingConfig | None, budget: int) -> ThinkingConfig:
    """Another budget, with the texts that are known; without any, those that ThinkingConfig has."""
    return ThinkingConfig.model_validate({**({} if wanted is None else wanted.model_dump()), "budget": budget})
