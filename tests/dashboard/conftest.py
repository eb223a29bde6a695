"""A small real run, and the dashboard served to it on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the dashboard's server is not installed")
pytest.importorskip("uvicorn", reason="the dashboard's server is not installed")
pytest.importorskip("plotly", reason="the dashboard's charts are not installed")

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.dashboard.registry import Registry
from temper.dashboard.server import make_app, make_server
from temper.listening import listen

ROOT = Path(__file__).parent.parent.parent


class Served:
    """The dashboard in a thread."""

    def __init__(self, *roots: Path) -> None:
        app, self.streams = make_app(Registry(roots), "127.0.0.1")
        self._server = make_server(app, self.streams)
        bound = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(bound,), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def _run(self, bound: Any) -> None:
        with bound, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._server.serve(sockets=[bound]))

    def ask(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=30.0)

    def get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(self.url + path, params=parameters, timeout=30.0)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def put(self, path: str, content: Any, **headers: str) -> httpx.Response:
        return httpx.put(self.url + path, json=content, headers=headers, timeout=30.0)

    def run(self, name: str | None = None) -> str:
        """Address of the run with this name, or of the only one."""
        return next(f"/api/runs/{run['id']}" for run in self.get("/api/runs") if name in (None, run["name"]))

    def num_tasks(self) -> int:
        """Tasks of the server's event loop, its own included."""
        return len(asyncio.all_tasks(self._loop))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20.0)
        assert not self._thread.is_alive(), "the server did not end"


def until(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for something that must happen; a failure, not a measurement, when it does not."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], None]:
    return until


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """serve(folder, ...): the dashboard of these folders."""
    servers: list[Served] = []

    def start(*roots: Path) -> Served:
        servers.append(Served(*roots))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def kept() -> dict[str, Path]:
    return {}


@pytest.fixture
def trained(tiny_recipe: dict[str, Any], kept: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny recipe, trained once for all tests. Read it; write to copies."""
    if "run" not in kept:
        folder = tmp_path_factory.mktemp("trained")
        (folder / "recipe.toml").write_text(to_toml(resolve(tiny_recipe, [], where="tiny")))
        kept["run"] = train(folder / "recipe.toml", run=folder / "runs" / "tiny")
    return kept["run"]


@pytest.fixture(scope="session")
def benchmark() -> Any:
    """benchmarks/dashboard.py, which makes large runs."""
    spec = importlib.util.spec_from_file_location("dashboard_benchmark", ROOT / "benchmarks" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
