from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from temper.asking.endpoint import Endpoint, EndpointFailed, EndpointOptions
from temper.errors import UserError
from temper.types import Message

QUESTION = (Message(role="user", content="Is it good?"),)
Act = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.num_connections += 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            self.server.asked.append({"path": self.path, "key": self.headers.get("Authorization"), **json.loads(body)})
            act = self.server.acts.pop(0) if len(self.server.acts) > 1 else self.server.acts[0]
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
        try:
            act(self)
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.acts: list[Act] = [say("fine")]
        self.asked: list[dict[str, Any]] = []
        self.num_connections = self.busy = self.most_busy = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are what these tests are about."""

    def endpoint(self, **options: Any) -> Endpoint:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        return Endpoint(EndpointOptions(base_url=url, model="judge", **{"backoff_seconds": 0.001, **options}))


def completion(text: str | None) -> bytes:
    return json.dumps({"model": "judge-1", "choices": [{"message": {"content": text}}]}).encode()


def say(text: str | None) -> Act:
    return lambda handler: handler.send(200, completion(text))


def refuse(status: int, **headers: str) -> Act:
    return lambda handler: handler.send(status, b"not now", **headers)


def send_body(body: bytes) -> Act:
    return lambda handler: handler.send(200, body)


def send_raw(raw: bytes) -> Act:
    def act(handler: Handler) -> None:
        handler.wfile.write(raw)
        handler.close_connection = True

    return act


def hang(handler: Handler) -> None:
    handler.server.released.wait(timeout=30)
    handler.close_connection = True


def drip(handler: Handler) -> None:
    """A byte at a time: every single read is quick, the answer never complete."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not handler.server.released.wait(timeout=0.01):
        handler.wfile.write(b"x")
        handler.wfile.flush()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join(timeout=5)


def ask(endpoint: Endpoint) -> str:
    return asyncio.run(endpoint.ask(QUESTION, {"temperature": 0.0})).text


@pytest.mark.parametrize("place", [0, 50, 150, 190])
@pytest.mark.parametrize("start", ["", "HTTP/1.1 200 OK\r\nContent-Length: "])
def test_no_part_of_a_key_is_kept_of_what_is_no_http(
    server: Server, monkeypatch: pytest.MonkeyPatch, start: str, place: int
) -> None:
    """Errors are stored with the run."""
    monkeypatch.setenv("SOME_KEY", key := "sk-0123456789")
    server.acts = [send_raw(f"{start}{'.' * place}{key}\r\n\r\n".encode())]
    with pytest.raises(EndpointFailed, match="broken HTTP") as failed:
        ask(server.endpoint(key_variable="SOME_KEY", retries=0))
    assert not [at for at in range(len(key) - 4) if key[at : at + 5] in str(failed.value)], failed.value
    assert len(str(failed.value)) < 300


def test_a_question_is_a_chat_completion(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    reply = asyncio.run(server.endpoint(key_variable="SOME_KEY").ask(QUESTION, {"temperature": 0.0, "max_tokens": 7}))
    assert (reply.text, reply.model) == ("fine", "judge-1")
    assert server.asked == [
        {
            "path": "/v1/chat/completions",
            "key": "Bearer secret",
            "model": "judge",
            "messages": [{"role": "user", "content": "Is it good?"}],
            "temperature": 0.0,
            "max_tokens": 7,
        }
    ]


def test_a_chunked_answer_is_read(server: Server) -> None:
    body = completion("in pieces")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:10], body[10:]))
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.acts = [send_raw(head + chunks + b"0\r\n\r\n")]
    assert ask(server.endpoint()) == "in pieces"


def test_an_answer_that_ends_with_the_connection_is_read(server: Server) -> None:
    server.acts = [send_raw(b"HTTP/1.0 200 OK\r\n\r\n" + completion("old"))]
    assert ask(server.endpoint()) == "old"


def test_a_refusal_without_words_is_an_empty_text(server: Server) -> None:
    server.acts = [say(None)]
    assert ask(server.endpoint()) == ""


