"""What tools may do: by effect, by name, by approval; and which secrets each one gets.

Owns: refusals, redaction, the log of side effects. Refuses: running tools (tool_env.py). What is not granted is
denied, and an irreversible act that nobody approved is only described.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from temper.envs.tools import EFFECTS, Tool
from temper.errors import UserError

Approve = Callable[[Tool, Mapping[str, Any]], bool | Awaitable[bool]]
"""Asked before each irreversible call with the policy's arguments. Anything but True, an error included, is a no."""
MIN_SECRET = 6
"""Fewest characters. Redacting a shorter value would blank out innocent text, and show by its absence what it is."""


class Secrets:
    """Credentials by name. Values leave only through for_tool(), to the tool that names them."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self.__values = dict(values or {})
        for name, value in self.__values.items():
            if len(value) < MIN_SECRET:
                raise UserError(f"secret {name!r} has {len(value)} characters, at least {MIN_SECRET} are needed.")

    @staticmethod
    def from_environment(names: Iterable[str]) -> Secrets:
        """Secret "api_token" from the environment variable API_TOKEN, and so on."""
        wanted = {name: name.upper() for name in names}
        if missing := [variable for variable in wanted.values() if variable not in os.environ]:
            raise UserError(f"environment variable {missing[0]} is not set. Set it, or take away the tool's secret.")
        return Secrets({name: os.environ[variable] for name, variable in wanted.items()})

    def for_tool(self, tool: Tool) -> dict[str, str]:
        """Exactly the secrets that the tool names."""
        if missing := [name for name in tool.secrets if name not in self.__values]:
            raise UserError(f"tool {tool.name} needs the secret {missing[0]!r}. Give it to Permissions(secrets=...).")
        return {name: self.__values[name] for name in tool.secrets}

    def redact(self, text: str) -> str:
        """The text without any secret, as written or in the encodings that errors and addresses show it in.

        A last net under tools that echo what they were given; a tool that means to leak can still disguise a value.
        """
        for name, value in self.__values.items():
            for form in _forms(value):
                text = text.replace(form, f"[{name}]")
        return text

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self.__values))})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("secrets are not written anywhere: make them anew where they are needed")


def _forms(value: str) -> list[str]:
    """Longest first, so that no part of a longer form is left."""
    raw = value.encode()
    forms = {value, repr(value)[1:-1], json.dumps(value)[1:-1], urllib.parse.quote(value, safe="")}
    forms |= {urllib.parse.quote_plus(value), base64.b64encode(raw).decode(), raw.hex()}
    forms |= {base64.urlsafe_b64encode(raw).decode().rstrip("="), base64.b64encode(raw).decode().rstrip("=")}
    return sorted(forms, key=len, reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """Least privilege: out of the box tools may read, and nothing else."""

    effects: frozenset[str] = frozenset({"read"})
    """Effects granted. "irreversible" changes nothing here: each such call is approved, or only described."""
    only: frozenset[str] | None = None
    """Names of the tools granted; None: all."""
    never: frozenset[str] = frozenset()
    """Names denied, whatever else grants them."""
    approve: Approve | None = None
    """None: every irreversible call runs dry."""
    approve_seconds: float = 60.0
    """A question without an answer for so long is a no."""
    secrets: Secrets = field(default_factory=Secrets)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.effects) - set(EFFECTS)):
            raise UserError(f"effect {unknown[0]!r} is unknown. Known: {', '.join(EFFECTS)}.")

    def refusal(self, tool: Tool) -> str | None:
        """Why this tool may not be called, or None. An irreversible one is asked about besides, call by call."""
        if tool.name in self.never or (self.only is not None and tool.name not in self.only):
            return f"'{tool.name}' is not permitted"
        if tool.effect not in (*self.effects, "irreversible"):
            return f"'{tool.name}' may {tool.effect}, which is not permitted"
        return None

    def grant(self, tool: Tool) -> str:
        """What becomes of its calls, in a word or two."""
        if self.refusal(tool) is not None:
            return "denied"
        if tool.effect != "irreversible":
            return "permitted"
        return "only described" if self.approve is None else "asked about"


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffect:
    """One call that changed something, or may have."""

    tool: str
    effect: str
    arguments: str
    """As text, redacted."""
    outcome: Literal["done", "failed", "timed out"]
    """A failed or late call may have changed something all the same."""


class SideEffectLog:
    """Append-only. One for an episode, or one for all of them: no tool can read it."""

    def __init__(self) -> None:
        self._entries: list[SideEffect] = []

    def add(self, entry: SideEffect) -> None:
        self._entries.append(entry)

    @property
    def entries(self) -> tuple[SideEffect, ...]:
        return tuple(self._entries)
