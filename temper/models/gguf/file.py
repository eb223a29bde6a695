"""Turns a quantised GGUF file into a dense bf16 Hugging Face checkpoint directory.

Owns: names and layouts of the Llama and Qwen2 architectures. Refuses: other architectures, and tensors it cannot place.
The weights are the dequantised ones: scores published for the original model do not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from temper.errors import UserError, install_line
from temper.models.gguf.tokenizer import write_tokenizer

Report = Callable[[str, float], None]
"""Called with the phase and how much of it is done, 0 to 1."""

PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
ARCHITECTURES = ("llama", "qwen2")


def convert(path: Path, folder: Path, *, is_tied: bool, stop_tokens: tuple[str, ...], report: Report) -> None:
    """Writes weights, configuration, tokenizer and chat template of `path` into the existing `folder`.

    is_tied and stop_tokens are what a GGUF file cannot say: some tied models carry a second copy of the embedding, and
    only one end token fits in the metadata.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"reading GGUF files needs the package gguf. Run: {install_line('gguf')}") from error
    from safetensors.torch import save_file

    report("read", 0.0)
    reader = GGUFReader(path)
    report("read", 1.0)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise UserError(f'{path}: architecture "{architecture}" is not among {", ".join(ARCHITECTURES)}')
    write_config(metadata, folder, is_tied=is_tied, stop_tokens=stop_tokens)
    write_tokenizer(metadata, folder, context=metadata[f"{architecture}.context_length"])
    state = dense_state({tensor.name: tensor for tensor in reader.tensors}, metadata, is_tied=is_tied, report=report)
    report("write", 0.0)
    weights = folder / "model.safetensors"
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes it for the owner alone
    report("write", 1.0)


def write_config(metadata: Mapping[str, Any], folder: Path, *, is_tied: bool, stop_tokens: tuple[str, ...]) -> None:
    """Writes config.json and generation_config.json."""
    from transformers import GenerationConfig, LlamaConfig, Qwen2Config

    config_class, model_class = {
        "llama": (LlamaConfig, "LlamaForCausalLM"),
        "qwen2": (Qwen2Config, "Qwen2ForCausalLM"),
    }[metadata["general.architecture"]]
    model = {name.split(".", 1)[1]: v for name, v in metadata.items() if name.startswith(("llama.", "qwen2."))}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {role: metadata[f"tokenizer.ggml.{key}_token_id"] for role, key in (("bos", "bos"), ("pad", "padding"))}
    config = config_class(
        architectures=[model_class],
        dtype="bfloat16",
        vocab_size=len(tokens),
        hidden_size=model["embedding_length"],
        intermediate_size=model["feed_forward_length"],
        num_hidden_layers=model["block_count"],
        num_attention_heads=model["attention.head_count"],
        num_key_value_heads=model["attention.head_count_kv"],
        max_position_embeddings=model["context_length"],
        rms_norm_eps=_shortest(model["attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(model["rope.freq_base"])},
        tie_word_embeddings=is_tied,
        bos_token_id=ids["bos"],
        eos_token_id=metadata["tokenizer.ggml.eos_token_id"],
        pad_token_id=ids["pad"],
    )
    config.save_pretrained(folder)
    stop_ids = [tokens.index(token) for token in stop_tokens]
    ends = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    # Deliberately without temperature or top-p: what a recipe does not say must not be applied.
    GenerationConfig(bos_token_id=ids["bos"], eos_token_id=ends, pad_token_id=ids["pad"]).save_pretrained(folder)


def dense_state(
    tensors: Mapping[str, Any], metadata: Mapping[str, Any], *, is_tied: bool, report: Report
) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, in bf16."""
    from gguf.quants import dequantize

    count = "llama.attention.head_count"
    # Only Llama files are interleaved; Qwen2's are stored as Hugging Face has them.
    heads = {"attn_q": metadata[count], "attn_k": metadata[count + "_kv"]} if count in metadata else {}
    state: dict[str, Tensor] = {}
    for done, (name, tensor) in enumerate(_used(tensors, is_tied).items()):
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part in heads:
            value = unpermute(value, heads[part])
        state[huggingface_name(name)] = value.to(torch.bfloat16).contiguous()
        report("convert", (done + 1) / len(tensors))
    report("convert", 1.0)
    return state


def _used(tensors: Mapping[str, Any], is_tied: bool) -> dict[str, Any]:
    """The tensors that become parameters. Of a tied pair the output copy is kept: it is quantised more finely."""
    used = dict(tensors)
    if is_tied and "output.weight" in used:
        used["token_embd.weight"] = used.pop("output.weight")
    return used


def huggingface_name(name: str) -> str:
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    if name in WHOLE:
        return WHOLE[name]
    if name == "output.weight":
        return "lm_head.weight"
    pieces = name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or pieces[2] not in PARTS:
        raise UserError(f'tensor "{name}" of the GGUF file has no place in a Llama or Qwen2 model')
    _, layer, part, kind = pieces
    return f"model.layers.{layer}.{PARTS[part]}.{kind}"


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undoes the interleaving of rotary halves that GGUF applies to Llama's query and key rows.

    Rows of one head are stored 0, d/2, 1, d/2 + 1, ...; Hugging Face wants 0 ... d/2 - 1, d/2 ... d - 1. Left as they
    are the model still writes fluent text, only worse.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
