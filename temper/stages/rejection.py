"""Rejection sampling as a source of batches without updates: what the rules keep becomes a data set.

Owns: the kind "rejection", the harvest of kept rows, its file kept.jsonl, the metrics of keeping. Refuses: which
attempts are worth keeping (rollout/selection.py), sampling (rollout/source.py), and an empty data set.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from temper.batching.measure import measure_groups
from temper.config import RunConfig
from temper.errors import UserError
from temper.evals.suites import ANSWERS
from temper.objectives import Objective
from temper.protocols import BatchSource
from temper.rollout.buffer import StepGroups
from temper.rollout.selection import Attempt, Selection, choose, eligible, normalised, read_selection
from temper.stages.kind import StageKind, Writer
from temper.stages.parts import Parts
from temper.stages.reading.data import Reading
from temper.stages.reading.recorded import RecordNeeds
from temper.stages.sampling import group_source
from temper.tasks.dataset import fingerprint
from temper.types import Batch, Group, Message, Scalar, Task, Trajectory

KEPT_FILE = "kept.jsonl"
KEPT, SEEN = "kept rows", "kept seen"
"""Names of the harvest's state beside that of the task stream."""

State = Mapping[str, Scalar | list[Scalar]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRow:
    """One kept episode: an example for supervised training, and where it came from."""

    prompt: tuple[Message, ...]
    """As the task asks, before the recipe's system message; a stage that reads the row adds its own."""
    turns: tuple[Message, ...]
    """What followed, up to the model's last words."""
    tools: str = ""
    """JSON schemas of the tools that the template showed; empty: none."""
    gold: str | None
    score: float
    sampler_version: int
    """Of the oldest token."""
    seed: int
    """Of the stage; with group and index it names the random numbers."""
    task_id: str
    group_id: str
    index: int

    @property
    def texts(self) -> list[str]:
        """What the model said, turn by turn."""
        return [message.content for message in self.turns if message.role == "assistant"]

    def as_json(self, *, is_conversation: bool) -> dict[str, Any]:
        """A line of kept.jsonl: a whole conversation, or a prompt and its completion."""
        record = {field: getattr(self, field) for field in _RECORD if getattr(self, field) not in (None, "")}
        if is_conversation:
            return {"messages": [message.as_dict() for message in (*self.prompt, *self.turns)], **record}
        is_plain = len(self.prompt) == 1 and self.prompt[0].role == "user"
        prompt = self.prompt[0].content if is_plain else [message.as_dict() for message in self.prompt]
        return {"prompt": prompt, "completion": self.texts[-1], **record}


_RECORD = ("tools", "gold", "score", "sampler_version", "seed", "task_id", "group_id", "index")
# Not "answer": a reader that looks for gold answers under this name would train on them instead of on what was kept.


class Harvest:
    """Everything kept so far, by prompt. A prompt that is drawn again is chosen for anew, among old rows and new ones:
    the rules hold for all its attempts together."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._rows: dict[str, list[KeptRow]] = {}
        self._num_seen = 0

    @property
    def rows(self) -> list[KeptRow]:
        """Prompts in the order in which the first row of each was kept."""
        return [row for rows in self._rows.values() for row in rows]

    @property
    def num_prompts(self) -> int:
        return len(self._rows)

    def has(self, prompt: str) -> bool:
        return prompt in self._rows

    def add(self, prompt: str, rows: Sequence[KeptRow], *, num_seen: int) -> tuple[int, int]:
        """How many of these rows are kept, and how many of them repeat what this prompt was answered before.

        num_seen: attempts behind them, those included that could not become rows.
        """
        old = self._rows.get(prompt, [])
        together = [*old, *rows]
        choice = choose(self._selection, [self._attempt(row) for row in together])
        if choice.kept:
            self._rows[prompt] = [together[place] for place in sorted(choice.kept)]
        self._num_seen += num_seen
        return sum(place >= len(old) for place in choice.kept), len(choice.duplicates)

    def _attempt(self, row: KeptRow) -> Attempt:
        texts = row.texts
        return Attempt(score=row.score, said=normalised(texts), answer=self._selection.answer_of(texts[-1]))

    def require_some(self) -> None:
        """Raises UserError when a whole stage kept nothing: the next one would have nothing to learn from."""
        if not self._rows:
            raise UserError(
                f"rejection sampling kept nothing: none of {self._num_seen} responses passed "
                f"rollout.keep = {self._selection.name}, was complete and not empty. Lower its threshold, use "
                f'keep = "best", easier tasks, a larger rollout.group_size or sampling.max_new_tokens, or train the '
                f"model on examples first"
            )

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        """One JSON line per row, its prompt's name first."""
        lines = [json.dumps([name, _as_table(row)]) for name, rows in self._rows.items() for row in rows]
        return {KEPT: [*lines], SEEN: self._num_seen}

    def load_state(self, state: State) -> None:
        self._rows = {}
        for line in cast(list[str], state[KEPT]):
            name, table = json.loads(line)
            self._rows.setdefault(name, []).append(_as_row(table))
        self._num_seen = cast(int, state[SEEN])

    def save(self, folder: Path) -> None:
        """Writes kept.jsonl, one row a line. A checkpoint's writer: the folder is moved into place as a whole.

        One shape for the whole file, as its readers want it: conversations as soon as one episode had several turns.
        """
        rows = self.rows
        shape = any(len(row.turns) > 1 for row in rows)
        lines = "".join(json.dumps(row.as_json(is_conversation=shape), ensure_ascii=False) + "\n" for row in rows)
        # A model may have drawn half a character.
        (folder / KEPT_FILE).write_bytes(lines.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """How the members of a group become rows."""

    show: Callable[[Task], tuple[Message, ...]]
    """What is said to the model for a task; Renderer.prompt_messages."""
    seed: int


def keep_of(taken: StepGroups, rules: KeepRules, harvest: Harvest, *, version: int) -> Batch:
    """Puts a step's groups into the harvest. The batch has no updates: nothing is trained.

    version: of the weights that drew; all groups are counted, also those that were dropped.
    """
    groups = sorted((*taken.groups, *(group for group, _ in taken.dropped)), key=lambda group: group.draw)
    num_kept = num_duplicates = 0
    for group in groups:
        rows = [_row(group.task, member, rules) for member in eligible(group)]
        kept, duplicates = harvest.add(prompt_name(group.task), rows, num_seen=len(group.trajectories))
        num_kept += kept
        num_duplicates += duplicates
    metrics = measure_groups(taken.groups, taken.dropped, version)
    metrics |= _keep_metrics(groups, harvest, num_kept, num_duplicates)
    return Batch(updates=(), groups=taken.groups, dropped=taken.dropped, metrics=metrics)


def prompt_name(task: Task) -> str:
    """Equal for tasks that ask the same, also when a generator draws it twice. A task without words is its own."""
    return fingerprint(task) if task.messages else task.id


def _keep_metrics(groups: Sequence[Group], harvest: Harvest, num_kept: int, num_duplicates: int) -> dict[str, float]:
    """Shares of all responses of the step; the best of N is the mean over groups of the highest score."""
    num_responses = max(1, sum(len(group.trajectories) for group in groups))
    highest = [max(group.rewards) for group in groups if group.rewards]
    return {
        "keep/share": num_kept / num_responses,
        "keep/duplicates": num_duplicates / num_responses,
        "keep/prompts_without": fmean(not harvest.has(prompt_name(group.task)) for group in groups) if groups else 0.0,
        **({"keep/best_of_n": fmean(highest)} if highest else {}),
        "keep/rows": float(len(harvest.rows)),
        "keep/prompts": float(harvest.num_prompts),
    }


def _row(task: Task, member: Trajectory, rules: KeepRules) -> KeptRow:
    assert member.score.value is not None, "eligible members have a score"
    task = dataclasses.replace(task, messages=member.opening or task.messages)
    said = [message for turn in member.turns for message in (turn.message, *turn.replies)]
    last = max(place for place, message in enumerate(said) if message.role == "assistant")
    return KeptRow(
        prompt=_prompt(task, rules, is_conversation=len(member.turns) > 1),
        turns=tuple(said[: last + 1]),
        tools=json.dumps(member.tools) if member.tools else "",
        gold=task.answer,
        score=member.score.value,
        sampler_version=member.oldest_version,
        seed=rules.seed,
        task_id=task.id,
        group_id=member.group_id,
        index=member.index,
    )


def _prompt(task: Task, rules: KeepRules, *, is_conversation: bool) -> tuple[Message, ...]:
    """What a later stage must read so that its own [prompt] table makes of it what the model saw.

    A lone question is put into the template again by whoever reads it; inside a conversation it is not, so there it
    stands as it was shown. The recipe's system message is left out: the reader puts its own before either.
    """
    if not is_conversation or not task.messages:
        return task.messages
    shown = rules.show(task)
    return shown[1:] if shown[0].role == "system" != task.messages[0].role else shown


def _as_table(row: KeptRow) -> dict[str, Any]:
    return dataclasses.asdict(row)


def _as_row(table: Mapping[str, Any]) -> KeptRow:
    messages = {name: tuple(Message(**message) for message in table[name]) for name in ("prompt", "turns")}
    return KeptRow(**{**table, **messages})


class Rejection:
    """Implements protocols.BatchSource: a source of groups with keep_of for its credit, and the harvest that fills."""

    def __init__(self, roller: BatchSource, harvest: Harvest, *, steps: int) -> None:
        self._roller = roller
        self.harvest = harvest
        self._steps = steps

    @property
    def num_queued(self) -> int | None:
        return self._roller.num_queued

    async def start(self) -> None:
        await self._roller.start()

    async def take(self, step: int) -> Batch:
        """The step's groups. Raises UserError at the last step when nothing was kept in the whole stage."""
        batch = await self._roller.take(step)
        if step >= self._steps:
            self.harvest.require_some()
        return batch

    async def release(self, version: int) -> None:
        await self._roller.release(version)

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {**self._roller.state(), **self.harvest.state()}

    def load_state(self, state: State) -> None:
        self.harvest.load_state(state)
        self._roller.load_state({name: value for name, value in state.items() if name not in (KEPT, SEEN)})

    async def close(self) -> None:
        await self._roller.close()


def keep_rule(config: RunConfig) -> Selection:
    """The recipe's rollout.keep. Raises UserError for one that cannot be read."""
    return read_selection(config.rollout.keep, ANSWERS)


def _check(config: RunConfig, objective: Objective) -> None:
    keep_rule(config)
    if config.is_recorded and (config.prompt.system or config.prompt.template != "{prompt}"):
        raise UserError(
            "what clients asked is kept as they asked it, and the stage that reads it would put prompt.system and "
            "prompt.template around it once more. Leave [prompt] out here and there"
        )


def _source(parts: Parts) -> BatchSource:
    config = parts.config
    harvest = Harvest(keep_rule(config))
    rules = KeepRules(show=parts.data.renderer.prompt_messages, seed=config.seed)
    trainer = parts.trainer
    roller = group_source(parts, lambda taken: keep_of(taken, rules, harvest, version=trainer.version), compares=False)
    return Rejection(roller, harvest, steps=config.steps)


def _writers(parts: Parts, source: BatchSource) -> dict[str, Writer]:
    assert isinstance(source, Rejection), "the stage has made it"
    return {"kept rows": source.harvest.save}


def _describe(config: RunConfig) -> dict[str, str]:
    rule = keep_rule(config)
    return {"keeps": f"{rule.name} of each group, {f'at most {rule.cap}' if rule.cap else 'all'} of a prompt"}


KIND = StageKind(
    name="rejection",
    preset="grpo",
    losses=(None,),
    reading=Reading(
        share_sampled=lambda objective, tasks: 1.0, needs_of_records=lambda objective: RecordNeeds(chats=True)
    ),
    make_source=_source,
    is_rewarded=True,
    may_choose=True,
    leaves="rows",
    rows_file=KEPT_FILE,
    check=_check,
    describe=lambda config, objective, data: _describe(config),
    writers=_writers,
)
