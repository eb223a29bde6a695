"""`temper train`: a recipe's stages in order, each from the last one's checkpoint, resumable at any step.

Owns: the run directory and what a resume finds in it. Refuses: the steps themselves (loop.py).
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from temper import calls, loop
from temper.build import (
    Around,
    Listeners,
    Stage,
    build_stage,
    check_first_model,
    check_stages,
    explain_out_of_memory,
    first_model,
    make_plan,
    require_free_ports,
    require_functions,
    settle_for_cpu,
    with_sampler_correction,
)
from temper.cluster.ranks import find_place
from temper.commands.training.ranks import Others, started
from temper.commands.training.stopping import Stopped, full_disk_explained, run_until_stopped
from temper.config import FIRST, RunConfig, load_recipe, read_table, refer, to_toml
from temper.config.memory import settled_choice, with_choice, with_stored_choice
from temper.engine.fleet.kept import KeptFleet
from temper.errors import BackendError, TemperError, UserError
from temper.folders.integrity import verify
from temper.models.load import find_checkpoint
from temper.rollout.source import StepFailure
from temper.runs.alarms.alarms import Alarms, StopRun, line_of
from temper.runs.alarms.rules import configure
from temper.runs.display import Display
from temper.runs.mirrors import Mirror, open_mirrors
from temper.runs.reader import RunReader
from temper.runs.records import AlarmRecord
from temper.runs.store.run_store import CONFIG, RUNS, RunStore, open_run
from temper.runs.store.verdicts import Verdicts
from temper.stages.kinds import kind_of
from temper.trainer.checkpoint import latest_checkpoint, prune, remove_unfinished, write_checkpoint
from temper.trainer.ranks.channel import RankFailure


def train(recipe: Path, *, overrides: Sequence[str] = (), run: Path | None = None, resume: bool = False) -> Path:
    """Trains a recipe and returns its run directory."""
    return train_stages(load_recipe(recipe, overrides), run=run, resume=resume)


def train_stages(stages: Sequence[RunConfig], *, run: Path | None = None, resume: bool = False) -> Path:
    """Trains resolved stages and returns the run directory."""
    check_stages(stages)
    require_free_ports(stages)
    calls.run(require_functions(stages))
    stages = [with_sampler_correction(config) for config in stages]  # the run's recipe says what is trained
    folder = run or choose_folder(stages[0].name, resume=resume)
    with full_disk_explained(folder):
        _train_in(folder, stages, resume=resume)
    return folder


def _train_in(folder: Path, stages: Sequence[RunConfig], *, resume: bool) -> None:
    stages = _settled(stages, folder, resume=resume)
    limit = max(config.rollout.transcripts_gb for config in stages) * 1e9
    store = open_run(folder, config=to_toml(stages), resume=resume, transcript_bytes=limit)
    display = Display()
    mirrors: list[Mirror] = []
    try:
        steps = [config.steps for config in stages]
        mirrors = open_mirrors(stages[0].mirrors, folder, steps, partial(store.event, "warning"))
        display.start(folder)
        _run_to_the_end(stages, folder, RunRecords(store, display, mirrors))
        store.finish()
    except StopRun as stop:
        store.event("warning", str(stop))
        store.end("stopped", str(stop))
        display.note(str(stop))
    except BaseException as error:
        with suppress(TemperError):  # what broke the run matters more than that it could not be written down
            record_end(store, error)
        raise
    finally:
        display.close()
        for mirror in mirrors:
            mirror.close()
        store.close()


def _run_to_the_end(stages: Sequence[RunConfig], folder: Path, records: RunRecords) -> None:
    """Runs what is left; when a trainer rank is lost, with new ranks from the last checkpoint. Sampler processes stay,
    and with them the event loop in which they are heard."""
    restarts, kept = stages[0].cluster.max_restarts, KeptFleet()
    with calls.EventLoop() as events, ExitStack() as ending:
        ending.callback(lambda: events.run(kept.close()))
        while True:
            try:
                return _run_with_trainers(stages, folder, records, events, kept)
            except RankFailure as failure:
                # Ranks that a launcher started are not ours to start again: it ends them all.
                if not failure.is_lost or restarts == 0 or find_place(os.environ).is_launched:
                    raise
                restarts -= 1
                again = f"All trainers begin anew from the last checkpoint; {restarts} more times"
                records.warn(f"{failure.reason} {again}")
                stages = _settled(stages, folder, resume=True)  # what is free now is not what was free then


def _run_with_trainers(
    stages: Sequence[RunConfig], folder: Path, records: RunRecords, events: calls.EventLoop, kept: KeptFleet
) -> None:
    with started(stages, kept) as others:
        work = run_stages(stages, folder, records, others)
        if (number := events.run(run_until_stopped(work))) is not None:
            raise others.cause_of_a_stop() or Stopped(number)


def _settled(stages: Sequence[RunConfig], folder: Path, *, resume: bool) -> list[RunConfig]:
    """Stages as they were run before, where the recipe leaves a choice, and what needs no look at a GPU."""
    stored: Sequence[Mapping[str, Any]] = ()
    if resume and (folder / CONFIG).is_file():
        stored = read_table(folder / CONFIG).get("stage", ())
    again = [with_stored_choice(config, table) for config, table in zip(stages, stored, strict=False)]
    return [settle_for_cpu(config) for config in (*again, *stages[len(again) :])]


def record_end(store: RunStore, error: BaseException) -> None:
    """Why a run ends before its last step. A mistake of ours or of a plug-in leaves its traceback, too."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, asyncio.CancelledError)):
        store.end("stopped", str(error) if isinstance(error, Stopped) else "interrupted")
        return
    text = str(error) if isinstance(error, TemperError) else f"{type(error).__name__}: {error}"
    store.event("error", text if isinstance(error, TemperError) else "".join(traceback.format_exception(error)))
    store.end("failed", text)


