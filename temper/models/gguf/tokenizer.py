"""Builds a Hugging Face tokenizer from the vocabulary, merges and chat template inside a GGUF file.

Owns: byte-level BPE families, listed in SPLITTERS. Refuses: a family it does not know, because a tokenizer that is
nearly right splits numbers differently from training and nothing says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from temper.errors import UserError

# What the format says a token is. Anything else (normal, unused, byte) is an ordinary entry of the vocabulary.
CONTROL, USER_DEFINED = 3, 4

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_smollm(tokenizer: Any) -> None:
    """Single digits, then GPT-2's own pattern. Without the digits "2024" becomes one token that SmolLM2 never saw."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split_qwen2(tokenizer: Any) -> None:
    """Qwen2's pattern on NFC text. Without NFC a decomposed "é" becomes two tokens."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    words = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, level])


SPLITTERS: Mapping[str, Callable[[Any], None]] = {"smollm": _split_smollm, "qwen2": _split_qwen2}
"""How text is cut before merging, by the file's `tokenizer.ggml.pre`."""


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    _build(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    settings: dict[str, Any] = {
        # Loads tokenizer.json as it stands; a model-specific class would rebuild the splitting by its own rules.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "unk_token": None,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            settings[f"{role}_token"] = tokens[token_id]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def _build(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind, family = metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]
    if kind != "gpt2" or family not in SPLITTERS:
        raise UserError(
            f'the GGUF file has a tokenizer of kind "{kind}", family "{family}"; only byte-level BPE ("gpt2") of the '
            f"families {', '.join(SPLITTERS)} can be built. Use the model's own Hugging Face directory instead."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    SPLITTERS[family](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == CONTROL, normalized=False)])
    return tokenizer
