"""The engine draws what the model says, whatever else it is doing."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from temper.engine.local import runner
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError, TaskError
from temper.models.load import Head, hidden_states, prepare
from temper.types import Completion, Finish, Publication, Request, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 1, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "gemma3": Gemma3TextConfig(
        **SHAPE, num_key_value_heads=1, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "olmo2": Olmo2Config(**SHAPE),
}  # fmt: skip
ROOMY = {"block_size": 16, "num_blocks": 200, "max_running": 16, "tokens_per_step": 4096}
TIGHT = {"block_size": 4, "num_blocks": 20, "max_running": 3, "tokens_per_step": 16}
"""Chunked prefill, few rows, and so few blocks that sequences are preempted."""


def make_model(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).eval()


def make_engine(model: Any, **settings: Any) -> LocalEngine:
    return LocalEngine(prepare(model), EngineSettings(seed=7, max_length=128, **{**ROOMY, **settings}))


def prompts() -> list[tuple[int, ...]]:
    random = np.random.default_rng(0)
    return [tuple(random.integers(2, 97, size=size).tolist()) for size in (3, 17, 40, 16, 1, 33)]


def request(name: str, prompt: tuple[int, ...], temperature: float = 1.0, new: int = 24, top: int = 0) -> Request:
    params = SamplingParams(temperature=temperature, max_new_tokens=new, stop_ids=(1,), top_logprobs=top)
    return Request(id=name, prompt_ids=prompt, params=params)


def generate(engine: LocalEngine, requests: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(run())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_greedy_output_equals_transformers_generate(family: str, settings: dict[str, int]) -> None:
    model = make_model(family)
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    engine = make_engine(model, **settings)
    requests = [request(f"{i}/{k}", p, temperature=0.0) for i, p in enumerate(prompts()) for k in range(3)]
    drawn = [completion.token_ids for completion in generate(engine, requests)]
    assert drawn == [tokens for tokens in expected for _ in range(3)]
    if settings is TIGHT:
        assert engine.stats()["preemptions"] > 0, "the tight setting must exercise preemption"


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_equal_one_full_forward_pass_at_the_sampling_temperature(family: str) -> None:
    model = make_model(family)
    engine = make_engine(model, **TIGHT)
    requests = [request(f"{i}", p, temperature=0.7) for i, p in enumerate(prompts())]
    for completion in generate(engine, requests):
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        expected = full_logprobs(model, ids, 0.7)[len(completion.prompt_ids) - 1 :]
        drawn = expected.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
        assert torch.allclose(drawn, torch.tensor(completion.logprobs), atol=2e-5)


def full_logprobs(model: Any, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of every position by plain dense attention, an independent path."""

    def attend(
        layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        repeat = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
        place = torch.arange(len(query))
        behind = place.unsqueeze(1) - place
        hidden = (behind < 0) | (behind >= (sliding_window or 10**9))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)

    with torch.no_grad():
        logits = Head.of(model).logits(hidden_states(model, ids, torch.arange(len(ids)), attend))
    return torch.log_softmax(logits[:-1] / temperature, -1)


def test_what_a_request_draws_does_not_depend_on_its_neighbours() -> None:
    model = make_model()
    together = generate(make_engine(model), [request(f"r{i}", p) for i, p in enumerate(prompts())])
    for place, prompt in enumerate(prompts()):
        (alone,) = generate(make_engine(model, **TIGHT), [request(f"r{place}", prompt)])
        assert alone.token_ids == together[place].token_ids


def test_members_of_a_group_differ_and_share_one_prefill() -> None:
    engine = make_engine(make_model())
    prompt = prompts()[2]
    completions = generate(engine, [request(f"g/{k}", prompt) for k in range(8)])
    stats = engine.stats()
    assert stats["prefill_tokens"] == len(prompt)
    assert stats["shared_prefills"] == 7
    assert len({tuple(c.token_ids) for c in completions}) > 1


