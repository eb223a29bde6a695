"""One rollout of a verifiers environment, driven turn by turn. Checked with verifiers 0.2.1.

Owns: state, responses, the rubric's verdict. Synchronous, with an event loop of its own: environments are written as
coroutines and block all the same, and that must cost a thread and not the run. Refuses: group rewards (verifiers.py),
and answering what an environment asks of models (verifiers_models.py).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import importlib
import inspect
import json
import math
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any

from temper.envs.adapters.verifiers_models import ModelCalls, take_over, verifiers_client
from temper.envs.tool_calls import BadCall, Call
from temper.errors import TaskError
from temper.types import Message

_FAILED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("verifiers_failed", default=None)


class Rollout:
    """State of one episode. All calls come from one thread."""

    def __init__(self, environment: Any, row: dict[str, Any], calls: ModelCalls) -> None:
        """calls: where it goes when the environment asks a model by itself."""
        take_over(calls)  # first: the runner keeps the context that it finds
        self._environment = environment
        self._runner = asyncio.Runner()
        self._prompt: list[Any] = []
        self._state: Any = self._run(self._opened(row))

    @property
    def messages(self) -> tuple[Message, ...]:
        """What the policy sees first."""
        return tuple(_shown(message, {}) for message in self._prompt)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
            for tool in self._state["tool_defs"]
        )

    def say(self, text: str, calls: Sequence[Call]) -> tuple[Message, ...] | None:
        """What the environment answers; None: the episode is over."""
        return self._run(self._said(text, calls))  # type: ignore[no-any-return]

    def append(self, text: str, replies: Sequence[Message]) -> None:
        """What was said elsewhere, without asking the environment for its part."""
        self._run(self._recorded(text, ()))
        said = [{"role": "user", "content": reply.content} for reply in replies]
        self._prompt = self._run(self._joined(said))

    def score(self) -> float:
        """The rubric's weighted sum. A reward function that raised is an error: the rubric itself would make it 0.0."""
        value = self._run(self._scored())
        if not math.isfinite(value):
            raise TaskError(f"the rubric gave {value}")
        return float(value)

    def close(self) -> None:
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def _opened(self, row: dict[str, Any]) -> Any:
        environment = self._environment
        state = await environment.init_state(row, client=verifiers_client(), model="policy", sampling_args={})
        changed = await environment.setup_state(state)
        state = state if changed is None else changed
        prompt = await environment.get_prompt_messages(state)
        messages = importlib.import_module("verifiers.utils.message_utils")
        self._prompt = list(messages.maybe_normalize_messages(prompt, field_name="prompt"))
        return state

    async def _said(self, text: str, calls: Sequence[Call]) -> tuple[Message, ...] | None:
        environment, state = self._environment, self._state
        await self._recorded(text, calls)
        if await environment.is_completed(state):
            self._require_no_error()
            return None
        before = len(self._prompt) + len(state["trajectory"][-1]["completion"])
        prompt = await environment.get_prompt_messages(state)
        names = {call.id: call.name for call in getattr(prompt[before - 1], "tool_calls", None) or ()}
        is_over = state.get("final_env_response") is not None and await environment.is_completed(state)
        self._require_no_error()
        self._prompt = list(prompt)
        return None if is_over else tuple(_shown(message, names) for message in prompt[before:])

    async def _recorded(self, text: str, calls: Sequence[Call]) -> None:
        types = importlib.import_module("verifiers.types")
        tool_calls = [
            types.ToolCall(id=f"call_{place}", name=call.name, arguments=json.dumps(call.arguments))
            for place, call in enumerate(calls)
        ]
        message = types.ResponseMessage(
            content=text,
            tool_calls=tool_calls or None,
            finish_reason="tool_calls" if tool_calls else "stop",
            is_truncated=False,
        )
        response = types.Response(id=uuid.uuid4().hex, created=0, model="policy", message=message)
        await self._environment.add_model_response(self._state, self._prompt, response)

    async def _joined(self, said: list[dict[str, str]]) -> list[Any]:
        messages = importlib.import_module("verifiers.utils.message_utils")
        replies = messages.maybe_normalize_messages(said, field_name="env_response") if said else []
        return list(messages.concat_messages([self._prompt, self._state["trajectory"][-1]["completion"], replies]))

    async def _scored(self) -> float:
        await self._environment.cleanup(self._state)  # also renders the completion that reward functions read
        failed: list[str] = []
        _FAILED.set(failed)
        _watch(self._environment.rubric)
        await self._environment.rubric.score_rollout(self._state)
        if failed:
            raise TaskError(f"reward function {failed[0]}")
        return float(self._state["reward"])

    def _require_no_error(self) -> None:
        if (error := self._state.get("error")) is not None:
            raise TaskError(f"the verifiers environment failed: {type(error).__name__}: {error.__cause__ or error}")


def readable(calls: Sequence[Call | BadCall]) -> tuple[list[Call], list[str]]:
    """(calls with arguments by name, why the others are not calls)."""
    good, bad = list[Call](), list[str]()
    for call in calls:
        if isinstance(call, BadCall):
            bad.append(call.reason)
        elif isinstance(call.arguments, str):
            bad.append(f"{call.name}: write the arguments as JSON")
        else:
            good.append(call)
    return good, bad


def _shown(message: Any, names: dict[str, str]) -> Message:
    """Text alone; images and sounds are named and left out."""
    content = message.content
    if not isinstance(content, str):
        parts = content or []
        content = "\n".join(getattr(part, "text", None) or f"[{getattr(part, 'type', 'part')}]" for part in parts)
    name = names.get(getattr(message, "tool_call_id", ""), "") if message.role == "tool" else ""
    return Message(role=message.role, content=content, name=name)


def group_functions(rubric: Any) -> list[str]:
    """Names of the reward functions that score all members of a group together."""
    parts = [name for part in getattr(rubric, "rubrics", ()) for name in group_functions(part)]
    return parts + [getattr(func, "__name__", repr(func)) for func in rubric.funcs if rubric._is_group_func(func)]


def _watch(rubric: Any) -> None:
    """Lets exceptions of reward functions be seen. Rubrics are shared by all episodes, so each is wrapped once."""
    for part in getattr(rubric, "rubrics", ()):
        _watch(part)
    rubric.funcs = [func if hasattr(func, "_temper_watched") else _watched(func) for func in rubric.funcs]


def _watched(func: Any) -> Any:
    @functools.wraps(func)  # name and signature: the rubric picks arguments by them
    async def watched(*arguments: Any, **named: Any) -> Any:
        try:
            value = func(*arguments, **named)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            if (failed := _FAILED.get(None)) is not None:
                failed.append(f"{func.__name__} failed: {type(error).__name__}: {error}")
            raise

    watched._temper_watched = True  # type: ignore[attr-defined]
    return watched
