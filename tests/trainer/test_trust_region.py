"""A constrained step is the natural gradient scaled to the KL bound, measured after the fact, taken whole or not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.errors import BackendError, UserError
from temper.models.load import prepare
from temper.models.states import Head, hidden_states
from temper.objectives import PRESETS, Objective
from temper.objectives.objective import ConstrainedStep, FisherProduct
from temper.objectives.policy.constrained import conjugate_gradient, trpo
from temper.objectives.policy.gates import importance
from temper.trainer.passes.forward import StepFacts
from temper.trainer.passes.packed_attention import PackedAttention
from temper.trainer.trust_region import constrained_step, fisher_product
from temper.types import Sample

PROGRAM = Path(__file__).with_name("share_program.py")
TEMPERATURE = 0.8
MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]


@pytest.fixture
def speck() -> Any:
    """A model of some 600 parameters, so that its Fisher matrix can be written down."""
    config = LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.4)
    return prepare(model.double())


@pytest.fixture
def few_rows(make_rows: MakeRows) -> list[Sample]:
    """For the speck: tokens of its vocabulary."""
    return [replace(row, token_ids=[t % 7 for t in row.token_ids]) for row in make_rows(num_groups=2, group_size=2)]


def num_drawn(rows: list[Sample]) -> int:
    return sum(row.num_actions for row in rows)


def bits(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def drawn_distributions(model: Any, row: Sample) -> Tensor:
    """Log-probabilities [A, V] of one row alone, by the definition: softmax of logits over temperature."""
    length = len(row.token_ids)
    attend = PackedAttention((length,), torch.device("cpu"))
    hidden = hidden_states(model, torch.tensor(row.token_ids), torch.arange(length), attend)
    places = [place - 1 for place, m in enumerate(row.loss_mask) if m]
    return torch.log_softmax(Head.of(model).logits(hidden[places]) / TEMPERATURE, -1)


def explicit_fisher(model: Any, rows: list[Sample]) -> Tensor:
    """Mean over drawn tokens of sum_v p(v) s s^T, s the gradient of log p(v)."""
    parameters = list(model.parameters())
    size = sum(parameter.numel() for parameter in parameters)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for row in rows:
        for logprobs_V in drawn_distributions(model, row):
            for logprob in logprobs_V:
                score = torch.cat([g.flatten() for g in torch.autograd.grad(logprob, parameters, retain_graph=True)])
                matrix += logprob.detach().exp() * torch.outer(score, score)
    return matrix / num_drawn(rows)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_the_fisher_product_is_that_of_the_explicit_matrix(speck: Any, few_rows: list[Sample]) -> None:
    matrix = explicit_fisher(speck, few_rows)
    num_tokens = num_drawn(few_rows)
    vector = torch.randn(len(matrix), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for budget in (1, 30, 10_000):
        share = pack(few_rows, budget, torch.float64)
        found = fisher_product(speck, share, vector, temperature=TEMPERATURE, num_batch_tokens=num_tokens)
        assert relative_error(found, matrix @ vector) < 1e-5
    # Planted bugs: no temperature, and a mean of the means of two microbatches.
    hot = fisher_product(speck, share, vector, temperature=1.0, num_batch_tokens=num_tokens)
    assert relative_error(hot, matrix @ vector) > 0.05
    halves = [few_rows[:1], few_rows[1:]]
    means = [
        fisher_product(
            speck, pack(half, 999, torch.float64), vector, temperature=TEMPERATURE, num_batch_tokens=num_drawn(half)
        )
        for half in halves
    ]
    assert relative_error((means[0] + means[1]) / 2, matrix @ vector) > 0.05
    assert all(parameter.grad is None for parameter in speck.parameters())


def objective_with(step: ConstrainedStep) -> Objective:
    return replace(PRESETS["grpo"], gate=importance(), step=step)


def take(model: Any, rows: list[Sample], step: ConstrainedStep, budget: int = 64) -> dict[str, float]:
    dtype = next(model.parameters()).dtype
    metrics = constrained_step(
        model,
        pack(rows, budget, dtype),
        objective_with(step),
        temperature=TEMPERATURE,
        facts=StepFacts(num_batch_tokens=num_drawn(rows)),
    )
    return metrics.finish()


def measured_kl(before: Any, after: Any, rows: list[Sample]) -> float:
    with torch.no_grad():
        pairs = [(drawn_distributions(before, row), drawn_distributions(after, row)) for row in rows]
    return sum((old.exp() * (old - new)).sum().item() for old, new in pairs) / num_drawn(rows)


def measured_gain(before: Any, after: Any, rows: list[Sample]) -> float:
    """Sum of weight x advantage x (ratio - 1)."""
    gain = 0.0
    for row in rows:
        places = [place for place, m in enumerate(row.loss_mask) if m]
        ids = torch.tensor([row.token_ids[place] for place in places])
        with torch.no_grad():
            old, new = (drawn_distributions(model, row).gather(1, ids[:, None])[:, 0] for model in (before, after))
        shares = torch.tensor([row.weights[place] * row.advantages[place] for place in places])
        gain += (shares * ((new - old).exp() - 1)).sum().item()
    return gain


@pytest.mark.parametrize("family", ["llama", "tied_llama", "gemma3"])
def test_a_step_stays_within_the_bound_and_gains(make_model: MakeModel, make_rows: MakeRows, family: str) -> None:
    model, rows = make_model(family, torch.float32), make_rows()
    before = deepcopy(model)
    found = take(model, rows, trpo(delta=0.01))
    assert found["policy/trust_accepted"] == 1.0
    assert 1e-4 < found["policy/trust_kl"] <= 0.01
    assert found["policy/trust_kl"] == pytest.approx(measured_kl(before, model, rows), rel=1e-3)
    assert found["policy/trust_improvement"] > 0
    assert found["policy/trust_improvement"] == pytest.approx(measured_gain(before, model, rows), rel=1e-3)
    assert found["policy/ratio_max"] == found["policy/ratio_min"] == 1.0, "metrics of the loss are of the start"
    assert found["loss/total"] == found["loss/policy"]
    assert found["policy/grad_norm"] > 0


def unbounded(step: ConstrainedStep, scale: float = 1.0) -> ConstrainedStep:
    """The full step of `step`, `scale` times, with a bound so wide that the line search takes it as it is."""
    arguments = tuple((name, 1e9 if name == "delta" else value) for name, value in step.arguments)
    return replace(step, arguments=arguments, run=lambda product, gradient: scale * step(product, gradient))


def test_the_full_step_ends_where_the_kl_is_delta(speck: Any, few_rows: list[Sample]) -> None:
    def kl_over_delta(step: ConstrainedStep) -> float:
        return take(deepcopy(speck), few_rows, unbounded(step))["policy/trust_kl"] / 1e-6

    right = trpo(delta=1e-6, iterations=40, damping=1e-5)
    assert kl_over_delta(right) == pytest.approx(1.0, abs=0.02)

    def unscaled(product: FisherProduct, gradient: Tensor) -> Tensor:  # the planted bug: s instead of its multiple
        return conjugate_gradient(lambda v: product(v) + 1e-5 * v, gradient, 40, 1e-6)

    def plain(product: FisherProduct, gradient: Tensor) -> Tensor:  # another: the plain gradient, scaled by its length
        return gradient * (2 * 1e-6) ** 0.5 / gradient.norm()

    for wrong in (unscaled, plain):
        assert abs(kl_over_delta(replace(right, run=wrong)) - 1) > 0.3


def test_the_natural_gradient_gains_more_than_the_plain_one_at_equal_kl(speck: Any, few_rows: list[Sample]) -> None:
    natural = take(deepcopy(speck), few_rows, unbounded(trpo(delta=1e-6, iterations=40, damping=1e-5)))

    def plain(product: FisherProduct, gradient: Tensor) -> Tensor:
        return gradient * (2 * 1e-6 / (gradient @ product(gradient))).sqrt()

    other = take(deepcopy(speck), few_rows, unbounded(replace(trpo(), run=plain)))
    assert other["policy/trust_kl"] == pytest.approx(1e-6, rel=0.02)
    assert natural["policy/trust_improvement"] > 1.1 * other["policy/trust_improvement"]


def scaled(step: ConstrainedStep, scale: float) -> ConstrainedStep:
    return replace(step, run=lambda product, gradient: scale * step(product, gradient))


def test_a_step_that_is_too_long_is_shortened_until_it_fits(make_model: MakeModel, make_rows: MakeRows) -> None:
    model, rows = make_model(dtype=torch.float32), make_rows()
    before = deepcopy(model)
    found = take(model, rows, scaled(trpo(delta=1e-3, iterations=4, damping=1e-3, backtrack=0.5), 6.0))
    assert found["policy/trust_accepted"] == 1.0
    assert 1 <= found["policy/trust_backtracks"] <= 4
    assert 0 < measured_kl(before, model, rows) <= 1e-3 * 1.001


@pytest.mark.parametrize(
    ("scale", "why"), [(-1.0, "the gain shrinks"), (1e4, "the KL is too large"), (float("nan"), "nothing is known")]
)
def test_a_rejected_step_restores_every_bit(make_model: MakeModel, make_rows: MakeRows, scale: float, why: str) -> None:
    model = make_model(dtype=torch.float32)
    with torch.no_grad():
        next(model.parameters())[0, 0] = -0.0
    before = bits(model)
    found = take(model, make_rows(), scaled(trpo(iterations=2, tries=2), scale))
    assert found["policy/trust_accepted"] == 0.0, why
    assert found["policy/trust_kl"] == found["policy/trust_improvement"] == 0.0
    assert found["policy/trust_backtracks"] == 2.0
    assert is_same(before, bits(model))
    assert torch.signbit(next(model.parameters())[0, 0])


def test_an_error_during_the_search_restores_every_bit(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(dtype=torch.float32)
    before = bits(model)

    def fail(_start: Any, moved: Any) -> tuple[float, float]:
        assert not is_same(before, bits(moved))
        raise MemoryError("out of memory")

    monkeypatch.setattr("temper.trainer.trust_region._Start.measure", fail)
    with pytest.raises(MemoryError):
        take(model, make_rows(), trpo(iterations=1))
    assert is_same(before, bits(model))


def test_a_batch_without_credit_moves_nothing(make_model: MakeModel, make_rows: MakeRows) -> None:
    model = make_model(dtype=torch.float32)
    before = bits(model)
    rows = [replace(row, advantages=[0.0] * len(row.token_ids)) for row in make_rows()]
    assert take(model, rows, trpo())["policy/trust_accepted"] == 0.0
    assert is_same(before, bits(model))


def test_a_gradient_that_is_not_finite_stops_before_anything_moves(make_model: MakeModel, make_rows: MakeRows) -> None:
    model = make_model(dtype=torch.float32)
    before = bits(model)
    rows = [replace(row, advantages=[float("nan")] * len(row.token_ids)) for row in make_rows()]
    with pytest.raises(BackendError, match=r"trpo: loss nan, gradient norm nan. No step was taken"):
        take(model, rows, trpo())
    assert is_same(before, bits(model))


def test_bfloat16_is_refused(make_model: MakeModel, make_rows: MakeRows) -> None:
    with pytest.raises(UserError, match=r'bfloat16.*Set model.dtype = "float32"'):
        take(make_model(dtype=torch.bfloat16), make_rows(), trpo())


def test_several_updates_keep_the_proximal_policy_they_were_given(speck: Any, few_rows: list[Sample]) -> None:
    """The second step of a batch starts away from the proximal policy: ratios differ from 1 there."""
    with_old = []
    for row in few_rows:
        logprobs = iter(drawn_distributions(speck, row).detach())
        ids = zip(row.token_ids, row.loss_mask, strict=True)
        with_old.append(replace(row, proximal_logprobs=[next(logprobs)[i].item() if m else 0.0 for i, m in ids]))
    first = take(speck, with_old, trpo())
    assert first["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    before = deepcopy(speck)
    second = take(speck, with_old, trpo())
    assert second["policy/trust_accepted"] == 1.0
    assert second["policy/ratio_max"] > 1.01
    assert second["policy/trust_kl"] == pytest.approx(measured_kl(before, speck, few_rows), rel=1e-3)


@pytest.mark.parametrize("budget", [1, 10_000])
def test_a_step_does_not_depend_on_the_partition(speck: Any, few_rows: list[Sample], budget: int) -> None:
    first, second = speck, deepcopy(speck)
    expected, found = take(first, few_rows, trpo(), 30), take(second, few_rows, trpo(), budget)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)
    for a, b in zip(bits(first), bits(second), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.heavy
def test_two_ranks_equal_one(
    speck: Any, few_rows: list[Sample], tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    """With a budget of 10,000 there is one microbatch, and the second rank has an empty share."""
    budgets = (20, 10_000)
    packed = [pack(few_rows, budget, torch.float64) for budget in budgets]
    assert [len(share) for share in packed] == [4, 1]
    cases = [("trust_region", speck, share, num_drawn(few_rows), TEMPERATURE) for share in packed]
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps(cases))
    run_ranks(PROGRAM, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = deepcopy(speck)
    expected = take(alone, few_rows, trpo())
    for (weights, metrics), (other_weights, other_metrics) in zip(first, second, strict=True):
        assert is_same(weights, other_weights), "ranks must not drift apart"
        assert metrics == other_metrics == pytest.approx(expected, rel=1e-5, abs=1e-8)
        for a, b in zip(bits(alone), weights, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
