"""No kernel is compiled anew because a number changed from one step to the next.

Triton compiles a kernel for each class of an integer (1, a multiple of 16, any other) unless told not to. So every
integer of a kernel is one of two kinds: it belongs to the model, or it is named in do_not_specialize.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "temper" / "models" / "kernels"
STRIDES = {"query_token", "query_head", "key_block", "key_slot", "key_head", "value_block", "value_slot", "value_head"}
OF_THE_MODEL: dict[str, set[str]] = {
    # Whole rows of 16 bytes are loaded because 16 divides these.
    "_tiles_kernel": {*STRIDES, "window"},
    "_decode_kernel": {*STRIDES, "window"},
    "silu_mul_rows": {"gate_stride", "up_stride"},
    "silu_mul_float8_row": {"stride"},
    "_multiply_part": {"outputs", "width"},
    "_add_parts": {"outputs"},
    "silu_mul_rows_backward": {"gate_stride", "up_stride", "grad_stride"},
    "rotate_tokens": {"query_stride", "key_stride"},
    "rotate_and_store_tokens": {
        "query_stride", "key_stride", "value_stride", "key_slot_stride", "value_slot_stride",
    },
    "norm_rows": {"outer", "inner"},
    "norm_rows_backward": {"outer", "inner"},
    "quantize_row": {"x_stride"},
    "_product_kernel": {"outputs", "width", "hidden_stride", "weight_stride"},
    "_entropy_kernel": {"logits_stride", "num_words"},
    "_gradient_kernel": {"logits_stride", "num_words"},
    # As large as a matrix or the vocabulary.
    "_blocks_kernel": {"num_words"},
    "_row_kernel": {"num_words", "num_blocks"},
    "_dequantise_kernel": {"num_blocks", "num_values"},
    "_choose": {"stride"},
    "_multiply": {"outputs", "width"},
    "_mix": {"width"},
    "_multiply_tile": {"outputs", "width"},
    "_rotate_and_store": {"key_block", "key_slot", "value_block", "value_slot"},
}  # fmt: skip
"""By kernel: integers that are the same in every step of a run."""
POINTERS = {
    "query", "key", "value", "output", "table", "starts", "positions", "sums", "norms", "lengths", "logits", "best",
    "temperature", "statistics", "random_key", "position", "given", "tokens", "results", "normalizer", "entropy",
    "grad", "grad_logprobs", "grad_entropy", "hidden", "weight", "bias", "codes", "scales", "levels", "out",
    "row_scale", "channel_scale", "target", "order", "ends", "experts", "weights", "said", "parts", "residual",
    "summed", "normed", "states", "query_norm", "key_norm", "cos", "sin", "keys", "values", "drawn", "logprobs",
    "drawn_table", "logprobs_table", "step",
}  # fmt: skip
FLOATS = {"scale", "epsilon"}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those that are launched: functions that kernels call are compiled with them."""
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        launched = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in launched and node.decorator_list:
                yield node.name, node


KERNELS = dict(kernels())


def named(kernel: ast.FunctionDef, option: str) -> set[str]:
    calls = [decorator for decorator in kernel.decorator_list if isinstance(decorator, ast.Call)]
    return {
        name for call in calls for key in call.keywords if key.arg == option for name in ast.literal_eval(key.value)
    }


def arguments(kernel: ast.FunctionDef) -> set[str]:
    return {a.arg for a in kernel.args.args if a.annotation is None}


@pytest.mark.parametrize("name", KERNELS)
def test_every_integer_belongs_to_the_model_or_is_not_specialised(name: str) -> None:
    kernel = KERNELS[name]
    others = {a for a in arguments(kernel) if a not in POINTERS | FLOATS and not a.endswith("_ptr")}
    varying = named(kernel, "do_not_specialize")
    assert others - varying == OF_THE_MODEL.get(name, set())


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_specialised_is_there(name: str) -> None:
    """A misspelt name would specialise again, in silence."""
    kernel = KERNELS[name]
    assert named(kernel, "do_not_specialize") | named(kernel, "do_not_specialize_on_alignment") <= arguments(kernel)


@pytest.mark.parametrize(
    ("name", "varying"),
    [
        ("_tiles_kernel", {"table_row"}),
        ("_decode_kernel", {"table_row", "num_norms", "splits"}),
        ("_merge_kernel", {"num_norms", "splits"}),
        ("norm_rows", {"num_rows"}),
        ("norm_rows_backward", {"num_rows"}),
        ("_product_kernel", {"num_rows"}),
    ],
)
def test_sizes_of_a_batch_compile_nothing(name: str, varying: set[str]) -> None:
    assert named(KERNELS[name], "do_not_specialize") == varying


def test_slices_of_a_chunk_of_tokens_compile_nothing() -> None:
    """A chunk begins at any token, so its slices are aligned to 4, 8 or 16 bytes."""
    assert named(KERNELS["_gradient_kernel"], "do_not_specialize_on_alignment") == {
        "tokens", "normalizer", "grad_logprobs", "entropy", "grad_entropy",
    }  # fmt: skip
