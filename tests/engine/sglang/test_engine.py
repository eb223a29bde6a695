"""The SGLang adapter against a server of our own: what it draws, what it publishes, and each way a server can lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from temper.engine.fleet.member import SamplerLost
from temper.engine.sglang.checkpoints import Checkpoints
from temper.engine.sglang.engine import SglangEngine, SglangSettings
from temper.engine.sglang.probes import probe_prompt
from temper.engine.sglang.wire import PartialCompletion
from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError, ContextFull, TaskError, UserError
from temper.models.experts.routes import RouteShape
from temper.types import Completion, Finish, Publication, Request, SamplingParams

PROMPT = (5, 9, 33, 2)
ROUTES = ToldRoutes(RouteShape(layers=(0, 2), num_chosen=2, num_experts=12), num_layers=3)
"""Of the server's three layers the middle one is dense."""


def request_of(id: str = "r", prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    return Request(id=id, prompt_ids=prompt, params=SamplingParams(**{"max_new_tokens": 8, **params}))


def run(coroutine: Awaitable[Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


@asynccontextmanager
async def engine_of(
    world: Any, *faults: str, late: tuple[str, ...] = (), version: int | None = 1, **options: Any
) -> Any:
    """An engine with a server. `late` faults begin when version 1 is loaded; version=None: nothing is published."""
    ours = {name: options.pop(name) for name in list(options) if name.endswith("_seconds") or name == "routes"}
    async with world.Server(world.checkpoint, *faults, **options) as server:
        checkpoints = Checkpoints(like=world.checkpoint, folder=world.weights_folder)
        engine = SglangEngine(server.address, SglangSettings(**ours), checkpoints)
        try:
            if version is not None:
                await engine.load(Publication(version=version, tensors=world.tensors(version)))
            server.faults |= set(late)
            yield engine, server
        finally:
            await engine.close()
            checkpoints.close()


def draw(world: Any, request: Request, *faults: str, **options: Any) -> tuple[Completion, Any]:
    async def go() -> tuple[Completion, Any]:
        async with engine_of(world, *faults, **options) as (engine, server):
            return await engine.generate(request), server

    return run(go())


def expect(world: Any, kind: type[Exception], match: str, request: Request | None = None, **options: Any) -> None:
    """Publishing version 1 and drawing once must end in this error."""
    faults = options.pop("faults", ())
    with pytest.raises(kind, match=match):
        draw(world, request or request_of(), *faults, **options)


def logprobs_by_hand(world: Any, completion: Completion, version: int, temperature: float) -> list[float]:
    context, found = list(completion.prompt_ids), []
    for token in completion.token_ids:
        logits = world.logits(world.tensors(version), context).astype(np.float64) / temperature
        found.append(float(logits[token] - np.logaddexp.reduce(logits)))
        context.append(token)
    return found


@pytest.mark.parametrize("incremental", [False, True])
def test_logprobs_are_those_after_temperature_whatever_way_events_are_sent(sglang: Any, incremental: bool) -> None:
    request = request_of(temperature=0.7, max_new_tokens=70, top_logprobs=3)
    completion, _ = draw(sglang, request, incremental_streaming_output=incremental)
    assert completion.logprobs == pytest.approx(logprobs_by_hand(sglang, completion, 1, 0.7), abs=1e-5)
    assert completion.finish is Finish.LENGTH
    assert completion.versions == [1] * 70
    assert completion.top_ids is not None
    assert [len(row) for row in completion.top_ids] == [3] * 70
    assert completion.params == request.params


def test_greedy_draws_the_likeliest_with_logprobs_at_temperature_one(sglang: Any) -> None:
    completion, _ = draw(sglang, request_of(temperature=0.0))
    assert completion.logprobs == pytest.approx(logprobs_by_hand(sglang, completion, 1, 1.0), abs=1e-5)
    first = int(np.argmax(sglang.logits(sglang.tensors(1), list(PROMPT))))
    assert completion.token_ids[0] == first


def test_every_sampling_parameter_is_sent(sglang: Any) -> None:
    _, server = draw(sglang, request_of(temperature=0.5, stop_ids=(sglang.end_id, 4)))
    sent = server.bodies("/generate")[-1]
    params = sent["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["min_p"]) == (0.5, 1.0, -1, 0.0)
    assert params["repetition_penalty"] == 1.0
    assert params["stop_token_ids"] == [sglang.end_id, 4]
    assert params["ignore_eos"] is False  # with it the server ignores stop_token_ids too
    assert sent["input_ids"] == list(PROMPT)
    assert "text" not in sent


def test_a_stop_id_ends_the_completion_and_is_kept(sglang: Any) -> None:
    request = request_of(temperature=3.0, max_new_tokens=100, stop_ids=(sglang.end_id, *range(2, 40)))
    completion, _ = draw(sglang, request)
    assert completion.finish is Finish.STOP
    assert completion.token_ids[-1] in request.params.stop_ids
    assert not set(completion.token_ids[:-1]) & set(request.params.stop_ids)


def test_without_stop_ids_the_servers_end_token_does_not_end_it(sglang: Any) -> None:
    completion, _ = draw(sglang, request_of(temperature=20.0, max_new_tokens=120))
    assert len(completion.token_ids) == 120


def test_nothing_is_drawn_before_the_first_publication(sglang: Any) -> None:
    expect(sglang, BackendError, "no weights were published yet", version=None)


@pytest.mark.parametrize(
    ("params", "match"),
    [({"top_p": 0.9}, "keep-sets"), ({"top_k": 5}, "keep-sets"), ({"min_p": 0.1}, "keep-sets"),
     ({"stop": ("x",)}, "stop texts"), ({"entropy": True}, "entropy")],
)  # fmt: skip
def test_what_the_server_cannot_report_is_a_user_error(sglang: Any, params: dict[str, Any], match: str) -> None:
    expect(sglang, UserError, match, request_of(**params))


def test_a_prompt_that_leaves_no_room_is_that_tasks_failure(sglang: Any) -> None:
    expect(sglang, ContextFull, "128", request_of(prompt=(3,) * 128))
    expect(sglang, TaskError, "no tokens", request_of(prompt=()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"faults": ("original_logprobs",)}, "before temperature.*SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"faults": ("silent_top_k",)}, "applies sampling defaults silently"),
        ({"preferred_sampling_params": {"top_k": 20}}, "--preferred-sampling-params .*top_k"),
        ({"allow_auto_truncate": True}, "--allow-auto-truncate"),
        ({"dp_size": 2}, "--dp-size"),
        ({"routes": ROUTES}, "start it with --enable-return-routed-experts"),
    ],
)
def test_a_server_that_cannot_be_trained_with_is_refused_at_the_start(
    sglang: Any, options: dict[str, Any], match: str
) -> None:
    expect(sglang, UserError, match, **options)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("ignores_stop_ids", "the server ignores stop ids"),
        ("shifted_logprobs", "of other tokens than it drew"),
        ("cuts_prompts", "read 3 prompt tokens of 4"),
        ("drops_connection", "http://127.0.0.1:.*dropped the connection"),
    ],
)
def test_an_answer_that_does_not_fit_the_request_is_named(sglang: Any, fault: str, match: str) -> None:
    request = request_of(temperature=5.0, max_new_tokens=60, stop_ids=(sglang.end_id, *range(2, 60)))
    expect(sglang, BackendError, match, request, late=(fault,))


def test_a_dropped_connection_is_not_asked_again(sglang: Any) -> None:
    async def go() -> int:
        async with engine_of(sglang, late=("drops_connection",)) as (engine, server):
            before = len(server.bodies("/generate"))
            with pytest.raises(BackendError, match="dropped"):
                await engine.generate(request_of())
            return len(server.bodies("/generate")) - before

    assert run(go()) == 1


def test_an_end_token_of_the_servers_own_is_named(sglang: Any) -> None:
    async def go() -> None:
        async with engine_of(sglang) as (engine, server):
            server.end_ids = set(range(sglang.vocabulary))
            with pytest.raises(BackendError, match=r"not one of the stop ids .*end token of its own"):
                await engine.generate(request_of(stop_ids=(sglang.vocabulary,)))

    run(go())


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("refuses_update", r"refused \(400\)"),
        ("no_acknowledgement", "did not acknowledge version-2"),
        ("partial_update", "arrived in part: lm_head.weight"),
        ("wrong_model_info", "says that it serves 'an-older-one'"),
        ("wrong_version", "says that it serves 'version-1"),
        ("stale_cache", "stale prefix cache: 7 tokens"),
    ],
)
def test_a_failed_publication_is_named_and_stops_all_drawing_until_one_succeeds(
    sglang: Any, fault: str, match: str
) -> None:
    async def go() -> Completion:
        async with engine_of(sglang, late=(fault,)) as (engine, server):
            with pytest.raises(BackendError, match=match):
                await engine.load(Publication(version=2, tensors=sglang.tensors(2)))
            assert engine.version == 1
            with pytest.raises(BackendError, match="may not draw: publication 2 failed"):
                await engine.generate(request_of())
            server.faults.clear()
            server.cache.clear()
            await engine.load(Publication(version=3, tensors=sglang.tensors(3)))
            return await engine.generate(request_of())

    completion = run(go())
    assert completion.versions == [3] * 8
    assert completion.logprobs == pytest.approx(logprobs_by_hand(sglang, completion, 3, 1.0), abs=1e-5)


