"""An opponent draws from the geometric mixture of two models, whatever the scheduler does, and never as the policy."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from temper.engine.local import mixture
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.mixture import NO_VERSION, Opponent, WithOpponent
from temper.models.load import prepare
from temper.types import Completion, Publication, Request, SamplingParams
from tests.fakes.selection import mostly_heavy

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ROOMY = {"block_size": 16, "num_blocks": 200, "max_running": 16, "tokens_per_step": 4096}
TIGHT = {"block_size": 4, "num_blocks": 20, "max_running": 3, "tokens_per_step": 16}
"""Chunked prefill, few rows, and so few blocks that sequences are preempted."""


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).eval().requires_grad_(False)


def settings(**changes: int) -> EngineSettings:
    return EngineSettings(seed=7, max_length=128, **{**ROOMY, **changes})


def make_opponent(share: float, **changes: int) -> Opponent:
    return Opponent(prepare(make_model(0)), prepare(make_model(1)), settings(**changes), share=share)


def requests(temperature: float = 1.0, **more: Any) -> list[Request]:
    """Six prompts, each for three members of a group, which share its prefill."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(2, VOCABULARY, size=size).tolist()) for size in (3, 17, 40, 16, 1, 33)]
    params = SamplingParams(temperature=temperature, max_new_tokens=24, stop_ids=(1,), **more)
    return [
        Request(id=f"{number}/{member}", prompt_ids=prompt, params=params)
        for number, prompt in enumerate(prompts)
        for member in range(3)
    ]


def generate(sampler: Any, asked: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(sampler.generate(request) for request in asked))

    return asyncio.run(run())


def expected_logprobs(completion: Completion, share: float, temperature: float, models: tuple[Any, Any]) -> Any:
    """[N, V] by transformers' own forward pass, in float64: each model at its temperature, then the mixture."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    first = len(completion.prompt_ids) - 1
    policy, reference = (
        (model(ids).logits[0, first:-1].double() / temperature).softmax(-1) for model in models
    )  # fmt: skip
    product = policy ** (1 - share) * reference**share
    return (product / product.sum(-1, keepdim=True)).log()


def gap(completions: list[Completion], share: float, temperature: float) -> float:
    """Largest difference between reported log-probabilities and those of the mixture."""
    models, gaps = (make_model(0), make_model(1)), []
    for completion in completions:
        expected = expected_logprobs(completion, share, temperature, models)
        drawn = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append((drawn - torch.tensor(completion.logprobs)).abs().max().item())
    return max(gaps)


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize(
    "drawing", mostly_heavy([(0.5, 1.0), (0.25, 0.7), (0.0, 1.0), (1.0, 1.3)], keep=((0.25, 0.7),)), ids=str
)
def test_reported_logprobs_are_those_of_the_geometric_mixture(
    drawing: tuple[float, float], sizes: dict[str, int]
) -> None:
    share, temperature = drawing
    opponent = make_opponent(share, **sizes)
    completions = generate(opponent, requests(temperature))
    assert gap(completions, share, temperature) < 1e-5
    assert {version for completion in completions for version in completion.versions} == {NO_VERSION}
    stats = opponent.stats()
    assert stats["shared_prefills"] > 0
    if sizes is TIGHT:
        assert stats["preemptions"] > 0
        roomy = generate(make_opponent(share), requests(temperature))
        assert [c.token_ids for c in completions] == [c.token_ids for c in roomy]


def test_all_of_the_distribution_is_the_mixtures() -> None:
    """The most likely tokens, the entropy and greedy choice, not only what happened to be drawn."""
    models = make_model(0), make_model(1)
    for temperature in (0.0, 0.8):
        for completion in generate(make_opponent(0.3), requests(temperature, top_logprobs=5, entropy=True)):
            expected = expected_logprobs(completion, 0.3, temperature or 1.0, models)
            best = expected.topk(5)
            assert completion.top_ids == best.indices.tolist()
            assert torch.tensor(completion.top_logprobs) == pytest.approx(best.values, abs=1e-5)
            entropy = -(expected.exp() * expected).sum(-1)
            assert torch.tensor(completion.entropies) == pytest.approx(entropy, abs=1e-4)
            if temperature == 0:
                assert completion.token_ids == best.indices[:, 0].tolist()


def test_tokens_are_drawn_as_often_as_the_mixture_says() -> None:
    params = SamplingParams(max_new_tokens=1)
    drawn = generate(make_opponent(0.5), [Request(id=str(n), prompt_ids=(5, 9), params=params) for n in range(1000)])
    counts = np.bincount([completion.token_ids[0] for completion in drawn], minlength=VOCABULARY)
    expected = expected_logprobs(drawn[0], 0.5, 1.0, (make_model(0), make_model(1)))[0].exp().numpy() * 1000
    is_common = expected >= 5
    square = ((counts - expected) ** 2 / expected)[is_common].sum()
    assert is_common.sum() > 10
    assert square < is_common.sum() + 5 * np.sqrt(2 * is_common.sum())


@pytest.mark.parametrize(("share", "seed"), [(0.0, 0), (1.0, 1)])
def test_at_both_ends_it_is_one_of_the_models(share: float, seed: int) -> None:
    alone = LocalEngine(prepare(make_model(seed)), settings())
    drawn = generate(make_opponent(share), requests())
    expected = generate(alone, requests())
    assert [completion.token_ids for completion in drawn] == [completion.token_ids for completion in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "fault",
    [
        lambda a, b, share: ((1 - share) * a.softmax(-1) + share * b.softmax(-1)).log(),
        lambda a, b, share: share * a.log_softmax(-1) + (1 - share) * b.log_softmax(-1),
        lambda a, b, share: a.log_softmax(-1),
    ],
    ids=["arithmetic", "weights swapped", "policy alone"],
)
def test_another_mixture_would_be_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "geometric_mixture", fault)
    assert gap(generate(make_opponent(0.25), requests()), 0.25, 1.0) > 0.05


def test_caches_that_are_not_copied_together_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the reference's blocks stay behind when members of a group part."""
    monkeypatch.setattr(mixture.MixedRunner, "copy_blocks", mixture.Runner.copy_blocks)
    assert gap(generate(make_opponent(0.5), requests()), 0.5, 1.0) > 1e-3


