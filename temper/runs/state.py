"""How a run stands: running, finished, failed, stopped or dead, from what its table `meta` says of it.

Owns: the rows `finished`, `ended` and `heartbeat`, and what follows from them. Imports nothing heavy: `watch` uses it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BEAT_SECONDS = 10.0
"""Time between two signs of life of a run's writer, also while a step takes minutes."""
DEAD_AFTER_SECONDS = 60.0
"""A run that has been silent for longer was killed: one that ends by itself says so."""
QUERY = "SELECT name, value FROM meta WHERE name IN ('finished', 'ended', 'heartbeat')"

Ending = Literal["failed", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    name: str
    """"running", "finished", "failed", "stopped", "dead"; "not finished": an older version wrote it, without beats."""
    text: str = ""
    """Why it failed or was stopped, or since when it is silent. Untrusted: whoever shows it escapes it."""
    heartbeat: float | None = None
    """Seconds since 1970."""

    @property
    def is_finished(self) -> bool:
        return self.name == "finished"


def read_run_state(meta: Mapping[str, str], now: float | None = None) -> RunState:
    """From rows of QUERY. A run that goes on after it failed has no `ended` any more."""
    beat = float(meta["heartbeat"]) if "heartbeat" in meta else None
    if "finished" in meta:
        return RunState(name="finished", heartbeat=beat)
    if "ended" in meta:
        ended = json.loads(meta["ended"])
        return RunState(name=ended["state"], text=ended["text"], heartbeat=beat)
    if beat is None:
        return RunState(name="not finished")
    silent = (time.time() if now is None else now) - beat
    if silent <= DEAD_AFTER_SECONDS:
        return RunState(name="running", heartbeat=beat)
    text = f"its process gave no sign of life since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(beat))}"
    return RunState(name="dead", text=text, heartbeat=beat)


def ended_row(state: Ending, text: str) -> tuple[str, str]:
    """For `meta`: the run ended before its last step."""
    return ("ended", json.dumps({"state": state, "text": text, "time": time.time()}))


def heartbeat_row() -> tuple[str, str]:
    """For `meta`: the run's process is alive."""
    return ("heartbeat", repr(time.time()))
