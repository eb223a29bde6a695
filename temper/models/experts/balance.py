"""How evenly tokens are spread over experts: what is measured of it, and losses or biases that keep it even.

Both losses are means over drawn tokens of the whole batch, so that no packing changes them. Their gradient is put
straight onto the router's logits where they are computed: a layer that is computed again brings it along.
Owns: the losses, the counts, the rule of biases; all count the routers' own choice. Refuses: what is replayed
(routes.py).
Shapes: _T computed tokens, _A drawn tokens, _R rows, _E experts, _K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from temper.errors import UserError
from temper.models.decoder import has_seen_routers
from temper.models.experts.routes import Replay, replays
from temper.models.experts.routing import EXPERT_FAMILIES, expert_layers, has_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    balance: float = 0.0
    """Coefficient of the load-balancing loss."""
    z: float = 0.0
    """Coefficient of the router z-loss."""


def set_balance(model: Any, settings: BalanceSettings) -> None:
    """For every gradient of this model from now on. UserError for a model whose routers are not seen."""
    require_routers(_described(model))
    require_balance(_described(model), settings)
    model.temper_balance = settings


def require_balance(config: Any, settings: BalanceSettings) -> None:
    """UserError for a model, by its description, whose routers have no softmax for the z-loss."""
    if EXPERT_FAMILIES[config.model_type].has_bias and settings.z:
        raise UserError(
            f"model.routers.z: it is a loss over a softmax of all experts, and a {config.model_type} scores them one "
            f"by one. Leave z out, or use routers = {{balance = 0.001}} or {{bias = 0.001}}"
        )


def set_bias_rate(model: Any, rate: float) -> None:
    """How far every update of this model moves the biases of its routers; 0: not at all. UserError for a model whose
    routers have none."""
    if rate:
        require_routers(_described(model))
        require_biases(_described(model), rate)
    model.temper_bias_rate = rate


def require_biases(config: Any, rate: float) -> None:
    """UserError for a model, by its description, whose routers have no bias that could be moved at this rate."""
    if rate and not EXPERT_FAMILIES[config.model_type].has_bias:
        known = ", ".join(name for name, family in EXPERT_FAMILIES.items() if family.has_bias)
        raise UserError(
            f"model.routers.bias: routers of a {config.model_type} have no bias, and its "
            f"checkpoints no place for one; those of {known} have. Use routers = {{balance = 0.001}}"
        )


@torch.no_grad()
def move_biases(model: Any, loads: Mapping[str, Tensor]) -> None:
    """After an update. An expert that had more tokens than the mean is chosen a little less from now on, one that had
    less a little more (arXiv 2408.15664). loads: by number of the layer, tokens of each expert over all of the update,
    of all ranks."""
    rate = getattr(model, "temper_bias_rate", 0.0)
    for layer, load_E in loads.items() if rate else ():
        bias_E = model.get_decoder().layers[int(layer)].mlp.gate.e_score_correction_bias
        bias_E += rate * torch.sign(load_E.mean() - load_E).to(bias_E)


def freeze_routers(model: Any) -> None:
    require_routers(_described(model))
    for layer in expert_layers(model):
        model.get_decoder().layers[layer].mlp.gate.requires_grad_(False)


def balance_of(model: Any) -> BalanceSettings:
    return getattr(model, "temper_balance", BalanceSettings())


def is_balanced(model: Any) -> bool:
    """Whether every token has a gradient, one without credit too."""
    return balance_of(model) != BalanceSettings()


def require_routers(config: Any) -> None:
    """UserError for a model, by its description, whose routers are not seen."""
    if not has_seen_routers(config):
        raise UserError(
            f"model.routers is made for the families {', '.join(EXPERT_FAMILIES)}, and this model is a "
            f"{config.model_type}. Leave model.routers out"
        )


def _described(model: Any) -> Any:
    return model.get_decoder().config.get_text_config()


class RouterWatch:
    """A Routes that measures one pass and adds the gradient of the losses. Everything is kept by layer: one that is
    computed again says the same."""

    def __init__(self, model: Any, num_batch_tokens: int, scale: float = 1.0) -> None:
        """scale: what the loss of the pass is multiplied by before its backward pass."""
        self._settings, self._scale, self._has_bias = balance_of(model), scale, has_bias(model)
        self._share = 1 / max(1, num_batch_tokens) / max(1, len(expert_layers(model)))
        """Of one drawn token at one layer."""
        self._replay: Replay | None = None
        self._where_A = self._rows_A = torch.empty(0, dtype=torch.int64)
        self.is_recorded = replays(model)
        """Whether tokens should have records of their routes."""
        self.is_routed_A = torch.empty(0, dtype=torch.bool)
        """Drawn tokens that have one."""
        self._num_rows = 0
        self.loads: dict[int, Tensor] = {}
        """[E] how many drawn tokens each expert was chosen for."""
        self.entropies: dict[int, Tensor] = {}
        """Sum over drawn tokens of the entropy of the router's probabilities."""
        self.moved: dict[int, Tensor] = {}
        """[A] how many recorded experts of each drawn token the router would not choose now. Empty: there are no
        records."""
        self.num_chosen = 0
        self.losses: dict[str, dict[int, Tensor]] = {"balance": {}, "router_z": {}}

    def begin(self, where_A: Tensor, rows_A: Tensor, num_rows: int, replay: Replay | None) -> None:
        """where: the computed token that scores each drawn one. rows: the row of each."""
        self._where_A, self._rows_A, self._num_rows, self._replay = where_A, rows_A, num_rows, replay
        nothing_A = torch.zeros_like(where_A, dtype=torch.bool)
        self.is_routed_A = nothing_A if replay is None else replay.is_routed_T[where_A]

    @property
    def pulls(self) -> bool:
        """Whether there are losses: rows then share no tokens, so that no two slopes fall on one."""
        return self._settings != BalanceSettings()

    @property
    def num_drawn(self) -> int:
        return len(self._where_A)

    def route(self, layer: int, logits_TE: Tensor, chosen_TK: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            slope_AE = self._measure(layer, logits_TE[self._where_A], chosen_TK[self._where_A])
        if slope_AE is not None and logits_TE.requires_grad:
            slope_TE = slope_AE.new_zeros(logits_TE.shape).index_copy_(0, self._where_A, slope_AE * self._scale)
            logits_TE = _AddSlope.apply(logits_TE, slope_TE.to(logits_TE.dtype))  # type: ignore[no-untyped-call]
        if self._replay is None:
            return logits_TE, chosen_TK
        routed = self._replay.route(layer, logits_TE, chosen_TK)
        self.moved[layer] = self._replay.moved[layer][self._where_A]
        return routed

    def _measure(self, layer: int, logits_AE: Tensor, chosen_AK: Tensor) -> Tensor | None:
        """Writes down what there is to know; returns the gradient of the losses by the logits, None without losses."""
        wide = torch.promote_types(logits_AE.dtype, torch.float32)
        steepness_AE = None
        if self._has_bias:  # a softmax of logarithms: each score over the sum of all (DeepSeek-V3, arXiv 2412.19437)
            steepness_AE = torch.sigmoid(-logits_AE.to(wide))
            logits_AE = functional.logsigmoid(logits_AE.to(wide))
        logprobs_AE = torch.log_softmax(logits_AE, -1, dtype=wide)
        probabilities_AE = logprobs_AE.exp()
        taken_AE = torch.zeros_like(probabilities_AE).scatter_(1, chosen_AK, 1.0)
        self.num_chosen = chosen_AK.shape[1]
        self.loads[layer] = taken_AE.sum(0)
        self.entropies[layer] = -(probabilities_AE * logprobs_AE).sum()
        if not self.pulls:
            return None
        slope_AE = torch.zeros_like(probabilities_AE)
        if self._settings.balance:
            pull_AE = self._settings.balance * self._share * self._crowding(taken_AE)
            pulled_A1 = (pull_AE * probabilities_AE).sum(-1, keepdim=True)
            self.losses["balance"][layer] = pulled_A1.sum()
            slope_AE += probabilities_AE * (pull_AE - pulled_A1)
        if self._settings.z:
            total_A1 = torch.logsumexp(logits_AE.to(wide), -1, keepdim=True)
            self.losses["router_z"][layer] = self._settings.z * self._share * total_A1.square().sum()
            slope_AE += 2 * self._settings.z * self._share * total_A1 * probabilities_AE
        return slope_AE if steepness_AE is None else slope_AE * steepness_AE

    def _crowding(self, taken_AE: Tensor) -> Tensor:
        """E / K times the share of its row's tokens that chose each expert, at every token: 1 when they are even."""
        counts_RE = taken_AE.new_zeros(self._num_rows, taken_AE.shape[1]).index_add_(0, self._rows_A, taken_AE)
        even_R1 = counts_RE.sum(-1, keepdim=True) / taken_AE.shape[1]
        return (counts_RE / even_R1.clamp(min=1e-9))[self._rows_A]


class _AddSlope(torch.autograd.Function):
    """The logits as they are, whose gradient has the slope of the losses added."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, slope_TE: Tensor) -> Tensor:
        ctx.save_for_backward(slope_TE)
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slope_TE,) = ctx.saved_tensors
        return grads[0] + slope_TE, None
