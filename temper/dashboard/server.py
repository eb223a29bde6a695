"""The dashboard's web server: every address, the static files, and listening on this machine.

Owns: routes and how failures become answers. Refuses: paths from clients; a name is looked up in what there is.
"""

from __future__ import annotations

import importlib.util
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from temper import listening
from temper.dashboard import pages, recipes
from temper.dashboard.answers import Guard, to_json
from temper.dashboard.database import OutOfTime
from temper.dashboard.effects import EffectFilter, list_effects
from temper.dashboard.prompts import PromptFilter, list_prompts
from temper.dashboard.queries import RolloutFilter
from temper.dashboard.registry import Registry, UnknownRun, summary
from temper.dashboard.stream import Streams
from temper.dashboard.table import notes_of, table
from temper.dashboard.tokens import Tokenizers
from temper.errors import BackendError, UserError, install_line
from temper.runs.notes import make_notes, write_notes

if TYPE_CHECKING:
    from fastapi import FastAPI

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".woff2": "font/woff2",
    ".json": "application/json", ".webmanifest": "application/manifest+json",
}  # fmt: skip
MOST_AT_ONCE = 4
"""Answers worked out together: the machine is there for training."""
TURN_SECONDS = 30.0
MOST_ROWS = 500
MOST_NAMES = 100
MOST_QUERY = 1000
"""Characters of a text that is searched for."""


class SearchTooLong(Exception):
    """A text to search for that nobody types."""


def page_of(offset: int, limit: int, *searches: str | None) -> tuple[int, int]:
    """Where a page of a list begins, and how many rows it has. SearchTooLong: what is searched for is no search."""
    if max(len(text or "") for text in searches) > MOST_QUERY:
        raise SearchTooLong(f"a text to search for has at most {MOST_QUERY} characters")
    return max(offset, 0), min(max(limit, 1), MOST_ROWS)


STATUS_OF: dict[type[Exception], int] = {
    UnknownRun: 404,
    pages.Missing: 404,
    OutOfTime: 503,
    BackendError: 503,
    sqlite3.Error: 503,
    UserError: 409,  # the run is there and cannot be read, e.g. a layout of a later version
    SearchTooLong: 400,
    OverflowError: 400,  # an integer beyond 64 bits
}

Answer = Callable[[Callable[[], Any]], Any]


def make_app(registry: Registry, host: str) -> tuple[Guard, Streams]:
    """The application for a server that listens on `host`, and its event streams."""
    try:
        from fastapi import FastAPI
        from starlette.routing import Route
    except ImportError as error:
        raise UserError(f"temper watch needs fastapi. Run: {install_line('watch')}") from error
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    streams = Streams(registry)
    app.router.routes.append(Route("/api/stream", streams))
    _answer_failures(app)
    answer = _answering()
    _add_table_routes(app, registry, answer, can_edit=not listening.is_public(host))
    _add_rollout_routes(app, registry, answer)
    _add_run_routes(app, registry, answer)
    _add_static(app, static_files())
    return Guard(app, listening.own_names(host)), streams


def _answer_failures(app: FastAPI) -> None:
    """Every failure is {"error": text}."""
    from fastapi import Response
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    def answer(status: int, text: str) -> Any:
        headers = {"cache-control": "no-store"}
        return Response(to_json({"error": text}), status, headers, media_type="application/json")

    def known(request: Any, error: Exception) -> Any:
        status = next(status for kind, status in STATUS_OF.items() if isinstance(error, kind))
        return answer(status, str(error))

    def invalid(request: Any, error: Any) -> Any:
        told = "; ".join(f"{problem['loc'][-1]}: {problem['msg']}" for problem in error.errors())
        return answer(400, told)

    for kind in STATUS_OF:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, lambda request, error: answer(error.status_code, str(error.detail)))


def _answering() -> Answer:
    """answer(work): the work's value as JSON, a few at a time."""
    from fastapi import Response

    turns = threading.BoundedSemaphore(MOST_AT_ONCE)

    @contextmanager
    def turn() -> Iterator[None]:
        if not turns.acquire(timeout=TURN_SECONDS):
            raise BackendError("the dashboard is busy with other questions. Ask again")
        try:
            yield
        finally:
            turns.release()

    def answer(work: Callable[[], Any]) -> Any:
        with turn():
            content = to_json(work())
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")

    return answer


def _add_table_routes(app: FastAPI, registry: Registry, answer: Answer, *, can_edit: bool) -> None:
    """All runs at once, and what people write beside them."""
    from fastapi import Body

    @app.get("/api/table")
    def whole_table() -> Any:
        return answer(lambda: table(registry.runs(), can_edit=can_edit))

    @app.get("/api/runs/{run_id}/notes")
    def notes(run_id: str) -> Any:
        return answer(lambda: notes_of(registry.find(run_id).folder))

    @app.put("/api/runs/{run_id}/notes")
    def keep_notes(run_id: str, tags: list[str] = Body(...), note: str = Body(...)) -> Any:
        """The Guard has looked at who sends this."""

        def keep() -> dict[str, Any]:
            folder = registry.find(run_id).folder
            write_notes(folder, make_notes(tags, note))
            return notes_of(folder)

        return answer(keep)


