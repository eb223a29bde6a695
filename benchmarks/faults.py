"""Faults between a sampler and a trainer, planted one at a time at any shape: what the check must catch.

Owns: the faults. Refuses: judging whether one was caught (parity.py and the tests do). tests/parity/test_check.py has
the same faults on one tiny model, with the words that the diagnosis finds for each.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from temper.engine.local.engine import LocalEngine
from temper.models.states import Head
from temper.parity.check import Recompute, Sides, stale_tensors
from temper.trainer.weights import publish
from temper.types import Column, Completion, Publication, Request, Sample

MakeEngine = Callable[[Any], LocalEngine]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A sound sampler and trainer of one model."""

    model: Any
    make_engine: MakeEngine
    sides: Sides
    """Their engine and scores, within the budget of the model's size."""


class Between:
    """A sampler that asks the engine for something else, or answers something else, than it was asked."""

    def __init__(
        self,
        engine: Any,
        ask: Callable[[Request], Request] = lambda request: request,
        answer: Callable[[Completion], Completion] = lambda completion: completion,
    ) -> None:
        self._engine, self._ask, self._answer = engine, ask, answer

    @property
    def version(self) -> int:
        return int(self._engine.version)

    async def generate(self, request: Request) -> Completion:
        drawn = await self._engine.generate(self._ask(request))
        # The fault is silent: the sampler claims to have done what was asked.
        return self._answer(dataclasses.replace(drawn, prompt_ids=request.prompt_ids, params=request.params))

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def interrupt(self, request_id: str) -> None:
        await self._engine.interrupt(request_id)

    async def load(self, publication: Publication) -> None:
        await self._engine.load(publication)

    def stats(self) -> Mapping[str, float]:
        return dict(self._engine.stats())

    async def close(self) -> None:
        await self._engine.close()


def _params(pair: Pair, **changes: Any) -> Sides:
    """The sampler draws with other parameters than it was asked for."""

    def ask(request: Request) -> Request:
        return dataclasses.replace(request, params=dataclasses.replace(request.params, **changes))

    return dataclasses.replace(pair.sides, sampler=Between(pair.sides.sampler, ask=ask))


