"""Routes that belong to other tokens, or that nobody took, are caught before training and named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError
from temper.models.experts.routes import set_replaying
from temper.models.load import prepare
from temper.types import Completion, Ragged
from temper.types.columns import ragged
from tests.parity.test_check import BUDGET, VOCABULARY, Between, check, make_trainer


def make_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, max_position_embeddings=256,
            initializer_range=0.2,
        )  # fmt: skip
        model = prepare(AutoModelForCausalLM.from_config(config).eval())
    set_replaying(model, True)
    return model


def make_engine(model: Any) -> LocalEngine:
    settings = EngineSettings(
        seed=7, block_size=4, num_blocks=200, max_running=16, tokens_per_step=64, max_length=128, routes=True
    )  # fmt: skip
    return LocalEngine(model, settings)


def told(change: Callable[[Any], Any]) -> Callable[[Any, Completion], Completion]:
    """A sampler that tells other routes than it took."""

    def answer(_: Any, completion: Completion) -> Completion:
        routes = ragged(completion.routes or ())
        table = change(routes.flat.reshape(len(routes) - 1, -1))
        return dataclasses.replace(completion, routes=Ragged.of_counts(table.reshape(-1), routes.counts))

    return answer


def test_replayed_routes_agree() -> None:
    model = make_model()
    assert check(make_engine(model), make_trainer(model), replays_routes=True).mean_gap < BUDGET.mean_gap


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda table: table[[0, *range(len(table) - 1)]], "those of other tokens: replayed one token earlier"),
        (lambda table: table[[*range(1, len(table)), -1]], "those of other tokens: replayed one token later"),
        (lambda table: (table + 3) % 8, "the sampler tells other routes than it took"),
    ],
    ids=["one too late", "one too early", "of nobody"],
)
def test_wrong_routes_are_caught_and_named(change: Callable[[Any], Any], named: str) -> None:
    model = make_model()
    sampler = Between(make_engine(model), answer=told(change))
    with pytest.raises(BackendError, match=named):
        check(sampler, make_trainer(model), replays_routes=True)
