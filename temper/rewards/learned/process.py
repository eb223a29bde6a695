"""Process rewards: every step of a response has a score, and the response has what they come to.

Owns: kind "process", splitting into steps, step scorers, turn rewards from step scores. Refuses: the outcome, which is
another part of the reward with a weight of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from temper.asking.endpoint import Endpoint
from temper.asking.verdicts import RecordLog
from temper.errors import UserError, did_you_mean
from temper.protocols import Reward
from temper.rewards.judges.judge import Judge, Option, identity_of, read_judge_options, settle
from temper.rewards.judges.prompts import STEP, score_prompt
from temper.rewards.learned.model import (
    Batcher,
    ConversationTooLong,
    encode,
    encode_chat,
    load_classifier,
    require_room,
    run_padded,
    spell_out,
)
from temper.types import Score, ScoreKind, Task, Trajectory

AGGREGATES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
}
"""What a solution is worth, from its steps' probabilities."""

MAX_BATCH = 1
"""Rows of one pass of a process reward model: with more a score would depend, in its last digits, on who else asked."""

MAX_TOTAL = 0.5
"""What all turns of an episode are paid at most, before the weight. An outcome is worth 1."""

MAX_STEPS = 256
"""More are not a solution: each is a question of its own, and each question holds the steps before it."""

UNUSED = ("show_answer", "whole_episode", "length_slope", "length_reference", "labelled", "kappa_floor")
"""Options of judges that say nothing about steps."""


@dataclass(frozen=True, slots=True)
class Step:
    text: str
    turn: int
    """Which turn of the episode it stands in, from 0."""


def split_steps(trajectory: Trajectory, separator: str, *, per_turn: bool = False) -> tuple[Step, ...]:
    """The non-empty pieces between separators, turn by turn; `per_turn`: each turn is one step."""
    steps = []
    for turn, said in enumerate(trajectory.turns):
        text = said.message.content
        pieces = [text] if per_turn else text.split(separator)
        steps += [Step(piece.strip(), turn) for piece in pieces if piece.strip()]
    return tuple(steps)


def turn_rewards(steps: Sequence[Step], scores: Sequence[float], num_turns: int) -> list[float | None]:
    """Each turn's reward: the sum of its steps' scores, None for a turn without steps.

    All are scaled so that their absolute values sum to at most MAX_TOTAL: below the outcome's scale, or writing
    many fair steps would pay more than being right.
    """
    rewards: list[float | None] = [None] * num_turns
    for step, score in zip(steps, scores, strict=True):
        rewards[step.turn] = (rewards[step.turn] or 0.0) + score
    total = sum(abs(reward) for reward in rewards if reward is not None)
    factor = min(1.0, MAX_TOTAL / total) if total else 1.0
    return [None if reward is None else factor * reward for reward in rewards]


class StepScorer(Protocol):
    fingerprint: str
    """Fingerprint of the judge; '' for a model, which its directory identifies."""

    async def score(self, task: Task, trajectory: Trajectory, steps: Sequence[Step]) -> list[Score]:
        """One score in [0, 1] per step."""
        ...

    async def close(self) -> None: ...


class JudgeSteps:
    """Each step is judged by itself, with the task and the steps before it."""

    def __init__(self, options: dict[str, Option], log: RecordLog) -> None:
        self._options = read_judge_options("process", options, unused=UNUSED)
        self._endpoint = Endpoint(self._options)
        prompt = score_prompt(self._options.instructions or STEP, self._options.scale)
        self._judge = Judge(prompt, self._options, self._endpoint, log)
        self.fingerprint = self._judge.fingerprint

    async def score(self, task: Task, trajectory: Trajectory, steps: Sequence[Step]) -> list[Score]:
        asked = "\n\n".join(message.content for message in task.messages)
        identity = identity_of(trajectory)
        questions = [
            {"task": asked, "before": "\n\n".join(step.text for step in steps[:i]), "step": steps[i].text}
            for i in range(len(steps))
        ]
        return list(
            await asyncio.gather(
                *(settle(self._judge.ask(texts, f"{identity} {i}")) for i, texts in enumerate(questions))
            )
        )

    async def close(self) -> None:
        await self._endpoint.close()


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    ends: list[int]
    """Position of the last token of each step's separator."""


