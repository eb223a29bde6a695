"""Temper's sampling parameters in vLLM's words, and vLLM's answers in Temper's.

Owns: naming every parameter, checking what vLLM made of them, order and keep-sets of the returned tokens.
Refuses: what vLLM cannot do, by name; nothing is dropped silently. Written against vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError, TaskError, UserError
from temper.types import Column, Completion, Finish, Ragged, Request, SamplingParams

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
    "routed_experts_prompt_start": 0,
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


def to_completion(
    request: Request, applied: SamplingParams, output: Any, routes: ToldRoutes | None = None
) -> Completion:
    """From vLLM's final CompletionOutput. An aborted request keeps what was drawn so far. routes: asked for, if any."""
    if output.finish_reason not in FINISHES:
        raise TaskError(f"vLLM ended request {request.id} with {output.finish_reason!r}")
    token_ids = np.array(output.token_ids, dtype=np.int32)
    listed = _Listed.of(output.logprobs, len(token_ids))
    kept = _kept(listed) if applied.is_truncated else None
    top = _most_likely(listed, applied.top_logprobs) if applied.top_logprobs else None
    return Completion(
        prompt_ids=request.prompt_ids,
        token_ids=Column(token_ids),
        logprobs=_drawn(listed, token_ids),
        versions=_versions(output.weight_versions or [], len(token_ids)),
        finish=FINISHES[output.finish_reason],
        top_ids=None if top is None else top.lists(top.ids),
        top_logprobs=None if top is None else top.lists(top.logprobs.astype(np.float32)),
        entropies=_entropies(kept) if applied.entropy and kept is not None else None,
        keep_ids=None if kept is None else kept.lists(kept.ids),
        routes=None if routes is None else _routes(routes, request, output),
        params=applied,
    )


def _routes(told: ToldRoutes, request: Request, output: Any) -> Ragged[Any]:
    """Of prompt and completion [T, L, K]. What was aborted before it drew anything has none."""
    length = len(request.prompt_ids) + len(output.token_ids)
    if output.routed_experts is not None:
        return told.read(output.routed_experts, length, "vLLM")
    if len(output.token_ids):
        raise BackendError(f"vLLM told no routes of request {request.id}")
    return told.unknown(length)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Tokens that are listed at the positions of a completion, one position after another."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    owners: NDArray[np.int64]
    """Position at which each token is listed."""
    size: int
    """Number of positions."""

    @staticmethod
    def of(flat: Any, size: int) -> _Listed:
        """From vLLM's flat log-probabilities: of each position the drawn token first; it can come twice."""
        if not size:
            return _Listed(np.empty(0, np.int32), np.empty(0), np.empty(0, np.int64), 0)
        starts, ends = (np.array(list(bounds)[:size]) for bounds in (flat.start_indices, flat.end_indices))
        counts = ends - starts
        places = np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        ids, logprobs = np.array(flat.token_ids, dtype=np.int32), np.array(flat.logprobs, dtype=np.float64)
        return _Listed(ids[places], logprobs[places], np.repeat(np.arange(size), counts), size)

    def take(self, places: NDArray[Any]) -> _Listed:
        return _Listed(self.ids[places], self.logprobs[places], self.owners[places], self.size)

    def once(self) -> _Listed:
        """Without repeats, in order of ids."""
        ordered = self.take(np.lexsort((self.ids, self.owners)))
        is_repeat = (np.diff(ordered.ids) == 0) & (np.diff(ordered.owners) == 0)
        return ordered.take(np.flatnonzero(np.append(True, ~is_repeat)[: len(ordered.ids)]))

    def lists(self, values: NDArray[Any]) -> Ragged[Any]:
        return Ragged.of_counts(values, np.bincount(self.owners, minlength=self.size))


def _drawn(listed: _Listed, token_ids: NDArray[np.int32]) -> Column[float]:
    """Log-probabilities of the drawn tokens: the first ones listed."""
    firsts = np.searchsorted(listed.owners, np.arange(listed.size))
    ids, logprobs = listed.ids[firsts], listed.logprobs[firsts]
    wrong = np.flatnonzero((ids != token_ids) | ~np.isfinite(logprobs))
    if len(wrong):
        place = wrong[0]
        raise BackendError(f"vLLM drew token {token_ids[place]} and reports {logprobs[place]} for token {ids[place]}")
    return Column(logprobs.astype(np.float32))


def _most_likely(listed: _Listed, count: int) -> _Listed:
    """Most likely first; of equal ones the lower id first."""
    once = listed.once()
    ordered = once.take(np.lexsort((once.ids, -once.logprobs, once.owners)))
    ranks = np.arange(len(ordered.ids)) - np.searchsorted(ordered.owners, ordered.owners)
    return ordered.take(np.flatnonzero(ranks < count))


def _kept(listed: _Listed) -> _Listed:
    """Tokens that could be drawn. They hold all probability; anything less means that some were not returned."""
    kept = listed.take(np.flatnonzero(np.isfinite(listed.logprobs))).once()
    masses = np.bincount(kept.owners, weights=np.exp(kept.logprobs), minlength=kept.size)
    short = np.flatnonzero(np.abs(masses - 1) > MASS_TOLERANCE)
    if len(short):
        count, mass = np.count_nonzero(kept.owners == short[0]), masses[short[0]]
        raise TaskError(
            f"vLLM kept more tokens than it returned ({count}, holding {mass:.4f} of the probability): more than "
            f"{TIES} are tied at the edge of top_k"
        )
    return kept


def _entropies(kept: _Listed) -> Column[float]:
    weights = -np.exp(kept.logprobs) * kept.logprobs
    return Column(np.bincount(kept.owners, weights=weights, minlength=kept.size).astype(np.float32))


def _versions(spans: Any, count: int) -> list[int]:
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    if len(versions) != count:
        raise BackendError(f"vLLM says which weights drew {len(versions)} of {count} tokens")
    return versions
