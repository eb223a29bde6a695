"""The engine draws what the model says, whatever else it is doing."""

from __future__ import annotations

import asyncio
import copy
import functools
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    Olmo2Config,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from temper.engine.local import engine as engine_module
from temper.engine.local import sampling
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.local.rows import Rows
from temper.engine.local.runner import Runner
from temper.engine.local.sampling import Table
from temper.errors import BackendError, TaskError
from temper.models.load import prepare
from temper.models.save import saved_tensors
from temper.models.states import Head, hidden_states
from temper.types import Completion, Finish, Publication, Request, SamplingParams
from tests.fakes.selection import mostly_slow

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
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, num_key_value_heads=2, head_dim=16, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE, num_key_value_heads=2, head_dim=16, moe_intermediate_size=48, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1,
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2),
}  # fmt: skip
ROOMY = {"block_size": 16, "num_blocks": 200, "max_running": 16, "tokens_per_step": 4096}
TIGHT = {"block_size": 4, "num_blocks": 20, "max_running": 3, "tokens_per_step": 16}
"""Chunked prefill, few rows, and so few blocks that sequences are preempted."""
BURSTS = {**TIGHT, "steps_per_sync": 5}
STOPS = [("é",), ("\u20ac",), ("ab", "cda"), ("acd", "bbb", "never")]
SETTINGS = pytest.mark.parametrize("settings", [ROOMY, TIGHT, BURSTS], ids=["roomy", "tight", "bursts"])


class BurstingRunner(Runner):
    """Draws several tokens in a row as a GPU does: without a look at limits and stop tokens."""

    can_burst = True

    def decode(self, decode_R: np.ndarray, rows: Rows, steps: int) -> Table:
        tables = []
        for _ in range(steps):
            tables.append(super().decode(decode_R, rows, 1))
            rows.tokens[decode_R, rows.length[decode_R]] = tables[-1].tokens_RS[:, 0].numpy()
            rows.length[decode_R] += 1
        rows.length[decode_R] -= steps
        if steps == 1:
            return tables[0]
        tokens_RS = torch.cat([table.tokens_RS for table in tables], 1)
        return Table(tokens_RS=tokens_RS, logprobs_RS=torch.cat([table.logprobs_RS for table in tables], 1))


@pytest.fixture(autouse=True)
def _bursts_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", BurstingRunner)


def make_model(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family])).eval()


def make_engine(model: Any, *, decode: Any = None, **settings: Any) -> LocalEngine:
    return LocalEngine(prepare(model), EngineSettings(seed=7, max_length=128, **{**ROOMY, **settings}), decode=decode)


def prompts() -> list[tuple[int, ...]]:
    random = np.random.default_rng(0)
    return [tuple(random.integers(2, 97, size=size).tolist()) for size in (3, 17, 40, 16, 1, 33)]


def request(
    name: str, prompt: tuple[int, ...], temperature: float = 1.0, new: int = 24, top: int = 0, **more: Any
) -> Request:
    params = SamplingParams(temperature=temperature, max_new_tokens=new, top_logprobs=top, **{"stop_ids": (1,), **more})
    return Request(id=name, prompt_ids=prompt, params=params)


def generate(engine: LocalEngine, requests: list[Request]) -> list[Completion]:
    async def run() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(r) for r in requests))

    return asyncio.run(run())


@functools.cache
def greedy_by_transformers(family: str) -> list[list[int]]:
    model, expected = make_model(family), []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    return expected


@pytest.mark.parametrize("family", mostly_slow(CONFIGS, keep=("llama", "gemma3")))
@SETTINGS
def test_greedy_output_equals_transformers_generate(family: str, settings: dict[str, int]) -> None:
    expected, engine = greedy_by_transformers(family), make_engine(make_model(family), **settings)
    requests = [request(f"{i}/{k}", p, temperature=0.0) for i, p in enumerate(prompts()) for k in range(3)]
    drawn = [completion.token_ids for completion in generate(engine, requests)]
    assert drawn == [tokens for tokens in expected for _ in range(3)]
    if settings is not ROOMY:
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


