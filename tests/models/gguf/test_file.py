"""GGUF to Hugging Face: on a tiny file written here, and against reference tokenizers where they are at hand."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from temper.errors import UserError
from temper.models.gguf.file import convert, huggingface_name, unpermute
from temper.models.gguf.tokenizer import write_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

MODELS = Path(os.environ.get("TEMPER_TEST_MODELS", Path(__file__).parents[4] / "shared" / "models"))
"""Reference tokenizers and configurations, one folder per model."""
FETCHED = Path(os.environ.get("TEMPER_TEST_FETCHED", "/nonexistent"))
"""Folders made by `temper model fetch`, one per model."""
NAMES = ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")
FAMILY = {NAMES[0]: "smollm", NAMES[1]: "qwen2"}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
WIDTH, HEADS, KV_HEADS, LAYERS, MLP, VOCABULARY = 32, 4, 2, 2, 64, 260


def silent(phase: str, share: float) -> None:
    assert 0.0 <= share <= 1.0, phase


def tiny_tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=64,
            rms_norm_eps=1e-5, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        )
    )  # fmt: skip
    for parameter in model.parameters():  # what bf16 can hold, so that nothing is lost on the way
        parameter.data = parameter.data.bfloat16().float()
    return model


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the GGUF converters do to Llama's q and k."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_tiny(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tiny_tokens())
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    for role, token_id in (("bos", 1), ("eos", 2), ("pad", 0)):
        getattr(writer, f"add_{role}_token_id")(token_id)
    writer.add_chat_template(TEMPLATE)
    parts = ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    blocks = [f"blk.{layer}.{part}.weight" for layer in range(LAYERS) for part in parts]
    places = {huggingface_name(block): block for block in blocks}
    places |= {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, place in places.items():
        value = model.state_dict()[name].numpy()
        if ".attn_q." in place or ".attn_k." in place:
            value = permute(value, HEADS if ".attn_q." in place else KV_HEADS)
        writer.add_tensor(place, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_converted_file_gives_the_logits_of_the_model_it_was_written_from(tmp_path: Path) -> None:
    original = tiny_llama()
    write_tiny(tmp_path / "tiny.gguf", original)
    convert(tmp_path / "tiny.gguf", tmp_path, is_tied=True, stop_tokens=("<|im_end|>", "<|endoftext|>"), report=silent)
    made = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None] * 7 % VOCABULARY
    with torch.no_grad():
        assert torch.equal(made(ids).logits, original(ids).logits)
    assert made.generation_config.eos_token_id == [2, 0]
    assert made.config.rms_norm_eps == 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "<|im_start|>user\nab<|im_end|>\n"
    ids = tokenizer.encode(chat)
    assert (ids[0], ids[-3], ids[-2]) == (1, VOCABULARY - 1, 2)
    assert tokenizer.decode(ids) == chat


def test_forgetting_to_undo_the_rotary_interleaving_changes_the_weights() -> None:
    weight = torch.arange(16.0).reshape(8, 2)
    interleaved = torch.from_numpy(permute(weight.numpy(), 2))
    assert torch.equal(unpermute(interleaved, 2), weight)
    assert not torch.equal(interleaved, weight)
    assert not torch.equal(unpermute(interleaved, 1), weight), "the number of heads matters"


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", tiny_llama(), architecture="mamba")
    with pytest.raises(UserError, match='"mamba" is not among llama, qwen2'):
        convert(tmp_path / "tiny.gguf", tmp_path, is_tied=True, stop_tokens=("<|im_end|>",), report=silent)


def test_an_unknown_tensor_and_an_unknown_tokenizer_family_are_refused() -> None:
    with pytest.raises(UserError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        huggingface_name("blk.0.ffn_gate_exps.weight")
    with pytest.raises(UserError, match='family "tekken"'):
        write_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken", "tokenizer.ggml.tokens": []}, Path(), 8
        )


def reference_metadata(name: str) -> dict[str, Any]:
    """What the model's GGUF file says about its tokenizer, read back from the reference tokenizer."""
    folder = MODELS / name
    if not folder.is_dir():
        pytest.skip(f"no reference tokenizer in {folder}; set TEMPER_TEST_MODELS")
    stored = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].__getitem__)
    types = [1] * len(tokens)
    for added in stored["added_tokens"]:
        types[added["id"]] = 3 if added["special"] else 4
    roles = json.loads((folder / "config.json").read_text())
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": FAMILY[name],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in stored["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": roles["bos_token_id"],
        "tokenizer.ggml.eos_token_id": roles["eos_token_id"],
        "tokenizer.ggml.padding_token_id": roles["pad_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }


def varied_strings() -> list[str]:
    pieces = [
        "Hello, world!",
        "2024",
        "3.14159",
        "x+=1",
        " ",
        "   ",
        "\t",
        "\n",
        "\r\n\r\n",
        "naïve café",
        "cafe\u0301",
        "日本語の文",
        "Привет",
        "مرحبا",
        "🙂👩‍👩‍👧",
        "def f(x):\n    return x ** 2  # square\n",
        "it's we'll I'M",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<tool_call>",
        "<|im_start",
        "[PAD151900]",
        "\u212b",
        "ﬁ",
        "a\u0000b",
        "1,000,000",
        "½²",
        "٣٤",
        "—“quoted”…",
        "https://a.b/c?d=e&f=%20",
        '{"k": [1, null]}',
        "AAAAaaaa",
        "#include <stdio.h>",
        "$\\frac{1}{2}$",
        "\u00a0\u2003",
    ]
    generator = random.Random(0)
    made = ["".join(generator.choices(pieces, k=generator.randint(2, 9))) for _ in range(300)]
    ranges = ((32, 126), (160, 0x2FFF))
    noise = ["".join(chr(generator.randint(*generator.choice(ranges))) for _ in range(40)) for _ in range(60)]
    return pieces + made + noise


CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "42"},
    ],
]


