"""Step labels for a process reward model: solutions of a suite's tasks, each step judged by what comes after it.

Owns: where solutions come from, opening the model, what is printed. Refuses: environments of several turns, whose
middle cannot be played from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from temper import calls
from temper.build.policy import describe_policy
from temper.catalogue import reward_of
from temper.commands.find import find_model
from temper.commands.judging.evaluate import Note, SuiteRequest, open_setup, open_suite
from temper.commands.judging.scale import require_single_turn
from temper.commands.progress import show_work
from temper.errors import UserError
from temper.evals.suites import Suite
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.stages.step_labels import LabelledSteps, Labelling, label_solutions, spoken, write_rows
from temper.terminal import print_line
from temper.types import Task, Trajectory

SOLUTION = "solution"
"""Column of a task's given solution; tasks without it are solved by the model."""


def label_steps(
    checkpoint: Path, asked: SuiteRequest, rules: Labelling, *, out: Path, note: Note = print_line
) -> list[LabelledSteps]:
    """Labels and writes them to `out`, a .jsonl file that a stage of kind reward_model reads.

    Of each task: the solution in its column "solution", or as many as the suite's samples, drawn by the model.
    """
    if out.suffix != ".jsonl":
        raise UserError(f"{out} must end in .jsonl: step labels are one JSON object per line")
    folder = find_model(checkpoint)
    suite, tasks = open_suite(asked)
    require_single_turn(suite, tasks)
    labelled = calls.run(_label(suite, tasks, asked, rules, folder, note))
    if not labelled:
        raise UserError("not one solution could be labelled; the reasons are above")
    write_rows(out, labelled)
    labels = [label for one in labelled for label in one.labels]
    note(f"saved: {out} ({len(labelled)} solutions, {len(labels)} steps, {sum(labels) / len(labels):.1%} good)")
    return labelled


async def _label(
    suite: Suite, tasks: Sequence[Task], asked: SuiteRequest, rules: Labelling, folder: Path, note: Note
) -> list[LabelledSteps]:
    rubric = reward_of(suite.reward)
    try:
        rubric.require_scorable(tasks)
        await rubric.start()
        setup, _ = open_setup(suite, tasks, asked, folder, rubric, note)
        try:
            with show_work("solutions", sampler=setup.sampler) as shown:
                solutions = await _solutions(suite, tasks, setup, folder)
                shown.rename(f"labels of the steps of {len(solutions)} solutions")
                labelled, reasons = await label_solutions(setup, solutions, rules)
        finally:
            await setup.sampler.close()
    finally:
        await rubric.close()
    for reason, count in reasons.most_common():
        note(f"not labelled, {count} of {len(solutions)}: {reason}")
    return labelled


async def _solutions(
    suite: Suite, tasks: Sequence[Task], setup: EpisodeSetup, folder: Path
) -> list[tuple[Task, Trajectory]]:
    policy = describe_policy(folder, suite.prompt.chat_options)
    renderer = policy.make_renderer(suite.prompt.system, suite.prompt.template)

    given = [task for task in tasks if SOLUTION in task.extra]
    # One after another: what is wrong with a row ends the command by its own words, not inside a group of errors.
    solved = [(task, await spoken(setup, renderer.completion_ids, task, str(task.extra[SOLUTION]))) for task in given]
    async with asyncio.TaskGroup() as group:
        running = [
            (task, group.create_task(_draw(setup, task, index)))
            for task in tasks
            if SOLUTION not in task.extra
            for index in range(suite.decoding.samples)
        ]
    return [*solved, *[(task, await drawn) for task, drawn in running]]


async def _draw(setup: EpisodeSetup, task: Task, index: int) -> Trajectory:
    name = f"solution/{task.id}/{index}"
    return await run_episode(setup, task, group_id=task.id, index=index, request_id=name)
