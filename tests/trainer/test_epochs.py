"""Several passes over one batch are PPO's: the policy of the batch's start is what all of them compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.objectives import PRESETS, MetricSums, resolve
from temper.trainer.critic import Critic
from temper.trainer.local import AuxiliaryModels, LocalTrainer
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.epochs import epochs_of, measure_updates
from temper.trainer.passes.scoring import ScoringPasses
from temper.types import Batch, Microbatch, Sample
from tests.trainer.test_critic import bits, with_targets
from tests.trainer.test_local import is_same, make_trainer, weights

MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]

TEMPERATURE = 0.9
# The larger epsilon: AdamW would otherwise turn the last bit of a gradient near 0 into a whole step.
SETTINGS = OptimizerSettings(learning_rate=0.02, max_grad_norm=1e6, epsilon=1e-3)
LOW, HIGH = 0.2, 0.28


def weighed(rows: Sequence[Sample]) -> tuple[Sample, ...]:
    total = sum(row.num_actions for row in rows)
    return tuple(replace(row, weights=[m / total for m in row.loss_mask]) for row in rows)


def four_updates(rows: Sequence[Sample]) -> Batch:
    """Two epochs of two updates; the second shares the groups out in another way."""
    by_group = [[row for row in rows if row.group_id == f"g{number}"] for number in range(3)]
    first, second, third = by_group
    parts = (first, second + third, second, third + first)
    return Batch(updates=tuple(weighed(part) for part in parts))


def logprobs_of(model: Any, row: Sample) -> Tensor:
    """Of the drawn tokens, by a pass of one row alone."""
    logits = model(torch.tensor([list(row.token_ids)])).logits[0] / TEMPERATURE
    scored = logits[:-1].log_softmax(-1).gather(1, torch.tensor(list(row.token_ids))[1:, None])[:, 0]
    return scored[torch.tensor(list(row.loss_mask))[1:].bool()]


def drawn(row: Sample, column: Sequence[float]) -> Tensor:
    return torch.tensor([value for value, m in zip(column, row.loss_mask, strict=True) if m], dtype=torch.float64)


def trained_by_hand(model: Any, batch: Batch, *, refreshes: bool = False) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after the updates, and the share of clipped tokens in each. refreshes: the mistake of taking the proximal
    log-probabilities anew with every epoch."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SETTINGS.learning_rate, eps=SETTINGS.epsilon, weight_decay=0.0, foreach=False
    )
    old: dict[tuple[str, int, int], Tensor] = {}
    clipped = []
    for number, update in enumerate(batch.updates):
        if number == 0 or (refreshes and number == 2):
            rows = {key(row): row for part in batch.updates for row in part}
            old = {name: logprobs_of(model, row).detach() for name, row in rows.items()}
        optimizer.zero_grad()
        loss, num_clipped, num_tokens = torch.zeros((), dtype=torch.float64), 0, 0
        for row in update:
            ratio = (logprobs_of(model, row) - old[key(row)]).exp()
            advantage, weight = drawn(row, row.advantages), drawn(row, row.weights)
            bounded = ratio.clamp(1 - LOW, 1 + HIGH)
            loss = loss - (weight * torch.minimum(ratio * advantage, bounded * advantage)).sum()
            num_clipped += int((bounded * advantage < ratio * advantage).sum())
            num_tokens += len(ratio)
        loss.backward()
        optimizer.step()
        clipped.append(num_clipped / num_tokens)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, clipped


def key(row: Sample) -> tuple[str, int, tuple[int, ...]]:
    return row.group_id, row.index, tuple(row.token_ids)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def test_two_epochs_are_the_updates_done_by_hand_against_the_policy_of_the_start(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    batch = four_updates(make_rows())
    trainer = make_trainer(make_model(), PRESETS["dapo"], optimizer=SETTINGS)
    result = trainer.step(batch)
    by_hand, clipped = trained_by_hand(make_model(is_plain=True), batch)
    assert distance(weights(trainer), by_hand) < 1e-10
    assert max(clipped) > 0.02, "or a clip that is left out would not be seen"
    refreshed, _ = trained_by_hand(make_model(is_plain=True), batch, refreshes=True)
    assert distance(weights(trainer), refreshed) > 1e-4, "proximal log-probabilities are of the batch's start"
    assert trainer.version == 1, "a version is a batch, whatever was done with it"
    assert result.metrics["epochs/clip_frac/2"] > result.metrics["epochs/clip_frac/1"] > 0
    assert result.metrics["epochs/kl_old_k3/2"] > result.metrics["epochs/kl_old_k3/1"] > 0


def test_the_clipped_share_rises_from_epoch_to_epoch(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = weighed(make_rows())
    trainer = make_trainer(make_model(), PRESETS["dapo"], optimizer=SETTINGS)
    metrics = trainer.step(Batch(updates=(rows,) * 3)).metrics
    shares = [metrics[f"epochs/clip_frac/{epoch}"] for epoch in (1, 2, 3)]
    assert shares[0] == 0.0 < shares[1] < shares[2]
    assert metrics["epochs/kl_old_k3/1"] == pytest.approx(0.0, abs=1e-12)
    assert "epochs/clip_frac/4" not in metrics


def test_one_epoch_reports_none(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = make_rows()
    metrics = make_trainer(make_model()).step(Batch(updates=(tuple(rows[:3]), tuple(rows[3:])))).metrics
    assert not [name for name in metrics if name.startswith("epochs/")]
    assert epochs_of([rows[:3], rows[3:], rows[:3]]) == [1, 1, 2]


@pytest.mark.parametrize("budget", [12, 40, 10_000])
def test_later_epochs_take_columns_of_the_first_row_by_row(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Whatever shares a microbatch: KL to a reference and the ratio are read from the right rows, passed once."""
    objective = resolve("dapo", {"regularizers": [{"name": "kl", "coefficient": 0.1}]})
    rows = make_rows()
    batch, scored = four_updates(rows), list[tuple[str, int]]()
    score = ScoringPasses.score

    def counting(self: ScoringPasses, microbatch: Microbatch, who: Any) -> Tensor:
        scored.append((who, int(microbatch.loss_mask.sum())))
        return score(self, microbatch, who)

    monkeypatch.setattr(ScoringPasses, "score", counting)
    trainer = make_trainer(make_model(), objective, budget=budget, optimizer=SETTINGS, reference=make_model(seed=1))
    trainer.step(batch)
    tokens = sum(row.num_actions for row in rows)
    for who in ("policy", "reference"):
        assert sum(size for name, size in scored if name == who) == tokens
    # As if every row had been passed for each of its updates.
    known = [
        [replace(row, proximal_logprobs=p, reference_logprobs=r) for row, p, r in zip(update, *columns, strict=True)]
        for update in batch.updates
        if (columns := both(make_model, objective, update))
    ]
    apart = make_trainer(make_model(), objective, budget=budget, optimizer=SETTINGS, reference=make_model(seed=1))
    apart.step(Batch(updates=tuple(map(tuple, known))))
    assert distance(weights(trainer), weights(apart)) < 1e-12


