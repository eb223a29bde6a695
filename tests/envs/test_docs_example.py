"""The code in docs/environments.md runs and does what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from temper.config.sections import EnvConfig, RolloutConfig
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
TASK = Task(id="t", messages=(Message(role="user", content="go"),))


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """All Python of the page, run from top to bottom; the isolation check of the page runs here."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def play(env: Any, *said: str, task: Task = TASK) -> list[EnvReply]:
    async def episode() -> list[EnvReply]:
        await env.start(task, 0)
        replies = [await env.step(Message(role="assistant", content=text)) for text in said]
        await env.close()
        return replies

    return asyncio.run(episode())


def test_the_number_is_found_by_halving_and_pays_more_for_being_quick(page: dict[str, Any]) -> None:
    env, task, low, high = page["Guess"](), page["guess_task"](0, 1), 1, 100

    async def search() -> list[EnvReply]:
        nonlocal low, high
        await env.start(task, 3)
        replies: list[EnvReply] = []
        while not replies or not replies[-1].is_done:
            middle = (low + high) // 2
            replies.append(await env.step(Message(role="assistant", content=f"is it {middle}?")))
            hint = replies[-1].messages[0].content if replies[-1].messages else ""
            low, high = (middle + 1, high) if hint == "higher" else (low, middle - 1)
        return replies

    replies = asyncio.run(search())
    assert len(replies) <= 7
    assert replies[-1].reward == pytest.approx(1.0 - 0.1 * (len(replies) - 1))


def test_talk_without_a_number_ends_as_bad_format(page: dict[str, Any]) -> None:
    replies = play(page["Guess"](), "hm", "hm", "hm")
    assert [reply.status for reply in replies] == [None, None, Status.BAD_FORMAT]
    assert replies[0].events[0].kind is EventKind.BAD_CALL


def test_the_class_of_the_page_is_as_short_as_the_page_says(page: dict[str, Any]) -> None:
    first = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert first is not None
    assert 20 <= len(first[1].splitlines()) <= 60


def test_the_synchronous_example_runs_in_its_thread(page: dict[str, Any]) -> None:
    (reply,) = play(page["echo"](), "go")
    assert (reply.is_done, reply.reward) == (True, 1.0)


def test_the_shelf_takes_calls_and_pays_for_its_state(page: dict[str, Any]) -> None:
    put = '<tool_call>{"name": "put", "arguments": {"title": "Emma"}}</tool_call>'
    first, wrong, second, done = play(page["Shelf"](), put, "put(Ulysses, 5)", "put(Ulysses, 2)", "done")
    assert "1 books" in first.messages[0].content
    assert "error: place 5 is not on the shelf" in wrong.messages[0].content
    assert EventKind.SIDE_EFFECT in [event.kind for event in second.events]
    assert done.reward == 1.0


def test_the_letter_is_sent_only_where_it_was_approved(page: dict[str, Any]) -> None:
    careful = page["careful"]
    dry, sent = play(careful, "send(you@example.org, hello)", "send(test@example.org, hello)")
    assert "dry run" in dry.messages[0].content
    assert "sent to test@example.org" in sent.messages[0].content
    assert len(careful.side_effects) == 1


def test_settings_that_the_page_names_exist() -> None:
    text = PAGE.read_text()
    for name in re.findall(r"`rollout\.(\w+)`", text):
        assert name in RolloutConfig.model_fields
    assert {"name", "options"} <= set(EnvConfig.model_fields)
