"""`temper score-records FILE`: scores for recorded episodes, by a verifier or by people.

Owns: which task an episode answers, reading people's scores, what is written out for them. Refuses: training on the
scores (stages/recorded.py), and replacing a score without being told to.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.table import Table

from temper import calls
from temper.catalogue import reward_of
from temper.commands.progress import show_work
from temper.config.sources import RewardConfig, require_slot
from temper.errors import UserError, did_you_mean
from temper.rewards.composite import CompositeReward
from temper.rollout.selection import normalised
from temper.serve.episodes import RecordedEpisode, read_episodes, write_scores
from temper.tasks.dataset import read_file
from temper.tasks.files import rows_of
from temper.types import Message, Scalar, Score, ScoreKind, Task

AT_ONCE = 32
PEOPLE = "people"


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Who judges, and what they need."""

    reward: str = ""
    """A kind of reward; empty: no verifier."""
    options: Mapping[str, Scalar | list[Scalar]] = field(default_factory=dict)
    scores: Path | None = None
    """People's scores: rows with `id` and `score`. None: there are none."""
    tasks: Path | None = None
    """Where gold answers are, found by what was asked. None: the reward needs none."""
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    template: str = "{prompt}"
    """How a task's prompt became what the client asked."""
    is_again: bool = False
    """Judge also what has a score."""


@dataclass(frozen=True, kw_only=True)
class ScoredRecords:
    """What became of a file's episodes."""

    episodes: tuple[RecordedEpisode, ...]
    given: Mapping[str, Score]
    """New scores, by episode."""
    unknown: tuple[str, ...]
    """Episodes whose question is in no task."""

    @property
    def failures(self) -> Counter[str]:
        """Why there is no number, where the judge failed."""
        return Counter(str(score.reason) for score in self.given.values() if score.kind is ScoreKind.ERROR)


def score_records(path: Path, wanted: ScoreRequest) -> ScoredRecords:
    """Judges and keeps the scores in the file. With neither a reward nor people's scores it only looks."""
    if wanted.reward and wanted.scores is not None:
        raise UserError("--reward and --scores each give scores: use one after the other")
    if not wanted.reward and (wanted.options or wanted.tasks is not None):
        raise UserError("--options and --tasks are those of --reward, and none is given")
    episodes = read_episodes(path)
    open_ = [episode for episode in episodes if wanted.is_again or not episode.judge]
    given, unknown = dict[str, Score](), list[str]()
    if wanted.scores is not None:
        given = _read_scores(wanted.scores, episodes, is_again=wanted.is_again)
    elif wanted.reward:
        known = _tasks_of(episodes, wanted)
        unknown = [episode.id for episode in open_ if episode.id not in known]
        if episodes and not known:
            raise UserError(
                f"{wanted.tasks}: none of its prompts is what a client asked, e.g. {_asked(episodes[0])!r:.99}. Name "
                f'the column with --prompt-field, and how it was asked with --template, e.g. "Question: {{prompt}}"'
            )
        given = calls.run(_judge([episode for episode in open_ if episode.id in known], known, wanted))
    last_of = {episode.id: episode.last for episode in episodes}
    write_scores(path, {last_of[name]: score for name, score in given.items()}, wanted.reward or PEOPLE)
    return ScoredRecords(episodes=tuple(read_episodes(path)), given=given, unknown=tuple(unknown))


def _tasks_of(episodes: Sequence[RecordedEpisode], wanted: ScoreRequest) -> dict[str, Task]:
    """What each episode was asked, by name; those whose question no task asks are left out."""
    if wanted.tasks is None:
        return {episode.id: Task(id=episode.id, messages=episode.played.opening) for episode in episodes}
    try:
        require_slot(wanted.template)
    except ValueError as error:
        raise UserError(f"--template: {error}") from error
    by_question: dict[str, Task] = {}
    for task in read_file(wanted.tasks, wanted.prompt_field, wanted.answer_field).tasks:
        question = normalised([wanted.template.replace("{prompt}", task.messages[-1].content)])
        if by_question.setdefault(question, task).answer != task.answer:
            raise UserError(f"{by_question[question].id} and {task.id} ask the same and have different answers")
    found = ((episode.id, by_question.get(normalised([_asked(episode)]))) for episode in episodes)
    return {name: task for name, task in found if task is not None}