def test_buffers_of_a_checkpoint_are_part_of_a_publication() -> None:
    """Glm4Moe's routers have a bias that is not a parameter."""
    model, other = make_model("glm4_moe"), make_model("glm4_moe")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    other.get_buffer(name).fill_(0.5)
    engine = make_engine(model)
    with pytest.raises(BackendError, match=f"differ in .*{name}.* nothing was loaded"):
        asyncio.run(engine.load(Publication(version=1, tensors=dict(other.named_parameters()))))
    asyncio.run(engine.load(Publication(version=1, tensors=saved_tensors(other))))
    assert torch.equal(model.get_buffer(name), other.get_buffer(name))


def curious_requests() -> list[Request]:
    """Groups whose members want different numbers of top tokens at different temperatures; some want none."""
    wishes = [(0, 1.0), (3, 0.7), (5, 0.0), (1, 1.0), (97, 0.7)]
    return [
        request(f"{i}/{k}", prompt, temperature, top=top)
        for i, prompt in enumerate(prompts())
        for k, (top, temperature) in enumerate(wishes[i % 2 :])
    ]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@SETTINGS
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
    assert (engine.stats()["preemptions"] > 0) == (settings is not ROOMY)


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
    monkeypatch.setattr(sampling, "most_likely", lambda *_: pytest.fail("nobody asked"))
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
    monkeypatch.setattr(engine._runner, "prefill", lambda *_: 1 / 0)

    async def run() -> list[Any]:
        waiting = [engine.generate(request(f"{k}", prompts()[0])) for k in range(3)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(error, BackendError) for error in asyncio.run(run()))


def test_who_waits_when_the_engine_is_closed_is_told_and_so_is_who_comes_later() -> None:
    engine = make_engine(make_model())

    async def go() -> list[Any]:
        with engine.paused():
            waiting = asyncio.create_task(engine.generate(request("one", prompts()[0])))
            await asyncio.sleep(0)
            await engine.close()
        later = engine.generate(request("two", prompts()[0]))
        return await asyncio.wait_for(asyncio.gather(waiting, later, return_exceptions=True), 30)

    for error in asyncio.run(go()):
        assert isinstance(error, BackendError)
        assert "it was closed" in str(error)


def test_bursts_draw_what_single_steps_draw() -> None:
    model = make_model()
    requests = [
        request(f"{i}/{k}", p, new=new) for i, p in enumerate(prompts()) for k, new in enumerate((1, 2, 6, 24, 60))
    ]
    single, bursts = make_engine(model), make_engine(model, steps_per_sync=7)
    for one, many in zip(generate(single, requests), generate(bursts, requests), strict=True):
        assert many.token_ids == one.token_ids
        assert many.finish is one.finish
        assert many.versions == one.versions
        torch.testing.assert_close(torch.tensor(many.logprobs), torch.tensor(one.logprobs), atol=2e-5, rtol=0)
    before, after = single.stats(), bursts.stats()
    assert after["steps"] < before["steps"] / 2, "the example must show bursts"
    assert after["decode_tokens"] == before["decode_tokens"], "what comes after an end is not counted"


def test_the_next_turn_computes_only_what_is_new_and_draws_the_same() -> None:
    model = make_model()
    draws = []
    for prefix_cache in (True, False):
        engine = make_engine(model, prefix_cache=prefix_cache)
        (first,) = generate(engine, [request("1", prompts()[2], stop_ids=())])
        second = (*first.prompt_ids, *first.token_ids, 5, 6, 7)
        engine.stats()
        draws.append([c.token_ids for c in generate(engine, [request("2", second), request("3", second[:-1])])])
        stats = engine.stats()
        # Of 64 + 3 tokens 3 blocks were full when the first turn ended: its last token was never computed.
        assert stats["prefill_tokens"] == (2 * 67 - 1 - 2 * 48 if prefix_cache else 2 * 67 - 1)
        assert stats["prefix_hit_rate"] == (96 / 133 if prefix_cache else 0.0)
        assert engine._scheduler.pool.num_free == ROOMY["num_blocks"] - 1
    assert draws[0] == draws[1]


