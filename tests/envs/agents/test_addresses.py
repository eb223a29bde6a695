"""Which addresses can work together, and what is said of those that cannot."""

from __future__ import annotations

from typing import Any

import pytest

from temper.envs.agents.addresses import read_addresses
from temper.envs.agents.agent import AgentEnv
from temper.errors import UserError

SERVICE = "http://127.0.0.1:9000/episodes"


@pytest.mark.parametrize(
    ("url", "listen", "address", "place"),
    [
        (SERVICE, "127.0.0.1:0", "", ("127.0.0.1", 0, "")),
        ("http://agents:9000", "10.0.0.5:8765", "", ("10.0.0.5", 8765, "")),
        ("https://agents/e/", "0.0.0.0:8765", "http://trainer:8765/", ("0.0.0.0", 8765, "http://trainer:8765")),
        ("http://agents:9000", "127.0.0.1:8765", "http://localhost:7000", ("127.0.0.1", 8765, "http://localhost:7000")),
        ("", "[::1]:8765", "", ("::1", 8765, "")),
    ],
)
def test_addresses_that_work_together_are_taken(url: str, listen: str, address: str, place: tuple[Any, ...]) -> None:
    """The fourth is a tunnel."""
    found = read_addresses("env", url, listen, address)
    assert (found.host, found.port, found.told) == place
    assert (found.service is None) == (not url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "agents:9000"}, "url='agents:9000' is no address"),
        ({"url": "http://agents:port"}, "is no address"),
        ({"url": "http://agents/a b"}, "is no address"),
        ({"url": "http://me:secret@agents:9000"}, "credentials"),
        ({"url": f"{SERVICE}?key=1"}, "credentials, a query"),
        ({"url": SERVICE, "listen": "8765"}, "listen='8765' is no address and port"),
        ({"url": SERVICE, "listen": "host:70000"}, "no address and port"),
        ({"url": SERVICE, "listen": "::1:8765"}, "no address and port"),
        ({"url": SERVICE, "listen": "0.0.0.0:8765"}, "every address of this machine"),
        ({"command": "python x.py", "listen": "[::]:8765"}, "every address of this machine"),
        ({"url": SERVICE, "address": "http://trainer:8765"}, "needs a port that stays"),
        ({"url": SERVICE, "listen": "0.0.0.0:8765", "address": "trainer"}, "address='trainer' is no address"),
        ({"url": "http://agents:9000"}, "cannot reach listen='127.0.0.1:0'"),
        ({"url": SERVICE, "command": "python x.py"}, "not command and url"),
        ({"url": SERVICE, "python": "python3"}, "python is for agents that Temper starts"),
        ({"url": SERVICE, "variables": ["HOME"]}, "variables is for agents that Temper starts"),
        ({"url": SERVICE, "sandbox": True}, "sandbox is for agents that Temper starts"),
        ({"url": SERVICE, "key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
        ({"command": "python x.py", "key_variable": "HOME"}, "key_variable holds what the service"),
        ({"command": "python x.py", "sandbox": True, "listen": "127.0.0.1:8765"}, "reaches this machine alone"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_opened(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        AgentEnv(**options)
    assert message in str(refused.value)
