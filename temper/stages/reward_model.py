"""Reward models as a source of batches: rows that a scalar head is read on, and the scale that is stored with it.

Owns: rows of pairs and of labelled steps, encoded as learned/model.py and learned/process.py encode them; calibration.
Refuses: the losses (objectives/losses/scores.py), how far scores are to be believed (evals/pairs.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from temper.errors import UserError
from temper.objectives.losses.reward_models import ScoreScale
from temper.objectives.losses.scores import CHOSEN, REJECTED
from temper.rewards.learned.model import SCALE_FILE, encode, encode_chat, spell_out
from temper.stages.sft import MAX_SKIPS, TooLong, require_length
from temper.stages.stream import StreamSource, TaskStream
from temper.types import Batch, Message, Sample, Task

REPORT_FILE = "temper_calibration.json"
"""Beside the weights: what the scores were worth on the calibration set."""

LABELS = {"1": 1.0, "0": 0.0}

Columns = list[list[float]]
"""One list per row."""
RowMaker = Callable[[Task], list[Sample]]
"""The rows of one task, without their weights."""
ScoreFn = Callable[[Sequence[Sample]], Sequence[Sequence[float]]]
"""What the head says at every position of each row; 0.0 where it is not read."""


class PairRows:
    """A pair as two rows, chosen and rejected, each read at its last token. Its margin stands in the chosen row."""

    def __init__(self, tokenizer: Any, *, max_length: int) -> None:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template, so a conversation has no form to be scored in.")
        self._tokenizer = tokenizer
        self._max_length = max_length

    def __call__(self, task: Task) -> list[Sample]:
        chosen, rejected = task.answer, task.extra.get("rejected")
        if chosen is None or not isinstance(rejected, str):
            raise UserError(f"task {task.id} is no pair: a reward model needs a chosen and a rejected answer")
        margin = float(task.extra.get("margin", 0.0))
        rows = [self._row(task, 0, chosen, CHOSEN, margin), self._row(task, 1, rejected, REJECTED, 0.0)]
        if rows[0].token_ids == rows[1].token_ids:
            raise UserError(f"task {task.id}: both sides of the pair are {chosen!r:.60}. Remove it: it prefers nothing")
        return rows

    def _row(self, task: Task, index: int, text: str, reward: float, margin: float) -> Sample:
        said = [*task.messages, Message(role="assistant", content=text)]
        ids, tools = encode_chat(self._tokenizer, said), task.tools
        if tools:
            plain, ids = ids, encode_chat(self._tokenizer, said, tools=tools)
            if ids == plain:
                raise UserError(
                    f"task {task.id} has tools, and the chat template of this model shows none. Describe them in the "
                    "system message and leave the column tools out"
                )
        return replace(_row(task, ids, {len(ids) - 1: margin}, self._max_length), index=index, reward=reward)


class StepRows:
    """A solution as one row: the prompt, then step, separator, step, separator. Read at the end of each separator."""

    def __init__(self, tokenizer: Any, *, separator: str, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._separator_ids = encode(tokenizer, separator)
        if not self._separator_ids:
            raise UserError(f"the tokenizer makes no token of separator={separator!r}. Use another one.")
        self._max_length = max_length

    def __call__(self, task: Task) -> list[Sample]:
        labels, steps = self._labels(task), self._steps(task)
        if len(labels) != len(steps):
            raise UserError(
                f"task {task.id} has {len(steps)} steps between separators {self._separator!r} and {len(labels)} labels"
            )
        ids, labelled = self._prompt(task), dict[int, float]()
        for step, label in zip(steps, labels, strict=True):
            ids += self._encode(step) + self._separator_ids
            labelled[len(ids) - 1] = label
        return [_row(task, ids, labelled, self._max_length)]

    def _steps(self, task: Task) -> list[str]:
        return [piece.strip() for piece in (task.answer or "").split(self._separator) if piece.strip()]

    def _labels(self, task: Task) -> list[float]:
        given = str(task.extra.get("step_labels", ""))
        labels = [LABELS.get(label.strip()) for label in given.split(",")]
        known = [label for label in labels if label is not None]
        if len(known) < len(labels):
            raise UserError(f'task {task.id}: step_labels={given!r:.60} must be 1 (good) or 0 (bad) each, e.g. "1,1,0"')
        return known

    def _prompt(self, task: Task) -> list[int]:
        if self._tokenizer.chat_template:
            return encode_chat(self._tokenizer, task.messages, for_generation=True)
        return self._encode("\n\n".join(message.content for message in task.messages) + "\n\n")

    def _encode(self, text: str) -> list[int]:
        return encode(self._tokenizer, spell_out(self._tokenizer, text))


def _row(task: Task, ids: list[int], read: Mapping[int, float], max_length: int) -> Sample:
    """A row that is read at these positions; what the loss must know of each stands in its advantage."""
    require_length(task, len(ids), max_length)
    size = len(ids)
    return Sample(
        group_id=task.id,
        index=0,
        token_ids=ids,
        loss_mask=[int(place in read) for place in range(size)],
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[read.get(place, 0.0) for place in range(size)],
        weights=[0.0] * size,
    )


class ScoredExamples(StreamSource):
    """Implements protocols.BatchSource over a stream of pairs or of solutions with labelled steps."""

    def __init__(self, stream: TaskStream, make_rows: RowMaker, *, batch_size: int, drops_long: bool = False) -> None:
        """`drops_long`: tasks that do not fit are passed over and counted, in place of an error."""
        super().__init__(stream)
        self._make_rows = make_rows
        self._batch_size = batch_size
        self._drops_long = drops_long

    async def take(self, step: int) -> Batch:
        rows: list[Sample] = []
        num_examples = num_dropped = 0
        while num_examples < self._batch_size:
            draw, task = self._stream.next()
            try:
                own = self._make_rows(task)
            except TooLong:
                num_dropped += 1
                if not self._drops_long or num_dropped > MAX_SKIPS:
                    raise
                continue
            num_examples += 1
            rows += [replace(row, group_id=f"{task.id}#{draw}") for row in own]  # a repeated task stays two examples
        # A pair counts once, and so does every labelled step: rejected rows bring no example of their own.
        weight = 1 / sum(row.num_actions for row in rows if row.index == 0)
        samples = tuple(replace(row, weights=[weight * m for m in row.loss_mask]) for row in rows)
        metrics = {"data/examples": float(num_examples), "gen/len_mean": fmean(len(row.token_ids) for row in rows)}
        if self._drops_long:
            metrics["data/too_long"] = float(num_dropped)
        return Batch(updates=(samples,), metrics=metrics)


def scores_of(score: ScoreFn, tasks: Sequence[Task], make_rows: RowMaker) -> tuple[Columns, Columns]:
    """Of every row of the tasks, at the positions that are read: what the head says, and what stands there.

    Rows of a pair follow each other, chosen first; what stands at a labelled step is its label.
    """
    rows = [row for task in tasks for row in make_rows(task)]
    said = [list(compress(scores, row.loss_mask)) for scores, row in zip(score(rows), rows, strict=True)]
    return said, [list(compress(row.advantages, row.loss_mask)) for row in rows]


class Calibration:
    """Writes beside the weights of a checkpoint what a fixed set of examples says about them. No state, no chance.

    `score` gives scores_of of these examples, `judge` makes the report of them. With `is_scaled` the mean and deviation
    of the scores become the scale of the reward; a process reward model speaks in probabilities and has none.
    """

    def __init__(
        self,
        score: Callable[[], tuple[Columns, Columns]],
        judge: Callable[[Columns, Columns], Mapping[str, object]],
        *,
        is_scaled: bool,
    ) -> None:
        self._score, self._judge, self._is_scaled = score, judge, is_scaled

    def __call__(self, folder: Path) -> None:
        said, truth = self._score()
        values = torch.tensor([value for row in said for value in row], dtype=torch.float64)
        scale = None
        # Scores that are all alike have no scale: rewards are then the scores as they are.
        if self._is_scaled and len(values) > 1 and values.std() > 0:
            scale = asdict(ScoreScale.of(values))
            _write(folder / SCALE_FILE, scale)
        _write(folder / REPORT_FILE, {**self._judge(said, truth), "scale": scale})


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True))
