"""The kernel of the update against torch's spelling of it, to the bit: ragged tails, zeros, the largest and the
smallest gradients, several steps, every way to hold weights and moments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from temper.batching.pack import pack
from temper.models.lora.wrapping import AdapterSettings, add_adapter
from temper.models.tiny import character_tokenizer
from temper.objectives import PRESETS
from temper.trainer.adamw import moments, state
from temper.trainer.adamw.masters import join, split, split_settled
from temper.trainer.adamw.moments import BLOCK
from temper.trainer.adamw.noise import high_half, low_half, random_bits
from temper.trainer.adamw.update import UpdateRule, apply_in_order, apply_update, measure_update
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import MasterAdamW, OptimizerSettings
from temper.types import Batch, Sample

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(
        DEVICE.type == "cpu" and not triton.knobs.runtime.interpret,
        reason="without a GPU the kernel needs TRITON_INTERPRET=1 before triton is imported",
    ),
]
from temper.trainer.adamw import kernels  # noqa: E402 - where there is a triton

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COMPACT = ["bfloat16", "8bit"]
SETTINGS = OptimizerSettings(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.5)
RULE = UpdateRule(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.999, epsilon=1e-8, num_steps=3)
ONE = torch.ones((), device=DEVICE)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU. Small buckets cut tensors in two, and matrices of 16 values are held compactly."""
    monkeypatch.setattr(state, "has_kernels", lambda device_type: True)
    monkeypatch.setattr(state, "BUCKET_VALUES", 1024)
    monkeypatch.setattr(moments, "SMALL_TENSOR", 16)


