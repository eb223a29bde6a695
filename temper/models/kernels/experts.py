"""Experts of few tokens: a decode step's routing, products and sum in five launches, or a grouped product alone.

A library's grouped product is made for many rows of each expert. A decode step has few of them, and waits for the
experts' weights to be read: here every program reads a piece of one expert's weights once for each tile of rows that
chose it. A row's bits depend on nothing but itself and the tile's size.
Owns: the kernels. Refuses: gradients (experts/products.py), many rows, atomics, host synchronisation: grids depend on
shapes only.
Shapes: _T tokens, _E experts, _K experts of a token, S = T * K copies sorted by expert, _D width, _F inner width,
_O outputs; inside kernels _R rows of a tile.
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from temper.models.kernels.swiglu import gated

FEW, MORE = 16, 32
"""Rows of a tile: the least that tensor cores multiply, and twice that where experts have more than half of it."""
OUTPUTS = 64
DEPTH = 128
COPIES = 1024
"""Read at once while they are sorted."""


def choose_experts(logits_TE: Tensor, count: int, *, normalizes: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most likely experts [T, K], of equally likely ones the first, and their weights in the dtype."""
    num_tokens, num_experts = logits_TE.shape
    experts_TK = torch.empty((num_tokens, count), dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty((num_tokens, count), dtype=dtype, device=logits_TE.device)
    if num_tokens:
        _choose[(num_tokens,)](
            logits_TE, experts_TK, weights_TK, logits_TE.stride(0), EXPERTS=num_experts,
            WIDE=triton.next_power_of_2(num_experts), COUNT=count, SLOTS=triton.next_power_of_2(count),
            NORMALIZES=normalizes, num_warps=1,
        )  # fmt: skip
    return experts_TK, weights_TK


def mixture(states_TD: Tensor, gate_up_EOD: Tensor, down_EDF: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What the experts of each token say, weighted [T, D]. Rounds where separate steps would."""
    assert all(tensor.is_contiguous() for tensor in (states_TD, gate_up_EOD, down_EDF, experts_TK, weights_TK))
    (num_tokens, width), count = states_TD.shape, experts_TK.shape[1]
    num_experts, inner = len(gate_up_EOD), gate_up_EOD.shape[1] // 2
    device, dtype = states_TD.device, states_TD.dtype
    mixed_TD = torch.empty_like(states_TD)
    if not num_tokens:
        return mixed_TD
    copies = num_tokens * count
    order_S = torch.empty(copies, dtype=torch.int32, device=device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    gated_SF = torch.empty((copies, inner), dtype=dtype, device=device)
    said_SD = torch.empty((copies, width), dtype=dtype, device=device)
    _sort[(num_experts,)](experts_TK, order_S, ends_E, copies, BLOCK=COPIES, num_warps=4)
    rows = FEW if 2 * copies <= FEW * num_experts else MORE
    _launch(states_TD, gate_up_EOD, order_S, ends_E, gated_SF, rows=rows, per_token=count)
    _launch(gated_SF, down_EDF, order_S, ends_E, said_SD, rows=rows)
    _mix[(num_tokens, triton.cdiv(width, 512))](
        said_SD, weights_TK, mixed_TD, width, COUNT=count, SLOTS=triton.next_power_of_2(count), BLOCK=512, num_warps=4
    )
    return mixed_TD


def sorted_products(rows_SD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows that are sorted by expert, times their expert's matrix [S, O]."""
    assert all(tensor.is_contiguous() for tensor in (rows_SD, weight_EOD, ends_E))
    output_SO = torch.empty((len(rows_SD), weight_EOD.shape[1]), dtype=rows_SD.dtype, device=rows_SD.device)
    if len(rows_SD):
        _launch(rows_SD, weight_EOD, None, ends_E, output_SO, rows=FEW)
    return output_SO


def _launch(
    given: Tensor, weight_EOD: Tensor, order_S: Tensor | None, ends_E: Tensor, target: Tensor, *, rows: int,
    per_token: int = 0,
) -> None:  # fmt: skip
    """per_token: how many copies a row of `given` has, where the weights are gate and up; 0: they are down's."""
    num_experts, outputs, width = weight_EOD.shape
    outputs = outputs // 2 if per_token else outputs
    _multiply[(triton.cdiv(outputs, OUTPUTS), num_experts)](
        given, weight_EOD, order_S, ends_E, target, width, outputs, PER_TOKEN=per_token, ROWS=rows, OUTPUTS=OUTPUTS,
        DEPTH=DEPTH, IS_EVEN=width % DEPTH == 0, PRECISION="ieee" if given.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3,
    )  # fmt: skip


@triton.jit
def _choose(
    logits, experts, weights, stride, EXPERTS: tl.constexpr, WIDE: tl.constexpr, COUNT: tl.constexpr,
    SLOTS: tl.constexpr, NORMALIZES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert_E, slot_K = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    is_expert_E = expert_E < EXPERTS
    logit_E = tl.load(logits + row * stride + expert_E, mask=is_expert_E, other=float("-inf")).to(tl.float32)
    share_E = tl.exp(logit_E - tl.max(logit_E, 0))
    share_E = share_E / tl.sum(share_E, 0)
    left_E = tl.where(is_expert_E, share_E, -1.0)
    chosen_K, weight_K = tl.zeros([SLOTS], tl.int64), tl.zeros([SLOTS], tl.float32)
    for slot in tl.static_range(COUNT):
        best = tl.max(left_E, 0)
        which = tl.min(tl.where(left_E == best, expert_E, WIDE), 0)
        chosen_K = tl.where(slot_K == slot, which, chosen_K)
        weight_K = tl.where(slot_K == slot, best, weight_K)
        left_E = tl.where(expert_E == which, -1.0, left_E)
    if NORMALIZES:
        weight_K = weight_K / tl.sum(weight_K, 0)
    is_slot_K = slot_K < COUNT
    tl.store(experts + row * COUNT + slot_K, chosen_K, mask=is_slot_K)
    tl.store(weights + row * COUNT + slot_K, weight_K.to(weights.dtype.element_ty), mask=is_slot_K)


@triton.jit(do_not_specialize=["copies"])
def _sort(experts, order, ends, copies, BLOCK: tl.constexpr):
    """The places of one expert's copies, in the order of tokens, behind those of all experts before it."""
    expert = tl.program_id(0)
    place = 0
    for start in range(0, copies, BLOCK):
        copy_B = start + tl.arange(0, BLOCK)
        chosen_B = tl.load(experts + copy_B, mask=copy_B < copies, other=2**30)
        place += tl.sum((chosen_B < expert).to(tl.int32), 0)
    for start in range(0, copies, BLOCK):
        copy_B = start + tl.arange(0, BLOCK)
        is_mine_B = tl.load(experts + copy_B, mask=copy_B < copies, other=2**30) == expert
        rank_B = tl.cumsum(is_mine_B.to(tl.int32), 0)
        tl.store(order + place + rank_B - 1, copy_B, mask=is_mine_B)
        place += tl.sum(is_mine_B.to(tl.int32), 0)
    tl.store(ends + expert, place)


@triton.jit
def _multiply(
    given, weight, order, ends, target, width, outputs, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, IS_EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A piece of one expert's outputs for all its rows. PER_TOKEN above 0: reads each copy's token and writes
    silu(gate) * up by place; 0: reads by place and writes each copy where it came from (no order: by place)."""
    expert = tl.program_id(1).to(tl.int64)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    output_O = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output_O = output_O < outputs
    column_D = tl.arange(0, DEPTH)
    # Outputs beyond the last one read the last one again, which costs no mask, and are not written.
    at_O = tl.minimum(output_O, outputs - 1).to(tl.int64) * width
    weight_DO = weight + expert * outputs * (2 if PER_TOKEN else 1) * width + at_O[None, :] + column_D[:, None]
    beyond = outputs.to(tl.int64) * width
    for start in range(first, last, ROWS):
        place_R = start + tl.arange(0, ROWS)
        is_row_R = place_R < last
        place_R = tl.minimum(place_R, last - 1)
        copy_R = place_R.to(tl.int64) if order is None else tl.load(order + place_R).to(tl.int64)
        source_R = copy_R // PER_TOKEN if PER_TOKEN else place_R.to(tl.int64)
        target_R = place_R.to(tl.int64) if PER_TOKEN else copy_R
        row_RD = given + source_R[:, None] * width + column_D[None, :]
        sum_RO = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_RO = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for depth in range(0, width, DEPTH):
            if IS_EVEN:
                left, right = tl.load(row_RD + depth), tl.load(weight_DO + depth)
            else:
                is_inside_D = column_D < width - depth
                left = tl.load(row_RD + depth, mask=is_inside_D[None, :], other=0.0)
                right = tl.load(weight_DO + depth, mask=is_inside_D[:, None], other=0.0)
            sum_RO = tl.dot(left, right, sum_RO, input_precision=PRECISION)
            if PER_TOKEN:
                if IS_EVEN:
                    right = tl.load(weight_DO + beyond + depth)
                else:
                    right = tl.load(weight_DO + beyond + depth, mask=is_inside_D[:, None], other=0.0)
                up_RO = tl.dot(left, right, up_RO, input_precision=PRECISION)
        dtype = target.dtype.element_ty
        result_RO = gated(sum_RO.to(dtype), up_RO.to(dtype)) if PER_TOKEN else sum_RO.to(dtype)
        tl.store(
            target + target_R[:, None] * outputs + output_O[None, :], result_RO,
            mask=is_row_R[:, None] & is_output_O[None, :],
        )  # fmt: skip


@triton.jit
def _mix(said, weights, target, width, COUNT: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Products rounded to their dtype, as a tensor of them would be, then added in float32."""
    token = tl.program_id(0).to(tl.int64)
    slot_K, column_D = tl.arange(0, SLOTS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_slot_K, is_inside_D = slot_K < COUNT, column_D < width
    weight_K = tl.load(weights + token * COUNT + slot_K, mask=is_slot_K, other=0.0)
    place_KD = (token * COUNT + slot_K)[:, None] * width + column_D[None, :]
    said_KD = tl.load(said + place_KD, mask=is_slot_K[:, None] & is_inside_D[None, :], other=0.0)
    product_KD = said_KD.to(tl.float32) * weight_K[:, None].to(tl.float32)
    if weights.dtype.element_ty == target.dtype.element_ty:
        product_KD = product_KD.to(target.dtype.element_ty).to(tl.float32)
    tl.store(target + token * width + column_D, tl.sum(product_KD, 0).to(target.dtype.element_ty), mask=is_inside_D)
