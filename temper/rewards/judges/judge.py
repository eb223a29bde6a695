"""A language model as judge: of one response, or of a response against a reference.

Owns: kinds "judge" and "pairwise" and their records. Refuses: HTTP (endpoint.py); prompts and parsing
(prompts.py); agreement with people (agreement.py). An endpoint that fails is an error, an unreadable verdict
unscorable; neither is ever 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temper.asking.endpoint import Endpoint, EndpointFailed, EndpointOptions
from temper.asking.verdicts import RecordLog
from temper.errors import UserError
from temper.plugins import require_options
from temper.protocols import Reward
from temper.rewards.form.visible import visible
from temper.rewards.judges.agreement import LabelledSet
from temper.rewards.judges.prompts import (
    PAIRWISE,
    POINTWISE,
    JudgePrompt,
    Unparsable,
    frame,
    pairwise_prompt,
    score_prompt,
)
from temper.types import Scalar, Score, ScoreKind, Task, Trajectory

ROLE = re.compile(r"\[\s*(?:system|user|assistant|tool)\s*\]", re.IGNORECASE)

Option = Scalar | list[Scalar]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions(EndpointOptions):
    """Options of every reward that asks a judge."""

    temperature: float = 0.0
    max_tokens: int = 512
    instructions: str = ""
    """What to judge by; empty: correctness, completeness, clarity."""
    scale: int = 10
    """Highest score the judge may give; the reward is score / scale."""
    thought_is_open: bool = False
    """The server leaves out the <think> that begins a reply: what stands before the first </think> is thought."""
    show_answer: bool = False
    """Shows the task's gold answer to the judge."""
    whole_episode: bool = False
    """Judges all turns with what the environment said; else the last message."""
    max_characters: int = 16_000
    """Most characters of each text that the judge sees; the middle of a longer one is left out."""
    length_slope: float = 0.0
    """k of score - k (n - length_reference), n in characters."""
    length_reference: int = 0
    labelled: str = ""
    """JSON lines with prompt, response, label in [0, 1], and answer where needed: the judge is measured on them before
    the run and again at every evaluation."""
    kappa_floor: float = 0.0
    """Least Cohen's kappa on the labelled set; below it the run does not start."""

    def __post_init__(self) -> None:
        EndpointOptions.__post_init__(self)
        if self.scale < 1 or self.max_characters < 16 or self.max_tokens < 1:
            raise UserError(
                f"scale={self.scale} and max_tokens={self.max_tokens} must be at least 1, "
                f"max_characters={self.max_characters} at least 16."
            )
        if self.kappa_floor and not self.labelled:
            raise UserError(f"kappa_floor={self.kappa_floor} needs labelled, the file the judge is measured on.")


def read_judge_options(kind: str, options: Mapping[str, Option], *, unused: Sequence[str] = ()) -> JudgeOptions:
    require_options(JudgeOptions, options, where=f'reward "{kind}"')
    if idle := sorted(set(options) & set(unused)):
        raise UserError(f'reward "{kind}": option "{idle[0]}" would change nothing here. Remove it.')
    return JudgeOptions(**options)  # type: ignore[arg-type]  # checked above


