"""The thinking budget of a stage, from its recipe and its tokenizer.

Owns: the closing text in tokens, and whether it can do what it is for. Refuses: interrupting answers
(rollout/thinking.py).
"""

from __future__ import annotations

from temper.config import RunConfig
from temper.errors import UserError
from temper.objectives import Objective
from temper.rollout.thinking import Thinking
from temper.tasks.render import Renderer


def make_thinking(config: RunConfig, objective: Objective, renderer: Renderer) -> Thinking | None:
    """Raises UserError for a budget that could never act, or a text that could not close anything."""
    wanted = config.rollout.thinking
    if wanted is None:
        return None
    closing, end = tuple(renderer.encode(wanted.closing)), tuple(renderer.encode(wanted.end))
    thinking = Thinking(budget=wanted.budget, closing_ids=closing, end=wanted.end, end_ids=end)
    if problem := _problem(config, objective, renderer, thinking):
        raise UserError(f"rollout.thinking: {problem}")
    return thinking


def _problem(config: RunConfig, objective: Objective, renderer: Renderer, thinking: Thinking) -> str | None:
    longest, size = config.sampling.max_new_tokens, len(thinking.closing_ids)
    closing = config.rollout.thinking.closing if config.rollout.thinking else ""
    if not thinking.has_room(longest):
        return (
            f"budget={thinking.budget} and the {size} tokens of the closing text leave nothing of "
            f"sampling.max_new_tokens={longest} for an answer. Use a smaller budget, or max_new_tokens = "
            f"{2 * thinking.budget + size}"
        )
    if set(renderer.stop_ids) & set(thinking.closing_ids):
        return f"closing={closing!r} holds a token that ends the turn, and no answer could follow. Leave it out"
    if stopping := [text for text in config.sampling.stop if text in closing]:
        return (
            f"closing={closing!r} holds the stop text {stopping[0]!r}, and no answer could follow. Change one of them"
        )
    if "step_values" in objective.needs:
        return (
            f"objective {objective.name} rolls out from inside an answer, and would not know how much of the budget is "
            f"left there. Use another objective, or no budget"
        )
    return None