def scrambled(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: 0.2 * torch.randn(t.shape, generator=generator) for name, t in model.named_parameters()}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_publication_changes_the_policys_part_and_no_version(share: float) -> None:
    policy, reference = prepare(make_model(0)), prepare(make_model(1))
    opponent = Opponent(policy, reference, settings(), share=share)
    both = WithOpponent(LocalEngine(policy, settings()), opponent)
    before = generate(opponent, requests())
    new = scrambled(policy)
    asyncio.run(both.load(Publication(version=4, tensors=new)))
    after = generate(opponent, requests())
    assert (both.version, opponent.version) == (4, NO_VERSION)
    assert {version for completion in after for version in completion.versions} == {NO_VERSION}
    is_same = [completion.token_ids for completion in after] == [completion.token_ids for completion in before]
    assert is_same == (share == 1.0)
    plain = make_model(0)
    plain.load_state_dict(new, strict=False)
    for completion in after:
        expected = expected_logprobs(completion, share, 1.0, (plain, make_model(1)))
        drawn = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.tensor(completion.logprobs) == pytest.approx(drawn, abs=1e-5)


def test_wider_copies_of_both_heads_are_taken_again() -> None:
    """In bfloat16 a CPU keeps the head in float32, and whoever took its copy first draws from the old one."""
    policy, reference = (prepare(make_model(seed).bfloat16()) for seed in (0, 1))
    opponent = Opponent(policy, reference, settings(), share=0.5)
    both = WithOpponent(LocalEngine(policy, settings()), opponent)
    new = {name: tensor.bfloat16() for name, tensor in scrambled(policy).items()}
    with torch.no_grad():  # as a reference that moves
        reference.lm_head.weight.mul_(-1)
    asyncio.run(both.load(Publication(version=1, tensors=new)))
    fresh = Opponent(policy, reference, settings(), share=0.5)
    drawn, expected = generate(opponent, requests()), generate(fresh, requests())
    assert [completion.logprobs for completion in drawn] == [completion.logprobs for completion in expected]


def test_an_opponent_that_is_not_told_would_draw_from_what_it_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: prefixes that the old weights computed stay in the caches."""
    policy, reference = prepare(make_model(0)), prepare(make_model(1))
    opponent = Opponent(policy, reference, settings(), share=0.5)
    both = WithOpponent(LocalEngine(policy, settings()), opponent)
    generate(opponent, requests())
    new = scrambled(policy)

    async def forget(publication: Publication) -> None:
        """Nothing is loaded."""

    monkeypatch.setattr(opponent, "load", forget)
    asyncio.run(both.load(Publication(version=1, tensors=new)))
    plain = make_model(0)
    plain.load_state_dict(new, strict=False)
    gaps = []
    for completion in generate(opponent, requests()):
        expected = expected_logprobs(completion, 0.5, 1.0, (plain, make_model(1)))
        drawn = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append((drawn - torch.tensor(completion.logprobs)).abs().max().item())
    assert max(gaps) > 0.05


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_copy_of_a_reference_that_moves_follows_it(share: float) -> None:
    policy, moving = prepare(make_model(0)), prepare(make_model(2))
    opponent = Opponent(policy, copy.deepcopy(moving), settings(), share=share, follows=moving)
    generate(opponent, requests())
    with torch.no_grad():
        for own, target in zip(moving.parameters(), make_model(1).parameters(), strict=True):
            own.copy_(target)
    asyncio.run(opponent.load(Publication(version=1, tensors={})))
    assert gap(generate(opponent, requests()), share, 1.0) < 1e-5


def test_both_caches_count() -> None:
    opponent = make_opponent(0.5, **TIGHT)
    both = WithOpponent(LocalEngine(prepare(make_model(0)), settings()), opponent)
    generate(opponent, requests())
    stats = both.stats()
    assert stats["preemptions"] > 0
    assert stats["kv_use"] > 0.5
    assert stats["decode_tokens"] == 0, "the opponent's tokens are not the policy's"
