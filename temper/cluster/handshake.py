"""How a run and a sampler that stands somewhere already get to trust each other.

Owns: the words before the first frame: the same Temper on both sides, and a key that both have and neither says.
Refuses: secrecy; what follows is not encrypted, so the network between the two must be one that is trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.rewards.workers.program import receive, send
from temper.version import __version__

KEY_VARIABLE = "TEMPER_SAMPLER_KEY"
HELLO_SECONDS = 30.0
"""For the other side to say each of its words; a crowded machine may need some."""


class Busy(ConnectionError):
    """It draws for another run: worth another try."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A run that has shown that it has the key."""

    run: str
    """Its name; the same when it comes back."""
    silent_seconds: float
    """After which each side gives up the other."""
    welcome: dict[str, str]
    """What shows it that we have the key, too."""


@cache
def own_version() -> str:
    """Of the code that runs here: between two releases numbers say nothing."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{__version__}, code {digest.hexdigest()[:12]}"


def greet(caller: socket.socket, key: str) -> Guest:
    """The sampler's side. PermissionError for one without the key, who has then been told so; OSError, EOFError or
    ValueError for one that does not speak like this."""
    ours = secrets.token_hex(16)
    end = time.monotonic() + HELLO_SECONDS
    send(caller, {"temper": own_version(), "nonce": ours})
    told = _mapping(receive(caller, end))
    theirs = str(told.get("nonce"))
    if not hmac.compare_digest(str(told.get("proof")), _proof(key, "run", ours, theirs)):
        send(caller, {"refused": f"the key is another. Set {KEY_VARIABLE} to what it was when the sampler was started"})
        raise PermissionError("it has another key")
    return Guest(str(told["run"]), float(told["silent_seconds"]), {"proof": _proof(key, "sampler", ours, theirs)})


def introduce(connection: socket.socket, key: str, run: str, silent_seconds: float) -> None:
    """The run's side. UserError where another try would not help, Busy where it may; OSError or EOFError when it hangs
    up on the way."""
    end, theirs = time.monotonic() + HELLO_SECONDS, secrets.token_hex(16)
    try:
        hello = _mapping(receive(connection, end))
        there, ours = str(hello["temper"]), str(hello["nonce"])
    except (ValueError, KeyError) as error:
        raise UserError("whoever listens there is no `temper sampler`") from error
    if there != own_version():
        raise UserError(f"it runs Temper {there}, and this is Temper {own_version()}: install the same on both")
    proof = _proof(key, "run", ours, theirs)
    said = {"nonce": theirs, "proof": proof, "run": run, "silent_seconds": silent_seconds}
    send(connection, said)
    answer = _mapping(receive(connection, end))
    if "refused" in answer:
        raise UserError(str(answer["refused"]))
    if "busy" in answer:
        raise Busy(str(answer["busy"]))
    if not hmac.compare_digest(str(answer.get("proof")), _proof(key, "sampler", ours, theirs)):
        raise UserError(f"whoever listens there does not have the key of {KEY_VARIABLE}: it gets no weights")


def _proof(key: str, side: str, first: str, second: str) -> str:
    """That `side` has the key, for this meeting alone: what was overheard at another is of no use."""
    return hmac.new(key.encode(), f"{side} {first} {second}".encode(), hashlib.sha256).hexdigest()


def _mapping(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError("not what was expected")
    return told
