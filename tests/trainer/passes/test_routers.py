"""Routes are what the routers of a mixture-of-experts model really chose, and they move exactly as the routers do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from temper.errors import UserError
from temper.models.load import prepare
from temper.models.states import hidden_states
from temper.trainer.passes.packed_attention import PackedAttention
from temper.trainer.passes.routers import hidden_and_router_logits, record_routes, route_logprobs

SMALL = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1),
    # The first layer of this one is dense: two routers, not three.
    "partly_dense": lambda: Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16, mlp_only_layers=[0]),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
    "olmoe": lambda: OlmoeConfig(**SMALL, num_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=8
    ),
    "glm4_moe": lambda: Glm4MoeConfig(**SMALL, n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=1),
}
ROUTERS = {"qwen3_moe": 3, "partly_dense": 2, "mixtral": 3, "olmoe": 3, "qwen2_moe": 3}
LENGTHS = (5, 8, 2)
Inputs = tuple[Tensor, Tensor, PackedAttention]


def make_moe(family: str, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa")
        for parameter in model.parameters():  # transformers' 0.02 would leave all experts about equally likely
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return prepare(model.to(dtype))


@pytest.fixture
def inputs() -> Inputs:
    token_ids = torch.randint(30, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return token_ids, positions, PackedAttention(LENGTHS, torch.device("cpu"))


def routers_of(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "block_sparse_moe.gate"))]


def watch(routers: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Input of each router, and the experts that it hands on to the model; filled by the next forward pass."""
    states: list[Tensor] = []
    chosen: list[Tensor] = []
    for router in routers:

        def keep(_module: Any, arguments: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
            states.append(arguments[0].detach().clone())
            chosen.append(output[2])

        router.register_forward_hook(keep)
    return states, chosen


def own_pass(model: Any, inputs: Inputs) -> None:
    """The family's own forward pass, which calls its routers as modules."""
    token_ids, positions, attend = inputs
    model.get_decoder()(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, attend=attend)


def deviation(old_TLK: Tensor, new_TLK: Tensor) -> Tensor:
    """Mean over layers of the mean over old experts of |log q - log q_old|."""
    return (new_TLK - old_TLK).abs().mean(2).mean(1)


@pytest.mark.parametrize("family", ROUTERS)
def test_routes_are_the_experts_the_model_used_and_logprobs_are_those_of_its_router(
    family: str, inputs: Inputs
) -> None:
    model = make_moe(family)
    routers = routers_of(model)
    assert len(routers) == ROUTERS[family]
    states, chosen = watch(routers)
    ids, logprobs = record_routes(model, *inputs)
    own_pass(model, inputs)
    assert ids.shape == logprobs.shape == (sum(LENGTHS), ROUTERS[family], 2)
    assert not logprobs.requires_grad
    for layer, router in enumerate(routers):
        assert torch.equal(ids[:, layer].sort().values, chosen[layer].reshape(-1, 2).sort().values)
        scores = torch.log_softmax(states[layer].reshape(-1, 16) @ router.weight.T, -1)
        torch.testing.assert_close(logprobs[:, layer], scores.gather(1, ids[:, layer]), rtol=0, atol=1e-5)
    assert (logprobs[..., 0] >= logprobs[..., 1]).all()
    assert len(ids.unique()) == 4, "a test in which every token takes the same expert proves little"


@pytest.mark.parametrize("family", ROUTERS)
def test_hidden_states_are_those_of_a_pass_without_router_logits(family: str, inputs: Inputs) -> None:
    model = make_moe(family)
    hidden, logits = hidden_and_router_logits(model, *inputs)
    assert torch.equal(hidden, hidden_states(model, *inputs))
    assert [tuple(layer.shape) for layer in logits] == [(sum(LENGTHS), 4)] * ROUTERS[family]


@pytest.mark.parametrize("family", ROUTERS)
def test_equal_weights_have_deviation_exactly_zero(family: str, inputs: Inputs) -> None:
    model = make_moe(family)
    ids, old = record_routes(model, *inputs)
    _, logits = hidden_and_router_logits(model, *inputs)
    assert torch.equal(deviation(old, route_logprobs(logits, ids)), torch.zeros(sum(LENGTHS)))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_changed_router_deviates_on_the_old_experts_as_computed_by_hand(family: str, inputs: Inputs) -> None:
    model = make_moe(family)
    ids, old = record_routes(model, *inputs)
    last = routers_of(model)[-1]
    with torch.no_grad():  # of the last layer, so that no other router sees other states
        last.weight.mul_(-1.5)
    states, _ = watch([last])
    own_pass(model, inputs)
    _, logits = hidden_and_router_logits(model, *inputs)
    scores_TE = (states[0].reshape(-1, 16) @ last.weight.detach().T).double()
    expected = []
    for token, scores_E in enumerate(scores_TE.tolist()):
        total = sum(math.exp(score) for score in scores_E)
        now = [scores_E[expert] - math.log(total) for expert in ids[token, -1]]
        moved = [abs(new - before) for new, before in zip(now, old[token, -1].tolist(), strict=True)]
        expected.append(sum(moved) / 2 / 3)  # two experts; the other two of three layers did not move
    found = deviation(old, route_logprobs(logits, ids).detach())
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=1e-5)
    # The planted bug: comparing with the experts chosen now instead of the old ones.
    ids_now, now = record_routes(model, *inputs)
    assert not torch.equal(ids_now, ids)
    assert (deviation(old, now) - found).abs().max() > 1e-2


def test_probabilities_are_taken_over_all_experts_of_a_layer() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.15, 0.05]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    logits = [p.log() + 7 for p in probabilities]  # softmax forgets a shift
    found = route_logprobs(logits, torch.tensor([[[0, 1], [3, 1]]]))
    torch.testing.assert_close(found.exp(), torch.tensor([[[0.5, 0.3], [0.4, 0.2]]]))


def test_bfloat16_routers_are_compared_in_float32(inputs: Inputs) -> None:
    _, logprobs = record_routes(make_moe("qwen3_moe", torch.bfloat16), *inputs)
    assert logprobs.dtype == torch.float32


def test_a_dense_model_is_refused_by_name(make_model: Callable[..., Any], inputs: Inputs) -> None:
    for function in (record_routes, hidden_and_router_logits):
        with pytest.raises(UserError, match="rspo needs a mixture-of-experts model; LlamaForCausalLM has no router"):
            function(make_model("llama", torch.float32), *inputs)


def test_a_router_that_does_not_take_the_top_of_a_softmax_is_refused(inputs: Inputs) -> None:
    model = make_moe("glm4_moe")
    with pytest.raises(UserError, match="how glm4_moe chooses its experts is not known"):
        record_routes(model, *inputs)