def test_checksums_stand_in_where_the_server_hands_out_no_tensors(sglang: Any) -> None:
    async def go() -> None:
        async with engine_of(sglang, "no_export") as (engine, server):
            await engine.load(Publication(version=2, tensors=sglang.tensors(2)))
            server.faults.add("partial_update")
            with pytest.raises(BackendError, match=r"arrived in part: lm_head\.weight did not change"):
                await engine.load(Publication(version=3, tensors=sglang.tensors(3)))

    run(go())


def test_weights_in_the_servers_own_dtype_are_recognised(sglang: Any) -> None:
    async def go() -> None:
        async with engine_of(sglang, version=None) as (engine, server):
            half = {name: tensor.bfloat16() for name, tensor in sglang.tensors(1).items()}
            update = server._update

            def rounded(body: dict[str, Any]) -> Any:
                answer = update(body)
                server.tensors = {name: tensor.float() for name, tensor in half.items()}
                return answer

            server._update = rounded
            await engine.load(Publication(version=1, tensors=sglang.tensors(1)))

    run(go())


def test_a_published_checkpoint_has_manifest_and_configuration_and_only_the_last_stays(sglang: Any) -> None:
    async def go() -> list[str]:
        async with engine_of(sglang) as (engine, _):
            await engine.load(Publication(version=2, tensors=sglang.tensors(2)))
            folders = sorted(sglang.weights_folder.iterdir())
            files = sorted(file.name for file in folders[0].iterdir())
            assert json.loads((folders[0] / "manifest.json").read_text())["version"] == 2
            assert files == ["config.json", "manifest.json", "model.safetensors"]
            return [folder.name.rsplit("-", 1)[0] for folder in folders]

    assert run(go()) == ["version-2"]
    assert not sglang.weights_folder.exists()


