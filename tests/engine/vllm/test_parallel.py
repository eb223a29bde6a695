"""vLLM over two ranks: each takes its share of what was published, and together they hold and draw with all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from temper.engine.manifest import differences, manifest_of
from temper.engine.vllm.engine import VllmEngine
from temper.errors import BackendError
from temper.types import Publication
from tests.engine.vllm.test_engine import Live, gap, needs_vllm, publication, request, settings, tiny_model

pytestmark = needs_vllm


def two_heads(seed: int) -> Any:
    """A model whose heads for keys and values two ranks can share."""
    return tiny_model(seed, num_key_value_heads=2)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder, model = tmp_path_factory.mktemp("model"), two_heads(0)
    model.save_pretrained(folder)
    with asyncio.Runner() as runner:
        engine = VllmEngine(settings(folder, tensor_parallel=2))
        runner.run(engine.start())
        yield Live(engine, runner, model)
        runner.run(engine.close())


def ranks() -> list[Any]:
    """Processes of vLLM's ranks."""
    import psutil

    return [one for one in psutil.Process().children(recursive=True) if "Worker" in one.cmdline()[0]]


def test_two_ranks_draw_with_the_weights_of_the_last_publication(live: Live) -> None:
    assert len(ranks()) == 2
    old, new = live.model, two_heads(1)
    for model in (old, new):
        live.publish(model)
        for drawn in live.draw(*(request(f"{n}", prompt=(5, 6, 7 + n), max_new_tokens=24) for n in range(3))):
            assert set(drawn.versions) == {live.engine.version}
            assert gap(model, drawn) < 1e-4
            assert gap(new if model is old else old, drawn) > 0.1, "the other weights would be noticed"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_holds_other_numbers_is_noticed_and_the_next_publication_repairs_it(live: Live, rank: int) -> None:
    live.publish(live.model)
    manifest = manifest_of(publication(live.model, 1))
    assert differences(manifest, live.run(live.engine.held(manifest))) == []
    spoiled = "model.layers.1.mlp.gate_up_proj.weight"
    live.run(live.engine._engine.collective_rpc("temper_scramble", args=(spoiled, rank)))
    found = differences(manifest, live.run(live.engine.held(manifest)))
    assert found == [f"model.layers.1.mlp.{part}_proj.weight holds other numbers" for part in ("gate", "up")]
    live.publish(live.model)
    assert differences(manifest, live.run(live.engine.held(manifest))) == []


def test_after_a_publication_that_does_not_fit_ranks_are_still_in_step(live: Live) -> None:
    version, tensors = live.engine.version, dict(publication(two_heads(2), 1).tensors)
    for _ in range(2):
        wrong = Publication(version=version + 1, tensors=tensors | {"model.norm.weight": torch.zeros(7)})
        with pytest.raises(BackendError, match="nothing was loaded"):
            live.run(live.engine.load(wrong))
    (after,) = live.draw(request("after"))
    assert after.versions == [version] * 12
    assert gap(live.model, after) < 1e-4
    live.publish(two_heads(3))
    (last,) = live.draw(request("last"))
    assert gap(live.model, last) < 1e-4


def test_a_killed_rank_is_an_error_and_nothing_is_left_behind(live: Live) -> None:
    """The last: nothing can be drawn afterwards."""
    import psutil

    started = [one for one in psutil.Process().children(recursive=True) if "tracker" not in " ".join(one.cmdline())]
    assert len(started) >= 3, "an engine and two ranks"

    async def scenario() -> None:
        task = asyncio.create_task(live.engine.generate(request("orphan", max_new_tokens=200)))
        await asyncio.sleep(0.1)
        ranks()[1].kill()
        with pytest.raises(BackendError, match="vLLM failed"):
            await task
        with pytest.raises(BackendError, match="vLLM failed"):
            await live.engine.load(publication(two_heads(1), live.engine.version + 1))
        await live.engine.close()

    live.run(scenario())
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