def both(make_model: MakeModel, objective: Any, update: Sequence[Sample]) -> tuple[Any, Any]:
    fresh = make_trainer(make_model(), objective, reference=make_model(seed=1))
    return fresh.score(update, "policy"), fresh.score(update, "reference")


def test_what_is_computed_is_counted(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = weighed(make_rows())
    flops, tokens = zip(
        *[
            ((result := make_trainer(make_model()).step(Batch(updates=(rows,) * n))).model_flops,
             result.metrics["data/tokens"])
            for n in (1, 2, 3)
        ],
        strict=True,
    )  # fmt: skip
    assert flops[2] - flops[1] == flops[0], "a further epoch costs what one does"
    assert flops[0] < flops[1] - flops[0] < flops[0] * 1.5, "and the proximal policy one pass without gradient"
    assert tokens == (tokens[0], 2 * tokens[0], 3 * tokens[0])


def test_training_with_epochs_goes_on_from_a_checkpoint_to_the_same_bits(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path
) -> None:
    first, second = four_updates(make_rows()), four_updates(make_rows(seed=1))
    through, saved, loaded = (make_trainer(make_model(dtype=torch.float32)) for _ in range(3))
    expected = [through.step(part).loss for part in (first, second)]
    found = [saved.step(first).loss]
    saved.save(tmp_path)
    loaded.load(tmp_path)
    found.append(loaded.step(second).loss)
    assert found == expected
    assert is_same(weights(through), weights(loaded))


def test_the_critic_is_trained_in_every_epoch_against_its_values_of_the_start(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    batch = four_updates(with_targets(make_rows()))
    critic, alone = (Critic(make_model(dtype=torch.float32), SETTINGS, total_steps=10) for _ in range(2))
    plain = make_trainer(make_model(dtype=torch.float32), PRESETS["ppo"], optimizer=SETTINGS)
    trainer = LocalTrainer(
        plain._model, plain._tokenizer, PRESETS["ppo"], plain._settings, pack=plain._pack,
        others=AuxiliaryModels(critic=critic, reference=make_model(dtype=torch.float32, seed=1)),
    )  # fmt: skip
    trainer.step(batch)
    assert critic._optimizer.num_steps == 4
    for update in batch.updates:
        alone.step(plain._share(update), clip=0.2, num_batch_tokens=sum(row.num_actions for row in update), step=1)
    assert is_same(bits(critic), bits(alone))


def test_what_the_updates_of_a_batch_moved_is_what_the_last_found_more_than_the_first() -> None:
    def found(moved: float, count: float) -> MetricSums:
        name = "route/moved_frac"
        sums, counts = torch.tensor(moved).double(), torch.tensor(count).double()
        return MetricSums(sums={name: sums}, counts={name: counts})

    updates = [found(2.0, 100.0), found(50.0, 100.0), found(6.0, 50.0)]
    assert measure_updates(updates) == pytest.approx({"route/moved_by_updates": 0.12 - 0.02})
    assert measure_updates(updates[:1]) == {}
    assert measure_updates([MetricSums(), MetricSums()]) == {}
