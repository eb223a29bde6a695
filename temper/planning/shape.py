"""What a model is made of, from its config.json alone.

Owns: parameters by kind and the widths that memory and time depend on. Refuses: weights, torch, and deciding whether
the model is supported (models/families.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.models.families import attention_windows

BIASED = ("qwen2", "qwen2_moe")
"""Families whose queries, keys and values always have a bias."""
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "dots1", "mellum", "exaone_moe", "hy_v3")
"""Families that norm queries and keys, head by head."""
WIDE_NORMS = ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")
"""Families that norm queries and keys, all heads together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention that makes keys and values from a narrow state (DeepSeek). head_dim is that of queries and keys."""

    query_rank: int
    """Width of the state that queries are made from; 0: from the layer's own."""
    rank: int
    """Of the state that keys and values are made from."""
    rotated: int
    """Of a head's numbers, those that are rotated; all heads share the keys of these."""
    value_dim: int
    """Of a head's value."""


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
    """Of a dense model's feed-forward part, or of one expert that is chosen."""
    vocabulary: int
    is_tied: bool
    """Whether the head is the embedding."""
    windows: tuple[int | None, ...]
    """By layer, how many tokens a token sees; None: all before it."""
    num_experts: int = 0
    """0: every layer is dense."""
    experts_per_token: int = 0
    num_dense_layers: int = 0
    """Layers without experts of a model that has experts."""
    dense_mlp_width: int = 0
    """Of the feed-forward part of these."""
    shared_width: int = 0
    """Of what every token meets beside its experts: all shared experts of a layer together."""
    has_shared_gate: bool = False
    has_biases: bool = False
    """Of queries, keys and values."""
    norm_width: int = 0
    """Of the norms of queries and keys of one layer together."""
    latent: LatentAttention | None = None

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
    def expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention(self) -> int:
        """Parameters of the matrices of one layer's attention."""
        return sum(rows * columns for rows, columns in self._attention_matrices.values())

    @property
    def mlp(self) -> int:
        """Parameters of one layer's feed-forward part: all experts, their router, and what is shared."""
        return self.experts + self.common_mlp if self.num_experts else 3 * self.width * self.mlp_width

    @property
    def experts(self) -> int:
        """Parameters of all experts of one layer that are chosen from."""
        return 3 * self.width * self.mlp_width * self.num_experts

    @property
    def common_mlp(self) -> int:
        """Parameters of one layer with experts that work on every token: its router, and shared experts."""
        gate = self.width if self.has_shared_gate else 0
        return self.width * self.num_experts + 3 * self.width * self.shared_width + gate

    @property
    def dense_mlp(self) -> int:
        """Parameters of the feed-forward part of one layer without experts, of a model that has experts."""
        return 3 * self.width * self.dense_mlp_width

    @property
    def active_mlp(self) -> int:
        """Of one layer's feed-forward part, the parameters that work on one token."""
        if not self.num_experts:
            return self.mlp
        return 3 * self.width * self.mlp_width * self.experts_per_token + self.common_mlp

    @property
    def active_mlp_width(self) -> int:
        """Numbers of one token inside the feed-forward part of a layer, with experts where there are any."""
        return self.mlp_width * max(1, self.experts_per_token) + self.shared_width

    @property
    def widest_mlp(self) -> int:
        """The same of the layer that has most."""
        return max(self.active_mlp_width, self.dense_mlp_width)

    @property
    def widest_matrix(self) -> int:
        """Width of the widest single feed-forward part: dense, shared, or one expert."""
        return max(self.mlp_width, self.shared_width, self.dense_mlp_width)

    @property
    def layers(self) -> int:
        """Parameters of the matrices inside all layers."""
        return self._over_layers(self.mlp)

    @property
    def active_layers(self) -> int:
        """Those of them that work on one token."""
        return self._over_layers(self.active_mlp)

    def read_layers(self, num_tokens: int) -> float:
        """Parameters of layers that so many tokens need between them, each with experts of its own drawn by lot."""
        if not self.num_experts:
            return float(self.layers)
        idle = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self._over_layers(self.mlp) - self.expert_layers * self.experts * idle

    def _over_layers(self, mlp: int) -> int:
        """mlp: of one layer with experts or, in a model without them, of any."""
        num_dense = self.num_dense_layers
        return self.num_layers * self.attention + (self.num_layers - num_dense) * mlp + num_dense * self.dense_mlp

    @property
    def parameters(self) -> int:
        small = 2 * self.width + self.norm_width
        small += self.query_width + 2 * self.kv_width if self.has_biases else 0
        heads = 1 if self.is_tied else 2
        return self.layers + self.num_layers * small + self.width + heads * self.embedding

    @property
    def _attention_matrices(self) -> dict[str, tuple[int, int]]:
        """By name, (rows, columns) of each matrix of one layer's attention."""
        latent = self.latent
        if latent is None:
            of_queries, of_keys = (self.width, self.query_width), (self.width, self.kv_width)
            return {"q_proj": of_queries, "k_proj": of_keys, "v_proj": of_keys, "o_proj": of_queries}
        queries = {"q_proj": (self.width, self.query_width)}
        if latent.query_rank:
            queries = {"q_a_proj": (self.width, latent.query_rank), "q_b_proj": (latent.query_rank, self.query_width)}
        made = self.num_heads * (self.head_dim - latent.rotated + latent.value_dim)
        return queries | {
            "kv_a_proj_with_mqa": (self.width, latent.rank + latent.rotated),
            "kv_b_proj": (latent.rank, made),
            "o_proj": (self.num_heads * latent.value_dim, self.width),
        }

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Of factors of this rank on the linear layers of these names, and on "experts"; none: on all linear layers."""
        over_layers = {name: self.num_layers * sum(matrix) for name, matrix in self._attention_matrices.items()}
        # Dense and shared feed-forward parts are linear layers; experts that are chosen are not.
        fed = [(self.num_dense_layers, self.dense_mlp_width), (self.expert_layers, self.shared_width)]
        if not self.num_experts:
            fed = [(self.num_layers, self.mlp_width)]
        linear = sum(count * (self.width + width) for count, width in fed if width)
        over_layers |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), linear)
        if self.has_shared_gate:
            over_layers["shared_expert_gate"] = self.expert_layers * (self.width + 1)
        wanted = targets or tuple(over_layers)
        # Gate and up of an expert are one matrix.
        one = (self.width + 2 * self.mlp_width) + (self.mlp_width + self.width)
        over_layers["experts"] = self.expert_layers * self.num_experts * one
        return rank * sum(both for name, both in over_layers.items() if name in wanted)


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
    experts = int(_first(text, "num_experts", "num_local_experts", "n_routed_experts"))
    expert_width = int(text.get("moe_intermediate_size") or text["intermediate_size"]) if experts else 0
    latent = _latent_attention(text)
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    shape = DecoderShape(
        family=family,
        num_layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        num_heads=heads,
        num_kv_heads=heads if latent else int(text.get("num_key_value_heads") or heads),
        head_dim=int(latent.rotated + text["qk_nope_head_dim"] if latent else head_dim),
        mlp_width=expert_width or int(text["intermediate_size"]),
        vocabulary=int(text["vocab_size"]),
        is_tied=bool(text.get("tie_word_embeddings", table.get("tie_word_embeddings", family.startswith("gemma")))),
        windows=attention_windows(text),
        num_experts=experts,
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
        has_biases=family in BIASED or bool(text.get("attention_bias", False)),
        latent=latent,
    )
    return replace(shape, norm_width=_norm_width(text, shape), **(_beside_experts(text) if experts else {}))


def _first(text: Mapping[str, Any], *names: str) -> Any:
    """The first of these settings that is there and not 0 or none; else 0."""
    return next((value for name in names if (value := text.get(name))), 0)


def _latent_attention(text: Mapping[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(text.get("q_lora_rank") or 0),
        rank=int(text["kv_lora_rank"]),
        rotated=int(text["qk_rope_head_dim"]),
        value_dim=int(text["v_head_dim"]),
    )


def _norm_width(text: Mapping[str, Any], shape: DecoderShape) -> int:
    if shape.latent is not None:
        return shape.latent.query_rank + shape.latent.rank
    if shape.family in WIDE_NORMS:
        return shape.query_width + shape.kv_width
    return 2 * shape.head_dim if shape.family in HEAD_NORMS or text.get("use_qk_norm") else 0


def _beside_experts(text: Mapping[str, Any]) -> dict[str, Any]:
    """What tokens of a model with experts meet beside those that are chosen for them."""
    shared = int(text.get("shared_expert_intermediate_size") or 0)  # Qwen2: one, of its own width, behind a gate
    count = int(_first(text, "n_shared_experts", "num_shared_experts"))
    dense = _dense_layers(text)
    return {
        "num_dense_layers": dense,
        "dense_mlp_width": int(text["intermediate_size"]) if dense else 0,
        "shared_width": shared or count * int(text.get("moe_intermediate_size") or text["intermediate_size"]),
        "has_shared_gate": shared > 0,
    }


def _dense_layers(text: Mapping[str, Any]) -> int:
    """How many layers of a model with experts have none: the first ones (DeepSeek, GLM), named ones, or all but every
    so-manyth (Qwen)."""
    places = range(int(text["num_hidden_layers"]))
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in kinds[: len(places)])
    first = int(_first(text, "first_k_dense_replace", "num_dense_layers"))
    named, step = text.get("mlp_only_layers") or (), int(text.get("decoder_sparse_step") or 1)
    return sum(place < first or place in named or (place + 1) % step > 0 for place in places)
