"""Clients that hold connections and ask nothing, on real sockets; and the names a server answers to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the server is not installed")

from temper import listening
from temper.listening import is_called_by, listen, make_server, own_names

ASK = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Port of a server that has little patience and little room."""
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(listening, "most_connections", lambda: 8)
    server = make_server(hello, shutdown_seconds=1, missing="")
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])), daemon=True)
    thread.start()
    until(lambda: server.started)
    yield bound.getsockname()[1]
    server.should_exit = True
    thread.join(timeout=20.0)
    assert not thread.is_alive()


def until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20.0)


def is_answered(client: socket.socket) -> bool:
    client.sendall(ASK)
    heard = b""
    while not heard.endswith(b"hello"):
        part = client.recv(4096)
        if not part:
            return False
        heard += part
    return heard.startswith(b"HTTP/1.1 200")


def is_closed(client: socket.socket) -> bool:
    """Waits for the other side to close; the socket's own limit is the bound."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_head_that_does_not_come_ends_its_connection(port: int) -> None:
    with connect(port) as silent, connect(port) as slow, connect(port) as second:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        assert is_answered(second), "while others wait"
        second.sendall(b"GET / HT")  # a second head on a connection that was good once
        assert is_closed(silent)
        assert is_closed(slow)
        assert is_closed(second)


def test_a_head_that_trickles_has_the_same_deadline(port: int) -> None:
    with connect(port) as trickling:
        deadline = time.monotonic() + 15.0
        with contextlib.suppress(OSError):
            for letter in ASK[:-2] * 100:
                trickling.sendall(bytes([letter]))
                time.sleep(0.05)
                assert time.monotonic() < deadline, "its connection was never closed"
        assert time.monotonic() < deadline


def test_more_connections_than_there_is_room_for_shut_nobody_out(port: int) -> None:
    held = []
    try:
        for _ in range(40):
            held.append(connect(port))
            with connect(port) as asking:
                assert is_answered(asking)
    finally:
        for client in held:
            client.close()


LIMITED = """
import asyncio, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from temper.listening import listen, make_server
sys.path.insert(0, sys.argv[1])
from test_listening import hello
bound = listen("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
asyncio.run(make_server(hello, shutdown_seconds=1, missing="").serve(sockets=[bound]))
"""


def test_clients_cannot_take_all_descriptors() -> None:
    folder = __file__.rpartition("/")[0]
    with subprocess.Popen([sys.executable, "-c", LIMITED, folder], stdout=subprocess.PIPE, text=True) as server:
        held = []
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for _ in range(100):
                held.append(connect(port))
                held[-1].sendall(b"GET / HTTP/1.1\r\n")
            with connect(port) as asking:
                assert is_answered(asking)
        finally:
            for client in held:
                client.close()
            server.kill()


@pytest.mark.parametrize(
    ("listens", "called", "is_right"),
    [
        ("127.0.0.1", ["127.0.0.1:8000"], True),
        ("127.0.0.1", ["LOCALHOST"], True),
        ("::1", ["[::1]:80"], True),
        ("127.0.0.2", ["127.0.0.2:1"], True),
        ("127.0.0.1", ["evil.example:8000"], False),
        ("127.0.0.1", [], False),
        ("127.0.0.1", ["localhost", "evil.example"], False),
        ("0.0.0.0", ["evil.example"], True),
    ],
)
def test_a_server_of_this_machine_answers_to_its_own_names(listens: str, called: list[str], is_right: bool) -> None:
    headers = [(b"host", name.encode()) for name in called]
    assert is_called_by(own_names(listens), headers) == is_right
