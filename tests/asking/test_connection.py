from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from temper.asking.connection import Dialer
from temper.asking.endpoint import Endpoint, EndpointFailed, EndpointOptions
from temper.envs.agents.service import AgentService
from temper.types import Message


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread in which each context was made."""
    threads: list[int] = []
    make = ssl.create_default_context

    def watched() -> ssl.SSLContext:
        threads.append(threading.get_ident())
        return make()

    monkeypatch.setattr(ssl, "create_default_context", watched)
    return threads


@pytest.fixture
def deaf() -> Any:
    """A port at which connections are made, and nobody speaks TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stopped = threading.Event()

        def hang_up() -> None:
            listening.settimeout(0.1)
            while not stopped.is_set():
                try:
                    listening.accept()[0].close()
                except OSError:
                    continue

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        stopped.set()
        thread.join(5)


async def by_dialer(port: int) -> None:
    dialer = Dialer(urlsplit(f"https://127.0.0.1:{port}/"), 100)
    found = await asyncio.gather(*(dialer.connect() for _ in range(4)), return_exceptions=True)
    assert all(isinstance(one, OSError) for one in found), found


async def by_endpoint(port: int) -> None:
    options = EndpointOptions(base_url=f"https://127.0.0.1:{port}/v1", model="m", retries=2, backoff_seconds=0.01)
    endpoint = Endpoint(options)
    for _ in range(2):
        with pytest.raises(EndpointFailed):
            await endpoint.ask((Message(role="user", content="q"),), {})


async def by_service(port: int) -> None:
    service = AgentService(urlsplit(f"https://127.0.0.1:{port}/"), "")
    variables = {"OPENAI_BASE_URL": "http://x/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "m"}
    for _ in range(3):
        end = await service.run({}, variables, asyncio.get_running_loop().create_future())
        assert "cannot be reached" in str(end.problem)


@pytest.mark.parametrize("ask", [by_dialer, by_endpoint, by_service])
def test_certificates_are_read_once_for_a_server_and_not_on_the_event_loop(
    ask: Callable[[int], Any], made: list[int], deaf: int
) -> None:
    """It takes as long as a short answer, and stops every episode."""
    asyncio.run(ask(deaf))
    assert len(made) == 1
    assert made[0] != threading.get_ident()


def test_no_certificates_are_read_for_http(made: list[int], deaf: int) -> None:
    async def main() -> None:
        (await Dialer(urlsplit(f"http://127.0.0.1:{deaf}/"), 100).connect()).close()

    asyncio.run(main())
    assert made == []
