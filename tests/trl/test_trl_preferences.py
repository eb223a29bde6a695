"""The same pairs through TRL's preference trainers and through Temper: loss, gradient and metrics agree.

TRL runs its own loss code on objects made without their constructors; only the forward passes are replaced, by random
log-probabilities in float64. XPO, Nash-MD, DPO-Shift and beta-DPO are not in TRL 1.16.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from temper.objectives.losses.distillation import distillation_loss, gkd
from temper.objectives.losses.preferences import (
    Pairs,
    Preference,
    cdpo,
    cpo,
    dpo,
    hinge,
    ipo,
    length_normalized,
    orpo,
    preference_loss,
    robust,
    rpo,
    simpo,
)
from temper.objectives.losses.reward_models import reward_model_loss
from temper.objectives.losses.unpaired import LabelledCompletions, kto, kto_baseline, labelled_loss

pytest.importorskip("trl")
from trl import DPOTrainer, KTOTrainer, RewardTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.gkd import GKDTrainer
from trl.experimental.orpo import ORPOTrainer

NUM_PAIRS, PROMPT, LONGEST = 6, 2, 8
TOLERANCE = 1e-9


def same(value: Tensor, **kwargs: Any) -> Tensor:
    return value


def bare(kind: type[Any], **settings: Any) -> Any:
    """One of TRL's trainers without its constructor: one process, training mode, nothing logged before."""
    trainer = kind.__new__(kind)
    trainer.model = nn.Module()
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, num_processes=1
    )
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    trainer.aux_loss_enabled = False
    for name, value in settings.items():
        setattr(trainer, name, value)
    return trainer


def last(trainer: Any, name: str) -> float:
    return trainer._metrics["train"][name][-1]