def _asked(episode: RecordedEpisode) -> str:
    """The last thing that was said to the model before it spoke."""
    opening = episode.played.opening
    return opening[-1].content if opening else ""


async def _judge(
    episodes: Sequence[RecordedEpisode], tasks: Mapping[str, Task], wanted: ScoreRequest
) -> dict[str, Score]:
    rubric = reward_of([RewardConfig(kind=wanted.reward, options=dict(wanted.options))])
    try:
        advice = "--tasks names a file with gold answers, found by what was asked."
        rubric.require_scorable((tasks[episode.id] for episode in episodes), advice=advice)
        await rubric.start()
        with show_work("scoring", total=len(episodes)) as work:
            return await _scores(rubric, episodes, tasks, work.advance)
    finally:
        await rubric.close()


async def _scores(
    rubric: CompositeReward,
    episodes: Sequence[RecordedEpisode],
    tasks: Mapping[str, Task],
    progress: Callable[[int], None],
) -> dict[str, Score]:
    places = asyncio.Semaphore(AT_ONCE)

    async def score(episode: RecordedEpisode) -> Score:
        async with places:
            found, _ = await rubric.score(tasks[episode.id], episode.played)
        progress(1)
        return found

    found = await asyncio.gather(*map(score, episodes))
    return {episode.id: value for episode, value in zip(episodes, found, strict=True)}


def _read_scores(path: Path, episodes: Sequence[RecordedEpisode], *, is_again: bool) -> dict[str, Score]:
    """People's scores by episode. Raises UserError for the first row that is not one."""
    by_name = {episode.id: episode for episode in episodes}
    # A client knows its request by an id without the number of the choice.
    alone = Counter(name.rpartition("/")[0] for name in by_name)
    found: dict[str, Score] = {}
    for row in rows_of(path):
        where, content = f"{path}, {row.place}", row.content
        if not isinstance(content, dict) or "id" not in content or "score" not in content:
            raise UserError(f'{where}: the row is {content!r:.80}. Write {{"id": ..., "score": ...}}')
        name, score = str(content["id"]), content["score"]
        if score is None:
            continue  # not judged yet
        if name not in by_name and alone[name] == 1:
            name = f"{name}/0"
        if name not in by_name:
            several = f" It has {alone[name]} choices: write {name}/0 for the first." if alone[name] else ""
            raise UserError(
                f'{where}: no recorded episode is called "{name}".{several or did_you_mean(name, by_name)} Episodes '
                f"are called as their session, or as the id of their request; --export writes all of them"
            )
        if isinstance(score, str) or not math.isfinite(score):
            raise UserError(f"{where}: score {score!r} is no finite number")
        if name in found or (by_name[name].judge and not is_again):
            said = "in this file" if name in found else f"by {by_name[name].judge}; --again replaces it"
            raise UserError(f'{where}: episode "{name}" has a score already, {said}')
        found[name] = Score.of(float(score))
    return found


def export(episodes: Sequence[RecordedEpisode], path: Path) -> None:
    """What people judge: one JSON object a line, with `score` to be filled in where it is null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(_line(episode), ensure_ascii=False) + "\n" for episode in episodes)
    path.write_bytes(lines.encode("utf-8", "replace"))


def _line(episode: RecordedEpisode) -> dict[str, object]:
    played = episode.played
    said: list[Message] = [*played.opening]
    for turn in played.turns:
        said += (turn.message, *turn.replies)
    return {"id": episode.id, "score": played.score.value, "messages": [message.as_dict() for message in said]}


def render(found: ScoredRecords) -> Table:
    values = [episode.played.score.value for episode in found.episodes if episode.played.score.value is not None]
    judges = Counter(episode.judge for episode in found.episodes if episode.judge)
    table = Table("", "", show_header=False)
    table.add_row("episodes", str(len(found.episodes)))
    table.add_row("scored now", str(sum(score.is_value for score in found.given.values())))
    for reason, count in found.failures.most_common(3):
        table.add_row("the verifier failed on", f"{count}: {reason}")
    if found.unknown:
        table.add_row("asked by no task", f"{len(found.unknown)}, e.g. {found.unknown[0]}")
    table.add_row("with a score", f"{len(values)}: {', '.join(f'{n} by {who}' for who, n in judges.items()) or 'none'}")
    if values:
        table.add_row("mean, lowest, highest", f"{fmean(values):.4g}, {min(values):.4g}, {max(values):.4g}")
    return table
