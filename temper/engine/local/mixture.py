"""The policy's opponent: a sampler over the reference, or over the geometric mixture of policy and reference.

Owns: drawing from two models at once, and that nothing an opponent draws has a version of the policy.
Refuses: who plays whom (rollout/group.py), who wins (stages/preference.py).
Shapes: _R rows, _D hidden (of both models side by side), _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from temper.engine.local.attention import PagedCache
from temper.engine.local.engine import EngineSettings, LocalEngine, make_cache
from temper.engine.local.rows import Rows, Rows_R
from temper.engine.local.runner import Runner
from temper.engine.local.sampling import Draws, Table, draw
from temper.engine.local.scheduler import Schedule
from temper.engine.local.warming import ExpectedRequests
from temper.engine.wrapped import WrappedSampler
from temper.models.save import saved_tensors
from temper.models.states import Head
from temper.objectives.losses.unpaired import geometric_mixture
from temper.protocols import Sampler
from temper.types import Publication

NO_VERSION = -1
"""Version of tokens that no version of the policy drew."""


class MixedRunner(Runner):
    """Draws from pi^(1 - share) ref^share, normalised at every token. Both models compute the same tokens, each with
    keys and values of its own in blocks of the same numbers."""

    def __init__(self, policy: Any, reference: Any, caches: tuple[PagedCache, PagedCache], share: float) -> None:
        device = next(policy.parameters()).device
        super().__init__(policy, caches[0], device=device, graphs=None)
        self._reference, self._share = reference, share
        self._reference_head = Head.of(reference)
        self._beside = Runner(reference, caches[1], device=device, graphs=None)

    @torch.no_grad()
    def refresh_head(self) -> None:
        super().refresh_head()
        self._reference_head = Head.of(self._reference)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        super().copy_blocks(copies)
        self._beside.copy_blocks(copies)

    def explain_nan(self, token_ids: Sequence[int]) -> str:
        return super().explain_nan(token_ids) or self._beside.explain_nan(token_ids)

    def decode(self, decode_R: Rows_R, rows: Rows, steps: int) -> Table:
        """The next token of a row follows from a chunk of one: its last token."""
        assert steps == 1, "a mixture draws one token at a time"
        ones_R = np.ones_like(decode_R)
        chunks = Schedule(
            decode_R=decode_R[:0], prefill_R=decode_R, start_R=rows.length[decode_R] - ones_R, count_R=ones_R
        )
        return self.draw(self.prefill(chunks, rows), rows.draws(decode_R))

    @torch.inference_mode()
    def prefill(self, schedule: Schedule, rows: Rows) -> Tensor:
        return torch.cat((super().prefill(schedule, rows), self._beside.prefill(schedule, rows)), dim=-1)

    @torch.inference_mode()
    def draw(self, hidden_RD: Tensor, draws: Draws) -> Table:
        """Temperature after mixing is temperature before it: both give logits ((1 - share) a + share b) / T. Keep-sets
        are the mixture's: those of two models need not have a token in common."""
        policy_RD, reference_RD = hidden_RD.chunk(2, dim=-1)
        logits_RV = self._logits(policy_RD), self._reference_head.logits(reference_RD)
        return draw(geometric_mixture(*logits_RV, self._share), draws)


class Opponent(WrappedSampler):
    """Its log-probabilities are of the distribution it draws from, not the policy's."""

    def __init__(
        self,
        policy: Any,
        reference: Any,
        settings: EngineSettings,
        *,
        share: float,
        decode: Callable[[list[int]], str] | None = None,
        follows: Any = None,
    ) -> None:
        """share: the reference's part; with 1 the policy is not asked. policy: the weights of its own sampler, shared.

        follows: the model that `reference` is a copy of, when that one moves. None: it stays, or it is that model.
        """
        self._reference, self._follows = reference, follows
        self._model, runner = reference, None
        if share < 1:
            caches = make_cache(policy, settings), make_cache(reference, settings)
            self._model, runner = policy, MixedRunner(policy, reference, caches, share)
        self._engine = LocalEngine(self._model, settings, version=NO_VERSION, decode=decode, runner=runner)
        super().__init__(self._engine)

    async def load(self, publication: Publication) -> None:
        """Looks at its models again. The policy's own sampler has loaded the new weights before; both share them."""
        if self._follows is not None:
            with torch.no_grad():
                for own, moved in zip(self._reference.parameters(), self._follows.parameters(), strict=True):
                    own.copy_(moved)
        seen = Publication(version=NO_VERSION, tensors=saved_tensors(self._model))
        await self._engine.load(seen)

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self._engine.paused():
            yield


class WithOpponent(WrappedSampler):
    """That of the policy, whose opponent sees every new version too."""

    def __init__(self, sampler: Sampler, opponent: Opponent) -> None:
        super().__init__(sampler)
        self._opponent = opponent

    async def load(self, publication: Publication) -> None:
        """In this order, and without a step between: the opponent draws from the weights that the first one loads."""
        await self._sampler.load(publication)
        await self._opponent.load(publication)

    async def warm_up(self, expected: ExpectedRequests, tell: Callable[[int, int], None]) -> None:
        """The opponent computes with the same kernels, and records its steps when it plays."""
        assert isinstance(self._sampler, LocalEngine), "an opponent shares the weights of an engine of this process"
        await self._sampler.warm_up(expected, tell)

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert isinstance(self._sampler, LocalEngine), "an opponent shares the weights of an engine of this process"
        with self._sampler.paused(), self._opponent.paused():
            yield

    def stats(self) -> Mapping[str, float]:
        """The policy's stats, except that preemptions are those of both, and the longer drawing and larger kv_use."""
        own, other = self._sampler.stats(), self._opponent.stats()
        return {
            **own,
            "kv_use": max(own["kv_use"], other["kv_use"]),
            "drawing_seconds": max(own["drawing_seconds"], other["drawing_seconds"]),
            "preemptions": own["preemptions"] + other["preemptions"],
        }

    async def close(self) -> None:
        try:
            await self._sampler.close()
        finally:
            await self._opponent.close()