def assert_same_tokenizer(made: Any, reference: Any) -> None:
    for text in varied_strings():
        ids = reference.encode(text)
        assert made.encode(text) == ids, repr(text)
        assert made.decode(ids) == reference.decode(ids)
        assert made.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    for chat in CHATS:
        for prompt in (False, True):
            rendered = [
                t.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt) for t in (made, reference)
            ]
            assert rendered[0] == rendered[1]
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "model_max_length", "padding_side"):
        assert getattr(made, role) == getattr(reference, role), role


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_built_from_metadata_equals_the_reference(name: str, tmp_path: Path) -> None:
    metadata = reference_metadata(name)
    reference = AutoTokenizer.from_pretrained(MODELS / name)
    write_tokenizer(metadata, tmp_path, context=reference.model_max_length)
    assert_same_tokenizer(AutoTokenizer.from_pretrained(tmp_path), reference)


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "other"), [(NAMES[0], "qwen2"), (NAMES[1], "smollm")])
def test_the_comparison_notices_the_wrong_splitting_rule(name: str, other: str, tmp_path: Path) -> None:
    write_tokenizer(reference_metadata(name) | {"tokenizer.ggml.pre": other}, tmp_path, context=8192)
    with pytest.raises(AssertionError):
        assert_same_tokenizer(AutoTokenizer.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(MODELS / name))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_really_fetched_model_equals_the_reference_and_talks_sense(name: str) -> None:
    folder = FETCHED / name
    if not folder.is_dir() or not (MODELS / name).is_dir():
        pytest.skip("set TEMPER_TEST_FETCHED to a folder with fetched models, TEMPER_TEST_MODELS to their references")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert_same_tokenizer(tokenizer, AutoTokenizer.from_pretrained(MODELS / name))
    made, reference = (json.loads((where / "config.json").read_text()) for where in (folder, MODELS / name))
    for key in reference:
        if key not in ("transformers_version", "rms_norm_eps", "unk_token_id"):
            assert made[key] == reference[key], key
    assert np.float32(made["rms_norm_eps"]) == np.float32(reference["rms_norm_eps"])
    ends = [
        json.loads((where / "generation_config.json").read_text())["eos_token_id"] for where in (folder, MODELS / name)
    ]
    assert ends[0] == ends[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # bf16 crawls on older CPUs
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :])
