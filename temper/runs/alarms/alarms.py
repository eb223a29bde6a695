"""Watches a stage step by step and raises what the rules see: once when it begins, again only after it was over.

Owns: the bounded history, raising, pausing and stopping. Its state is a function of what the run store holds, so a
resumed run goes on as if it had not been interrupted. Refuses: what is alarming (rules.py).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from temper.errors import TemperError
from temper.runs.alarms.conditions import NORMAL
from temper.runs.alarms.rules import LEVELS, AlarmRule
from temper.runs.pass_rates import PassRates
from temper.runs.reader import RunReader
from temper.runs.records import AlarmRecord
from temper.terminal import print_line
from temper.types import Batch, EvaluationResult, StepReport

HELDOUT = "sampled"
"""The evaluation that held-out rules look at: drawn like the training rollouts."""
REWARD_STEPS, NOISE_STEPS = 5, 50
"""Steps whose rewards are set beside an evaluation, and steps that tell how noisy they are."""
RESUME_FILE = "resume"
POLL_SECONDS = 1.0


class StopRun(TemperError):
    """An alarm asks the run to end here. Its checkpoint is written; nothing is broken."""

    exit_code = 0


@dataclass
class _Watched:
    """One rule and what it remembers."""

    rule: AlarmRule
    rows: deque[tuple[float, ...]]
    is_raised: bool = False
    num_calm: int = 0

    def check(self, values: Mapping[str, float]) -> dict[str, float] | None:
        """Takes one check; returns what the rule saw when it has just become true."""
        row = _row(self.rule, values)
        if row is None:
            return None
        self.rows.append(row)
        if len(self.rows) < self.rule.least:
            return None
        columns = np.array(self.rows, dtype=np.float64).T
        sight = self.rule.condition(dict(zip(self.rule.names, columns, strict=True)), self.rule.thresholds)
        if not sight.is_true:
            self.num_calm += 1
            self.is_raised = self.is_raised and self.num_calm < self.rule.calm
            return None
        self.num_calm = 0
        is_new, self.is_raised = not self.is_raised, True
        return {name: float(number) for name, number in sight.numbers.items()} if is_new else None


def _row(rule: AlarmRule, values: Mapping[str, float]) -> tuple[float, ...] | None:
    """The metrics of a rule, or None when this is not a check for it."""
    is_check = all(name in values for name in rule.needs) if rule.needs else any(n in values for n in rule.otherwise)
    if not is_check:
        return None
    row = tuple(values.get(name, rule.otherwise.get(name, math.nan)) for name in rule.names)
    return row if rule.is_about_nan or all(map(math.isfinite, row)) else None


@dataclass
class Alarms:
    """The alarms of one stage. A recorder for the loop, and what the loop asks whether to go on."""

    rules: Sequence[AlarmRule]
    folder: Path
    """Folder of the run: a paused run goes on when a file `resume` appears here."""
    tell: Callable[[AlarmRecord], None]
    """Gets every alarm when it is raised."""
    say: Callable[[str], None] = print_line
    """Gets what a person must know about a pause."""
    _watched: list[_Watched] = field(init=False)
    _rewards: deque[float] = field(init=False, default_factory=lambda: deque(maxlen=NOISE_STEPS))
    _rates: PassRates = field(init=False, default_factory=PassRates)
    _called: tuple[AlarmRecord, AlarmRule] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        active = [rule for rule in self.rules if rule.level != "off"]
        self._watched = [_Watched(rule, deque(maxlen=rule.window)) for rule in active]

    def append(self, report: StepReport, batch: Batch) -> None:
        if report.step <= self._steps_with_prompts:
            for group in batch.groups:
                self._rates.add(group.task.id, group.rewards)
        self._raise(report.stage, report.step, self._see_step(step_values(report)))

    def evaluation(self, result: EvaluationResult) -> None:
        self._raise(result.stage, result.step, self._see_evaluation(result))

    def replay(self, stage: int) -> None:
        """Remembers what the run store holds of this stage. All of it was told before, so nothing is told again: to
        resume a stopped run is to go on in spite of its alarm."""
        with RunReader(self.folder) as reader:
            steps, results = stored_steps(reader, stage), stored_results(reader, stage)
            for task_id, reward in stored_rewards(reader, stage, self._steps_with_prompts):
                self._rates.add(task_id, [reward])
        for step in sorted({*steps, *(result.step for result in results)}):
            if step in steps:
                self._see_step(steps[step])
            for result in (result for result in results if result.step == step):
                self._see_evaluation(result)

    @property
    def _steps_with_prompts(self) -> int:
        """First steps of the stage of which pass rates by prompt are kept: no rule asks for later ones."""
        return max((int(w.rule.thresholds["patience"]) for w in self._watched if w.rule.names_prompts), default=0)

    @property
    def is_called(self) -> bool:
        """Whether an alarm asks to pause or stop; the loop then writes a checkpoint and calls hold()."""
        return self._called is not None

    async def hold(self) -> None:
        """Pauses until a person says go on, at most the rule's pause_hours; raises StopRun when the run shall end."""
        assert self._called is not None, "hold() only when is_called"
        (alarm, rule), self._called = self._called, None
        where = f'step {alarm.step}: alarm "{alarm.rule}": {alarm.text}'
        how = "Resume with --resume; to be spared this stop, change the rule under `alarms` in the recipe"
        if alarm.level == "stop":
            raise StopRun(f"stopped after {where}. {alarm.advice} {how}.")
        sign = self.folder / RESUME_FILE
        sign.unlink(missing_ok=True)  # an old one must not wave this pause through
        self.say(f"paused after {where}. To go on: touch {sign}. Without that it stops in {rule.pause_hours:g} hours.")
        deadline = time.monotonic() + 3600.0 * rule.pause_hours
        while time.monotonic() < deadline:
            if sign.exists():
                sign.unlink()
                self.say("going on")
                return
            await asyncio.sleep(POLL_SECONDS)
        raise StopRun(f"stopped: nobody ended the pause of {rule.pause_hours:g} hours after {where}. {how}.")

    def _see_step(self, values: Mapping[str, float]) -> list[tuple[AlarmRule, dict[str, float]]]:
        if math.isfinite(reward := values.get("reward/mean", math.nan)):
            self._rewards.append(reward)
        return self._check(values)

    def _see_evaluation(self, result: EvaluationResult) -> list[tuple[AlarmRule, dict[str, float]]]:
        if result.name != HELDOUT:
            return []
        values = {
            "heldout/step": float(result.step),
            "heldout/score": result.score,
            "heldout/half_width": (result.high - result.low) / 2,
        }
        return self._check({**values, **_smoothed(self._rewards)})

    def _check(self, values: Mapping[str, float]) -> list[tuple[AlarmRule, dict[str, float]]]:
        return [(w.rule, seen) for w in self._watched if (seen := w.check(values)) is not None]

    def _raise(self, stage: int, step: int, found: Iterable[tuple[AlarmRule, dict[str, float]]]) -> None:
        for rule, seen in found:
            assert rule.level != "off", "a rule that is off is not watched"
            text = rule.saw.format(**{**rule.thresholds, **seen})
            if rule.names_prompts and (by_prompt := self._rates.describe()):
                text = f"{text}. {by_prompt}"
            alarm = AlarmRecord(
                stage=stage,
                step=step,
                time=time.time(),
                rule=rule.name,
                level=rule.level,
                value=seen["value"] if math.isfinite(seen["value"]) else None,
                text=text,
                meaning=rule.meaning,
                advice=rule.advice,
            )
            self.tell(alarm)
            is_graver = self._called is None or LEVELS.index(alarm.level) > LEVELS.index(self._called[0].level)
            if alarm.level in ("pause", "stop") and is_graver:
                self._called = (alarm, rule)


