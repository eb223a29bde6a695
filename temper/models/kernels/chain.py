"""Kernels that start while the one in front of them still runs (programmatic dependent launch, from Hopper on).

Small kernels do: they need few places on the multiprocessors, and most of their time would be the wait to be started.
A large one does not: its programs would crowd onto the multiprocessors that are free first. It only lets the next start
when its loads are behind it.
Owns: what a kernel does at its begin and end as a part of a chain. Refuses: deciding what is small (decode_step/).
"""
# Triton has no types, and its kernels are not Python functions.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

from enum import IntEnum

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class ChainRole(IntEnum):
    """A kernel's part in a chain, as its ROLE."""

    NONE = 0
    LARGE = 1
    SMALL = 2


_LARGE, _SMALL = tl.constexpr(int(ChainRole.LARGE)), tl.constexpr(int(ChainRole.SMALL))


def launch_option(role: ChainRole) -> dict[str, bool]:
    return {"launch_pdl": True} if role is ChainRole.SMALL else {}


@triton.jit
def begin_in_chain(ROLE: tl.constexpr):
    """What others write is read behind this, and nothing is written before. Every program comes here, also one that has
    nothing to do, or a kernel could end before those in front of it, and the next would read what they have not
    written yet."""
    if ROLE == _SMALL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def end_in_chain(ROLE: tl.constexpr):
    if ROLE == _LARGE:
        gdc_launch_dependents()


@triton.jit
def fetch_ahead(address, num_bytes):
    """Asks for these bytes from each address on, multiples of 16, to be in the L2 cache soon: before begin_in_chain, of
    what no kernel writes."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [address.to(tl.int64), num_bytes],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
