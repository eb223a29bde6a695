"""What the sampler routed is what the trainer replays: every token once, weights and gradients from its own routers."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

from temper.batching.pack import pack
from temper.batching.rows import rows_of
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.pieces import PiecedAnswer, join
from temper.engine.process.wire import completion_frame, completion_of, from_bytes, to_bytes
from temper.errors import UserError
from temper.models import ops
from temper.models.decoder import lay_end_to_end, set_numerics
from temper.models.experts.routes import Replay, RouteShape, route_shape, set_replaying
from temper.models.experts.routing import weights_of
from temper.models.load import prepare
from temper.models.lora.switch import AdapterOff
from temper.models.save import saved_tensors
from temper.trainer.passes.forward import checkpointing, enable_checkpointing, score_drawn
from temper.trainer.passes.packed_attention import ExactPackedAttention
from temper.trainer.passes.routers import record_routes
from temper.types import (
    Completion,
    Finish,
    Message,
    Microbatch,
    Publication,
    Request,
    Sample,
    SamplingParams,
    Score,
    Status,
    Trajectory,
    Turn,
)
from temper.types.columns import ragged

CONFIG = Qwen3MoeConfig(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    mlp_only_layers=[1], head_dim=8, initializer_range=0.3, norm_topk_prob=True,
)  # fmt: skip
ROOMY = {"block_size": 8, "num_blocks": 100, "max_running": 16, "tokens_per_step": 4096}
TIGHT = {"block_size": 4, "num_blocks": 14, "max_running": 3, "tokens_per_step": 16}
WIDTH = 4
"""Two layers with a router, two experts each."""


def make_model(numerics: Any = "exact", seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = prepare(AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)).eval())
    lay_end_to_end(model)
    set_numerics(model, numerics)
    set_replaying(model, True)
    return model


def make_engine(model: Any, size: dict[str, int], **more: Any) -> LocalEngine:
    return LocalEngine(model, EngineSettings(seed=5, max_length=100, routes=True, **size, **more))


def sample(model: Any, size: dict[str, int], prompts: list[tuple[int, ...]]) -> list[Completion]:
    engine, params = make_engine(model, size), SamplingParams(max_new_tokens=12)

    async def run() -> list[Completion]:
        requests = [Request(id=f"r{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    completions = asyncio.run(run())
    if size is TIGHT:
        assert engine.stats()["preemptions"] > 0, "a test of preemption preempts"
    return completions


PROMPTS = [tuple((7 * i + 3 * j) % 59 for j in range(length)) for i, length in enumerate((3, 20, 17, 31, 9))]
PROMPTS += PROMPTS[1:2] * 3  # three that follow the second


def rows_of_all(completions: list[Completion]) -> list[Sample]:
    return [row for i, completion in enumerate(completions) for row in rows_of(episode([completion], i))]


def episode(completions: list[Completion], index: int = 0) -> Trajectory:
    turns = tuple(Turn(completion=one, message=Message(role="assistant", content="")) for one in completions)
    return Trajectory(task_id="t", group_id="g", index=index, turns=turns, status=Status.COMPLETED, score=Score.of(0.0))


def own_routes(model: Any, ids: list[int]) -> np.ndarray:
    """[n, W] of a pass over the whole text."""
    attend = ExactPackedAttention((len(ids),), torch.device("cpu"))
    found, _ = record_routes(model, torch.tensor(ids), torch.arange(len(ids)), attend)
    return found.flatten(1).numpy()


def recorded(completion: Completion) -> np.ndarray:
    assert completion.routes is not None
    routes = ragged(completion.routes)
    assert routes.counts.tolist() == [WIDTH] * (len(routes) - 1) + [0], "all but the last token"
    return routes.flat.reshape(-1, WIDTH)


@pytest.mark.parametrize("size", [ROOMY, TIGHT], ids=["roomy", "chunks and preemption"])
def test_the_engine_tells_the_experts_of_every_token_that_it_computed(size: dict[str, int]) -> None:
    model = make_model()
    for completion in sample(model, size, PROMPTS):
        found = recorded(completion)
        assert found.dtype == np.uint8
        ids = [*completion.prompt_ids, *completion.token_ids]
        assert np.array_equal(found, own_routes(model, ids)[:-1])


def test_a_prompt_that_is_found_in_the_cache_has_the_routes_of_whoever_computed_it() -> None:
    model, params = make_model(), SamplingParams(max_new_tokens=6)
    engine = make_engine(model, ROOMY)

    async def run() -> Completion:
        first = await engine.generate(Request(id="a", prompt_ids=PROMPTS[3], params=params))
        longer = (*first.prompt_ids, *first.token_ids, 5, 6)
        return await engine.generate(Request(id="b", prompt_ids=longer, params=params))

    second = asyncio.run(run())
    assert engine.stats()["prefix_hit_rate"] > 0.3
    assert np.array_equal(recorded(second), own_routes(model, [*second.prompt_ids, *second.token_ids])[:-1])


@pytest.mark.parametrize("after", ["keep", "recompute"])
def test_a_token_keeps_the_routes_it_was_computed_by_when_the_weights_change(after: Any) -> None:
    old, new = make_model(), make_model(seed=1)
    engine = make_engine(copy.deepcopy(old), ROOMY, kv_after_load=after)
    seen: list[int] = []

    async def run() -> Completion:
        request = Request(id="a", prompt_ids=PROMPTS[1], params=SamplingParams(max_new_tokens=16))
        task = asyncio.create_task(engine.generate(request, watch=lambda ids, _: seen.extend(ids)))
        while len(seen) < 6:
            await asyncio.sleep(0)
        await engine.load(Publication(version=1, tensors=dict(saved_tensors(new))))
        async with asyncio.timeout(60):
            return await task

    completion = asyncio.run(run())
    num_old = len(completion.prompt_ids) + sum(version == 0 for version in completion.versions) - 1
    assert len(completion.prompt_ids) < num_old < len(completion.prompt_ids) + 15
    ids = [*completion.prompt_ids, *completion.token_ids]
    found = recorded(completion)
    assert np.array_equal(found[:num_old], own_routes(old, ids)[:num_old])
    assert not np.array_equal(found[:num_old], own_routes(new, ids)[:num_old])
    if after == "recompute":
        assert np.array_equal(found[num_old:], own_routes(new, ids)[num_old:-1])


def packed(completions: list[Completion]) -> Microbatch:
    (microbatch,) = pack(rows_of_all(completions), tokens_per_microbatch=100_000)
    return microbatch


def gap(model: Any, microbatch: Microbatch) -> float:
    mask = microbatch.loss_mask.bool()
    with torch.no_grad():
        found = score_drawn(model, microbatch, 1.0).logprobs
    return (found - microbatch.behavior_logprobs[mask]).abs().max().item()


def test_replayed_routes_give_the_samplers_log_probabilities_whatever_the_routers_choose_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Routers that choose the least likely experts stand for rounding that tips a choice."""
    model = make_model("fast")
    microbatch = packed(sample(model, TIGHT, PROMPTS))
    wrong = replace(ops.ops_of(torch.device("cpu"), "fast"), choose=lambda logits, count: (-logits).topk(count).indices)
    monkeypatch.setattr("temper.models.decoder.ops_of", lambda *_: wrong)
    assert gap(model, microbatch) < 1e-5
    assert microbatch.routes is not None
    assert gap(model, replace(microbatch, routes=microbatch.routes.roll(1, 0))) > 0.01, "off by one is seen"
    set_replaying(model, False)
    assert gap(model, microbatch) > 0.01, "without replay the choice matters"