def _add_run_routes(app: FastAPI, registry: Registry, answer: Answer) -> None:
    """Whole runs. Plain functions: the framework gives each a thread."""
    pages_by_name: Mapping[str, Callable[[Path], Any]] = {
        "overview": pages.overview,
        "axes": pages.axes,
        "metrics": pages.metrics,
        "data": pages.data,
        "systems": pages.systems,
        "evaluations": pages.evaluations,
        "config": pages.config,
    }

    @app.get("/api/runs")
    def runs() -> Any:
        return answer(lambda: [summary(run) for run in registry.runs()])

    @app.get("/api/config-diff")
    def config_difference(a: str, b: str) -> Any:
        return answer(lambda: recipes.difference(registry.find(a).folder, registry.find(b).folder))

    @app.get("/api/runs/{run_id}/series")
    def series(run_id: str, names: str = "") -> Any:
        wanted = [name for name in dict.fromkeys(names.split(",")) if name][:MOST_NAMES]
        return answer(lambda: pages.series(registry.find(run_id).folder, wanted))

    @app.get("/api/runs/{run_id}/{page}")
    def page(run_id: str, page: str) -> Any:
        folder = registry.find(run_id).folder
        if page not in pages_by_name:
            raise pages.Missing(f"there is no {page[:40]!r} of a run")
        return answer(lambda: pages_by_name[page](folder))


def _add_rollout_routes(app: FastAPI, registry: Registry, answer: Answer) -> None:
    """Single rollouts. Added before the pages, whose address would match these, too."""
    from fastapi import Depends

    tokenizers = Tokenizers()

    @app.get("/api/runs/{run_id}/rollouts")
    def rollouts(run_id: str, wanted: RolloutFilter = Depends(RolloutFilter), offset: int = 0, limit: int = 50) -> Any:
        page = page_of(offset, limit, wanted.q, wanted.task)
        return answer(lambda: pages.rollouts(registry.find(run_id).folder, wanted, *page))

    @app.get("/api/runs/{run_id}/prompts")
    def prompts(run_id: str, wanted: PromptFilter = Depends(PromptFilter), offset: int = 0, limit: int = 50) -> Any:
        page = page_of(offset, limit, wanted.q)
        return answer(lambda: list_prompts(registry.find(run_id).folder, wanted, *page))

    @app.get("/api/runs/{run_id}/effects")
    def effects(run_id: str, wanted: EffectFilter = Depends(EffectFilter), offset: int = 0, limit: int = 50) -> Any:
        page = page_of(offset, limit, wanted.tool)
        return answer(lambda: list_effects(registry.find(run_id).folder, wanted, *page))

    @app.get("/api/runs/{run_id}/experts")
    def experts(run_id: str, stage: int | None = None, step: int | None = None) -> Any:
        return answer(lambda: pages.experts(registry.find(run_id).folder, stage, step))

    @app.get("/api/runs/{run_id}/group")
    def group(run_id: str, stage: int, step: int, group_id: str) -> Any:
        return answer(lambda: pages.group(registry.find(run_id).folder, stage, step, group_id))

    @app.get("/api/runs/{run_id}/trajectory")
    def trajectory(run_id: str, stage: int, step: int, group_id: str, member: int) -> Any:
        key = (stage, step, group_id)
        return answer(lambda: pages.trajectory(registry.find(run_id).folder, key, member, tokenizers))


def static_files() -> dict[str, Path]:
    """Every file that is served, by its address below /static/. What is not here does not exist."""
    plotly = importlib.util.find_spec("plotly")
    if plotly is None or plotly.origin is None:
        raise UserError(f"temper watch needs plotly for its charts. Run: {install_line('watch')}")
    found = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in TYPES}
    return {**found, "plotly.min.js": Path(plotly.origin).parent / "package_data" / "plotly.min.js"}


def _add_static(app: FastAPI, files: Mapping[str, Path]) -> None:
    from fastapi import Header, Response

    def send(name: str, known: str | None) -> Any:
        path = files.get(name)
        if path is None or not path.is_file():
            raise pages.Missing(f"there is no file {name[:80]!r}")
        facts = path.stat()
        tag = f'"{facts.st_mtime_ns:x}-{facts.st_size:x}"'
        headers = {"etag": tag, "cache-control": "no-cache"}  # kept by the browser, asked about every time
        if known == tag:
            return Response(status_code=304, headers=headers)
        return Response(path.read_bytes(), headers=headers, media_type=TYPES[path.suffix])

    @app.get("/")
    def index(if_none_match: str | None = Header(None)) -> Any:
        return send("index.html", if_none_match)

    @app.get("/static/{name:path}")
    def static(name: str, if_none_match: str | None = Header(None)) -> Any:
        return send(name, if_none_match)


def make_server(app: Guard, streams: Streams) -> Any:
    """A uvicorn server that is not started. Its streams end when it is told to."""
    missing = f"temper watch needs uvicorn. Run: {install_line('watch')}"
    server = listening.make_server(app, shutdown_seconds=5, missing=missing)
    streams.is_closing = lambda: bool(server.should_exit)
    return server
