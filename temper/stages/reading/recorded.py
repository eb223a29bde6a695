"""Recorded episodes as tasks with attempts: which of them a stage may train on, and which belong together.

Owns: what is asked of records, groups of one prompt over all files of a stage, the words for what is wrong. Refuses:
the file (serve/records.py), scores (serve/episodes.py), drawing groups for a step (stages/recorded.py).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordFile:
    """What a [[train]] table names."""

    part: StageSource
    path: Path
    name: str
    """What its prompts are called by: its own name, after the number of its table where several files have that name.
    A name holds no slash, so no other file is called the same."""
    episodes: Sequence[RecordedEpisode]
    problems: dict[str, str] = field(default_factory=dict)
    """Why an episode cannot be trained on, by its id."""

    @property
    def sound(self) -> list[RecordedEpisode]:
        return [episode for episode in self.episodes if episode.id not in self.problems]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempts:
    """All attempts at one prompt, in the order of the files and of their episodes in them."""

    files: tuple[_RecordFile, ...]
    """Where each of the episodes lies."""
    episodes: tuple[RecordedEpisode, ...]

    @property
    def owner(self) -> _RecordFile:
        """The first file that has the prompt: its weight and size are the prompt's."""
        return self.files[0]

    @property
    def task(self) -> Task:
        first = self.episodes[0]
        return Task(id=f"{self.owner.name}:{first.first}", messages=first.played.opening)


class RecordReader:
    """Reads the files of records of one stage, and remembers what it has read."""

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

    def read(self, parts: Sequence[StageSource]) -> list[FileSource]:
        """The prompts of each file, as tasks; one that several files have is a task of the first. Raises UserError for
        episodes that cannot be trained on, unless skip_bad leaves them out."""
        files = self._open(parts)
        groups = _by_prompt(files)
        for group in groups:
            if len(group.episodes) < self._needs.min_members:
                for file, episode in zip(group.files, group.episodes, strict=True):
                    file.problems[episode.id] = self._too_few
        for file in files:
            if file.problems and not file.part.skip_bad:
                raise UserError(f"{file.path}: {_listed(file)}. train.skip_bad = true leaves them out")
            self.left_out += tuple(f"{name}: {problem}" for name, problem in file.problems.items())
        kept = [group for group in groups if self._is_kept(group)]
        own = [_cut(file, [group for group in kept if group.owner is file]) for file in files]
        used = {id(file) for groups in own for group in groups for file in group.files}
        for file, groups in zip(files, own, strict=True):
            _require_use(file, is_used=id(file) in used, has_own=bool(groups))
        self.members = {group.task.id: tuple(map(_member, group.episodes)) for groups in own for group in groups}
        # A run goes on with the same episodes and scores, or not at all: the stream compares names.
        return [
            FileSource(f"{file.path.name} {_digest(groups)}", tuple(group.task for group in groups))
            for file, groups in zip(files, own, strict=True)
        ]

    def _open(self, parts: Sequence[StageSource]) -> list[_RecordFile]:
        """Every file, with what is wrong with single episodes."""
        paths = [Path(part.records).expanduser() for part in parts]
        shared = {name for name, count in Counter(path.name for path in paths).items() if count > 1}
        files, seen = list[_RecordFile](), dict[str, Path]()
        for place, (part, path) in enumerate(zip(parts, paths, strict=True), 1):
            name = f"{place}/{path.name}" if path.name in shared else path.name
            file = _RecordFile(part=part, path=path, name=name, episodes=read_episodes(path))
            for episode in file.episodes:
                before = seen.get(episode.origin)
                problem = f"it is in {before}, too: a copy counts once" if before else self._problem(episode)
                if problem:
                    file.problems[episode.id] = problem
            seen |= {episode.origin: path for episode in file.sound}
            files.append(file)
        return files

    def _is_kept(self, group: _Attempts) -> bool:
        return len(group.episodes) >= self._needs.min_members and fingerprint(group.task) not in self._excluded

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


def _by_prompt(files: Sequence[_RecordFile]) -> list[_Attempts]:
    """Episodes whose first prompts are equal, id by id, in the order of files and in that in which they began."""
    by_ids: dict[tuple[int, ...], list[tuple[_RecordFile, RecordedEpisode]]] = {}
    for file in files:
        for episode in file.sound:
            by_ids.setdefault(episode.played.turns[0].completion.prompt_ids, []).append((file, episode))
    pairs = (zip(*own, strict=True) for own in by_ids.values())
    return [_Attempts(files=files, episodes=episodes) for files, episodes in pairs]


def _cut(file: _RecordFile, groups: list[_Attempts]) -> list[_Attempts]:
    """As many of a file's own prompts as the recipe asks for."""
    if len(groups) < (size := file.part.size):
        raise UserError(f"{file.path}: size={size} is more than its {len(groups)} prompts. Use size = 0 for all")
    return groups[: size or len(groups)]


def _require_use(file: _RecordFile, *, is_used: bool, has_own: bool) -> None:
    """Refuses a file that nothing is trained on, and a weight that acts on nothing."""
    if not is_used:
        why = "every prompt is held out or cut off by the size of a table before, or nothing was recorded"
        raise UserError(f"{file.path}: nothing is left to train on: {_listed(file) if file.problems else why}")
    if not has_own and file.part.weight != 1.0:
        raise UserError(
            f"{file.path}: weight={file.part.weight:g} acts on nothing, for files before it in the recipe have all its "
            "prompts and their weights count. Leave it out"
        )


def _member(episode: RecordedEpisode) -> Trajectory:
    """Drawn by version 0, that which a stage starts from: versions of a server mean nothing here."""
    return replace(episode.played, turns=tuple(map(_as_first_version, episode.played.turns)))


def _as_first_version(turn: Turn) -> Turn:
    versions = np.minimum(array_of(turn.completion.versions), 0)  # what was put in stays -1
    return replace(turn, completion=replace(turn.completion, versions=versions.tolist()))


def _digest(prompts: Sequence[_Attempts]) -> str:
    said = [(episode.id, episode.last, episode.played.score.value) for one in prompts for episode in one.episodes]
    return hashlib.blake2b(repr(said).encode(), digest_size=6).hexdigest()


def _listed(file: _RecordFile) -> str:
    """The commonest problems, each with the first episode that has it."""
    first = {problem: name for name, problem in reversed([*file.problems.items()])}
    counts = Counter(file.problems.values()).most_common(MAX_NAMED)
    said = "; ".join(f"{count} (first: {first[problem]}): {problem}" for problem, count in counts)
    return f"{len(file.problems)} of {len(file.episodes)} episodes cannot be trained on: {said}"
