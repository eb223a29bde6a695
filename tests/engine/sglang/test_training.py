"""A training of several steps through the SGLang adapter, from the command down, against a server of our own."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader


@contextmanager
def in_another_thread(server: Any) -> Iterator[None]:
    """The command has an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_a_training_through_sglang_reaches_its_last_step_and_publishes_each(
    sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = make_tiny_model(tmp_path / "model", **tiny_recipe["model"]["new"], seed=0)
    server = sglang.TransformerServer(checkpoint)
    recipe = copy.deepcopy(tiny_recipe)
    del recipe["heldout"]
    recipe["model"] = {"path": str(checkpoint)}
    recipe["stage"] = [{**recipe["stage"][1], "steps": 3, "rollout": {"groups_per_step": 2, "group_size": 4}}]
    with in_another_thread(server):
        recipe["engine"] = {"kind": "sglang", "address": server.address}
        path = tmp_path / "recipe.toml"
        path.write_text(to_toml(resolve(recipe, [], where="test")))
        run = train(path, run=tmp_path / "run")
    with RunReader(run) as reader:
        assert reader.is_finished
        reports = reader.steps()
        assert [report.step for report in reports] == [1, 2, 3]
        assert [report.version for report in reports] == [1, 2, 3]
    versions = [body["weight_version"].split("-")[1] for body in server.bodies("/update_weights_from_disk")]
    assert versions == ["0", "1", "2", "3"]
