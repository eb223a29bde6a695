"""Temper's sampling parameters in vLLM's words, and vLLM's answers in Temper's.

Owns: naming every parameter, checking what vLLM made of them, order and keep-sets of the returned tokens.
Refuses: what vLLM cannot do, by name; nothing is dropped silently. Written against vLLM 0.32.
"""

from __future__ import annotations

import math
from typing import Any

from temper.errors import BackendError, TaskError, UserError
from temper.types import Completion, Finish, Request, SamplingParams

TIES = 8
"""Tokens asked for beyond what is wanted: equal ones at the edge come in any order, and top-k keeps all of them."""
MASS_TOLERANCE = 1e-3

NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "watermarking": False,
    "stop": [],
    "ignore_eos": True,  # stop_ids say what ends a completion, and nothing else does
    "min_tokens": 0,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "flat_logprobs": True,
    "detokenize": False,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "extra_args": None,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
}
"""Everything else that could change what is drawn, said out loud: no default of vLLM or of a model's
generation_config.json gets a say."""

FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


def require_supported(params: SamplingParams) -> None:
    """Raises UserError for what this engine cannot do, naming the parameter."""
    is_drawn_from_a_part = params.is_truncated and params.temperature > 0
    if params.stop:
        raise UserError(f"stop={list(params.stop)}: vLLM gets token ids only. Use stop_ids, or engine.kind = local")
    if is_drawn_from_a_part and params.top_k == 0:
        name = "top_p" if params.top_p < 1 else "min_p"
        raise UserError(
            f"{name}={getattr(params, name)} without top_k: vLLM returns a given number of tokens per position, so the "
            f"trainer could not know which could be drawn. Set top_k as well, e.g. 64, or use engine.kind = local"
        )
    if params.entropy and not is_drawn_from_a_part:
        raise UserError(
            "entropy=True: vLLM returns the entropy of no distribution over the whole vocabulary. Set top_k, or use "
            "engine.kind = local"
        )
    if params.top_logprobs and is_drawn_from_a_part:
        raise UserError(
            f"top_logprobs={params.top_logprobs} with top_k, top_p or min_p: vLLM returns log-probabilities within "
            f"the keep-set only. Use one of the two, or engine.kind = local"
        )


def to_vllm(params: SamplingParams, seed: int, vocabulary: int) -> Any:
    """vllm.SamplingParams with every field that matters given."""
    from vllm import SamplingParams as VllmParams  # type: ignore[import-not-found]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

    wanted = params.top_logprobs or (params.top_k if params.temperature > 0 else 0)
    return VllmParams(
        **NEUTRAL,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_ids),
        logprobs=min(wanted + TIES, vocabulary) if wanted else 0,
        seed=seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def read_back(asked: SamplingParams, used: Any) -> SamplingParams:
    """What vLLM will really apply, from the request it made. Raises BackendError where that is not what was asked."""
    for name, value in NEUTRAL.items():
        if getattr(used, name) != value:
            raise BackendError(f"vLLM would draw with {name}={getattr(used, name)!r} and was given {value!r}")
    applied = SamplingParams(
        temperature=used.temperature,
        max_new_tokens=used.max_tokens,
        stop_ids=tuple(used.stop_token_ids),
        top_k=max(used.top_k, 0),
        top_p=used.top_p,
        min_p=used.min_p,
        top_logprobs=asked.top_logprobs,
        entropy=asked.entropy,
    )
    # Greedy drawing needs no keep-set, and vLLM takes it off; the echo says so.
    names = ["temperature", "max_new_tokens", *(["top_k", "top_p", "min_p"] if asked.temperature > 0 else [])]
    for name in names:
        if getattr(applied, name) != getattr(asked, name):
            raise BackendError(
                f"vLLM would draw with {name}={getattr(applied, name)} and was asked for {getattr(asked, name)}"
            )
    if set(applied.stop_ids) != set(asked.stop_ids):
        raise BackendError(f"vLLM would stop at {applied.stop_ids} and was asked for {asked.stop_ids}")
    return applied


def to_completion(request: Request, applied: SamplingParams, output: Any) -> Completion:
    """From vLLM's final CompletionOutput. An aborted request keeps what was drawn so far."""
    token_ids = list(output.token_ids)
    if output.finish_reason not in FINISHES:
        raise TaskError(f"vLLM ended request {request.id} with {output.finish_reason!r}")
    positions = [_position(output.logprobs, place) for place in range(len(token_ids))]
    keeps = [_kept(position) for position in positions] if applied.is_truncated else None
    num_top = applied.top_logprobs
    top = [_most_likely(position)[:num_top] for position in positions] if num_top else None
    return Completion(
        prompt_ids=request.prompt_ids,
        token_ids=token_ids,
        logprobs=[_drawn(position, token) for position, token in zip(positions, token_ids, strict=True)],
        versions=_versions(output.weight_versions or [], len(token_ids)),
        finish=FINISHES[output.finish_reason],
        top_ids=None if top is None else [[token for token, _ in pairs] for pairs in top],
        top_logprobs=None if top is None else [[logprob for _, logprob in pairs] for pairs in top],
        entropies=[_entropy(kept) for kept in keeps] if applied.entropy and keeps is not None else None,
        keep_ids=None if keeps is None else [sorted(kept) for kept in keeps],
        params=applied,
    )


def _position(flat: Any, place: int) -> list[tuple[int, float]]:
    """Token ids and log-probabilities of one position, the drawn token first; it can come twice."""
    start, end = flat.start_indices[place], flat.end_indices[place]
    return list(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))


def _drawn(position: list[tuple[int, float]], token: int) -> float:
    first, logprob = position[0]
    if first != token or not math.isfinite(logprob):
        raise BackendError(f"vLLM drew token {token} and reports {logprob} for token {first}")
    return logprob


def _most_likely(position: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Most likely first; of equal ones the lower id first."""
    return sorted(dict(position).items(), key=lambda pair: (-pair[1], pair[0]))


def _kept(position: list[tuple[int, float]]) -> dict[int, float]:
    """Tokens that could be drawn. They hold all probability; anything less means that some were not returned."""
    kept = {token: logprob for token, logprob in position if math.isfinite(logprob)}
    mass = sum(map(math.exp, kept.values()))
    if abs(mass - 1) > MASS_TOLERANCE:
        raise TaskError(
            f"vLLM kept more tokens than it returned ({len(kept)}, holding {mass:.4f} of the probability): more than "
            f"{TIES} are tied at the edge of top_k"
        )
    return kept


def _entropy(kept: dict[int, float]) -> float:
    return -sum(math.exp(logprob) * logprob for logprob in kept.values())


def _versions(spans: Any, count: int) -> list[int]:
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    if len(versions) != count:
        raise BackendError(f"vLLM says which weights drew {len(versions)} of {count} tokens")
    return versions