def random_rows(count: int, seed: int = 0, *, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [count, LONGEST] with gradient, response mask after a prompt, reference sums [count]."""
    draw = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, LONGEST, generator=draw, dtype=torch.float64) * 3
    lengths = torch.randint(2, LONGEST - PROMPT + 1, (count,), generator=draw)
    if length is not None:
        lengths[:] = length
    places = torch.arange(LONGEST)
    is_response = (places >= PROMPT) & (places < PROMPT + lengths[:, None])
    shift = torch.randn(count, generator=draw, dtype=torch.float64)
    return logprobs.requires_grad_(), is_response, (logprobs.detach() * is_response).sum(1) + shift


def fused(logprobs: Tensor, is_response: Tensor) -> SimpleNamespace:
    """What TRL's fused head returns: one position less, zeros where labels are ignored."""
    nothing = torch.zeros_like(logprobs[:, 1:]).detach()
    shown = (logprobs * is_response)[:, 1:]
    return SimpleNamespace(log_probs=shown, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def pairs_of(logprobs: Tensor, is_response: Tensor, reference: Tensor) -> Pairs:
    """TRL stacks chosen over rejected."""
    chosen, rejected = (logprobs * is_response).sum(1).chunk(2)
    chosen_lengths, rejected_lengths = is_response.sum(1).chunk(2)
    reference_chosen, reference_rejected = reference.chunk(2)
    return Pairs(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        weights=torch.full((len(chosen),), 1 / len(chosen), dtype=torch.float64),
        reference_chosen_logprobs=reference_chosen,
        reference_rejected_logprobs=reference_rejected,
    )


def difference(left: Tensor, right: Tensor, inputs: Tensor) -> float:
    """Largest difference in loss or gradient."""
    gradients = [torch.autograd.grad(loss, inputs, retain_graph=True)[0] for loss in (left, right)]
    assert gradients[0].abs().max() > 1e-4
    return max((left - right).abs().item(), (gradients[0] - gradients[1]).abs().max().item())


def dpo_by_trl(rows: tuple[Tensor, Tensor, Tensor], loss_types: list[str], weights: list[float]) -> tuple[Tensor, Any]:
    logprobs, is_response, reference = rows
    trainer = bare(
        DPOTrainer, beta=0.1, label_smoothing=0.1, loss_types=loss_types, loss_weights=weights, ld_alpha=None,
        f_divergence_type="reverse_kl", precompute_ref_logps=True, use_weighting=False,
    )  # fmt: skip
    reference_chosen, reference_rejected = reference.chunk(2)
    inputs = {
        "input_ids": torch.ones_like(is_response, dtype=torch.int64),
        "attention_mask": torch.ones_like(is_response, dtype=torch.int64),
        "completion_mask": is_response.long(),
        "ref_chosen_logps": reference_chosen,
        "ref_rejected_logps": reference_rejected,
    }
    loss = trainer._compute_loss(lambda **kwargs: fused(logprobs, is_response), inputs, return_outputs=False)
    return loss, trainer


@pytest.mark.parametrize(
    ("loss_types", "weights", "rule"),
    [
        (["sigmoid"], [1.0], dpo()),
        (["hinge"], [1.0], hinge()),
        (["ipo"], [1.0], ipo()),
        (["robust"], [1.0], robust(noise=0.1)),
        (["sigmoid_norm"], [1.0], length_normalized()),
        (["sigmoid", "sft"], [1.0, 0.7], rpo(alpha=0.7)),
    ],
    ids=lambda value: str(value),
)
def test_losses_on_pairs_are_those_of_trl(loss_types: list[str], weights: list[float], rule: Preference) -> None:
    # TRL's likelihood term is a mean over all chosen tokens, Temper's over each completion: equal for equal lengths.
    rows = random_rows(2 * NUM_PAIRS, length=5 if "sft" in loss_types else None)
    theirs, _ = dpo_by_trl(rows, loss_types, weights)
    ours, _ = preference_loss(rule, pairs_of(*rows))
    assert difference(theirs, ours, rows[0]) < TOLERANCE


def test_what_is_watched_on_pairs_is_that_of_trl() -> None:
    rows = random_rows(2 * NUM_PAIRS)
    _, trainer = dpo_by_trl(rows, ["sigmoid"], [1.0])
    metrics = preference_loss(dpo(), pairs_of(*rows))[1].finish()
    names = {"rewards/chosen": "chosen_reward", "rewards/rejected": "rejected_reward", "rewards/margins": "margin",
             "rewards/accuracies": "accuracy", "logps/chosen": "chosen_logprob",
             "logps/rejected": "rejected_logprob"}  # fmt: skip
    for name, own in names.items():
        assert metrics[f"preference/{own}"] == pytest.approx(last(trainer, name), abs=1e-6), name


def test_the_comparison_rejects_another_rule() -> None:
    rows = random_rows(2 * NUM_PAIRS)
    theirs, _ = dpo_by_trl(rows, ["sigmoid"], [1.0])
    for wrong in (dpo(beta=0.11), cdpo(), hinge(), length_normalized(), cpo(alpha=0.0)):
        assert difference(theirs, preference_loss(wrong, pairs_of(*rows))[0], rows[0]) > 1e-4, str(wrong)


def by_concatenated_forward(kind: type[Any], pairs: Pairs, *, average: bool, **settings: Any) -> Tensor:
    """CPO, SimPO and ORPO: TRL's loss on given log-probabilities. Equal lengths make its likelihood term ours."""
    chosen, rejected = pairs.chosen_logprobs, pairs.rejected_logprobs
    likelihood = -(chosen / pairs.chosen_lengths).mean()
    if average:
        chosen, rejected = chosen / pairs.chosen_lengths, rejected / pairs.rejected_lengths
    trainer = bare(kind, **settings)
    zero = torch.zeros(1)
    trainer.concatenated_forward = lambda model, batch: (chosen, rejected, zero, zero, likelihood)
    return trainer.get_batch_loss_metrics(None, {})[0]


@pytest.mark.parametrize(
    ("rule", "kind", "average", "settings"),
    [
        (cpo(beta=0.1, alpha=0.8), CPOTrainer, False, {"loss_type": "sigmoid", "beta": 0.1, "cpo_alpha": 0.8}),
        (simpo(beta=2.0, margin=0.5), CPOTrainer, True,
         {"loss_type": "simpo", "beta": 2.0, "cpo_alpha": 0.0, "simpo_gamma": 0.5}),
        (orpo(weight=0.3), ORPOTrainer, True, {"beta": 0.3}),
    ],
    ids=["cpo", "simpo", "orpo"],
)  # fmt: skip
def test_losses_without_a_reference_are_those_of_trl(
    rule: Preference, kind: type[Any], average: bool, settings: dict[str, Any]
) -> None:
    rows = random_rows(2 * NUM_PAIRS, length=5)
    pairs = pairs_of(*rows)
    theirs = by_concatenated_forward(kind, pairs, average=average, alpha=0.0, label_smoothing=0.0, **settings)
    # ORPO's log-odds are float32 in TRL.
    assert difference(theirs, preference_loss(rule, pairs)[0], rows[0]) < (1e-6 if kind is ORPOTrainer else TOLERANCE)


def test_cdpo_is_trls_smoothed_loss_on_log_ratios() -> None:
    # TRL's DPO has no smoothed form any more; its CPO has, and is DPO when it is given log-ratios.
    rows = random_rows(2 * NUM_PAIRS)
    pairs = pairs_of(*rows)
    trainer = bare(CPOTrainer, loss_type="sigmoid", beta=0.1, alpha=0.0, label_smoothing=0.1)
    losses, _, _ = trainer.cpo_loss(
        pairs.chosen_logprobs - pairs.reference_chosen_logprobs,
        pairs.rejected_logprobs - pairs.reference_rejected_logprobs,
    )
    assert difference(losses.mean(), preference_loss(cdpo(noise=0.1), pairs)[0], rows[0]) < TOLERANCE


@pytest.mark.parametrize("shift", [-3.0, 3.0], ids=["baseline at its floor", "baseline above"])
def test_kto_and_its_baseline_are_those_of_trl(shift: float) -> None:
    logprobs, is_response, reference = random_rows(8)
    mismatched, is_mismatched, _ = random_rows(8, seed=1)
    mismatched = mismatched.detach()
    mismatched_sums = (mismatched * is_mismatched).sum(1)
    mismatched_reference = mismatched_sums - shift
    is_desirable = torch.tensor([True, False, True, True, False, False, True, False])
    ones = torch.ones_like(is_response, dtype=torch.int64)
    trainer = bare(
        KTOTrainer, loss_type="kto", beta=0.1, desirable_weight=1.5, undesirable_weight=0.7, calculate_KL=True,
        precompute_ref_logps=True,
    )  # fmt: skip
    inputs = {
        "input_ids": ones, "attention_mask": ones, "completion_mask": is_response.long(), "label": is_desirable,
        "KL_input_ids": 2 * ones, "KL_attention_mask": ones, "KL_completion_mask": is_mismatched.long(),
        "ref_logps": reference, "ref_KL_logps": mismatched_reference,
    }  # fmt: skip

    def model(input_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        return fused(logprobs, is_response) if input_ids[0, 0] == 1 else fused(mismatched, is_mismatched)

    theirs = trainer._compute_loss(model, inputs, return_outputs=False)
    labelled = LabelledCompletions(
        logprobs=(logprobs * is_response).sum(1),
        reference_logprobs=reference,
        is_desirable=is_desirable,
        weights=torch.full((8,), 1 / 8, dtype=torch.float64),
        baseline=kto_baseline(mismatched_sums, mismatched_reference),
    )
    ours, metrics = labelled_loss(kto(desirable_weight=1.5, undesirable_weight=0.7), labelled)
    assert difference(theirs, ours, logprobs) < TOLERANCE
    assert labelled.baseline == pytest.approx(max(0.0, shift))
    assert difference(theirs, labelled_loss(kto(), replace(labelled, baseline=1.0))[0], logprobs) > 1e-4
    finished = metrics.finish()
    assert finished["preference/desirable_reward"] == pytest.approx(last(trainer, "rewards/chosen"))
    assert finished["preference/undesirable_reward"] == pytest.approx(last(trainer, "rewards/rejected"))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_distillation_is_that_of_trl(beta: float) -> None:
    draw = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 5, 7, generator=draw, dtype=torch.float64) for _ in range(2))
    student.requires_grad_()
    is_response = torch.rand(3, 5, generator=draw) < 0.7
    labels = torch.where(is_response, 1, -100)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta, temperature=0.9)
    divergences = gkd(student[is_response], teacher[is_response], beta=beta, temperature=0.9)
    ours, _ = distillation_loss(divergences, torch.full_like(divergences, 1 / len(divergences)).detach())
    assert difference(theirs, ours, student) < TOLERANCE


