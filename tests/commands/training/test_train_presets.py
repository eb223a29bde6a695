"""Every policy gradient trains a small model end to end: rollouts, credit, passes, critic, publication.

Presets with a direct loss have stages of their own: test_pipeline.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from temper.commands.training.train import RunRecords, run_stages
from temper.config import resolve
from temper.models.load import load_model
from temper.models.save import save_model
from temper.models.tiny import character_tokenizer, make_tiny_model
from temper.objectives import POLICY_GRADIENTS
from temper.runs.display import Display
from temper.runs.metrics import describe
from temper.runs.reader import RunReader
from temper.runs.store.run_store import open_run
from tests.fakes.selection import mostly_heavy

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
USUAL = ("ppo", "dapo", "gspo", "trpo", "sapo", "vineppo")
CHANGES: dict[str, dict[str, Any]] = {
    "vapo": {"critic": {"pretraining_steps": 1}},
    "vineppo": {"advantage": {"tokens": 2, "samples": 2}},
    "prorl": {"reference": {"every": 1}},
    "dppo_topk": {"gate": {"k": 4}},
    "trpo": {"step": {"iterations": 3}},
}


def recipe(name: str, model: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    is_constrained = POLICY_GRADIENTS[name].step is not None
    return {
        "steps": steps,
        "model": model,
        "train": [{"generator": "rearrange", "options": {"min_letters": 2, "max_letters": 4}}],
        "reward": [{"kind": "rearranged"}, {"kind": "edit", "weight": 0.3}],
        "rollout": {"groups_per_step": 4, "group_size": 4, "drop_degenerate": False},
        "sampling": {"max_new_tokens": 6},
        "objective": {"preset": name, **CHANGES.get(name, {})},
        "optim": {"learning_rate": 1e-3},
        "trainer": {"updates_per_batch": 1 if is_constrained else 2, "tokens_per_microbatch": 96},
        "checkpoint": {"every": 100},
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    shape = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 48, "context": 48, "alphabet": ALPHABET}
    make_tiny_model(folder / "dense", seed=0, **shape)
    make_tiny_model(folder / "teacher", seed=1, **shape)
    torch.manual_seed(0)
    tokenizer = character_tokenizer(ALPHABET)
    experts = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=48, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    save_model(Qwen3MoeForCausalLM(experts), tokenizer, folder / "experts")
    return {path.name: path for path in folder.iterdir()}


def train(table: dict[str, Any], run: Path) -> None:
    store = open_run(run, config="", resume=False)
    try:
        asyncio.run(run_stages(resolve(table, (), where="test"), run, RunRecords(store, Display())))
    finally:
        store.close()


@pytest.mark.parametrize(
    "name", mostly_heavy(POLICY_GRADIENTS, keep=("ppo", "dapo", "gspo", "trpo", "sapo", "vineppo"))
)
def test_every_preset_trains(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    start = models["experts" if "router" in POLICY_GRADIENTS[name].needs else "dense"]
    model = {"path": str(start)} | ({"teacher": str(models["teacher"])} if name == "opd" else {})
    train(recipe(name, model), tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        steps = reader.steps()
        assert [step.step for step in steps] == [1, 2]
        assert all(step.loss is not None for step in steps)
        metrics = reader.metrics_at(0, 2)
        assert ("critic/explained_var" in metrics) == ("values" in POLICY_GRADIENTS[name].needs)
        assert [name for name in metrics if describe(name) is None] == [], "a metric that nobody explains"
        assert ("policy/reference_moved" in metrics) == (POLICY_GRADIENTS[name].reference is not None)
    before, after = (
        load_model(folder, torch.float32, torch.device("cpu")).state_dict()
        for folder in (start, tmp_path / "run" / "checkpoints" / "0-rl" / "step-2")
    )
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    is_far_off = name == "geo_rs"  # whose band of 0.1% may reject everything that a moved policy drew
    assert is_far_off or any(not torch.equal(before[key], after[key]) for key in before)


def test_a_dense_model_has_no_router_to_watch(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="has no router"):
        train(recipe("rspo", {"path": str(models["dense"])}), tmp_path / "run")


def test_a_teacher_with_another_tokenizer_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path / "other", seed=1, layers=1, width=32, heads=2, kv_heads=1, mlp_width=48, context=48, alphabet="xyz"
    )
    table = recipe("opd", {"path": str(models["dense"]), "teacher": str(tmp_path / "other")})
    with pytest.raises(Exception, match="their tokenizers differ in"):
        train(table, tmp_path / "run")


def test_an_objective_that_distils_asks_for_its_teacher(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"needs a teacher\. Set model\.teacher"):
        train(recipe("opd", {"path": str(models["dense"])}), tmp_path / "run")
