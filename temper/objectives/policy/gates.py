"""How far one update may move a token's probability. A gate turns log-ratios into gain; larger is better.

Owns: trust-region forms. Refuses: advantages (advantages.py), denominators (weighting.py).
Every gate's gradient is omega A d(log pi), with omega = 1 where the policy has not moved.
Shapes: _T drawn tokens, _S trajectories, _TK the K most likely tokens at each position.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from temper.objectives.factor import factor, require
from temper.objectives.objective import Gain, Gate
from temper.objectives.tokens import Tokens, bounded

GateFn = Callable[[Tokens, Tensor], Gain]

_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Default bounds, those of the binary divergences in verl's scripts."""


@factor()
def none() -> GateFn:
    """A log pi: plain policy gradient, no ratio, omega = 1. Williams 1992."""
    return lambda tokens, log_ratio_T: Gain(tokens.advantages * tokens.policy_logprobs, _nowhere(log_ratio_T))


@factor()
def importance(cap: float | None = None) -> GateFn:
    """r A: importance-weighted policy gradient without a trust region, omega = r.

    With `cap`: min(r, cap) A, which has no gradient beyond the cap.
    """
    require(cap is None or cap >= 1, f"importance: cap={cap} must be at least 1, e.g. cap=5.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        ratio_T = log_ratio_T.exp()
        if cap is None:
            return Gain(ratio_T * tokens.advantages, _nowhere(log_ratio_T))
        return Gain(ratio_T.clamp(max=cap) * tokens.advantages, clipped=ratio_T > cap)

    return gain


@factor()
def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> GateFn:
    """PPO's clipped surrogate: min(r A, clip(r, 1 - low, 1 + high) A).

    The minimum stops the gradient only where the update would move further in the direction the advantage
    already pushed; a token that moved the wrong way keeps its gradient. DAPO's clip-higher is high > low.
    With `dual`, tokens of negative advantage lose their gradient beyond r = dual as well: they would otherwise have
    no bound. Dual clip, max(min(...), dual A) for A < 0 (Ye et al. 2020), and INTELLECT-2's two-sided delta,
    min(min(r, delta) A, clip(r) A), are one function of r and A because both bounds exceed 1 + high.
    Schulman et al. 2017, eq. 7.
    """
    require(low >= 0 and high >= 0, f"clip: low={low} and high={high} must not be negative, e.g. low=0.2, high=0.28")
    require(dual is None or dual > 1 + high, f"clip: dual={dual} must exceed 1 + high = {1 + high}, e.g. dual=3.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        ratio_T = log_ratio_T.exp()
        free_T = ratio_T * tokens.advantages
        bound_T = ratio_T.clamp(1 - low, 1 + high) * tokens.advantages
        value_T, clipped_T = torch.minimum(free_T, bound_T), bound_T < free_T
        if dual is not None:
            floor_T = torch.where(tokens.advantages < 0, dual * tokens.advantages, -float("inf"))
            value_T, clipped_T = torch.maximum(value_T, floor_T), clipped_T | (free_T < floor_T)
        return Gain(value_T, clipped_T)

    return gain


@factor()
def cispo(cap: float = 5.0, low: float = 0.0) -> GateFn:
    """CISPO: sg[clip(r, low, cap)] A log pi. Every token keeps a gradient; only its size is bounded.

    Both bounds are absolute, not 1 - epsilon and 1 + epsilon; low = 0 means no lower bound. MiniMax-M1, arXiv
    2506.13585; verl, slime, TRL.
    """
    require(0 <= low < cap, f"cispo: low={low} and cap={cap} need 0 <= low < cap, e.g. low=0.0, cap=5.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        ratio_T = log_ratio_T.detach().exp()
        value_T = ratio_T.clamp(low, cap) * tokens.advantages * tokens.policy_logprobs
        return Gain(value_T, clipped=(ratio_T > cap) | (ratio_T < low))

    return gain


@factor()
def sapo(positive: float = 1.0, negative: float = 1.05) -> GateFn:
    """SAPO: (4/tau) sigmoid(tau (r - 1)) A, tau = positive for A > 0 and negative otherwise.

    A soft trust region: omega = 4 u (1 - u) r, u = sigmoid(tau (r - 1)), fades on both sides and never ends, so
    nothing counts as clipped. arXiv 2511.20347; verl, TRL, AReaL.
    """
    require(
        positive > 0 and negative > 0,
        f"sapo: positive={positive} and negative={negative} are temperatures above 0, e.g. positive=1.0, negative=1.05",
    )

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        sharpness_T = torch.full_like(log_ratio_T, negative).masked_fill(tokens.advantages > 0, positive)
        gate_T = torch.sigmoid(sharpness_T * (log_ratio_T.exp() - 1))
        return Gain(4 / sharpness_T * gate_T * tokens.advantages, _nowhere(log_ratio_T))

    return gain


@factor(experimental="only the abstract of RGPO is public: neither its gate nor its dual-ratio gate is established")
def acceptance(sharpness: float = 4.0) -> GateFn:
    """RGPO: g(r) A with a smooth acceptance gate g into [0, 1], omega = g'(r) r; here g = sigmoid(sharpness (r - 1)).

    omega is sharpness/4 at r = 1, so 4 starts as policy gradient. It is sharpness/4 times sapo with both temperatures
    equal to sharpness. arXiv 2604.14895 (abstract).
    """
    require(sharpness > 0, f"acceptance: sharpness={sharpness} must be positive, e.g. sharpness=4.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        accepted_T = torch.sigmoid(sharpness * (log_ratio_T.exp() - 1))
        return Gain(accepted_T * tokens.advantages, _nowhere(log_ratio_T))

    return gain


@factor()
def dppo_tv(low: float = 0.15, high: float = 0.15, cap: float = 20.0) -> GateFn:
    """DPPO, binary total variation: sg[min(r, cap)] v A log pi; v = 0 where the token's probability moved too far in
    the direction of its advantage: p - q > high for A > 0, p - q < -low otherwise.

    p is the policy's probability, q the proximal policy's: the sampler in DPPO, the trainer in its recompute variant.
    Rare tokens move freely, whatever their ratio. arXiv 2602.04879; verl (dppo_tv), prime-rl.
    """
    return _divergence_gate("dppo_tv", _drawn(binary_tv), low, high, cap)


@factor()
def dppo_kl(low: float = 0.05, high: float = 0.05, cap: float = 20.0) -> GateFn:
    """DPPO, binary KL: as dppo_tv, with v = 0 where KL((q, 1 - q) || (p, 1 - p)) exceeds high (A > 0, p > q) or low
    (A <= 0, p < q). Stricter than TV for rare tokens. arXiv 2602.04879; verl (dppo_kl).
    """
    return _divergence_gate("dppo_kl", _drawn(binary_kl), low, high, cap)


@factor(
    needs=("sampler_top_k",), experimental="how many tokens and which thresholds the paper's runs used is not public"
)
def dppo_topk(
    divergence: str = "tv", k: int = 20, low: float | None = None, high: float | None = None, cap: float = 20.0
) -> GateFn:
    """DPPO, top-K: as dppo_kl, with the divergence over the anchor's K most likely tokens and the rest as one event.

    Sees what a binary divergence cannot: probability that moved between other tokens. low and high default to those
    of the binary forms, 0.15 for "tv" and 0.05 for "kl". arXiv 2602.04879; Stable-RL.
    """
    require(divergence in _THRESHOLDS, f'dppo_topk: divergence="{divergence}" is unknown. Use "tv" or "kl".')
    require(k >= 1, f"dppo_topk: k={k} must be at least 1 token, e.g. k=20")
    measure = {"tv": top_k_tv, "kl": top_k_kl}[divergence]
    default = _THRESHOLDS[divergence]

    def distance(tokens: Tokens) -> Tensor:
        top = tokens.top
        assert top is not None, "dppo_topk needs the most likely tokens"
        assert top.ids.shape[1] >= k, f"dppo_topk has {top.ids.shape[1]} most likely tokens and needs {k}"
        return measure(top.policy_logprobs[:, :k].detach(), top.anchor_logprobs[:, :k])

    low, high = (default if bound is None else bound for bound in (low, high))
    return _divergence_gate("dppo_topk", distance, low, high, cap)


@factor()
def quad(low: float = 0.2, high: float = 0.2) -> GateFn:
    """prime-rl: v r A with v of dppo_tv; omega = v r. Its pull back to the sampler is a regulariser of its own.

    prime-rl's default loss.
    """
    _require_thresholds("quad", low, high)
    distance = _drawn(binary_tv)

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        is_out_T = _moved_too_far(tokens, distance(tokens), low, high)
        return Gain(log_ratio_T.exp() * ~is_out_T * tokens.advantages, clipped=is_out_T)

    return gain


@factor()
def gmpo(band: float = 0.4) -> GateFn:
    """GMPO: A exp(mean_t z_t) for every token of a trajectory, z_t = log r_t bounded as in `clip`, by +-band in logs.

    z = sgn(A) min(sgn(A) log r, sgn(A) clip(log r, -band, band)). Under sequence_mean weighting the loss is the mean
    over trajectories. omega = exp(mean z), 0 on bounded tokens; one wild ratio moves a geometric mean little.
    Takes a token-level ratio. arXiv 2507.20673; verl (geo_mean), TRL.
    """
    require(band > 0, f"gmpo: band={band} is a bound on |log r| and must be positive, e.g. band=0.4")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        sign_T = tokens.advantages.sign()
        free_T, bound_T = sign_T * log_ratio_T, sign_T * log_ratio_T.clamp(-band, band)
        mean_S = tokens.mean_by_trajectory(sign_T * torch.minimum(free_T, bound_T))
        value_T = bounded(mean_S)[tokens.trajectory_ids].exp() * tokens.advantages
        return Gain(value_T, clipped=bound_T < free_T)

    return gain


@factor()
def vespo(
    positive_power: float = 2.0, positive_decay: float = 3.0, negative_power: float = 3.0, negative_decay: float = 2.0
) -> GateFn:
    """VESPO: sg[phi(w)] A log pi, phi(w) = w^power exp(decay (1 - w)), with one pair for A >= 0 and one for A < 0.

    w is the ratio of the whole trajectory (sequence_product against the sampler). phi is 1 at w = 1 and fades on both
    sides; below 1e-3 a token counts as clipped. arXiv 2602.10693; TRL.
    """
    shape = (positive_power, positive_decay, negative_power, negative_decay)
    require(min(shape) >= 0, f"vespo: powers and decays {shape} must not be negative, e.g. 2.0, 3.0, 3.0, 2.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        log_w_T = log_ratio_T.detach().clamp(-18.4, 20)
        is_bad_T = tokens.advantages < 0
        power_T = torch.full_like(log_w_T, positive_power).masked_fill(is_bad_T, negative_power)
        decay_T = torch.full_like(log_w_T, positive_decay).masked_fill(is_bad_T, negative_decay)
        phi_T = (power_T * log_w_T + decay_T * (1 - log_w_T.exp())).exp()
        return Gain(phi_T * tokens.advantages * tokens.policy_logprobs, clipped=phi_T < 1e-3)

    return gain


def binary_tv(policy_T: Tensor, anchor_T: Tensor) -> Tensor:
    """|p - q|, from log-probabilities of one token: it against all others."""
    return (policy_T.exp() - anchor_T.exp()).abs()


def binary_kl(policy_T: Tensor, anchor_T: Tensor) -> Tensor:
    """q ln(q/p) + (1 - q) ln((1 - q)/(1 - p)), from log-probabilities; the rests are padded by 1e-8, as in verl."""
    q_T = anchor_T.exp()
    # Rounding can put a probability above 1; the logarithm of a negative rest would be NaN.
    rest_p_T, rest_q_T = ((1 - logprob_T.exp()).clamp(min=0) + 1e-8 for logprob_T in (policy_T, anchor_T))
    return q_T * bounded(anchor_T - policy_T) + (1 - q_T) * (rest_q_T / rest_p_T).log()


def top_k_tv(policy_TK: Tensor, anchor_TK: Tensor) -> Tensor:
    """[T] half the sum of |q - p| over K tokens and the rest of the vocabulary as one event, from log-probabilities."""
    apart_T = (anchor_TK.exp() - policy_TK.exp()).abs().sum(1)
    return (apart_T + (_rest(anchor_TK) - _rest(policy_TK)).abs()) / 2


def top_k_kl(policy_TK: Tensor, anchor_TK: Tensor) -> Tensor:
    """[T] sum of q ln(q/p) over K tokens and the rest of the vocabulary as one event, from log-probabilities."""
    # A keep-set may leave fewer than K tokens possible: -inf - -inf is NaN, which no threshold would notice.
    anchor_TK, policy_TK = anchor_TK.clamp(min=-100), policy_TK.clamp(min=-100)
    inside_T = (anchor_TK.exp() * bounded(anchor_TK - policy_TK)).sum(1)
    rest_q_T, rest_p_T = _rest(anchor_TK), _rest(policy_TK)
    return inside_T + rest_q_T * (rest_q_T / rest_p_T).log()


def _divergence_gate(name: str, distance: Callable[[Tokens], Tensor], low: float, high: float, cap: float) -> GateFn:
    _require_thresholds(name, low, high)
    require(cap >= 1, f"{name}: cap={cap} must be at least 1, e.g. cap=20.0")

    def gain(tokens: Tokens, log_ratio_T: Tensor) -> Gain:
        is_out_T = _moved_too_far(tokens, distance(tokens), low, high)
        ratio_T = log_ratio_T.detach().exp()
        value_T = ratio_T.clamp(max=cap) * ~is_out_T * tokens.advantages * tokens.policy_logprobs
        return Gain(value_T, clipped=is_out_T | (ratio_T > cap))

    return gain


def _moved_too_far(tokens: Tokens, distance_T: Tensor, low: float, high: float) -> Tensor:
    """Where the drawn token moved beyond the threshold in the direction of its advantage; the other way is free."""
    moved_T = tokens.policy_logprobs.detach() - tokens.proximal_logprobs
    is_good_T = tokens.advantages > 0
    return torch.where(is_good_T, (moved_T > 0) & (distance_T > high), (moved_T < 0) & (distance_T > low))


def _drawn(divergence: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tokens], Tensor]:
    return lambda tokens: divergence(tokens.policy_logprobs.detach(), tokens.proximal_logprobs)


def _rest(logprobs_TK: Tensor) -> Tensor:
    return (1 - logprobs_TK.exp().sum(1)).clamp(min=1e-12)


def _require_thresholds(name: str, low: float, high: float) -> None:
    example = "e.g. low=0.15, high=0.15"
    require(low >= 0 and high >= 0, f"{name}: low={low} and high={high} must not be negative, {example}")


def _nowhere(like_T: Tensor) -> Tensor:
    return torch.zeros_like(like_T, dtype=torch.bool)


GATES: dict[str, Callable[..., Gate]] = {
    "none": none,
    "importance": importance,
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "acceptance": acceptance,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_topk": dppo_topk,
    "quad": quad,
    "gmpo": gmpo,
    "vespo": vespo,
}
