"""Values (table F1-L) and gradient weights (table F1-W) of every gate on F1, clip metrics, absurd log-ratios."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from temper.errors import UserError
from temper.objectives import Tokens, TopTokens
from temper.objectives.advantage.advantages import raw
from temper.objectives.objective import PolicyObjective, objective_loss
from temper.objectives.policy.corrections import token_tis
from temper.objectives.policy.gates import (
    GATES,
    acceptance,
    binary_kl,
    binary_tv,
    cispo,
    clip,
    dppo_kl,
    dppo_topk,
    dppo_tv,
    gmpo,
    importance,
    none,
    quad,
    sapo,
    top_k_kl,
    top_k_tv,
    vespo,
)
from temper.objectives.policy.proximals import behavior, trainer
from temper.objectives.policy.ratios import (
    RATIOS,
    sequence_geometric,
    sequence_geometric_token,
    sequence_product,
    token,
)
from temper.objectives.policy.weighting import constant_length, sequence_mean, sequence_sum, token_mean, token_sum

WEIGHTINGS = (token_mean(), sequence_mean(), sequence_sum(), constant_length(length=4))
S1, S4 = 1.049206, 2.109502

LOSSES = [
    (token(), none(), trainer(), (0.122928, -0.077235, 0.245855, 0.061464)),
    (token(), importance(), trainer(), (-0.113125, 0.161875, -0.22625, -0.056563)),
    (token(), clip(), trainer(), (-0.019375, 0.236875, -0.03875, -0.009688)),
    (token(), clip(high=0.28), trainer(), (-0.034375, 0.226875, -0.06875, -0.017188)),
    (token(), clip(high=0.28, dual=3.0), trainer(), (-0.159375, 0.101875, -0.31875, -0.079688)),
    (token(), clip(dual=4.0), trainer(), (-0.081875, 0.174375, -0.16375, -0.040938)),
    (token(), cispo(cap=1.28), trainer(), (0.308235, 0.106335, 0.616471, 0.154118)),
    (token(), sapo(), trainer(), (-0.523100, -0.004559, -1.046200, -0.261550)),
    (sequence_geometric(), clip(), trainer(), (-0.157740, 0.107736, -0.315481, -0.078870)),
    (sequence_geometric_token(), clip(), trainer(), (-0.157740, 0.107736, -0.315481, -0.078870)),
    (token(), gmpo(), trainer(), (-0.159577, 0.105541, -0.319154, -0.079788)),
    (token(), dppo_tv(), behavior(), (-0.001102, -0.257229, -0.002205, -0.000551)),
    (token(), dppo_kl(), behavior(), (-0.461906, -0.576943, -0.923812, -0.230953)),
    (sequence_product(), vespo(), trainer(), (0.452928, 0.283190, 0.905857, 0.226464)),
]
"""Table F1-L. VESPO's row takes its product from pi/pi_old."""

