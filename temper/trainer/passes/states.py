"""The hidden states that score drawn tokens.

Owns: which hidden state scores which token. Refuses: what is read from them (forward.py, scores.py, divergence.py).
Shapes: _T packed tokens, _A drawn tokens, _D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from temper.errors import UserError
from temper.models.attention_interface import Attend
from temper.models.decoder import numerics_of
from temper.models.experts.balance import RouterWatch
from temper.models.experts.routes import Replay, only_measures, replays, route_shape
from temper.models.families import steady_context
from temper.models.states import hidden_states
from temper.trainer.passes.gathering import take_rows
from temper.trainer.passes.packed_attention import ExactPackedAttention, PackedAttention
from temper.trainer.passes.routers import hidden_and_router_logits
from temper.trainer.passes.sharing import shared_prompts
from temper.trainer.ranks.context import Context, context_of_rank
from temper.trainer.ranks.tensor import WholeAttention, is_sliced
from temper.types import Microbatch

MakeAttention = Callable[[Sequence[int], torch.device], Attend]


@dataclass(frozen=True, slots=True)
class DrawnStates:
    """What the decoder says where tokens were drawn; of several ranks that go together, where this one computed."""

    hidden_AD: Tensor
    token_ids_A: Tensor
    drawn_A: Tensor
    """Places of the drawn tokens among all of the microbatch."""
    router_logits: tuple[Tensor, ...] = ()
    """[T, experts] by layer; empty unless asked for."""
    gather: Callable[[Tensor], Tensor] = lambda own: own
    """A column of all drawn tokens from that of these, where other ranks have the rest of them."""


def require_room(model: Any, microbatch: Microbatch) -> None:
    """Refuses rows longer than the model's context: beyond it, its rotations or windows change."""
    config = model.get_decoder().config
    if (longest := max(microbatch.lengths)) > (room := steady_context(config)):
        raise UserError(
            f"a row of {longest} tokens is longer than what {type(model).__name__} computes as it should: {room} "
            f"tokens. Use shorter rows (sampling.max_new_tokens, trainer.max_length) or a model with a longer context"
        )


def attention_of(model: nn.Module) -> MakeAttention:
    make = ExactPackedAttention if numerics_of(model) == "exact" else PackedAttention
    return partial(make, is_ordered=getattr(model, "temper_ordered", False))


def set_ordered(model: nn.Module) -> None:
    """From now on the gradients of this model's attention are added up in a fixed order (order_gradients)."""
    model.temper_ordered = True  # type: ignore[assignment]


def _replay(model: nn.Module, microbatch: Microbatch, computed_U: Tensor | None) -> Replay | None:
    """Routes of the tokens that are computed; a prompt that rows share takes those of the first of them. None: each
    takes its router's choice."""
    if microbatch.routes is None or microbatch.is_routed is None or not replays(model):
        return None
    device = next(model.parameters()).device
    routes_TW, is_routed_T = microbatch.routes.to(device), microbatch.is_routed.to(device)
    if computed_U is not None:
        routes_TW, is_routed_T = routes_TW[computed_U], is_routed_T[computed_U]
    return Replay(route_shape(model), routes_TW, is_routed_T, only_measures=only_measures(model))


def _stretch(context: Context, model: Any, asked: tuple[Tensor, Tensor, Attend], drawn_A: Tensor) -> DrawnStates:
    """What this rank has of them. Prompts that rows share are computed for each: they lie with many ranks."""
    token_ids_T, positions_T, attend = asked
    num_tokens = len(token_ids_T)
    own, ends = context.own(num_tokens), context.ends(num_tokens)
    around = WholeAttention(model, attend, positions_T) if is_sliced(model) else context.attend(attend, num_tokens)
    hidden_tD = hidden_states(model, token_ids_T[own], positions_T[own], around)
    before_A = drawn_A - 1
    counts = [int(((before_A >= start) & (before_A < end)).sum()) for start, end in pairwise(ends)]
    own_A = drawn_A[(before_A >= own.start) & (before_A < own.stop)].to(token_ids_T.device)
    hidden_AD = take_rows(hidden_tD, own_A - 1 - own.start)
    return DrawnStates(hidden_AD, token_ids_T[own_A], own_A, gather=partial(context.gather, counts))


def drawn_states(
    model: nn.Module,
    microbatch: Microbatch,
    *,
    routers: bool = False,
    shares: bool | None = None,
    make_attention: MakeAttention | None = None,
    watch: RouterWatch | None = None,
) -> DrawnStates:
    """The hidden states that score the drawn tokens of a microbatch, on the model's device.

    watch: what is told of the routers of a walked model with experts.

    shares: whether a prompt that rows have in common is computed once; never when routers are asked for or balanced.
    None: yes, but not in float64, which is for proofs: models compute norms in float32 all the same, and of what is
    summed before a norm the rounding would depend on the rows of a microbatch.
    """
    require_room(model, microbatch)
    parameter = next(model.parameters())
    device = parameter.device
    shares = parameter.dtype != torch.float64 if shares is None else shares
    drawn_A = microbatch.loss_mask.nonzero()[:, 0]
    # The state before a row's first token belongs to another row; scoring it would train on a neighbour's text.
    assert bool((microbatch.positions[drawn_A] > 0).all()), "the first token of a row cannot be a drawn one"
    token_ids_T, positions_T = microbatch.token_ids.to(device), microbatch.positions.to(device)
    context, lengths = context_of_rank(), microbatch.lengths
    if context is not None and is_sliced(model) and (missing := -len(token_ids_T) % context.size):
        lengths = (*lengths, missing)  # a row that nobody reads: all have as many tokens
        token_ids_T, positions_T = pad(token_ids_T, (0, missing)), pad(positions_T, (0, missing))
    attend = (make_attention or attention_of(model))(lengths, device)
    if context is not None:
        assert not routers, "refused before (build/check.py)"
        assert microbatch.keep_ids is None, "refused before (build/check.py)"
        return _stretch(context, model, (token_ids_T, positions_T, attend), drawn_A)
    drawn_A = drawn_A.to(device)
    logits: tuple[Tensor, ...] = ()
    shares = shares and not routers and not (watch is not None and watch.pulls)
    sharing = shared_prompts(microbatch, device) if shares else None
    replay = _replay(model, microbatch, None if sharing is None else sharing.computed_U)
    if watch is not None:
        where_A = drawn_A - 1 if sharing is None else sharing.source_T[drawn_A - 1]
        rows_A = microbatch.sequence_ids.to(device)[drawn_A]
        watch.begin(where_A, rows_A, len(microbatch.lengths), replay)
    routes = replay if watch is None else watch
    if routers:
        hidden_TD, logits = hidden_and_router_logits(model, token_ids_T, positions_T, attend, routes)
    elif sharing is not None:
        hidden_TD = sharing.hidden_states(model, token_ids_T, positions_T, attend, routes)
    else:
        hidden_TD = hidden_states(model, token_ids_T, positions_T, attend, routes)
    if replay is not None:
        replay.require_taken_once()
    return DrawnStates(take_rows(hidden_TD, drawn_A - 1), token_ids_T[drawn_A], drawn_A, logits)
