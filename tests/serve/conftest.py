"""A tiny model whose template shows tools, an engine that says what it is told, and servers on free ports."""

from __future__ import annotations

import asyncio
import json
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from temper.commands.serve import ServeSettings, open_app
from temper.listening import listen
from temper.models.load import load_tokenizer
from temper.models.tiny import make_tiny_model
from temper.serve.app import App, HttpSettings
from temper.serve.conversation import Conversations
from temper.serve.gateway import Gateway
from temper.serve.orders import ServerLimits
from temper.serve.records import RecordFile
from temper.serve.server import Ending, make_server, serve
from temper.tasks.render import Renderer
from temper.types import Completion, Finish, Request

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
TEMPLATE = (
    "{% if tools %}<|system|>Call as <tool_call>: {{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|{{ 'user' if message['role'] == 'tool' else message['role'] }}|>"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 512


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(
        tmp_path_factory.mktemp("model") / "tiny",
        layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=CONTEXT, alphabet=ALPHABET, seed=3,
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(tiny_folder)


class Scripted:
    """An engine that says the next text of its script, a token at a time, and remembers what it was asked."""

    version = 7

    def __init__(self, tokenizer: Any, texts: Sequence[str] = ("hello",)) -> None:
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self.seconds_per_token = 0.0
        self.failure: Exception | None = None

    async def generate(
        self, request: Request, *, watch: Callable[[list[int], list[float]], None] | None = None
    ) -> Completion:
        self.requests.append(request)
        if self.failure is not None:
            raise self.failure
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        finish, drawn = Finish.STOP, []
        self.running.add(request.id)
        for token in ids:
            if len(drawn) == request.params.max_new_tokens:
                finish = Finish.LENGTH
                break
            await asyncio.sleep(self.seconds_per_token)
            if request.id in self.aborted:
                finish = Finish.ABORT
                break
            drawn.append(token)
            if watch is not None:
                watch([token], [-0.5])
            if any(stop in self.tokenizer.decode(drawn) for stop in request.params.stop):
                break
        self.running.discard(request.id)
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=drawn,
            logprobs=[-0.5] * len(drawn),
            versions=[self.version] * len(drawn),
            finish=finish,
            params=request.params,
        )

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def utilisation(self) -> dict[str, float]:
        return {"temper_engine_steps_total": 3.0, "temper_engine_running": float(len(self.running))}


class Served:
    """A server in a thread."""

    def __init__(self, app: App, ending: Ending) -> None:
        bound = listen("127.0.0.1", 0)
        self.port = bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = make_server(app, ending.shutdown_seconds)
        self._thread = threading.Thread(target=lambda: asyncio.run(serve(self._server, bound, ending)), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    def client(self, api_key: str = "none", **options: Any) -> Any:
        openai = pytest.importorskip("openai", reason="the openai client is not installed")
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30.0, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        sent = {"Content-Type": "application/json", **headers}
        return httpx.post(f"{self.url}{path}", content=json.dumps(body), headers=sent, timeout=30.0)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics", timeout=30.0).text.splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20.0)
        assert not self._thread.is_alive(), "the server did not end"


def until(is_true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for something that must happen; a failure, not a measurement, when it does not."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], None]:
    return until


@pytest.fixture
def make_engine(tokenizer: Any) -> Callable[..., Scripted]:
    return lambda *texts: Scripted(tokenizer, texts or ("hello",))


@pytest.fixture
def serve_scripted(tokenizer: Any, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """serve_scripted(engine, record=..., max_in_flight=..., **http settings)."""
    servers: list[Served] = []

    def start(
        engine: Any, *, record: bool = False, max_in_flight: int = 64, shutdown_seconds: float = 5.0, **http: Any
    ) -> Served:
        records = RecordFile(tmp_path / "records.db") if record else None
        renderer = Renderer(tokenizer)
        limits = ServerLimits(model="tiny", stop_ids=renderer.stop_ids, max_length=CONTEXT, max_in_flight=max_in_flight)
        gateway = Gateway(engine, Conversations(tokenizer, renderer, records), records, limits)

        async def close() -> None:
            gateway.shut()

        ending = Ending(end=gateway.end, close=close, shutdown_seconds=shutdown_seconds)
        servers.append(Served(App(gateway, HttpSettings(**http)), ending))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def record_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "records.db"


@pytest.fixture(scope="session")
def served(tiny_folder: Path, record_path: Path) -> Iterator[Served]:
    """The real engine on the tiny model, recording."""
    settings = ServeSettings(name="tiny", max_running=16, record=record_path, dtype="float32", device="cpu")
    app, ending, _ = open_app(tiny_folder, settings, key="")
    server = Served(app, ending)
    yield server
    server.stop()
