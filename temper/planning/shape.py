"""What a model is made of, from its config.json alone.

Owns: parameters by kind and the widths that memory and time depend on. Refuses: weights, torch, and deciding whether
the model is supported (models/families.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.models.families import attention_windows

BIASED = ("qwen2", "qwen2_moe")
"""Families whose queries, keys and values always have a bias."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
"""Families that norm queries and keys, head by head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    family: str
    """model_type of the configuration."""
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    """Of a dense layer's feed-forward part, or of one expert."""
    vocabulary: int
    is_tied: bool
    """Whether the head is the embedding."""
    windows: tuple[int | None, ...]
    """By layer, how many tokens a token sees; None: all before it."""
    num_experts: int = 0
    """0: every layer is dense."""
    experts_per_token: int = 0
    has_biases: bool = False
    """Of queries, keys and values."""
    has_head_norms: bool = False

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of the keys of one token in one layer; values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where it has its own."""
        return self.vocabulary * self.width

    @property
    def attention(self) -> int:
        """Parameters of the matrices of one layer's attention."""
        return 2 * self.width * (self.query_width + self.kv_width)

    @property
    def mlp(self) -> int:
        """Parameters of one layer's feed-forward part: all experts and their router."""
        one = 3 * self.width * self.mlp_width
        return one * self.num_experts + self.width * self.num_experts if self.num_experts else one

    @property
    def experts(self) -> int:
        """Parameters of all experts of one layer."""
        return 3 * self.width * self.mlp_width * self.num_experts

    @property
    def active_mlp(self) -> int:
        """Those of them that work on one token."""
        return 3 * self.width * self.active_mlp_width

    @property
    def active_mlp_width(self) -> int:
        return self.mlp_width * max(1, self.experts_per_token)

    @property
    def layers(self) -> int:
        """Parameters of the matrices inside all layers."""
        return self.num_layers * (self.attention + self.mlp)

    @property
    def active_layers(self) -> int:
        return self.num_layers * (self.attention + self.active_mlp)

    def read_layers(self, num_tokens: int) -> float:
        """Parameters of layers that so many tokens need between them, each with experts of its own drawn by lot."""
        if not self.num_experts:
            return float(self.layers)
        idle = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_layers * (self.attention + self.mlp * (1 - idle))

    @property
    def parameters(self) -> int:
        small = 2 * self.width
        small += self.query_width + 2 * self.kv_width if self.has_biases else 0
        small += 2 * self.head_dim if self.has_head_norms else 0
        heads = 1 if self.is_tied else 2
        return self.layers + self.num_layers * small + self.width + heads * self.embedding

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Of factors of this rank on the linear layers of these names, and on "experts"; none: on all linear layers."""
        attention = {
            "q_proj": self.width + self.query_width,
            "k_proj": self.width + self.kv_width,
            "v_proj": self.width + self.kv_width,
            "o_proj": self.width + self.query_width,
        }
        side = self.width + self.mlp_width
        sides = attention | ({} if self.num_experts else dict.fromkeys(("gate_proj", "up_proj", "down_proj"), side))
        wanted = targets or tuple(sides)
        # Gate and up of an expert are one matrix.
        sides["experts"] = self.num_experts * (side + self.width + 2 * self.mlp_width)
        return self.num_layers * rank * sum(both for name, both in sides.items() if name in wanted)


def read_decoder_shape(folder: Path) -> DecoderShape:
    """UserError for a directory without a description that can be read."""
    path = folder / "config.json"
    try:
        return decoder_shape(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: it does not say what the model is made of ({error!r})") from error


def decoder_shape(table: Mapping[str, Any]) -> DecoderShape:
    """From what config.json holds."""
    text: Mapping[str, Any] = table.get("text_config") or table
    heads, family = int(text["num_attention_heads"]), str(text["model_type"])
    experts = text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0
    mlp_width = (text.get("moe_intermediate_size") if experts else None) or text["intermediate_size"]
    return DecoderShape(
        family=family,
        num_layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        num_heads=heads,
        num_kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or text["hidden_size"] // heads),
        mlp_width=int(mlp_width),
        vocabulary=int(text["vocab_size"]),
        is_tied=bool(text.get("tie_word_embeddings", table.get("tie_word_embeddings", family.startswith("gemma")))),
        windows=attention_windows(text),
        num_experts=int(experts),
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
        has_biases=family in BIASED or bool(text.get("attention_bias", False)),
        has_head_norms=family in HEAD_NORMS,
    )