def test_the_seed_changes_what_is_drawn_and_the_same_seed_repeats_it() -> None:
    model = make_model()
    draws = [
        generate(
            LocalEngine(prepare(model), EngineSettings(seed=seed, max_length=128, **ROOMY)),
            [request("r", prompts()[0])],
        )[0].token_ids
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_stop_token_is_kept_and_a_cut_completion_gets_none() -> None:
    completions = generate(make_engine(make_model()), [request(f"{k}", prompts()[0], new=60) for k in range(40)])
    finishes = {completion.finish for completion in completions}
    assert finishes == {Finish.STOP, Finish.LENGTH}, "the example must show both"
    for completion in completions:
        assert (completion.token_ids[-1] == 1) == (completion.finish is Finish.STOP)
        assert 1 not in completion.token_ids[:-1]
        assert completion.finish is Finish.STOP or len(completion.token_ids) == 60


def test_all_blocks_are_free_again_after_the_last_request() -> None:
    engine = make_engine(make_model(), **TIGHT)
    generate(engine, [request(f"{i}/{k}", p) for i, p in enumerate(prompts()) for k in range(5)])
    pool = engine._scheduler.pool
    assert pool.num_free == TIGHT["num_blocks"] - 1
    assert not pool._references.any()


@pytest.mark.parametrize("who", ["leader", "follower", "running"])
def test_abort_returns_what_was_drawn_and_leaves_the_others_alone(who: str) -> None:
    model = make_model()
    prompt = prompts()[2]
    expected = generate(make_engine(model), [request(f"g/{k}", prompt) for k in range(3)])
    engine = make_engine(model)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request(f"g/{k}", prompt))) for k in range(3)]
        await asyncio.sleep(0)
        victim = {"leader": 0, "follower": 1, "running": 2}[who]
        while who == "running" and engine._scheduler.rows.length.max() < len(prompt) + 2:
            await asyncio.sleep(0)
        await engine.abort(f"g/{victim}")
        return await asyncio.gather(*tasks)

    completions = asyncio.run(run())
    aborted = [c.finish is Finish.ABORT for c in completions]
    assert sum(aborted) == 1
    for completion, full, was_aborted in zip(completions, expected, aborted, strict=True):
        if was_aborted:
            assert completion.token_ids == full.token_ids[: len(completion.token_ids)]
            assert bool(completion.token_ids) == (who == "running")
        else:
            assert completion.token_ids == full.token_ids
    assert engine._scheduler.pool.num_free == ROOMY["num_blocks"] - 1


def test_a_cancelled_caller_ends_its_request() -> None:
    engine = make_engine(make_model())

    async def run() -> None:
        task = asyncio.create_task(engine.generate(request("r", prompts()[0])))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)

    asyncio.run(run())
    assert not engine.has_work
    assert engine._scheduler.pool.num_free == ROOMY["num_blocks"] - 1


