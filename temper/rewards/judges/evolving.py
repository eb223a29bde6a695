"""Rubrics that grow during a run: what tells the best rollout of a task from its worst becomes a criterion.

Owns: kind "evolving_rubric", the versioned buffer of criteria. Refuses: touching the user's own criteria, which stay
and outweigh the grown ones; growing by itself: training calls evolve() group by group, evaluation never does.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from temper.asking.endpoint import Endpoint, EndpointFailed
from temper.asking.verdicts import RecordLog
from temper.errors import BackendError, UserError
from temper.protocols import Reward
from temper.rewards.judges.agreement import LABELLED, LabelledSet
from temper.rewards.judges.criteria import Item, ItemJudge, RubricSource
from temper.rewards.judges.judge import Judge, Option, labelled_set, read_judge_options
from temper.rewards.judges.prompts import Unparsable, proposal_prompt
from temper.types import Group, Scalar, Score, Task, Trajectory

MAX_OPEN_GROUPS = 4096
"""Groups whose criteria and scores are remembered; older ones were dropped by the run and will not come back."""
SAME = 0.8
"""Share of common words from which two criteria are one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrownCriterion:
    """A criterion that was proposed during the run."""

    criterion: str
    weight: float
    born: int
    """Version of the rubric it appeared in."""
    spread: float = 1.0
    """Largest minus smallest score in the last group that was judged by it; 1 before the first."""
    flat_groups: int = 0
    """Groups in a row that it did not separate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRubric:
    """The grown criteria of one task. The version changes exactly when the criteria do."""

    version: int = 0
    grown: tuple[GrownCriterion, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The rules of the buffer."""

    max_items: int
    patience: int
    min_spread: float
    max_share: float


def effective_items(own: Sequence[Item], rubric: TaskRubric, max_share: float) -> tuple[Item, ...]:
    """The user's items as they are, then the grown ones, scaled so that they weigh at most max_share of the user's."""
    grown_weight = sum(abs(item.weight) for item in rubric.grown)
    allowed = max_share * sum(abs(item.weight) for item in own)
    factor = min(1.0, allowed / grown_weight) if grown_weight else 1.0
    return (*own, *(Item(item.criterion, item.weight * factor) for item in rubric.grown))


def drop_flat(rubric: TaskRubric, spreads: Mapping[str, float], growth: Growth) -> TaskRubric:
    """Without the criteria that have separated nothing for `patience` groups; `spreads` by criterion."""
    measured = [
        replace(
            item,
            spread=spreads[item.criterion],
            flat_groups=item.flat_groups + 1 if spreads[item.criterion] <= growth.min_spread else 0,
        )
        if item.criterion in spreads
        else item
        for item in rubric.grown
    ]
    kept = tuple(item for item in measured if item.flat_groups < growth.patience)
    return TaskRubric(version=rubric.version + (len(kept) < len(measured)), grown=kept)


def admit(own: Sequence[Item], rubric: TaskRubric, proposed: Sequence[tuple[str, float]], growth: Growth) -> TaskRubric:
    """With the proposals that are new; above max_items those that separate least go, older ones first."""
    known = [*(item.criterion for item in own), *(item.criterion for item in rubric.grown)]
    fresh: list[GrownCriterion] = []
    for criterion, weight in proposed:
        if not any(is_same(criterion, other) for other in known):
            known.append(criterion)
            fresh.append(GrownCriterion(criterion=criterion, weight=weight, born=rubric.version + 1))
    grown = [*rubric.grown, *fresh]
    while len(grown) > growth.max_items:
        grown.remove(min(grown, key=lambda item: (item.spread, item.born)))
    return replace(rubric, version=rubric.version + 1, grown=tuple(grown)) if fresh else rubric


def is_same(left: str, right: str) -> bool:
    """Whether two criteria share most of their words. Order and punctuation do not count."""
    a, b = (set(re.findall(r"\w+", text.casefold())) for text in (left, right))
    return len(a & b) >= SAME * len(a | b)


@dataclass(slots=True)
class _OpenGroup:
    """A group being scored: all members are judged by the criteria that its first member met."""

    items: tuple[Item, ...]
    version: int
    scores: dict[int, list[Score]]
    """By member, then parallel to items."""


