"""Ranks that go over each row together have the gradient and metrics of one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from temper.build.check import WHOLE_ROWS
from temper.errors import UserError
from temper.trainer.ranks.context import Context, is_counted, require_heads
from temper.types import Sample
from tests.trainer.ranks.test_adapters import adapt
from tests.trainer.ranks.test_sums import CUT_NAMES, UNEVEN, WHOLE, as_pairs, largest_difference, resolve, with_columns

PROGRAM = Path(__file__).with_name("rank_program.py")
NAMES = [name for name in CUT_NAMES if not WHOLE_ROWS.keys() & resolve(name).needs][::3]
"""Every third: what an objective makes of log-probabilities does not depend on who computed them."""
FAULTS = ("swapped", "added", "everyone")
CASES = {
    2: [
        *((name, WHOLE, "together parts") for name in NAMES),
        *((name, UNEVEN, "together") for name in ("grpo", "gspo", "dpo")),
        ("dapo", UNEVEN, "epochs together parts"),
        ("grpo", UNEVEN, "together parts adapted"),
        *(("grpo", UNEVEN, f"{fault} together parts") for fault in FAULTS),
    ],
    4: [
        *((name, UNEVEN, "twos parts") for name in ("grpo", "gspo", "dapo", "dpo", "sft")),
        *((name, UNEVEN, "together parts") for name in ("grpo", "dpo")),
        ("grpo", WHOLE, "twos parts"),
        ("grpo", UNEVEN, "twos parts recomputed"),
        *(("grpo", UNEVEN, f"{fault} twos parts") for fault in FAULTS),
    ],
}
"""Four ranks together have twice as many as there are heads of keys, which are copied; with one microbatch two of the
four have nothing to do."""


@pytest.mark.heavy
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_go_together_equal_one_and_faults_are_seen(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    run_ranks: Callable[..., None],
    tmp_path: Path,
    world: int,
) -> None:
    rows = {"rows": with_columns(make_rows()), "pairs": as_pairs(make_rows(5, 2, seed=1))}
    models = {"policy": make_model(), "adapted": adapt(make_model(), tmp_path)}
    (tmp_path / "inputs.pkl").write_bytes(pickle.dumps((models, make_model(seed=1), rows, CASES[world])))
    require_equal(tmp_path, world, run_ranks, CASES[world], FAULTS)


def require_equal(
    folder: Path,
    world: int,
    run_ranks: Callable[..., None],
    cases: Sequence[tuple[str, int, str]],
    faults: Sequence[str],
) -> None:
    """Of the inputs in this folder, all ranks report what one process reports; cases that begin with a fault do not."""
    ranks = [(0, 1), *((rank, world) for rank in range(world))]
    run_ranks(PROGRAM, folder, ranks)
    alone, *together = (torch.load(folder / f"{rank}of{of}.pt") for rank, of in ranks)
    differing = {}
    for case in cases:
        gaps = [largest_difference(alone[case], report[case]) for report in together]
        if case[2].split()[0] in faults:
            assert min(gaps) > 1e-3, case
        elif not max(gaps) < 1e-10:
            differing[case] = max(gaps)
    assert differing == {}


@pytest.mark.parametrize("num_tokens", [0, 3, 10, 4096])
def test_every_token_is_one_ranks(num_tokens: int) -> None:
    stretches = [Context(4, rank, None).own(num_tokens) for rank in range(4)]
    assert [token for own in stretches for token in range(num_tokens)[own]] == list(range(num_tokens))
    sizes = [own.stop - own.start for own in stretches]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"), [(8, 2, {2, 4, 8}), (12, 2, {2, 4, 6, 12}), (14, 2, {2, 14})]
)
def test_heads_that_do_not_divide_are_refused(heads: int, kv_heads: int, fitting: set[int]) -> None:
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    for size in range(2, heads + 1):
        if size in fitting:
            require_heads(config, size)
        else:
            with pytest.raises(UserError, match=rf"do not divide over {size} trainers. Use cluster.context = 2, "):
                require_heads(config, size)


def test_a_rank_alone_counts() -> None:
    assert is_counted()