def make_net(dtype: torch.dtype) -> nn.Module:
    """Matrices of 1,110 values, over two buckets, and of 77, none of which 16 divides, and two biases."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(37, 30), nn.Linear(7, 11)).to(DEVICE, dtype)


def update(model: nn.Module, optimizer: MasterAdamW, step: int) -> list[float]:
    gradients = optimizer.gradients()
    for gradient in gradients.values():
        draw = torch.Generator().manual_seed(100 * step + gradient.numel())
        gradient.copy_(torch.randn(gradient.shape, generator=draw))
    norms: list[float] = optimizer.step(0.01 / step, nn.utils.get_total_norm(list(gradients.values()))).tolist()
    return norms


def everything(model: nn.Module, optimizer: MasterAdamW) -> dict[str, Tensor]:
    return {**{name: p.detach().cpu() for name, p in model.named_parameters()}, **optimizer.tensors()}


def bits(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("states", ["float32", *COMPACT])
def test_the_kernel_leaves_the_bits_of_the_spelled_update(states: str, dtype: torch.dtype) -> None:
    left, norms = [], []
    for has_kernels in (True, False):
        model = make_net(dtype)
        changed: dict[str, Any] = {"states": states, "kernels": has_kernels}
        optimizer = MasterAdamW(model, replace(SETTINGS, **changed))
        norms.append([update(model, optimizer, step) for step in (1, 2)])
        left.append(bits(everything(model, optimizer)))
    assert left[0] == left[1]
    # Norms are sums in another order.
    for fused, spelled in zip(*norms, strict=True):
        assert fused == pytest.approx(spelled, rel=1e-5)


@pytest.mark.parametrize("states", ["float32", *COMPACT])
def test_checkpoints_move_between_both(states: str) -> None:
    ends = []
    for first, second in ((True, False), (False, True), (False, False)):
        changed: dict[str, Any] = {"states": states, "kernels": first}
        model = make_net(torch.bfloat16)
        optimizer = MasterAdamW(model, replace(SETTINGS, **changed))
        update(model, optimizer, 1)
        resumed = MasterAdamW(model, replace(SETTINGS, **{**changed, "kernels": second}))
        resumed.load_tensors({name: tensor.clone() for name, tensor in optimizer.tensors().items()}, 1)
        update(model, resumed, 2)
        ends.append(bits(everything(model, resumed)))
    assert ends[0] == ends[1] == ends[2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.booleans())
@example([0x3F808000, 0x3F818000, 0x00008000, -0x80000000, 0x7F7FFFFF], False)
def test_masters_are_taken_apart_and_joined_as_torch_does(patterns: list[int], is_halfway: bool) -> None:
    """Any finite bits, and those halfway between two weights, which are the exceptions."""
    bits = torch.tensor(patterns, dtype=torch.int64)
    bits = (bits & ~0xFFFF) | 0x8000 if is_halfway else bits
    masters = bits.to(torch.int32).view(torch.float32).to(DEVICE)
    masters = torch.where(masters.isfinite(), masters, 0.0).repeat(1 + 2048 // len(patterns))
    for found, spelled in zip(split(masters, kernel=True)[:2], split(masters)[:2], strict=True):
        assert torch.equal(found.view(torch.int16), spelled.view(torch.int16))
    weight, remainder, exceptions = split(masters, kernel=True)
    assert torch.equal(exceptions.places, split(masters)[2].places)
    assert torch.equal(join(weight, remainder, exceptions, kernel=True).view(torch.int32), masters.view(torch.int32))


def test_what_is_measured_is_what_the_update_changed() -> None:
    """Against the difference of float64 copies, of three tensors end to end, of which two end within a block."""
    torch.manual_seed(0)
    flats = [torch.zeros(15 * BLOCK, device=DEVICE) for _ in range(4)]
    masters, gradients, means, squares = (
        [flat[start * BLOCK : start * BLOCK + size] for size, start in ((3000, 0), (7, 12), (512, 13))]
        for flat in flats
    )
    for tensor in (*masters, *gradients):
        tensor.copy_(torch.randn(len(tensor)))
    for tensor in (*means, *squares):
        tensor.copy_(0.01 * torch.rand(len(tensor)))
    before = [master.double() for master in masters]
    apply_update(RULE, masters, gradients, means, squares)
    flat, _, mean, square = flats
    changes, befores = kernels.measure_flat(RULE, flat, mean, square, [(0, 12), (12, 13), (13, 15)])
    moved = [(after.double() - old).norm().item() for after, old in zip(masters, before, strict=True)]
    assert changes.tolist() == pytest.approx(moved, rel=1e-3)
    assert befores.tolist() == pytest.approx([old.norm().item() for old in before], rel=1e-5)
    spelled = measure_update(RULE, masters, means, squares)
    assert changes.tolist() == pytest.approx(spelled[0].tolist(), rel=1e-5)
    assert befores.tolist() == pytest.approx(spelled[1].tolist(), rel=1e-5)


def test_wide_moments_and_double_masters_are_updated_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = kernels.update_piece

    def counting(factors: Any, piece: Any, *rest: Any) -> None:
        sizes.append(piece.weight.numel())
        plain(factors, piece, *rest)

    monkeypatch.setattr(kernels, "update_piece", counting)
    changed: dict[str, Any]
    for changed, dtype, expected in (
        ({"states": "8bit"}, torch.bfloat16, [1024, 86, 77]),
        ({"states": "8bit", "kernels": False}, torch.bfloat16, []),
        ({"states": "8bit"}, torch.float64, []),
        ({"states": "float32"}, torch.bfloat16, []),
    ):
        sizes.clear()
        model = make_net(dtype)
        update(model, MasterAdamW(model, replace(SETTINGS, **changed)), 1)
        assert sizes == expected, "biases are held wide"


@pytest.mark.parametrize(("dtype", "rank"), [(torch.float16, None), (torch.bfloat16, 4)], ids=["float16", "adapter"])
def test_a_trainer_ends_with_the_same_bits(
    make_model: Callable[..., Any],
    make_rows: Callable[..., list[Sample]],
    dtype: torch.dtype,
    rank: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clipping, the scale of the loss in float16, and adapters go through the kernel as through torch."""
    monkeypatch.setattr(state, "BUCKET_VALUES", 1 << 25)
    monkeypatch.setattr(moments, "SMALL_TENSOR", 1500 if rank is None else 192)  # six matrices
    ends = []
    for has_kernels in (True, False):
        model = make_model(dtype=dtype).to(DEVICE)
        if rank is not None:
            model = add_adapter(model, AdapterSettings(rank=rank, alpha=8.0), Path("base"))
        optimizer = replace(SETTINGS, states="8bit", kernels=has_kernels)
        made = TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=9)
        packing = partial(pack, tokens_per_microbatch=40)
        trainer = LocalTrainer(model, character_tokenizer("abc"), PRESETS["reinforce"], made, pack=packing)
        for seed in (0, 1):
            rows = [replace(row, advantages=[float(m) for m in row.loss_mask]) for row in make_rows(seed=seed)]
            trainer.step(Batch(updates=(tuple(rows),)))
        assert any(name.startswith("exp_avg_sq_scale") for name in trainer._optimizer.tensors())
        ends.append({**trainer.publish().tensors, **trainer._optimizer.tensors()})
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