def drawn_until(engine: LocalEngine, asked: Request, count: int, then: Any) -> Completion:
    """Runs one request and calls `then` as soon as it has drawn this many tokens."""

    async def run() -> Completion:
        seen: list[int] = []
        task = asyncio.create_task(engine.generate(asked, watch=lambda tokens, _: seen.extend(tokens)))
        while len(seen) < count:
            await asyncio.sleep(0)
        await then()
        return await task

    return asyncio.run(run())


def test_a_resting_engine_draws_nothing_and_then_goes_on_as_if_nothing_had_happened() -> None:
    model, prompt = make_model(), prompts()[2]
    (full,) = generate(make_engine(model), [request("r", prompt)])
    engine, drawn = make_engine(model), []

    async def rest() -> None:
        engine.stats()
        with suppress(ZeroDivisionError), engine.paused():
            for _ in range(100):
                await asyncio.sleep(0)
            drawn.append(engine.stats()["decode_tokens"])
            raise ZeroDivisionError  # whatever happens meanwhile, it goes on

    assert drawn_until(engine, request("r", prompt), 9, rest).token_ids == full.token_ids
    assert drawn == [0.0]


def test_an_interrupted_request_goes_on_as_if_nothing_had_happened() -> None:
    model, prompt = make_model(), prompts()[2]
    (full,) = generate(make_engine(model), [request("r", prompt)])
    engine = make_engine(model)
    piece = drawn_until(engine, request("r", prompt), 9, lambda: engine.interrupt("r"))
    assert piece.finish is Finish.INTERRUPT
    assert 0 < len(piece.token_ids) < len(full.token_ids)
    engine.stats()
    rest = request("r", (*prompt, *piece.token_ids), new=24 - len(piece.token_ids))
    (resumed,) = generate(engine, [rest])
    assert piece.token_ids + resumed.token_ids == full.token_ids
    assert engine.stats()["prefill_tokens"] <= ROOMY["block_size"]
    asyncio.run(engine.interrupt("nobody"))