def test_tensors_the_server_would_not_know_by_name_are_refused_before_anything_changes(sglang: Any) -> None:
    async def go() -> Completion:
        async with engine_of(sglang) as (engine, _):
            strange = {**sglang.tensors(2), "model.experts.fused": torch.zeros(2)}
            with pytest.raises(UserError, match=r"model\.experts\.fused"):
                await engine.load(Publication(version=2, tensors=strange))
            return await engine.generate(request_of())

    assert run(go()).versions == [1] * 8


def test_a_publication_in_mid_completion_goes_on_with_the_new_weights_and_every_token_tells(sglang: Any) -> None:
    async def go() -> list[Completion]:
        async with engine_of(sglang, seconds_per_token=0.005) as (engine, _):
            requests = [request_of(f"r{place}", (place, 7), max_new_tokens=60) for place in range(4)]
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            await asyncio.sleep(0.1)
            await engine.load(Publication(version=2, tensors=sglang.tensors(2)))
            return await asyncio.gather(*tasks)

    for completion in run(go()):
        split = completion.versions.index(2)
        assert completion.versions == [1] * split + [2] * (60 - split)
        assert 0 < split < 60
        old, new = (logprobs_by_hand(sglang, completion, version, 1.0) for version in (1, 2))
        assert completion.logprobs == pytest.approx(old[:split] + new[split:], abs=1e-5)


