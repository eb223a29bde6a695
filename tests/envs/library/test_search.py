from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from temper.catalogue import GENERATORS
from temper.envs.library.problems import SAMPLES
from temper.envs.library.search import Index, SearchEnv, normalised, open_index, search, search_demo
from temper.envs.threads import check_isolation_of_episodes
from temper.envs.tool_calls import write_call
from temper.envs.tools import ToolError
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task

TITLES = [json.loads(line)["title"] for line in (SAMPLES / "corpus.jsonl").read_text().splitlines()]
QUESTIONS = 128
Policy = Callable[[str], str]
"""What was shown last to what is said next."""


def play(task: Task, policy: Policy, call_format: str = "hermes", **options: object) -> list[EnvReply]:
    async def go() -> list[EnvReply]:
        env = SearchEnv(call_format=call_format, **options)  # type: ignore[arg-type]
        shown = (await env.start(task, 0)).messages[-1].content
        replies: list[EnvReply] = []
        while len(replies) < 12 and not (replies and replies[-1].is_done):
            replies.append(await env.step(Message(role="assistant", content=policy(shown))))
            shown = "\n".join(message.content for message in replies[-1].messages)
        await env.close()
        return replies

    return asyncio.run(go())


def says(*texts: str) -> Policy:
    rest = iter(texts)
    return lambda shown: next(rest, "I do not know")


class Oracle:
    """Follows a question through the articles: looks a name up, opens it, reads the next name, and so on."""

    def __init__(self, question: str, call_format: str = "hermes") -> None:
        self._question, self._format = question, call_format
        names = [title.removesuffix(" (ship)").removesuffix(" (river)") for title in TITLES]
        self._name = max((name for name in names if name in question), key=len)
        self._is_open = False

    def __call__(self, shown: str) -> str:
        if (
            found := re.search(rf"^(a\d\d): {re.escape(self._name)}( \(\w+\))?:", shown, flags=re.MULTILINE)
        ) is not None:
            self._is_open = True
            return write_call(self._format, "open", {"id": found[1]})
        if self._is_open:
            self._is_open = False
            article = " ".join(shown.splitlines()[2:-1])
            if (answer := self._read(article)) is not None:
                return f"It says so.\n{answer}"
            linked = re.search(
                r"born in \d+ in ([^,]+)|author is ([^.]+)\.|home port is ([^.]+)\.|stands in ([^.]+)\.", article
            )
            if "designer" in self._question:
                linked = re.search(r"designed by (.+?) and", article)
            linked = linked or re.search(r"festival in ([^.]+)\.", article)
            assert linked is not None, article
            self._name = next(group for group in linked.groups() if group)
        return write_call(self._format, "search", {"query": self._name})

    def _read(self, article: str) -> str | None:
        asked = self._question
        patterns = {
            "rise?": r"rises in (.+?) and", "known for": r"known for its ([^.]+)\.", "founded": r"founded in (\d+)",
            "mayor": r"mayor is ([^.]+)\.", "river": r"on the river ([^.]+)\.", "launched": r"launched in (\d+)",
            "year": r"born in (\d+)", "town": r"born in \d+ in ([^,]+),",
        }  # fmt: skip
        pattern = next(pattern for words, pattern in patterns.items() if words in asked)
        found = re.search(pattern, article)
        return found and found[1]


def test_an_oracle_that_only_reads_articles_answers_every_question_of_the_sample() -> None:
    for index in range(QUESTIONS):
        task = search(index, 0)
        reply = play(task, Oracle(task.messages[0].content))[-1]
        assert reply.is_done
        assert reply.reward == 1.0, task


def test_the_plain_protocol_works_too() -> None:
    task = search(0, 0, hops=2)
    assert play(task, Oracle(task.messages[0].content, "plain"), "plain")[-1].reward == 1.0


def test_guessing_one_of_the_known_answers_scores_low() -> None:
    draw, tasks = random.Random(0), [search(index, 0) for index in range(QUESTIONS)]
    guesses = [str(task.answer) for task in tasks]
    assert sum(play(task, says(draw.choice(guesses)))[-1].reward or 0.0 for task in tasks) / QUESTIONS < 0.1


def test_two_hop_questions_have_their_answer_in_no_article_that_has_their_words() -> None:
    index = open_index(str(SAMPLES / "corpus.jsonl"))
    for number in range(40):
        task = search(number, 0, hops=2)
        oracle = Oracle(task.messages[0].content)
        first = index.search(oracle._name, 1).partition(":")[0]
        assert oracle._read(index.open(first)) is None, task


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("the Arven Hills", True), ("I think\nArven hills.", True), ("<answer>ARVEN HILLS</answer>", True),
        ("Arven", False), ("Lake Sorrel or the Arven Hills", False), ("", False), ("Arven Hills\nor not", False),
    ],
)  # fmt: skip
def test_only_the_answer_itself_scores(said: str, is_right: bool) -> None:
    task = Task(id="t", messages=(Message(role="user", content="?"),), env="search", answer="the Arven Hills")
    assert play(task, says(said))[-1].reward == float(is_right)


@pytest.mark.parametrize(
    "query", ['"', "AND", "a* OR (", "NEAR(x", "title : x", "-", "'; DROP TABLE article; --", "^x"]
)
def test_a_query_is_words_and_never_syntax(query: str) -> None:
    index = Index([("1", "One", "a text and more"), ("2", "Two", "another")])
    with contextlib.suppress(ToolError):  # which says that there are no words; anything else, as of SQLite, is a fault
        index.search(query, 5)
    assert index.open("1") == "One\na text and more"