def scrambled(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    return other


@pytest.mark.parametrize("kv_after_load", ["keep", "recompute"])
def test_keys_and_values_after_a_weight_change_are_kept_or_computed_again(kv_after_load: str) -> None:
    model = make_model()
    other = prepare(scrambled(model))
    engine = make_engine(model, kv_after_load=kv_after_load)
    publication = Publication(version=5, tensors=dict(other.named_parameters()))
    completion = drawn_until(engine, request("r", prompts()[1], stop_ids=()), 5, lambda: engine.load(publication))
    new = completion.versions.index(5)
    assert 0 < new < len(completion.token_ids) - 5
    full = full_logprobs(other, torch.tensor([*completion.prompt_ids, *completion.token_ids]), 1.0)
    tokens = torch.tensor(completion.token_ids[new:])
    expected = full[len(completion.prompt_ids) - 1 + new :].gather(1, tokens.unsqueeze(1)).squeeze(1)
    is_fresh = torch.allclose(expected, torch.tensor(completion.logprobs[new:]), atol=2e-5)
    assert is_fresh == (kv_after_load == "recompute")


@pytest.mark.parametrize("version", [0, 5])
def test_nothing_that_old_weights_computed_is_found_after_a_load(version: int) -> None:
    """Even when the version is the same: a publication may be repeated after the weights were damaged."""
    model = make_model()
    other = scrambled(model)
    prompt = prompts()[2]
    (expected,) = generate(make_engine(copy.deepcopy(other)), [request("b", prompt)])
    engine = make_engine(model)
    generate(engine, [request("a", prompt)])
    asyncio.run(engine.load(Publication(version=version, tensors=dict(prepare(other).named_parameters()))))
    assert generate(engine, [request("b", prompt)])[0].token_ids == expected.token_ids


BYTES = [b"\xc3", b"\xa9", b"a", b"b", b"\xe2\x82", b"\xac", b"cd"]


def decode_bytes(ids: list[int]) -> str:
    return b"".join(BYTES[token % len(BYTES)] for token in ids).decode(errors="replace")


@SETTINGS
@pytest.mark.parametrize("stop", mostly_slow(STOPS, keep=STOPS[1:3]))
def test_a_stop_text_ends_the_completion_with_the_token_that_completes_it(
    stop: tuple[str, ...], settings: dict[str, int]
) -> None:
    model, longest = make_model(), 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    engine = make_engine(model, decode=decode, **settings)
    asked = [request(f"{i}/{k}", p, new=36, stop=stop) for i, p in enumerate(prompts()) for k in range(6)]
    found = 0
    for completion in generate(engine, asked):
        ids = completion.token_ids
        assert not any(text in decode_bytes(ids[:-1]) for text in stop), "it went on after a stop text"
        is_stopped = any(text in decode_bytes(ids) for text in stop)
        assert completion.finish is (Finish.STOP if is_stopped or ids[-1] == 1 else Finish.LENGTH)
        assert len(ids) == 36 or completion.finish is Finish.STOP
        found += is_stopped
    assert found > 5, "the example must show some"
    assert longest <= max(len(text.encode()) for text in stop) + 8, "only a window is decoded"


def test_stop_texts_without_a_decoder_are_refused_with_what_to_do() -> None:
    with pytest.raises(TaskError, match="decode, or use stop_ids"):
        generate(make_engine(make_model()), [request("r", prompts()[0], stop=("x",))])


@SETTINGS
def test_a_watcher_sees_every_token_once_and_in_order(settings: dict[str, int]) -> None:
    engine = make_engine(make_model(), **settings)
    seen: dict[str, tuple[list[int], list[float]]] = {}

    async def watched(asked: Request) -> Completion:
        tokens, logprobs = seen[asked.id] = ([], [])

        def watch(new: list[int], their: list[float]) -> None:
            tokens.extend(new)
            logprobs.extend(their)

        return await engine.generate(asked, watch=watch)

    async def run() -> list[Completion]:
        return await asyncio.gather(
            *(watched(request(f"{i}/{k}", p)) for i, p in enumerate(prompts()) for k in range(3))
        )

    for completion, (tokens, logprobs) in zip(asyncio.run(run()), seen.values(), strict=True):
        assert (completion.token_ids, completion.logprobs) == (tokens, logprobs)


@pytest.mark.parametrize("after", [1, 4])
def test_a_watcher_that_raises_costs_only_its_own_request(after: int) -> None:
    model, prompt = make_model(), prompts()[2]
    expected = generate(make_engine(model), [request(f"g/{k}", prompt) for k in range(3)])
    engine, calls = make_engine(model), []

    def watch(token_ids: list[int], logprobs: list[float]) -> None:
        calls.append(token_ids)
        if len(calls) == after:
            raise ZeroDivisionError

    async def run() -> list[Any]:
        tasks = [engine.generate(request(f"g/{k}", prompt), watch=watch if k == 1 else None) for k in range(3)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(run())
    assert isinstance(second, TaskError)
    assert isinstance(second.__cause__, ZeroDivisionError)
    assert [first.token_ids, third.token_ids] == [expected[0].token_ids, expected[2].token_ids]
    assert len(calls) == after, "not called again"
    assert not engine.has_work
    assert engine._scheduler.pool.num_free == ROOMY["num_blocks"] - 1


@SETTINGS
def test_entropies_and_keep_sets_are_recorded_where_asked_and_survive_preemption(settings: dict[str, int]) -> None:
    model = make_model()
    wishes = [{"top_k": 5}, {"entropy": True}, {}, {"top_p": 0.7, "entropy": True}, {"min_p": 0.2, "top": 2}]
    asked = [request(f"{i}/{k}", p, **wish) for i, p in enumerate(prompts()) for k, wish in enumerate(wishes)]
    engine = make_engine(model, **settings)
    for wish, completion in zip(asked, generate(engine, asked), strict=True):
        params = wish.params
        assert completion.params == params
        assert (completion.keep_ids is not None) == params.is_truncated
        assert (completion.entropies is not None) == params.entropy
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        full = full_logprobs(model, ids, 1.0)[len(completion.prompt_ids) - 1 :]
        kept = torch.ones_like(full, dtype=torch.bool)
        for place, keep in enumerate(completion.keep_ids or []):
            assert completion.token_ids[place] in keep
            kept[place] = False
            kept[place, keep] = True
        assert params.top_k == 0 or bool((kept.sum(1) == params.top_k).all())
        inside = full.masked_fill(~kept, -torch.inf).log_softmax(1)
        drawn = inside.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), drawn, atol=5e-5, rtol=0)
        if completion.entropies is not None:
            entropy = torch.distributions.Categorical(logits=inside).entropy()
            torch.testing.assert_close(torch.tensor(completion.entropies), entropy, atol=1e-4, rtol=0)
    assert (engine.stats()["preemptions"] > 0) == (settings is not ROOMY)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"temperature": -0.5}, r"temperature=-0\.5 .* at least 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"new": 0}, "max_new_tokens=0 .* at least 1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, r"top_p=0\.0 .* above 0 and at most 1"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"min_p": 1.0}, r"min_p=1\.0 .* below 1"),
        ({"stop": ("a", "")}, "not empty"),
        ({"stop_ids": (97,)}, "stop_ids: token 97 is outside the vocabulary of 0 to 96"),
    ],
)
def test_what_cannot_be_applied_is_refused_with_the_value(more: dict[str, Any], message: str) -> None:
    engine = make_engine(make_model(), decode=decode_bytes)
    with pytest.raises(TaskError, match=message):
        generate(engine, [request("r", prompts()[0], **more)])
    assert not engine.has_work


