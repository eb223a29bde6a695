"""`temper train --dry-run`: everything that can be known in seconds, without weights.

Owns: the table of what a run would do, and the trial of the reward on gold and empty answers.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from temper.build import first_model, resolve_objective
from temper.config import RunConfig, load_recipe
from temper.data import StageData, open_data
from temper.evals import contamination
from temper.rewards.rubric import Rubric
from temper.runs.rules import configure
from temper.types import Score, Trajectory

REWARD_TRIALS = 16


def dry_run(recipe: Path, *, overrides: Sequence[str] = ()) -> str:
    """Checks configuration, data, template, reward and batch arithmetic of every stage; returns a table to print."""
    stages = load_recipe(recipe, overrides)
    with tempfile.TemporaryDirectory() as folder:
        model = first_model(stages[0], Path(folder))
        return "\n\n".join(_describe(config, index, model) for index, config in enumerate(stages))


def _describe(config: RunConfig, index: int, model: Path) -> str:
    objective = resolve_objective(config)
    configure(config.alarms)
    data = open_data(config, model)
    shape, first = data.shape, data.probe[0]
    prompt = data.renderer.prompt_ids(data.renderer.prompt_messages(first))
    rows = {
        "model": f"{shape.family}, {shape.num_layers} layers, context {shape.max_context}, {config.model.dtype}",
        "tasks": f"first: {first.id}; held out: {len(data.heldout)} (removed from training where equal)",
        "prompt": f"{data.tokenizer.decode(prompt)!r} = {len(prompt)} tokens; longest seen {data.longest_prompt}",
        "stop tokens": ", ".join(str(stop) for stop in data.renderer.stop_ids),
        **(_supervised_rows(config) if config.stage == "sft" else _rollout_rows(config, data, objective.name)),
    }
    if config.reward:
        rows |= asyncio.run(_reward_rows(data, data.rubric, "reward"))
    if data.verifier is not data.rubric:
        rows |= asyncio.run(_reward_rows(data, data.verifier, "held-out verifier"))
    width = max(map(len, rows))
    body = "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items())
    if warning := contamination.check(data.known, data.heldout):
        body = f"{body}\n{warning}"
    return f"stage {index + 1}: {config.stage}, {config.steps} steps\n{body}"


def _supervised_rows(config: RunConfig) -> dict[str, str]:
    examples = config.trainer.examples_per_step
    return {"batch": f"{examples} examples a step, {examples * config.steps} in all"}


def _rollout_rows(config: RunConfig, data: StageData, objective: str) -> dict[str, str]:
    rollout = config.rollout
    completions = rollout.groups_per_step * rollout.group_size
    tokens = completions * (data.longest_prompt + config.sampling.max_new_tokens)
    microbatches = -(-tokens // config.trainer.tokens_per_microbatch)
    return {
        "objective": objective,
        "batch": f"{rollout.groups_per_step} tasks x {rollout.group_size} = {completions} completions a step, "
        f"{config.trainer.updates_per_batch} optimiser step(s)",
        "tokens": f"at most {tokens:,} a step, in about {microbatches} microbatches at most",
        "staleness": f"{rollout.max_staleness} ({'synchronous' if rollout.max_staleness == 0 else 'asynchronous'})",
    }


async def _reward_rows(data: StageData, rubric: Rubric, name: str) -> dict[str, str]:
    """The reward of gold and empty answers: a verifier that rejects its own gold answers cannot teach anything."""
    tasks = [task for task in (*data.heldout, *data.probe) if task.answer is not None][:REWARD_TRIALS]
    try:
        gold = [(await rubric.score(task, Trajectory.saying(task.id, task.answer or "")))[0] for task in tasks]
        empty = [(await rubric.score(task, Trajectory.saying(task.id, "")))[0] for task in tasks]
    finally:
        await rubric.close()
    return {f"{name} of gold answers": _summary(gold), f"{name} of empty answers": _summary(empty)}


def _summary(scores: Sequence[Score]) -> str:
    values = [score.value for score in scores if score.value is not None]
    reasons = sorted({str(score.reason) for score in scores if score.value is None})
    mean = f"mean {sum(values) / len(values):.3g} of {len(values)}" if values else "none"
    return f"{mean}; not scored: {'; '.join(reasons)}" if reasons else mean
