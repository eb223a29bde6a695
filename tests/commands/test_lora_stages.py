"""Adapters and offloading in every kind of stage, through the real command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from temper.build import resolve_objective, sampler
from temper.build.memory import settle_for_cpu
from temper.build.sampler import make_sampler
from temper.commands.checkpoints import export
from temper.commands.find import find_model
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.errors import BackendError
from temper.models.load import load_model
from temper.models.lora import materialize
from temper.models.lora.wrapping import is_adapter_folder, load_merged
from temper.models.scorer import load_scorer
from temper.rewards.learned.model import RewardModelReward
from temper.runs.reader import RunReader
from temper.stages.kinds import kind_of
from temper.stages.reading.data import open_data
from temper.trainer import offload
from temper.types import Message, Task, Trajectory

pytestmark = pytest.mark.heavy

LETTERS = {"min_letters": 2, "max_letters": 3}
PAIRS = [{"generator": "rearrange_pairs", "seed": 3, "options": LETTERS}]
CPU = torch.device("cpu")


def chain(recipe: dict[str, Any], stages: list[dict[str, Any]], **model: Any) -> dict[str, Any]:
    return {
        **recipe,
        "model": {**recipe["model"], **model},
        "train": [{"generator": "rearrange", "seed": 1, "options": LETTERS}],
        "heldout": {"generator": "rearrange", "seed": 2, "size": 4, "options": LETTERS},
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 8},
        "optim": {"learning_rate": 1e-2},
        "trainer": {"examples_per_step": 4},
        "rollout": {"groups_per_step": 4, "group_size": 4},
        "stage": [{"steps": 2, **stage} for stage in stages],
    }


STAGES = [
    {"kind": "sft"},
    {"kind": "reward_model", "train": PAIRS, "heldout": {"generator": "rearrange_pairs", "seed": 2}},
    {"kind": "rejection", "rollout": {"keep": "best"}},
    {"kind": "preference", "train": PAIRS},
    {"kind": "rl", "objective": {"regularizers": [{"name": "kl", "coefficient": 0.01}]},
     "reward": [{"kind": "reward_model", "options": {"path": "stage:reward_model"}}]},
    {"kind": "distill", "model": {"path": "stage:sft", "teacher": "stage:rl"}},
]  # fmt: skip


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="chain")))
    return path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a chain whose every stage trains an adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    tiny = {
        "name": "tiny",
        "model": {"new": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 32,
                          "alphabet": "abcdefghijklmnopqrstuvwxyz"}},
        "alarms": {"readiness": "off"},
    }  # fmt: skip
    return train(write(chain(tiny, STAGES, lora={"rank": 4}), folder), run=folder / "run")


def left(run: Path, index: int) -> Path:
    return run / "checkpoints" / f"{index}-{STAGES[index]['kind']}" / "step-2"


def test_every_stage_leaves_an_adapter_and_no_weights_of_the_model(adapted: Path) -> None:
    whole = (adapted / "model" / "model.safetensors").stat().st_size
    for index in range(len(STAGES)):
        folder = left(adapted, index)
        assert is_adapter_folder(folder)
        assert not (folder / "model.safetensors").exists()
        assert (folder / "adapter_model.safetensors").stat().st_size < whole
    with RunReader(adapted) as reader:
        assert reader.is_finished
        assert {result.stage for result in reader.evaluations()} == set(range(len(STAGES)))


def test_each_adapter_lies_on_what_the_right_stage_left(adapted: Path) -> None:
    origins = [json.loads((left(adapted, index) / "origin.json").read_text())["path"] for index in range(len(STAGES))]
    policy = [adapted / "model", left(adapted, 0), left(adapted, 0), left(adapted, 0), left(adapted, 3),
              left(adapted, 0)]  # fmt: skip
    policy[1] = materialize.whole(left(adapted, 0))  # a head is put on weights
    assert origins == [str(folder.resolve()) for folder in policy]


def test_exports_are_the_trained_models(adapted: Path, tmp_path: Path) -> None:
    assert find_model(adapted) == left(adapted, 5)
    export(adapted, tmp_path / "policy")
    merged = load_merged(left(adapted, 5), torch.float32, CPU, load=load_model)
    exported = load_model(tmp_path / "policy", torch.float32, CPU)
    for (name, ours), (_, theirs) in zip(merged.named_parameters(), exported.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert export(left(adapted, 1), tmp_path / "scorer") < 1e-5
    assert export(tmp_path / "scorer", tmp_path / "again") < 1e-5
    assert (tmp_path / "scorer" / "temper_scale.json").is_file()
    scorer = load_scorer(tmp_path / "scorer", torch.float32, CPU)
    stored = load_file(left(adapted, 1) / "adapter_model.safetensors")
    assert torch.equal(scorer.score.weight, stored["base_model.model.score.weight"])  # type: ignore[union-attr]
    assert scorer.score.weight.abs().sum() > 0  # type: ignore[union-attr, operator]


def test_an_export_that_is_another_model_is_refused(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation: an adapter that is forgotten in the merge."""
    monkeypatch.setattr("temper.models.lora.wrapping.merged_weight", lambda layer, *_: layer.base_layer.weight.detach())
    with pytest.raises(BackendError):
        export(adapted, tmp_path / "policy")
    assert not (tmp_path / "policy").exists()


