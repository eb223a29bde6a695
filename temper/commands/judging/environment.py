"""`temper env check RECIPE`: verdicts on the environment and the reward of a recipe's last stage that plays.

Owns: which stage and which tasks are tried, playing with a policy, the table. Refuses: the checks
(evals/environments.py).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from temper import calls
from temper.build import Environments, build_stage, first_model
from temper.build.agents import answers_env
from temper.build.objective import resolve_objective
from temper.commands.find import find_model
from temper.config import RunConfig, load_recipe
from temper.errors import UserError
from temper.evals import readiness
from temper.evals.environments import EnvTrial, EnvVerdict, check_environment, judge_learnable
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData, open_data
from temper.types import Score, Task, Trajectory

MARKS = {True: "fine", False: "WRONG", None: "not known"}


def check_recipe(
    recipe: Path,
    *,
    num_tasks: int = 16,
    checkpoint: Path | None = None,
    draws: int = 8,
    overrides: Sequence[str] = (),
) -> list[EnvVerdict]:
    """Every verdict. checkpoint: who plays to see which tasks can be learned; None: nobody, and that is not told."""
    stages = load_recipe(recipe, overrides)
    config = next((one for one in reversed(stages) if kind_of(one).is_rewarded and not one.is_recorded), None)
    if config is None:
        raise UserError(
            f"{recipe}: no stage plays in an environment and is paid. Give a recipe with a stage of kind rl"
        )
    if config.env.name == "agent":
        raise UserError(
            f"an agent is no environment: it leads its episodes itself. temper train {recipe} --dry-run plays one "
            "episode of it against a fixed answer, and says what its reward is worth"
        )
    if answers_env(config):  # every verdict would be that nobody answers
        judge = config.env.options["judge"]
        raise UserError(
            f'env.options.judge = "{judge}" is answered by temper train, with the models of its run, and these checks '
            "have none to ask. Name an address for them: --set env.options.judge=http://127.0.0.1:8000/v1 "
            "--set env.options.judge_model=NAME"
        )
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            config = with_model(config, find_model(checkpoint))
        model = first_model(config if checkpoint is not None else stages[0], Path(folder))
        data = open_data(config, resolve_objective(config), kind_of(config).reading, model)
        found = calls.run(_try(config, data, data.probe[:num_tasks]))
        if checkpoint is not None:
            found.append(calls.run(_play(config, model, num_tasks, draws)))
    return found


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    model = config.model.model_copy(update={"path": str(folder), "new": None})
    return config.model_copy(update={"model": model})


async def _try(config: RunConfig, data: StageData, tasks: Sequence[Task]) -> list[EnvVerdict]:
    async def score(task: Task, said: Trajectory) -> Score:
        return (await data.rubric.score(task, said))[0]

    try:
        await data.rubric.start()
        return await check_environment(
            EnvTrial(
                # What it does is seen in this process alone, wherever it is to be played.
                make_env=Environments(config.env.model_copy(update={"place": "here"})),
                tasks=tasks,
                seed=config.seed,
                seconds=config.rollout.episode_seconds,
                score=score if config.reward else None,
                pays=any(part.kind == "env" for part in config.reward),
            )
        )
    finally:
        await data.rubric.close()


async def _play(config: RunConfig, model: Path, num_tasks: int, draws: int) -> EnvVerdict:
    """As training would play, with the policy's own sampler."""
    stage = build_stage(config, 0, model)
    try:
        await stage.sampler.load(stage.trainer.publish())
        tasks = readiness.first_prompts(stage.data.probe, num_tasks)
        at_once = max(1, config.engine.max_running // draws)
        return judge_learnable(
            await readiness.roll(stage.setup, tasks, group_size=draws, at_once=at_once, name="env check")
        )
    finally:
        await stage.close()


def render(found: Sequence[EnvVerdict]) -> Table:
    table = Table("check", "verdict", "what was seen")
    for verdict in found:
        table.add_row(verdict.name, MARKS[verdict.is_fine], verdict.said)
    return table
