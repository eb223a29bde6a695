"""An agent that only knows HTTP is played like any other episode: exact tokens, versions, limits, failures."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.batching import rows_of
from temper.errors import BackendError, ContextFull
from temper.serve.agents import AgentEndpoint
from temper.serve.conversation import Conversations
from temper.types import Message, Publication, Request, Status, Task, Trajectory
from tests.fakes.agents import play_agent
from tests.fakes.sampler import FakeSampler

TASK = Task(id="t", messages=(Message(role="user", content="six times seven"),), answer="42")
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": EXPRESSION}}]
CLIENT = """
import json, os, urllib.request

def ask(messages, **more):
    body = json.dumps({"model": "gpt-5", "messages": messages, **more}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.read() if more.get("stream") else json.load(response)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}

"""


Play = Callable[..., Trajectory]


@pytest.fixture
def play(tokenizer: Any, tmp_path: Path) -> Play:
    """Plays one episode of an agent whose function `solve` is given as text. `say`: what the model answers a prompt."""

    def run(
        text: str,
        say: Callable[[str], str] = lambda prompt: "42",
        *,
        tools: str = "auto",
        sampler: FakeSampler | None = None,
        **limits: Any,
    ) -> Trajectory:
        path = tmp_path / "agent.py"
        path.write_text(CLIENT + text)

        def script(request: Request) -> list[int]:
            said = tokenizer.encode(say(tokenizer.decode(request.prompt_ids)), add_special_tokens=False)
            return [*said, tokenizer.eos_token_id]

        options = {"function": f"{path}:solve", "tools": tools}
        return play_agent(TASK, sampler or FakeSampler(script), tokenizer, options, **limits)

    return run


CHAT = """
def solve(task):
    messages = task["messages"]
    messages += [ask(messages, temperature=0.0, seed=1), user("sure?")]
    return ask(messages)["content"]
"""


def test_a_conversation_is_one_row_of_exact_tokens(play: Play, tokenizer: Any) -> None:
    played = play(CHAT, lambda prompt: "42")
    assert (played.status, played.error, played.text, played.score.value) == (Status.COMPLETED, None, "42", 1.0)
    (row,) = rows_of(played)
    said = "<|user|>six times seven<|assistant|>42<|end|><|user|>sure?<|assistant|>42<|end|>"
    assert tokenizer.decode(row.token_ids) == said
    drawn = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if is_drawn]
    assert tokenizer.decode(drawn) == "42<|end|>42<|end|>"
    assert all(turn.completion.params.temperature == 0.7 for turn in played.turns), "drawn as the recipe says"
    assert [message.content for message in played.opening] == ["six times seven"]
    assert [message.content for message in played.turns[0].replies] == ["sure?"]


def test_tokens_are_never_encoded_again(play: Play, tokenizer: Any) -> None:
    """The drawn ids hold a special token in the middle that no client ever sees."""
    odd = [*tokenizer.encode("4"), tokenizer.convert_tokens_to_ids("<|pad|>"), *tokenizer.encode("2")]
    sampler = FakeSampler(lambda request: [*odd, tokenizer.eos_token_id])
    (row,) = rows_of(play(CHAT, sampler=sampler))
    drawn = [token for token, is_drawn in zip(row.token_ids, row.loss_mask, strict=True) if is_drawn]
    assert drawn == [*odd, tokenizer.eos_token_id] * 2


def test_versions_are_those_of_each_token(play: Play, tokenizer: Any) -> None:
    sampler: FakeSampler

    async def publish(request: Request) -> None:
        await sampler.load(Publication(version=sampler.version + 1, tensors={}))

    sampler = FakeSampler(lambda request: [*tokenizer.encode("42"), tokenizer.eos_token_id], delay=publish)
    (row,) = rows_of(play(CHAT, sampler=sampler))
    assert [version for version in row.versions if version >= 0] == [0, 1, 1, 1, 2, 2]


ASKS = """
from concurrent.futures import ThreadPoolExecutor