def test_the_index_refuses_to_be_written() -> None:
    index = Index([("1", "One", "text")])
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        index._database.execute("DELETE FROM article")
    with pytest.raises(sqlite3.OperationalError):
        index._database.execute("DELETE FROM word")


def test_titles_count_more_than_mentions_and_word_forms_are_found() -> None:
    index = Index([("1", "Other", "heron heron heron"), ("2", "Heron Bridge", "a bridge"), ("3", "Third", "nothing")])
    assert index.search("heron", 5).startswith("2: Heron Bridge")
    assert index.search("bridges", 5).startswith("2:")
    assert index.search("zebra", 5) == "nothing found"


def test_malformed_calls_are_events_and_unknown_articles_are_tool_errors() -> None:
    missing = play(search(0, 0), says(write_call("hermes", "open", {"id": "nope"})))
    assert [event.kind for event in missing[0].events] == [EventKind.TOOL_CALL, EventKind.TOOL_ERROR]
    bad = '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'
    replies = play(search(0, 0), lambda shown: bad)
    assert {event.kind for reply in replies for event in reply.events} == {EventKind.BAD_CALL}
    assert (replies[-1].status, replies[-1].reward) == (Status.BAD_FORMAT, 0.0)


def test_nothing_that_an_article_says_counts_as_an_instruction_or_a_side_effect() -> None:
    replies = play(search(0, 0), says(write_call("hermes", "search", {"query": "river"})))
    assert "no instructions" in replies[0].messages[0].content
    assert all(event.kind is EventKind.TOOL_CALL for reply in replies for event in reply.events)


def test_episodes_share_no_state() -> None:
    said: Sequence[str] = [
        write_call("hermes", "search", {"query": "river"}),
        write_call("hermes", "open", {"id": "a01"}),
    ]
    other = [write_call("hermes", "open", {"id": "a02"}), '<tool_call>{"name": "x"}</tool_call>', "an answer"]
    asyncio.run(check_isolation_of_episodes(SearchEnv, search(0, 0), said=said, other=other))


def test_a_corpus_may_be_a_folder_and_faults_in_it_are_named(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.txt").write_text("The gate is blue.")
    (tmp_path / "below" / "two.md").write_text("The door is red.")
    index = open_index(str(tmp_path))
    assert index.search("door", 5).startswith("below/two.md: two")
    assert index.open("one.txt") == "one\nThe gate is blue."
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": "1", "title": "a", "text": "b"}\n' * 2)
    with pytest.raises(UserError, match="two articles have the id '1'"):
        SearchEnv(corpus=str(twice))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"id": 1, "title": "a", "text": "b"}\n')
    with pytest.raises(UserError, match="row 1"):
        SearchEnv(corpus=str(wrong))
    (tmp_path / "empty").mkdir()
    for nowhere in (tmp_path / "none.jsonl", tmp_path / "empty"):
        with pytest.raises(UserError):
            SearchEnv(corpus=str(nowhere))


def test_questions_are_seeded_chosen_by_hops_and_need_an_answer() -> None:
    assert search(3, 1) == search(3, 1)
    assert len({search(index, 1).id for index in range(QUESTIONS)}) == QUESTIONS
    assert {search(i, 0, hops=1).messages for i in range(56)} == {search(i, 5, hops=1).messages for i in range(56)}
    assert [search(i, 0).id for i in range(9)] != [search(i, 5).id for i in range(9)]
    with pytest.raises(UserError, match="hops=7"):
        search(0, 0, hops=7)
    with pytest.raises(TaskError, match="gold"):
        asyncio.run(SearchEnv().start(Task(id="t", messages=(Message(role="user", content="?"),)), 0))
    assert normalised("The  Arven-Hills!") == "arven hills"


def play_demo(task: Task, **options: Any) -> list[EnvReply]:
    """The episode in which the policy says what the demonstration says."""
    said = iter([*(message.content for message in task.messages if message.role == "assistant"), task.answer or ""])
    return play(task, lambda shown: next(said), **options)


def test_a_demonstration_is_a_right_episode_in_the_very_words_of_the_environment() -> None:
    assert GENERATORS["search_demo"] is search_demo
    for index in range(QUESTIONS):
        task = search_demo(index, 1, results=3)
        replies = play_demo(task, call_format="plain", show_tools="no", results=3)
        assert [message for reply in replies for message in reply.messages] == [
            message for message in task.messages if message.role == "tool"
        ]
        assert (replies[-1].reward, task.extra["trained_turns"]) == (1.0, "all")


def test_a_demonstration_can_be_written_in_another_convention() -> None:
    assert play_demo(search_demo(0, 1, call_format="hermes"))[-1].reward == 1.0


def test_a_corpus_that_answers_no_question_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "corpus.jsonl"
    other.write_text(json.dumps({"id": "a", "title": "Marlund", "text": "Marlund is a town."}))
    with pytest.raises(UserError, match="belong together"):
        search_demo(0, 1, corpus=str(other))


def test_output_is_marked_as_untrusted_unless_the_model_was_taught_the_plain_words() -> None:
    for show_tools, is_marked in (("text", True), ("no", False)):
        reply = play(search(0, 1), lambda shown: "search(Marlund)", call_format="plain", show_tools=show_tools)[0]
        assert ("no instructions" in reply.messages[0].content) == is_marked


def test_the_state_is_what_was_seen_in_whatever_order() -> None:
    asked = [write_call("hermes", "search", {"query": title}) for title in TITLES[:2]]

    def after(*said: str) -> str | None:
        return play(search(0, 1), says(*said))[len(said) - 1].state

    assert after(*asked) == after(*reversed(asked))
    assert after(*asked, asked[1]) == after(asked[0], *asked)
    assert len({after(*asked), after(asked[0]), after(asked[1])}) == 3
