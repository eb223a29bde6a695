"""What a model is made of, from its config.json alone.

Owns: parameters by kind and the widths that memory and time depend on. Refuses: weights, torch, and deciding whether
the model is supported (models/families.py).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.models.families import attention_windows, common_settings, experts_of, idle_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyParts:
    """What layers of a family have that their settings do not say. The defaults are Llama's."""

    has_biases: bool = False
    """Of queries, keys and values, whatever attention_bias says."""
    head_norms: bool = False
    """Whether queries and keys are normed, head by head."""
    wide_norms: bool = False
    """Whether they are normed, all heads together."""
    is_gated: bool = True
    """Whether a feed-forward part without experts is gated: three matrices, else two."""
    num_norms: int = 2
    """Norms of a layer's width in every layer."""
    num_expert_norms: int = 0
    """More of them in a layer with experts."""
    are_norms_biased: bool = False
    gate: str = ""
    """Name of the matrix that gates what attention says; "": none."""
    has_router_bias: bool = False
    """Whether the bias of a router is a parameter; a buffer is not counted."""
    has_shared_gate: bool = False
    has_shared_mlp: bool = False
    """Whether layers with experts have a shared part as wide as intermediate_size."""
    are_shared_joined: bool = False
    """Whether gate and up of a shared part are one matrix."""


