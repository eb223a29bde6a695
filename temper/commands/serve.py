"""`temper serve`: a checkpoint behind an OpenAI-compatible HTTP interface, drawn by the local engine.

Owns: loading, sizing the engine, putting the parts together. Refuses: training; weights do not change while it serves.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from temper.build.policy import PolicyDescription, Room, describe_policy, open_engine
from temper.commands.find import find_model
from temper.engine.local.engine import LocalEngine
from temper.errors import UserError
from temper.listening import is_public, listen, own_names
from temper.serve.app import App, HttpSettings
from temper.serve.conversation import Conversations
from temper.serve.gateway import Gateway
from temper.serve.orders import ServerLimits
from temper.serve.records import RecordFile, Speech
from temper.serve.server import Ending, make_server, run
from temper.serve.text import Words

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
KEY_VARIABLE = "TEMPER_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free one."""
    name: str = ""
    """What clients call the model; default: the name of the directory."""
    api_key: str = ""
    """Default: the environment variable TEMPER_API_KEY."""
    record: Path | None = None
    max_running: int = 32
    max_waiting: int = 256
    context: int = 0
    """Longest sequence, prompt included; 0: the model's."""
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    shutdown_seconds: float = 30.0


def serve(checkpoint: Path, settings: ServeSettings, say: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C. `say` gets what the user should know."""
    key = settings.api_key or os.environ.get(KEY_VARIABLE, "")
    bound = listen(settings.host, settings.port)
    try:
        app, ending, name = open_app(checkpoint, settings, key)
        server = make_server(app, settings.shutdown_seconds)
        if is_public(settings.host) and not key:
            say(f"warning: everybody who can reach {settings.host} can use this model. Set --api-key or {KEY_VARIABLE}")
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        say(f'"{name}" is served at http://{host}:{bound.getsockname()[1]}/v1')
        run(server, bound, ending)
    finally:
        bound.close()


def open_app(checkpoint: Path, settings: ServeSettings, key: str) -> tuple[App, Ending, str]:
    """The application, how it ends, and the model's name."""
    policy = describe_policy(find_model(checkpoint))
    tokenizer, stop_ids = policy.tokenizer, policy.end_ids
    name = settings.name or checkpoint.resolve().name
    records = RecordFile(settings.record, Speech.of(tokenizer)) if settings.record is not None else None
    engine, max_length = open_sampler(policy, settings)
    renderer = policy.make_renderer() if tokenizer.chat_template else None
    limits = ServerLimits(
        model=name,
        stop_ids=renderer.stop_ids if renderer is not None else stop_ids,
        max_length=max_length,
        max_in_flight=settings.max_running + settings.max_waiting,
    )
    gateway = Gateway(engine, Conversations(tokenizer, renderer, records), records, limits)

    async def close() -> None:
        await engine.close()
        gateway.shut()

    ending = Ending(end=gateway.end, close=close, shutdown_seconds=settings.shutdown_seconds)
    return App(gateway, HttpSettings(api_key=key, hosts=own_names(settings.host))), ending, name


def open_sampler(policy: PolicyDescription, settings: ServeSettings) -> tuple[LocalEngine, int]:
    """The engine and the longest sequence it takes."""
    context = policy.shape.max_context
    if not 0 <= settings.context <= context:
        raise UserError(f"--context {settings.context} is not within the model's context of {context} tokens")
    for option, given, allowed in (("dtype", settings.dtype, DTYPES), ("device", settings.device, DEVICES)):
        if given not in allowed:
            raise UserError(f"--{option} {given} is not one of {', '.join(allowed)}")
    if settings.max_running < 1 or settings.max_waiting < 0:
        raise UserError("--max-running must be at least 1 and --max-waiting at least 0")
    max_length = settings.context or context
    engine = open_engine(
        policy,
        Room(seed=settings.seed, max_running=settings.max_running, max_length=max_length),
        device=settings.device,
        dtype=settings.dtype,
        # The text that clients see, so that a stop text ends the drawing exactly where it is cut off.
        decode=Words(policy.tokenizer).decode,
    )
    return engine, max_length