class Piece:
    """One slice of bfloat16 weights with 8-bit or bfloat16 moments, to be updated either way."""

    def __init__(self, states: str, weights: Tensor) -> None:
        self.formats = moments.COMPACT[states]
        self.size = len(weights)
        num_blocks = -(-self.size // BLOCK)
        self.weight = torch.zeros(num_blocks * BLOCK, dtype=torch.bfloat16, device=DEVICE)
        self.weight[: self.size] = weights
        self.remainder = torch.zeros(num_blocks * BLOCK, dtype=torch.int16, device=DEVICE)
        self.held = {
            name: torch.zeros(num_blocks * BLOCK // part.values_each, dtype=part.dtype, device=DEVICE)
            for each in self.formats
            for name, part in each.parts.items()
        }

    def update(self, rule: UpdateRule, gradient: Tensor, shrink: Tensor, noise_at: int) -> Tensor:
        sums = torch.full((2, -(-self.size // BLOCK)), torch.nan, device=DEVICE)
        held = kernels.HeldPiece(self.weight[: self.size], self.remainder, tuple(self.held.values()))
        kernels.update_piece(rule.factors, held, gradient, shrink, noise_at, sums)
        return sums

    def spell(self, rule: UpdateRule, gradient: Tensor, shrink: Tensor, noise_at: int) -> None:
        master = join(self.weight, self.remainder, None)
        mean, square = (each.read(self.held) for each in self.formats)
        inside = slice(self.size)
        apply_in_order(rule, [master[inside]], [gradient * shrink], [mean[inside]], [square[inside]])
        random = random_bits(noise_at, 0, len(master), DEVICE)
        self.formats[0].write(self.held, mean, low_half(random))
        self.formats[1].write(self.held, square, high_half(random))
        self.weight, self.remainder = split_settled(master)

    def bits(self) -> dict[str, list[int]]:
        return bits({"weight": self.weight, "remainder": self.remainder, **self.held})


def scaled(size: int, exponents: list[int], zeros: float, seed: int) -> Tensor:
    """Normal numbers, by block times a power of ten, some of them 0."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=draw, dtype=torch.float64)
    powers = [10.0**exponent for exponent in exponents] * (size // (BLOCK * len(exponents)) + 1)
    values *= torch.tensor(powers, dtype=torch.float64).repeat_interleave(BLOCK)[:size]
    values[torch.rand(size, generator=draw) < zeros] = 0
    return values.float().to(DEVICE)


@example(states="8bit", size=1100, exponents=[-44, 18, -40], zeros=0.5, seed=0)
@example(states="8bit", size=300, exponents=[-38], zeros=1.0, seed=0)
@given(
    states=st.sampled_from(COMPACT),
    size=st.integers(1, 1100),
    exponents=st.lists(st.integers(-45, 18), min_size=1, max_size=5),
    zeros=st.sampled_from([0.0, 0.1, 0.99, 1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=12)
def test_any_gradient_leaves_the_same_bits(
    states: str, size: int, exponents: list[int], zeros: float, seed: int
) -> None:
    weights = scaled(size, [-2], 0.1, seed + 1)
    one, other = Piece(states, weights), Piece(states, weights)
    shrink = torch.full((), 0.37, device=DEVICE)
    for step in (1, 2, 3):
        rule = replace(RULE, num_steps=step, weight_decay=0.1 * step)
        gradient = scaled(size, exponents, zeros, seed + step)
        sums = one.update(rule, gradient, shrink, seed + step)
        other.spell(rule, gradient, shrink, seed + step)
        assert one.bits() == other.bits()
        assert bool(torch.isfinite(sums).all()), "every block is written"


@pytest.mark.parametrize("states", COMPACT)
def test_moments_that_fade_away_leave_the_same_bits(states: str) -> None:
    """Words that are never seen: their moments become the smallest numbers there are, and then 0."""
    one, other = Piece(states, torch.ones(BLOCK)), Piece(states, torch.ones(BLOCK))
    gradient = scaled(BLOCK, [-37], 0.1, 0)
    rule = replace(RULE, beta1=0.01, beta2=0.01)
    for step in range(12):
        one.update(rule, gradient, ONE, step)
        other.spell(rule, gradient, ONE, step)
        assert one.bits() == other.bits()
        gradient = torch.zeros_like(gradient)
    assert not any(tensor.any() for tensor in one.held.values())


def test_values_far_below_the_largest_of_their_block_leave_the_same_bits() -> None:
    """Down to a thousand millionth of it: second moments below the smallest code, and first ones at 0 or near it."""
    one, other = Piece("8bit", torch.ones(BLOCK)), Piece("8bit", torch.ones(BLOCK))
    gradient = scaled(BLOCK, [0], 0.0, 0) * torch.logspace(0, -9, BLOCK, device=DEVICE)
    for step in (1, 2, 3):
        one.update(RULE, gradient, ONE, step)
        other.spell(RULE, gradient, ONE, step)
        assert one.bits() == other.bits()
    assert one.held["exp_avg_sq"][-1] == 1, "above 0"
    assert one.held["exp_avg"][-1] == 0


def test_masters_between_two_weights_are_settled_as_the_spelled_update_does() -> None:
    """An odd weight and half a unit less: what the remainder alone cannot tell from half a unit more."""
    still = replace(RULE, learning_rate=0.0)
    pieces = Piece("8bit", torch.full((BLOCK,), 1.0078125)), Piece("8bit", torch.full((BLOCK,), 1.0078125))
    for piece in pieces:
        piece.remainder.fill_(-0x8000)
    pieces[0].update(still, torch.zeros(BLOCK, device=DEVICE), ONE, 0)
    pieces[1].spell(still, torch.zeros(BLOCK, device=DEVICE), ONE, 0)
    assert pieces[0].bits() == pieces[1].bits()
    assert set(pieces[0].weight.tolist()) == {1.0}
    assert set(pieces[0].remainder.tolist()) == {0x7FFF}


@pytest.mark.parametrize("what", ["noise", "shrink", "rate", "square", "decay"])
def test_another_operand_would_be_seen(what: str) -> None:
    """The mutations: what the kernel is told differs in one thing from what is spelled."""
    weights, gradient = scaled(600, [-2], 0.0, 1), scaled(600, [-3], 0.0, 2)
    one, other = Piece("8bit", weights), Piece("8bit", weights)
    other.spell(RULE, gradient, ONE, 7)
    changed = {"rate": {"learning_rate": 0.01001}, "square": {"beta2": 0.9990001}, "decay": {"weight_decay": 0.101}}
    rule = replace(RULE, **changed.get(what, {}))  # type: ignore[arg-type]
    one.update(rule, gradient, ONE * 0.999999 if what == "shrink" else ONE, 8 if what == "noise" else 7)
    assert one.bits() != other.bits()


def test_norms_are_those_of_the_change() -> None:
    weights, gradient = scaled(1000, [-2], 0.1, 1), scaled(1000, [-3], 0.1, 2)
    piece = Piece("bfloat16", weights)
    before = join(piece.weight, piece.remainder, None).double()
    changes, befores = piece.update(RULE, gradient, ONE, 0)
    after = join(piece.weight, piece.remainder, None).double()
    assert float(changes.sum().sqrt()) == pytest.approx(float((after - before).norm()), rel=1e-5)
    assert float(befores.sum().sqrt()) == pytest.approx(float(before.norm()), rel=1e-5)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from temper.trainer.adamw.kernels import OPTIONS, _update_kernel

names = _update_kernel.arg_names
pointers = ["*bf16", "*i16", "*fp32", "*i8", "*fp32", "*u8", *["*fp32"] * 4]
types = [*pointers, "i32", "i32", *["fp32"] * 8, *["constexpr"] * 3]
constants = {{"IN_BLOCKS": True, "BLOCKS": OPTIONS["BLOCKS"], "BLOCK": OPTIONS["BLOCK"]}}
options = {{name: value for name, value in OPTIONS.items() if name not in constants}} | {changed}
source = ASTSource(
    _update_kernel,
    dict(zip(names, types, strict=True)),
    {{(names.index(name),): value for name, value in constants.items()}},
    {{(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 3, 5, 10)}},
)
print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
""".format


@pytest.mark.heavy
@pytest.mark.parametrize("changed", [{}, {"enable_fp_fusion": True}, {"enable_reflect_ftz": True}])
def test_what_is_compiled_fuses_nothing_flushes_nothing_and_reads_16_bytes_at_once(
    changed: dict[str, bool], tmp_path: Path
) -> None:
    """The interpreter sees none of this. The last two are the mutations."""
    variables = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE(changed=changed)], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    is_ieee = "fma.rn" not in done.stdout and ".ftz" not in done.stdout and "div.full" not in done.stdout
    assert is_ieee == (not changed)
    assert "ld.global.v4.b32" in done.stdout
