"""OpenAI request bodies to our types. Pure: JSON in, Asked out, or Refused with the name of the parameter.

Owns: which parameters exist, their bounds, which are refused unless they change nothing. Refuses: ignoring a setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from temper.errors import did_you_mean
from temper.serve import responses
from temper.serve.refusals import Refused
from temper.types import SamplingParams

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""Bounds of a temperature other than 0, which is greedy. Logits divided by less would overflow."""
COMPLETION_TOKENS = 16
"""Tokens of a /v1/completions answer when max_tokens is not given: OpenAI's default."""

# These would change what is drawn and are not implemented. At the listed values they change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "reasoning_effort": (),
    "verbosity": (),
    "audio": (),
    "web_search_options": (),
}
# These concern bookkeeping on OpenAI's side and never the answer.
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as OpenAI's clients write it: the arguments are JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One HTTP request, understood."""

    model: str
    params: SamplingParams
    """Parameters without stop ids, which are the model's; max_new_tokens is 0 when it is left to the context."""
    num_choices: int
    """Choices for each prompt."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages of a chat; empty for a plain completion."""
    prompts: tuple[str | tuple[int, ...], ...] = ()
    """Prompts of a plain completion; empty for a chat."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Empty also when tool_choice is "none": a model that may not call a tool is shown none."""
    seed: int | None = None
    has_logprobs: bool = False
    is_streamed: bool = False
    has_usage_chunk: bool = False
    has_token_ids: bool = False
    is_response: bool = False
    """Whether it was asked through the Responses interface, and is answered so."""
    session: str = ""

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def prompt_name(self) -> str:
        """The parameter that holds what the model is shown."""
        return "messages" if self.is_chat else "prompt"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Function(_Strict):
    name: str
    arguments: str = "{}"


class _ToolCall(_Strict):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function
    index: int = 0


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    # Fields that clients carry along from answers (refusal, annotations ...) say nothing to a chat template.
    model_config = ConfigDict(extra="ignore", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def as_message(self) -> ChatMessage:
        parts = self.content or ""
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=parts if isinstance(parts, str) else "".join(part.text for part in parts),
            name=self.name or "",
            tool_calls=tuple(
                ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id or "",
        )


class _FunctionSchema(_Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _FunctionSchema


class _StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Body(_Strict):
    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(1.0, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, lt=1.0)
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] = Field(default_factory=list)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: bool = False
    session: str = Field("", max_length=200, pattern=r"^[ -~]*$")

    def params(self, max_new_tokens: int, top_logprobs: int) -> SamplingParams:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > MAX_STOPS or not all(stops):
            raise Refused(f"stop takes at most {MAX_STOPS} texts, none of them empty", param="stop")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise Refused(f"temperature must be 0 or at least {MIN_TEMPERATURE}", param="temperature")
        return SamplingParams(
            temperature=self.temperature,
            max_new_tokens=max_new_tokens,
            top_k=max(self.top_k, 0),  # -1 means all in other servers
            top_p=self.top_p,
            min_p=self.min_p,
            stop=stops,
            top_logprobs=top_logprobs,
        )

    def shared(self) -> dict[str, Any]:
        """The fields of Asked that both endpoints have."""
        return {
            "model": self.model,
            "num_choices": self.n,
            "seed": self.seed,
            "is_streamed": self.stream,
            "has_usage_chunk": self.stream_options.include_usage,
            "has_token_ids": self.return_token_ids,
            "session": self.session,
        }


class _Chat(_Body):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: Any = None

    def asked(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise Refused("max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
        if self.tool_choice not in (None, "none", "auto"):
            raise Refused(
                f"tool_choice={json.dumps(self.tool_choice)} would force what is drawn, which is not implemented: "
                'use "auto" or "none"',
                param="tool_choice",
            )
        messages = tuple(message.as_message() for message in self.messages)
        for message in messages:
            _require_arguments(message)
        is_tool_free = self.tool_choice == "none"
        return ChatRequest(
            messages=messages,
            params=self.params(self.max_completion_tokens or self.max_tokens or 0, self.top_logprobs),
            tools=() if is_tool_free else tuple(tool.model_dump(exclude_none=True) for tool in self.tools),
            has_logprobs=self.logprobs,
            **self.shared(),
        )


class _Completion(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    def asked(self) -> ChatRequest:
        return ChatRequest(
            prompts=_prompts(self.prompt),
            params=self.params(self.max_tokens or COMPLETION_TOKENS, self.logprobs or 0),
            has_logprobs=self.logprobs is not None,
            **self.shared(),
        )


ENDPOINTS: dict[str, type[_Chat] | type[_Completion]] = {
    "/v1/chat/completions": _Chat,
    "/v1/completions": _Completion,
    responses.PATH: _Chat,
}


def read_asked(path: str, body: bytes, session: str = "") -> ChatRequest:
    """The request, or Refused. `session` is the header's; the body may name one as well, if it is the same."""
    given = _json_object(body)
    if session and given.setdefault("session", session) != session:
        raise Refused("the header X-Temper-Session and the field session name different sessions", param="session")
    endpoint, is_response = ENDPOINTS[path], path == responses.PATH
    if is_response:
        given = responses.chat_body(given)
    for name, neutral in NEUTRAL.items():
        if name in given and given.pop(name) not in neutral:
            raise Refused(
                f"{name} is not implemented here and would change what is drawn. Leave it out"
                + (f" or set it to {json.dumps(neutral[0])}" if neutral else ""),
                param=name,
                code="unsupported_parameter",
            )
    for name in given.keys() - endpoint.model_fields.keys() - set(WITHOUT_EFFECT):
        raise Refused(
            f'"{name}" is no parameter of {path}.{did_you_mean(name, endpoint.model_fields)}',
            param=name,
            code="unknown_parameter",
        )
    try:
        asked = endpoint.model_validate({k: v for k, v in given.items() if k not in WITHOUT_EFFECT}).asked()
        return replace(asked, is_response=is_response)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "_")))
        raise Refused(f"{where}: {first['msg']}", param=str(first["loc"][0]), code="invalid_value") from None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
        if b"\\ud" in body.lower():  # half a surrogate pair is JSON, but not text that can be encoded
            json.dumps(given, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # ValueError: UnicodeError is one
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise Refused("the body must be a JSON object", code="invalid_json")
    return {name: value for name, value in given.items() if value is not None}


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if prompt and all(isinstance(part, int) for part in prompt):
        return (tuple(part for part in prompt if isinstance(part, int)),)
    prompts = tuple(part if isinstance(part, str) else tuple(part) for part in prompt if not isinstance(part, int))
    if not prompts or not all(prompts) or len(prompts) > MAX_CHOICES:
        raise Refused(f"prompt takes 1 to {MAX_CHOICES} prompts, none of them empty", param="prompt")
    return prompts


def _require_arguments(message: ChatMessage) -> None:
    for call in message.tool_calls:
        try:
            is_object = isinstance(json.loads(call.arguments or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise Refused(f"the arguments of tool call {call.id!r} are not a JSON object", param="messages")
