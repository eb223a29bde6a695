"""The head is read at the positions that rows name, by the pass that training uses, and rows do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForSequenceClassification

from temper.batching.pack import pack
from temper.models.load import load_tokenizer
from temper.models.save import save_model
from temper.models.scorer import load_scorer, score_head
from temper.models.tiny import make_tiny_model
from temper.objectives.losses.scores import PROCESS_REWARD_MODEL, REWARD_MODEL, bradley_terry
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.trainer.passes.scores import read_scores, read_states
from temper.types import Sample

CPU = torch.device("cpu")
PAIRS = ([3, 7, 5, 9], [3, 7, 6]), ([4, 8, 8, 5, 6, 7], [4, 8, 5]), ([9, 5, 5], [9, 5, 7, 7, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scorer with a random head, in large random weights: rows must matter to each other if they meet."""
    where = tmp_path_factory.mktemp("scorer")
    base = make_tiny_model(
        where / "base", layers=2, width=16, heads=2, kv_heads=1, mlp_width=24, context=32, alphabet="abcdefgh", seed=0
    )
    scorer = load_scorer(base, torch.float64, CPU)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    save_model(scorer, load_tokenizer(base), where / "scorer")
    return where / "scorer"


@pytest.fixture
def scorer(folder: Path) -> Any:
    return load_scorer(folder, torch.float64, CPU)


def row(ids: Sequence[int], read: dict[int, float], group: str = "g", index: int = 0, weight: float = 1.0) -> Sample:
    size = len(ids)
    return Sample(
        group_id=group,
        index=index,
        token_ids=list(ids),
        loss_mask=[int(place in read) for place in range(size)],
        behavior_logprobs=[0.0] * size,
        versions=[-1] * size,
        advantages=[read.get(place, 0.0) for place in range(size)],
        weights=[weight * (place in read) for place in range(size)],
        reward=1.0 - index,
    )


def pair_rows(margins: Sequence[float] = (0.0, 0.0, 0.0)) -> list[Sample]:
    rows = []
    for number, (pair, margin) in enumerate(zip(PAIRS, margins, strict=True)):
        for index, ids in enumerate(pair):
            rows.append(row(ids, {len(ids) - 1: margin if index == 0 else 0.0}, f"g{number}", index, 1 / 3))
    return rows


packed = partial(pack, dtype=torch.float64, together="group")


def scores(model: Any, rows: Sequence[Sample], tokens: int = 1000) -> list[float]:
    with torch.no_grad():
        return [score for m in packed(rows, tokens) for score in read_scores(model, m).logprobs.tolist()]


def test_scores_are_those_of_transformers_at_the_last_token(folder: Path, scorer: Any) -> None:
    plain = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    rows = sorted(pair_rows(), key=lambda sample: (-max(map(len, PAIRS[int(sample.group_id[1])])), sample.index))
    plain.config.pad_token_id = None  # one row at a time: the last token is the last
    expected = [plain(torch.tensor([sample.token_ids])).logits.item() for sample in rows]
    assert scores(scorer, rows) == pytest.approx(expected, abs=1e-9)


def test_the_head_has_seen_the_token_it_is_read_at_and_none_after_it(scorer: Any) -> None:
    (score,) = scores(scorer, [row([3, 5, 7, 9], {2: 0.0})])
    assert scores(scorer, [row([3, 5, 7, 6], {2: 0.0})]) == [score]
    assert abs(scores(scorer, [row([3, 5, 8, 9], {2: 0.0})])[0] - score) > 1e-3
    # The planted fault: the state that scores a token as drawn, one earlier, has not seen it.
    assert scores(scorer, [row([3, 5, 7, 9], {1: 0.0})]) == scores(scorer, [row([3, 5, 8, 9], {1: 0.0})])


def test_rows_of_a_pack_do_not_see_each_other(scorer: Any) -> None:
    alone = [scores(scorer, [sample])[0] for sample in pair_rows()[:2]]
    assert scores(scorer, pair_rows()[:2]) == pytest.approx(alone, abs=1e-12)