def test_tokens_carry_the_version_that_drew_them_across_a_weight_change() -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    engine = make_engine(model)
    publication = Publication(version=5, tensors=dict(other.named_parameters()))

    async def run() -> Completion:
        task = asyncio.create_task(engine.generate(request("r", prompts()[1], new=12)))
        while engine._scheduler.rows.length.max() < len(prompts()[1]) + 3:
            await asyncio.sleep(0)
        await engine.load(publication)
        return await task

    versions = asyncio.run(run()).versions
    assert set(versions) == {0, 5}
    assert versions == sorted(versions)
    assert torch.equal(next(model.parameters()), next(other.parameters()))


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "dtype"])
def test_a_publication_that_does_not_fit_is_refused_whole(fault: str) -> None:
    model, other = make_model(), make_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    tensors = dict(other.named_parameters())
    name = list(tensors)[-1]
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        tensors["lm_head.bias"] = tensors[name]
    else:
        tensors[name] = tensors[name].detach()[:1] if fault == "shape" else tensors[name].detach().double()
    engine = make_engine(model)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(BackendError, match="nothing was loaded"):
        asyncio.run(engine.load(Publication(version=1, tensors=tensors)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert engine.version == 0


def curious_requests() -> list[Request]:
    """Groups whose members want different numbers of top tokens at different temperatures; some want none."""
    wishes = [(0, 1.0), (3, 0.7), (5, 0.0), (1, 1.0), (97, 0.7)]
    return [
        request(f"{i}/{k}", prompt, temperature, top=top)
        for i, prompt in enumerate(prompts())
        for k, (top, temperature) in enumerate(wishes[i % 2 :])
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("settings", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_top_tokens_equal_one_full_forward_pass_with_groups_and_preemption(
    family: str, settings: dict[str, int]
) -> None:
    model = make_model(family)
    engine = make_engine(model, **settings)
    requests = curious_requests()
    for wish, completion in zip(requests, generate(engine, requests), strict=True):
        count = wish.params.top_logprobs
        if count == 0:
            assert completion.top_ids is None
            assert completion.top_logprobs is None
            continue
        assert completion.top_ids is not None
        assert completion.top_logprobs is not None
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        full = full_logprobs(model, ids, wish.params.temperature or 1.0)[len(completion.prompt_ids) - 1 :]
        top_ids, top = torch.tensor(completion.top_ids), torch.tensor(completion.top_logprobs)
        assert top_ids.shape == top.shape == (len(completion.token_ids), count)
        torch.testing.assert_close(top, full.sort(dim=-1, descending=True).values[:, :count], atol=2e-5, rtol=0)
        torch.testing.assert_close(top, full.gather(1, top_ids), atol=2e-5, rtol=0)
        assert bool((top.diff(dim=1) <= 0).all())
        assert all(len(set(row)) == count for row in completion.top_ids)
        for token, logprob, row, values in zip(
            completion.token_ids, completion.logprobs, completion.top_ids, completion.top_logprobs, strict=True
        ):
            assert token not in row or values[row.index(token)] == logprob, "to the bit: both are one number"
    assert (engine.stats()["preemptions"] > 0) == (settings is TIGHT)


def test_top_tokens_of_a_wrong_position_would_be_noticed() -> None:
    model = make_model()
    (completion,) = generate(make_engine(model), [request("r", prompts()[1], top=4)])
    ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
    shifted = full_logprobs(model, ids, 1.0)[len(completion.prompt_ids) - 2 : -1]
    assert not torch.allclose(torch.tensor(completion.top_logprobs), shifted.topk(4).values, atol=1e-2)


def test_who_asks_for_top_tokens_changes_nobodys_draws_and_gets_the_same_alone() -> None:
    model = make_model()
    requests = curious_requests()
    silent = [request(r.id, r.prompt_ids, r.params.temperature) for r in requests]
    together = generate(make_engine(model), requests)
    for curious, plain in zip(together, generate(make_engine(model), silent), strict=True):
        assert curious.token_ids == plain.token_ids
        assert curious.logprobs == plain.logprobs
    for place in (1, 4, 6):
        (alone,) = generate(make_engine(model, **TIGHT), [requests[place]])
        assert alone.top_ids == together[place].top_ids
        torch.testing.assert_close(
            torch.tensor(alone.top_logprobs), torch.tensor(together[place].top_logprobs), atol=2e-5, rtol=0
        )


def test_nothing_is_computed_or_kept_when_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "most_likely", lambda *_: pytest.fail("nobody asked"))
    engine = make_engine(make_model())
    completions = generate(engine, [request(f"{i}", p) for i, p in enumerate(prompts())])
    assert all(completion.top_ids is None for completion in completions)
    assert engine._scheduler.rows._num_top is None


def test_an_aborted_request_keeps_the_top_tokens_of_what_it_drew() -> None:
    model, prompt = make_model(), prompts()[2]
    (full,) = generate(make_engine(model), [request("r", prompt, top=2)])
    engine = make_engine(model, max_running=1)

    async def run() -> list[Completion]:
        tasks = [asyncio.create_task(engine.generate(request(name, prompt, top=2))) for name in ("r", "follower")]
        tasks.append(asyncio.create_task(engine.generate(request("waiting", prompts()[0], top=2))))
        while engine._scheduler.rows.length.max() < len(prompt) + 3:
            await asyncio.sleep(0)
        for name in ("r", "follower", "waiting"):
            await engine.abort(name)
        return await asyncio.gather(*tasks)

    running, follower, waiting = asyncio.run(run())
    count = len(running.token_ids)
    assert 2 <= count < len(full.token_ids)
    assert full.top_ids is not None
    assert full.top_logprobs is not None
    assert running.top_ids == full.top_ids[:count]
    torch.testing.assert_close(
        torch.tensor(running.top_logprobs), torch.tensor(full.top_logprobs[:count]), atol=2e-5, rtol=0
    )
    assert follower.top_ids == full.top_ids[:1], "the first position of a parked fork is that of its leader"
    assert waiting.top_ids == waiting.top_logprobs == waiting.token_ids == []


@pytest.mark.parametrize("count", [98, -1])
def test_more_top_tokens_than_the_vocabulary_has_are_refused_with_both_numbers(count: int) -> None:
    with pytest.raises(TaskError, match=rf"top_logprobs={count} .* vocabulary of 97"):
        generate(make_engine(make_model()), [request("r", prompts()[0], top=count)])


def test_prompts_that_cannot_be_answered_are_refused_with_the_numbers() -> None:
    engine = make_engine(make_model())
    with pytest.raises(TaskError, match="128"):
        generate(engine, [request("long", tuple([5] * 128))])
    small = make_engine(make_model(), block_size=4, num_blocks=8)
    with pytest.raises(TaskError, match=r"engine\.kv_tokens"):
        generate(small, [request("wide", tuple([5] * 20))])


def test_a_failing_step_reaches_every_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(make_model())
    monkeypatch.setattr(engine._runner, "forward", lambda *_: 1 / 0)

    async def run() -> list[Any]:
        waiting = [engine.generate(request(f"{k}", prompts()[0])) for k in range(3)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(error, BackendError) for error in asyncio.run(run()))
