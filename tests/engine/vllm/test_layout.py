"""Where published tensors lie in vLLM's model, over one rank and several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from temper.engine.manifest import TensorFacts
from temper.engine.vllm.layout import join_shares, plan_of
from temper.errors import BackendError

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def facts(*shape: int, dtype: str = "float32") -> TensorFacts:
    return TensorFacts(shape, dtype, "")


def test_fused_parameters_are_filled_in_vllms_order() -> None:
    own = {"a.qkv_proj.weight": torch.zeros(8, 2), "embed.weight": torch.zeros(128, 2)}
    given = {
        "a.v_proj.weight": facts(2, 2),
        "a.q_proj.weight": facts(4, 2),
        "embed.weight": facts(100, 2),
        "a.k_proj.weight": facts(2, 2),
    }
    assert plan_of(given, own, PACKED) == {
        "a.qkv_proj.weight": ["a.q_proj.weight", "a.k_proj.weight", "a.v_proj.weight"],
        "embed.weight": ["embed.weight"],
    }
    for broken in (
        {name: tensor for name, tensor in given.items() if "k_proj" not in name},
        {**given, "embed.weight": facts(50, 2)},
        {**given, "embed.weight": facts(100, 3)},
        {**given, "embed.weight": facts(100, 2, dtype="bfloat16")},
        {**given, "a.gate.weight": facts(1, 2)},
    ):
        with pytest.raises(BackendError, match="nothing was loaded"):
            plan_of(broken, own, PACKED)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
def test_stacks_of_experts_have_other_names_there(block: str) -> None:
    given = {
        "a.mlp.experts.gate_up_proj": facts(4, 6, 2),
        "a.mlp.experts.down_proj": facts(4, 2, 3),
        "a.mlp.gate.weight": facts(4, 2),
    }
    own = {
        f"a.{block}.experts.routed_experts.w13_weight": torch.zeros(4, 6, 2),
        f"a.{block}.experts.routed_experts.w2_weight": torch.zeros(4, 2, 3),
        f"a.{block}.gate.weight": torch.zeros(4, 2),
    }
    assert plan_of(given, own, PACKED) == {target: [name] for target, name in zip(own, given, strict=True)}
    shared = {**own, f"a.{block}.experts.routed_experts.w2_weight": torch.zeros(4, 2, 2)}
    with pytest.raises(BackendError, match="in another layout are not supported"):
        plan_of(given, shared, PACKED)


WHOLE = {
    "a.q_proj.weight": (4, 2), "a.k_proj.weight": (2, 2), "a.v_proj.weight": (2, 2), "a.o_proj.weight": (2, 4),
    "norm.weight": (2,), "embed.weight": (100, 2),
}  # fmt: skip


def cut(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each of two ranks of vLLM holds."""
    q, k, v, o, norm, embed = tensors.values()
    padded = torch.cat([embed, torch.zeros(28, 2)])
    return [
        {
            "a.qkv_proj.weight": torch.cat([part.chunk(2)[rank] for part in (q, k, v)]),
            "a.o_proj.weight": o.chunk(2, dim=1)[rank],
            "norm.weight": norm,
            "embed.weight": padded.chunk(2)[rank],
        }
        for rank in range(2)
    ]


def join(ranks: list[dict[str, Tensor]], published: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {name: facts(*tensor.shape) for name, tensor in published.items()}
    found: dict[str, Tensor] = {}
    for target, names in plan_of(given, ranks[0], PACKED, len(ranks)).items():
        found |= dict(join_shares(target, {name: given[name] for name in names}, [rank[target] for rank in ranks]))
    return found


def test_what_ranks_hold_is_put_together_to_what_was_published() -> None:
    published = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    ranks = cut(published)
    found = join(ranks, published)
    assert found.keys() == published.keys()
    assert all(torch.equal(found[name], published[name]) for name in published)
    ranks[1]["a.qkv_proj.weight"][0, 0] += 1  # the second half of q, on the second rank alone
    wrong = join(ranks, published)
    assert [name for name in published if not torch.equal(wrong[name], published[name])] == ["a.q_proj.weight"]


def test_a_rank_that_holds_another_copy_of_what_all_have_is_noticed() -> None:
    published = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    ranks = cut(published)
    ranks[1]["norm.weight"] = published["norm.weight"] + 1
    with pytest.raises(BackendError, match=r"different values of norm\.weight"):
        join(ranks, published)


def test_heads_that_ranks_would_have_to_repeat_are_refused() -> None:
    """One head for keys and values: vLLM gives each of two ranks a copy."""
    published = {name: torch.randn(shape) for name, shape in WHOLE.items()}
    repeated = torch.zeros(2 + 2 + 2, 2)
    with pytest.raises(BackendError, match=r"on each of 2 ranks.*nothing was loaded"):
        join([{**rank, "a.qkv_proj.weight": repeated} for rank in cut(published)], published)
