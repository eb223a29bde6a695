"""Files of records without a server: episodes that are written as a gateway writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from temper.serve.episodes import read_episodes, write_scores
from temper.serve.records import Entry, PromptOrigin, RecordFile, Speech
from temper.types import Completion, Finish, Message, SamplingParams, Score, Turn

SPEECH = Speech(tokenizer="ids", template="chat")
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, stop_ids=(1,))


def completion(
    prompt: Sequence[int],
    drawn: Sequence[int],
    *,
    params: SamplingParams | None = PARAMS,
    finish: Finish = Finish.STOP,
    first_logprob: float = -3.0,
    version: int = 7,
) -> Completion:
    return Completion(
        prompt_ids=tuple(prompt),
        token_ids=list(drawn),
        logprobs=[first_logprob - 0.1 * place for place in range(len(drawn))],
        versions=[version] * len(drawn),
        finish=finish,
        params=params,
    )


def write_episode(
    file: RecordFile, name: str, turns: Sequence[Turn], opening: Sequence[Message], *, has_session: bool = True
) -> None:
    """One row for every turn, each of which goes on from the one before."""
    said, parent = tuple(opening), None
    for number, turn in enumerate(turns):
        origin = PromptOrigin(
            history="new" if parent is None else "extends", parent=parent, messages=said, num_messages=1
        )
        parent = file.add(
            Entry(
                request_id=f"chatcmpl-{name}-{number}" if has_session else name,
                choice=0,
                session=name if has_session else "",
                model="tiny",
                created=0.0,
                origin=origin,
                reply=turn.message.content,
                said=turn.message.content,
                drawn_text=f"{name} {number}",
                reply_key=None,
                completion=turn.completion,
            )
        )
        said = turn.replies


def say(text: str, drawn: Completion, *replies: Message) -> Turn:
    return Turn(completion=drawn, message=Message(role="assistant", content=text), replies=replies)


def ask(text: str) -> Message:
    return Message(role="user", content=text)


def write_pairs(path: Path, *, scores: Sequence[float | None] = (1.0, 0.0, 0.5, 1.0), speech: Speech = SPEECH) -> None:
    """Two prompts with two attempts each, and the scores of the four."""
    file = RecordFile(path, speech)
    for name, prompt, drawn in (("a0", 5, 7), ("a1", 5, 8), ("b0", 6, 9), ("b1", 6, 10)):
        turn = say(f"word {drawn}", completion([2, prompt], [drawn, drawn + 20, 1]))
        write_episode(file, name, [turn], [ask(f"question {prompt}")])
    file.close()
    last = {episode.id: episode.last for episode in read_episodes(path)}
    given = zip(last.values(), scores, strict=True)
    write_scores(path, {row: Score.of(score) for row, score in given if score is not None}, "exact")