LLAMA = FamilyParts()
UNGATED = (
    "biogpt",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "jais2",
    "nanochat",
    "opt",
    "persimmon",
    "phi",
    "starcoder2",
)
"""Families that are estimated alike: their biases and positions, a percent or two, are not counted."""
FAMILY_PARTS = {
    **dict.fromkeys(UNGATED, FamilyParts(is_gated=False)),
    "afmoe": FamilyParts(head_norms=True, num_norms=4, gate="gate_proj", has_router_bias=True),
    "apertus": FamilyParts(is_gated=False, head_norms=True),
    "arcee": FamilyParts(is_gated=False),
    "axk1": FamilyParts(num_expert_norms=1),
    "dots1": FamilyParts(head_norms=True),
    "ernie4_5_moe": FamilyParts(has_router_bias=True),
    "exaone4": FamilyParts(head_norms=True),
    "exaone_moe": FamilyParts(head_norms=True),
    "flex_olmo": FamilyParts(wide_norms=True),
    "gemma3_text": FamilyParts(head_norms=True, num_norms=4),
    "glm4": FamilyParts(num_norms=4),
    "granitemoeshared": FamilyParts(are_shared_joined=True),
    "hunyuan_v1_dense": FamilyParts(head_norms=True),
    "hunyuan_v1_moe": FamilyParts(head_norms=True, has_shared_mlp=True),
    "hy_v3": FamilyParts(head_norms=True),
    "laguna": FamilyParts(head_norms=True, gate="g_proj", has_router_bias=True),
    "longcat_flash": FamilyParts(has_shared_mlp=True),
    "mellum": FamilyParts(head_norms=True),
    "minimax_m2": FamilyParts(wide_norms=True),
    "olmo2": FamilyParts(wide_norms=True),
    "olmo3": FamilyParts(wide_norms=True),
    "olmoe": FamilyParts(wide_norms=True),
    "phimoe": FamilyParts(are_norms_biased=True),
    "qwen2": FamilyParts(has_biases=True),
    "qwen2_moe": FamilyParts(has_biases=True, has_shared_gate=True),
    "qwen3": FamilyParts(head_norms=True),
    "qwen3_moe": FamilyParts(head_norms=True),
}
"""By model_type. A family that is not here is counted as Llama's layers, with the experts that its settings name."""


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
    idle_experts: int = 0
    """Experts that are chosen from and do nothing: routers score them, and gate and up of each are held."""
    has_biases: bool = False
    """Of queries, keys and values."""
    gate_width: int = 0
    """Of the gate of what attention says; 0: none."""
    norm_width: int = 0
    """Of the norms of queries and keys of one layer together."""
    latent: LatentAttention | None = None

    @property
    def parts(self) -> FamilyParts:
        return FAMILY_PARTS.get(self.family, LLAMA)

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
        if self.num_experts:
            return self.experts + self.common_mlp
        return (3 if self.parts.is_gated else 2) * self.width * self.mlp_width

    @property
    def experts(self) -> int:
        """Parameters of all experts of one layer that are chosen from."""
        return self.width * self.mlp_width * (3 * self.num_experts + 2 * self.idle_experts)

    @property
    def common_mlp(self) -> int:
        """Parameters of one layer with experts that work on every token: its router, and shared experts."""
        gate = self.width if self.parts.has_shared_gate else 0
        return self.width * (self.num_experts + self.idle_experts) + 3 * self.width * self.shared_width + gate

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
        norm = self.width * (2 if self.parts.are_norms_biased else 1)
        small = self.parts.num_norms * norm + self.norm_width
        small += self.query_width + 2 * self.kv_width if self.has_biases else 0
        routed = self.parts.num_expert_norms * norm + (self.num_experts if self.parts.has_router_bias else 0)
        heads = 1 if self.is_tied else 2
        return self.layers + self.num_layers * small + self.expert_layers * routed + norm + heads * self.embedding

    @property
    def _attention_matrices(self) -> dict[str, tuple[int, int]]:
        """By name, (rows, columns) of each matrix of one layer's attention."""
        latent = self.latent
        if latent is None:
            of_queries, of_keys = (self.width, self.query_width), (self.width, self.kv_width)
            gate = {self.parts.gate: (self.width, self.gate_width)} if self.gate_width else {}
            return {"q_proj": of_queries, "k_proj": of_keys, "v_proj": of_keys, "o_proj": of_queries, **gate}
        queries = {"q_proj": (self.width, self.query_width)}
        if latent.query_rank:
            queries = {"q_a_proj": (self.width, latent.query_rank), "q_b_proj": (latent.query_rank, self.query_width)}
        made = self.num_heads * (self.head_dim - latent.rotated + latent.value_dim)
        return queries | {
            "kv_a_proj_with_mqa": (self.width, latent.rank + latent.rotated),
            "kv_b_proj": (latent.rank, made),
            "o_proj": (self.num_heads * latent.value_dim, self.width),
        }

    @property
    def _fed_matrices(self) -> list[tuple[int, dict[str, tuple[int, int]]]]:
        """(layers, by name (rows, columns)) of feed-forward parts that are linear layers: all but experts that are
        chosen."""
        if not self.num_experts:
            return [(self.num_layers, _fed(self.width, self.mlp_width, is_gated=self.parts.is_gated))]
        shared = _fed(self.width, self.shared_width)
        if self.parts.are_shared_joined:
            widths = self.width, self.shared_width
            shared = {"input_linear": (self.width, 2 * self.shared_width), "output_linear": widths}
        if not self.shared_width:
            shared = {}
        if self.parts.has_shared_gate:
            shared["shared_expert_gate"] = (self.width, 1)
        return [(self.num_dense_layers, _fed(self.width, self.dense_mlp_width)), (self.expert_layers, shared)]

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Of factors of this rank on the linear layers of these names, and on "experts"; none: on all linear layers."""
        over_layers = Counter(
            {name: self.num_layers * sum(matrix) for name, matrix in self._attention_matrices.items()}
        )
        for count, fed in self._fed_matrices:  # attention's gate may have the name of the feed-forward part's
            over_layers.update({name: count * sum(matrix) for name, matrix in fed.items()})
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
    text = common_settings(table.get("text_config") or table)
    heads, family = int(text["num_attention_heads"]), str(text["model_type"])
    experts, experts_per_token = experts_of(text)
    dense_width = int(text.get("intermediate_size") or 4 * text["hidden_size"])  # without a width, GPT-2's
    latent = _latent_attention(text)
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    shape = DecoderShape(
        family=family,
        num_layers=int(text["num_hidden_layers"]),
        width=int(text["hidden_size"]),
        num_heads=heads,
        num_kv_heads=heads if latent else int(text.get("num_key_value_heads") or heads),
        head_dim=int(latent.rotated + text["qk_nope_head_dim"] if latent else head_dim),
        mlp_width=int(text.get("moe_intermediate_size") or dense_width) if experts else dense_width,
        vocabulary=int(text["vocab_size"]),
        is_tied=bool(text.get("tie_word_embeddings", table.get("tie_word_embeddings", family.startswith("gemma")))),
        windows=attention_windows(text),
        num_experts=experts,
        experts_per_token=ceil(experts_per_token),
        latent=latent,
    )
    return replace(shape, **_small_parts(text, shape), **(_beside_experts(text, shape, dense_width) if experts else {}))


def _fed(width: int, inner: int, *, is_gated: bool = True) -> dict[str, tuple[int, int]]:
    """By name, (rows, columns) of the matrices of a feed-forward part."""
    names = ("gate_proj", "up_proj", "down_proj") if is_gated else ("up_proj", "down_proj")
    return dict.fromkeys(names, (width, inner))


def _latent_attention(text: Mapping[str, Any]) -> LatentAttention | None:
    if not text.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(text.get("q_lora_rank") or 0),
        rank=int(text["kv_lora_rank"]),
        rotated=int(text["qk_rope_head_dim"]),
        value_dim=int(text["v_head_dim"]),
    )


def _small_parts(text: Mapping[str, Any], shape: DecoderShape) -> dict[str, Any]:
    """Norms, biases and the gate of attention."""
    is_by_head = shape.family == "laguna" and text.get("gating", True) in (True, "per-head")
    gate_width = shape.num_heads if is_by_head else shape.query_width
    return {
        "norm_width": _norm_width(text, shape),
        "has_biases": shape.parts.has_biases or bool(text.get("attention_bias", False)),
        "gate_width": gate_width if shape.parts.gate else 0,
    }


def _norm_width(text: Mapping[str, Any], shape: DecoderShape) -> int:
    if shape.latent is not None:
        return shape.latent.query_rank + shape.latent.rank
    if shape.parts.wide_norms:
        return shape.query_width + shape.kv_width
    return 2 * shape.head_dim if shape.parts.head_norms or text.get("use_qk_norm") else 0


def _beside_experts(text: Mapping[str, Any], shape: DecoderShape, dense_width: int) -> dict[str, Any]:
    """What tokens of a model with experts meet beside those that are chosen for them."""
    count, dense = int(text.get("num_shared_experts") or 0), _dense_layers(text)
    own = dense_width if shape.parts.has_shared_mlp else int(text.get("shared_expert_intermediate_size") or 0)
    return {
        "num_dense_layers": dense,
        "dense_mlp_width": dense_width if dense else 0,
        "shared_width": own or count * shape.mlp_width,
        "idle_experts": idle_experts(text),
    }


def _dense_layers(text: Mapping[str, Any]) -> int:
    """How many layers of a model with experts have none: the first ones (DeepSeek, GLM), the last ones (ERNIE), named
    ones, or all but every so-manyth (Qwen)."""
    places = range(int(text["num_hidden_layers"]))
    if kinds := text.get("mlp_layer_types"):
        return sum(kind == "dense" for kind in kinds[: len(places)])
    first, last = int(text.get("first_k_dense_replace") or 0), text.get("moe_layer_end_index")
    end = len(places) if last in (None, -1) else int(last) + 1
    named, step = text.get("mlp_only_layers") or (), int(text.get("decoder_sparse_step") or 1)
    return sum(not first <= place < end or place in named or (place + 1) % step > 0 for place in places)