def is_finished(folder: Path) -> bool:
    """Whether a run reached the last step of its last stage."""
    with RunReader(folder) as reader:
        return reader.is_finished


def choose_folder(name: str, *, resume: bool) -> Path:
    """runs/NAME, or with a number behind when that is taken; on resume the newest of them."""
    taken = sorted(RUNS.glob(f"{name}-*[0-9]"), key=lambda path: int(path.name.rpartition("-")[2]))
    taken = [path for path in (RUNS / name, *taken) if path.exists()]
    if resume:
        if not taken:
            raise UserError(
                f"--resume: there is no run {RUNS / name}. Start one without --resume, or name it with --run"
            )
        return taken[-1]
    return RUNS / name if not taken else RUNS / f"{name}-{len(taken) + 1}"


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Where a run is written down and shown."""

    store: RunStore
    display: Display
    mirrors: Sequence[Mirror] = ()

    def warn(self, doubt: str) -> None:
        self.store.event("warning", doubt)
        self.display.note(f"warning: {doubt}")

    def tell(self, alarm: AlarmRecord) -> None:
        self.store.alarm(alarm)
        self.display.note(line_of(alarm))


async def run_stages(stages: Sequence[RunConfig], folder: Path, records: RunRecords, others: Others = Others()) -> None:
    """Runs what is left of every stage."""
    store, display = records.store, records.display
    stages = list(stages)
    outputs = {FIRST: first_model(stages[0], folder)}
    check_first_model(stages, outputs[FIRST])
    policy = outputs[FIRST]
    for index, recipe in enumerate(stages):
        config = refer(recipe, outputs)
        model = find_checkpoint(config.model.path) if starts_elsewhere(recipe, stages) else policy
        checkpoints = checkpoints_of(folder, index, config)
        remove_unfinished(checkpoints)
        resumed = latest_checkpoint(checkpoints)
        done = step_of(resumed) if resumed else 0
        # What was recorded after the checkpoint is computed again; -1 also takes back the evaluation before step 1.
        store.rewind(index, done if resumed else -1)
        display.stage(f"{index + 1} of {len(stages)}: {config.stage}", steps=config.steps, done=done)
        store.begin_stage(index, config.stage, config.steps)
        if done < config.steps:
            listeners = Listeners(
                note=partial(store.event, "info"),
                warn=records.warn,
                show=display.show,
                doing=display.doing,
                audit=store.audit,
            )
            caches = folder / "caches" / checkpoints.name
            around = Around(
                caches=caches,
                run=folder,
                earlier=outputs.keys(),
                together=others.together,
                ray=others.ray,
                kept=others.kept,
            )
            stage = build_stage(config, index, model, resumed, around=around, listeners=listeners)
            await others.kept.close()  # those that this stage has no use for
            # As it is run, for a resume: what is free then is no longer what was free now.
            stages[index] = with_choice(recipe, settled_choice(stage.config))
            store.keep_config(to_toml(stages))
            await _run_stage(stage, done + 1, checkpoints, records, others)
        last = checkpoints / f"step-{config.steps}"
        if not last.is_dir():
            raise BackendError(f"stage {index + 1} ended before its last step: there is no checkpoint {last}")
        verify(last)  # a stage that ended before this process began may have been damaged since
        kind = kind_of(config)
        outputs[kind.name] = kind.output(last)
        if kind.leaves == "policy":
            policy = outputs[kind.name]


def starts_elsewhere(config: RunConfig, stages: Sequence[RunConfig]) -> bool:
    """Whether a stage names the model that it starts from, in place of what the stage before it left."""
    return config.model.path not in ("", stages[0].model.path)


async def _run_stage(stage: Stage, first_step: int, checkpoints: Path, records: RunRecords, others: Others) -> None:
    store, display = records.store, records.display
    verdicts = Verdicts(stage.verdicts, store.verdicts)
    rules = configure(stage.config.alarms, is_moe="moe" in stage.data.shape.family)
    alarms = Alarms(rules, store.folder, records.tell, display.note)
    alarms.replay(stage.index)
    plan = make_plan(
        stage,
        first_step=first_step,
        recorders=(store, verdicts, display, *records.mirrors, alarms),
        checkpoint=partial(_checkpoint, stage, checkpoints, store),
        opened=partial(verdicts.opened, stage.index, first_step - 1),
        watch=alarms,
    )
    kept: KeptFleet | None = None
    try:
        full = explain_out_of_memory(stage.config, stage.objective, stage.data, stage.origin)
        with full, _unfinished_kept(store, stage.index):
            await loop.run(plan)
    except RankFailure as failure:
        if failure.is_lost and others.ray is None:  # Ray's room is given back with the trainers
            kept = others.kept
        raise
    finally:
        await stage.close(kept)


@contextmanager
def _unfinished_kept(store: RunStore, stage: int) -> Iterator[None]:
    """What was rolled for a step that could not be filled is recorded."""
    try:
        yield
    except StepFailure as failure:
        store.unfinished(stage, failure.step, failure.groups)
        raise


def _checkpoint(stage: Stage, checkpoints: Path, store: RunStore, step: int) -> None:
    store.flush()  # first: a checkpoint must never be ahead of the records that a resume keeps
    state = {
        "stage": stage.index,
        "step": step,
        "source": stage.source.state(),
        "rubric": stage.data.rubric.state(),
        "verifier": stage.data.verifier.state(),
    }
    write_checkpoint(checkpoints, f"step-{step}", {"trainer": stage.trainer.save, **stage.writers}, state)
    prune(checkpoints, stage.config.checkpoint.keep)


def checkpoints_of(folder: Path, index: int, config: RunConfig) -> Path:
    return folder / "checkpoints" / f"{index}-{config.stage}"


def outputs_of(stages: Sequence[RunConfig], folder: Path) -> dict[str, Path]:
    """By kind, what stages of a run that have ended left to later ones."""
    outputs = {FIRST: first_model(stages[0], folder)}
    for index, config in enumerate(stages):
        last = checkpoints_of(folder, index, config) / f"step-{config.steps}"
        if last.is_dir():
            outputs[config.stage] = kind_of(config).output(last)
    return outputs


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