def solve(task):
    system = {"role": "system", "content": "you are a part of it"}
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda text: ask([system, user(text)]), ["left", "right"]))
    more = [system, user("left"), parts[0], user("more")]
    ask(more)
    ask(more)                                                       # a retry
    ask([user("summary of what was said")])                         # its own context cutting
    ask(task["messages"], n=2, stop=["x"], max_tokens=5)
    assert b"[DONE]" in ask(task["messages"], stream=True, stream_options={"include_usage": True})
    return parts[0]["content"]
"""


def test_sub_agents_retries_and_rewritten_history_are_rows_of_their_own(play: Play, tokenizer: Any) -> None:
    played = play(ASKS, lambda prompt: "42", max_turns=12)
    assert (played.status, played.error) == (Status.COMPLETED, None)
    assert len(played.turns) == 8
    texts = [tokenizer.decode(row.token_ids) for row in rows_of(played)]
    assert len(texts) == 7, "one of the two that go on from the left part continues its row"
    assert sum(text.startswith("<|system|>you are a part of it<|user|>left") for text in texts) == 2
    assert sum(row.num_actions for row in rows_of(played)) == 8 * 3, "every token is trained once"


def test_calls_that_race_draw_the_same_in_any_order(play: Play) -> None:
    names = []
    for _ in range(2):
        sampler = FakeSampler(lambda request: [10, 1])
        play(ASKS, sampler=sampler, max_turns=12)
        names.append({request.id for request in sampler.requests})
    assert names[0] == names[1]
    assert len(names[0]) == 8


TOOL_LOOP = f"""
TOOLS = {TOOLS!r}
def solve(task):
    said = ask(task["messages"], tools=TOOLS)
    call = said["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {{"expression": "6*7"}}, call
    result = {{"role": "tool", "tool_call_id": call["id"], "content": "42"}}
    return ask([*task["messages"], said, result], tools=TOOLS)["content"]
"""


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        ("auto", '<tool_call>\n{"name": "calc", "arguments": {"expression": "6*7"}}\n</tool_call>'),
        ("plain", "calc(6*7)"),
    ],
)
def test_tool_calls_go_through_openais_fields_and_stay_one_row(
    play: Play, tokenizer: Any, tools: str, call: str
) -> None:
    sampler = FakeSampler(
        lambda request: [
            *tokenizer.encode("42" if "assistant|>" + call in tokenizer.decode(request.prompt_ids) else call),
            tokenizer.eos_token_id,
        ]
    )
    played = play(TOOL_LOOP, tools=tools, sampler=sampler)
    assert (played.status, played.error, played.text) == (Status.COMPLETED, None, "42")
    assert len(rows_of(played)) == 1
    assert ('"calc"' in tokenizer.decode(rows_of(played)[0].token_ids)) == (tools == "auto"), "shown, or untold"


RESPONSES = f"""
TOOL = {{"type": "function", "name": "calc", "parameters": {EXPRESSION!r}}}
def respond(items):
    body = json.dumps({{"model": "gpt-5", "input": items, "tools": [TOOL], "store": False}}).encode()
    headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/responses", body, headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)["output"]

def solve(task):
    items = [user(task["prompt"])]
    items += respond(items)
    items.append({{"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "42"}})
    return respond(items)[0]["content"][0]["text"]
"""


def test_the_responses_interface_stays_one_row_as_well(play: Play, tokenizer: Any) -> None:
    call = "so calc\ncalc(6*7)"
    played = play(RESPONSES, lambda prompt: "42" if "calc(6*7)" in prompt else call, tools="plain")
    assert (played.status, played.error, played.text) == (Status.COMPLETED, None, "42")
    (row,) = rows_of(played)
    assert row.num_actions == len(call) + len("42") + 2


LOOP = """
def solve(task):
    messages = task["messages"]
    while True:
        messages += [ask(messages), user("again")]
"""


def test_an_agent_that_asks_without_end_is_cut_and_judged(play: Play) -> None:
    played = play(LOOP, max_turns=3)
    assert (played.status, len(played.turns), played.text) == (Status.TRUNCATED_TURNS, 3, "")
    assert played.score.value == 0.0, "a policy that uses its limit up learns from it"
    assert played.is_trainable


def test_tokens_of_an_episode_are_bounded(play: Play) -> None:
    played = play(LOOP, max_episode_tokens=7)
    assert (played.status, played.num_tokens) == (Status.TRUNCATED_LENGTH, 7)


def test_what_an_episode_may_cost_bounds_what_it_draws(play: Play) -> None:
    """In tokens; the recipe's own bound holds beside it, and the smaller of both cuts."""
    for limits, most in (
        ({"affordable_tokens": 7}, 7),
        ({"affordable_tokens": 7, "max_episode_tokens": 5}, 5),
        ({"affordable_tokens": 5, "max_episode_tokens": 7}, 5),
    ):
        played = play(LOOP, **limits)
        assert (played.status, played.num_tokens, played.text) == (Status.TRUNCATED_LENGTH, most, "")
        assert played.is_trainable, "used up like turns and tokens"
    asked_again = """
def solve(task):
    try:
        while True:
            ask(task["messages"])
    except OSError as refusal:
        return refusal.read().decode()
"""
    assert "rollout.max_episode_cost" in play(asked_again, affordable_tokens=7).text


REFUSED = """
def refused(*arguments, **more):
    try:
        ask(*arguments, **more)
    except OSError as refusal:
        return refusal.read().decode()

def solve(task):
    for _ in range(3):
        assert "top_logprobs" in refused(task["messages"], top_logprobs=2, logprobs=True)
        assert "temperature" in refused(task["messages"], temperature=-1)
        assert "the context has" in refused([user("x" * 600)])
        assert "at once" in refused(task["messages"], n=3)
        assert "of this server" in refused(task["messages"], n=65)
    return [ask(task["messages"])["content"] for _ in range(2)][1]
"""


def test_a_call_that_is_refused_uses_nothing_up(play: Play) -> None:
    played = play(REFUSED, max_turns=2, max_episode_tokens=6)
    assert (played.error, played.text, len(played.turns), played.num_tokens) == (None, "42", 2, 6)


def test_a_prompt_that_the_sampler_refuses_uses_nothing_up(play: Play, tokenizer: Any) -> None:
    def script(request: Request) -> list[int]:
        if "too long" in tokenizer.decode(request.prompt_ids):
            raise ContextFull("no room")
        return [*tokenizer.encode("42"), tokenizer.eos_token_id]

    text = (
        REFUSED.partition("def solve")[0]
        + """
def solve(task):
    for _ in range(3):
        assert "no room" in refused([user("too long")])
    return [ask(task["messages"])["content"] for _ in range(2)][1]
"""
    )
    played = play(text, sampler=FakeSampler(script), max_turns=2, max_episode_tokens=100)
    assert (played.error, played.text, len(played.turns)) == (None, "42", 2)


def test_calls_at_once_wait_for_tokens_that_the_others_hold(play: Play) -> None:
    """Each may draw 80, and draws 3: what five of them hold is not what they use."""
    text = """
from concurrent.futures import ThreadPoolExecutor

def solve(task):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda number: ask([user(str(number))]), range(5)))[4]["content"]
"""
    for limits in ({"max_episode_tokens": 100}, {"affordable_tokens": 100}):
        played = play(text, **limits)
        assert (played.status, played.error, played.text) == (Status.COMPLETED, None, "42")
        assert [turn.completion.params.max_new_tokens for turn in played.turns] == [80] * 5, "none is shortened"
    cut = play(text, max_episode_tokens=14)
    assert (cut.status, len(cut.turns), cut.num_tokens) == (Status.TRUNCATED_LENGTH, 5, 14)
    refused = play(text, max_episode_tokens=12)
    assert (refused.status, len(refused.turns), refused.num_tokens) == (Status.TRUNCATED_LENGTH, 4, 12)


def test_a_client_that_goes_while_it_waits_leaves_its_place(play: Play, tokenizer: Any) -> None:
    text = """
import socket, threading, time
def solve(task):
    slow = threading.Thread(target=ask, args=([user("slow")],), daemon=True)
    slow.start()
    time.sleep(0.3)
    try:
        body = json.dumps({"model": "m", "messages": [user("impatient")]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=0.5)
    except TimeoutError:
        pass
    said = ask(task["messages"])["content"]
    slow.join(20)
    return said
"""

    async def delay(request: Request) -> None:
        if "slow" in tokenizer.decode(request.prompt_ids):
            await asyncio.sleep(2.0)

    sampler = FakeSampler(lambda request: [*tokenizer.encode("42"), tokenizer.eos_token_id], delay=delay)
    played = play(text, sampler=sampler, max_episode_tokens=100, max_turns=2)
    assert (played.status, played.error, played.text) == (Status.COMPLETED, None, "42")
    assert not any("impatient" in tokenizer.decode(request.prompt_ids) for request in sampler.requests)


def test_a_client_that_goes_while_it_is_answered_has_made_its_call(play: Play) -> None:
    """Else an agent with a short patience would draw without end."""
    text = """
def solve(task):
    body = json.dumps({"model": "m", "messages": task["messages"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    for _ in range(2):
        try:
            urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=0.5)
        except TimeoutError:
            pass
    try:
        ask(task["messages"])
    except OSError as error:
        return str(error.code)
"""
    sampler: FakeSampler

    async def delay(request: Request) -> None:
        while request.id not in sampler._aborted:
            await asyncio.sleep(0.01)

    sampler = FakeSampler(lambda request: [1], delay=delay)
    played = play(text, sampler=sampler, max_turns=2)
    assert (len(sampler.requests), played.status, played.num_tokens) == (2, Status.TOOL_ERROR, 0)


def test_a_context_that_is_full_cuts_the_episode(play: Play) -> None:
    played = play("def solve(task):\n    ask(task['messages'])\n    ask([user('x' * 600)])")
    assert (played.status, len(played.turns)) == (Status.TRUNCATED_LENGTH, 1)
    mended = """
def solve(task):
    try:
        ask([user("x" * 600)])
    except OSError:
        return ask(task["messages"])["content"]
"""
    assert play(mended).status is Status.COMPLETED, "an agent that cuts its context itself goes on"
    first = play("def solve(task):\n    ask([user('x' * 600)])")
    assert first.status is Status.TOO_LONG


REFUSED_ONCE = {
    "a full context": "refused([user('x' * 600)])",
    "more answers than any episode has": "refused(task['messages'], n=9)",
    "more answers than are left": "ask(task['messages'], n=7); refused(task['messages'], n=2)",
}


@pytest.mark.parametrize("refusal", REFUSED_ONCE.values(), ids=REFUSED_ONCE)
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("raise KeyError('a bug')", Status.TOOL_ERROR),
        ("__import__('time').sleep(60)", Status.TIMEOUT),
        ("return '42'", Status.COMPLETED),
    ],
)
def test_a_refusal_after_which_an_agent_was_answered_is_not_why_it_ends(
    play: Play, refusal: str, end: str, status: Status
) -> None:
    """Else a bug of its own, or a hang, would be the policy's: a score of 0 that is trained."""
    text = REFUSED.partition("def solve")[0] + f"def solve(task):\n    {refusal}\n    ask(task['messages'])\n    {end}"
    played = play(text, seconds=2.0 if status is Status.TIMEOUT else 30.0)
    assert (played.status, played.is_trainable) == (status, status is Status.COMPLETED)
    assert played.score.value == (1.0 if status is Status.COMPLETED else None)


@pytest.mark.parametrize(
    ("limits", "most", "status"),
    [
        ({"max_turns": 3}, 3, Status.TRUNCATED_TURNS),
        ({"max_episode_tokens": 7, "max_turns": 20}, 7, Status.TRUNCATED_LENGTH),
    ],
)
@pytest.mark.parametrize("is_too_much", [True, False])
def test_an_agent_that_asks_for_more_than_any_episode_has_is_not_cut(
    play: Play, limits: Any, most: int, status: Status, is_too_much: bool
) -> None:
    """It would fail whatever the policy says. One that finds too little left is refused for what the policy used up."""
    count = most + is_too_much
    played = play(f"def solve(task):\n    ask(task['messages'])\n    ask(task['messages'], n={count})", **limits)
    assert played.status is (Status.TOOL_ERROR if is_too_much else status)
    assert played.score.value == (None if is_too_much else 0.0)


def test_what_was_asked_before_a_refusal_and_is_answered_after_it_takes_nothing_back(
    play: Play, tokenizer: Any
) -> None:
    """Answers of calls side by side come when they come: none of them tells that the agent could go on."""
    text = """
import threading, time
def solve(task):
    ask(task["messages"])
    slow = threading.Thread(target=ask, args=([user("slow")],))
    slow.start()
    time.sleep(0.3)
    try:
        ask([user("x" * 600)])
    finally:
        slow.join(20)
"""

    async def delay(request: Request) -> None:
        if "slow" in tokenizer.decode(request.prompt_ids):
            await asyncio.sleep(1.0)

    sampler = FakeSampler(lambda request: [*tokenizer.encode("42"), tokenizer.eos_token_id], delay=delay)
    played = play(text, sampler=sampler)
    assert (played.status, len(played.turns), played.text) == (Status.TRUNCATED_LENGTH, 2, "")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def solve(task):\n    ask(task['messages'])\n    raise SystemExit('oh no')", "exit code 1"),
        ("def solve(task):\n    ask(task['messages'])\n    os._exit(3)", "exit code 3"),
        ("def solve(task):\n    return '42'", "without asking the model"),
        ("def solve(task):\n    ask(task['messages'], top_logprobs=2, logprobs=True)", "exit code 1"),
    ],
)
def test_an_agent_that_fails_is_an_error_and_never_a_reward(play: Play, text: str, error: str) -> None:
    played = play(text)
    assert played.status is Status.TOOL_ERROR
    assert error in str(played.error)
    assert played.score.value is None
    assert not played.is_trainable