class Judge:
    """One question put to one model. Prompt, model and decoding are fixed when it is made, and fingerprinted."""

    def __init__(self, prompt: JudgePrompt, options: JudgeOptions, endpoint: Endpoint, log: RecordLog) -> None:
        self._prompt = prompt
        self._options = options
        self._endpoint = endpoint
        self._log = log
        self._signed = ""
        self.fingerprint = fingerprint_of(prompt, options)

    async def ask(self, texts: Mapping[str, str], identity: str) -> Any:
        """What the prompt's parser makes of the reply; asked once more when it makes nothing of it.

        Raises EndpointFailed or, after the second reply, Unparsable.
        """
        try:
            return self._prompt.parse(await self._reply(texts, identity, is_again=False))
        except Unparsable:
            self._log.count("asked_again")
            return self._prompt.parse(await self._reply(texts, identity, is_again=True))

    async def _reply(self, texts: Mapping[str, str], identity: str, *, is_again: bool) -> str:
        messages = frame(self._prompt, texts, identity, self._options.max_characters, is_again=is_again)
        reply = await self._endpoint.ask(messages, decoding_of(self._options))
        self._signed = self._signed or reply.model
        if reply.model != self._signed:
            # Half a run judged by another model has two goals.
            raise EndpointFailed(f'the endpoint answered as model "{self._signed}" and now as "{reply.model}"')
        if reply.is_cut:
            # The end of a reply that is cut may be the middle of a quotation.
            raise Unparsable(f"it was cut at max_tokens={self._options.max_tokens}")
        if self._options.thought_is_open and "</think>" in reply.text:
            return f"<think>{reply.text.lstrip().removeprefix('<think>')}"
        return reply.text


def labelled_set(judge: Reward, options: JudgeOptions) -> LabelledSet:
    return LabelledSet(judge, path=options.labelled, floor=options.kappa_floor, model=options.model)


def decoding_of(options: JudgeOptions) -> dict[str, float]:
    return {"temperature": options.temperature, "max_tokens": options.max_tokens}


def fingerprint_of(prompt: JudgePrompt, options: JudgeOptions) -> str:
    """Everything that decides a verdict except the texts. Not the address: a judge that moves stays the same judge."""
    words = [*prompt.words, options.model, *(["thought_is_open"] if options.thought_is_open else [])]
    shown = [options.show_answer, options.whole_episode, options.max_characters]
    identity = json.dumps([words, sorted(decoding_of(options).items()), shown])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


async def settle(judged: Awaitable[float]) -> Score:
    """The rim where failures of a judge become scores without a number."""
    try:
        return Score.of(await judged)
    except EndpointFailed as error:
        return Score.error(str(error))
    except Unparsable as error:
        return Score.unscorable(f"the judge's reply cannot be read: {error}")


def shown_texts(task: Task, trajectory: Trajectory, options: JudgeOptions) -> dict[str, str]:
    """What the judge sees: the task, the gold answer where asked for, the response."""
    asked = "\n\n".join(m.content if m.role == "user" else f"[{m.role}] {m.content}" for m in task.messages)
    texts = {"task": asked}
    if options.show_answer:
        texts["answer"] = task.answer or ""
    return {**texts, "response": episode_text(trajectory) if options.whole_episode else trajectory.text}


def episode_text(trajectory: Trajectory) -> str:
    """Each message after its role in brackets; in brackets of another kind where a message itself writes a role."""
    messages = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return "\n\n".join(f"[{m.role}] {re.sub(ROLE, '(role)', visible(m.content))}" for m in messages)


def identity_of(trajectory: Trajectory) -> str:
    return f"{trajectory.task_id} {trajectory.group_id} {trajectory.index}"


def control_length(score: Score, text: str, options: JudgeOptions) -> Score:
    """score - k (n - reference): takes the judge's liking for length out, as measured by `length_slope`."""
    if score.value is None or not options.length_slope:
        return score
    return Score.of(score.value - options.length_slope * (len(text) - options.length_reference))


