"""A service that plays episodes as a test says, on a port of its own."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Play = Callable[["Announced", dict[str, Any]], None]


class Announced(BaseHTTPRequestHandler):
    """One question of Temper's. `order` is what it said of the episode."""

    server: AgentServer

    def do_POST(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.orders.append(order)
        self.server.shown.append(self.headers.get("Authorization", ""))
        self.server.play(self, order)

    def do_DELETE(self) -> None:
        self.server.over.append(self.path)
        self.server.when_over()
        self.reply(204, b"")

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def say(self, result: object) -> None:
        self.reply(200, json.dumps({"result": result}).encode())

    def log_message(self, *_: Any) -> None:
        """Silent."""


class AgentServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, play: Play) -> None:
        super().__init__(("127.0.0.1", 0), Announced)
        self.play = play
        self.orders: list[dict[str, Any]] = []
        self.shown: list[str] = []
        """Authorization of each announcement."""
        self.over: list[str] = []
        """Paths of episodes that Temper has said to be over."""
        self.when_over: Callable[[], object] = lambda: None
        """Done while Temper waits for the answer to that."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/episodes"

    def handle_error(self, *_: Any) -> None:
        """Episodes that end while their service still speaks are what these tests are about."""


@contextmanager
def agent_service(play: Play) -> Iterator[AgentServer]:
    server = AgentServer(play)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def post(url: str, key: str, body: bytes, kind: str = "application/json") -> tuple[int, Any]:
    """Status and answer."""
    request = urllib.request.Request(url, body, {"Content-Type": kind, "Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def ask(order: dict[str, Any], messages: list[Any]) -> str:
    """What the model says; '' when it is refused."""
    body = json.dumps({"model": order["model"], "messages": messages}).encode()
    status, answer = post(f"{order['base_url']}/chat/completions", order["api_key"], body)
    return answer["choices"][0]["message"]["content"] if status == 200 else ""


def hand_in(order: dict[str, Any], result: object) -> tuple[int, Any]:
    return post(order["result_url"], order["api_key"], json.dumps({"result": result}).encode())