@pytest.mark.parametrize(
    "settings", [{}, {"margin": 0.4}, {"centring": 0.01}, {"margin": 0.4, "centring": 0.01}], ids=str
)
def test_the_reward_model_is_that_of_trl(settings: dict[str, float]) -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randn(2 * NUM_PAIRS, 1, generator=draw, dtype=torch.float64).requires_grad_()
    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=settings.get("centring")))
    inputs: dict[str, Any] = {"attention_mask": torch.ones(2 * NUM_PAIRS, 3)}
    if "margin" in settings:
        inputs["margin"] = torch.full((NUM_PAIRS,), settings["margin"], dtype=torch.float64)
    forward: Callable[..., SimpleNamespace] = lambda **kwargs: SimpleNamespace(logits=scores)  # noqa: E731
    theirs = trainer.compute_loss(forward, inputs)
    chosen, rejected = scores[:, 0].chunk(2)
    weights = torch.full((NUM_PAIRS,), 1 / NUM_PAIRS, dtype=torch.float64)
    ours, metrics = reward_model_loss(chosen, rejected, weights, **settings)
    assert difference(theirs, ours, scores) < TOLERANCE
    finished = metrics.finish()
    for name, own in {"accuracy": "accuracy", "margin": "margin", "mean_reward": "score", "min_reward": "score_min",
                      "max_reward": "score_max"}.items():  # fmt: skip
        assert finished[f"reward_model/{own}"] == pytest.approx(last(trainer, name), abs=1e-6), name