def test_routes_of_shared_prompts_are_replayed_once_and_alike() -> None:
    model = make_model("fast")
    microbatch = packed(sample(model, ROOMY, PROMPTS[1:2] * 4))
    logprobs = score_drawn(model, microbatch, 1.0).logprobs
    alone = torch.cat(
        [score_drawn(model, part, 1.0).logprobs for row in range(4) for part in pack([row_of(microbatch, row)], 10**6)]
    )
    torch.testing.assert_close(logprobs, alone, rtol=0, atol=1e-5)


def row_of(microbatch: Microbatch, row: int) -> Sample:
    """One row of a microbatch as a sample, with its routes."""
    taken = microbatch.sequence_ids == row
    assert microbatch.routes is not None
    assert microbatch.is_routed is not None
    routes = [
        route if known else []
        for route, known in zip(microbatch.routes[taken].tolist(), microbatch.is_routed[taken].tolist(), strict=True)
    ]
    length = int(taken.sum())
    return Sample(
        group_id="g", index=row, token_ids=microbatch.token_ids[taken].tolist(),
        loss_mask=microbatch.loss_mask[taken].tolist(),
        behavior_logprobs=microbatch.behavior_logprobs[taken].tolist(), versions=microbatch.versions[taken].tolist(),
        advantages=[0.0] * length, weights=[0.0] * length, routes=routes,
    )  # fmt: skip


