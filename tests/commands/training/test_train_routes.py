"""A mixture of experts is trained from a recipe, with and without replay of its routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from temper.build import sampler as build_sampler
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import UserError
from temper.models.experts import routes
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer
from temper.runs.reader import RunReader


def run(recipe: dict[str, Any], folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps of its last stage."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    train(path, run=folder / "run")
    with RunReader(folder / "run") as reader:
        return [dict(reader.metrics_at(1, step.step)) for step in reader.steps() if step.stage == 1]


def with_experts(recipe: dict[str, Any], **model: Any) -> dict[str, Any]:
    recipe["model"] = {"new": {**recipe["model"]["new"], "experts": 4, "mlp_width": 24}, **model}
    recipe["stage"][0]["steps"], recipe["stage"][1]["steps"] = 2, 2
    return recipe


@pytest.mark.parametrize("place", ["here", pytest.param("process", marks=pytest.mark.heavy)])
def test_a_run_replays_every_route_that_its_sampler_took(
    place: str, tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    as_ever = routes.Replay.require_taken_once
    monkeypatch.setattr(routes.Replay, "require_taken_once", lambda self: (as_ever(self), taken.append(1)))
    recipe = with_experts(tiny_recipe, replay_routes=True)
    recipe["stage"][1]["engine"] = {"place": place}
    steps = run(recipe, tmp_path)
    assert len(steps) == 2
    assert taken, "nothing was replayed"
    assert all(metrics["mismatch/logp_abs_max"] < 1e-4 for metrics in steps)


def test_a_run_that_only_measures_its_routes_learns_as_one_without_and_tells_how_many_moved(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    ways = {}
    for setting in (False, "measure", True):
        recipe = with_experts(tiny_recipe, replay_routes=setting)
        recipe["stage"][1]["trainer"] = {"updates_per_batch": 2}
        recipe["stage"][1]["optim"] = {"learning_rate": 0.05}
        ways[setting] = run(recipe, tmp_path / str(setting))
    for plain, measured in zip(ways[False], ways["measure"], strict=True):
        assert "route/moved_frac" not in plain
        assert measured.pop("route/moved_frac") > 0
        assert measured["route/moved_by_updates"] > 0, "the second update finds what the first has moved"
        assert "route/moved_by_updates" not in plain
        assert measured["policy/grad_norm"] == plain["policy/grad_norm"]
        assert measured["reward/mean"] == plain["reward/mean"]
        assert measured["policy/kl_old_k3"] == plain["policy/kl_old_k3"]
    assert ways[True][-1]["policy/kl_old_k3"] != ways[False][-1]["policy/kl_old_k3"], "replay would show"


def test_a_reference_replays_routes_where_it_is_asked_to_and_only_there(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    ways = {}
    for setting in (True, "reference"):
        recipe = with_experts(tiny_recipe, replay_routes=setting)
        recipe["stage"][1]["objective"] = {"preset": "deepseek_v32"}  # has a KL to its reference
        recipe["stage"][1]["optim"] = {"learning_rate": 0.05}
        ways[setting] = [metrics["policy/kl_ref_k3"] for metrics in run(recipe, tmp_path / str(setting))]
    own, replayed = ways[True], ways["reference"]
    assert own[0] == pytest.approx(0.0, abs=1e-6), "the reference is the policy, and so are its routes"
    assert replayed[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(own[1] - replayed[1]) > 1e-6, "of a policy that has moved the reference would choose other experts"


def test_a_run_in_exact_mode_needs_no_replay(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = with_experts(tiny_recipe)
    recipe["engine"] = {"numerics": "exact"}
    for metrics in run(recipe, tmp_path):
        assert metrics["mismatch/logp_abs_max"] == 0.0
        assert metrics["policy/ratio_max"] == 1.0


def test_routers_are_balanced_or_frozen_as_the_recipe_says(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = with_experts(tiny_recipe, routers={"balance": 0.5, "z": 0.1})
    for metrics in run(recipe, tmp_path / "balanced"):
        assert metrics["loss/balance"] > 0.4
        assert metrics["loss/router_z"] > 0
        assert 1 <= metrics["route/load_max"] <= 2
    recipe["model"]["routers"] = {"frozen": True}
    run(recipe, tmp_path / "frozen")
    moved = {}
    for name in ("balanced", "frozen"):
        first, last = (load_gates(tmp_path / name / "run", kind) for kind in ("model", "checkpoints"))
        moved[name] = max(float((last[gate] - first[gate]).abs().max()) for gate in first)
    assert moved["frozen"] == 0.0 < moved["balanced"]


def load_gates(folder: Path, kind: str) -> dict[str, Any]:
    """Weights of the routers in the first model, or in the last checkpoint."""
    return last_tensors(folder / kind, "mlp.gate.weight")


def last_tensors(folder: Path, part: str) -> dict[str, Any]:
    """Of the last model below this folder, those with this part in their names."""
    files = sorted(folder.rglob("model.safetensors"), key=lambda path: path.stat().st_mtime)
    return {name: tensor for name, tensor in load_file(files[-1]).items() if part in name}


def write_glm(folder: Path) -> Path:
    """A small GLM-4-MoE: a dense layer, and one with four experts whose router has a bias."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz")
    config = Glm4MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=32, moe_intermediate_size=16, n_routed_experts=4,
        num_experts_per_tok=2, num_mtp_layers=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    save_model(model, tokenizer, folder)
    return folder