@pytest.mark.parametrize(("verb", "finish"), [("abort", Finish.ABORT), ("interrupt", Finish.INTERRUPT)])
def test_a_request_ends_early_with_its_tokens_and_others_go_on(sglang: Any, verb: str, finish: Finish) -> None:
    async def go() -> tuple[Completion, Completion]:
        async with engine_of(sglang, seconds_per_token=0.005) as (engine, _):
            # Ids of which one begins like the other: the server aborts by prefix.
            one, other = (
                asyncio.create_task(engine.generate(request_of(id, max_new_tokens=60))) for id in ("r1", "r10")
            )
            await asyncio.sleep(0.1)
            end: Callable[[str], Awaitable[None]] = getattr(engine, verb)
            await end("r1")
            await end("unknown")
            return await one, await other

    ended, whole = run(go())
    assert ended.finish is finish
    assert 0 < len(ended.token_ids) < 60
    assert len(whole.token_ids) == 60


def test_an_abort_that_overtakes_its_request_is_not_lost(sglang: Any) -> None:
    async def go() -> Completion:
        async with engine_of(sglang, seconds_per_token=0.005) as (engine, _):
            task = asyncio.create_task(engine.generate(request_of(max_new_tokens=100)))
            await asyncio.sleep(0)
            await engine.abort("r")
            return await task

    completion = run(go())
    assert completion.finish is Finish.ABORT
    assert len(completion.token_ids) < 100


def test_a_cancelled_caller_frees_the_server(sglang: Any) -> None:
    async def go() -> int:
        async with engine_of(sglang, seconds_per_token=0.005) as (engine, server):
            task = asyncio.create_task(engine.generate(request_of(max_new_tokens=100)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task], timeout=5)
            await asyncio.sleep(0.05)
            return len(server.jobs)

    assert run(go()) == 0


def test_a_server_that_is_gone_is_named_by_its_address(sglang: Any) -> None:
    async def go() -> None:
        async with engine_of(sglang) as (engine, server):
            await server.stop()
            with pytest.raises(BackendError, match=rf"SGLang at {server.address}.*cannot be reached"):
                await engine.generate(request_of())

    run(go())


def test_a_server_that_comes_back_is_asked_again(sglang: Any) -> None:
    async def go() -> Completion:
        async with engine_of(sglang) as (engine, server):
            await server.stop()
            task = asyncio.create_task(engine.generate(request_of()))
            await asyncio.sleep(0.05)
            async with server:
                return await task

    assert run(go()).versions == [1] * 8


@pytest.mark.parametrize(
    ("path", "option", "match"),
    [
        ("/generate", "idle_seconds", "sent nothing for 2 s"),
        ("/update_weights_from_disk", "update_seconds", "within 2 s"),
        ("/pause_generation", "control_seconds", "/pause_generation did not answer within 2 s"),
    ],
)
def test_a_server_that_hangs_meets_a_deadline(sglang: Any, path: str, option: str, match: str) -> None:
    async def go() -> None:
        async with engine_of(sglang, late=(path,), **{option: 2.0}) as (engine, _):
            publication = Publication(version=2, tensors=sglang.tensors(2))
            with pytest.raises(BackendError, match=match):
                await (engine.generate(request_of()) if path == "/generate" else engine.load(publication))

    run(go())


def test_weights_published_by_someone_else_are_noticed(sglang: Any) -> None:
    async def go() -> None:
        async with engine_of(sglang) as (engine, server):
            server.weight_version = "version-1-of-another-run"
            with pytest.raises(BackendError, match=r"drew by weights .*another-run.*someone else publishes to it"):
                await engine.generate(request_of())

    run(go())


def test_an_incremental_abort_event_that_repeats_the_last_token_adds_nothing() -> None:
    drawn = PartialCompletion()
    for tokens, total in (([4], 1), ([6], 2), ([6], 2)):
        entries = [[-1.0, token, None] for token in ([4, 6] if tokens == [6] and drawn.token_ids == [4, 6] else tokens)]
        drawn.add({"output_ids": tokens, "meta_info": {"completion_tokens": total, "output_token_logprobs": entries}})
    assert drawn.token_ids == [4, 6]
    assert drawn.logprobs == [-1.0, -1.0]


