"""From a task to a scored group: what rollouts are made of.

Everything is frozen, keyword-only, and checked once, when it is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.types.checks import hold, require_parallel
from temper.types.columns import array_of, floats, integers, ragged
from temper.types.scores import Score

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
    TOO_LONG = "too_long"
    """The first prompt leaves no room for an answer: nothing was played, and nothing is wrong but the task."""


TRAINABLE_STATUSES = (Status.COMPLETED, Status.TRUNCATED_LENGTH, Status.TRUNCATED_TURNS, Status.BAD_FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    """system, user, assistant or tool."""
    content: str
    name: str = ""
    """Name of the tool that answers; empty for everyone else."""

    def as_dict(self) -> dict[str, str]:
        """What chat templates take."""
        named = {"name": self.name} if self.name else {}
        return {"role": self.role, "content": self.content, **named}


class EventKind(StrEnum):
    """What happened in an environment beside its words."""

    TOOL_CALL = "tool_call"
    TOOL_ERROR = "tool_error"
    """The tool ran and failed."""
    TOOL_TIMEOUT = "tool_timeout"
    BAD_CALL = "bad_call"
    """The policy asked for something that is not a tool, or with arguments that do not fit."""
    DENIED = "denied"
    """Asked for and refused: a limit, a missing permission."""
    DESCRIBED = "described"
    """Refused, too: an irreversible act that nobody approved. What it would have done is in the detail."""
    SIDE_EFFECT = "side_effect"
    """Something outside the conversation changed."""
    MODEL_CALL = "model_call"
    """The environment asked a model by itself: a judge, or a user that a model plays."""


REFUSED = (EventKind.DENIED, EventKind.DESCRIBED)
LASTING = (EventKind.SIDE_EFFECT, *REFUSED)
"""What is never forgotten: what was done to the world, and what was refused. Attempts that failed did it, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: EventKind
    name: str
    """Name of the tool or of the thing changed."""
    detail: str = ""
    seconds: float = 0.0
    cost: float = 0.0
    """In whatever unit the environment charges."""


