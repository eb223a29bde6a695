"""Equal runs end with equal bits on a GPU too: nothing is added up in an order that changes from run to run.

What runs on a GPU is tested there (trainer/test_same_bits.py). Here: calls that add at places, or in running sums, are
found in the source, and each is on a list that says why its order does not matter.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "temper"
UNORDERED = {
    "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_reduce",
    "index_reduce_", "index_put", "index_put_", "put_", "bincount", "histc", "cumsum", "cumsum_", "logcumsumexp",
    "cumprod", "atomic_add",
}  # fmt: skip
"""On a GPU these add, or may add, in no fixed order; of whole numbers, or on a CPU, that makes no difference."""
CPU = "credit is given on the CPU"
WHOLE = "whole numbers"
LARGEST = "a maximum, which rounds nothing"
ALLOWED: dict[tuple[str, str], tuple[int, str]] = {
    ("objectives/advantage/advantages.py", "index_add"): (1, CPU),
    ("objectives/advantage/advantages.py", "scatter_reduce"): (1, LARGEST),
    ("objectives/policy/corrections.py", "cumsum"): (1, "brought to the CPU first"),
    ("objectives/policy/corrections.py", "cumprod"): (1, WHOLE),
    ("objectives/advantage/credit.py", "index_add"): (1, CPU),
    ("objectives/advantage/credit.py", "scatter_reduce"): (1, LARGEST),
    ("objectives/advantage/forks.py", "cumsum"): (1, WHOLE),
    ("objectives/advantage/normalizers.py", "scatter_reduce"): (1, LARGEST),
    ("objectives/losses/pairs.py", "cumsum"): (1, WHOLE),
    ("objectives/advantage/token_advantages.py", "index_add"): (2, CPU),
    ("objectives/advantage/token_advantages.py", "bincount"): (1, WHOLE),
    ("objectives/advantage/token_advantages.py", "cumsum"): (3, WHOLE),
    ("objectives/tokens.py", "scatter_reduce"): (1, LARGEST),
    ("batching/pack.py", "bincount"): (1, WHOLE),
    ("batching/samples.py", "cumsum"): (2, WHOLE),
    ("trainer/passes/packed_attention.py", "cumsum"): (3, WHOLE),
    ("trainer/passes/logprobs.py", "cumsum"): (1, WHOLE),
    ("trainer/passes/logprobs.py", "scatter_add_"): (
        1,
        "the ids of a row are distinct: nothing is added twice",
    ),
    ("trainer/passes/sharing.py", "cumsum"): (1, WHOLE),
    ("trainer/ranks/experts.py", "cumsum"): (1, WHOLE),
    ("engine/local/chunks.py", "cumsum"): (2, WHOLE),
    ("engine/local/rows.py", "cumsum"): (1, WHOLE),
    ("engine/local/runner.py", "cumsum"): (1, WHOLE),
    ("engine/local/tables.py", "cumsum"): (1, WHOLE),
    ("engine/vllm/sampling.py", "bincount"): (3, WHOLE),
    ("engine/vllm/sampling.py", "cumsum"): (1, WHOLE),
    ("engine/local/sampling.py", "cumsum"): (2, "along rows: torch scans each from first to last"),
    ("models/experts/balance.py", "index_add_"): (1, WHOLE),
    ("models/kernels/draw.py", "cumsum"): (1, "inside one program, always the same tree"),
    ("models/kernels/experts.py", "cumsum"): (1, WHOLE),
}
"""(file, call) -> how often, and why its order cannot change a result."""
WATCHED = ("objectives", "batching", "trainer", "engine", "models", "rollout", "stages")


def calls(source: str) -> Counter[str]:
    nodes = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    return Counter(name for name in names if name in UNORDERED)


@pytest.mark.parametrize("package", WATCHED)
def test_additions_without_a_fixed_order_are_on_the_list_with_their_reason(package: str) -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name): count
        for path in (ROOT / package).rglob("*.py")
        for name, count in calls(path.read_text()).items()
    }
    allowed = {place: count for place, (count, _) in ALLOWED.items() if place[0].startswith(f"{package}/")}
    assert found == allowed, "sum by objectives.tokens.ordered_sums, or say above why the order does not matter"


def test_an_addition_at_places_would_be_noticed() -> None:
    assert calls("sums = zeros.index_add(0, ids, values)") == {"index_add": 1}
    assert calls("tl.atomic_add(place, value)") == {"atomic_add": 1}