@pytest.mark.parametrize(
    "first",
    [
        refuse(500),
        refuse(503),
        refuse(429, Retry_After="0"),
        send_raw(b""),
        send_raw(b"\x00\xffgarbage\r\n\r\n"),
        send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\n\r\n"),
        send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"),
        send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ncut off"),
        send_raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000),
        send_body(b"<html>bad gateway</html>"),
        send_body(b"[1, 2]"),
        send_body(b'{"choices": []}'),
        send_body(b'{"choices": [{"message": {"content": 5}}]}'),
        send_body(b"[" * 100_000),
    ],
)
def test_what_may_pass_is_asked_again_and_then_given_up(server: Server, first: Act) -> None:
    server.acts = [first, say("second")]
    assert ask(server.endpoint(retries=1)) == "second"
    server.acts, server.asked = [first], []
    with pytest.raises(EndpointFailed, match="after 3 attempts"):
        ask(server.endpoint(retries=2))
    assert len(server.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_for_good_is_not_asked_again(server: Server, status: int) -> None:
    server.acts = [refuse(status)]
    with pytest.raises(EndpointFailed, match=f"status {status}: not now"):
        ask(server.endpoint())
    assert len(server.asked) == 1


@pytest.mark.parametrize("act", [hang, drip])
def test_the_deadline_holds_against_a_server_that_never_ends(server: Server, act: Act) -> None:
    server.acts = [act]
    with pytest.raises(EndpointFailed, match=r"timeout after 0\.2 s"):
        ask(server.endpoint(deadline_seconds=0.2))


def test_the_deadline_covers_the_retries(server: Server) -> None:
    server.acts = [refuse(500)]
    with pytest.raises(EndpointFailed, match=r"timeout after 0\.2 s \(before that: status 500"):
        ask(server.endpoint(deadline_seconds=0.2, backoff_seconds=20.0))


def test_an_answer_that_was_cut_off_is_not_read_as_the_next(server: Server) -> None:
    server.acts = [drip, say("right")]
    endpoint = server.endpoint(deadline_seconds=0.2, retries=0)

    async def twice() -> str:
        with pytest.raises(EndpointFailed):
            await endpoint.ask(QUESTION, {})
        return (await endpoint.ask(QUESTION, {})).text

    assert asyncio.run(twice()) == "right"


def test_nobody_listening_is_a_failure() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    options = EndpointOptions(base_url=f"http://127.0.0.1:{port}", model="m", retries=1, backoff_seconds=0.0)
    with pytest.raises(EndpointFailed, match="ConnectionRefusedError"):
        ask(Endpoint(options))


def test_connections_are_reused_and_their_number_is_bounded(server: Server) -> None:
    endpoint = server.endpoint(max_concurrent=3)

    async def many() -> None:
        for _ in range(2):
            await asyncio.gather(*(endpoint.ask(QUESTION, {}) for _ in range(12)))
        await endpoint.close()

    asyncio.run(many())
    assert len(server.asked) == 24
    assert server.most_busy <= 3
    assert server.num_connections == 3


def test_an_idle_connection_that_the_server_closed_costs_no_retry(server: Server) -> None:
    def answer_and_hang_up(handler: Handler) -> None:
        handler.send(200, completion("fine"))
        handler.close_connection = True

    server.acts = [answer_and_hang_up]
    endpoint = server.endpoint(retries=0)

    async def twice() -> list[str]:
        return [(await endpoint.ask(QUESTION, {})).text for _ in range(3)]

    assert asyncio.run(twice()) == ["fine"] * 3


def test_an_endpoint_outlives_its_event_loop(server: Server) -> None:
    endpoint = server.endpoint()
    assert [ask(endpoint), ask(endpoint)] == ["fine", "fine"]


def test_keys_come_from_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="export NO_SUCH_KEY"):
        EndpointOptions(base_url="http://a", model="m", key_variable="NO_SUCH_KEY")
    with pytest.raises(UserError, match="not the key") as caught:
        EndpointOptions(base_url="http://a", model="m", key_variable="sk-proj-1234")
    assert "1234" not in str(caught.value)
    with pytest.raises(UserError, match="key_variable") as caught:
        EndpointOptions(base_url="http://me:hunter2@a/v1", model="m")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"base_url": "localhost"}, {"model": ""}, {"retries": -1}, {"max_concurrent": 0}, {"deadline_seconds": 0.0}],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        EndpointOptions(**{"base_url": "http://a", "model": "m", **wrong})
