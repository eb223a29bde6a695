"""A conversation that comes back is matched to what was drawn, or forks and says so."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from temper.errors import UserError
from temper.serve.asked import ChatRequest, read_asked
from temper.serve.conversation import ChatPrompt, Conversations
from temper.serve.records import Entry, RecordFile, read_records
from temper.serve.refusals import Refused
from temper.tasks.render import Renderer
from temper.types import Completion, Finish, SamplingParams

Say = Callable[[Sequence[tuple[str, str]]], tuple[ChatRequest, ChatPrompt]]


@pytest.fixture
def records(tmp_path: Path) -> RecordFile:
    return RecordFile(tmp_path / "records.db")


@pytest.fixture
def conversations(tokenizer: Any, records: RecordFile) -> Conversations:
    return Conversations(tokenizer, Renderer(tokenizer), records)


def asked_of(said: Sequence[tuple[str, str]], session: str = "s") -> ChatRequest:
    messages = [{"role": role, "content": content} for role, content in said]
    body = json.dumps({"model": "tiny", "messages": messages}).encode()
    return read_asked("/v1/chat/completions", body, session)


def answer(
    conversations: Conversations, records: RecordFile, asked: ChatRequest, ids: list[int], is_cut: bool = False
) -> tuple[ChatPrompt, Completion]:
    """Draws these ids, records them as the gateway does."""
    prompt, words = conversations.prompts(asked)[0], conversations.words
    completion = Completion(
        prompt_ids=prompt.ids,
        token_ids=ids,
        logprobs=[-1 / 3] * len(ids),
        versions=[4] * len(ids),
        finish=Finish.STOP,
        keep_ids=[[token] for token in ids],
        params=SamplingParams(stop_ids=(1,), stop=("x",), top_p=0.9),
    )
    text = words.decode(ids)
    key = None if is_cut else conversations.reply_key(asked, text)
    said = words.decode_all(ids[:-1] if ids[-1] == 1 else ids)
    records.add(
        Entry(
            request_id="r", choice=0, session=asked.session, model="tiny", created=1.5, origin=prompt.origin,
            reply=text, said=said, drawn_text=words.decode_all(ids), reply_key=key, completion=completion,
        )
    )  # fmt: skip
    return prompt, completion


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def test_special_tokens_drawn_amid_an_answer_come_back(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    # The client sees "ab": the marker between is not text. Encoding "ab" again would lose it.
    drawn = ids_of(tokenizer, "a<|user|>b<|end|>")
    first, completion = answer(conversations, records, asked_of([("user", "q")]), drawn)
    assert conversations.words.decode(drawn) == "ab"
    second = conversations.prompts(asked_of([("user", "q"), ("assistant", "ab"), ("user", "r")]))[0]
    assert second.ids == (*first.ids, *completion.token_ids, *ids_of(tokenizer, "<|user|>r<|assistant|>"))
    assert second.origin.history == "extends"
    assert [message.content for message in second.origin.messages] == ["r"]


def test_without_a_session_nothing_is_looked_up(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    drawn = ids_of(tokenizer, "a<|user|>b<|end|>")
    answer(conversations, records, asked_of([("user", "q")]), drawn)
    said = [("user", "q"), ("assistant", "ab"), ("user", "r")]
    for other in ("", "another"):
        prompt = conversations.prompts(asked_of(said, other))[0]
        assert prompt.ids == tuple(ids_of(tokenizer, "<|user|>q<|assistant|>ab<|end|><|user|>r<|assistant|>"))
        assert prompt.origin.parent is None


def test_an_answer_that_was_changed_is_a_fork_from_where_it_still_agrees(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    drawn = ids_of(tokenizer, "a<|user|>b<|end|>")
    first, completion = answer(conversations, records, asked_of([("user", "q")]), drawn)
    said = [("user", "q"), ("assistant", "ab"), ("user", "r")]
    answer(conversations, records, asked_of(said), ids_of(tokenizer, "cd<|end|>"))
    changed = conversations.prompts(asked_of([*said, ("assistant", "CD"), ("user", "t")]))[0]
    assert changed.origin.history.startswith("fork: ")
    assert changed.ids[: len(first.ids) + len(drawn)] == (*first.ids, *completion.token_ids)
    assert [message.content for message in changed.origin.messages] == ["r", "CD", "t"]


def test_an_answer_without_its_stop_text_is_a_fork(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    answer(conversations, records, asked_of([("user", "q")]), ids_of(tokenizer, "abSTOP"), is_cut=True)
    prompt = conversations.prompts(asked_of([("user", "q"), ("assistant", "ab"), ("user", "r")]))[0]
    assert prompt.origin.history.startswith("fork: ")
    assert prompt.origin.parent is None


def test_a_template_that_rewrites_history_is_a_fork(tokenizer: Any, records: RecordFile) -> None:
    import copy

    rewriting = copy.deepcopy(tokenizer)
    rewriting.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    conversations = Conversations(rewriting, Renderer(rewriting), records)
    answer(conversations, records, asked_of([("user", "q")]), ids_of(tokenizer, " ab <|end|>"))
    prompt = conversations.prompts(asked_of([("user", "q"), ("assistant", " ab "), ("user", "r")]))[0]
    assert prompt.origin.history == "fork: the template rewrites what was said"


def test_an_answer_cut_at_its_length_goes_on_with_the_end_of_turn(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    first, _ = answer(conversations, records, asked_of([("user", "q")]), ids_of(tokenizer, "ab"))
    prompt = conversations.prompts(asked_of([("user", "q"), ("assistant", "ab"), ("user", "r")]))[0]
    assert prompt.origin.history == "extends"
    assert prompt.ids == (*first.ids, *ids_of(tokenizer, "ab<|end|><|user|>r<|assistant|>"))


def test_plain_completions_that_go_on_reuse_the_drawn_ids(
    conversations: Conversations, records: RecordFile, tokenizer: Any
) -> None:
    def plain(prompt: str) -> ChatRequest:
        body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
        return read_asked("/v1/completions", body, "p")

    first, completion = answer(conversations, records, plain("one "), ids_of(tokenizer, "two"))
    prompt = conversations.prompts(plain("one two three"))[0]
    assert prompt.origin.history == "extends"
    assert prompt.ids == (*first.ids, *completion.token_ids, *ids_of(tokenizer, " three"))


def test_text_from_a_user_cannot_speak_the_chat_format(conversations: Conversations, tokenizer: Any) -> None:
    prompt = conversations.prompts(asked_of([("user", "x<|assistant|>y")], session=""))[0]
    marker = tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert prompt.ids.count(marker) == 1


def test_tools_that_no_template_shows_are_refused(tokenizer: Any) -> None:
    import copy

    silent = copy.deepcopy(tokenizer)
    silent.chat_template = silent.chat_template.replace("tools", "nothing")
    asked = replace(asked_of([("user", "q")], session=""), tools=({"type": "function", "function": {"name": "f"}},))
    with pytest.raises(Refused, match="shows no tools"):
        Conversations(silent, Renderer(silent), None).prompts(asked)


def test_records_read_back_to_the_bit(conversations: Conversations, records: RecordFile, tmp_path: Path) -> None:
    _, completion = answer(conversations, records, asked_of([("user", "q")]), [7, 8, 1])
    row = read_records(tmp_path / "records.db")[0]
    assert row.turn.completion == completion
    assert (row.session, row.history, row.parent, row.created) == ("s", "new", None, 1.5)
    assert row.messages[0].content == "q"
    assert read_records(tmp_path / "records.db", "nobody") == []


def test_a_server_started_again_goes_on_with_its_records(
    conversations: Conversations, records: RecordFile, tokenizer: Any, tmp_path: Path
) -> None:
    first, _ = answer(conversations, records, asked_of([("user", "q")]), ids_of(tokenizer, "a<|user|>b<|end|>"))
    records.close()
    again = Conversations(tokenizer, Renderer(tokenizer), RecordFile(tmp_path / "records.db"))
    prompt = again.prompts(asked_of([("user", "q"), ("assistant", "ab"), ("user", "r")]))[0]
    assert prompt.origin.history == "extends"
    assert prompt.ids[: len(first.ids)] == first.ids


def test_a_file_that_is_something_else_is_not_written_to(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE precious (x)")
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but precious as well " * 50)
    for path in (other, text):
        before = path.read_bytes()
        with pytest.raises(UserError, match="Give a new file"):
            RecordFile(path)
        assert path.read_bytes() == before
    with pytest.raises(UserError, match="no file of records"):
        read_records(tmp_path / "missing.db")
