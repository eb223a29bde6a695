"""What goes over the wire for one completion, and what must be true of what comes back.

Owns: the body of /generate, joining streamed pieces, checking them against what was asked. Refuses: text.
Written against SGLang 0.5.23: srt/managers/io_struct.py (GenerateReqInput), srt/sampling/sampling_params.py,
srt/managers/tokenizer_manager.py (meta_info).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from temper.engine.fleet.member import SamplerLost
from temper.engine.sglang.routes import FLAG, decode_routes
from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError, UserError
from temper.types import Completion, Finish, Ragged, Request, SamplingParams

TOKENS_PER_EVENT = 32
"""Without it every token is an event, and each event of a server with default settings repeats all earlier tokens."""


def require_supported(params: SamplingParams) -> None:
    """Refuses what this server cannot do and still tell the trainer how it was done."""
    if params.is_truncated:
        raise UserError(
            f"top_k={params.top_k}, top_p={params.top_p:g}, min_p={params.min_p:g}: SGLang reports log-probabilities "
            "of the whole vocabulary and Temper reads no keep-sets from it, so the trainer would compute other ones. "
            'Use top_k=0, top_p=1, min_p=0, or engine.kind = "local"'
        )
    if params.stop:
        raise UserError(
            f"stop={list(params.stop)}: SGLang looks for stop texts in what one request drew, and a publication splits "
            'a completion into several requests. Use stop ids, or engine.kind = "local"'
        )
    if params.entropy:
        raise UserError('entropy: SGLang does not report it. Use engine.kind = "local"')


def body_of(rid: str, request: Request, *, seed: int, tells_routes: bool) -> dict[str, Any]:
    """rid: its name on the server. Every parameter is written out: what is missing could come from the server's
    --preferred-sampling-params."""
    params = request.params
    return {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": params.top_logprobs,
        "return_text_in_logprobs": False,
        "return_routed_experts": tells_routes,
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "max_new_tokens": params.max_new_tokens,
            "min_new_tokens": 0,
            "stop": None,
            "stop_regex": None,
            "stop_token_ids": list(params.stop_ids) or None,
            # It switches stop_token_ids off as well, so the server's own end ids can only be refused when they strike.
            "ignore_eos": not params.stop_ids,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": None,
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "custom_params": None,
            "n": 1,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "stream_interval": TOKENS_PER_EVENT,
            # Has effect under --enable-deterministic-inference, where it is combined with the position.
            "sampling_seed": _seed_of(seed, request.id),
        },
    }


def _seed_of(seed: int, request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{request_id}".encode()).digest()[:4], "big") >> 1


@dataclass(slots=True)
class PartialCompletion:
    """What one request has drawn so far. Lists are parallel to token_ids."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """(id, log-probability), most likely first; empty when not asked for."""
    routes: Ragged[Any] | None = None
    """Of prompt and drawn tokens; None when not asked for."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """The meta_info of the newest event."""
    lost: SamplerLost | None = None
    """How the stream broke off. None: it goes on, or came to its end."""

    def add(self, event: Mapping[str, Any]) -> None:
        meta = event["meta_info"]
        total = int(meta.get("completion_tokens", len(self.token_ids)))
        self.token_ids = _joined(self.token_ids, event.get("output_ids") or [], total)
        news = meta.get("output_token_logprobs") or []
        if any(int(entry[1]) != token for entry, token in zip(reversed(news), reversed(self.token_ids), strict=False)):
            raise BackendError(f"SGLang's log-probabilities are of other tokens than it drew: {news[-3:]}")
        self.logprobs = _joined(self.logprobs, [_number(entry[0]) for entry in news], total)
        tops = [
            [(int(entry[1]), _number(entry[0])) for entry in row or ()] for row in meta.get("output_top_logprobs") or []
        ]
        if tops:
            self.top = _joined(self.top, tops, total)
        self.meta = meta

    def read_routes(self, told: ToldRoutes, num_prompt: int) -> None:
        """They come with the end. What broke off, or was cut while it waited, has none: its tokens are let go of and
        drawn anew, for nobody could train them as they were drawn."""
        if (routes := self.meta.get("routed_experts")) is not None:
            self.routes = decode_routes(told, routes, num_prompt + len(self.token_ids))
            return
        if (self.finish_reason or {}).get("type") in ("stop", "length"):
            raise BackendError(f"SGLang told no routes of an answer. Start the server with {FLAG}")
        self.token_ids, self.logprobs, self.top = [], [], []
        self.routes = told.unknown(num_prompt)

    @property
    def finish_reason(self) -> Mapping[str, Any] | None:
        """None: still drawing."""
        return self.meta.get("finish_reason")

    def completion(self, request: Request, version: int, finish: Finish) -> Completion:
        asked = request.params.top_logprobs > 0
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=[version] * len(self.token_ids),
            finish=finish,
            top_ids=[[token for token, _ in row] for row in self.top] if asked else None,
            top_logprobs=[[value for _, value in row] for row in self.top] if asked else None,
            routes=self.routes,
            params=request.params,
        )


def _joined(have: list[Any], came: list[Any], total: int) -> list[Any]:
    """Servers send everything so far, only what is new, or (on an abort, under --incremental-streaming-output) a part
    of what was sent before: the count of all tokens tells which."""
    if len(came) == total:
        return list(came)
    if len(have) + len(came) == total:
        return have + list(came)
    if len(have) == total:
        return have
    raise BackendError(f"SGLang counts {total} tokens, sent {len(came)} in one event and {len(have)} before it")


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def check_drawn(drawn: PartialCompletion, rid: str, request: Request) -> None:
    """Raises BackendError for an answer that cannot have come from what was asked."""
    prompt_ids, params = request.prompt_ids, request.params
    meta, reason, tokens, is_whole = drawn.meta, drawn.finish_reason or {}, drawn.token_ids, drawn.lost is None
    problems = []
    if meta.get("id") != rid:
        problems.append(f"it is the answer to request {meta.get('id')!r}, not {rid!r}")
    if (read := meta.get("prompt_tokens", len(prompt_ids))) != len(prompt_ids):
        problems.append(f"the server read {read} prompt tokens of {len(prompt_ids)}")
    if len(drawn.logprobs) != len(tokens):
        problems.append(f"{len(drawn.logprobs)} log-probabilities for {len(tokens)} tokens")
    if bad := [value for value in drawn.logprobs if not value <= 1e-4 or math.isinf(value)]:
        problems.append(f"{bad[0]} is no log-probability")
    # The last token comes with the end, so one that broke off has not reached it.
    if len(tokens) + (not is_whole) > params.max_new_tokens:
        problems.append(f"{len(tokens)} tokens where max_new_tokens={params.max_new_tokens}")
    if passed := set(tokens[:-1] if is_whole else tokens) & set(params.stop_ids):
        problems.append(f"it drew on after the stop id {min(passed)}: the server ignores stop ids")
    if params.top_logprobs and any(len(row) != params.top_logprobs for row in drawn.top):
        problems.append(f"not every position has the {params.top_logprobs} most likely tokens")
    if is_whole:
        problems += _finish_problems(reason, tokens, params)
    if problems:
        raise BackendError(f"SGLang's answer does not fit the request: {'; '.join(problems)}")


def _finish_problems(reason: Mapping[str, Any], tokens: list[int], params: SamplingParams) -> list[str]:
    kind, matched = reason.get("type"), reason.get("matched")
    last = tokens[-1] if tokens else None
    if kind == "stop" and (matched not in params.stop_ids or matched != last):
        return [
            f"it stopped at {matched!r} after token {last}, which is not one of the stop ids {list(params.stop_ids)}: "
            "the server has an end token of its own; add it to the stop ids"
        ]
    if kind == "length" and last in params.stop_ids:
        return [f"it drew the stop id {last} and called it a cut: the server ignores stop ids"]
    if kind not in ("stop", "length", "abort"):
        return [f"it ended for an unknown reason: {dict(reason)}"]
    return []
