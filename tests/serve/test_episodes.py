"""What of a file of records is one episode, and that a score belongs to what was judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from temper.models.tiny import character_tokenizer
from temper.serve.episodes import read_episodes, write_scores
from temper.serve.records import RecordFile, Speech
from temper.types import Finish, Score, Status
from tests.fakes.recorded import SPEECH, ask, completion, say, write_episode


def test_a_session_is_an_episode_and_so_is_a_completion_without_one(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.db", SPEECH)
    first, second = completion([2, 5], [7, 1]), completion([2, 5, 7, 1, 9], [8, 1])
    write_episode(file, "s", [say("one", first, ask("more")), say("two", second)], [ask("q")])
    write_episode(file, "chatcmpl-x", [say("three", completion([3], [4, 1]))], [ask("r")], has_session=False)
    session, alone = read_episodes(tmp_path / "r.db")
    assert (session.id, session.first, session.last) == ("s", 1, 2)
    assert [turn.completion for turn in session.played.turns] == [first, second]
    assert session.played.turns[0].replies == (ask("more"),)
    assert (session.played.opening, session.played.text) == ((ask("q"),), "two")
    assert alone.id == "chatcmpl-x/0"
    assert session.speeches == {SPEECH}


def test_what_was_said_last_is_judged_and_what_nobody_waited_for_is_left_out(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.db", SPEECH)
    for text, drawn in (
        ("a", completion([2, 5], [7, 1])),
        ("side", completion([3], [4, 1])),
        ("b", completion([2, 5, 7, 1], [8], finish=Finish.LENGTH)),
        ("cut", completion([2], [6], finish=Finish.ABORT)),
    ):
        write_episode(file, "s", [say(text, drawn)], [ask(text)])
    write_episode(file, "gone", [say("", completion([2], [], finish=Finish.ABORT))], [ask("q")])
    (episode,) = read_episodes(tmp_path / "r.db")
    assert [turn.message.content for turn in episode.played.turns] == ["a", "b", "side"]
    assert episode.played.text == "b"
    assert episode.played.status is Status.TRUNCATED_LENGTH


def test_a_score_is_of_what_was_judged(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    file = RecordFile(path, SPEECH)
    write_episode(file, "s", [say("one", completion([2, 5], [7, 1]))], [ask("q")])
    write_scores(path, {1: Score.of(0.5)}, "people")
    (episode,) = read_episodes(path)
    assert (episode.played.score, episode.judge) == (Score.of(0.5), "people")
    write_scores(path, {1: Score.error("crashed \ud800")}, "math")
    assert read_episodes(path)[0].played.score == Score.error("crashed \\ud800")
    write_episode(file, "s", [say("two", completion([2, 5, 7, 1], [8, 1]))], [ask("more")])
    assert read_episodes(path)[0].judge == ""


def test_speech_is_what_ids_mean_and_how_messages_are_written() -> None:
    def speech(alphabet: str, **changes: Any) -> Speech:
        tokenizer = character_tokenizer(alphabet)
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        return Speech.of(tokenizer)

    assert speech("abc") == speech("abc", padding_side="left")
    assert speech("abc").tokenizer != speech("acb").tokenizer
    other = speech("abc", chat_template="{{ messages }}")
    assert other.tokenizer == speech("abc").tokenizer
    assert other.template != speech("abc").template