@pytest.mark.parametrize("token", [97, -1])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(TaskError, match=f"token {token} is outside"):
        generate(make_engine(make_model()), [request("r", (5, token, 6))])


def test_an_id_that_is_running_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine(make_model())

    async def run() -> list[Any]:
        twice = [engine.generate(request("r", prompts()[0])) for _ in range(2)]
        return await asyncio.gather(*twice, return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, Completion)
    assert isinstance(second, TaskError)
    assert '"r" is running already' in str(second)
    assert generate(engine, [request("r", prompts()[0])])[0].token_ids == first.token_ids


def test_stats_start_again_when_read_and_utilisation_does_not() -> None:
    engine = make_engine(make_model(), max_running=4)
    prompt = prompts()[2]
    completions = generate(engine, [request(f"{k}", prompt, new=8, stop_ids=()) for k in range(8)])
    drawn_until(engine, request("i", prompt, stop_ids=()), 3, lambda: engine.interrupt("i"))
    drawn_until(engine, request("a", prompt, stop_ids=()), 3, lambda: engine.abort("a"))
    totals, stats, again = engine.utilisation(), engine.stats(), engine.stats()
    assert (stats["finished"], stats["interrupted"], stats["aborted"]) == (8, 1, 1)
    assert 1 <= stats["running"] <= 4
    assert stats["occupancy"] == stats["running"] / 4
    assert stats["waiting"] > 0
    assert 0 < stats["kv_use"] < 1
    assert stats["prefix_hit_rate"] == 64 / 120, "two of three prefills found two of their two and a half blocks"
    assert min(stats["prefill_tok_s"], stats["decode_tok_s"], stats["steps"]) > 0
    assert stats["prefill_tokens"] == totals["temper_engine_prefill_tokens_total"] == 40 + 8 + 8
    assert sum(len(c.token_ids) for c in completions) == 64
    assert stats["decode_tokens"] == totals["temper_engine_decode_tokens_total"] >= 64 - 8
    assert again.keys() == stats.keys()
    assert not any(again.values())
    assert engine.utilisation() == totals
    assert totals["temper_engine_running"] == totals["temper_engine_waiting"] == totals["temper_engine_kv_use"] == 0
