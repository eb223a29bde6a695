"""What a dry run tries without a model: environments are started, the reward judges gold and empty answers.

Owns: which tasks are tried, and what makes a dry run fail. Refuses: drawing; nobody answers here but the gold answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

from temper.build import Environments
from temper.config import RewardConfig, RunConfig
from temper.errors import UserError
from temper.evals.environments import say_turns
from temper.rewards.composite import CompositeReward
from temper.rollout.openings import try_openings
from temper.stages.reading.data import StageData
from temper.types import Score, ScoreKind, Task

REWARD_TRIALS = 16
"""Training tasks, and as many held-out ones: a judge may cost a second each."""
OWN_TRIALS = 512
"""Rows of training files on which a function of the user's is tried: what it fails on would else be met in mid-run."""
NO_BETTER = (
    "no gold answer is worth more than saying nothing. Either right answers are written in another way than the gold "
    "ones (in tags, in a box), or the reward is wrong and nothing can be learned from it"
)
BLANK = "all gold answers that were tried are blank. Name the column that has them (answer_field), or mend the file"
IN_DOUBT = "in doubt"
"""Ends the name of a line that says what may be wrong."""
TRAINING, HELD_OUT = "training tasks", "held-out ones"


async def try_environment(config: RunConfig, data: StageData) -> dict[str, str]:
    """Makes, starts and closes the environments of a few tasks. Raises UserError with what went wrong, and where."""
    make_env = Environments(config.env, max_cost=config.rollout.max_episode_cost)
    openings = await try_openings(
        make_env, data.renderer, data.asked, seed=config.seed, seconds=config.rollout.episode_seconds
    )
    names = sorted({config.env.name or opening.task.env for opening in openings})
    if names in ([], ["single_turn"]):
        return {}
    longest = max(openings, key=lambda opening: len(opening.prompt_ids))
    size, limit = len(longest.prompt_ids), data.shape.max_context
    if size >= limit:
        raise UserError(
            f"task {longest.task.id} opens with {size} tokens, tools included, and the model's context is {limit}: no "
            "room for an answer. Use a model with a longer context, or show less"
        )
    tools = sorted({name for opening in openings for name in opening.tools})
    shown = f", the template shows {', '.join(tools)}" if tools else ""
    dry = sorted({name for opening in openings for name in opening.dry_tools})
    shown += f"; only described, and not carried out, since env.allow does not name it: {', '.join(dry)}" if dry else ""
    return {"environment": f"{', '.join(names)}: started for {len(openings)} tasks, at most {size} tokens{shown}"}


async def try_reward(
    config: RunConfig, data: StageData, rubric: CompositeReward, parts: Sequence[RewardConfig], name: str
) -> dict[str, str]:
    """The reward of gold and empty answers: a verifier that rejects its own gold answers cannot teach anything.

    Raises UserError when a gold answer cannot be scored, or when it could not be said within the limit of tokens.
    """
    groups = _tried_tasks(data, rubric, has_own=any(":" in part.kind for part in parts))
    tasks = [task for group in groups.values() for task in group]
    # Only a reward that the environment pays needs the environment.
    make_env = Environments(config.env) if any(part.kind == "env" for part in parts) else None
    say = partial(say_turns, make_env, seed=config.seed, seconds=config.rollout.episode_seconds)

    async def score(text_of: Callable[[Task], str]) -> list[Score]:
        said = await asyncio.gather(*(say(task, (text_of(task),)) for task in tasks))
        scored = await asyncio.gather(*(rubric.score(task, one) for task, one in zip(tasks, said, strict=True)))
        return [value for value, *_ in scored]

    try:
        gold = await score(lambda task: task.answer or "")
        _require_scored(tasks, gold, name)
        empty = await score(lambda task: "")
        _require_works(tasks, empty, name)
    finally:
        await rubric.close()
    worthy = [task for task, right, none in zip(tasks, gold, empty, strict=True) if _value(right) > _value(none)]
    _require_sayable(config, data, worthy)
    found = {f"{name} of gold answers": _by_group(groups, gold), f"{name} of empty answers": _by_group(groups, empty)}
    doubts = _doubts(groups, {task.id for task in worthy})
    if doubts:
        found[f"{name} {IN_DOUBT}"] = "; ".join(f"of {' and '.join(labels)}, {text}" for text, labels in doubts.items())
    return found


