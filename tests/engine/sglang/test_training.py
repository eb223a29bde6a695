"""Trainings of several steps through the SGLang adapter, from the command down, against servers of our own."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import BackendError, UserError
from temper.models.tiny import make_tiny_model
from temper.runs.reader import RunReader


@contextmanager
def in_another_thread(*servers: Any) -> Iterator[None]:
    """The command has an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    try:
        yield
    finally:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def small_recipe(recipe: dict[str, Any], folder: Path, address: str | list[str], **model: Any) -> Path:
    recipe = copy.deepcopy(recipe)
    del recipe["heldout"]
    recipe["model"] = {"path": str(folder / "model"), **model}
    recipe["engine"] = {"kind": "sglang", "address": address}
    recipe["stage"] = [{**recipe["stage"][1], "steps": 3, "rollout": {"groups_per_step": 2, "group_size": 4}}]
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="test")))
    return path


def require_steps(run: Path) -> None:
    with RunReader(run) as reader:
        assert reader.is_finished
        reports = reader.steps()
        assert [report.step for report in reports] == [1, 2, 3]
        assert [report.version for report in reports] == [1, 2, 3]


def published_to(server: Any) -> list[str]:
    return [body["weight_version"].split("-")[1] for body in server.bodies("/update_weights_from_disk")]


def test_a_training_through_sglang_reaches_its_last_step_and_publishes_each(
    sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    server = sglang.TransformerServer(make_tiny_model(tmp_path / "model", **tiny_recipe["model"]["new"], seed=0))
    with in_another_thread(server):
        run = train(small_recipe(tiny_recipe, tmp_path, server.address), run=tmp_path / "run")
    require_steps(run)
    assert published_to(server) == ["0", "1", "2", "3"]


def undecided(server: Any) -> Any:
    """Takes other experts than its routers would: what rounding does to a few tokens, at all of them."""

    def turned(router: Any, _inputs: Any, outputs: Any) -> Any:
        logits = outputs[0]
        chances = logits.softmax(-1, dtype=torch.float)
        chosen = chances.argsort(-1, descending=True)[:, 1 : 1 + router.top_k]
        weights = chances.gather(1, chosen)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    class Undecided(server):  # type: ignore[misc]
        def _loaded(self, checkpoint: Path) -> Any:
            model = super()._loaded(checkpoint)
            for layer in model.model.layers:
                layer.mlp.gate.register_forward_hook(turned)
            return model

    return Undecided


def train_experts(
    kind: Any, recipe: dict[str, Any], folder: Path, *faults: str, tells: bool = True, **model: Any
) -> Path:
    """Three steps of a model with experts. kind: of server."""
    recipe["model"]["new"] |= {"experts": 4, "mlp_width": 24}
    checkpoint = make_tiny_model(folder / "model", **recipe["model"]["new"], seed=0)
    server = kind(checkpoint, *faults, enable_return_routed_experts=tells)
    with in_another_thread(server):
        return train(small_recipe(recipe, folder, server.address, **model), run=folder / "run")


def test_routes_that_a_server_tells_are_replayed(sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    run = train_experts(undecided(sglang.TransformerServer), tiny_recipe, tmp_path, replay_routes=True)
    require_steps(run)
    with RunReader(run) as reader:
        for step in (1, 2, 3):
            metrics = dict(reader.metrics_at(0, step))
            assert metrics["mismatch/logp_abs_max"] < 1e-4
            assert metrics["route/moved_frac"] > 0.1, "the trainer's routers would have chosen others"


def test_without_their_replay_a_run_is_refused(sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    """The mutation: routes that nobody replays."""
    with pytest.raises(BackendError, match="sampler and trainer disagree"):
        train_experts(undecided(sglang.TransformerServer), tiny_recipe, tmp_path)


def test_routes_of_the_tokens_before_are_named_before_training(
    sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match=r"routes that the sampler tells are those of other tokens: .* earlier"):
        train_experts(sglang.TransformerServer, tiny_recipe, tmp_path, "routes_of_neighbours", replay_routes=True)


def test_a_server_that_tells_no_routes_is_refused(sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="start it with --enable-return-routed-experts"):
        train_experts(sglang.TransformerServer, tiny_recipe, tmp_path, tells=False, replay_routes=True)


def test_a_training_goes_on_when_one_of_two_servers_dies_in_mid_answer(
    sglang: Any, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    class Mortal(sglang.TransformerServer):  # type: ignore[misc]
        """Dies with its fifth token by the weights of step 1."""

        left = 5

        def _draw(self, job: Any, hidden: Any) -> Any:
            if self.weight_version.startswith("version-1") and job.params["temperature"] == 1.0:
                self.left -= 1
                if not self.left:
                    asyncio.get_running_loop().create_task(self.stop())
            return super()._draw(job, hidden)

    checkpoint = make_tiny_model(tmp_path / "model", **tiny_recipe["model"]["new"], seed=0)
    mortal, other = Mortal(checkpoint), sglang.TransformerServer(checkpoint)
    with in_another_thread(mortal, other):
        run = train(small_recipe(tiny_recipe, tmp_path, [mortal.address, other.address]), run=tmp_path / "run")
    require_steps(run)
    assert mortal.left <= 0, "it died"
    assert published_to(mortal) == ["0", "1"]
    assert published_to(other) == ["0", "1", "2", "3"]
    with RunReader(run) as reader:
        assert [point.value for point in reader.metric("sys/samplers")] == [2, 1, 1]
        assert sum(point.value or 0 for point in reader.metric("sys/reissued")) >= 1
