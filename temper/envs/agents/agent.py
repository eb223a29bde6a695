"""Env "agent": a program of the user's that asks the model over HTTP, when and as often as it likes.

Owns: the options of a recipe, and what an agent is given and hands back. Refuses: starting it (launch.py), finding one
that runs already (service.py), answering it (serve/agents.py), and step(): the agent leads.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.asking.endpoint import read_key
from temper.envs.agents.addresses import OWN, AgentAddresses, read_addresses
from temper.envs.tool_calls import find_parser
from temper.errors import TaskError, UserError, nearest_file
from temper.protocols import EnvOpening, EnvReply
from temper.sandbox import require_sandbox
from temper.sandbox.enclosure import show_files
from temper.storable import without_halves
from temper.types import Message, Scalar, Task

NAME = "agent"
RESULT_BYTES = 1 << 20
"""Most that an agent may hand in."""
RESULT_PATH = "/result"
"""Where it posts its result, below OPENAI_BASE_URL."""
LEADS = "an agent asks for itself: it is played by temper train, not step by step"
NO_VALUE_FLAGS = frozenset("-bBdEiIOPqsSuvx")
"""Letters of Python's options that take no word of their own."""
PASSED = ("HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
"""Variables that an agent gets from Temper's own environment. Keys and tokens are not among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How a run's agents are started and talked to."""

    command: str
    """Program and arguments; empty where there is a function or a service."""
    function: str
    addresses: AgentAddresses
    service_key: str
    """What the service wants to be shown; empty: nothing."""
    python: str
    """The interpreter that starts agents, and runs the function."""
    model: str
    """The only model that agents may ask for; empty: whatever they call it, the policy answers."""
    untold_format: str
    """How the policy calls tools of which its template says nothing; empty: the template shows them."""
    max_running: int
    price_per_token: float
    """Of what rollout.max_episode_cost allows, per token drawn; 0: tokens cost nothing."""
    passed: tuple[str, ...]
    is_sandboxed: bool
    """Whether agents run behind a wall, from where only the model can be reached."""
    hidden: tuple[str, ...]
    """Files and folders that they cannot read there, besides what is never shown."""

    def variables(self) -> dict[str, str]:
        """The environment of the nursery. `python` of a command is the same as the nursery's."""
        kept = {name: os.environ[name] for name in (*PASSED, *self.passed) if name in os.environ}
        own = os.path.dirname(os.path.abspath(self.python))
        return {**kept, "PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "NO_PROXY": "*"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How an agent ended."""

    problem: str | None = None
    """What was wrong with it; None: it ended as it should."""
    result: str = ""
    """What it handed in by its end; what it has posted before counts in its place."""


class AgentEnv:
    """A program of your own that asks the model over HTTP, and prints or posts a result (docs/agents.md)."""

    def __init__(
        self,
        *,
        command: str = "",
        function: str = "",
        url: str = "",
        key_variable: str = "",
        python: str = "",
        model: str = "",
        tools: str = "auto",
        max_running: int = 32,
        price_per_token: float = 0.0,
        variables: list[Scalar] | None = None,
        sandbox: bool = False,
        hide: list[Scalar] | None = None,
        listen: str = OWN,
        address: str = "",
    ) -> None:
        where = f'env "{NAME}"'
        if max_running < 1:
            raise UserError(f"{where}: max_running={max_running} must be at least 1")
        if not 0 <= price_per_token < math.inf:
            raise UserError(f"{where}: price_per_token={price_per_token} must be 0 (free) or more, e.g. 0.00001")
        if tools != "auto":
            find_parser(tools)
        given = [name for name, value in (("command", command), ("function", function), ("url", url)) if value]
        if len(given) != 1:
            raise UserError(
                f'{where}: give options.command, e.g. "python my_agent.py", or options.function, or options.url of a '
                f"service that runs elsewhere: one of them, not {' and '.join(given) or 'none'}"
            )
        for_starting = {"python": python, "variables": variables, "sandbox": sandbox, "hide": hide}
        if url and (idle := [name for name, value in for_starting.items() if value]):
            raise UserError(
                f"{where}: {idle[0]} is for agents that Temper starts, and the service at options.url runs already. "
                "Leave it out"
            )
        if key_variable and not url:
            raise UserError(f"{where}: key_variable holds what the service at options.url is shown. Leave it out")
        if sandbox and (listen != OWN or address):
            raise UserError(f"{where}: an agent behind a wall reaches this machine alone. Leave listen and address out")
        self.settings = AgentSettings(
            command=command,
            function=function,
            addresses=read_addresses(where, url, listen, address),
            service_key=read_key(key_variable),
            python="" if url else _find_python(where, python),
            model=model,
            untold_format="" if tools == "auto" else tools,
            max_running=max_running,
            price_per_token=price_per_token,
            passed=tuple(str(name) for name in variables or ()),
            is_sandboxed=sandbox,
            hidden=_find_hidden(where, [str(path) for path in hide or ()], has_wall=sandbox),
        )
        if not url:
            _require_startable(where, self.settings)

    async def start(self, task: Task, seed: int) -> EnvOpening:
        raise TaskError(LEADS)

    async def step(self, message: Message) -> EnvReply:
        raise TaskError(LEADS)

    async def close(self) -> None:
        """Nothing was started."""


def task_for_agent(task: Task, messages: tuple[Message, ...], seed: int) -> dict[str, Any]:
    """What an agent is told, as JSON on its standard input or as its function's argument. Never the gold answer."""
    asked = next((message.content for message in reversed(messages) if message.role == "user"), "")
    return {
        "id": task.id,
        "prompt": asked,
        "messages": [message.as_dict() for message in messages],
        "seed": seed,
    }


def result_of(stdout: str) -> str:
    """The field "result" when the last line is a JSON object that has it; otherwise everything that was printed."""
    text = stdout.strip()
    try:
        return read_result(text.rpartition("\n")[2].encode())
    except TaskError:
        return text


def read_result(body: bytes) -> str:
    """The result in a JSON object {"result": ...}: a text as it is, anything else as JSON. TaskError: there is none; it
    repeats what was handed in, keys included: quote() it."""
    if len(body) > RESULT_BYTES:
        raise TaskError(f"a result of {len(body)} bytes: at most {RESULT_BYTES} are taken")
    try:
        handed_in = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TaskError(f'a result is JSON, e.g. {{"result": "42"}}, and this is none: {_text(body)}') from error
    if not isinstance(handed_in, dict) or "result" not in handed_in:
        raise TaskError(f'a result is a JSON object, e.g. {{"result": "42"}}, and this has none: {_text(body)}')
    result = handed_in["result"]
    return without_halves(result if isinstance(result, str) else json.dumps(result, ensure_ascii=False))


def _text(body: bytes) -> str:
    return body.decode(errors="replace")


def _find_python(where: str, python: str) -> str:
    found = shutil.which(python or sys.executable)
    if found is None:
        raise UserError(f"{where}: python={python!r} is no program. Give the path of a Python interpreter")
    return found


def _find_hidden(where: str, hide: list[str], *, has_wall: bool) -> tuple[str, ...]:
    if hide and not has_wall:
        raise UserError(
            f"{where}: hide says what is not seen from behind a wall, and without one an agent reads whatever you may. "
            "Set options.sandbox = true, or leave it out"
        )
    for path in hide:
        if not path or not Path(path).expanduser().exists():
            raise UserError(f"{where}: hide has {path!r}, and that is not there.{nearest_file(Path(path))}")
    return tuple(str(Path(path).expanduser().absolute()) for path in hide)


def _require_startable(where: str, settings: AgentSettings) -> None:
    """Raises UserError for an agent that cannot be started here."""
    function = settings.function
    if settings.is_sandboxed and function:
        raise UserError(
            f"{where}: sandbox = true takes a command, not a function: each agent is started behind a wall of its "
            'own. Give options.command, e.g. "python my_agent.py"'
        )
    if settings.is_sandboxed:
        require_sandbox()
    if function and ":" not in function:
        raise UserError(f'{where}: function={function!r} must be "package.module:name" or "folder/file.py:name"')
    file = function.rpartition(":")[0]
    if file.endswith(".py") and not Path(file).is_file():
        raise UserError(f"{where}: {file} is not there.{nearest_file(Path(file))}")
    words = _read_command(where, settings.command) if settings.command else [settings.python]
    program = words[0]
    if shutil.which(program, path=settings.variables()["PATH"]) is None:
        raise UserError(f"{where}: there is no program {program!r}. Give its path in options.command")
    script = _script_of(words)
    if script and not Path(script).exists():
        raise UserError(
            f"{where}: {script}, which options.command names, is not there.{nearest_file(Path(script))} A command runs "
            f"in {Path.cwd()}, where temper was called, wherever the recipe lies: give the path from there"
        )
    if settings.is_sandboxed:
        show_files(words, settings.python, hide=settings.hidden)


def _script_of(words: list[str]) -> str:
    """The file of "python file.py"; '' where that is not clear, as of modules (-m) and of options with values."""
    if not re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        return ""
    first = next((word for word in words[1:] if not NO_VALUE_FLAGS.issuperset(word)), "")
    return first if first.endswith(".py") else ""


def _read_command(where: str, command: str) -> list[str]:
    """Its words, as a shell would take them apart."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UserError(
            f"{where}: options.command = {command!r} cannot be taken apart into words: {error}. Close each quote, and "
            "write a backslash twice where it is meant itself"
        ) from error
    if not words:
        raise UserError(f'{where}: options.command = {command!r} names no program. Write e.g. "python my_agent.py"')
    return words