OMEGAS = [
    (token(), none(), trainer(), [1.0] * 8),
    (token(), importance(), trainer(), [1.1, 1.5, 0.7, 0.9, 0.2, 1.1, 5, 0.89]),
    (token(), importance(cap=1.28), trainer(), [1.1, 0, 0.7, 0.9, 0.2, 1.1, 0, 0.89]),
    (token(), clip(), trainer(), [1.1, 0, 0.7, 0.9, 0, 1.1, 5, 0.89]),
    (token(), clip(high=0.28), trainer(), [1.1, 0, 0.7, 0.9, 0, 1.1, 5, 0.89]),
    (token(), clip(high=0.28, dual=3.0), trainer(), [1.1, 0, 0.7, 0.9, 0, 1.1, 0, 0.89]),
    (token(), clip(dual=4.0), trainer(), [1.1, 0, 0.7, 0.9, 0, 1.1, 0, 0.89]),
    (token(), cispo(cap=1.28), trainer(), [1.1, 1.28, 0.7, 0.9, 0.2, 1.1, 1.28, 0.89]),
    (token(), cispo(cap=1.28, low=0.8), trainer(), [1.1, 1.28, 0.8, 0.9, 0.8, 1.1, 1.28, 0.89]),
    (
        token(),
        sapo(),
        trainer(),
        [1.097255, 1.410022, 0.684483, 0.897524, 0.168489, 1.096974, 0.291115, 0.887038],
    ),
    (sequence_geometric(), clip(), trainer(), [S1, S1, S1, 0, 0, 1.1, S4, S4]),
    (sequence_geometric_token(), clip(), trainer(), [S1, S1, S1, 0, 0, 1.1, S4, S4]),
    (token(), gmpo(), trainer(), [1.047296, 0, 1.047296, 0.776716, 0, 1.1, S4, S4]),
    (token(), dppo_tv(), behavior(), [1.145833, 1.875, 0.8, 0.9, 1, 1.073171, 5, 0]),
    (token(), dppo_kl(), behavior(), [1.145833, 0, 0.8, 0.9, 1, 1.073171, 5, 0.741667]),
    (token(), quad(low=0.15, high=0.15), behavior(), [1.145833, 1.875, 0.8, 0.9, 1, 1.073171, 5, 0]),
    (token(), dppo_tv(cap=1.5), behavior(), [1.145833, 1.5, 0.8, 0.9, 1, 1.073171, 1.5, 0]),
    (sequence_product(), vespo(), trainer(), [0.837948] * 3 + [0.030065] * 2 + [1.089731] + [0.088807] * 2),
]
"""Table F1-W: the weight of each token in the gradient."""


def objective(ratio, gate, weighting, *, proximal=None, corrections=()):
    parts = {"advantage": raw(), "ratio": ratio, "gate": gate, "weighting": weighting, "corrections": corrections}
    return PolicyObjective(name="test", proximal=proximal or trainer(), **parts)


def omegas(tokens: Tokens, ratio, gate, proximal) -> list[float]:
    objective_loss(objective(ratio, gate, token_sum(), proximal=proximal), tokens)[0].backward()
    return (-tokens.policy_logprobs.grad / tokens.advantages).tolist()


def with_likely_tokens(tokens: Tokens, num_likely: int = 20) -> Tokens:
    """Tokens that carry everything that any gate, ratio or emphasis may ask for."""
    count = len(tokens)
    likely_TK = torch.full((count, num_likely), -4.0, dtype=tokens.policy_logprobs.dtype)
    top = TopTokens(
        ids=torch.arange(num_likely).expand(count, -1),
        anchor_logprobs=likely_TK,
        policy_logprobs=likely_TK.clone().requires_grad_(),
    )
    entropy_T = torch.linspace(0, 1, count, dtype=likely_TK.dtype)
    return dataclasses.replace(tokens, top=top, entropy=entropy_T, router_shift=torch.zeros_like(entropy_T))


@pytest.mark.parametrize(("ratio", "gate", "proximal", "expected"), LOSSES, ids=str)
def test_losses_on_f1_under_four_weightings(f1, ratio, gate, proximal, expected) -> None:
    got = [
        objective_loss(objective(ratio, gate, weighting, proximal=proximal), f1(weighting=weighting))[0].item()
        for weighting in WEIGHTINGS
    ]
    assert got == pytest.approx(expected, abs=1.1e-6)


def test_clip_times_token_tis_on_f1(f1) -> None:
    got = [
        objective_loss(objective(token(), clip(), weighting, corrections=(token_tis(),)), f1(weighting=weighting))[0]
        for weighting in WEIGHTINGS
    ]
    assert [loss.item() for loss in got] == pytest.approx((-0.063916, 0.218521, -0.127833, -0.031958), abs=1.1e-6)


@pytest.mark.parametrize(("ratio", "gate", "proximal", "expected"), OMEGAS, ids=str)
def test_gradient_weights_on_f1(f1, ratio, gate, proximal, expected) -> None:
    assert omegas(f1(), ratio, gate, proximal) == pytest.approx(expected, abs=1.1e-6)