def test_the_reward_of_a_later_stage_is_the_merged_reward_model(adapted: Path) -> None:
    """Kept beside the adapter, made once; its kind is what was trained and is not told by which files are there."""
    folder = left(adapted, 1)
    (kept,) = folder.parent.glob("merged-*")
    made = kept.stat().st_mtime_ns
    (folder / "temper_scale.json").rename(folder / "aside")
    try:
        assert materialize.whole(folder) == kept
        assert kept.stat().st_mtime_ns == made
        config = json.loads((kept / "config.json").read_text())
    finally:
        (folder / "aside").rename(folder / "temper_scale.json")
    assert config["architectures"][0].endswith("ForSequenceClassification")

    async def score(text: str) -> float:
        reward = RewardModelReward(path=str(kept))
        task = Task(id="t", messages=(Message(role="user", content="abc"),))
        try:
            return (await reward.score(task, Trajectory.saying("t", text))).value or 0.0
        finally:
            await reward.close()

    values = [asyncio.run(score(text)) for text in ("cab", "zzz")]
    assert values[0] != values[1]


def test_engines_that_read_files_get_a_whole_model(
    adapted: Path, tiny_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(sampler, "VllmEngine", lambda settings: seen.append(settings.folder))
    recipe = chain(tiny_recipe, [{"kind": "rl"}], lora={"rank": 4}) | {"engine": {"kind": "vllm"}}
    config = settle_for_cpu(resolve(recipe, [], where="chain")[0])
    folder = left(adapted, 0)
    model = load_model(folder, torch.float32, CPU)
    for start in (folder, adapted / "model"):
        objective = resolve_objective(config)
        make_sampler(config, objective, open_data(config, objective, kind_of(config).reading, start), model, start)
    assert seen == [materialize.whole(folder), adapted / "model"]
    written = load_file(seen[0] / "model.safetensors")
    for name, tensor in model.named_parameters():
        assert torch.equal(written[name], tensor), name


def test_offloading_changes_no_bit(
    tiny_recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [STAGES[0], STAGES[3], {**STAGES[4], "reward": [{"kind": "edit"}]}, STAGES[5]]
    moved: list[str] = []
    real = offload.offload
    monkeypatch.setattr("temper.build.models.offload", lambda *parts: moved.append("once") or real(*parts))
    prints = []
    for is_offloaded in (False, True):
        run = tmp_path / str(is_offloaded)
        run.mkdir()
        train(write(chain(tiny_recipe, stages, offload=is_offloaded), run), run=run / "run")
        with RunReader(run / "run") as reader:
            prints.append(reader.fingerprint())
        assert len(moved) == 3 * is_offloaded, "two references and a teacher"
    assert prints[0] == prints[1]
    for file in sorted((tmp_path / "False" / "run" / "checkpoints").rglob("model.safetensors")):
        assert file.read_bytes() == (tmp_path / "True" / file.relative_to(tmp_path / "False")).read_bytes()