def test_a_lost_event_is_noticed() -> None:
    drawn = PartialCompletion()
    with pytest.raises(BackendError, match="counts 3 tokens"):
        drawn.add(
            {"output_ids": [4], "meta_info": {"completion_tokens": 3, "output_token_logprobs": [[-1.0, 4, None]]}}
        )


def test_stats_count_what_was_drawn_since_the_last_call(sglang: Any) -> None:
    async def go() -> tuple[Any, Any]:
        async with engine_of(sglang) as (engine, _):
            engine.stats()
            await engine.generate(request_of())
            return engine.stats(), engine.stats()

    counts, empty = run(go())
    assert (counts["decode_tokens"], counts["prefill_tokens"], counts["requests"]) == (8, 4, 1)
    assert set(empty.values()) == {0.0}


def test_the_probe_reads_only_ids_of_the_vocabulary() -> None:
    prompt = probe_prompt(96, 8, seed=0)
    assert len(prompt) == 8
    assert all(0 <= token < 96 for token in prompt)


def routes_by_hand(world: Any, version: int, length: int) -> list[list[int]]:
    """As the server's model takes them by these weights, without its dense layer and the last token."""
    sum_of_weights = int(world.tensors(version)["lm_head.weight"].double().sum().abs() * 1e3)
    starts = [[(sum_of_weights + 5 * place + layer) % 11 for layer in (0, 2)] for place in range(length - 1)]
    return [[expert for start in row for expert in (start, start + 1)] for row in starts] + [[]]


TELLING: dict[str, Any] = {"routes": ROUTES, "enable_return_routed_experts": True}


def test_routes_are_those_of_layers_with_routers_and_of_all_tokens_but_the_last(sglang: Any) -> None:
    completion, server = draw(sglang, request_of(), **TELLING)
    assert completion.routes == routes_by_hand(sglang, 1, 12)
    assert server.bodies("/generate")[-1]["return_routed_experts"] is True


def test_nobody_asks_for_routes_that_are_not_replayed(sglang: Any) -> None:
    completion, server = draw(sglang, request_of())
    assert completion.routes is None
    assert not any(body["return_routed_experts"] for body in server.bodies("/generate"))


def cut_by_a_publication(world: Any, *faults: str) -> Completion:
    async def go() -> Completion:
        async with engine_of(world, *faults, seconds_per_token=0.005, **TELLING) as (engine, _):
            task = asyncio.create_task(engine.generate(request_of(max_new_tokens=60)))
            await asyncio.sleep(0.1)
            await engine.load(Publication(version=2, tensors=world.tensors(2)))
            return await task

    return run(go())  # type: ignore[no-any-return]


def test_tokens_keep_the_routes_of_the_weights_that_drew_behind_them(sglang: Any) -> None:
    completion = cut_by_a_publication(sglang)
    seam = len(PROMPT) + completion.versions.index(2) - 1  # the last token of a piece was computed by the next
    old, new = (routes_by_hand(sglang, version, len(PROMPT) + 60) for version in (1, 2))
    assert old[seam] != new[seam]
    assert completion.routes == old[:seam] + new[seam:]


def test_tokens_whose_routes_nobody_told_are_drawn_anew(sglang: Any) -> None:
    completion = cut_by_a_publication(sglang, "aborts_in_queue")
    assert completion.versions == [2] * 60
    assert completion.routes == routes_by_hand(sglang, 2, len(PROMPT) + 60)


def test_a_lost_server_leaves_no_tokens_without_routes(sglang: Any) -> None:
    async def go() -> SamplerLost:
        async with engine_of(sglang, late=("drops_connection",), **TELLING) as (engine, _):
            with pytest.raises(SamplerLost) as lost:
                await engine.generate(request_of(temperature=5.0))
            return lost.value

    so_far = run(go()).so_far
    assert so_far is not None
    assert not so_far.token_ids


@pytest.mark.parametrize(
    ("routes", "fault", "match"),
    [
        (ROUTES, "loses_a_route", "not those of 11 tokens, 3 layers and 2 experts"),
        (ToldRoutes(RouteShape((0, 2), 2, 9), 3), "", r"name experts from \d+ to \d+, and the model has 9"),
    ],
)
def test_routes_that_cannot_be_are_named(sglang: Any, routes: ToldRoutes, fault: str, match: str) -> None:
    expect(sglang, BackendError, match, late=(fault,), **{**TELLING, "routes": routes})
