"""A sampler that stands somewhere and draws for one run after the other: what `temper sampler` is.

Owns: who may come in, one process for each run, and its end. Refuses: drawing, which that process does: it is that of
any other sampler (sampler_main.py), and its memory goes with it, and whatever may break.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from temper.cluster.addresses import has_hung_up
from temper.cluster.child import Child
from temper.cluster.handshake import KEY_VARIABLE, Guest, greet
from temper.cluster.remote import POLL_SECONDS, prepare
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.errors import BackendError, UserError
from temper.listening import listen
from temper.rewards.workers.program import send

MAIN = "temper.cluster.sampler_main"
END_SECONDS = 10.0
MOST_STRANGERS = 16
"""Callers that are being heard at a time."""


def stand_at(address: str, model: Path | None, say: Callable[[str], None]) -> None:
    """Draws for whoever comes with the key, until SIGTERM or Ctrl-C. `say` gets what the user should know."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f'--listen "{address}" is no address: use HOST:PORT, e.g. 0.0.0.0:29600')
    if model is not None and not (model / "config.json").is_file():
        raise UserError(f"{model} is no model: it has no config.json. Give a Hugging Face directory")
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        key = secrets.token_hex(16)
        say(f"export {KEY_VARIABLE}={key}   # where the run is started")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with listen(host.strip("[]"), int(port)) as bound:
        say(f"listens at {host}:{bound.getsockname()[1]}")
        try:
            Listener(bound, key, None if model is None else model.resolve(), say).listen()
        except KeyboardInterrupt:
            say("ends, and so does what draws here")


class Listener:
    """Lives as long as `temper sampler`."""

    def __init__(self, bound: socket.socket, key: str, model: Path | None, note: Callable[[str], None]) -> None:
        """model: what it opens, whatever the run's own folder is called; None: that folder, on a file system that both
        see. note: told who comes and how it ends."""
        self._bound, self._key, self._model, self._note = bound, key, model, note
        self._choosing, self._hearing = threading.Lock(), threading.Semaphore(MOST_STRANGERS)
        self._at_work: tuple[Guest, socket.socket, Child] | None = None

    def listen(self) -> None:
        """Until somebody ends this process. Each caller is heard in a thread: who says nothing keeps nobody waiting."""
        self._bound.settimeout(POLL_SECONDS)
        while self._bound.fileno() >= 0:
            try:
                caller, address = self._bound.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptors are left, or it was closed
                self._note(f"cannot accept a caller: {error}")
                time.sleep(POLL_SECONDS)
                continue
            if self._hearing.acquire(blocking=False):
                threading.Thread(target=self._hear, args=(caller, str(address[0])), daemon=True).start()
            else:
                caller.close()

    def _hear(self, caller: socket.socket, host: str) -> None:
        with caller:
            try:
                child = self._let_in(caller, host)
            except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
                self._note(f"turned away {host}: {error}")
                return
            finally:
                self._hearing.release()
            while child is not None and (ended := child.wait(END_SECONDS)) is None:
                pass
        if child is not None:
            self._note(f"a run from {host} is over: {ended}")

    def _let_in(self, caller: socket.socket, host: str) -> Child | None:
        """The process that draws for it from now on. None: another run is here."""
        guest = greet(caller, self._key)
        with self._choosing:
            if not self._is_free_for(guest):
                send(caller, {"busy": "it draws for another run"})
                return None
            send(caller, guest.welcome)
            prepare(caller, guest.silent_seconds)
            weights = SharedWeights(anonymous_file())
            try:
                descriptors = (caller.fileno(), weights.descriptor)
                own = [] if self._model is None else [str(self._model)]
                told = [*map(str, descriptors), *own]
                child = Child("the process that draws", MAIN, told, descriptors=descriptors)
            except BackendError as error:
                raise OSError(str(error)) from error
            finally:
                weights.close()
            self._at_work = guest, caller, child
        self._note(f"draws for a run from {host}")
        return child

    def _is_free_for(self, guest: Guest) -> bool:
        """Nobody draws here, or it draws for one that is gone or has come back. What is left of it is ended."""
        if self._at_work is None:
            return True
        before, connection, child = self._at_work
        if child.wait(0.0) is None:
            if before.run != guest.run and not has_hung_up(connection, 0.0):
                return False
            child.kill()
            child.wait(END_SECONDS)
        self._at_work = None
        return True
