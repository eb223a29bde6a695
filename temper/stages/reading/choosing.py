"""What a recipe says about choosing prompts, as the memory of a stage.

Owns: which stages and sources choosers go with. Refuses: the choosers (tasks/choice/).
"""

from __future__ import annotations

from collections.abc import Sequence

from temper.config import RunConfig
from temper.errors import UserError
from temper.tasks.choice.chooser import StageFacts
from temper.tasks.choice.histories import RateRules
from temper.tasks.choice.memory import PromptMemory
from temper.tasks.choice.registry import read_choosers
from temper.tasks.dataset import TaskSource


def check_choosers(config: RunConfig, *, is_judged: bool) -> None:
    """Raises UserError for choosers that cannot be read or that would have nothing to do, as far as the recipe tells.

    `is_judged`: whether this kind of stage samples answers that a reward judges.
    """
    if not config.data.choose:
        return
    if not is_judged:
        raise UserError(
            f"data.choose goes by the rewards of what a stage samples, and a stage of kind {config.stage} has none. "
            f"Leave it out here; a [[stage]] table may have a data = {{choose = [...]}} of its own"
        )
    memory = PromptMemory(read_choosers(config.data.choose), _facts(config))
    if all(source.generator and not source.size for source in config.train):
        for chooser in memory.choosers:
            if chooser.goes_by_prompt:
                raise UserError(
                    f"data.choose: {chooser.name} goes by what was seen of a prompt before, and a generator without "
                    f"end gives none twice. Give a [[train]] table a size, e.g. size = 1000, or leave it out"
                )


def require_drawn(config: RunConfig, *, is_rolling: bool) -> None:
    """Raises UserError for choosers in a stage whose data turns out to be given answers."""
    if config.data.choose and not is_rolling:
        raise UserError(
            f"data.choose goes by the rewards of what a stage samples, and this stage of kind {config.stage} reads "
            f"given answers. Leave it out, or give prompts without answers to compare"
        )


def doubt_choosers(config: RunConfig, sources: Sequence[TaskSource]) -> str | None:
    """Says that choosers will have nothing to go by, where a stage is too short for any prompt to come back."""
    names = [chooser.name for chooser in read_choosers(config.data.choose) if chooser.goes_by_prompt]
    draws, whole = config.steps * config.rollout.groups_per_step, sum(part.weight for part in config.train)
    ending = [(part, source.size) for part, source in zip(config.train, sources, strict=True) if source.size]
    if not names or any(draws * part.weight / whole > size for part, size in ending):
        return None
    return (
        f"data.choose: {', '.join(names)} will choose nothing: it goes by what was seen of a prompt before, and "
        f"{config.steps} steps of {config.rollout.groups_per_step} groups are about {draws} draws of "
        f"{sum(size for _, size in ending)} prompts: hardly any comes back. Use more steps, or fewer prompts "
        f"(train.size)"
    )


def make_memory(config: RunConfig, sources: Sequence[TaskSource]) -> PromptMemory:
    """`sources`: those of config.train, as they are read."""
    labels = [part.label for part in config.train]
    endless = {name for name, source in zip(labels, sources, strict=True) if source.size is None}
    ending = {name for name, source in zip(labels, sources, strict=True) if source.size is not None}
    unnamed = {""} if not ending else set[str]()  # tasks of a stage's only source may bear no name
    return PromptMemory(
        read_choosers(config.data.choose),
        _facts(config),
        rules=RateRules(newest=config.data.newest, pass_score=config.data.pass_score),
        passing=(endless - ending) | unnamed,
    )


def _facts(config: RunConfig) -> StageFacts:
    return StageFacts(
        sources=tuple(part.label for part in config.train),
        weights=tuple(part.weight for part in config.train),
        steps=config.steps,
    )