def test_the_table_of_gradient_weights_rejects_a_gate_with_its_signs_exchanged(f1) -> None:
    # A mutant of clip that bounds from the wrong side: maximum in place of minimum.
    tokens = f1()
    ratio_T = token()(tokens).exp()
    torch.maximum(ratio_T * tokens.advantages, ratio_T.clamp(0.8, 1.2) * tokens.advantages).sum().backward()
    omega_T = tokens.policy_logprobs.grad / tokens.advantages
    assert omega_T.tolist() != pytest.approx([1.1, 0, 0.7, 0.9, 0, 1.1, 5, 0.89], abs=1e-3)


def test_gmpo_clipped_in_probabilities_would_miss_the_table(f1) -> None:
    # A mutant that bounds the trajectory's mean and not each token's log-ratio.
    tokens = f1(weighting=sequence_mean())
    mean_T = tokens.mean_by_trajectory(token()(tokens))[tokens.trajectory_ids]
    loss = -(mean_T.clamp(-0.4, 0.4).exp() * tokens.advantages * tokens.weights).sum()
    assert loss.item() != pytest.approx(0.105541, abs=1e-3)


def test_loss_matrix_of_clip_on_f1(f1) -> None:
    tokens = f1()
    matrix = -clip()(tokens, token()(tokens)).value
    assert matrix.tolist() == pytest.approx([-1.65, -1.8, -1.05, 0.45, 0.4, 0.55, 2.5, 0.445])


def test_clip_stops_gradient_only_where_the_update_already_went_too_far(f1) -> None:
    # Ratios 1.5 and 0.5, band [0.8, 1.2]: for A = +1 the first went too far, for A = -1 the second.
    # The other two moved the wrong way and must keep their gradient.
    for advantage, frozen in ((1.0, [True, False]), (-1.0, [False, True])):
        log_ratio_T = torch.tensor([1.5, 0.5] * 4, dtype=torch.float64).log().requires_grad_()
        tokens = f1(advantages=torch.full((8,), advantage, dtype=torch.float64))
        gain = clip()(tokens, log_ratio_T)
        gain.value.sum().backward()
        assert (log_ratio_T.grad == 0).tolist() == frozen * 4
        assert gain.clipped.tolist() == frozen * 4


