"""Draws follow the distribution they report."""

from __future__ import annotations

import numpy as np
import torch

from temper.engine.local.sampling import most_likely, sample, tempered_logprobs, uniforms


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(tempered_logprobs(logits, temperature), temperature, uniform)


def test_logprobs_are_after_temperature() -> None:
    # Specification 6.4: logits (2, 1, 0) at temperature 0.7.
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    tokens, logprobs = draw(logits, torch.tensor([0.7] * 3), torch.tensor([0.1, 0.85, 0.99]))
    assert tokens.tolist() == [0, 1, 2]
    assert torch.allclose(logprobs, torch.tensor([-0.260118, -1.688690, -3.117261]), atol=1e-5)


def test_temperature_zero_takes_the_largest_and_reports_temperature_one() -> None:
    tokens, logprobs = draw(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0.0]), torch.tensor([0.0]))
    assert tokens.tolist() == [1]
    assert torch.allclose(logprobs, torch.tensor([-0.407606]), atol=1e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    draws = torch.linspace(0, 1 - 2.0**-24, 1001)
    tokens, logprobs = draw(logits.expand(1001, -1), torch.ones(1001), draws)
    assert set(tokens.tolist()) == {1, 3}
    assert torch.isfinite(logprobs).all()


def test_frequencies_follow_the_reported_probabilities() -> None:
    count = 200_000
    keys = np.full(count, 12345, dtype=np.uint64)
    draws = torch.from_numpy(uniforms(keys, np.arange(count)))
    logits = torch.tensor([[1.0, 0.6, 0.2, -1.0, -3.0]])
    tokens, _ = draw(logits.expand(count, -1), torch.ones(count), draws)
    frequency = torch.bincount(tokens, minlength=5) / count
    expected = logits.softmax(-1)[0]
    # Five standard errors: a wrong temperature or an off-by-one in the cumulative sum is far outside.
    assert ((frequency - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()


def test_uniforms_depend_on_key_and_position_only_and_stay_below_one() -> None:
    keys = np.arange(1000, dtype=np.uint64)
    positions = np.arange(1000)
    values = uniforms(keys, positions)
    assert (values == np.concatenate([uniforms(keys[i : i + 1], positions[i : i + 1]) for i in range(1000)])).all()
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert len(np.unique(values)) > 990


def test_the_most_likely_come_first_and_of_equal_ones_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    ids, logprobs = most_likely(tempered_logprobs(logits, torch.tensor([0.5, 0.0])), 4)
    assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    expected = torch.stack((logits[0] / 0.5, logits[1])).log_softmax(-1).gather(1, ids)
    assert torch.equal(logprobs, expected)


def test_certain_and_impossible_tokens_are_ordered_too() -> None:
    logprobs = torch.tensor([[-torch.inf, -0.0, -torch.inf, 0.0, -1e-40, -3.0]])
    ids, values = most_likely(logprobs, 6)
    assert ids.tolist() == [[1, 3, 4, 5, 0, 2]]
    assert values.tolist()[0][:2] == [0.0, 0.0]


def test_the_order_of_many_is_that_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    # Few distinct values, so that ties reach over every cut; topk alone fails here.
    logprobs = -torch.randint(0, 9, (40, 500), generator=generator) / 7.0
    order = logprobs.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 17, 100, 500):
        ids, values = most_likely(logprobs, count)
        assert torch.equal(ids, order[:, :count])
        assert torch.equal(values, logprobs.gather(1, ids))
    assert not torch.equal(logprobs.topk(17).indices, order[:, :17])
