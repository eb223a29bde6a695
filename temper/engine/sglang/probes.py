"""Whether a server may be trained with: its settings, and what two small experiments show.

Owns: reasons to refuse a server before the first token counts. Refuses: talking to it (the engine does).
Written against SGLang 0.5.23: srt/layers/sampler.py computes log-probabilities after temperature and before
truncation, or of the original logits when the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB is set, which no
endpoint reports. Hence experiments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from temper.engine.sglang.routes import FLAG
from temper.engine.sglang.wire import PartialCompletion
from temper.errors import UserError
from temper.types import SamplingParams

HOT = 20.0
"""A temperature at which even a trained model draws almost anything, so a draw confined to the likeliest shows."""
HOT_TOKENS = 16
MAX_LISTED = 64
CHANCE = 1e-6
"""A finding that a sound server would cause more rarely than this refuses the server."""
MIN_GAP = 0.02
"""Least gap between the likeliest and the last listed token; below it temperatures cannot be told apart."""


def refuse_settings(address: str, server: Mapping[str, Any], model: Mapping[str, Any], *, tells_routes: bool) -> None:
    """tells_routes: whether routes of experts will be asked for."""
    preferred = model.get("preferred_sampling_params") or server.get("preferred_sampling_params")
    problems = []
    if preferred:
        problems.append(f"--preferred-sampling-params {preferred} would apply silently; start it without")
    if server.get("allow_auto_truncate"):
        problems.append("--allow-auto-truncate would cut long prompts silently; start it without")
    if model.get("is_generation") is False:
        problems.append("it serves no generative model")
    if int(server.get("dp_size") or 1) > 1:
        problems.append("--dp-size above 1 hides several engines behind one address; start one server for each")
    if server.get("trust_remote_code"):
        problems.append("--trust-remote-code would run code that came with a checkpoint; start it without")
    if server.get("enable_watermark"):
        problems.append("--enable-watermark changes what is drawn; start it without")
    if not (server.get("max_req_input_len") or server.get("context_length")):
        problems.append("/server_info does not say how long a prompt may be; use a newer SGLang")
    if tells_routes and not server.get("enable_return_routed_experts"):
        problems.append(f"model.replay_routes needs the routes that it takes; start it with {FLAG}")
    if problems:
        raise UserError(f"SGLang at {address} cannot be trained with: {'; '.join(problems)}")


def probe_prompt(vocabulary: int, length: int, *, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(vocabulary) for _ in range(length))


def probe_params(vocabulary: int) -> tuple[SamplingParams, SamplingParams]:
    """The two experiments: at temperature 1, and hot."""
    listed = max(2, min(MAX_LISTED, vocabulary // 4))
    return (
        SamplingParams(temperature=1.0, max_new_tokens=1, top_logprobs=listed),
        SamplingParams(temperature=HOT, max_new_tokens=HOT_TOKENS, top_logprobs=listed),
    )


def refuse_logprobs(address: str, plain: PartialCompletion, hot: PartialCompletion) -> None:
    """Same prompt, so the first distributions differ by temperature alone: gaps between logits shrink by it."""
    cold, warm = dict(plain.top[0]), dict(hot.top[0])
    shared = [token for token in cold if token in warm]
    if len(shared) < 2 or (gap := cold[shared[0]] - cold[shared[-1]]) < MIN_GAP:
        raise UserError(
            f"SGLang at {address}: the model finds all tokens equally likely, so it cannot be seen whether its "
            "log-probabilities are after temperature. Serve a trained checkpoint"
        )
    seen = warm[shared[0]] - warm[shared[-1]]
    if abs(seen - gap) < abs(seen - gap / HOT):
        raise UserError(
            f"SGLang at {address} reports log-probabilities before temperature (a gap of {gap:.3f} stayed {seen:.3f} "
            f"at temperature {HOT:g}), and the trainer needs those the tokens were drawn by. Start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
    if abs(seen - gap / HOT) > max(0.1 * gap / HOT, 5e-3):
        raise UserError(
            f"SGLang at {address} does not apply the temperature it is asked for: a gap of {gap:.3f} should become "
            f"{gap / HOT:.3f} at temperature {HOT:g} and is {seen:.3f}"
        )


def refuse_truncation(address: str, hot: PartialCompletion) -> None:
    """Draws that never leave the listed tokens, where leaving was all but certain, were truncated silently."""
    is_confined = all(token in dict(row) for token, row in zip(hot.token_ids, hot.top, strict=True))
    log_chance = sum(min(0.0, math.log(sum(math.exp(value) for _, value in row))) for row in hot.top)
    if is_confined and log_chance < math.log(CHANCE):
        raise UserError(
            f"SGLang at {address} draws among its most likely tokens only, though asked for all: it applies sampling "
            "defaults silently. Start it with --sampling-defaults openai and without --preferred-sampling-params"
        )