@pytest.mark.parametrize("bound", [1.3, 3.0, 4.0])
def test_dual_clip_and_two_sided_delta_are_the_same_function(bound) -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio_T = torch.randn(2000, generator=generator, dtype=torch.float64) * 1.5
    advantages_T = torch.randn(2000, generator=generator, dtype=torch.float64)
    tokens = tokens_of(policy=log_ratio_T, advantages=advantages_T)
    ratio_T = token()(tokens).exp()
    two_sided_T = torch.minimum(ratio_T.clamp(max=bound) * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
    dual_T = clip(dual=bound)(tokens, token()(tokens)).value
    assert torch.equal(dual_T, two_sided_T)
    gradients = [torch.autograd.grad(value_T.sum(), tokens.policy_logprobs)[0] for value_T in (dual_T, two_sided_T)]
    assert torch.equal(*gradients)


def test_the_comparison_with_delta_rejects_plain_clip() -> None:
    tokens = tokens_of(policy=torch.tensor([1.5]), advantages=torch.tensor([-1.0]))
    assert clip()(tokens, token()(tokens)).value != clip(dual=4.0)(tokens, token()(tokens)).value


def tokens_of(*, policy, advantages, proximal=None, **fields) -> Tokens:
    """One trajectory; the proximal policy at log-probability 0 unless given."""
    count = len(policy)
    anchor = torch.zeros_like(policy) if proximal is None else proximal
    return Tokens(
        policy_logprobs=policy.clone().requires_grad_(),
        proximal_logprobs=anchor,
        behavior_logprobs=anchor,
        advantages=advantages,
        weights=torch.ones_like(policy),
        trajectory_ids=torch.zeros(count, dtype=torch.int64),
        num_trajectories=1,
        num_batch_tokens=count,
        versions=torch.zeros(count, dtype=torch.int64),
        **fields,
    )


@pytest.mark.parametrize("is_mutant", [False, True], ids=["cispo", "without stop-gradient"])
def test_finite_differences_of_cispo_hold_only_with_the_stop_gradient(f1, is_mutant) -> None:
    # With the ratios frozen at F1, the numeric slope of the gain must be the analytic gradient.
    start, frozen_T, step = f1().policy_logprobs.detach(), token()(f1()).detach(), 1e-6

    def value(policy_T: torch.Tensor) -> torch.Tensor:
        return cispo(cap=1.28)(f1(policy_logprobs=policy_T), frozen_T).value.sum()

    numeric = []
    for place in range(8):
        nudge_T = torch.zeros(8, dtype=torch.float64)
        nudge_T[place] = step
        numeric.append(((value(start + nudge_T) - value(start - nudge_T)) / (2 * step)).item())
    tokens = f1()
    if is_mutant:
        value_T = token()(tokens).exp().clamp(max=1.28) * tokens.advantages * tokens.policy_logprobs
    else:
        value_T = cispo(cap=1.28)(tokens, token()(tokens)).value
    value_T.sum().backward()
    is_close = tokens.policy_logprobs.grad.tolist() == pytest.approx(numeric, abs=1e-6)
    assert is_close is not is_mutant


@pytest.mark.parametrize("gate", [cispo(), dppo_tv(), dppo_kl(), dppo_topk(k=2), vespo()], ids=str)
def test_multipliers_of_log_probability_forms_carry_no_gradient(f1, gate) -> None:
    # These forms are constant x A log pi: the gain is linear in log pi, so value = gradient x log pi for every token.
    tokens = with_likely_tokens(f1())
    gain = gate(tokens, token()(tokens))
    gain.value.sum().backward()
    assert gain.value.tolist() == pytest.approx((tokens.policy_logprobs.grad * tokens.policy_logprobs).tolist())
    assert tokens.top.policy_logprobs.grad is None


def test_clip_fractions_count_only_what_lost_its_gradient(f1) -> None:
    metrics = objective_loss(objective(token(), clip(), token_mean()), f1())[1].finish()
    assert metrics["policy/clip_frac_high"] == 0.125
    assert metrics["policy/clip_frac_low"] == 0.125
    assert metrics["policy/dual_clip_frac"] == 0
    # What a metric of "outside the band" would say: the mutation.
    ratio_T = token()(f1()).exp()
    assert ((ratio_T > 1.2) | (ratio_T < 0.8)).double().mean().item() == 0.5


def test_dual_clip_is_counted_on_its_own(f1) -> None:
    metrics = objective_loss(objective(token(), clip(dual=3.0), token_mean()), f1())[1].finish()
    fractions = [metrics[f"policy/{name}"] for name in ("clip_frac_high", "clip_frac_low", "dual_clip_frac")]
    assert fractions == [0.125, 0.125, 0.125]


@pytest.mark.parametrize(
    ("gate", "proximal", "clipped"),
    [
        (importance(), trainer(), []),
        (importance(cap=1.28), trainer(), [1, 6]),
        (cispo(cap=1.28, low=0.8), trainer(), [1, 2, 4, 6]),
        (sapo(), trainer(), []),
        (acceptance(), trainer(), []),
        (dppo_tv(), behavior(), [7]),
        (dppo_tv(cap=1.5), behavior(), [1, 6, 7]),
        (dppo_tv(low=0.09, high=0.09), behavior(), [1, 7]),
        (dppo_tv(low=0.09, high=0.09), trainer(), [1]),
        (dppo_kl(), behavior(), [1]),
        (quad(), behavior(), []),
        (gmpo(), trainer(), [1, 4]),
    ],
    ids=str,
)
def test_clipped_marks_the_tokens_a_gate_bounded(f1, gate, proximal, clipped) -> None:
    tokens = f1()
    tokens = dataclasses.replace(tokens, proximal_logprobs=proximal(tokens))
    assert gate(tokens, token()(tokens)).clipped.nonzero()[:, 0].tolist() == clipped


def test_vespo_counts_trajectories_that_faded_away_as_clipped(f1) -> None:
    tokens = f1()
    log_ratio_T = torch.tensor([0.0] * 3 + [-3.0] * 2 + [3.0] + [0.0] * 2, dtype=torch.float64)
    assert vespo()(tokens, log_ratio_T).clipped.tolist() == [False] * 3 + [True] * 3 + [False] * 2


# mu and pi over four tokens, of which the first was drawn: DPPO.
ANCHOR = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
POLICY = torch.tensor([[0.4, 0.25, 0.25, 0.10]], dtype=torch.float64).log()


def test_divergences_on_the_worked_example() -> None:
    assert binary_tv(POLICY[:, 0], ANCHOR[:, 0]).item() == pytest.approx(0.1, abs=1e-6)
    assert binary_kl(POLICY[:, 0], ANCHOR[:, 0]).item() == pytest.approx(0.020411, abs=1e-6)
    assert top_k_tv(POLICY[:, :2], ANCHOR[:, :2]).item() == pytest.approx(0.15, abs=1e-6)
    assert top_k_kl(POLICY[:, :2], ANCHOR[:, :2]).item() == pytest.approx(0.054345, abs=1e-6)


def test_top_k_divergences_over_the_whole_vocabulary_are_exact() -> None:
    assert top_k_tv(POLICY, ANCHOR).item() == pytest.approx(0.15, abs=1e-6)
    assert top_k_kl(POLICY, ANCHOR).item() == pytest.approx(0.054987, abs=1e-6)
    # The two directions of KL differ; exchanged arguments must not pass.
    assert top_k_kl(ANCHOR, POLICY).item() != pytest.approx(0.054987, abs=1e-4)
    assert binary_kl(ANCHOR[:, 0], POLICY[:, 0]).item() != pytest.approx(0.020411, abs=1e-6)


def test_divergences_stay_numbers_where_a_token_is_certain_or_impossible() -> None:
    impossible, certain = torch.tensor([-float("inf")]), torch.tensor([1e-7])
    for policy_T, anchor_T in ((certain, certain), (impossible, certain), (certain, impossible)):
        assert binary_kl(policy_T, anchor_T).isfinite().all()
    kept_TK = torch.tensor([[0.0, -float("inf")]])
    assert top_k_kl(kept_TK, kept_TK).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("divergence", "below", "above"), [("tv", 0.149999, 0.150001), ("kl", 0.054344, 0.054346)], ids=["tv", "kl"]
)
def test_top_k_gate_masks_by_the_worked_divergence_and_only_in_the_direction_of_the_advantage(
    divergence, below, above
) -> None:
    def omega(low: float, advantage: float) -> float:
        top = TopTokens(ids=torch.arange(4)[None], anchor_logprobs=ANCHOR, policy_logprobs=POLICY)
        advantages = torch.tensor([advantage], dtype=torch.float64)
        tokens = tokens_of(policy=POLICY[:, 0], proximal=ANCHOR[:, 0], advantages=advantages, top=top)
        return omegas(tokens, token(), dppo_topk(divergence=divergence, k=2, low=low, high=0.0), behavior())[0]

    # The drawn token fell from 0.5 to 0.4, so only A < 0 has pushed it there.
    assert omega(below, -1.0) == 0
    assert omega(above, -1.0) == pytest.approx(0.8)
    assert omega(below, +1.0) == pytest.approx(0.8)


