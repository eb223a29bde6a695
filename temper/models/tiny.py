"""Small random models with a character tokenizer, in ordinary Hugging Face format: the demo's and the tests' models.

Owns: the tokenizer, its chat template, the shape of a Llama or a Qwen3-MoE. Refuses: training them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

from temper.models.save import save_model

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIAL = (PAD, END, USER, ASSISTANT, SYSTEM)
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, plus the chat markers."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *dict.fromkeys(alphabet)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=PAD, clean_up_tokenization_spaces=False
    )
    wrapped.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, SYSTEM]})
    wrapped.chat_template = TEMPLATE
    return wrapped


def counting_tokenizer(characters: int) -> PreTrainedTokenizerFast:
    """So many characters are a token, whatever they say: for lengths alone."""
    vocabulary = {END: 0, "<|text|>": 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|text|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?m).{{1,{characters}}}"), "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_tiny_model(
    folder: Path,
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    context: int,
    alphabet: str,
    seed: int,
    experts: int = 0,
    experts_per_token: int = 2,
) -> Path:
    """Writes a randomly initialised checkpoint, a Llama's or with experts a Qwen3-MoE's. The same seed gives the same
    weights."""
    tokenizer = character_tokenizer(alphabet)
    make: Callable[..., Any] = LlamaConfig
    if experts:
        sparse = {"num_experts": experts, "num_experts_per_tok": experts_per_token, "moe_intermediate_size": mlp_width}
        make = partial(Qwen3MoeConfig, head_dim=width // heads, norm_topk_prob=True, decoder_sparse_step=1, **sparse)
    config = make(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    return folder