class JudgeReward(Reward):
    """The judge's score of the response, in [0, 1]."""

    name = "judge"
    log: RecordLog
    labels: LabelledSet

    def __init__(self, **options: Option) -> None:
        self.options = read_judge_options(self.name, options)
        self.log = RecordLog()
        self._endpoint = Endpoint(self.options)
        prompt = score_prompt(self.options.instructions or POINTWISE, self.options.scale)
        self._judge = Judge(prompt, self.options, self._endpoint, self.log)
        self.fingerprint = self._judge.fingerprint
        self.labels = labelled_set(self, self.options)

    async def start(self) -> dict[str, float]:
        """Measures the judge on its labelled set. Raises UserError when it agrees too little to train by."""
        return await self.labels.start()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        texts = shown_texts(task, trajectory, self.options)
        raw = await settle(self._judge.ask(texts, identity_of(trajectory)))
        score = control_length(raw, texts["response"], self.options)
        detail = {} if raw.value is None else {"raw": raw.value}
        return self.log.add(trajectory, score, fingerprint=self.fingerprint, **detail)

    def check(self, task: Task) -> str | None:
        return "it has no gold answer to show" if self.options.show_answer and not task.answer else None

    async def close(self) -> None:
        await self._endpoint.close()


class PairwiseReward(Reward):
    """How the response fares against a reference, asked in both orders: 1 it won both, 0 it lost both.

    The reference is the task's extra field "reference", else its answer.
    """

    name = "pairwise"
    log: RecordLog
    labels: LabelledSet

    def __init__(self, **options: Option) -> None:
        self.options = read_judge_options(self.name, options, unused=("scale",))
        self.log = RecordLog()
        self._endpoint = Endpoint(self.options)
        prompt = pairwise_prompt(self.options.instructions or PAIRWISE)
        self._judge = Judge(prompt, self.options, self._endpoint, self.log)
        self.fingerprint = self._judge.fingerprint
        self.labels = labelled_set(self, self.options)

    @property
    def inconsistency(self) -> float:
        """Share of comparisons whose winner changed with the order; 0 before the first."""
        counts = self.log.metrics()
        return counts.get("inconsistent", 0.0) / max(counts.get("value", 0.0), 1.0)

    async def start(self) -> dict[str, float]:
        """As in JudgeReward."""
        return await self.labels.start()

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if (reference := reference_of(task)) is None:
            return self.log.add(trajectory, Score.error("the task has no reference"), fingerprint=self.fingerprint)
        texts = shown_texts(task, trajectory, self.options)
        response = texts.pop("response")
        identity = identity_of(trajectory)
        first, second = await asyncio.gather(
            settle(self._judge.ask({**texts, "first": response, "second": reference}, f"{identity} 1")),
            settle(self._judge.ask({**texts, "first": reference, "second": response}, f"{identity} 2")),
        )
        return self._combine(trajectory, response, (first, second))

    def _combine(self, trajectory: Trajectory, response: str, orders: tuple[Score, Score]) -> Score:
        first, second = orders
        if first.value is None or second.value is None:
            failed = [score for score in orders if score.value is None]
            worst = next((score for score in failed if score.kind is ScoreKind.ERROR), failed[0])
            return self.log.add(trajectory, worst, fingerprint=self.fingerprint)
        self.log.count("inconsistent", first.value != 1 - second.value)
        raw = Score.of((first.value + (1 - second.value)) / 2)
        score = control_length(raw, response, self.options)
        detail = {"first": first.value, "second": second.value}
        return self.log.add(trajectory, score, fingerprint=self.fingerprint, **detail)

    def check(self, task: Task) -> str | None:
        return 'it has neither an answer nor a field "reference" to compare with' if not reference_of(task) else None

    async def close(self) -> None:
        await self._endpoint.close()


def reference_of(task: Task) -> str | None:
    reference = task.extra.get("reference", task.answer)
    return None if reference is None else str(reference)


def length_slope(lengths: Sequence[int], scores: Sequence[float]) -> float:
    """Least-squares slope of score on length: what `length_slope` should subtract when length is not a merit."""
    mean_length, mean_score = sum(lengths) / len(lengths), sum(scores) / len(scores)
    spread = sum((n - mean_length) ** 2 for n in lengths)
    if spread == 0:
        raise UserError("all lengths are the same, so no slope can be measured. Calibrate on texts of several lengths.")
    return sum((n - mean_length) * (s - mean_score) for n, s in zip(lengths, scores, strict=True)) / spread