def test_top_k_thresholds_default_to_those_of_the_binary_forms(f1) -> None:
    top = TopTokens(ids=torch.arange(4)[None], anchor_logprobs=ANCHOR, policy_logprobs=POLICY)
    tokens = tokens_of(
        policy=POLICY[:, 0], proximal=ANCHOR[:, 0], advantages=-torch.ones(1, dtype=torch.float64), top=top
    )
    # KL 0.054345 exceeds 0.05; TV over the first token alone is 0.1 and stays below 0.15.
    assert dppo_topk(divergence="kl", k=2)(tokens, token()(tokens)).clipped.tolist() == [True]
    assert dppo_topk(divergence="tv", k=1)(tokens, token()(tokens)).clipped.tolist() == [False]


def test_acceptance_is_a_gate_into_the_unit_interval_and_a_scaled_sapo(f1) -> None:
    tokens = f1()
    log_ratio_T = token()(tokens)
    for sharpness in (1.0, 4.0, 7.0):
        accepted_T = acceptance(sharpness)(tokens, log_ratio_T).value / tokens.advantages
        assert ((accepted_T >= 0) & (accepted_T <= 1)).all()
        soft_T = sapo(sharpness, sharpness)(tokens, log_ratio_T).value / tokens.advantages
        assert accepted_T.tolist() == pytest.approx((sharpness / 4 * soft_T).tolist())


