"""XPO and Nash-MD on rollouts: the opponent of a stage is who it should be after every publication, and both learn."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching.rows import rows_of
from temper.build import build_stage
from temper.build.models import first_model
from temper.build.stage import Stage
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.engine.local.mixture import WithOpponent
from temper.errors import UserError
from temper.rollout.episode import run_episode
from temper.rollout.group import Extras
from temper.rollout.source import RolloutSource
from temper.runs.reader import RunReader
from temper.types import Sample

XPO, NASH_MD = {"preset": "xpo"}, {"preset": "nash_md"}
SAMPLED = {"groups_per_step": 16, "group_size": 4}


def recipe_of(recipe: dict[str, Any], *stages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """To say a letter again: so many are held out that a few are left to learn."""
    letters = {"options": {"min_letters": 1, "max_letters": 1}}
    return {
        **recipe,
        "train": [{"generator": "spell_backward", "seed": 1, **letters}],
        "heldout": {"generator": "spell_backward", "seed": 2, "size": 48, **letters},
        "sampling": {"max_new_tokens": 2},
        "evaluation": {"samples": 1},
        **changes,
        "stage": list(stages),
    }


def preference(objective: dict[str, Any], steps: int = 30, **more: Any) -> dict[str, Any]:
    return {"kind": "preference", "steps": steps, "objective": objective, "optim": {"learning_rate": 2e-3}} | {
        "rollout": SAMPLED, **more,
    }  # fmt: skip


def write(table: dict[str, Any], folder: Path) -> Path:
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(table, [], where="opponents")))
    return path


@pytest.mark.heavy
def test_both_learn_from_comparisons_with_their_opponents(tiny_recipe: dict[str, Any], tmp_path: Path) -> None:
    imitation = {"kind": "sft", "steps": 40, "optim": {"learning_rate": 3e-3}, "trainer": {"examples_per_step": 32}}
    again = preference(NASH_MD, model={"path": "stage:sft"})
    run = train(write(recipe_of(tiny_recipe, imitation, preference(XPO), again), tmp_path), run=tmp_path / "run")
    with RunReader(run) as reader:

        def series(name: str, stage: int) -> list[float]:
            return [point.value for point in reader.metric(name) if point.stage == stage]

        for stage in (1, 2):
            rewards, wins = series("reward/mean", stage), series("preference/win_rate", stage)
            assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.1
            assert statistics.fmean(wins[-10:]) > 0.5
            assert set(series("stale/max", stage)) == {0.0}
            assert series("mismatch/logp_abs_mean", stage) == []
        # Against a reference that stays where it was; a mixture half of which is the policy is the harder opponent.
        assert statistics.fmean(series("preference/win_rate", 1)[-10:]) > 0.55


@pytest.fixture
def stage_of(tiny_recipe: dict[str, Any], tmp_path: Path) -> Any:
    def build(objective: dict[str, Any], model: dict[str, Any], rollout: dict[str, Any]) -> Stage:
        tiny_recipe["model"] |= model
        wanted = preference(objective, rollout={**SAMPLED, **rollout})
        (config,) = resolve(recipe_of(tiny_recipe, wanted, sampling={"max_new_tokens": 4}), [], where="opponents")
        stage = build_stage(config, 0, first_model(config, tmp_path))
        asyncio.run(stage.sampler.load(stage.trainer.publish()))
        return stage

    return build


def opponents_rows(stage: Stage) -> list[Sample]:
    assert isinstance(stage.source, RolloutSource)
    extras: Extras = stage.source._settings.extras
    opponent = extras.opponent
    assert opponent is not None

    async def play() -> list[Sample]:
        episodes = (
            run_episode(opponent, task, group_id="g", index=n, request_id=f"g/{n}")
            for n, task in enumerate(stage.data.probe[:8])
        )
        return [row for trajectory in await asyncio.gather(*episodes) for row in rows_of(trajectory)]

    return asyncio.run(play())


def largest_gap(stage: Stage, rows: list[Sample], who: Any) -> float:
    """Between what the opponent reported and what the trainer computes."""
    pairs = zip(rows, stage.trainer.score(rows, who), strict=True)
    return max(abs(a - b) for row, found in pairs for a, b in zip(row.behavior_logprobs, found, strict=True))


def scramble_and_publish(stage: Stage) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in stage.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    asyncio.run(stage.sampler.load(stage.trainer.publish()))


WAYS = [
    pytest.param({}, {}, id="whole"),
    pytest.param({"lora": {"rank": 4}}, {}, id="lora"),
    pytest.param({"offload": True}, {"max_staleness": 1}, id="copied"),
    pytest.param({"lora": {"rank": 4}, "offload": True}, {"max_staleness": 1}, id="lora, copied"),
]


@pytest.mark.parametrize(("model", "rollout"), WAYS)
@pytest.mark.parametrize(
    ("objective", "who"),
    [(XPO, "reference"), ({"loss": {"name": "nash_md", "mixture": 0.0}}, "policy")],
    ids=["xpo", "policy"],
)
def test_after_every_publication_the_opponent_is_who_it_should_be(
    objective: dict[str, Any], who: str, model: dict[str, Any], rollout: dict[str, Any], stage_of: Any
) -> None:
    stage = stage_of(objective, model, rollout)
    before = opponents_rows(stage)
    scramble_and_publish(stage)
    after = opponents_rows(stage)
    assert largest_gap(stage, after, who) < 1e-4
    other = "policy" if who == "reference" else "reference"
    assert largest_gap(stage, after, other) > 0.05
    assert {version for row in after for version in row.versions} == {-1}
    is_same = [row.token_ids for row in after] == [row.token_ids for row in before]
    assert is_same == (who == "reference")


@pytest.mark.parametrize(("model", "rollout"), WAYS)
def test_a_mixture_moves_with_the_policy(model: dict[str, Any], rollout: dict[str, Any], stage_of: Any) -> None:
    stage = stage_of({"loss": {"name": "nash_md", "mixture": 0.5}}, model, rollout)
    before = opponents_rows(stage)
    assert largest_gap(stage, before, "policy") < 1e-4, "at first both halves are one model"
    scramble_and_publish(stage)
    after = opponents_rows(stage)
    assert [row.token_ids for row in after] != [row.token_ids for row in before]
    assert min(largest_gap(stage, after, who) for who in ("policy", "reference")) > 0.05
    assert isinstance(stage.sampler, WithOpponent)
    assert stage.sampler.version == stage.trainer.version


@pytest.mark.parametrize("objective", [XPO, NASH_MD], ids=["xpo", "nash_md"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"groups_per_step": 4, "group_size": 3}}, "rollout.group_size = 3. Use an even number, e.g. 4"),
        ({"engine": {"kind": "vllm"}}, 'Use engine.kind = "local"'),
    ],
    ids=["odd group", "other engine"],
)
def test_opponents_that_cannot_be_drawn_are_refused_before_training(
    objective: dict[str, Any], changes: dict[str, Any], message: str, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    table = recipe_of(tiny_recipe, {**preference(objective), **changes})
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        dry_run(write(table, tmp_path))
    (config,) = resolve(table, [], where="opponents")
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        build_stage(config, 0, first_model(config, tmp_path))
