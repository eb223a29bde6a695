"""What Triton makes of kernels for a Hopper GPU, which takes its compiler and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILE = r'''
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from temper.models.float8.tiles import DEPTH, tiles_of
from temper.models.decode_step.tiles import OUTPUTS, SHARED_BYTES, tiles_of as step_tiles
from temper.models.kernels.chain import ChainRole
from temper.models.kernels.decode_step import _multiply_tile
from temper.models.kernels.float8_products import _multiply_part
from temper.models.kernels.norms import launch_options, norm_rows


def compiled(kernel, types, constants, options):
    """types by name; pointers and sizes are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [i for i, name in enumerate(names) if name in types and types[name] != "fp32" and name not in constants
               and name not in ("num_rows", "steps")]
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): c for n, c in constants.items()},
                       attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def order_of_sum(width, dtype, is_float8):
    options = dict(launch_options(width))
    launch = {name: options.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    types = {name + "_ptr": "*" + dtype for name in ("x", "residual", "weight", "summed", "normed")}
    types |= {"float8_scale_ptr": "*fp32", "num_rows": "i32", "outer": "i32", "inner": "i32", "epsilon": "fp32"}
    constants = {"HEADS": 1, **options}
    if is_float8:
        types["normed_ptr"] = "*fp8e4nv"
    else:
        constants["float8_scale_ptr"] = None
    text = compiled(norm_rows, types, constants, launch).asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\d*) = (.*)$", text, re.M))
    return layouts[re.search(r"\}\) : \(tensor<\S+, (#blocked\d*)>\)", text).group(1)]


def product(rows, outputs, width):
    tiles = tiles_of(rows, outputs, width)
    is_whole = tiles.parts == 1
    types = dict(codes="*fp8e4nv", weight="*fp8e4nv", row_scale="*fp32", channel_scale="*fp32", bias="*bf16",
                 target="*bf16" if is_whole else "*fp32", num_rows="i32", steps="i32", outputs="i32", width="i32")
    constants = dict(ROW_TILE=tiles.rows, OUTPUT_TILE=tiles.outputs, DEPTH=DEPTH, IS_EVEN=True, IS_WHOLE=is_whole)
    found = compiled(_multiply_part, types, constants, dict(num_warps=tiles.warps, num_stages=tiles.stages))
    copies = re.findall(r"cp\.async\.c.\S* [^;]*, (0x\w+),", found.asm["ptx"])
    has_products = bool(re.search(r"wgmma[^;]*e4m3\.e4m3", found.asm["ptx"]))
    return {"copies": copies, "has_products": has_products, "shared": found.metadata.shared}


def step_product(rows, outputs, width, is_gated, role):
    tiles = step_tiles(rows, outputs, width, is_gated=is_gated)
    types = dict(states="*bf16", weight="*bf16", target="*bf16" if is_gated else "*fp32", num_rows="i32", outputs="i32",
                 width="i32", steps="i32")
    constants = dict(ROWS=tiles.rows, OUTPUTS=OUTPUTS, DEPTH=tiles.depth, IS_GATED=is_gated, IS_EVEN=True,
                     ROLE=int(role), IS_FETCHED=role is ChainRole.SMALL)
    found = compiled(_multiply_tile, types, constants, dict(num_warps=4, num_stages=tiles.stages))
    text = found.asm["ptx"]
    wait, first = text.find("griddepcontrol.wait"), text.find("cp.async.cg")
    programs = -(-outputs // OUTPUTS) * tiles.parts
    return {"copies": re.findall(r"cp\.async\.c.\S* [^;]*, (0x\w+),", text),
            "products": sorted(set(re.findall(r"wgmma.mma_async\S*?(m64n\d+k16)", text))),
            "waits_first": 0 <= wait < first, "waits": wait >= 0, "asks_ahead": 0 <= text.find("prefetch.L2") < wait,
            "lets_start": "griddepcontrol.launch_dependents" in text,
            "fits": SHARED_BYTES // (found.metadata.shared + 1024) * 132 >= programs}


print(json.dumps({
    "steps": [step_product(*of) for of in (
        (32, 2048, 1536, False, ChainRole.SMALL), (64, 1536, 8960, False, ChainRole.LARGE),
        (64, 18944, 3584, True, ChainRole.LARGE), (16, 2048, 1536, False, ChainRole.NONE))],
    "orders": [[order_of_sum(width, dtype, it) for it in (False, True)] for width in (576, 3584)
               for dtype in ("bf16", "fp32")],
    "products": [product(64, 37888, 3584), product(64, 3584, 18944), product(128, 3584, 18944)],
}))
'''


@pytest.mark.heavy
def test_sums_keep_their_order_products_come_from_tensor_cores_and_chained_kernels_wait() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    small, large, gated, alone = found["steps"]
    assert [each["products"] for each in found["steps"]] == [["m64n32k16"], ["m64n64k16"], ["m64n64k16"], ["m64n16k16"]]
    assert all(set(each["copies"]) == {"0x10"} and each["fits"] for each in found["steps"])
    assert small["waits_first"], "nothing that others wrote is read before"
    assert small["asks_ahead"]
    assert not any(each["waits"] for each in (large, gated, alone)), "started in their turn"
    assert [each["lets_start"] for each in found["steps"]] == [True, True, True, False]
    assert all(plain == quantised for plain, quantised in found["orders"])
    for product, resident in zip(found["products"], (3, 2, 2), strict=True):
        assert product["has_products"]
        assert set(product["copies"]) == {"0x10"}, "16 bytes at once"
        assert resident * (product["shared"] + 1024) <= 228 * 1024, "so many programs fit on a multiprocessor"