def _doubts(groups: Mapping[str, Sequence[Task]], worthy: Set[str]) -> dict[str, list[str]]:
    """What to say of groups in which no gold answer is worth anything. Where none has a word, nothing is expected."""
    with_words = {label for label, group in groups.items() if any((task.answer or "").strip() for task in group)}
    doubts: dict[str, list[str]] = {}
    for label, group in groups.items():
        if with_words and not any(task.id in worthy for task in group):
            doubts.setdefault(NO_BETTER if label in with_words else BLANK, []).append(label)
    return doubts


def _tried_tasks(data: StageData, rubric: CompositeReward, *, has_own: bool) -> dict[str, list[Task]]:
    """By what they are for. Rows of files are taken from all over the files; a verifier judges held-out tasks alone."""
    held_out = {task.id for task in data.heldout}
    training: dict[str, Task] = {}
    if rubric is data.rubric:
        drawn = [task for task in data.asked if task.id not in held_out]
        rows = data.rows if drawn else ()
        limit = OWN_TRIALS if has_own else REWARD_TRIALS
        spread = [rows[place * len(rows) // limit] for place in range(limit)] if len(rows) > limit else rows
        training = {task.id: task for task in (spread or drawn[:REWARD_TRIALS]) if task.answer is not None}
    asked = [task for task in data.asked if task.id in held_out and task.answer is not None][:REWARD_TRIALS]
    return {label: group for label, group in ((TRAINING, list(training.values())), (HELD_OUT, asked)) if group}


def _by_group(groups: Mapping[str, Sequence[Task]], scores: Sequence[Score]) -> str:
    """What each group's tasks are worth; the scores are of all of them, in order."""
    said, start = [], 0
    for label, group in groups.items():
        said.append(_summary(scores[start : start + len(group)], label))
        start += len(group)
    return ", ".join(said) if said else "none"


def _require_scored(tasks: Sequence[Task], scores: Sequence[Score], name: str) -> None:
    bad = [(task, score) for task, score in zip(tasks, scores, strict=True) if score.value is None]
    if bad:
        task, score = bad[0]
        raise UserError(
            f"{name}: {len(bad)} of {len(tasks)} gold answers cannot be scored. Task {task.id} with gold answer "
            f"{task.answer!r:.60}: {score.reason}. Mend the reward, or remove such rows"
        )


def _require_works(tasks: Sequence[Task], scores: Sequence[Score], name: str) -> None:
    """Nothing to judge by is a fair verdict on an empty answer; a reward that breaks is not."""
    bad = [(task, score) for task, score in zip(tasks, scores, strict=True) if score.kind is ScoreKind.ERROR]
    if bad:
        task, score = bad[0]
        raise UserError(
            f"{name}: it fails on {len(bad)} of {len(tasks)} empty answers. Task {task.id}: {score.reason}. Models do "
            "answer nothing: return a number for it, or None where it cannot be judged"
        )


def _require_sayable(config: RunConfig, data: StageData, tasks: Sequence[Task]) -> None:
    """Gold answers that pay when they are said must fit into what may be drawn."""
    heldout = {task.id for task in data.heldout}
    for task in tasks:
        size = len(data.tokenizer.encode(task.answer, add_special_tokens=False)) + 1  # and the end of the turn
        evaluated = config.evaluation.max_new_tokens if task.id in heldout else None
        limit, key = config.sampling.max_new_tokens, "sampling.max_new_tokens"
        if evaluated is not None:
            limit, key = evaluated, "evaluation.max_new_tokens"
        if size > limit:
            raise UserError(
                f"task {task.id}: the gold answer {task.answer!r:.60} has {size} tokens with its end, and {key} = "
                f"{limit}: it can never be said. Use at least {size}"
            )


def _value(score: Score) -> float:
    return float("-inf") if score.value is None else score.value


def _summary(scores: Sequence[Score], label: str) -> str:
    values = [score.value for score in scores if score.value is not None]
    reasons = sorted({str(score.reason) for score in scores if score.value is None})
    mean = f"mean {sum(values) / len(values):.3g} of {len(values)} {label}" if values else f"none of {label}"
    return f"{mean}; not scored: {'; '.join(reasons)}" if reasons else mean
