"""Agents that run elsewhere, and results that are posted: judged like any other, and no failure is a reward."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.batching import rows_of
from temper.envs.agents.agent import RESULT_BYTES
from temper.errors import BackendError
from temper.types import Message, Request, Status, Task, Trajectory
from tests.fakes.agent_service import Announced, Play, agent_service, ask, hand_in, post
from tests.fakes.agents import play_agent
from tests.fakes.sampler import FakeSampler

TASK = Task(id="t", messages=(Message(role="user", content="six times seven"),), answer="42")
Order = dict[str, Any]


@pytest.fixture
def sampler(tokenizer: Any) -> FakeSampler:
    return FakeSampler(lambda request: [*tokenizer.encode("42"), tokenizer.eos_token_id])


@pytest.fixture
def play(tokenizer: Any, sampler: FakeSampler) -> Callable[..., Trajectory]:
    """Plays one episode of an agent with these options."""
    return lambda options, **limits: play_agent(TASK, sampler, tokenizer, options, **limits)


def later(act: Callable[[Order], object]) -> Play:
    """A service that says at once that it will play, and plays then."""

    def run(asked: Announced, order: Order) -> None:
        asked.reply(202, b"")
        act(order)

    return run


def converse(order: Order) -> str:
    messages = list(order["task"]["messages"])
    messages += [{"role": "assistant", "content": ask(order, messages)}, {"role": "user", "content": "sure?"}]
    return ask(order, messages)


@pytest.mark.parametrize("is_posted", [True, False])
def test_an_agent_elsewhere_is_played_like_one_that_is_started(play: Any, tokenizer: Any, is_posted: bool) -> None:
    with agent_service(
        later(lambda order: hand_in(order, converse(order)))
        if is_posted
        else lambda asked, order: asked.say(converse(order))
    ) as server:
        played = play({"url": server.url})
    assert (played.status, played.error, played.text, played.score.value) == (Status.COMPLETED, None, "42", 1.0)
    (row,) = rows_of(played)
    said = "<|user|>six times seven<|assistant|>42<|end|><|user|>sure?<|assistant|>42<|end|>"
    assert tokenizer.decode(row.token_ids) == said
    (order,) = server.orders
    assert order["task"] == {
        "id": "t",
        "prompt": "six times seven",
        "messages": [{"role": "user", "content": "six times seven"}],
        "seed": 0,
    }
    assert set(order) == {"episode", "base_url", "api_key", "model", "result_url", "task"}
    assert server.over == [], "it knows that the episode is over: it has ended it"


def raw(text: bytes) -> Play:
    def run(asked: Announced, order: Order) -> None:
        ask(order, order["task"]["messages"])
        asked.wfile.write(text)

    return run


def after_asking(act: Callable[[Announced, Order], object]) -> Play:
    def run(asked: Announced, order: Order) -> None:
        assert ask(order, order["task"]["messages"]) == "42"
        act(asked, order)

    return run


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (after_asking(lambda asked, order: asked.reply(500, b"no luck")), "status 500, not 200 or 202: no luck"),
        (after_asking(lambda asked, order: asked.reply(302, b"", Location="/other")), "status 302"),
        (after_asking(lambda asked, order: asked.reply(204, b"")), "status 204"),
        (after_asking(lambda asked, order: asked.reply(200, b'{"outcome": "42"}')), "no result"),
        (after_asking(lambda asked, order: asked.reply(200, b"42")), "no result"),
        (after_asking(lambda asked, order: asked.reply(200, b"[" * 100_000)), "no result"),
        (after_asking(lambda asked, order: asked.say("x" * RESULT_BYTES)), "no result: a result of"),
        (after_asking(lambda asked, order: asked.say("x" * 3 * RESULT_BYTES)), "not answer in HTTP"),
        (after_asking(lambda asked, order: None), "hung up"),
        (raw(b"SSH-2.0-nothing\r\n\r\n"), "not answer in HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{"), "hung up"),
        (lambda asked, order: asked.say("42"), "without asking the model"),
    ],
)
def test_a_service_that_fails_is_an_error_and_never_a_reward(play: Any, act: Play, error: str) -> None:
    with agent_service(act) as server:
        played = play({"url": server.url})
    assert played.status is Status.TOOL_ERROR
    assert error in str(played.error)
    assert played.score.value is None
    assert not played.is_trainable
    has_ended = "without asking" in error  # with a result: of all others nobody knows whether they play on
    assert server.over == ([] if has_ended else [f"/episodes/{server.orders[0]['episode']}"])


def test_a_service_that_is_not_there_is_an_error(play: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    played = play({"url": f"http://127.0.0.1:{port}/"})
    assert (played.status, played.score.value) == (Status.TOOL_ERROR, None)
    assert "cannot be reached" in str(played.error)


@pytest.mark.parametrize("does_answer", [True, False])
def test_a_service_that_hangs_is_told_that_its_episode_is_over(play: Any, does_answer: bool) -> None:
    released = threading.Event()

    def hang(asked: Announced, order: Order) -> None:
        ask(order, order["task"]["messages"])
        if does_answer:
            asked.reply(202, b"")
        released.wait(20)

    with agent_service(hang) as server:
        played = play({"url": server.url}, seconds=1.5)
        released.set()
    assert (played.status, played.score.value, len(played.turns)) == (Status.TIMEOUT, None, 1)
    assert server.over == [f"/episodes/{server.orders[0]['episode']}"]


@pytest.mark.parametrize("is_silent", [True, False], ids=["time is over", "broken announcement"])
def test_a_service_that_is_told_that_its_episode_is_over_can_hand_in_nothing_more(play: Any, is_silent: bool) -> None:
    """Else it hears that its result was taken, of an episode that is a failure."""
    told: list[int] = []

    def begin(asked: Announced, order: Order) -> None:
        ask(order, order["task"]["messages"])
        asked.reply(202 if is_silent else 504, b"")

    with agent_service(begin) as server:
        server.when_over = lambda: told.append(hand_in(server.orders[0], "42")[0])
        played = play({"url": server.url}, seconds=1.5 if is_silent else 30.0)
    assert told == [401]
    assert (played.status, played.score.value) == (Status.TIMEOUT if is_silent else Status.TOOL_ERROR, None)


def test_a_result_whose_body_comes_after_the_end_of_its_episode_is_not_taken(play: Any) -> None:
    """The key was right when the head came."""
    said: list[bytes] = []
    has_tried = threading.Event()

    def begin_in_time(order: Order) -> None:
        ask(order, order["task"]["messages"])
        url = urllib.parse.urlsplit(order["result_url"])
        body = b'{"result": "42"}'
        head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nAuthorization: Bearer {order['api_key']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
            connection.sendall(head.encode() + body[:5])
            has_ended.wait(20)
            connection.sendall(body[5:])
            said.append(connection.recv(100))
        has_tried.set()

    has_ended = threading.Event()

    def afterwards() -> None:
        has_ended.set()
        has_tried.wait(20)

    with agent_service(later(begin_in_time)) as server:
        played = play({"url": server.url}, seconds=1.5, afterwards=afterwards)
    assert played.status is Status.TIMEOUT
    assert said[0].startswith(b"HTTP/1.1 401"), said


def test_a_port_that_is_taken_meanwhile_ends_the_run_and_is_no_error_of_an_episode(play: Any) -> None:
    """The next episode would not find it free either."""
    with agent_service(lambda asked, order: asked.say("42")) as server, socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(BackendError, match="agents would not find the model: cannot listen on"):
            play({"url": server.url, "listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        assert server.orders == []


def test_a_service_is_told_that_the_run_has_ended(tokenizer: Any) -> None:
    def broken(request: Request) -> list[int]:
        raise BackendError("the engine has failed")

    service = agent_service(later(lambda order: ask(order, order["task"]["messages"])))
    with service as server, pytest.raises(BackendError, match="the engine has failed"):
        play_agent(TASK, FakeSampler(broken), tokenizer, {"url": server.url})
    assert server.over == [f"/episodes/{server.orders[0]['episode']}"]


def test_a_service_that_does_not_hear_that_it_is_over_holds_nobody_up(play: Any) -> None:
    released = threading.Event()

    def hang(asked: Announced, order: Order) -> None:
        server.shutdown()  # takes no further question
        released.wait(20)

    with agent_service(hang) as server:
        began = time.monotonic()
        played = play({"url": server.url}, seconds=0.5)
        released.set()
    assert played.status is Status.TIMEOUT
    assert time.monotonic() - began < 10, "it would wait for ever"


def test_limits_of_an_episode_hold_for_a_service(play: Any) -> None:
    def without_end(asked: Announced, order: Order) -> None:
        while ask(order, order["task"]["messages"]):
            pass
        asked.reply(500, b"the policy was refused")

    with agent_service(without_end) as server:
        turns = play({"url": server.url}, max_turns=3)
        tokens = play({"url": server.url}, max_episode_tokens=5)
        cost = play({"url": server.url}, affordable_tokens=4)
    assert (turns.status, len(turns.turns), turns.text) == (Status.TRUNCATED_TURNS, 3, "")
    assert [(one.status, one.num_tokens) for one in (tokens, cost)] == [
        (Status.TRUNCATED_LENGTH, 5),
        (Status.TRUNCATED_LENGTH, 4),
    ]
    assert turns.score.value == 0.0, "a policy that uses its limit up learns from it"


LONG = [{"role": "user", "content": "x" * 600}]
"""More than the context takes."""


@pytest.mark.parametrize("does_say_so", [True, False], ids=["posts an error", "falls silent"])
@pytest.mark.parametrize(
    ("limits", "second", "status", "num_tokens"),
    [
        ({"max_turns": 1}, None, Status.TRUNCATED_TURNS, 3),
        ({"max_episode_tokens": 3}, None, Status.TRUNCATED_LENGTH, 3),
        ({"affordable_tokens": 3}, None, Status.TRUNCATED_LENGTH, 3),
        ({}, LONG, Status.TRUNCATED_LENGTH, 3),
    ],
    ids=["turns", "tokens", "cost", "context"],
)
def test_a_service_that_reached_a_limit_after_its_202_is_judged_whatever_becomes_of_it(
    play: Any, limits: Any, second: Any, status: Status, num_tokens: int, does_say_so: bool
) -> None:
    """As an agent that is started: as timeouts, those episodes would be untrained in which the policy runs on."""

    def run_on(order: Order) -> None:
        ask(order, order["task"]["messages"])
        assert ask(order, second or order["task"]["messages"]) == "", "it was refused"
        if does_say_so:
            post(order["result_url"], order["api_key"], b'{"error": "the model says no"}')

    with agent_service(later(run_on)) as server:
        played = play({"url": server.url}, seconds=20.0 if does_say_so else 1.5, **limits)
    assert (played.status, played.error, played.text, played.score.value) == (status, None, "", 0.0)
    assert (played.is_trainable, played.num_tokens) == (True, num_tokens)


def test_an_episode_that_was_refused_its_first_prompt_and_falls_silent_is_a_timeout(play: Any) -> None:
    """Nothing was drawn: there is nothing to judge."""
    with agent_service(later(lambda order: ask(order, LONG))) as server:
        played = play({"url": server.url}, seconds=1.0)
    assert (played.status, played.score.value, played.turns) == (Status.TIMEOUT, None, ())


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"42", "application/json", 400),
        (b"{", "application/json", 400),
        (b'{"error": "the world broke"}', "application/json", 400),
        (json.dumps({"result": "x" * RESULT_BYTES}).encode(), "application/json", 400),
        (json.dumps({"result": "x" * 5 * RESULT_BYTES}).encode(), "application/json", None),
        (b'{"result": "42"}', "text/plain", 415),
    ],
)
def test_a_post_that_is_no_result_ends_its_episode_as_failed(
    play: Any, body: bytes, kind: str, status: int | None
) -> None:
    """status: None: the connection may end before the body has been sent."""
    told: list[int | None] = []
    has_tried = threading.Event()

    def junk(order: Order) -> None:
        ask(order, order["task"]["messages"])
        try:
            told.append(post(order["result_url"], order["api_key"], body, kind)[0])
        except urllib.error.URLError:
            told.append(None)
        hand_in(order, "42")
        has_tried.set()

    with agent_service(later(junk)) as server:
        played = play({"url": server.url}, seconds=60.0, afterwards=lambda: has_tried.wait(20))
    assert (played.status, played.score.value) == (Status.TOOL_ERROR, None)
    assert "posted no result" in str(played.error)
    assert ("the world broke" in str(played.error)) == (b"world" in body), "a service says so what went wrong"
    assert told == [status] or (status is None and told == [413])
    assert len(server.over) == 1, "what it posted is no result"


def test_only_the_first_result_counts_and_its_key_opens_nothing_afterwards(play: Any) -> None:
    told: list[int] = []
    has_tried = threading.Event()

    def twice(order: Order) -> None:
        ask(order, order["task"]["messages"])
        told.append(hand_in(order, "41")[0])
        deadline = time.monotonic() + 10
        while (status := hand_in(order, "42")[0]) == 409 and time.monotonic() < deadline:
            time.sleep(0.01)  # the episode is ending
        told.append(status)
        told.append(post(f"{order['base_url']}/chat/completions", order["api_key"], b"{}")[0])
        has_tried.set()

    with agent_service(later(twice)) as server:
        played = play({"url": server.url}, afterwards=lambda: has_tried.wait(20))
    assert (played.text, played.score.value) == ("41", 0.0)
    assert told == [200, 401, 401]


PATHS = ("/", "/health", "/metrics", "/v1/models", "/v1/result", "/v1/chat/completions", "/v1/responses", "/docs")


def test_whoever_has_no_key_of_an_episode_gets_nothing(play: Any) -> None:
    """The endpoint listens to the network here, and is called by another name than it is bound to."""
    with socket.create_server(("0.0.0.0", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://localhost:{port}"
    told: dict[str, set[int]] = {}

    def knock(when: str, key: str) -> None:
        for path in PATHS:
            for method, body in (("GET", None), ("POST", b"{}"), ("DELETE", None)):
                request = urllib.request.Request(
                    address + path, body, {"Content-Type": "application/json"}, method=method
                )
                if key:
                    request.add_header("Authorization", f"Bearer {key}")
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, timeout=10)
                told.setdefault(when, set()).add(refused.value.code)

    def act(order: Order) -> None:
        assert order["base_url"] == f"{address}/v1"
        knock("without a key", "")
        knock("with another key", order["api_key"][:-1] + "?")
        ask(order, order["task"]["messages"])
        hand_in(order, "42")

    with agent_service(later(act)) as server:
        options = {"url": server.url, "listen": f"0.0.0.0:{port}", "address": address}
        played = play(options, afterwards=lambda: knock("when it has ended", server.orders[0]["api_key"]))
    assert played.score.value == 1.0
    assert told == {"without a key": {401}, "with another key": {401}, "when it has ended": {401}}


def test_a_service_is_shown_the_key_it_wants_and_no_key_is_repeated(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVICE_KEY", "s3cret")

    def complain(asked: Announced, order: Order) -> None:
        ask(order, order["task"]["messages"])
        asked.reply(500, f"{order['api_key']} {asked.headers['Authorization']}".encode())

    with agent_service(complain) as server:
        played = play({"url": server.url, "key_variable": "SERVICE_KEY"})
        assert server.shown == ["Bearer s3cret"]
        assert str(played.error).endswith("not 200 or 202: [key] Bearer [key]")
        play({"url": server.url})
        assert server.shown[1:] == [""]


SECRET = "sk-service-0123456789"


def before(text: str, place: int) -> str:
    """The text with as much before it that it begins at this place."""
    return "." * place + text


@pytest.mark.parametrize(
    "act",
    [
        lambda asked, order, key: asked.reply(200, json.dumps({"said": key}).encode()),
        lambda asked, order, key: asked.reply(200, before(key, 70).encode()),
        lambda asked, order, key: asked.reply(500, before(key, 390).encode()),
        lambda asked, order, key: asked.wfile.write(f"Bearer {key}\r\n\r\n".encode()),
        lambda asked, order, key: asked.wfile.write(f"{before(key, 50)}\r\n\r\n".encode()),
        lambda asked, order, key: asked.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Length: {key}\r\n\r\n".encode()),
        lambda asked, order, key: later(lambda order: post_junk(order, {"error": key}))(asked, order),
        lambda asked, order, key: later(lambda order: post_junk(order, {"error": before(key, 380)}))(asked, order),
    ],
    ids=["200", "200, cut", "500, cut", "no HTTP", "no HTTP, cut", "no length", "posted", "posted, cut"],
)
@pytest.mark.parametrize("whose", ["service", "episode"])
def test_no_part_of_a_key_is_kept_of_what_a_service_says(
    play: Any, monkeypatch: pytest.MonkeyPatch, act: Any, whose: str
) -> None:
    """Errors are stored with the run, and shown."""
    monkeypatch.setenv("SERVICE_KEY", SECRET)

    def say(asked: Announced, order: Order) -> None:
        ask(order, order["task"]["messages"])
        act(asked, order, SECRET if whose == "service" else order["api_key"])

    with agent_service(say) as server:
        played = play({"url": server.url, "key_variable": "SERVICE_KEY"}, seconds=30.0)
    assert played.status is Status.TOOL_ERROR
    key = SECRET if whose == "service" else server.orders[0]["api_key"]
    parts = [key[at : at + 8] for at in range(len(key) - 7)]
    assert not [part for part in parts if part in str(played.error)], played.error
    assert len(str(played.error)) < 700


def post_junk(order: Order, body: Any) -> None:
    post(order["result_url"], order["api_key"], json.dumps(body).encode())


POSTS = """
import json, os, sys, urllib.request
def call(path, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.load(response)

def solve(task):
    call("/chat/completions", {"model": "policy", "messages": task["messages"]})
"""


@pytest.mark.parametrize(
    ("ending", "status", "text"),
    [
        ("call('/result', {'result': '42'})", Status.COMPLETED, "42"),
        ("call('/result', {'result': '42'})\n    return '41'", Status.COMPLETED, "42"),
        ("call('/result', {'result': {'a': 1}})", Status.COMPLETED, '{"a": 1}'),
        ("call('/result', {'result': '42'})\n    raise ValueError('oh')", Status.TOOL_ERROR, "oh"),
        ("call('/result', {'result': '42'})\n    call('/result', {'result': '41'})", Status.TOOL_ERROR, "409"),
        (
            "\n    try:\n        call('/result', {})\n    except OSError:\n        return '42'",
            Status.TOOL_ERROR,
            "posted no result",
        ),
    ],
)
def test_an_agent_that_is_started_may_post_its_result(
    play: Any, tmp_path: Path, ending: str, status: Status, text: str
) -> None:
    """What is posted counts before what is printed; how the program ends counts before both."""
    (tmp_path / "agent.py").write_text(f"{POSTS}    {ending}\n")
    played = play({"function": f"{tmp_path / 'agent.py'}:solve"})
    assert played.status is status
    assert text in str(played.error or played.text)
    assert (played.score.value is None) == (status is Status.TOOL_ERROR)