def line_of(alarm: AlarmRecord) -> str:
    """One alarm for the display."""
    return f"{alarm.level.upper()} step {alarm.step} {alarm.rule}: {alarm.text}. {alarm.meaning} Try: {alarm.advice}"


def step_values(report: StepReport) -> dict[str, float]:
    """What rules may look at in one step."""
    return _with_times({**report.metrics, **report.system, "loss": report.loss}, report.seconds)


def stored_steps(reader: RunReader, stage: int) -> dict[int, dict[str, float]]:
    """The same of every stored step."""
    losses = reader.query("SELECT step, loss FROM steps WHERE stage = ?", stage)
    values = {row["step"]: {"loss": _number(row["loss"])} for row in losses}
    for row in reader.query("SELECT step, name, value FROM metrics WHERE stage = ?", stage):
        values[row["step"]][row["name"]] = _number(row["value"])
    seconds: dict[int, dict[str, float]] = {step: {} for step in values}
    for row in reader.query("SELECT step, name, seconds FROM seconds WHERE stage = ?", stage):
        seconds[row["step"]][row["name"]] = _number(row["seconds"])
    return {step: _with_times(values[step], seconds[step]) for step in values}


def stored_results(reader: RunReader, stage: int) -> list[EvaluationResult]:
    return [result for result in reader.evaluations() if result.stage == stage]


def stored_rewards(reader: RunReader, stage: int, steps: int) -> list[tuple[str, float]]:
    """Task and reward of every trained answer of the first steps of a stage."""
    rows = reader.query(
        "SELECT g.task_id, t.score FROM trajectories t JOIN groups g USING (stage, step, group_id) "
        "WHERE stage = ? AND step <= ? AND t.score IS NOT NULL AND g.outcome = 'trained' "
        "ORDER BY step, g.draw, t.member",
        stage,
        steps,
    )
    return [(row["task_id"], row["score"]) for row in rows]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _with_times(values: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    # fsum: equal to the bit whatever the order, and the store gives its rows in another.
    found = {**values, "seconds/total": math.fsum(seconds.values())}
    if "rollout" in seconds:
        found["seconds/rollout"] = seconds["rollout"]
    return found


def _smoothed(rewards: Sequence[float]) -> dict[str, float]:
    """The reward beside an evaluation and its standard error; nothing while there are too few steps."""
    if len(rewards) < REWARD_STEPS:
        return {}
    values = np.array(rewards)
    # Noise from differences of neighbours: a trend is not noise.
    noise = NORMAL * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    error = math.sqrt(math.pi / 2 / REWARD_STEPS) * noise
    return {"heldout/reward": float(np.median(values[-REWARD_STEPS:])), "heldout/reward_error": error}
