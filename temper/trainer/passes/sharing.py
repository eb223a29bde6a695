"""A prompt that several rows of a microbatch begin with is computed once.

What a decoder makes of a token depends on the tokens before it in its row and on nothing else, so the rows of a group
have the states of their prompt in common. Only attention looks at whole rows: before it, states are handed out to all
of them; behind it, those of a prompt are kept once.
Owns: which tokens are computed, and handing them out. Refuses: attention itself (given).
Shapes: _T packed tokens, _U tokens that are computed, _N tokens of shared prompts, m rows that share one, _D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.models.attention_interface import Attend
from temper.models.experts.routing import Routes
from temper.models.states import hidden_states
from temper.trainer.passes.gathering import take_rows
from temper.types import Microbatch

LEAST_SAVING = 1 / 16
"""Share of the packed tokens that must be saved: below that, handing states out is not worth it."""


@dataclass(frozen=True, slots=True)
class Sharing:
    shared: tuple[Tensor, ...]
    """Packed places [N, m] of each token of a shared prompt, by how many rows share it."""
    others: Tensor
    """Packed places of all other tokens."""
    source_T: Tensor
    """Which of the computed tokens stands at each packed place. Computed are `shared`, in this order, then `others`."""

    @property
    def computed_U(self) -> Tensor:
        """A packed place of each token that is computed."""
        return torch.cat([*(places_Nm[:, 0] for places_Nm in self.shared), self.others])

    def hand_out(self, states_U: Tensor) -> Tensor:
        """Copies the states of the computed tokens to all packed places."""
        return _HandOut.apply(states_U, self)  # type: ignore[no-any-return, no-untyped-call]

    def hidden_states(
        self, model: Any, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, routes: Routes | None = None
    ) -> Tensor:
        """What hidden_states says of all packed tokens, in fewer steps. `attend` sees whole rows, as ever; routes are
        those of the computed tokens."""
        computed_U = self.computed_U

        def attend_once(layer: int, query_U: Tensor, key_U: Tensor, value_U: Tensor, **options: Any) -> Tensor:
            output = attend(layer, *(self.hand_out(states) for states in (query_U, key_U, value_U)), **options)
            return take_rows(output, computed_U)

        asked = (token_ids_T[computed_U], positions_T[computed_U], attend_once, routes)
        return self.hand_out(hidden_states(model, *asked))


def shared_prompts(microbatch: Microbatch, device: torch.device) -> Sharing | None:
    """Prompts of rows that have all tokens before their first drawn one in common. None: too few to be worth it."""
    shared, num_tokens = shared_places(microbatch), len(microbatch.token_ids)
    if not shared:
        return None
    source_T = np.full(num_tokens, -1, dtype=np.int64)
    num_computed = 0
    for places_Nm in shared:
        source_T[places_Nm] = num_computed + np.arange(len(places_Nm))[:, None]
        num_computed += len(places_Nm)
    others = np.flatnonzero(source_T < 0)
    source_T[others] = num_computed + np.arange(len(others))
    to_device = [torch.from_numpy(array).to(device) for array in (*shared, others, source_T)]
    return Sharing(shared=tuple(to_device[:-2]), others=to_device[-2], source_T=to_device[-1])


def shared_places(microbatch: Microbatch) -> list[NDArray[np.int64]]:
    """Packed places [N, m] of each token of a shared prompt, by how many rows share it; empty: not worth it."""
    by_count: dict[int, list[NDArray[np.int64]]] = {}
    for starts_m, length in _prompts(microbatch):
        by_count.setdefault(len(starts_m), []).append(np.arange(length)[:, None] + starts_m)
    shared = [np.concatenate(by_count[count]) for count in sorted(by_count)]
    saved = sum(places_Nm.size - len(places_Nm) for places_Nm in shared)
    return shared if saved and saved >= LEAST_SAVING * len(microbatch.token_ids) else []


def _prompts(microbatch: Microbatch) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Where the rows start that share a prompt, and its length."""
    token_ids, lengths = microbatch.token_ids.cpu().numpy(), np.asarray(microbatch.lengths, dtype=np.int64)
    starts = lengths.cumsum() - lengths
    drawn = np.append(np.flatnonzero(microbatch.loss_mask.cpu().numpy()), len(token_ids))
    ends = np.minimum(drawn[np.searchsorted(drawn, starts)], starts + lengths)  # a row may have nothing drawn
    rows: dict[bytes, list[int]] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        rows.setdefault(token_ids[start:end].tobytes(), []).append(start)
    for prompt, places in rows.items():
        if len(places) > 1:
            yield np.asarray(places, dtype=np.int64), len(prompt) // token_ids.itemsize


class _HandOut(torch.autograd.Function):
    """Gradients are added up in a fixed order: plain indexing would add them in any, on a GPU."""

    @staticmethod
    def forward(ctx: Any, states_U: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return states_U.index_select(0, sharing.source_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_T,) = grads
        sums = [
            grad_T.index_select(0, places_Nm.flatten()).view(*places_Nm.shape, *grad_T.shape[1:]).sum(1)
            for places_Nm in ctx.sharing.shared
        ]
        return torch.cat([*sums, grad_T.index_select(0, ctx.sharing.others)]), None
