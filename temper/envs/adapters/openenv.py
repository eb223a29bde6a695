"""Environments that an OpenEnv server hosts, played over its WebSocket: one connection, one session, one episode.

Owns: environment "openenv": text to action, observation to text. Refuses: starting containers (give the address of a
running server), and the environment's own client package: actions and observations travel as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from temper.envs.adapters.third_party import close_within, episode_seed, require_package, within
from temper.errors import TaskError, UserError
from temper.plugins import load_function
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, EventKind, Message, Task

NOT_FOR_THE_POLICY = ("done", "reward", "metadata")
"""Fields that every OpenEnv observation has."""


class OpenEnv:
    """One episode on the server at `url`.

    action_field: the field of the action that takes the whole message; empty: the message is the action, as a JSON
    object. parser: "package.module:function" text -> dict instead of both; ValueError is a bad action.
    observation_field: the field to show; empty: all of them, as JSON, or the text alone where there is only one.
    reset_fields: names in task.extra that the server's reset() takes, e.g. which level to load.
    """

    def __init__(
        self,
        *,
        url: str,
        action_field: str = "",
        parser: str = "",
        observation_field: str = "",
        reset_fields: list[str] | None = None,
        connect_seconds: float = 10.0,
        step_seconds: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UserError(
                f'env "openenv": url={url!r} must begin with http:// or ws://, e.g. "http://127.0.0.1:8000".'
            )
        if parser and action_field:
            raise UserError('env "openenv": give action_field or parser, not both.')
        self._url = url
        self._parse: Callable[[str], dict[str, Any]] = (
            load_function(parser, where='env "openenv" parser') if parser else _parser_of(action_field)
        )
        self._observation_field = observation_field
        self._reset_fields = reset_fields or []
        self._connect_seconds = connect_seconds
        self._seconds = step_seconds
        self._client: Any = None

    async def start(self, task: Task, seed: int) -> EnvOpening:
        core = require_package("openenv.core", extra="openenv", package="openenv-core", what='environment "openenv"')
        missing = [name for name in self._reset_fields if name not in task.extra]
        if missing:
            raise TaskError(f"task {task.id} has no {', '.join(missing)}, which env.options.reset_fields names")
        # Its own time-outs are the second line of defence; ours name the episode.
        self._client = core.GenericEnvClient(
            base_url=self._url,
            connect_timeout_s=self._connect_seconds,
            message_timeout_s=self._seconds,
            mode="simulation",
        )
        await within(
            self._client.connect(), seconds=self._connect_seconds + 1.0, what=f"connecting to OpenEnv at {self._url}"
        )
        fields = {name: task.extra[name] for name in self._reset_fields}
        result = await within(
            self._client.reset(seed=episode_seed(task, seed), **fields),
            seconds=self._seconds + 1.0,
            what=f"OpenEnv reset at {self._url}",
        )
        if result.done:
            raise TaskError(f"OpenEnv at {self._url} was over as soon as it was reset")
        opening = (Message(role="user", content=self._shown(result.observation)),)
        return EnvOpening(messages=opening if task.messages == opening else (*task.messages, *opening))

    async def step(self, message: Message) -> EnvReply:
        assert self._client is not None, "step() before start()"
        try:
            action = self._parse(message.content)
        except ValueError as error:
            return _refused(str(error))
        try:
            result = await within(
                self._client.step(action), seconds=self._seconds + 1.0, what=f"OpenEnv step at {self._url}"
            )
        except TaskError as error:
            # The server checked the action against its schema and did nothing: the policy's mistake, not a failure.
            if "code: VALIDATION_ERROR" in str(error):
                return _refused(str(error))
            raise
        return EnvReply(
            messages=(Message(role="user", content=self._shown(result.observation)),),
            reward=None if result.reward is None else float(result.reward),
            is_done=bool(result.done),
        )

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await close_within(client.close(), seconds=self._connect_seconds)

    def _shown(self, observation: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in observation.items() if name not in NOT_FOR_THE_POLICY}
        if self._observation_field:
            if self._observation_field not in fields:
                known = ", ".join(sorted(fields)) or "none"
                raise TaskError(f'the observation has no field "{self._observation_field}". It has: {known}')
            return _text(fields[self._observation_field])
        return _text(next(iter(fields.values())) if len(fields) == 1 else fields)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parser_of(action_field: str) -> Callable[[str], dict[str, Any]]:
    if action_field:
        return lambda text: {action_field: text}
    return _json_action


def _json_action(text: str) -> dict[str, Any]:
    start, end = text.find("{"), text.rfind("}")
    try:
        action = json.loads(text[start : end + 1])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"An action is a JSON object: {error}") from error
    if not isinstance(action, dict):
        raise ValueError("An action is a JSON object.")
    return action


def _refused(reason: str) -> EnvReply:
    event = Event(kind=EventKind.BAD_CALL, name="openenv", detail=reason)
    return EnvReply(messages=(Message(role="user", content=f"This action was not taken. {reason}"),), events=(event,))
