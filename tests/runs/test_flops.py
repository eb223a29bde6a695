"""FLOPs are numbers worked out by hand; peaks are those of data sheets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from temper.runs.flops import ModelSize, PassWork, active_parameters, mfu, peak_flops

SEVEN = ModelSize(trained=7e9, frozen=0, head=0, is_head_trained=True, attention_width=3584, windows=(None,) * 28)
SMALL = ModelSize(trained=10, frozen=0, head=6, is_head_trained=True, attention_width=4, windows=(None, None))


def work(*lengths: int, num_scored: int = 0, has_backward: bool = True) -> PassWork:
    positions = np.concatenate([np.arange(length) for length in lengths])
    return PassWork(positions=positions, num_scored=num_scored, has_backward=has_backward)


def test_a_long_row_of_a_large_model_by_hand() -> None:
    """6 N + 6 layers width length for a token, and half a token more of attention: each sees itself, too."""
    flops = SEVEN.flops(work(8192))
    assert flops == 8192 * 6 * 7e9 + 12 * 28 * 3584 * 8192 * 8193 / 2
    assert flops / 8192 == pytest.approx(4.693e10, rel=1e-4)
    assert mfu(flops, seconds=8192 / 3000, peak=989e12)["sys/mfu"] == pytest.approx(0.142365, abs=1e-6)


def test_three_tokens_by_hand() -> None:
    """Layers 2 x 10 x 3, head 2 x 6 x 2, attention 4 x 4 x (1 + 2 + 3) in each of 2 layers; with gradient thrice."""
    forward = work(3, num_scored=2, has_backward=False)
    assert SMALL.flops(forward) == 60 + 24 + 192
    assert SMALL.flops(replace(forward, has_backward=True)) == 3 * (60 + 24 + 192)


def test_rows_pay_for_their_own_attention_alone() -> None:
    assert SMALL.flops(work(1, 3)) == 3 * (2 * 10 * 4 + 4 * 4 * 2 * (1 + 6))
    assert SMALL.flops(work(1, 3)) < SMALL.flops(work(4))


def test_a_window_is_all_that_a_token_sees() -> None:
    """One layer sees 1 + 2 + 2 + 2, the other 1 + 2 + 3 + 4."""
    windowed = replace(SMALL, windows=(2, None))
    assert windowed.flops(work(4, has_backward=False)) == 2 * 10 * 4 + 4 * 4 * (7 + 10)


def test_weights_below_an_adapter_have_no_gradient() -> None:
    """Forward 2 x 12, for the states 2 x 12, for the weights 2 x 2 a token; the head without its own."""
    adapted = replace(SMALL, trained=2, frozen=10, is_head_trained=False, windows=())
    assert adapted.flops(work(1, num_scored=1)) == (24 + 24 + 4) + (12 + 12)
    whole = replace(adapted, trained=12, frozen=0, is_head_trained=True)
    assert whole.flops(work(1, num_scored=1)) == 3 * 24 + 3 * 12


def test_experts_count_as_often_as_they_are_chosen() -> None:
    sizes = {"model.embed.weight": 100, "model.layers.0.mlp.experts.gate_up_proj": 800}
    assert active_parameters(sizes) == 900
    assert active_parameters(sizes, num_experts=8, experts_per_token=2) == 300


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "bfloat16", 835e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "float16", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float16", None),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA L40", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165e12),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA H200", "float64", None),
        ("cpu", "float32", None),
        ("", "float32", None),
    ],
)
def test_peaks_are_known_by_name_or_not_at_all(name: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak
    assert ("sys/mfu" in mfu(1e12, 1.0, peak)) == (peak is not None)