def _prompt(pair: Pair, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Sides:
    def ask(request: Request) -> Request:
        return dataclasses.replace(request, prompt_ids=change(tuple(request.prompt_ids)))

    return dataclasses.replace(pair.sides, sampler=Between(pair.sides.sampler, ask=ask))


def _truncated(pair: Pair) -> Sides:
    """Draws from the likeliest 80% and renormalises, and the trainer is not told."""

    def ask(request: Request) -> Request:
        return dataclasses.replace(request, params=dataclasses.replace(request.params, top_p=0.8))

    def forget(completion: Completion) -> Completion:
        return dataclasses.replace(completion, keep_ids=None)

    return dataclasses.replace(pair.sides, sampler=Between(pair.sides.sampler, ask=ask, answer=forget))


def _scored(pair: Pair, change: Callable[[Recompute, Sequence[Sample]], Sequence[Sequence[float]]]) -> Sides:
    """The trainer scores in another way."""
    score = pair.sides.recompute
    return dataclasses.replace(pair.sides, recompute=lambda samples, who: change(score, samples))


def _not_renormalised(score: Recompute, samples: Sequence[Sample]) -> list[list[float]]:
    """The trainer renormalises over a keep-set of 70 to 90%, a different one for each context."""
    rows = []
    for sample, row in zip(samples, score(samples, "policy"), strict=True):
        shift = -math.log(0.7 + 0.002 * (sample.token_ids[0] % 100))
        rows.append([value + shift * drawn for value, drawn in zip(row, sample.loss_mask, strict=True)])
    return rows


def _lost_boundaries(score: Recompute, samples: Sequence[Sample]) -> list[Sequence[float]]:
    """All rows as one long one."""
    joined = {
        field.name: [entry for sample in samples for entry in getattr(sample, field.name)]
        for field in dataclasses.fields(Sample)
        if isinstance(getattr(samples[0], field.name), Column)
    }
    (row,) = score([dataclasses.replace(samples[0], **joined)], "policy")
    ends = [sum(len(s.token_ids) for s in samples[: k + 1]) for k in range(len(samples))]
    return [row[end - len(sample.token_ids) : end] for end, sample in zip(ends, samples, strict=True)]


def _broken(score: Recompute, samples: Sequence[Sample]) -> list[list[float]]:
    rows = [list(row) for row in score(samples, "policy")]
    rows[-1][-1] = math.nan
    return rows


def _other_model(pair: Pair, change: Callable[[Any], None], *, own: bool, is_looked_at: bool) -> Sides:
    """The sampler draws with a changed model. own: with its own weights, else it shares those of the trainer."""
    shared = {} if own else {id(parameter): parameter for parameter in pair.model.parameters()}
    held = copy.deepcopy(pair.model, shared)
    with torch.no_grad():
        change(held)
    find = (lambda: stale_tensors(publish(pair.model, 0).tensors, publish(held, 0).tensors)) if is_looked_at else None
    return dataclasses.replace(pair.sides, sampler=pair.make_engine(held), find_stale=find)


def _nudge(model: Any) -> None:
    """One number of one matrix, by one step of its precision."""
    weight = model.get_decoder().layers[-1].mlp.up_proj.weight.view(-1)
    weight[5] = torch.nextafter(weight[5], torch.full_like(weight[5], math.inf))


def _redraw_layer(model: Any) -> None:
    """One layer out of many is another."""
    layer = model.get_decoder().layers[len(model.get_decoder().layers) // 2]
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        linear.weight.copy_(torch.randn_like(linear.weight) * linear.weight.float().std().to(linear.weight.dtype))


def _turn(model: Any) -> None:
    """Rotary theta of 50."""
    rotary = model.get_decoder().rotary_emb
    size = 2 * len(rotary.inv_freq)
    places = torch.arange(0, size, 2, device=rotary.inv_freq.device).float()
    rotary.inv_freq = 50.0 ** (-places / size)


def _stale_head(pair: Pair) -> Sides:
    """The head as it was a large update ago."""
    engine = pair.make_engine(pair.model)
    head = engine._runner._head
    noise = torch.randn_like(head.weight) * head.weight.float().std().to(head.weight.dtype)
    engine._runner._head = dataclasses.replace(head, weight=(head.weight + 0.5 * noise).detach())
    return dataclasses.replace(pair.sides, sampler=engine)


@contextmanager
def _rounded_head(side: str) -> Iterator[None]:
    plain = Head.logits

    def rounded(self: Head, hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(self, hidden)
        is_engine = torch.is_inference_mode_enabled()
        return logits.bfloat16().float() if is_engine == (side == "sampler") else logits

    Head.logits = rounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Head.logits = plain  # type: ignore[method-assign]


def _half_head(side: str) -> Callable[[Pair], Iterator[Sides]]:
    def plant(pair: Pair) -> Iterator[Sides]:
        with _rounded_head(side):
            yield dataclasses.replace(pair.sides, sampler=pair.make_engine(pair.model))

    return plant


def _simple(make: Callable[[Pair], Sides]) -> Callable[[Pair], Iterator[Sides]]:
    def plant(pair: Pair) -> Iterator[Sides]:
        yield make(pair)

    return plant


def _two_faults(pair: Pair) -> Sides:
    warmer = dataclasses.replace(pair, sides=_params(pair, temperature=1.4))
    return _prompt(warmer, lambda ids: (ids[0], *ids))


FAULTS: dict[str, Callable[[Pair], Iterator[Sides]]] = {
    "temperature 1.3": _simple(lambda pair: _params(pair, temperature=1.3)),
    "top-p 0.8, trainer not told": _simple(_truncated),
    "not renormalised": _simple(lambda pair: _scored(pair, _not_renormalised)),
    "BOS in front": _simple(lambda pair: _prompt(pair, lambda ids: (0, *ids))),
    "first token twice": _simple(lambda pair: _prompt(pair, lambda ids: (ids[0], *ids))),
    "first token lost": _simple(lambda pair: _prompt(pair, lambda ids: ids[1:] or ids)),
    "lost boundaries": _simple(lambda pair: _scored(pair, _lost_boundaries)),
    "rotary theta": _simple(lambda pair: _other_model(pair, _turn, own=False, is_looked_at=True)),
    "one number of one tensor": _simple(lambda pair: _other_model(pair, _nudge, own=True, is_looked_at=True)),
    "one layer, not looked at": _simple(lambda pair: _other_model(pair, _redraw_layer, own=True, is_looked_at=False)),
    "stale head": _simple(_stale_head),
    "sampler's head in half precision": _half_head("sampler"),
    "trainer's head in half precision": _half_head("trainer"),
    "NaN": _simple(lambda pair: _scored(pair, _broken)),
    "two at once": _simple(_two_faults),
}
"""Each yields the sides with the fault in them, and takes it away when it is asked again."""
