"""A reward made of parts: weighted, gated, bounded.

Owns: running the parts of one trajectory together and guarding their results. Refuses: what each part computes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from temper.calls import describe_error, is_end_of_task, waiting_for
from temper.errors import UserError
from temper.protocols import Reward
from temper.rewards.score import PartRule, combine, finite, pay_turns, weigh, wrong_payment
from temper.types import Group, Scalar, Score, Task, Trajectory


class Part(NamedTuple):
    """A reward and what it means for the whole; a plain (reward, weight) does as well. Fields as in score.Rule."""

    reward: Reward
    weight: float = 1.0
    is_gate: bool = False
    clip: tuple[float, float] | None = None
    is_optional: bool = False
    name: str = ""
    """What the part is called; empty: as its reward."""


FILES = "rewards"
"""Folder in a checkpoint: other tools would take a *.safetensors file beside the weights for weights."""


class CompositeReward:
    """Parts that make one reward. A part that appears twice is told apart by a number: "format", "format_2"."""

    def __init__(
        self, parts: Sequence[Part | tuple[Reward, float]], judges: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`judges`: by source of a task, the names of the parts that judge it. A source that is not there is judged by
        all parts."""
        self._judges = judges or {}
        self._parts: dict[str, Reward] = {}
        self._rules: dict[str, PartRule] = {}
        self._agreement: dict[str, Mapping[str, float]] = {}
        for part in parts:
            reward, weight, is_gate, clip, is_optional, name = Part(*part)
            copies = sum(other.name == reward.name for other in self._parts.values())
            name = name or (f"{reward.name}_{copies + 1}" if copies else reward.name)
            self._parts[name] = reward
            self._rules[name] = PartRule(
                weight=weight, is_gate=is_gate, clip=clip, is_optional=is_optional, pays_turns=reward.pays_turns
            )
        _require_rules(self._rules)
        for names in self._judges.values():
            _require_rules({name: self._rules[name] for name in names})

    def _parts_for(self, task: Task) -> dict[str, Reward]:
        """The parts that judge this task."""
        return {name: self._parts[name] for name in self._judges.get(task.source, self._parts)}

    @property
    def weights(self) -> Mapping[str, float]:
        """By name of the part, as in the parts of a score. A gate has none, nor has a part that pays turns."""
        return {name: rule.weight if rule.adds else 0.0 for name, rule in self._rules.items()}

    @property
    def pays_turns(self) -> bool:
        """Whether some part pays turns, so that only credit by turn sees all of this reward."""
        return any(rule.pays_turns for rule in self._rules.values())

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score]]:
        """The total, and each part before weighting; all parts are run, closed gates or not."""
        total, parts, _ = await self.score_turns(task, trajectory)
        return total, parts

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, dict[str, Score], list[float]]:
        """As score(), and what each turn earned, the total included (score.pay_turns). Empty: no part pays turns, or
        there is no total."""
        judging = self._parts_for(task)
        found = await asyncio.gather(*(_guarded(name, part, task, trajectory) for name, part in judging.items()))
        parts = {name: score for name, (score, _) in zip(judging, found, strict=True)}
        total = combine(parts, self._rules)
        if total.value is None or not self.pays_turns:
            return total, parts, []
        paid = {name: turns for name, (_, turns) in zip(judging, found, strict=True) if turns is not None}
        given = [turn.reward for turn in trajectory.turns]
        earned = pay_turns(total.value, given, paid, parts, self._rules, trajectory.last_turn)
        if not all(map(math.isfinite, earned)):
            return Score.error(f"the turns earn {earned}: not all of it is a finite number"), parts, []
        return total, parts, earned

    def weighted(self, parts: Mapping[str, Score]) -> dict[str, Score]:
        """What each part added to the total: the same parts after bounds, weight and gates."""
        return weigh(parts, self._rules)

    async def start(self) -> dict[str, float]:
        """What the parts measured before training, by name. Raises UserError when one is not fit to be trained on."""
        measured: dict[str, float] = {}
        for name, part in self._parts.items():
            measured |= {f"{name}/{key}": value for key, value in (await part.start()).items()}
        return measured

    async def measure_again(self) -> None:
        """Asks the judges that start() measured for their labelled sets once more; metrics() then tells what was found.
        An endpoint may serve another model under the same name."""
        for name, part in self._parts.items():
            if part.labels is not None:
                self._agreement[name] = await part.labels.measure()

    async def evolve(self, groups: Sequence[Group]) -> None:
        """Lets the parts that learn see trained groups, in draw order."""
        for name, part in self._parts.items():
            for group in groups if part.learns else ():
                if name in self._parts_for(group.task):
                    await part.evolve(group)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Verdicts by outcome since the start, of the parts that keep a log; how often a judge contradicted itself; and
        once, what measure_again() found. `prefix` stands before the names of parts."""
        measured, self._agreement = self._agreement, {}
        found = {
            f"judge/{what}/{prefix}{name}": value for name, values in measured.items() for what, value in values.items()
        }
        for name, part in self._parts.items():
            if part.log is not None:
                found |= {f"judge/{prefix}{name}_{what}": times for what, times in part.log.metrics().items()}
        return found

    def records(self) -> dict[str, list[dict[str, Scalar]]]:
        """What the parts judged since the last call, by name: who was asked, what was said."""
        return {name: part.log.take() for name, part in self._parts.items() if part.log is not None}

    @property
    def learns(self) -> bool:
        """Whether the same answer may be worth something else later."""
        return any(part.learns for part in self._parts.values())

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs: what parts have learned, which question each judge is asked, and how far it agreed
        with people when the run began."""
        learned = {name: part.state() for name, part in self._parts.items() if part.learns}
        agreed = {name: part.labels.state() for name, part in self._parts.items() if part.labels is not None}
        return {"learned": learned, "fingerprints": self._fingerprints(), "agreement": agreed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Refuses a judge that is asked otherwise than before: its scores could not be compared."""
        own = self._fingerprints()
        for name, fingerprint in state["fingerprints"].items():
            if own.get(name) != fingerprint:
                raise UserError(
                    f'reward "{name}" was {fingerprint} when this run began and is {own.get(name)} now: its prompt, '
                    f"model or decoding changed. Restore it, or start a new run from the checkpoint with model.path"
                )
        for name, part in self._parts.items():
            if part.learns:
                part.load_state(state["learned"][name])
            if part.labels is not None:
                part.labels.load_state(state.get("agreement", {}).get(name, {}))  # older checkpoints have none

    def save(self, folder: Path) -> None:
        """Files of the parts that keep some, below rewards/NAME."""
        for name, part in self._parts.items():
            part.save(folder / FILES / name)

    def load(self, folder: Path) -> None:
        for name, part in self._parts.items():
            part.load(folder / FILES / name)

    def _fingerprints(self) -> dict[str, str]:
        return {name: part.fingerprint for name, part in self._parts.items() if part.fingerprint}

    def check(self, task: Task) -> str | None:
        """Why some part can never score this task, or None."""
        for name, part in self._parts_for(task).items():
            if (reason := part.check(task)) is not None:
                return f'reward "{name}" cannot score task {task.id}: {reason}'
        return None

    def require_scorable(self, tasks: Iterable[Task], advice: str = "") -> None:
        """Raises UserError for the first task that some part can never score."""
        for task in tasks:
            if (reason := self.check(task)) is not None:
                raise UserError(f"{reason.rstrip('.')}. {advice}" if advice else reason)

    async def close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))


def _require_rules(rules: Mapping[str, PartRule]) -> None:
    for name, rule in rules.items():
        if not math.isfinite(rule.weight):
            raise UserError(f'reward "{name}": weight={rule.weight} must be a finite number.')
        if rule.is_gate and rule.clip is not None:
            raise UserError(f'reward "{name}": a gate is open or closed and has no bounds. Remove clip or gate.')
        if rule.clip is not None and not rule.clip[0] <= rule.clip[1]:
            raise UserError(f'reward "{name}": clip={rule.clip} must be (low, high) with low <= high.')
        if rule.is_optional and not rule.adds:
            raise UserError(f'reward "{name}": only a part that adds to the score can be optional. Remove optional.')
        if rule.pays_turns and (rule.is_gate or rule.clip is not None):
            raise UserError(f'reward "{name}" pays turns (by_turn), which is neither a gate nor clipped. Remove both.')
    if rules and not any(rule.adds for rule in rules.values()):
        raise UserError(
            "every part of the reward is a gate or pays turns, so the score is always 0. Add the outcome: a part that "
            "is neither."
        )
    paying = sum(abs(rule.weight) for rule in rules.values() if rule.pays_turns)
    adding = sum(abs(rule.weight) for rule in rules.values() if rule.adds)
    if paying > adding:
        raise UserError(
            f"the parts that pay turns weigh {paying:g} together and the outcome {adding:g}: good steps could pay more "
            f"than being right. Give them at most {adding:g}."
        )


async def _guarded(
    name: str, part: Reward, task: Task, trajectory: Trajectory
) -> tuple[Score, Sequence[float | None] | None]:
    """The score, and what turns are paid if the part pays them: the rim where a reward's own fault becomes an error."""
    try:
        with waiting_for(f'reward "{name}"'):
            if not part.pays_turns:
                return finite(await part.score(task, trajectory)), None
            score, turns = await part.score_turns(task, trajectory)
        if not score.is_value:
            return score, None
        wrong = wrong_payment(turns, len(trajectory.turns))
    except BaseException as error:  # sys.exit() in a user's reward must end neither loop nor run
        if is_end_of_task(error):
            raise
        return Score.error(describe_error(error)), None
    return (Score.error(wrong), None) if wrong else (finite(score), turns)