def test_an_agent_that_hangs_is_ended(play: Play) -> None:
    played = play("import time\ndef solve(task):\n    ask(task['messages'])\n    time.sleep(60)", seconds=2.0)
    assert (played.status, len(played.turns)) == (Status.TIMEOUT, 1)


def test_calls_under_way_when_an_agent_ends_are_not_trained(play: Play, tokenizer: Any) -> None:
    text = """
import threading
def solve(task):
    threading.Thread(target=ask, args=([user("slow")],), daemon=True).start()
    ask(task["messages"])
    return "42"
"""
    sampler: FakeSampler

    async def delay(request: Request) -> None:
        if "slow" in tokenizer.decode(request.prompt_ids):
            while request.id not in sampler._aborted:
                await asyncio.sleep(0.01)

    sampler = FakeSampler(lambda request: [*tokenizer.encode("42"), tokenizer.eos_token_id], delay=delay)
    played = play(text, sampler=sampler)
    assert (played.status, len(played.turns)) == (Status.COMPLETED, 1)


def test_a_broken_sampler_ends_the_run_and_not_the_episode(play: Play) -> None:
    def broken(request: Request) -> list[int]:
        raise BackendError("the engine has failed")

    with pytest.raises(BackendError, match="the engine has failed"):
        play("def solve(task):\n    ask(task['messages'])", sampler=FakeSampler(broken))


def test_a_key_opens_its_own_episode_and_no_other(tokenizer: Any) -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        place = ("127.0.0.1", port)
        endpoint = AgentEndpoint(
            lambda records: Conversations(tokenizer, None, records), place, model="", max_length=512
        )
        await endpoint._start()

        def ask() -> int:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer x"}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            return refused.value.code

        assert await asyncio.to_thread(ask) == 401
        await endpoint.close()

    asyncio.run(main())
