"""Recorded episodes as tasks with attempts: which of them a stage may train on, and which belong together.

Owns: what is asked of records, groups of one prompt, the words for what is wrong. Refuses: the file (serve/records.py),
scores (serve/episodes.py), drawing groups for a step (stages/recorded.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from temper.config import StageSource
from temper.errors import UserError
from temper.serve.episodes import RecordedEpisode, read_episodes
from temper.serve.records import Speech
from temper.tasks.dataset import FileSource, fingerprint
from temper.types import Completion, SamplingParams, Task, Trajectory, Turn, array_of

MAX_NAMED = 3
"""Most kinds of problems that one message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordNeeds:
    """What recorded episodes must have so that a stage can train on them."""

    min_members: int = 1
    """Attempts at one prompt, where they are compared."""
    behavior: bool = False
    """Log-probabilities by the policy that drew, which a policy gradient corrects by."""
    chats: bool = False
    """Messages, which can be written as rows of text."""
    time_order: bool = False
    """Turns that stand in the order in which they came, which credit along tokens takes for granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """All attempts at one prompt."""

    task: Task
    episodes: tuple[RecordedEpisode, ...]


class RecordReader:
    """Reads files of records for one stage, and remembers what it has read."""

    def __init__(
        self, *, needs: RecordNeeds, speech: Speech, params: SamplingParams, longest_row: int, excluded: frozenset[str]
    ) -> None:
        """speech: of the model that is trained. params: how the stage takes tokens to be drawn. excluded: fingerprints
        of prompts that are held out."""
        self._needs, self._speech, self._params = needs, speech, params
        self._longest_row, self._excluded = longest_row, excluded
        self.members: dict[str, tuple[Trajectory, ...]] = {}
        """Attempts at each task, by its id."""
        self.left_out: tuple[str, ...] = ()
        """Episodes that skip_bad left out: name and reason of each."""

    def read(self, part: StageSource) -> FileSource:
        """The prompts of a file, each a task. Raises UserError for episodes that cannot be trained on, unless skip_bad
        leaves them out."""
        path = Path(part.records).expanduser()
        episodes = read_episodes(path)
        problems = {episode.id: problem for episode in episodes if (problem := self._problem(episode))}
        prompts = _by_prompt(path.name, [episode for episode in episodes if episode.id not in problems])
        for attempts in prompts:
            if len(attempts.episodes) < self._needs.min_members:
                problems |= dict.fromkeys((episode.id for episode in attempts.episodes), self._too_few)
        if problems and not part.skip_bad:
            raise UserError(f"{path}: {_listed(problems, len(episodes))}. train.skip_bad = true leaves them out")
        kept = [attempts for attempts in prompts if attempts.episodes[0].id not in problems]
        kept = [attempts for attempts in kept if fingerprint(attempts.task) not in self._excluded]
        if not kept:
            why = _listed(problems, len(episodes)) if problems else "every prompt is held out, or nothing was recorded"
            raise UserError(f"{path}: nothing is left to train on: {why}")
        if len(kept) < part.size:
            raise UserError(f"{path}: size={part.size} is more than its {len(kept)} prompts. Use size = 0 for all")
        kept = kept[: part.size or len(kept)]
        self.left_out += tuple(f"{name}: {problem}" for name, problem in problems.items())
        self.members |= {attempts.task.id: tuple(map(_member, attempts.episodes)) for attempts in kept}
        # A run goes on with the same episodes and scores, or not at all: the stream compares names.
        return FileSource(f"{path.name} {_digest(kept)}", tuple(attempts.task for attempts in kept))

    @property
    def _too_few(self) -> str:
        return f"fewer than {self._needs.min_members} attempts at its prompt, and attempts are compared"

    def _problem(self, episode: RecordedEpisode) -> str | None:
        """Why an episode cannot be trained on; None: it can."""
        for speech in episode.speeches:
            if speech.tokenizer != self._speech.tokenizer:
                return "another tokenizer drew it than the model's: train a checkpoint of the model that was served"
            if speech.template != self._speech.template:
                return (
                    "another chat template wrote its prompts than the model's: restore chat_template.jinja, and set "
                    "prompt.chat_options to what the served model had"
                )
        if not episode.judge:
            return "it has no score: temper score-records gives one"
        if not episode.played.score.is_value:
            return f"its score is no number ({episode.played.score.reason}): mend that, temper score-records --again"
        if self._needs.chats and not episode.played.opening:
            return "it is a plain completion, and only chats become rows of text"
        order = episode.played.turn_order
        if self._needs.time_order and list(order) != sorted(order):
            return (
                "its conversations were led side by side: their turns do not stand in the order of time, and the "
                'objective gives credit along tokens. Use e.g. objective.advantage = "group_mean" or "state_returns"'
            )
        completions = [turn.completion for turn in episode.played.turns]
        longest = max(len(one.prompt_ids) + len(one.token_ids) for one in completions)
        if longest > self._longest_row:
            return f"it has more tokens than fit ({self._longest_row})"
        return next(filter(None, map(self._wrong_draw, completions)), None) if self._needs.behavior else None

    def _wrong_draw(self, completion: Completion) -> str | None:
        """Why its log-probabilities are not those of a policy that the trainer can compare with; None: they are."""
        if completion.params is None or not np.isfinite(array_of(completion.logprobs)).all():
            return "it has no log-probabilities"
        if completion.params.temperature == 0:
            return "it was drawn greedily (temperature 0), which is no policy to correct for"
        for name in ("temperature", "top_k", "top_p", "min_p"):
            drawn, wanted = getattr(completion.params, name), getattr(self._params, name)
            if drawn != wanted:
                return f"it was drawn with {name} = {drawn:g}: set sampling.{name} = {drawn:g}, which is {wanted:g}"
        if completion.params.is_truncated and completion.keep_ids is None:
            return "its log-probabilities are within tokens that were not recorded: serve with top_p 1 and top_k 0"
        return None


def _by_prompt(name: str, episodes: Sequence[RecordedEpisode]) -> list[_Attempts]:
    """Episodes whose first prompts are equal, id by id, in the order in which they began."""
    by_ids: dict[tuple[int, ...], list[RecordedEpisode]] = {}
    for episode in episodes:
        by_ids.setdefault(episode.played.turns[0].completion.prompt_ids, []).append(episode)
    return [
        _Attempts(task=Task(id=f"{name}:{own[0].first}", messages=own[0].played.opening), episodes=tuple(own))
        for own in by_ids.values()
    ]


def _member(episode: RecordedEpisode) -> Trajectory:
    """Drawn by version 0, that which a stage starts from: versions of a server mean nothing here."""
    return replace(episode.played, turns=tuple(map(_as_first_version, episode.played.turns)))


def _as_first_version(turn: Turn) -> Turn:
    versions = np.minimum(array_of(turn.completion.versions), 0)  # what was put in stays -1
    return replace(turn, completion=replace(turn.completion, versions=versions.tolist()))


def _digest(prompts: Sequence[_Attempts]) -> str:
    said = [(episode.id, episode.last, episode.played.score.value) for one in prompts for episode in one.episodes]
    return hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()


def _listed(problems: Mapping[str, str], total: int) -> str:
    """The commonest problems, each with the first episode that has it."""
    first = {problem: name for name, problem in reversed([*problems.items()])}
    counts = Counter(problems.values()).most_common(MAX_NAMED)
    said = "; ".join(f"{count} (first: {first[problem]}): {problem}" for problem, count in counts)
    return f"{len(problems)} of {total} episodes cannot be trained on: {said}"
