"""The gradient of a batch is a function of its rows: not of microbatches, order, packing or checkpointing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from temper.batching.pack import pack
from temper.models import decoder, states
from temper.objectives import PRESETS, Extent, MetricSums, Objective, resolve
from temper.trainer.passes.forward import StepFacts, checkpointing, enable_checkpointing, forward_backward, score_drawn
from temper.trainer.passes.scoring import spread
from temper.types import Microbatch, Sample

REGULARIZED = resolve(
    "grpo",
    {"regularizers": [{"name": "kl", "coefficient": 0.1}, {"name": "entropy_bonus", "coefficient": 0.05}]},
)
OBJECTIVES = {name: PRESETS[name] for name in ("reinforce", "rloo", "grpo", "dr_grpo", "gspo", "cispo")}
OBJECTIVES["regularized"] = REGULARIZED
Gradients = dict[str, torch.Tensor]


def weighted(rows: Sequence[Sample], objective: Objective) -> list[Sample]:
    """Rows with the weights that the objective's weighting gives their trajectories."""
    keys = sorted({(row.group_id, row.index) for row in rows})
    groups = sorted({row.group_id for row in rows})
    lengths = [sum(row.num_actions for row in rows if (row.group_id, row.index) == key) for key in keys]
    group_ids = [groups.index(group_id) for group_id, _ in keys]
    extent = Extent(lengths=torch.tensor(lengths), group_ids=torch.tensor(group_ids), max_new_tokens=16)
    weights = objective.weighting(extent).tolist()
    by_key = dict(zip(keys, weights, strict=True))
    return [replace(row, weights=[by_key[row.group_id, row.index] * m for m in row.loss_mask]) for row in rows]


def off_policy(model: Any, rows: Sequence[Sample]) -> list[Sample]:
    """Rows whose proximal, behaviour and reference policies differ from the policy, so that gates and bounds act."""
    draw = random.Random(1)
    result = []
    for row in rows:
        (microbatch,) = pack([row], 1000, torch.float64)
        with torch.no_grad():
            policy = spread(score_drawn(model, microbatch, 1.0).logprobs, microbatch).tolist()
        noisy = [[(p + draw.uniform(-0.5, 0.5)) * m for p, m in zip(policy, row.loss_mask, strict=True)] for _ in "abc"]
        result.append(replace(row, proximal_logprobs=noisy[0], reference_logprobs=noisy[1], behavior_logprobs=noisy[2]))
    return result


def train(
    model: Any,
    rows: Sequence[Sample],
    objective: Objective,
    budget: int,
    mutate: Callable[[Microbatch, int], Microbatch] = lambda microbatch, _: microbatch,
) -> tuple[Gradients, dict[str, float]]:
    """Gradients and finished metrics of one batch in microbatches of `budget` tokens."""
    model.zero_grad()
    metrics = MetricSums()
    microbatches = pack(rows, budget, torch.float64)
    total = sum(row.num_actions for row in rows)
    for microbatch in microbatches:
        mutated = mutate(microbatch, len(microbatches))
        _, sums = forward_backward(model, mutated, objective, temperature=0.8, facts=StepFacts(num_batch_tokens=total))
        metrics = metrics.merge(sums)
    return {name: p.grad.clone() for name, p in model.named_parameters()}, metrics.finish()


def difference(first: tuple[Gradients, dict[str, float]], second: tuple[Gradients, dict[str, float]]) -> float:
    """Largest difference of any gradient element, relative to the largest, or of any metric."""
    assert first[1].keys() == second[1].keys()
    scale = max(g.abs().max().item() for g in first[0].values())
    by_gradient = max((first[0][name] - second[0][name]).abs().max().item() / scale for name in first[0])
    return max(by_gradient, *(abs(first[1][name] - second[1][name]) for name in first[1]))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_and_metrics_do_not_depend_on_microbatches_or_order(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], name: str
) -> None:
    model, objective = make_model(), OBJECTIVES[name]
    rows = off_policy(model, weighted(make_rows(), objective))
    whole = train(model, rows, objective, budget=10_000)
    assert max(g.abs().max().item() for g in whole[0].values()) > 1e-3
    for budget in (1, 20, 40, 64):
        for seed in range(2):
            shuffled = random.Random(seed).sample(rows, len(rows))
            assert difference(whole, train(model, shuffled, objective, budget)) < 1e-10


def divided_by_microbatches(microbatch: Microbatch, num_microbatches: int) -> Microbatch:
    return replace(microbatch, weights=microbatch.weights / num_microbatches)


def mean_of_microbatch(microbatch: Microbatch, num_microbatches: int) -> Microbatch:
    return replace(microbatch, weights=microbatch.weights / microbatch.weights.sum() / num_microbatches)


def attending_across_rows(microbatch: Microbatch, num_microbatches: int) -> Microbatch:
    return replace(microbatch, lengths=(sum(microbatch.lengths),), teachers=(), rows=())