class EvolvingRubricReward(Reward):
    """As "rubric", with criteria added where rollouts of a task differ in ways its rubric does not see."""

    name = "evolving_rubric"
    log: RecordLog
    labels: LabelledSet
    learns = True

    def __init__(
        self,
        *,
        items: Sequence[Scalar] = (),
        weights: Sequence[Scalar] = (),
        max_items: int = 6,
        max_proposals: int = 2,
        patience: int = 3,
        max_share: float = 0.5,
        **judge: Option,
    ) -> None:
        if max_items < 1 or max_proposals < 1 or patience < 1 or not 0 < max_share <= 1:
            raise UserError(
                f'reward "{self.name}": max_items={max_items}, max_proposals={max_proposals} and patience={patience} '
                f"must be at least 1, max_share={max_share} above 0 and at most 1."
            )
        self.options = read_judge_options(self.name, judge)
        self.log = RecordLog()
        # Half a mark of the judge's scale is not a difference.
        self._growth = Growth(
            max_items=max_items, patience=patience, min_spread=0.5 / self.options.scale, max_share=max_share
        )
        self._source = RubricSource(self.name, items, weights)
        self._endpoint = Endpoint(self.options)
        self._judge = ItemJudge(self.options, self._endpoint, self.log)
        self.labels = labelled_set(self, self.options)
        self._proposer = Judge(proposal_prompt(max_proposals), self.options, self._endpoint, self.log)
        self.fingerprint = f"{self._judge.fingerprint}-{self._proposer.fingerprint}"
        self._rubrics: dict[str, TaskRubric] = {}
        self._open: OrderedDict[str, _OpenGroup] = OrderedDict()

    def rubric(self, task_id: str) -> TaskRubric:
        return self._rubrics.get(task_id, TaskRubric())

    async def start(self) -> dict[str, float]:
        """As in JudgeReward."""
        return await self.labels.start()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if (reason := self.check(task)) is not None:
            return Score.error(reason)
        group = self._open_group(task, trajectory.group_id)
        total, scores = await self._judge.score(group.items, task, trajectory, version=group.version)
        group.scores[trajectory.index] = scores
        return total

    async def evolve(self, group: Group) -> TaskRubric:
        """Learns from a finished group. A judge that fails to propose leaves the rubric as it is, and is counted."""
        known = self._open.pop(group.id, None)
        rubric = self.rubric(group.task.id)
        if known is None:
            return rubric
        rubric = drop_flat(rubric, _spreads(known), self._growth)
        proposed = await self._propose(group, known.items)
        rubric = admit(self._source.items(group.task), rubric, proposed, self._growth)
        self._rubrics[group.task.id] = rubric
        return rubric

    async def _propose(self, group: Group, items: Sequence[Item]) -> tuple[tuple[str, float], ...]:
        if group.is_degenerate:
            return ()
        worst, *_, best = sorted(group.trainable, key=lambda member: (member.score.value, -member.index))
        texts = {
            "task": "\n\n".join(message.content for message in group.task.messages),
            "criteria": "\n".join(item.criterion for item in items),
            "first": best.text,
            "second": worst.text,
        }
        self.log.count("proposals_asked")
        try:
            proposed: tuple[tuple[str, float], ...] = await self._proposer.ask(texts, group.id)
        except (EndpointFailed, Unparsable) as error:
            self.log.count(f"proposals_failed/{type(error).__name__}")
            return ()
        return proposed

    def _open_group(self, task: Task, group_id: str) -> _OpenGroup:
        if group_id not in self._open:
            rubric = self.rubric(task.id)
            items = effective_items(self._source.items(task), rubric, self._growth.max_share)
            group = _OpenGroup(items=items, version=rubric.version, scores={})
            if group_id == LABELLED:
                return group  # cases of many tasks, never learned from; kept, they would push out groups of the run
            self._open[group_id] = group
            if len(self._open) > MAX_OPEN_GROUPS:
                self._open.popitem(last=False)
        return self._open[group_id]

    def check(self, task: Task) -> str | None:
        return self._source.check(task)

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """The buffer, for a checkpoint: one JSON text per task, sorted, so that equal buffers are equal texts."""
        rows: list[Scalar] = [
            json.dumps({"task": task_id, **asdict(rubric)}) for task_id, rubric in sorted(self._rubrics.items())
        ]
        return {"rubrics": rows}

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        rows = state.get("rubrics")
        if not isinstance(rows, list):
            raise BackendError("the checkpoint holds no evolving rubrics.")
        self._open.clear()
        self._rubrics = {}
        for row in map(json.loads, map(str, rows)):
            grown = tuple(GrownCriterion(**item) for item in row["grown"])
            self._rubrics[row["task"]] = TaskRubric(version=row["version"], grown=grown)

    async def close(self) -> None:
        await self._endpoint.close()


def _spreads(group: _OpenGroup) -> dict[str, float]:
    """By criterion, over the members that have a score for it; a single one says nothing."""
    spreads = {}
    for place, item in enumerate(group.items):
        values = [scores[place].value for scores in group.scores.values()]
        known = [value for value in values if value is not None]
        if len(known) > 1:
            spreads[item.criterion] = max(known) - min(known)
    return spreads
