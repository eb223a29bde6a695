"""HTTP with an engine that says what it is told: tools, errors of every kind, keys, limits, clients that misbehave."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from temper.errors import BackendError
from temper.listening import own_names
from temper.serve.records import read_records
from temper.types import Finish

openai = pytest.importorskip("openai", reason="the openai client is not installed")
HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
ASKED = {"model": "tiny", "messages": HELLO}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"b":  2, "a": 1}}\n</tool_call>'


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def head_of(body: bytes) -> bytes:
    lines = (f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode()


def test_tool_calls_are_read_from_the_text_and_given_back_as_drawn(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    engine = make_engine(f"I add.\n{CALL}", "it is 3")
    served = serve_scripted(engine, record=True)
    client, session = served.client(), {"X-Temper-Session": "tools"}
    first = client.chat.completions.create(**ASKED, tools=TOOLS, extra_headers=session).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "I add."
    call = first.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    replies = [first.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    second = client.chat.completions.create(
        model="tiny", messages=[*HELLO, *replies], tools=TOOLS, extra_headers=session
    )
    assert second.choices[0].message.content == "it is 3"
    rows = read_records(tmp_path / "records.db")
    drawn = (*rows[0].turn.completion.prompt_ids, *rows[0].turn.completion.token_ids)
    assert [row.history for row in rows] == ["new", "extends"]
    # The call was drawn with two spaces and its keys in another order than any template writes.
    assert engine.requests[1].prompt_ids[: len(drawn)] == drawn
    assert tokenizer.decode(engine.requests[1].prompt_ids).endswith("<|user|>3<|assistant|>")
    assert rows[0].turn.replies[0].name == "add"


def test_streamed_tool_calls_are_whole(make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]) -> None:
    served = serve_scripted(make_engine(f"I add.\n{CALL}"))
    parts = list(served.client().chat.completions.create(**ASKED, tools=TOOLS, stream=True))
    calls = [call for part in parts for call in part.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add")]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "I add."
    assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_a_call_that_cannot_be_read_stays_text(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    text = "<tool_call>{no json</tool_call>"
    choice = serve_scripted(make_engine(text)).client().chat.completions.create(**ASKED, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_tools_are_neither_shown_nor_read_when_they_may_not_be_called(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any], tokenizer: Any
) -> None:
    engine = make_engine(CALL)
    choice = (
        serve_scripted(engine).client().chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none").choices[0]
    )
    assert choice.message.content == CALL
    assert "add" not in tokenizer.decode(engine.requests[0].prompt_ids)


BAD = [
    ({"presence_penalty": 0.5}, 400, "presence_penalty"),
    ({"frequency_penalty": 1}, 400, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required"}, 400, "tool_choice"),
    ({"temprature": 1}, 400, "temprature"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": 1e-9}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"n": 0}, 400, "n"),
    ({"n": True}, 400, "n"),
    ({"n": 100}, 400, "n"),
    ({"top_p": 0}, 400, "top_p"),
    ({"stop": [""]}, 400, "stop"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens"),
    ({"max_tokens": 100_000}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 1000}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": "\u0416"}]}, 400, None),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"session": "x"}, 400, "session"),
    ({"session": "\n"}, 400, "session"),
    ({"stop": "\ud800"}, 400, None),
    ({"model": "gpt-4"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests_are_told_what_is_wrong(
    make_engine: Callable[..., Any],
    serve_scripted: Callable[..., Any],
    change: dict[str, Any],
    status: int,
    param: str | None,
) -> None:
    engine = make_engine()
    served = serve_scripted(engine)
    error = error_of(served.post(CHAT, {**ASKED, **change}), status)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []
    # A refusal takes no room.
    assert served.metrics()["temper_serve_in_flight"] == 0


def test_neutral_values_of_what_is_not_implemented_pass(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
               "user": "me", "parallel_tool_calls": True, "tool_choice": "auto", "seed": None}  # fmt: skip
    assert serve_scripted(make_engine()).post(CHAT, {**ASKED, **neutral}).status_code == 200


def test_wrong_paths_methods_and_bodies_have_their_statuses(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    url = serve_scripted(make_engine(), max_body_bytes=1000).url
    json_type = {"Content-Type": "application/json"}
    assert error_of(httpx.get(f"{url}/v1/nothing"), 404)["code"] == "not_found"
    error_of(httpx.get(f"{url}{CHAT}"), 405)
    assert error_of(httpx.post(f"{url}{CHAT}", content="{", headers=json_type), 400)["code"] == "invalid_json"
    error_of(httpx.post(f"{url}{CHAT}", content="[]", headers=json_type), 400)
    error_of(httpx.post(f"{url}{CHAT}", content="[" * 900, headers=json_type), 400)
    error_of(httpx.post(f"{url}{CHAT}", content="{}", headers={"Content-Type": "text/plain"}), 415)
    error_of(httpx.post(f"{url}{CHAT}", json={"model": "x" * 2000}), 413)
    unannounced = (part for part in (b"x" * 600, b"x" * 600))
    error_of(httpx.post(f"{url}{CHAT}", content=unannounced, headers=json_type), 413)


def test_everything_but_health_needs_the_key(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    served = serve_scripted(make_engine(), api_key="secret")
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    for path in ("/metrics", "/v1/models"):
        error_of(httpx.get(f"{served.url}{path}"), 401)
    for key in ("wrong", "secre", "secret2"):
        with pytest.raises(openai.AuthenticationError):
            served.client(key).chat.completions.create(**ASKED)
    error_of(served.post(CHAT, ASKED, Authorization="Basic secret"), 401)
    assert served.client("secret").chat.completions.create(**ASKED).choices[0].message.content == "hello"


def test_a_full_house_sends_clients_away_until_there_is_room(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    engine = make_engine("x" * 300)
    engine.seconds_per_token = 0.05
    served = serve_scripted(engine, max_in_flight=2)
    body = {**ASKED, "n": 2, "stream": True}
    with httpx.stream("POST", f"{served.url}{CHAT}", json=body, timeout=30.0) as response:
        parts = response.iter_bytes()  # kept: an iterator that is let go closes the connection
        next(parts)
        refused = served.post(CHAT, ASKED)
        assert error_of(refused, 429)["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"]
    engine.seconds_per_token = 0.0
    eventually(lambda: served.metrics()["temper_serve_in_flight"] == 0)
    assert served.post(CHAT, ASKED).status_code == 200


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_vanished_client_is_aborted_and_recorded_as_such(
    make_engine: Callable[..., Any],
    serve_scripted: Callable[..., Any],
    eventually: Callable[..., None],
    tmp_path: Path,
    is_streamed: bool,
) -> None:
    engine = make_engine("x" * 400)
    engine.seconds_per_token = 0.02
    served = serve_scripted(engine, record=True)
    body = json.dumps({**ASKED, "stream": is_streamed}).encode()
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        eventually(lambda: bool(engine.running))
    eventually(lambda: not engine.running)
    eventually(lambda: served.metrics()["temper_serve_in_flight"] == 0)
    completion = read_records(tmp_path / "records.db")[0].turn.completion
    assert completion.finish is Finish.ABORT
    assert len(completion.token_ids) < 400


def test_a_reader_that_stops_reading_holds_nobody_up_and_is_dropped(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    engine = make_engine("x" * 450)
    served = serve_scripted(engine, send_seconds=1.0)
    # Token ids, log-probabilities and 60 choices make megabytes, more than any socket buffer holds.
    body = json.dumps({**ASKED, "stream": True, "n": 60, "logprobs": True, "return_token_ids": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", served.port))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        eventually(lambda: len(engine.requests) == 60)
        eventually(lambda: not engine.running)  # drawn to the end, though nobody reads
        assert served.client().chat.completions.create(**ASKED, max_tokens=3).choices[0].message.content == "xxx"
        eventually(lambda: served.metrics()["temper_serve_in_flight"] == 0)


def test_a_response_that_takes_too_long_is_ended(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    engine = make_engine("x" * 400)
    engine.seconds_per_token = 0.05
    served = serve_scripted(engine, request_seconds=0.3)
    error_of(served.post(CHAT, ASKED), 504)
    assert engine.aborted
    eventually(lambda: served.metrics()["temper_serve_in_flight"] == 0)


def test_a_failed_engine_is_a_server_error_and_unhealthy(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    engine = make_engine()
    engine.failure = BackendError("the GPU at 10.0.0.7 is on fire")
    served = serve_scripted(engine)
    error = error_of(served.post(CHAT, ASKED), 500)
    assert "10.0.0.7" not in error["message"], "clients are not told about our insides"
    assert error["type"] == "server_error"
    assert httpx.get(f"{served.url}/health").status_code == 503
    error_of(served.post(CHAT, ASKED), 503)


def test_a_stream_that_fails_ends_with_an_error_and_without_done(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    engine = make_engine()
    engine.failure = BackendError("broken")
    text = serve_scripted(engine).post(CHAT, {**ASKED, "stream": True}).text
    assert '"error"' in text
    assert "[DONE]" not in text


def test_metrics_are_prometheus_text(make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]) -> None:
    text = httpx.get(f"{serve_scripted(make_engine()).url}/metrics").text
    assert "# TYPE temper_engine_steps_total counter\ntemper_engine_steps_total 3\n" in text
    assert "# TYPE temper_serve_in_flight gauge\ntemper_serve_in_flight 0\n" in text


def test_a_page_of_another_site_that_points_its_name_here_is_refused(
    make_engine: Callable[..., Any], serve_scripted: Callable[..., Any]
) -> None:
    served = serve_scripted(make_engine(), hosts=own_names("127.0.0.1"))
    assert served.post(CHAT, ASKED).status_code == 200
    assert error_of(served.post(CHAT, ASKED, Host="evil.example"), 403)["code"] == "wrong_host"
    assert httpx.get(f"{served.url}/health", headers={"Host": "evil.example"}, timeout=30.0).status_code == 403


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("shutdown_seconds", [0.0, 10.0])
def test_a_shutdown_records_every_completion_under_way(
    make_engine: Callable[..., Any],
    serve_scripted: Callable[..., Any],
    eventually: Callable[..., None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_streamed: bool,
    shutdown_seconds: float,
) -> None:
    engine = make_engine("a rather long answer")
    engine.seconds_per_token = 0.1  # the last client asks before the first has its answer
    served = serve_scripted(engine, record=True, shutdown_seconds=shutdown_seconds)
    with ThreadPoolExecutor(8) as clients:
        asking = [clients.submit(served.post, CHAT, {**ASKED, "stream": is_streamed}) for _ in range(8)]
        eventually(lambda: len(engine.running) == 8)
        served.stop()
        answers = [asked.result(timeout=20.0) for asked in asking]
    rows = read_records(tmp_path / "records.db")
    assert len(rows) == 8
    ends = {row.turn.completion.finish for row in rows}
    assert ends == ({Finish.ABORT} if shutdown_seconds == 0 else {Finish.STOP})
    if shutdown_seconds:
        assert {answer.status_code for answer in answers} == {200}
    assert not [record for record in caplog.records if record.exc_info], "no tracebacks"


def test_the_http_face_knows_no_agents_and_no_rollouts() -> None:
    """What a server in training answers besides is handed to it."""
    loaded = "import sys, temper.serve.app; print(*(name for name in sys.modules if name.startswith('temper.')))"
    said = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120, check=True)
    assert not [name for name in said.stdout.split() if name.startswith(("temper.envs.agents", "temper.rollout"))]
