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
from temper.parity.budgets import Budget, DepthAndWidth, budget_of
from temper.parity.check import require_agreement
from temper.parity.diagnosis import MOST_MOVED, NO_ROUTES, Agreement, Evidence, moved_share
from temper.types import Completion, Ragged, Sample
from temper.types.columns import ragged
from tests.parity.test_check import BUDGET, VOCABULARY, Between, check, make_trainer


def make_model(initializer_range: float = 0.2, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            **{
                "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
                "moe_intermediate_size": 48, "max_position_embeddings": 256, "initializer_range": initializer_range,
                **changes,
            }
        )  # fmt: skip
        model = prepare(AutoModelForCausalLM.from_config(config).eval().to(dtype))
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


SCALES = [
    (0.2, torch.float32),
    (0.02, torch.float32),
    (0.2, torch.bfloat16),
    (0.02, torch.bfloat16),  # a fault's gap is below the budget of bfloat16: experts alone show it
    (0.02, torch.float16),
]
at_every_scale = pytest.mark.parametrize(("initializer_range", "dtype"), SCALES, ids=str)
FAULTS = [
    (lambda table: table[[0, *range(len(table) - 1)]], "those of other tokens: replayed one token earlier"),
    (lambda table: table[[*range(1, len(table)), -1]], "those of other tokens: replayed one token later"),
    (lambda table: (table + 3) % 8, "the sampler tells other routes than it took"),
    (lambda table: table[::-1], "the sampler tells other routes than it took"),
]


def budget(dtype: torch.dtype) -> Budget:
    size = DepthAndWidth(num_layers=3, width=64)
    return budget_of("qwen3_moe", str(dtype).removeprefix("torch."), "local", "fast", size)


@at_every_scale
def test_replayed_routes_agree(initializer_range: float, dtype: torch.dtype) -> None:
    model = make_model(initializer_range, dtype)
    agreement = check(make_engine(model), make_trainer(model), replays_routes=True, budget=budget(dtype))
    assert agreement.moved < MOST_MOVED / 5
    assert agreement.evidence is None, "nothing had to be tried"


@at_every_scale
@pytest.mark.parametrize(("change", "named"), FAULTS, ids=["one too late", "one too early", "of nobody", "backwards"])
def test_wrong_routes_are_caught_and_named(
    change: Callable[[Any], Any], named: str, initializer_range: float, dtype: torch.dtype
) -> None:
    model = make_model(initializer_range, dtype)
    sampler = Between(make_engine(model), answer=told(change))
    with pytest.raises(BackendError, match=named):
        check(sampler, make_trainer(model), replays_routes=True, budget=budget(dtype))


def test_a_fault_below_the_budget_of_log_probabilities_is_told_by_its_experts() -> None:
    model = make_model(0.02, torch.bfloat16)
    sampler = Between(make_engine(model), answer=told(FAULTS[0][0]))
    with pytest.raises(BackendError, match=r"the trainer's routers would not choose \d\d%") as caught:
        check(sampler, make_trainer(model), replays_routes=True, budget=budget(torch.bfloat16))
    assert "max_logprob_gap" not in str(caught.value), "the gap is within its budget"
    check(sampler, make_trainer(make_model(0.02, torch.bfloat16)), budget=budget(torch.bfloat16))


@pytest.mark.parametrize("initializer_range", [0.02, 0.1])
def test_routers_that_are_undecided_pass(initializer_range: float) -> None:
    """Eight of 64 experts with random weights: bfloat16 tips some."""
    shape = {"num_hidden_layers": 6, "num_experts": 64, "num_experts_per_tok": 8}
    model = make_model(initializer_range, torch.bfloat16, **shape)
    agreement = check(make_engine(model), make_trainer(model), replays_routes=True, budget=budget(torch.bfloat16))
    assert 0 < agreement.moved < MOST_MOVED / 5


def test_experts_that_were_really_taken_pass_however_many_the_routers_would_not_choose() -> None:
    """Where replaying them brings both sides together, they are the sampler's."""
    tried = Evidence(
        temperature=1.0, probes=(), alone_gap=1e-6, other_starts={}, other_moved={"one token earlier": 0.8},
        other_routes={"one token earlier": 0.3, NO_ROUTES: 0.2},
    )  # fmt: skip
    taken = Agreement(num_tokens=64, mean_gap=1e-6, max_gap=1e-5, moved=0.5, evidence=tried)
    require_agreement(taken, budget=BUDGET, when="now")
    for wrong in (
        dataclasses.replace(tried, other_routes={**tried.other_routes, NO_ROUTES: 1e-6}),
        dataclasses.replace(tried, other_moved={"one token earlier": 0.1}),
    ):
        with pytest.raises(BackendError, match="50%"):
            require_agreement(dataclasses.replace(taken, evidence=wrong), budget=BUDGET, when="now")


def test_experts_of_tokens_without_a_record_do_not_count_as_moved() -> None:
    row = Sample(
        group_id="g", index=0, token_ids=[1, 2, 3, 4, 5], loss_mask=[0, 0, 1, 1, 1], behavior_logprobs=[0.0] * 5,
        versions=[-1, -1, 0, 0, 0], advantages=[0.0] * 5, weights=[0.0] * 5, routes=[[0, 1], [2, 3], [4, 5], [], []],
    )  # fmt: skip
    assert moved_share([row], [[0.0, 0.0, 0.5, 0.25, 0.0]]) == 0.375