def lasting(events: Iterable[Event], where: str = "") -> tuple[Event, ...]:
    """Those that are never forgotten; with `where` each says first where it happened."""
    kept = (event for event in events if event.kind in LASTING)
    return tuple(replace(event, detail=f"{where}: {event.detail}") if where else event for event in kept)


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
    source: str = ""
    """Name of the source it comes from, where a stage tells its sources apart; else empty."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of its row, e.g. lists: for a reward of the user's own that asks for them."""

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of a row's own column `tools`, which the chat template shows to the model."""
        return tuple(json.loads(str(self.extra.get("tools", "[]"))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. The engine echoes nothing else: what is not here is not applied."""

    temperature: float = 1.0
    """Logits are divided by it before the softmax. 0 is greedy: log-probabilities are then at temperature 1."""
    max_new_tokens: int = 64
    stop_ids: tuple[int, ...] = ()
    """Drawing one of these ends the completion; the stop token itself is kept."""
    top_k: int = 0
    """Draw among this many most likely tokens only; 0: all."""
    top_p: float = 1.0
    """Draw among the fewest most likely tokens that hold this much probability together; 1: all."""
    min_p: float = 0.0
    """Draw among tokens at least this likely compared with the most likely one; 0: all."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion as soon as it contains one; the token that completes it is kept."""
    top_logprobs: int = 0
    """How many of the most likely tokens to return at each position, after temperature."""
    entropy: bool = False
    """Return the entropy of the distribution each token was drawn from."""

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be drawn. Log-probabilities are then those within the keep-set."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def greedy(self) -> SamplingParams:
        """The same at temperature 0, for what nobody trains on: without most likely tokens, and without a keep-set,
        which would change nothing: the likeliest token is in every one. Some engines drop a keep-set, others not."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, top_logprobs=0, entropy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt for one completion. Requests with equal prompts that wait together are prefilled once."""

    id: str
    """Unique in the run and the same after a resume: randomness is keyed by (seed, id, position)."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the sampler returned for one request. All columns are parallel to token_ids; lists or arrays may be given.

    A completion that was interrupted and resumed under new weights has more than one version:
    token_ids [51, 12, 9], versions [3, 3, 4] means that token 9 was drawn by the weights of version 4.
    """

    prompt_ids: tuple[int, ...]
    """Exactly the ids the model saw, template and observations included; never re-tokenised."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Natural log, float32, after temperature, by the weights of `versions`."""
    versions: Sequence[int]
    finish: Finish
    top_ids: Sequence[Sequence[int]] | None = None
    """The most likely tokens at each position, most likely first. None: not asked for."""
    top_logprobs: Sequence[Sequence[float]] | None = None
    entropies: Sequence[float] | None = None
    """None: not asked for."""
    keep_ids: Sequence[Sequence[int]] | None = None
    """Which tokens could be drawn at each position, the drawn one among them. None: all of them."""
    routes: Sequence[Sequence[int]] | None = None
    """Experts of all tokens, prompt included, first layer first; empty where nothing was computed, as at the last."""
    params: SamplingParams | None = None
    """What the sampler really applied. None: a completion that no sampler drew."""
    injected: range = range(0)
    """Places of tokens that were put in, not drawn: log-probability 0, version -1, empty lists, and never trained."""

    def __post_init__(self) -> None:
        hold(self, integers, "token_ids", "versions")
        hold(self, floats, "logprobs", "entropies")
        hold(self, lambda rows: ragged(rows, np.int32), "top_ids", "keep_ids")
        hold(self, ragged, "top_logprobs", "routes")
        assert len(self.routes or ()) in (0, len(self.prompt_ids) + len(self.token_ids)), "routes of all tokens"
        optional = ("top_ids", "top_logprobs", "entropies", "keep_ids")
        given = [name for name in optional if getattr(self, name) is not None]
        require_parallel(self, "token_ids", "logprobs", "versions", *given)
        for name, nothing in (("logprobs", 0), ("versions", -1)):
            assert all(array_of(getattr(self, name))[self.injected] == nothing), "what was put in was not drawn"

    def drawn(self, column: Sequence[Any]) -> NDArray[Any]:
        """What a column, parallel to token_ids, has at drawn tokens."""
        return np.delete(array_of(column), self.injected) if self.injected else array_of(column)

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """1 at drawn tokens, 0 at those that were put in."""
        first = self.injected.start
        return np.repeat(np.array((1, 0, 1), np.uint8), (first, len(self.injected), self.num_drawn - first))

    @property
    def num_drawn(self) -> int:
        return len(self.token_ids) - len(self.injected)

    @property
    def oldest_version(self) -> int | None:
        """None: nothing was drawn; the same below."""
        return int(self.drawn(self.versions).min()) if self.versions else None

    @property
    def newest_version(self) -> int | None:
        return int(self.drawn(self.versions).max()) if self.versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: what the model said and what the environment answered."""

    completion: Completion
    message: Message
    """The completion as text, for the environment and for people; never encoded again."""
    replies: tuple[Message, ...] = ()
    reward: float | None = None
    """Reward of this turn alone; None when the environment gives none per turn."""
    events: tuple[Event, ...] = ()
    state: str | None = None
    """Name that the environment gave the state in which the turn began. None: it is known by what the model saw."""


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
    weighted_parts: Mapping[str, Score] = field(default_factory=dict)
    """What each part added to the score, after bounds, weight and gates."""
    turn_rewards: tuple[float, ...] = ()
    """What each turn earned, when a part of the reward pays turns: by the environment, by that part, and at the end the
    score. Empty: only the environment pays turns (Turn.reward)."""
    turn_order: tuple[int, ...] = ()
    """Place in time of each turn, from 0, where an agent's conversations stand one after the other. Empty: turns stand
    as they came."""
    error: str | None = None
    """What went wrong when status is TOOL_ERROR, TIMEOUT or ABORTED."""
    opening: tuple[Message, ...] = ()
    """What the environment showed first. Empty: as the task asks."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the template showed."""
    seconds: float = 0.0
    step_starts: tuple[int, ...] = ()
    """First drawn token of each reasoning step, when step values were estimated."""
    step_values: tuple[float, ...] = ()
    """Mean reward of fresh rollouts from the start of each step; parallel to step_starts."""
    extra_tokens: int = 0
    """Drawn by those rollouts."""
    unplaced_events: tuple[Event, ...] = ()
    """LASTING events that stand in none of its turns: of a step that did not come back, of attempts that this one
    replaced, of episodes that were played for its step values, and with the first member of the greedy baseline."""
    result: str | None = None
    """What an agent handed in or an environment has to show, which is judged in place of the last words. None: neither,
    or the agent failed."""

    @staticmethod
    def saying(task_id: str, text: str) -> Trajectory:
        """A finished episode of one turn that just says `text`: what rewards are tried on without a model."""
        completion = Completion(prompt_ids=(0,), token_ids=[0], logprobs=[0.0], versions=[0], finish=Finish.STOP)
        return Trajectory(
            task_id=task_id,
            group_id=task_id,
            index=0,
            turns=(Turn(completion=completion, message=Message(role="assistant", content=text)),),
            status=Status.COMPLETED,
            score=Score.unscorable("not scored yet"),
        )

    @property
    def text(self) -> str:
        """What is judged: the result, or the last thing the model said; '' when it said nothing."""
        if self.result is not None:
            return self.result
        return self.turns[-1].message.content if self.turns else ""

    @property
    def last_turn(self) -> int:
        """Where the turn stands that came last; -1 when there is none."""
        return self.turn_order.index(len(self.turns) - 1) if self.turn_order else len(self.turns) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens the model drew, over all turns."""
        return sum(turn.completion.num_drawn for turn in self.turns)

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that happened, turn by turn, and then what stands in no turn."""
        return (*(event for turn in self.turns for event in turn.events), *self.unplaced_events)

    @property
    def oldest_version(self) -> int:
        """Oldest version that drew a token; -1 when none was drawn, which is not an age."""
        oldest = (turn.completion.oldest_version for turn in self.turns)
        return min((version for version in oldest if version is not None), default=-1)

    @property
    def newest_version(self) -> int:
        newest = (turn.completion.newest_version for turn in self.turns)
        return max((version for version in newest if version is not None), default=-1)

    @property
    def is_opponents(self) -> bool:
        """Drawn by an opponent of the policy: its tokens have no version."""
        return self.num_tokens > 0 and self.newest_version < 0

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
    greedy: Trajectory | None = None
    """One more attempt at temperature 0, a baseline that is never trained. None: the objective needs none."""

    @property
    def tokens_drawn(self) -> int:
        """Everything the sampler drew for this group, baselines and step values included."""
        everyone = (*self.trajectories, *(() if self.greedy is None else (self.greedy,)))
        return sum(trajectory.num_tokens + trajectory.extra_tokens for trajectory in everyone)

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.is_trainable)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trainable members, in member order."""
        return [t.score.value for t in self.trajectories if t.is_trainable and t.score.value is not None]

    @property
    def oldest_version(self) -> int:
        """Oldest version that drew a token of the policy: an opponent's tokens have no version, and a member without
        tokens has no age. -1 when nobody drew anything; such a group is never trained."""
        drew = (t for t in self.trajectories if t.num_tokens and not t.is_opponents)
        return min((t.oldest_version for t in drew), default=-1)

    @property
    def is_degenerate(self) -> bool:
        """No learning signal: fewer than two scored members, or all rewards equal."""
        rewards = self.rewards
        if len(rewards) < 2:
            return True
        spread = max(rewards) - min(rewards)
        # Not "== 0": seven float32 rewards of 0.1 differ in the last bit and would pass as signal.
        return spread <= 1e-8 * max(1.0, max(abs(r) for r in rewards))