class ModelSteps:
    """A classifier read at the last token of each step's separator: of tokens in one pass, of sequences in one pass per
    step. One output is a logit, of two the second is "good"."""

    fingerprint = ""

    def __init__(self, path: str, separator: str, device: str, deadline_seconds: float) -> None:
        where = 'reward "process"'
        self._model, self._tokenizer, self._is_per_token = load_classifier(path, device, where=where)
        if (outputs := self._model.config.num_labels) not in (1, 2):
            raise UserError(f'{where}: path="{path}" has {outputs} outputs; a step is good or bad, so 1 or 2.')
        self._separator_ids = encode(self._tokenizer, separator)
        if not self._separator_ids:
            raise UserError(f"{where}: the tokenizer of {path} makes no token of separator={separator!r}.")
        self._batcher: Batcher[_Row, list[float]] = Batcher(
            self._forward, max_batch=MAX_BATCH, deadline_seconds=deadline_seconds
        )

    async def score(self, task: Task, trajectory: Trajectory, steps: Sequence[Step]) -> list[Score]:
        try:
            row = self._encode(task, trajectory, steps)
            require_room(row.ids, self._model)
            values = await self._values(row)
        except ConversationTooLong as error:
            return [Score.unscorable(str(error))] * len(steps)
        except TimeoutError:
            return [Score.error("the process reward model did not answer in time")] * len(steps)
        return [
            Score.of(value) if math.isfinite(value) else Score.error(f"the process reward model says {value}")
            for value in values
        ]

    async def close(self) -> None:
        self._batcher.close()

    async def _values(self, row: _Row) -> list[float]:
        if self._is_per_token:
            return await self._batcher.call(row)
        prefixes = [_Row(row.ids[: end + 1], [end]) for end in row.ends]
        return [values[0] for values in await asyncio.gather(*map(self._batcher.call, prefixes))]

    def _encode(self, task: Task, trajectory: Trajectory, steps: Sequence[Step]) -> _Row:
        """The task in the chat template, then step, separator, step, separator ...; replies stand between turns."""
        ids = self._prompt_ids(task)
        ends: list[int] = []
        for turn, said in enumerate(trajectory.turns):
            for step in steps:
                if step.turn == turn:
                    ids += self._text_ids(step.text) + self._separator_ids
                    ends.append(len(ids) - 1)
            for reply in said.replies:
                ids += self._text_ids(reply.content) + self._separator_ids
        return _Row(ids, ends)

    def _prompt_ids(self, task: Task) -> list[int]:
        if self._tokenizer.chat_template:
            return encode_chat(self._tokenizer, task.messages, for_generation=True)
        return self._text_ids("\n\n".join(message.content for message in task.messages) + "\n\n")

    def _text_ids(self, text: str) -> list[int]:
        return encode(self._tokenizer, spell_out(self._tokenizer, text))

    def _forward(self, rows: list[_Row]) -> list[list[float]]:
        logits: Any = run_padded(self._model, [row.ids for row in rows], self._tokenizer.pad_token_id or 0)
        good = logits[..., 0].sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
        if self._is_per_token:
            return [[float(good[i, end]) for end in row.ends] for i, row in enumerate(rows)]
        return [[float(value)] for value in good]


class ProcessReward(Reward):
    """What the steps of a response come to. A response without steps has done nothing right: 0.

    by_turn: it pays each turn for its steps instead, at most MAX_TOTAL together, and adds nothing to the outcome.
    """

    name = "process"
    log: RecordLog

    def __init__(
        self,
        *,
        path: str = "",
        separator: str = "\n\n",
        per_turn: bool = False,
        aggregate: str = "min",
        by_turn: bool = False,
        device: str = "cpu",
        deadline_seconds: float = 120.0,
        **judge: Option,
    ) -> None:
        if aggregate not in AGGREGATES:
            known = ", ".join(AGGREGATES)
            raise UserError(f'aggregate="{aggregate}" is unknown.{did_you_mean(aggregate, AGGREGATES)} Use {known}.')
        if not separator or bool(path) == bool(judge) or (judge and device != "cpu"):
            raise UserError(
                'reward "process" needs a separator, and either path (a reward model) or a judge\'s options.'
            )
        self.log = RecordLog()
        self.pays_turns = by_turn
        self._separator = separator
        self._per_turn = per_turn
        self._aggregate = AGGREGATES[aggregate]
        self._scorer: StepScorer = (
            ModelSteps(path, separator, device, deadline_seconds)
            if path
            else JudgeSteps({**judge, "deadline_seconds": deadline_seconds}, self.log)
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        _, total = await self.score_steps(task, trajectory)
        return total

    async def score_steps(self, task: Task, trajectory: Trajectory) -> tuple[list[tuple[Step, Score]], Score]:
        """Each step with its score, and what they come to."""
        mark = self._scorer.fingerprint
        steps = split_steps(trajectory, self._separator, per_turn=self._per_turn)
        if not steps:
            return [], self.log.add(trajectory, Score.of(0.0), steps=0, fingerprint=mark)
        if len(steps) > MAX_STEPS:
            found = Score.of(0.0, f"{len(steps)} steps, more than {MAX_STEPS}")
            return [], self.log.add(trajectory, found, steps=len(steps), fingerprint=mark)
        scores = await self._scorer.score(task, trajectory, steps)
        for place, score in enumerate(scores):
            self.log.add(trajectory, score, step=place, fingerprint=mark)
        failed = sorted((s for s in scores if not s.is_value), key=lambda score: score.kind is not ScoreKind.ERROR)
        total = failed[0] if failed else Score.of(self._aggregate([score.value or 0.0 for score in scores]))
        return list(zip(steps, scores, strict=True)), self.log.add(
            trajectory, total, steps=len(steps), fingerprint=mark
        )

    async def score_turns(self, task: Task, trajectory: Trajectory) -> tuple[Score, list[float | None]]:
        """See protocols.Reward."""
        judged, total = await self.score_steps(task, trajectory)
        if not total.is_value:
            return total, []
        steps, values = [step for step, _ in judged], [score.value or 0.0 for _, score in judged]
        return total, turn_rewards(steps, values, len(trajectory.turns))

    async def close(self) -> None:
        await self._scorer.close()