@pytest.mark.parametrize("mutate", [divided_by_microbatches, mean_of_microbatch, attending_across_rows])
def test_the_check_of_invariance_sees_planted_faults(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], mutate: Any
) -> None:
    model, objective = make_model(), PRESETS["dapo"]
    model.config.max_position_embeddings = 10_000  # rows taken for one are a long one
    rows = off_policy(model, weighted(make_rows(), objective))
    if mutate is attending_across_rows:  # num_trajectories is the number of rows; one row would be too few
        rows = [replace(row, group_id="g", index=0) for row in rows]
    whole = train(model, rows, objective, budget=10_000)
    budget = 10_000 if mutate is attending_across_rows else 30
    assert difference(whole, train(model, rows, objective, budget, mutate)) > 1e-3


def test_a_sequence_ratio_sees_a_trajectory_that_was_torn_over_microbatches(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model, objective = make_model(), PRESETS["rloo"]
    rows = off_policy(model, weighted(make_rows(), objective))
    torn = [replace(row, index=place) for place, row in enumerate(rows)]
    whole, apart = (train(model, some, objective, budget=1) for some in (rows, torn))
    assert difference(whole, apart) > 1e-3


def test_tokens_that_were_not_drawn_have_exactly_no_influence_as_targets(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model, objective = make_model(), PRESETS["grpo"]
    rows = make_rows()
    # The last token of a row is never an input to a scored one: as an observation it may be anything.
    observed = [replace(row, **_longer_by(row, token=3)) for row in rows]
    other = [replace(row, **_longer_by(row, token=4)) for row in rows]
    first, second = (train(model, some, objective, budget=10_000) for some in (observed, other))
    embedding = first[0].pop("model.embed_tokens.weight"), second[0].pop("model.embed_tokens.weight")
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    torch.testing.assert_close(*embedding, rtol=0, atol=1e-15)
    # Unscored positions get a gradient of exactly 0 even where their advantage and weight are not 0.
    loud = [replace(row, advantages=[9.0 if not m else a for m, a in zip(row.loss_mask, row.advantages, strict=True)],
                    weights=[9.0 if not m else w for m, w in zip(row.loss_mask, row.weights, strict=True)])
            for row in observed]  # fmt: skip
    third = train(model, loud, objective, budget=10_000)[0]
    assert all(torch.equal(first[0][name], third[name]) for name in first[0])


def _longer_by(row: Sample, token: int) -> dict[str, Any]:
    columns = {name: [*getattr(row, name), 0] for name in ("loss_mask", "behavior_logprobs", "advantages", "weights")}
    return {**columns, "token_ids": [*row.token_ids, token], "versions": [*row.versions, -1]}


def test_a_row_in_a_pack_gets_the_same_bits_whatever_its_neighbours_say(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model = make_model(dtype=torch.float32)
    rows = make_rows()
    changed = [replace(rows[0], token_ids=[(t + 1) % 40 for t in rows[0].token_ids]), *rows[1:]]
    scores = []
    for some in (rows, changed):
        (microbatch,) = pack(some, 10_000)
        values = spread(score_drawn(model, microbatch, 1.0).logprobs.detach(), microbatch)
        scores.append(dict(enumerate(torch.split(values, list(microbatch.lengths)))))
    differing = [place for place in scores[0] if not torch.equal(scores[0][place], scores[1][place])]
    assert len(differing) == 1


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_single_update_has_ratio_exactly_one_and_clips_nothing(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], name: str
) -> None:
    model, objective = make_model(dtype=torch.float32), OBJECTIVES[name]
    rows = [replace(row, reference_logprobs=row.behavior_logprobs) for row in weighted(make_rows(), objective)]
    for budget in (1, 40, 10_000):
        _, metrics = train(model, rows, objective, budget)
        assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == metrics["policy/ratio_min"] == 1.0
        assert metrics["policy/clip_frac_high"] == metrics["policy/clip_frac_low"] == 0.0


@pytest.mark.parametrize("short_way", [True, False], ids=["short way", "own forward pass"])
def test_gradient_checkpointing_recomputes_layers_and_changes_no_gradient(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    monkeypatch: pytest.MonkeyPatch,
    short_way: bool,
) -> None:
    model, objective, rows = make_model(), PRESETS["dapo"], make_rows()
    calls = []
    first = model.model.layers[0]
    if short_way:
        original = decoder.layer_forward

        def counted(layer: Any, *rest: Any) -> Any:
            calls.extend([1] if layer is first else [])
            return original(layer, *rest)

        monkeypatch.setattr(decoder, "layer_forward", counted)
    else:
        monkeypatch.setattr(states, "can_walk", lambda _: False)
        first.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    plain = train(model, rows, objective, budget=10_000)
    assert len(calls) == 1
    enable_checkpointing(model)
    with checkpointing(model):
        recomputed = train(model, rows, objective, budget=10_000)
    assert len(calls) == 3
    assert difference(plain, recomputed) < 1e-12
    assert not any(module.training for module in model.modules())


def test_a_microbatch_without_drawn_tokens_runs_its_backward_pass(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    model = make_model()
    rows = [replace(row, loss_mask=[0] * len(row.token_ids)) for row in make_rows()]
    gradients, _ = train(model, rows, PRESETS["grpo"], budget=10_000)
    assert not any(g.any() for g in gradients.values())