@pytest.mark.parametrize("place", ["here", pytest.param("process", marks=pytest.mark.heavy)])
def test_biases_that_balance_move_in_the_sampler_as_they_do_in_the_trainer(
    place: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = with_experts(tiny_recipe)
    path = str(write_glm(tmp_path / "glm"))
    recipe["model"] = {"path": path, "routers": {"bias": 0.05}, "replay_routes": True}
    recipe["engine"] = {"numerics": "exact", "place": place}
    recipe["stage"][1]["steps"] = 3
    for metrics in run(recipe, tmp_path / "biased"):
        assert metrics["mismatch/logp_abs_max"] == 0.0, "the sampler drew with the biases of the trainer"
        assert metrics["route/moved_frac"] == 0.0
        assert metrics["policy/ratio_max"] == 1.0
    files = sorted(
        (tmp_path / "biased" / "run" / "checkpoints").rglob("model.safetensors"), key=lambda p: p.stat().st_mtime
    )
    biases = [tensor for name, tensor in load_file(files[-1]).items() if "e_score_correction_bias" in name]
    assert len(biases) == 1
    assert biases[0].dtype == torch.float32
    assert biases[0].abs().max() > 0.04


def test_dense_models_and_other_engines_are_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_recipe["stage"] = tiny_recipe["stage"][1:]
    tiny_recipe["model"]["replay_routes"] = True
    with pytest.raises(UserError, match="routes are seen in the families"):
        run(tiny_recipe, tmp_path / "dense")
    recipe = with_experts({**tiny_recipe, "stage": [{}, *tiny_recipe["stage"]]}, replay_routes=True)
    recipe["stage"] = recipe["stage"][1:]
    recipe["engine"] = {"kind": "vllm"}
    with pytest.raises(UserError, match=r"vLLM tells its routes on a GPU alone, from its model runner V2"):
        run(recipe, tmp_path / "routes of vllm")
    recipe["engine"] = {"kind": "vllm", "tensor_parallel": 2}
    recipe["model"]["replay_routes"] = False
    with pytest.raises(UserError, match=r"found again on one rank of vLLM alone. Use engine.tensor_parallel = 1"):
        run(recipe, tmp_path / "ranks")
    monkeypatch.setattr(build_sampler, "EXPERT_FAMILIES", ("mixtral",))
    with pytest.raises(UserError, match=r"in the families mixtral, and this is a qwen3_moe. Use engine.kind"):
        run(recipe, tmp_path / "vllm")
