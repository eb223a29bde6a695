"""The critic's update is the token mean of the whole batch however it is cut, and resumes to the same bits."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from temper.batching.pack import pack
from temper.errors import BackendError, UserError
from temper.models.load import load_model
from temper.models.states import hidden_states
from temper.models.tiny import make_tiny_model
from temper.trainer import critic as critic_module
from temper.trainer.critic import Critic, explained
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes.packed_attention import PackedAttention
from temper.trainer.passes.scoring import Share
from temper.trainer.passes.states import drawn_states
from temper.types import Microbatch, Sample

PROGRAM = Path(__file__).with_name("share_program.py")
SETTINGS = OptimizerSettings(learning_rate=0.01, max_grad_norm=1e6)
MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]


def make_critic(model: Any, **settings: Any) -> Critic:
    """With a head that is not zero, so that the decoder has a gradient too."""
    critic = Critic(model, replace(SETTINGS, **settings), total_steps=10)
    generator = torch.Generator().manual_seed(1)
    head = critic._module.head
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.3)
        head.bias.fill_(0.1)
    return critic


def with_targets(rows: list[Sample]) -> list[Sample]:
    draw = random.Random(5)
    return [
        replace(
            row,
            values=[draw.uniform(-1, 1) * m for m in row.loss_mask],
            targets=[draw.uniform(-2, 2) * m for m in row.loss_mask],
        )
        for row in rows
    ]


def as_share(microbatches: list[Microbatch]) -> Share:
    return Share(microbatches, list(range(len(microbatches))))


def num_drawn(rows: list[Sample]) -> int:
    return sum(row.num_actions for row in rows)


def update(
    model: Any, rows: list[Sample], budget: int, is_reversed: bool = False
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """First moments after one update from zero: a tenth of the gradient; and its metrics."""
    critic = make_critic(deepcopy(model))
    packed = pack(rows, budget, torch.float64)
    share = as_share(packed[::-1] if is_reversed else packed)
    metrics = critic.step(share, clip=0.2, num_batch_tokens=num_drawn(rows), step=1)
    moments = {name: t for name, t in critic._optimizer.tensors().items() if name.startswith("exp_avg.")}
    return moments, explained(metrics.finish())


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    scale = max(moment.abs().max().item() for moment in first.values())
    return max((first[name] - second[name]).abs().max().item() for name in first) / scale


def test_values_start_at_zero_and_are_zero_where_nothing_was_drawn(make_model: MakeModel, make_rows: MakeRows) -> None:
    microbatch = pack(make_rows(), 10_000)[0]
    fresh = Critic(make_model(dtype=torch.bfloat16), SETTINGS, total_steps=10).score(microbatch)
    assert torch.equal(fresh, torch.zeros(len(microbatch.token_ids)))
    assert fresh.dtype == torch.float32
    scored = make_critic(make_model()).score(microbatch)
    assert torch.equal(scored != 0, microbatch.loss_mask.bool())
    assert not scored.requires_grad


def values_by_prefix(critic: Critic, row: Sample) -> list[float]:
    """What is expected before each drawn token, from nothing but the tokens before it."""
    values = []
    for place, is_drawn in enumerate(row.loss_mask):
        if is_drawn:
            prefix = torch.tensor(row.token_ids[:place])
            attend = PackedAttention((place,), torch.device("cpu"))
            hidden = hidden_states(critic._module, prefix, torch.arange(place), attend)
            values.append(critic._module.head(hidden[-1]).item())
    return values


def largest_error_of_values(critic: Critic, rows: list[Sample]) -> float:
    errors = []
    for row in rows:
        microbatch = pack([row], 10_000, torch.float64)[0]
        found = critic.score(microbatch)[microbatch.loss_mask.bool()]
        expected = torch.tensor(values_by_prefix(critic, row), dtype=found.dtype)
        errors.append((found - expected).abs().max().item())
    return max(errors)


def test_a_value_is_of_the_state_before_its_token(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic, rows = make_critic(make_model()), make_rows(num_groups=2, group_size=2)
    assert largest_error_of_values(critic, rows) < 1e-10

    def shifted(model: Any, microbatch: Microbatch) -> Any:  # the planted bug: the state that has seen the token
        attend = PackedAttention(microbatch.lengths, torch.device("cpu"))
        hidden = hidden_states(model, microbatch.token_ids, microbatch.positions, attend)
        return replace(drawn_states(model, microbatch), hidden_AD=hidden[microbatch.loss_mask.bool()])

    monkeypatch.setattr(critic_module, "drawn_states", shifted)
    assert largest_error_of_values(critic, rows) > 1e-2


def test_the_gradient_does_not_depend_on_partition_or_order(make_model: MakeModel, make_rows: MakeRows) -> None:
    model, rows = make_model(), with_targets(make_rows())
    whole, metrics = update(model, rows, 10_000)
    assert all(moment.abs().max() > 0 for moment in whole.values())
    for budget, is_reversed in ((1, False), (30, False), (30, True), (64, True)):
        parts, parts_metrics = update(model, rows, budget, is_reversed)
        assert largest_difference(whole, parts) < 1e-12
        assert parts_metrics == pytest.approx(metrics, rel=1e-9)


def test_a_mean_per_microbatch_is_rejected_by_that_check(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = critic_module.value_loss

    def wrong(values: Tensor, old: Tensor, targets: Tensor, weights: Tensor, clip: float) -> Tensor:
        return right(values, old, targets, torch.full_like(weights, 1 / len(weights)), clip)

    monkeypatch.setattr(critic_module, "value_loss", wrong)
    model, rows = make_model(), with_targets(make_rows())
    assert largest_difference(update(model, rows, 10_000)[0], update(model, rows, 30)[0]) > 1e-3


def test_observations_give_no_gradient(make_model: MakeModel, make_rows: MakeRows) -> None:
    model, rows = make_model(), with_targets(make_rows())
    junk = [
        replace(
            row,
            values=[value if m else 1e9 for value, m in zip(row.values or [], row.loss_mask, strict=True)],
            targets=[target if m else -1e9 for target, m in zip(row.targets or [], row.loss_mask, strict=True)],
        )
        for row in rows
    ]
    clean, clean_metrics = update(model, rows, 64)
    dirty, dirty_metrics = update(model, junk, 64)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
    assert clean_metrics == dirty_metrics


def test_loss_and_metrics_are_those_worked_out_by_hand(make_model: MakeModel, make_rows: MakeRows) -> None:
    """V = 1, V_old = .5, clip .2: targets .2 and 2 give losses .32 and .845, the second by the clipped value."""
    critic = Critic(make_model(), SETTINGS, total_steps=10)
    with torch.no_grad():
        critic._module.head.bias.fill_(1.0)
    row = make_rows(1, 1)[0]
    mask = [0, 1, 1] + [0] * (len(row.token_ids) - 3)
    targets = [0.0, 0.2, 2.0] + [0.0] * (len(mask) - 3)
    row = replace(row, loss_mask=mask, values=[0.5] * len(mask), targets=targets)
    share = as_share(pack([row], 64, torch.float64))
    metrics = explained(critic.step(share, clip=0.2, num_batch_tokens=2, step=1).finish())
    assert metrics["loss/value"] == pytest.approx((0.32 + 0.845) / 2)
    assert metrics["critic/clip_frac"] == 0.5
    assert metrics["critic/value_mean"] == 1.0
    assert metrics["critic/explained_var"] == pytest.approx(0.0, abs=1e-4), "a constant explains nothing"
    # The clipped value has no gradient: 0.5 (1 - 0.2) is left, here of the bias.
    assert critic._optimizer.tensors()["exp_avg.head.bias"].item() == pytest.approx(0.1 * 0.4)
    assert explained({"loss/policy": 1.0}) == {"loss/policy": 1.0}


def test_explained_variance_is_of_all_tokens_and_not_a_mean_over_microbatches(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    model, rows = make_model(), with_targets(make_rows())
    critic = make_critic(deepcopy(model))
    microbatch = pack(rows, 10_000, torch.float64)[0]
    drawn = microbatch.loss_mask.bool()
    assert microbatch.targets is not None
    targets, values = microbatch.targets[drawn], critic.score(microbatch)[drawn]
    expected = 1 - (targets - values).var(correction=0) / (targets.var(correction=0) + 1e-5)
    assert update(model, rows, 30)[1]["critic/explained_var"] == pytest.approx(expected.item(), rel=1e-4)
    by_part = [update(model, [row], 30)[1]["critic/explained_var"] for row in rows if row.num_actions > 2]
    assert abs(sum(by_part) / len(by_part) - expected.item()) > 1e-2


def test_it_learns_a_value_that_depends_on_the_prompt_and_on_the_place(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path, layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=32, alphabet="abcd", seed=0
    )
    settings = OptimizerSettings(learning_rate=1e-2)
    critic = Critic(load_model(folder, torch.float32, torch.device("cpu")), settings, total_steps=60)
    draw = random.Random(0)
    rows = []
    for index in range(12):
        first, length = draw.choice([5, 6]), draw.randint(4, 8)
        mask = [0] + [1] * (length - 1)
        targets = [0.0] + [(first == 5) * 0.9 ** (length - place) for place in range(1, length)]
        rows.append(
            Sample(
                group_id="g", index=index, token_ids=[first] + [draw.randrange(5, 9) for _ in mask[1:]], loss_mask=mask,
                behavior_logprobs=[0.0] * length, versions=[0] * length, advantages=[0.0] * length,
                weights=[0.0] * length, targets=targets,
            )
        )  # fmt: skip
    metrics: list[dict[str, float]] = []
    for _ in range(60):
        share = [replace(m, values=critic.score(m)) for m in pack(rows, 40)]
        sums = critic.step(as_share(share), clip=0.2, num_batch_tokens=num_drawn(rows), step=1)
        metrics.append(explained(sums.finish()))
    assert metrics[0]["critic/value_mean"] == 0.0
    assert metrics[0]["critic/explained_var"] < 0.01
    assert metrics[-1]["critic/explained_var"] > 0.9
    assert metrics[-1]["loss/value"] < metrics[0]["loss/value"] / 10


def train(critic: Critic, rows: list[Sample], steps: int, first: int = 1) -> list[dict[str, float]]:
    share = pack(rows, 64)
    return [
        critic.step(as_share(share), clip=0.2, num_batch_tokens=num_drawn(rows), step=step).finish()
        for step in range(first, first + steps)
    ]


def bits(critic: Critic) -> dict[str, Tensor]:
    return {name: tensor.clone() for tensors in critic.wholes() for name, tensor in tensors.items()}


def is_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "tied_llama"])
def test_two_steps_saved_loaded_and_two_more_are_four_steps(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path, dtype: torch.dtype, family: str
) -> None:
    rows = with_targets(make_rows())

    def fresh() -> Critic:
        return make_critic(make_model(family, dtype), schedule="linear", warmup_steps=2)

    through = fresh()
    expected = train(through, rows, 4)
    first, second = fresh(), fresh()
    found = train(first, rows, 2)
    first.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"critic"}
    train(second, rows, 1)  # what it did before must not matter
    second.load(tmp_path)
    assert is_same(bits(first), bits(second))
    found += train(second, rows, 2, first=3)
    assert found == expected
    assert is_same(bits(through), bits(second))


def test_a_checkpoint_that_does_not_fit_changes_nothing(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path
) -> None:
    rows = with_targets(make_rows())
    critic = make_critic(make_model(dtype=torch.float32))
    train(critic, rows, 1)
    before = bits(critic)
    with pytest.raises(UserError, match=r"no critic/state.json"):
        critic.load(tmp_path)
    for name, other in (("family", make_model("qwen3", torch.float32)), ("dtype", make_model(dtype=torch.bfloat16))):
        folder = tmp_path / name
        folder.mkdir()
        make_critic(other).save(folder)
        with pytest.raises(UserError, match=r"of another model|was trained in"):
            critic.load(folder)
        assert is_same(before, bits(critic))


def test_a_gradient_that_is_not_finite_is_never_applied(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = with_targets(make_rows())
    critic = make_critic(make_model(dtype=torch.float32))
    before = bits(critic)
    broken = [replace(m, targets=torch.full((len(m.token_ids),), float("nan"))) for m in pack(rows, 64)]
    with pytest.raises(BackendError, match=r"critic update of step 1: gradient norm nan. This update was not applied"):
        critic.step(as_share(broken), clip=0.2, num_batch_tokens=num_drawn(rows), step=1)
    assert is_same(before, bits(critic))
    untouched = make_critic(make_model(dtype=torch.float32))
    assert train(critic, rows, 1) == train(untouched, rows, 1), "the broken update left something behind"


def test_all_updates_of_a_step_have_its_learning_rate(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up and decay count steps of the stage, however many updates each has."""
    rows, rates = with_targets(make_rows()), []
    critic = make_critic(make_model(dtype=torch.float32), schedule="linear", warmup_steps=4)

    def apply(rate: float, norm: Tensor) -> Tensor:
        rates.append(rate)
        return norm

    monkeypatch.setattr(critic._optimizer, "step", apply)
    for step in (1, 1, 4, 4, 8):
        critic.step(as_share(pack(rows, 64)), clip=0.2, num_batch_tokens=num_drawn(rows), step=step)
    assert rates == pytest.approx([0.0025, 0.0025, 0.01, 0.01, 0.01 * (1 - 3 / 6)])


def test_gradient_checkpointing_changes_no_bit(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = with_targets(make_rows())
    found = []
    for is_recomputing in (False, True):
        critic = Critic(
            make_model(dtype=torch.float32), SETTINGS, total_steps=10, gradient_checkpointing=is_recomputing
        )
        train(critic, rows, 3)
        found.append(bits(critic))
    assert is_same(*found)


@pytest.mark.heavy
def test_two_ranks_equal_one(
    make_model: MakeModel, make_rows: MakeRows, tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    model, rows = make_model(), with_targets(make_rows())
    moments, metrics = update(model, rows, 40)
    packed = [pack(rows, budget, torch.float64) for budget in (40, 10_000)]
    assert len(packed[0]) > 2
    assert len(packed[1]) == 1, "the second rank shall have an empty share"
    cases = [("critic", make_critic(model), share, num_drawn(rows)) for share in packed]
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps(cases))
    run_ranks(PROGRAM, tmp_path)
    for rank in range(2):
        for found_moments, found_metrics in torch.load(tmp_path / f"{rank}.pt"):
            assert largest_difference(moments, found_moments) < 1e-12
            assert found_metrics == pytest.approx(metrics, rel=1e-9)