def gradients(model: Any, microbatch: Microbatch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    score_drawn(model, microbatch, 1.0).logprobs.sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_routers_learn_from_replayed_routes_and_layers_that_are_computed_again_replay_their_own() -> None:
    model = make_model("fast")
    microbatch = packed(sample(model, ROOMY, PROMPTS))
    native = gradients(model, replace(microbatch, routes=None, is_routed=None))
    replayed = gradients(model, microbatch)
    gates = [name for name in replayed if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    assert all(replayed[name].abs().max() > 1e-6 for name in gates)
    for name, gradient in replayed.items():
        torch.testing.assert_close(gradient, native[name], rtol=1e-3, atol=1e-4, msg=name)
    enable_checkpointing(model)
    with checkpointing(model):
        again = gradients(model, microbatch)
    for name, gradient in again.items():
        torch.testing.assert_close(gradient, replayed[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_policy_whose_adapter_is_switched_off_replays_if_its_reference_does() -> None:
    model = make_model("fast")
    microbatch = packed(sample(model, ROOMY, PROMPTS))
    assert microbatch.routes is not None
    others = replace(microbatch, routes=microbatch.routes.roll(1, 0))
    own, replayed = gap(model, replace(microbatch, routes=None, is_routed=None)), gap(model, others)
    assert replayed > own + 0.01
    reference = AdapterOff(model)
    for of_reference, expected in ((False, own), (True, replayed)):
        set_replaying(reference, of_reference)
        with reference.switched() as policy:
            assert gap(policy, others) == expected
        assert gap(model, others) == replayed, "the policy itself goes on as before"


def test_weights_of_replayed_experts_come_from_the_logits_of_now() -> None:
    """Numbers worked out by hand: logits (2, 1, 0.5, -1), native experts 0 and 1, replayed 0 and 2."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    normed, plain = (Qwen3MoeConfig(norm_topk_prob=flag) for flag in (True, False))
    for config, experts, expected in (
        (normed, [0, 1], (0.731059, 0.268941)),
        (normed, [0, 2], (0.817574, 0.182426)),
        (plain, [0, 2], (0.609460, 0.135989)),
        (Glm4MoeConfig(), [0, 2], (0.585926, 0.414074)),  # each by a sigmoid, whatever its bias
    ):
        found = weights_of(config, logits, torch.tensor([experts]))
        torch.testing.assert_close(found, torch.tensor([expected]), rtol=0, atol=1e-6)


def test_a_replay_counts_what_the_router_would_change_and_that_every_layer_took_its_routes() -> None:
    shape = RouteShape(layers=(0, 2), num_chosen=2, num_experts=6)
    routes = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 1], [0, 0, 0, 0]], dtype=torch.uint8)
    replay = Replay(shape, routes, torch.tensor([True, True, False]))
    chosen, logits = torch.tensor([[1, 0], [4, 2], [3, 2]]), torch.zeros(3, 6)
    assert replay.route(0, logits, chosen)[1].tolist() == [[0, 1], [4, 5], [3, 2]], "the last token has no record"
    assert replay.moved[0].tolist() == [0, 1, 0], "the order of experts is no change"
    with pytest.raises(AssertionError, match="2: 0"):
        replay.require_taken_once()
    replay.route(2, logits, chosen)
    replay.require_taken_once()
    with pytest.raises(AssertionError, match="a route for every token"):
        replay.route(2, logits[1:], chosen[1:])
    with pytest.raises(AssertionError, match="routes of 3 experts"):
        Replay(shape, routes[:, :3], torch.tensor([True, True, False]))


def test_a_replay_that_only_measures_counts_the_same_and_changes_nothing() -> None:
    shape = RouteShape(layers=(0,), num_chosen=2, num_experts=4)
    routes, chosen, logits = torch.tensor([[0, 3], [2, 3]]), torch.tensor([[0, 1], [0, 1]]), torch.zeros(2, 4)
    has_record = torch.tensor([True, True])
    replay, measure = (Replay(shape, routes, has_record, only_measures=only) for only in (False, True))
    assert torch.equal(replay.route(0, logits, chosen)[1], routes)
    assert torch.equal(measure.route(0, logits, chosen)[1], chosen)
    assert measure.moved[0].tolist() == replay.moved[0].tolist() == [1, 2]


def test_over_turns_a_token_keeps_the_route_by_which_the_next_was_drawn() -> None:
    first = completed((1, 2), [3, 4], [[10], [11], [12], []])
    second = completed((1, 2, 3, 4, 5), [6], [[90], [91], [92], [13], [14], []])
    (row,) = rows_of(episode([first, second]))
    assert row.routes is not None
    assert [list(route) for route in row.routes] == [[10], [11], [12], [13], [14], []]
    rewritten = completed((7, 8), [9], [[20], [21], []])
    rows = rows_of(episode([first, rewritten]))
    assert [[list(route) for route in row.routes or ()] for row in rows] == [[[10], [11], [12], []], [[20], [21], []]]
    (without,) = rows_of(episode([first, replace(second, routes=None)]))
    assert without.routes is None


def test_a_turn_that_drew_nothing_takes_no_routes_from_the_others() -> None:
    first = completed((1, 2), [3, 4], [[10], [11], [12], []])
    cut = Completion(prompt_ids=(1, 2, 3, 4, 5), token_ids=(), logprobs=(), versions=(), finish=Finish.ABORT)
    (row,) = rows_of(episode([first, cut]))
    assert [list(route) for route in row.routes or ()] == [[10], [11], [12], [], []]
    later = completed((1, 2, 3, 4, 5), [6], [[90], [91], [92], [13], [14], []])
    (row,) = rows_of(episode([first, cut, later]))
    assert [list(route) for route in row.routes or ()] == [[10], [11], [12], [13], [14], []]
    (row,) = rows_of(episode([replace(cut, prompt_ids=(1, 2)), first]))
    assert [list(route) for route in row.routes or ()] == [[10], [11], [12], []]


def completed(prompt: tuple[int, ...], drawn: list[int], routes: list[list[int]]) -> Completion:
    return Completion(
        prompt_ids=prompt, token_ids=drawn, logprobs=[-1.0] * len(drawn), versions=[0] * len(drawn),
        finish=Finish.STOP, routes=ragged(routes, np.uint8),
    )  # fmt: skip


def test_pieces_of_a_completion_keep_their_routes() -> None:
    first = completed((1, 2), [3, 4], [[10], [11], [12], []])
    second = completed((1, 2, 3, 4), [5], [[90], [91], [92], [13], []])
    whole = join(first, (), second)
    assert [list(route) for route in whole.routes or ()] == [[10], [11], [12], [13], []]
    behind = completed((1, 2, 3, 4, 8, 9), [5], [[90], [91], [92], [13], [14], [15], []])
    injected = join(first, (8, 9), behind)
    assert [list(route) for route in injected.routes or ()] == [[10], [11], [12], [13], [14], [15], []]
    waiting = completed((1, 2), [], [[], []])  # cut before it ran
    given = completed((1, 2, 8, 9), [5], [[10], [11], [14], [15], []])
    assert [list(route) for route in join(waiting, (8, 9), given).routes or ()] == [[10], [11], [14], [15], []]
    assert [list(route) for route in join(waiting, (), completed((1, 2), [5], [[10], [11], []])).routes or ()] == [
        [10], [11], []
    ]  # fmt: skip


def test_an_answer_that_is_cut_at_a_stop_text_has_the_routes_of_what_is_left() -> None:
    request = Request(id="a", prompt_ids=(1, 2), params=SamplingParams(max_new_tokens=10, stop=("END",)))
    pieces = PiecedAnswer(request, lambda ids: "".join({7: "E", 8: "N", 9: "D"}.get(token, "x") for token in ids))
    pieces.add(replace(completed((1, 2), [3, 7], [[10], [11], [12], []]), finish=Finish.INTERRUPT))
    behind = completed((1, 2, 3, 7), [8, 9, 4, 4], [[90], [91], [92], [13], [14], [15], [16], []])
    whole = pieces.add(behind)
    assert list(whole.token_ids) == [3, 7, 8, 9]
    assert [list(route) for route in whole.routes or ()] == [[10], [11], [12], [13], [14], []], "the last has none"
    (row,) = rows_of(episode([whole]))
    assert row.routes is not None
    assert len(row.routes) == len(row.token_ids)


def test_rows_with_and_without_routes_are_packed_together() -> None:
    with_routes = rows_of_all([completed((1, 2), [3], [[4, 5], [6, 7], []])])
    without = [replace(with_routes[0], group_id="h", routes=None)]
    (microbatch,) = pack(with_routes + without, 100)
    assert microbatch.routes is not None
    assert microbatch.routes.dtype is torch.uint8
    assert microbatch.is_routed is not None
    assert microbatch.is_routed.tolist() == [True, True, False, False, False, False]
    assert microbatch.routes[:2].tolist() == [[4, 5], [6, 7]]
    assert pack(without, 100)[0].routes is None


def test_routes_cross_the_border_of_a_process() -> None:
    sent = completed((1, 2), [3], [[4, 5], [6, 7], []])
    written = to_bytes(completion_frame(1, sent))
    sizes = np.frombuffer(written[:4], "<u4")[0]
    arrived = completion_of(from_bytes(written[12 : 12 + sizes], written[12 + sizes :]))
    assert arrived.routes == sent.routes


def test_a_model_without_experts_is_refused() -> None:
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"model.replay_routes: .* this model is a llama"):
        set_replaying(LlamaForCausalLM(config), True)
    assert route_shape(make_model()).width == WIDTH
    many = RouteShape(layers=(0,), num_chosen=2, num_experts=257)
    assert many.dtype is torch.int16