def test_vespo_bounds_the_log_of_the_product(f1) -> None:
    # With power 1 and no decay phi is w itself, so the clamp to [-18.4, 20] shows.
    tokens = f1()
    for log_w, expected in ((-1000.0, math.exp(-18.4)), (1000.0, math.exp(20))):
        gain = vespo(1.0, 0.0, 1.0, 0.0)(tokens, torch.full((8,), log_w, dtype=torch.float64))
        phi_T = gain.value / tokens.advantages / tokens.policy_logprobs
        assert phi_T.tolist() == pytest.approx([expected] * 8)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("gap", [1000.0, -1000.0])
def test_a_log_ratio_of_1000_gives_a_finite_value_and_gradient(f1, ratio, gate, gap) -> None:
    tokens = with_likely_tokens(f1(dtype=torch.float32))
    tokens = dataclasses.replace(tokens, proximal_logprobs=tokens.policy_logprobs.detach() - gap)
    loss, _ = objective_loss(objective(RATIOS[ratio](), GATES[gate](), token_mean()), tokens)
    loss.backward()
    assert loss.isfinite()
    assert tokens.policy_logprobs.grad.isfinite().all()


def test_an_unbounded_ratio_would_not_be_finite(f1) -> None:
    # The mutation: the same gate on a raw difference of logs.
    tokens = f1(dtype=torch.float32)
    gain = importance()(tokens, tokens.policy_logprobs + 1000)
    assert not gain.value.isfinite().any()


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("gate", GATES)
def test_a_microbatch_without_tokens_gives_a_zero_that_is_still_in_the_graph(f1, ratio, gate) -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    empty = dataclasses.replace(tokens_of(policy=nothing, advantages=nothing), num_trajectories=2, num_batch_tokens=8)
    loss, _ = objective_loss(objective(RATIOS[ratio](), GATES[gate](), token_mean()), with_likely_tokens(empty))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("gate", GATES)
def test_trajectories_of_one_token_have_the_same_loss_at_every_ratio_level(f1, gate) -> None:
    tokens = with_likely_tokens(f1(trajectory_ids=torch.arange(8), num_trajectories=8))
    losses = [
        objective_loss(objective(RATIOS[ratio](), GATES[gate](), token_mean()), tokens)[0].item() for ratio in RATIOS
    ]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-12)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (clip, {"low": -0.1}),
        (clip, {"high": -1.0}),
        (clip, {"dual": 1.1}),
        (importance, {"cap": 0.5}),
        (cispo, {"cap": 0.0}),
        (cispo, {"low": 5.0}),
        (sapo, {"positive": 0.0}),
        (acceptance, {"sharpness": 0.0}),
        (dppo_tv, {"low": -0.1}),
        (dppo_kl, {"cap": 0.5}),
        (dppo_topk, {"divergence": "js"}),
        (dppo_topk, {"k": 0}),
        (dppo_topk, {"high": -1.0}),
        (quad, {"high": -0.1}),
        (gmpo, {"band": 0.0}),
        (vespo, {"negative_decay": -1.0}),
    ],
)
def test_gates_refuse_bounds_that_mean_nothing_and_name_themselves(build, arguments) -> None:
    with pytest.raises(UserError, match=build.__name__):
        build(**arguments)


def test_every_gate_is_registered_under_its_own_name() -> None:
    assert all(build().name == name for name, build in GATES.items())


def test_only_gates_without_public_constants_are_experimental() -> None:
    assert {name for name, build in GATES.items() if build().experimental} == {"acceptance", "dppo_topk"}
    assert {name for name, build in GATES.items() if build().needs} == {"dppo_topk"}
