"""Traces say of every trained row what a forward pass of its own would say, whatever the packing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from temper.batching.pack import pack, shard
from temper.objectives import resolve
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.trainer.passes import forward
from temper.trainer.passes.forward import score_drawn
from temper.trainer.ranks import shares
from temper.trainer.traces import Trace, keys_of, seen_of, traces_of
from temper.types import Batch, Microbatch, Sample

TEMPERATURE = 0.9


def make_trainer(model: Any, budget: int, **settings: Any) -> LocalTrainer:
    made = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=0.01), temperature=TEMPERATURE, total_steps=4, **settings
    )
    packing = partial(pack, tokens_per_microbatch=budget, dtype=torch.float64)
    return LocalTrainer(model, None, resolve("dapo"), made, pack=packing, shard=shard)


def traced(trainer: LocalTrainer, *updates: Sequence[Sample]) -> dict[tuple[str, int, int], Trace]:
    return dict(trainer.step(Batch(updates=tuple(map(tuple, updates)))).traces or {})


def expected_of(model: Any, rows: Sequence[Sample]) -> dict[tuple[str, int, int], tuple[list[float], list[float]]]:
    """By one pass per row."""
    found = {}
    for key, row in zip(keys_of(rows), rows, strict=True):
        with torch.no_grad():
            scored = score_drawn(model, pack([row], 1000, torch.float64)[0], TEMPERATURE)
        logprobs, entropies = iter(scored.logprobs.tolist()), iter(scored.entropy.tolist())
        columns = [[next(values) if m else 0.0 for m in row.loss_mask] for values in (logprobs, entropies)]
        found[key] = (columns[0], columns[1])
    return found


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_every_row_has_its_own_numbers(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], budget: int
) -> None:
    rows = make_rows()
    random.Random(1).shuffle(rows)
    expected = expected_of(make_model(), rows)
    traces = traced(make_trainer(make_model(), budget), rows)
    assert traces.keys() == expected.keys()
    assert ("g1", 1, 1) in traces  # the trajectory of two rows
    for key, (logprobs, entropies) in expected.items():
        assert traces[key].policy_logprobs == pytest.approx(logprobs, abs=1e-6)
        assert traces[key].entropies == pytest.approx(entropies, abs=1e-6)


def test_tracing_changes_no_weight_and_no_metric_and_takes_no_pass(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for is_on in (True, False):
        passes: list[int] = []

        def counted(*given: Any, taken: list[int] = passes, **more: Any) -> Any:
            taken.append(1)
            return score_drawn(*given, **more)

        monkeypatch.setattr(forward, "score_drawn", counted)
        made = make_trainer(make_model(), 40, traces=is_on)
        result = made.step(Batch(updates=(tuple(make_rows()),)))
        results.append((len(passes), dict(result.metrics), [t.clone() for t in made.publish().tensors.values()]))
        assert (result.traces is not None) == is_on
        assert ("trace" in result.seconds) == is_on
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == len(pack(make_rows(), 40))
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))


def test_a_row_trained_twice_keeps_what_it_was_before_it_was_trained(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]]
) -> None:
    rows = make_rows()
    once, twice = traced(make_trainer(make_model(), 40), rows), traced(make_trainer(make_model(), 40), rows, rows)
    assert once == twice


def test_rows_taken_in_packed_order_would_be_found_out(make_rows: Callable[..., list[Sample]]) -> None:
    """The planted fault: rows in the order of the samples instead of that of the microbatch."""
    rows = make_rows()
    (microbatch,) = pack(rows, 10_000, torch.float64)
    drawn_A = torch.arange(int(microbatch.loss_mask.sum()), dtype=torch.float64)
    right = traces_of(microbatch, seen_of(drawn_A, drawn_A), keys_of(rows))
    in_order = replace(microbatch, rows=tuple(range(len(rows))))
    wrong = traces_of(in_order, seen_of(drawn_A, drawn_A), keys_of(rows))
    assert is_parallel(right, rows)
    assert not is_parallel(wrong, rows)


def is_parallel(traces: dict[tuple[str, int, int], Trace], rows: Sequence[Sample]) -> bool:
    named = zip(keys_of(rows), rows, strict=True)
    return all(len(traces[key].policy_logprobs) == len(row.token_ids) for key, row in named)


def test_a_rank_traces_its_own_rows_and_all_ranks_together_trace_all(
    make_model: Callable[..., Any], make_rows: Callable[..., list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows()
    together: list[tuple[str, int, int]] = []
    for rank in range(2):
        made = make_trainer(make_model(), 40)
        monkeypatch.setattr(shares, "rank_and_world", lambda rank=rank: (rank, 2))
        share = made._share(rows)
        keys = keys_of(rows)
        own = [keys[number] for numbers in [microbatch.rows for microbatch in share.microbatches] for number in numbers]
        lengths = [length for microbatch in share.microbatches for length in microbatch.lengths]
        assert [len(rows[keys.index(key)].token_ids) for key in own] == lengths
        together += own
    assert sorted(together) == sorted(keys_of(rows))


def test_a_microbatch_without_drawn_tokens_has_traces_of_zeros(make_rows: Callable[..., list[Sample]]) -> None:
    row = replace(make_rows()[0], loss_mask=[0] * len(make_rows()[0].token_ids))
    (microbatch,) = pack([row], 100)
    assert isinstance(microbatch, Microbatch)
    nothing = seen_of(torch.zeros(0), torch.zeros(0))
    (trace,) = traces_of(microbatch, nothing, keys_of([row])).values()
    assert trace.policy_logprobs == trace.entropies == [0.0] * len(row.token_ids)
