"""The data that flows through Temper, one type per stage, so that a type says what has been computed.

Owns: shapes of data and their invariants. Refuses: behaviour; nothing here imports another Temper module but errors.
Everything is frozen, keyword-only, and checked once, when it is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

Scalar = str | int | float | bool


class Finish(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """The model drew a stop token; it is the last of token_ids and is trained."""
    LENGTH = "length"
    """Cut at max_new_tokens or at the context limit; no end token was drawn and none is invented."""
    ABORT = "abort"
    INTERRUPT = "interrupt"
    """Paused with its tokens kept, to be resumed as a new request."""


class Status(StrEnum):
    """How an episode ended. Only COMPLETED and the TRUNCATED ones are scored and trained."""

    COMPLETED = "completed"
    TRUNCATED_LENGTH = "truncated_length"
    TRUNCATED_TURNS = "truncated_turns"
    BAD_FORMAT = "bad_format"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"


TRAINABLE_STATUSES = (Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.BAD_FORMAT)


class ScoreKind(StrEnum):
    VALUE = "value"
    UNSCORABLE = "unscorable"
    """The verifier worked and found nothing to judge by, e.g. a judge that would not answer. Left out of all means."""
    ERROR = "error"
    """The verifier failed: time-out, crash, malformed gold answer. Counted by reason; too many stop the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A verdict that cannot lie: a number only when one was really computed."""

    kind: ScoreKind
    value: float | None = None
    """The number, exactly when kind is VALUE."""
    reason: str | None = None
    """Why there is no number, exactly when kind is not VALUE."""

    def __post_init__(self) -> None:
        has_value = self.kind is ScoreKind.VALUE
        assert (self.value is not None) == has_value, "a score has a value exactly when its kind is VALUE"
        assert (self.reason is None) == has_value, "a score without a value says why"

    @staticmethod
    def of(value: float) -> Score:
        return Score(kind=ScoreKind.VALUE, value=float(value))

    @staticmethod
    def unscorable(reason: str) -> Score:
        return Score(kind=ScoreKind.UNSCORABLE, reason=reason)

    @staticmethod
    def error(reason: str) -> Score:
        return Score(kind=ScoreKind.ERROR, reason=reason)

    @property
    def is_value(self) -> bool:
        return self.kind is ScoreKind.VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    """system, user, assistant or tool."""
    content: str

    def as_dict(self) -> dict[str, str]:
        """What chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem, before any model has seen it."""

    id: str
    """Stable over runs: names the row or the generated item, e.g. "train.jsonl:17"."""
    messages: tuple[Message, ...]
    env: str = "single_turn"
    answer: str | None = None
    """The gold answer; None when the reward needs none."""
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    """Whatever else the reward or environment reads, e.g. the reasoning-gym entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The engine echoes nothing else: what is not here is not applied."""

    temperature: float = 1.0
    """Logits are divided by it before the softmax. 0 is greedy: log-probabilities are then at temperature 1."""
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    """Drawing one of these ends the completion; the stop token itself is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt for one completion. Requests with equal prompts that wait together are prefilled once."""

    id: str
    """Unique in the run and the same after a resume: randomness is keyed by (seed, id, position)."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the sampler returned for one request. All lists are parallel to token_ids.

    A completion that was interrupted and resumed under new weights has more than one version:
    token_ids [51, 12, 9], versions [3, 3, 4] means that token 9 was drawn by the weights of version 4.
    """

    prompt_ids: tuple[int, ...]
    """Exactly the ids the model saw, template and observations included; never re-tokenised."""
    token_ids: list[int]
    logprobs: list[float]
    """Natural log, float32, after temperature, by the weights of `versions`."""
    versions: list[int]
    finish: Finish

    def __post_init__(self) -> None:
        require_parallel(self, "token_ids", "logprobs", "versions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: what the model said and what the environment answered."""

    completion: Completion
    message: Message
    """The completion as text, for the environment and for people; never encoded again."""
    replies: tuple[Message, ...] = ()
    reward: float | None = None
    """Reward of this turn alone; None when the environment gives none per turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished episode."""

    task_id: str
    group_id: str
    index: int
    """Place in the group, from 0."""
    turns: tuple[Turn, ...]
    status: Status
    score: Score
    score_parts: Mapping[str, Score] = field(default_factory=dict)
    """Each reward part before weighting, by name."""
    error: str | None = None
    """What went wrong when status is TOOL_ERROR, TIMEOUT or ABORTED."""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """The last thing the model said; '' when it said nothing."""
        return self.turns[-1].message.content if self.turns else ""

    @property
    def num_tokens(self) -> int:
        """Tokens the model drew, over all turns."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        return min((v for turn in self.turns for v in turn.completion.versions), default=-1)

    @property
    def is_truncated(self) -> bool:
        return self.status in (Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS)

    @property
    def is_trainable(self) -> bool:
        return self.score.is_value and self.status in TRAINABLE_STATUSES and self.num_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All trajectories of one draw of one task. Two draws of the same task are two groups."""

    id: str
    draw: int
    """Place of this draw in the task stream, from 0; batches are ordered by it."""
    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.is_trainable)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trainable members, in member order."""
        return [t.score.value for t in self.trajectories if t.is_trainable and t.score.value is not None]

    @property
    def oldest_version(self) -> int:
        return min((t.oldest_version for t in self.trajectories if t.turns), default=-1)

    @property
    def is_degenerate(self) -> bool:
        """No learning signal: fewer than two scored members, or all rewards equal."""
        rewards = self.rewards
        if len(rewards) < 2:
            return True
        spread = max(rewards) - min(rewards)
        # Not "== 0": seven float32 rewards of 0.1 differ in the last bit and would pass as signal.
        return spread <= 1e-8 * max(1.0, max(abs(r) for r in rewards))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row to train on. Lists run over all tokens of the row, prompt included, indexed by the scored token.

    A rollout is one row unless its template rewrote history; then it is several rows that share group_id and index.
    """

    group_id: str
    index: int
    token_ids: list[int]
    loss_mask: list[int]
    """1 exactly where the policy drew the token. From lengths, never from ids."""
    behavior_logprobs: list[float]
    """0.0 where loss_mask is 0."""
    versions: list[int]
    """-1 where loss_mask is 0."""
    advantages: list[float]
    weights: list[float]
    """Share of each token in the loss; already holds one over the denominator of the whole batch."""
    proximal_logprobs: list[float] | None = None
    """By the trainer when the batch started; None: the current policy of a single update, detached."""
    reference_logprobs: list[float] | None = None
    """None: no part of the objective needs them."""

    def __post_init__(self) -> None:
        require_parallel(self, "token_ids", "loss_mask", "behavior_logprobs", "versions", "advantages", "weights")
        for name in ("proximal_logprobs", "reference_logprobs"):
            if getattr(self, name) is not None:
                require_parallel(self, "token_ids", name)
        assert not self.loss_mask or self.loss_mask[0] == 0, "the first token has no position that scores it"

    @property
    def num_actions(self) -> int:
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows laid end to end. All tensors are [T]; float fields keep the precision they were packed with."""

    token_ids: Tensor
    positions: Tensor
    """Restart at 0 with every row."""
    sequence_ids: Tensor
    """Row number; attention never crosses it."""
    trajectory_ids: Tensor
    """Rollout number inside the microbatch; sequence-level ratios sum over it. Rows of one rollout stay together."""
    loss_mask: Tensor
    behavior_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    versions: Tensor
    lengths: tuple[int, ...]
    """Tokens of each row; they sum to T."""
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def __post_init__(self) -> None:
        require_parallel(
            self, "token_ids", "positions", "sequence_ids", "trajectory_ids", "loss_mask", "behavior_logprobs",
            "advantages", "weights", "versions",
        )  # fmt: skip
        assert sum(self.lengths) == len(self.token_ids), "row lengths must add up to the packed tokens"

    def to(self, device: torch.device) -> Microbatch:
        tensors = {
            name: value.to(device)
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), Tensor)
        }
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step consumes: rows with credit, and the groups they came from."""

    updates: tuple[tuple[Sample, ...], ...]
    """One tuple per optimiser step; each is its own global batch with its own denominators."""
    groups: tuple[Group, ...] = ()
    """Trained groups in draw order; empty for supervised data."""
    dropped: tuple[tuple[Group, str], ...] = ()
    """Groups that were rolled and not trained, each with the reason."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Weights of one version on their way to the samplers."""

    version: int
    tensors: Mapping[str, Tensor]
    """Every parameter by its name in the model. A sampler that shares the storage copies nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What the trainer did with one batch."""

    loss: float
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One line of a run: everything the step was, in numbers."""

    stage: int
    step: int
    """From 1, inside the stage."""
    version: int
    """Version of the weights after the step."""
    loss: float
    metrics: Mapping[str, float]
    """A pure function of data and weights: equal to the bit after a resume."""
    seconds: Mapping[str, float]
    """Wall time by phase; sums to the step. Differs from run to run."""
    system: Mapping[str, float]
    """Throughput, memory and engine counters. Differs from run to run."""
    groups_trained: int
    groups_dropped: int
    max_staleness: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Held-out score of one weights version, with everything needed to compare it fairly."""

    stage: int
    step: int
    name: str
    """What was measured: "greedy" or "sampled"."""
    score: float
    low: float
    high: float
    """95% interval, clustered by prompt."""
    num_prompts: int
    samples_per_prompt: int
    constant_score: float
    """Score of always giving the commonest answer: a gain up to it proves nothing."""
    budget: Mapping[str, Scalar]
    """Prompts hash and decoding parameters; results are comparable only when equal."""


def require_parallel(owner: object, *names: str) -> None:
    """Asserts that the named fields of `owner` have one length."""
    sizes = {name: len(getattr(owner, name)) for name in names}
    assert len(set(sizes.values())) == 1, f"{type(owner).__name__}: fields must be parallel, got lengths {sizes}"


def total_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)
