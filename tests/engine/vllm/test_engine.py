"""vLLM behind the seam: real when vLLM is installed (`make vllm`); what needs no engine is checked everywhere."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import temper.engine.vllm.sending as sending
from temper.engine.manifest import Manifest, differences, manifest_of
from temper.engine.vllm.engine import VllmEngine
from temper.engine.vllm.sampling import NEUTRAL, read_back, require_supported, to_completion
from temper.engine.vllm.sending import WeightSender
from temper.engine.vllm.start import VllmSettings
from temper.errors import BackendError, ContextFull, EngineLost, TaskError, UserError
from temper.parity.diagnosis import is_on_grid
from temper.types import Completion, Finish, Publication, Request, SamplingParams

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make vllm` runs this test"
)
Answer = TypeVar("Answer")
VOCABULARY = 100
PROMPT = (5, 6, 7, 8, 9)


def tiny_model(seed: int, **changes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        **({"num_attention_heads": 2, "num_key_value_heads": 1} | changes),
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def publication(model: Any, version: int) -> Publication:
    return Publication(version=version, tensors={name: tensor.detach() for name, tensor in model.named_parameters()})


def settings(folder: Path, **changes: Any) -> VllmSettings:
    given: dict[str, Any] = {
        "folder": folder,
        "seed": 1,
        "dtype": "float32",
        "device": "cpu",
        "max_running": 16,
        "tokens_per_step": 512,
        "max_length": 256,
        "kv_tokens": 8192,
        "block_size": 32,
        "kv_after_load": "recompute",
    }
    return VllmSettings(**{**given, **changes})


@dataclass
class Live:
    """A real engine, its loop, and the weights it should hold."""

    engine: VllmEngine
    runner: asyncio.Runner
    model: Any

    def run(self, work: Awaitable[Answer]) -> Answer:
        async def bounded() -> Answer:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(bounded())

    def draw(self, *requests: Request) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.run(together())

    def publish(self, model: Any) -> None:
        self.run(self.engine.load(publication(model, self.engine.version + 1)))
        self.model = model


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(0)
    model.save_pretrained(folder)
    # A trap: vLLM takes these as defaults unless told otherwise.
    trap = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.5, "eos_token_id": list(range(VOCABULARY))}
    (folder / "generation_config.json").write_text(json.dumps(trap))
    with asyncio.Runner() as runner:
        engine = VllmEngine(settings(folder))
        runner.run(engine.start())
        yield Live(engine, runner, model)
        runner.run(engine.close())


@pytest.fixture
def fresh(live: Live) -> Live:
    """The same engine with the weights of version 0's numbers, whatever a test before did."""
    live.publish(tiny_model(0))
    live.engine.stats()
    return live