def backward(model: Any, rows: Sequence[Sample], tokens: int, objective: Any) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    losses = [
        forward_backward(model, m, objective, temperature=1.0, facts=StepFacts(num_batch_tokens=len(rows)))[0]
        for m in packed(rows, tokens)
    ]
    return float(sum(losses)), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["pairs", "steps"])
def test_loss_and_gradient_are_the_same_for_every_size_of_microbatch(scorer: Any, kind: str) -> None:
    if kind == "pairs":
        objective = replace(REWARD_MODEL, loss=bradley_terry(margin=0.2, centring=0.01))
        rows = pair_rows((0.0, 0.5, 1.0))
    else:
        objective = PROCESS_REWARD_MODEL
        rows = [row(ids, {1: 1.0, len(ids) - 1: 0.0}, f"g{n}", 0, 1 / 6) for n, (ids, _) in enumerate(PAIRS)]
    loss, gradient = backward(scorer, rows, 1000, objective)
    for tokens in (1, 8, 12):
        other_loss, other = backward(scorer, rows, tokens, objective)
        assert other_loss == pytest.approx(loss, abs=1e-12)
        for name, tensor in gradient.items():
            assert torch.allclose(tensor, other[name], atol=1e-12), name
    assert all(tensor.abs().sum() > 0 for tensor in gradient.values())


def test_pairs_that_were_torn_apart_are_refused(scorer: Any) -> None:
    """The planted fault: packed by trajectory, chosen and rejected end up in any order."""
    facts = StepFacts(num_batch_tokens=6)
    (torn,) = pack(pair_rows(), 1000, torch.float64)
    with pytest.raises(AssertionError, match="whole pairs"):
        forward_backward(scorer, torn, REWARD_MODEL, temperature=1.0, facts=facts)


def set_scores(model: Any, rows: Sequence[Sample], wanted: Sequence[float]) -> None:
    """The head that gives these rows exactly these scores."""
    (microbatch,) = packed(rows, 1000)
    with torch.no_grad():
        states = read_states(model, microbatch)
        solved = torch.linalg.lstsq(states, torch.tensor(wanted, dtype=torch.float64)[:, None]).solution
        score_head(model).weight.copy_(solved.T)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("margin", "pair_margin", "centring", "expected"),
    [(0.0, 0.0, 0.0, 0.403186), (1.0, 0.0, 0.0, 0.854355), (0.0, 1.0, 0.0, 0.854355), (0.4, 0.6, 0.0, 0.854355),
     (0.0, 0.0, 0.01, 0.403186 + 0.0289)],
)  # fmt: skip
def test_the_worked_numbers_of_pairs_come_out_of_a_real_model(
    scorer: Any, margin: float, pair_margin: float, centring: float, expected: float
) -> None:
    chosen, rejected = PAIRS[0]
    rows = [row(chosen, {3: pair_margin}, index=0), row(rejected, {2: 0.0}, index=1)]
    set_scores(scorer, rows, [1.2, 0.5])
    objective = replace(REWARD_MODEL, loss=bradley_terry(margin=margin, centring=centring))
    loss, _ = backward(scorer, rows, 1000, objective)
    assert loss == pytest.approx(expected, abs=1e-6)


def test_the_worked_numbers_of_steps_come_out_of_a_real_model(scorer: Any) -> None:
    rows = [row([3, 5, 7, 9, 6, 8], {1: 1.0, 3: 1.0, 5: 0.0}, weight=1 / 3)]
    set_scores(scorer, rows, torch.logit(torch.tensor([0.9, 0.8, 0.7], dtype=torch.float64)).tolist())
    loss, _ = backward(scorer, rows, 1000, PROCESS_REWARD_MODEL)
    assert loss == pytest.approx(0.510826, abs=1e-6)


def test_a_head_in_bfloat16_is_read_in_float32(folder: Path) -> None:
    model = load_scorer(folder, torch.bfloat16, CPU)
    (microbatch,) = pack([row([3, 5, 7], {2: 0.0})], 1000)
    said = read_scores(model, microbatch)
    assert said.logprobs.dtype == torch.float32
    expected = read_states(model, microbatch).float() @ score_head(model).weight.float().T  # type: ignore[operator, union-attr]
    assert torch.equal(said.logprobs, expected[:, 0])
    assert not torch.equal(said.logprobs, said.logprobs.bfloat16().float())
