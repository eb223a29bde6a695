"""The same pairs through TRL's reward trainer, padded, and through Temper, packed: loss and gradient agree.

TRL runs its own compute_loss on an object made without its constructor, over transformers' own model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification

from temper.batching.pack import pack
from temper.models.load import load_tokenizer
from temper.models.save import save_model
from temper.models.scorer import load_scorer
from temper.models.tiny import make_tiny_model
from temper.objectives.losses.scores import REWARD_MODEL, bradley_terry
from temper.stages.reading.scored_rows import PairRows
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.types import Message, Sample, Task

pytest.importorskip("trl")
from trl import RewardTrainer

pytestmark = pytest.mark.heavy
CENTRING = 0.01
ANSWERS = (("abc", "a", 0.5), ("bb", "cdefgh", 0.0), ("hgf", "fgh", 1.25))
TASKS = [
    Task(
        id=f"t:{number}",
        messages=(Message(role="user", content="gab"),),
        answer=chosen,
        extra={"rejected": rejected, "margin": margin},
    )
    for number, (chosen, rejected, margin) in enumerate(ANSWERS)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = make_tiny_model(
        tmp_path / "base",
        layers=2,
        width=16,
        heads=2,
        kv_heads=1,
        mlp_width=24,
        context=32,
        alphabet="abcdefgh",
        seed=0,
    )
    scorer = load_scorer(base, torch.float64, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    save_model(scorer, load_tokenizer(base), tmp_path / "scorer")
    return tmp_path / "scorer"


def theirs(folder: Path, rows: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float64).train()
    trainer: Any = RewardTrainer.__new__(RewardTrainer)
    trainer.model, trainer.args = model, SimpleNamespace(center_rewards_coefficient=CENTRING)
    trainer.accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    ordered = [*rows[0::2], *rows[1::2]]
    width, pad = max(len(row.token_ids) for row in ordered), model.config.pad_token_id
    inputs = {
        "input_ids": torch.tensor([[*row.token_ids, *[pad] * (width - len(row.token_ids))] for row in ordered]),
        "attention_mask": torch.tensor(
            [[1] * len(row.token_ids) + [0] * (width - len(row.token_ids)) for row in ordered]
        ),
    }

    def forward(**given: Any) -> Any:
        return model(**{name: value for name, value in given.items() if name != "margin"})

    loss = trainer.compute_loss(forward, {**inputs, "margin": torch.tensor([margin for *_, margin in ANSWERS])})
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tokens", [1, 1000])
def test_loss_and_gradient_are_trl_s(folder: Path, tokens: int) -> None:
    make_rows = PairRows(load_tokenizer(folder), max_length=32)
    rows = [replace(row, weights=[m / len(TASKS) for m in row.loss_mask]) for task in TASKS for row in make_rows(task)]
    model = load_scorer(folder, torch.float64, torch.device("cpu"))
    objective = replace(REWARD_MODEL, loss=bradley_terry(centring=CENTRING))
    facts = StepFacts(num_batch_tokens=len(rows))
    loss = sum(
        forward_backward(model, m, objective, temperature=1.0, facts=facts)[0].item()
        for m in pack(rows, tokens, torch.float64, "group")
    )
    expected, gradient = theirs(folder, rows)
    assert loss == pytest.approx(expected, abs=1e-9)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient[name], atol=1e-9), name