def request(name: str, *, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    return Request(id=name, prompt_ids=prompt, params=SamplingParams(**{"max_new_tokens": 12, **params}))


def logprobs_of(model: Any, completion: Completion, temperature: float = 1.0) -> Tensor:
    """[tokens, vocabulary], recomputed by transformers."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def gap(model: Any, completion: Completion, temperature: float = 1.0) -> float:
    drawn = torch.tensor(completion.token_ids).unsqueeze(1)
    again = logprobs_of(model, completion, temperature).gather(1, drawn).squeeze(1)
    return (again - torch.tensor(completion.logprobs)).abs().max().item()


@needs_vllm
def test_greedy_tokens_are_those_of_transformers_and_logprobs_are_at_temperature_one(fresh: Live) -> None:
    prompts = [PROMPT, (1, 2, 3), (50, 60)]
    drawn = fresh.draw(*(request(f"greedy {p}", prompt=p, temperature=0.0) for p in prompts))
    for prompt, completion in zip(prompts, drawn, strict=True):
        ids = torch.tensor([prompt])
        expected = fresh.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish is Finish.LENGTH
        assert gap(fresh.model, completion) < 1e-4


@needs_vllm
def test_logprobs_are_those_after_temperature_whoever_runs_beside(fresh: Live) -> None:
    temperatures = (0.5, 1.0, 1.7)
    for completion, temperature in zip(
        fresh.draw(*(request(f"warm {t}", temperature=t, max_new_tokens=40) for t in temperatures)),
        temperatures,
        strict=True,
    ):
        assert gap(fresh.model, completion, temperature) < 1e-4
        assert gap(fresh.model, completion, temperature * 1.1) > 1e-2, "another temperature would be noticed"
        assert completion.params == SamplingParams(temperature=temperature, max_new_tokens=40)


@needs_vllm
def test_what_a_request_draws_depends_on_its_id_and_not_on_its_neighbours(fresh: Live) -> None:
    (alone,) = fresh.draw(request("same", max_new_tokens=30))
    again, other = fresh.draw(request("same", max_new_tokens=30), request("other", max_new_tokens=30))
    assert again.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


@needs_vllm
def test_drawn_tokens_follow_the_reported_probabilities(fresh: Live) -> None:
    drawn = fresh.draw(*(request(f"draw {place}", max_new_tokens=1) for place in range(400)))
    expected = logprobs_of(fresh.model, drawn[0])[0].exp()
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=VOCABULARY) / 400
    assert (counts - expected).abs().sum() / 2 < 0.25
    assert (counts - expected.roll(1)).abs().sum() / 2 > 0.5, "the wrong distribution would be noticed"


@needs_vllm
@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_k": 20, "top_p": 0.8}, {"top_k": 20, "min_p": 0.2}])
def test_keep_sets_hold_the_drawn_token_and_all_probability(fresh: Live, cut: dict[str, Any]) -> None:
    (completion,) = fresh.draw(request(f"cut {cut}", temperature=0.9, entropy=True, **cut))
    assert completion.keep_ids is not None
    assert completion.entropies is not None
    full = logprobs_of(fresh.model, completion, 0.9)
    for place, (token, kept) in enumerate(zip(completion.token_ids, completion.keep_ids, strict=True)):
        assert token in kept
        assert len(kept) <= cut["top_k"]
        within = torch.log_softmax(full[place, kept], dim=-1)
        assert abs(within[kept.index(token)].item() - completion.logprobs[place]) < 1e-4
        assert abs(-(within.exp() * within).sum().item() - completion.entropies[place]) < 1e-3
        assert full[place, kept].min() >= full[place].topk(cut["top_k"]).values[-1] - 1e-4


@needs_vllm
def test_top_logprobs_come_most_likely_first(fresh: Live) -> None:
    (completion,) = fresh.draw(request("top", top_logprobs=5))
    assert completion.top_ids is not None
    assert completion.top_logprobs is not None
    expected = logprobs_of(fresh.model, completion).topk(5)
    assert completion.top_ids == expected.indices.tolist()
    assert (torch.tensor(completion.top_logprobs) - expected.values).abs().max() < 1e-4
    assert completion.keep_ids is None


@needs_vllm
def test_stop_ids_end_a_completion_and_stay_in_it(fresh: Live) -> None:
    (free,) = fresh.draw(request("free", temperature=0.0))
    stop = free.token_ids[3]
    (stopped,) = fresh.draw(request("stopped", temperature=0.0, stop_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish is Finish.STOP
    assert stopped.params is not None
    assert stopped.params.stop_ids == (stop,)


@needs_vllm
def test_a_completion_is_cut_at_the_context_limit(fresh: Live) -> None:
    (completion,) = fresh.draw(request("long", prompt=tuple(range(1, 91)) * 2, max_new_tokens=500))
    assert len(completion.prompt_ids) + len(completion.token_ids) == 256
    assert completion.finish is Finish.LENGTH


@needs_vllm
def test_more_prompt_tokens_than_one_step_takes_are_no_trouble(fresh: Live) -> None:
    prompts = [tuple(range(1 + place, 91 + place - place % 7)) for place in range(9)]
    for completion in fresh.draw(*(request(f"much {p[0]}", prompt=p) for p in prompts)):
        assert gap(fresh.model, completion) < 1e-4


@needs_vllm
@pytest.mark.parametrize("finish", [Finish.ABORT, Finish.INTERRUPT])
def test_a_request_that_is_ended_returns_what_was_drawn_so_far(fresh: Live, finish: Finish) -> None:
    async def scenario() -> tuple[Completion, Completion]:
        engine = fresh.engine
        end = engine.abort if finish is Finish.ABORT else engine.interrupt
        task = asyncio.create_task(engine.generate(request("ended", max_new_tokens=200)))
        neighbour = asyncio.create_task(engine.generate(request("neighbour", max_new_tokens=20)))
        while engine.stats()["decode_tokens"] == 0:
            await asyncio.sleep(0.001)
        await end("ended")
        await end("nobody")
        return await task, await neighbour

    ended, neighbour = fresh.run(scenario())
    assert ended.finish is finish
    assert 0 < len(ended.token_ids) < 200
    assert gap(fresh.model, ended) < 1e-4
    assert len(neighbour.token_ids) == 20


@needs_vllm
def test_a_cancelled_caller_frees_its_request(fresh: Live) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(fresh.engine.generate(request("cancelled", max_new_tokens=200)))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    fresh.run(scenario())
    (after,) = fresh.draw(request("cancelled"))
    assert len(after.token_ids) == 12


@needs_vllm
def test_published_weights_are_the_ones_that_draw(fresh: Live) -> None:
    new, (before,) = tiny_model(1), fresh.draw(request("before"))
    version = fresh.engine.version
    fresh.publish(new)
    (after,) = fresh.draw(request("after"))
    assert (before.versions, after.versions) == ([version] * 12, [version + 1] * 12)
    assert gap(new, after) < 1e-4
    assert gap(tiny_model(0), after) > 0.1, "old weights, or an old tied head, would be noticed"


@needs_vllm
def test_weights_that_change_in_the_middle_leave_each_token_its_version(fresh: Live) -> None:
    old, new = fresh.model, tiny_model(1)
    version = fresh.engine.version

    async def scenario() -> list[Completion]:
        tasks = [asyncio.create_task(fresh.engine.generate(request(f"m{n}", max_new_tokens=100))) for n in range(3)]
        while fresh.engine.stats()["decode_tokens"] == 0:
            await asyncio.sleep(0.001)
        await fresh.engine.load(publication(new, version + 1))
        return await asyncio.gather(*tasks)

    for completion in fresh.run(scenario()):
        split = completion.versions.count(version)
        assert completion.versions == [version] * split + [version + 1] * (100 - split)
        assert 0 < split < 100
        drawn = torch.tensor(completion.token_ids).unsqueeze(1)
        gaps = [
            (logprobs_of(m, completion).gather(1, drawn).squeeze(1) - torch.tensor(completion.logprobs)).abs()
            for m in (old, new)
        ]
        # Keys and values are recomputed at the change, so both parts fit their weights exactly.
        assert gaps[0][:split].max() < 1e-4
        assert gaps[1][split:].max() < 1e-4
        assert gaps[0][split] > 1e-3 or gaps[1][split - 1] > 1e-3, "a boundary off by one would be noticed"


@needs_vllm
def test_requests_that_come_during_a_publication_wait_for_it(fresh: Live) -> None:
    version, new = fresh.engine.version, tiny_model(1)

    async def scenario() -> Completion:
        loading = asyncio.create_task(fresh.engine.load(publication(new, version + 1)))
        await asyncio.sleep(0.005)
        completion = await fresh.engine.generate(request("patient"))
        await loading
        return completion

    completion = fresh.run(scenario())
    assert completion.versions == [version + 1] * 12
    assert gap(new, completion) < 1e-4


@needs_vllm
def test_kept_keys_and_values_serve_their_own_sequence_and_nobody_new(
    fresh: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh.engine, "_settings", replace(fresh.engine._settings, kv_after_load="keep"))
    version, new, prompt = fresh.engine.version, tiny_model(1), tuple(range(1, 97))

    async def scenario() -> tuple[Completion, Completion]:
        running = asyncio.create_task(fresh.engine.generate(request("runs on", prompt=prompt, max_new_tokens=150)))
        while fresh.engine.stats()["decode_tokens"] == 0:
            await asyncio.sleep(0.001)
        await fresh.engine.load(publication(new, version + 1))
        fresh.engine.stats()
        return await fresh.engine.generate(request("new", prompt=prompt)), await running

    started, running = fresh.run(scenario())
    assert fresh.engine.stats()["prefix_hit_tokens"] == 0
    assert started.versions == [version + 1] * 12
    assert gap(new, started) < 1e-4
    assert set(running.versions) == {version, version + 1}
    assert gap(new, running) > 1e-3, "it went on with the keys and values of the old weights, as asked"


@needs_vllm
def test_a_publication_repairs_scrambled_weights_and_hashes_tell(fresh: Live) -> None:
    manifest = manifest_of(publication(fresh.model, fresh.engine.version))
    assert differences(manifest, fresh.run(fresh.engine.held(manifest))) == []
    fresh.run(fresh.engine._engine.collective_rpc("temper_scramble", args=("model.layers.1.mlp.gate_up_proj.weight",)))
    found = differences(manifest, fresh.run(fresh.engine.held(manifest)))
    assert found == [f"model.layers.1.mlp.{part}_proj.weight holds other numbers" for part in ("gate", "up")]
    fresh.publish(fresh.model)
    assert differences(replace(manifest, version=0), replace(fresh.run(fresh.engine.held(manifest)), version=0)) == []


@needs_vllm
def test_twenty_publications_of_the_same_weights_change_nothing(fresh: Live) -> None:
    (first,) = fresh.draw(request("canary", temperature=0.0))
    for _ in range(20):
        fresh.publish(fresh.model)
    (last,) = fresh.draw(request("canary", temperature=0.0))
    assert (last.token_ids, last.logprobs) == (first.token_ids, first.logprobs)


Fault = Callable[[dict[str, Tensor]], Any]


@needs_vllm
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "nothing was published for"),
        (lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"), "nothing was loaded"),
        (lambda tensors: tensors.update({"extra.weight": torch.zeros(2)}), "no place for extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}), "nothing was loaded"),
        (lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}), "bfloat16; nothing was loaded"),
    ],
)
def test_a_publication_that_does_not_fit_leaves_the_old_weights(fresh: Live, fault: Fault, says: str) -> None:
    version, (before,) = fresh.engine.version, fresh.draw(request("fit", temperature=0.0))
    tensors = dict(publication(tiny_model(1), version).tensors)
    fault(tensors)
    with pytest.raises(BackendError, match=says):
        fresh.run(fresh.engine.load(Publication(version=version + 1, tensors=tensors)))
    (after,) = fresh.draw(request("fit", temperature=0.0))
    assert (after.token_ids, after.logprobs, after.versions) == (before.token_ids, before.logprobs, before.versions)


@needs_vllm
def test_a_tensor_that_is_spoiled_on_the_way_is_noticed_before_it_counts(
    fresh: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sending.SharedWeights.write

    def spoiling(memory: sending.SharedWeights, given: Publication) -> dict[str, Any]:
        told = real(memory, given)
        memory.read(told).tensors["model.norm.weight"].neg_()
        return told

    monkeypatch.setattr(sending.SharedWeights, "write", spoiling)
    version = fresh.engine.version
    with pytest.raises(BackendError, match=r"model\.norm\.weight holds other numbers"):
        fresh.run(fresh.engine.load(publication(tiny_model(1), version + 1)))
    (after,) = fresh.draw(request("still old"))
    assert gap(fresh.model, after) < 1e-4
    assert fresh.engine.version == version


@needs_vllm
def test_after_a_publication_that_failed_half_way_nothing_is_drawn_until_one_succeeds(
    fresh: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = fresh.engine._sender
    assert sender is not None
    real = sender.held

    async def lost_acknowledgement(manifest: Manifest) -> Manifest:
        return replace(await real(manifest), tensors={})

    async def scenario() -> None:
        running = asyncio.create_task(fresh.engine.generate(request("running", max_new_tokens=200)))
        await asyncio.sleep(0.1)
        with pytest.raises(BackendError, match="did not arrive"):
            await fresh.engine.load(publication(tiny_model(1), 100))
        with pytest.raises(BackendError, match="publish them again"):
            await running

    with monkeypatch.context() as patch:
        patch.setattr(sender, "held", lost_acknowledgement)
        fresh.run(scenario())
    with pytest.raises(BackendError, match="publish them again"):
        fresh.draw(request("refused"))
    fresh.publish(fresh.model)
    assert len(fresh.draw(request("fine again"))[0].token_ids) == 12


@needs_vllm
def test_prefixes_are_reused_within_a_version_and_never_across(fresh: Live) -> None:
    prompt = tuple(range(1, 97))
    fresh.draw(request("first", prompt=prompt))
    assert fresh.engine.stats()["prefix_hit_tokens"] == 0
    fresh.draw(request("second", prompt=prompt))
    assert fresh.engine.stats()["prefix_hit_tokens"] >= 64
    fresh.publish(tiny_model(1))
    (after,) = fresh.draw(request("third", prompt=prompt))
    assert fresh.engine.stats()["prefix_hit_tokens"] == 0
    assert gap(fresh.model, after) < 1e-4


@needs_vllm
def test_stats_count_since_the_last_call(fresh: Live) -> None:
    fresh.draw(request("counted", max_new_tokens=10))
    stats = fresh.engine.stats()
    assert stats["decode_tokens"] == 10
    assert stats["prefill_tokens"] == len(PROMPT)
    assert stats["steps"] >= 10
    assert fresh.engine.stats()["decode_tokens"] == 0


@needs_vllm
def test_requests_that_cannot_be_run_fail_alone_and_say_why(fresh: Live) -> None:
    for bad, error in (
        (request("empty", prompt=()), TaskError),
        (request("long", prompt=(1,) * 256), ContextFull),
        (request("many", top_logprobs=VOCABULARY + 1), TaskError),
        (request("foreign", prompt=(VOCABULARY + 5,)), TaskError),
        (request("elsewhere", stop_ids=(-1,)), TaskError),
        (request("cold", temperature=0.001), BackendError),
    ):
        with pytest.raises(error):
            fresh.draw(bad)
    assert len(fresh.draw(request("fine"))[0].token_ids) == 12


@needs_vllm
def test_logits_of_half_precision_weights_are_float32(tmp_path: Path) -> None:
    """vLLM's own are of the dtype of the weights: the parity check refuses those, and no model in bfloat16 would train
    with it. Nothing is published, for on a CPU it packs such weights."""
    tiny_model(0).to(torch.bfloat16).save_pretrained(tmp_path)
    with asyncio.Runner() as runner:
        live = Live(VllmEngine(settings(tmp_path, dtype="bfloat16")), runner, None)
        try:
            (drawn,) = live.draw(request("half", top_logprobs=40, max_new_tokens=8))
        finally:
            runner.run(live.engine.close())
    assert drawn.top_logprobs is not None
    listed = [list(logprobs) for logprobs in drawn.top_logprobs]
    assert not is_on_grid(listed, 1.0)
    assert is_on_grid([torch.tensor(logprobs).to(torch.bfloat16).tolist() for logprobs in listed], 1.0)


@needs_vllm
def test_sleeping_is_refused_where_vllm_would_ignore_it(fresh: Live) -> None:
    with pytest.raises(UserError, match="GPU"):
        fresh.run(fresh.engine.sleep())


@needs_vllm
def test_a_dead_engine_is_an_error_and_not_a_wait(live: Live) -> None:
    """The last of the real ones: nothing can be drawn afterwards."""

    async def scenario() -> None:
        task = asyncio.create_task(live.engine.generate(request("orphan", max_new_tokens=200)))
        await asyncio.sleep(0.1)
        for process in live.engine._engine.engine_core.resources.engine_manager.processes:
            process.kill()
        with pytest.raises(BackendError, match="vLLM failed"):
            await task
        with pytest.raises(BackendError, match="vLLM failed"):
            await live.engine.generate(request("late"))

    live.run(scenario())


# What needs no vLLM.


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"stop": ("x",)}, "stop="),
        ({"top_p": 0.9}, "top_p=0.9 without top_k"),
        ({"min_p": 0.1}, "min_p=0.1 without top_k"),
        ({"entropy": True}, "entropy=True"),
        ({"top_k": 4, "top_logprobs": 2}, "top_logprobs=2 with top_k"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(params: dict[str, Any], names: str) -> None:
    with pytest.raises(UserError, match=names):
        require_supported(SamplingParams(**params))
    require_supported(SamplingParams(top_k=4, top_p=0.9, min_p=0.1, entropy=True))
    require_supported(SamplingParams(temperature=0.0, top_p=0.9))


def used(**changes: Any) -> Any:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 64, "stop_token_ids": [3]}
    return SimpleNamespace(**{**NEUTRAL, **given, **changes})


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.6},
        {"top_k": 20},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"stop_token_ids": [3, 2]},
        {"repetition_penalty": 1.1},
        {"min_tokens": 4},
        {"ignore_eos": False},
        {"watermarking": True},
        {"bad_words": ["x"]},
    ],
)
def test_any_parameter_that_vllm_changed_is_an_error_that_names_it(change: dict[str, Any]) -> None:
    asked = SamplingParams(stop_ids=(3,))
    assert read_back(asked, used()) == asked
    with pytest.raises(BackendError, match="stop at" if "stop_token_ids" in change else next(iter(change))):
        read_back(asked, used(**change))
    with pytest.raises(BackendError, match="max_new_tokens=16"):
        read_back(asked, used(max_tokens=16))


def output(**changes: Any) -> Any:
    """Two tokens, 7 and 9, with two more of the most likely at each place."""
    half = math.log(0.5)
    flat = SimpleNamespace(
        start_indices=[0, 3],
        end_indices=[3, 6],
        token_ids=[7, 8, 7, 9, 4, 9],
        logprobs=[half, half, half, half, half, half],
    )
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=2)]
    given = {"token_ids": [7, 9], "finish_reason": "stop", "logprobs": flat, "weight_versions": spans}
    return SimpleNamespace(**{**given, **changes})


def test_equal_tokens_come_by_id_and_versions_token_by_token() -> None:
    params = SamplingParams(top_logprobs=2)
    completion = to_completion(Request(id="r", prompt_ids=(1,), params=params), params, output())
    assert completion.top_ids == [[7, 8], [4, 9]]
    assert completion.versions == [3, 4]
    kept = replace(params, top_logprobs=0, top_k=2, entropy=True)
    completion = to_completion(Request(id="r", prompt_ids=(1,), params=kept), kept, output())
    assert completion.keep_ids == [[7, 8], [4, 9]]
    assert completion.entropies == pytest.approx([math.log(2)] * 2)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"token_ids": [7, 4]}, BackendError),
        ({"weight_versions": None}, BackendError),
        ({"weight_versions": [SimpleNamespace(version="3", start=0, end=1)]}, BackendError),
        ({"finish_reason": "error"}, TaskError),
    ],
)
def test_answers_that_contradict_themselves_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    params = SamplingParams()
    with pytest.raises(error):
        to_completion(Request(id="r", prompt_ids=(1,), params=params), params, output(**change))


def test_a_keep_set_that_was_cut_short_is_refused() -> None:
    params, cut = SamplingParams(top_k=1), output()
    cut.logprobs.logprobs = [math.log(0.25)] * 6
    with pytest.raises(TaskError, match="tied"):
        to_completion(Request(id="r", prompt_ids=(1,), params=params), params, cut)


class SleepyVllm:
    """What VllmEngine asks of vLLM around sleep and a publication."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def answer(*arguments: Any, **named: Any) -> Any:
            self.calls.append(f"{name} {named['level']}" if "level" in named else name)
            if name != "collective_rpc":
                return True
            return [(*named["args"], "")] if arguments[0] == "temper_manifest" else [""]

        return answer


def test_after_sleeping_without_its_weights_it_wants_them_back_before_it_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "update_request", lambda *told: told)  # vLLM's own class
    model = tiny_model(0)
    model.save_pretrained(tmp_path)

    async def scenario() -> None:
        engine, fake = VllmEngine(settings(tmp_path, device="cuda", can_sleep=True)), SleepyVllm()
        engine._engine = fake
        engine._sender = WeightSender(fake, engine._ask, num_ranks=1, answer_seconds=10.0)
        await engine.sleep(discard_weights=True)
        for forbidden in (engine.generate(request("r")), engine.load(publication(model, 1))):
            with pytest.raises(BackendError, match=r"call wake\(\) first"):
                await forbidden
        await engine.wake()
        with pytest.raises(BackendError, match=r"load\(\) them first"):
            await engine.generate(request("r"))
        await engine.load(publication(model, 1))
        assert (engine.version, engine._refusal) == (1, None)
        await engine.sleep()
        await engine.wake()
        assert engine._refusal is None
        verbs = [call for call in fake.calls if "weight" in call and "version" not in call]
        assert verbs == ["start_weight_update", "update_weights", "finish_weight_update"]
        assert [call for call in fake.calls if call.startswith("sleep")] == ["sleep 2", "sleep 1"]

    asyncio.run(scenario())


def test_an_engine_that_makes_no_step_is_lost_soon_after_the_seconds_that_it_has(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path)

    async def scenario() -> None:
        engine = VllmEngine(settings(tmp_path, answer_seconds=1.0))
        async with asyncio.timeout(20):
            with pytest.raises(EngineLost, match="made no step"):
                await engine._delivered(asyncio.Queue())

    asyncio.run(scenario())


def test_a_block_size_that_vllm_cannot_use_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"block_size=16.*multiples of 32"):
        VllmEngine(settings(tmp_path, block_size=16))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    tiny_model(0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="pip install"):
        asyncio.run(VllmEngine(settings(tmp_path)).generate(request("r")))
