"""What a stage refuses of an objective, and what it doubts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from temper.build import check_stage, doubts_about, resolve_objective, with_sampler_correction
from temper.config import RunConfig, load_recipe, resolve
from temper.errors import UserError
from temper.objectives import PRESETS

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
TWO_EPOCHS = {"trainer": {"epochs": 2}}
HELDOUT = {"heldout": {"generator": "spell_backward", "size": 4}}


def config_of(objective: dict[str, Any], **changes: Any) -> RunConfig:
    table: dict[str, Any] = {
        "model": {"new": {}, "teacher": "somewhere"},
        "train": [{"generator": "spell_backward"}],
        "reward": [{"kind": "edit"}],
        "objective": objective,
    }
    return resolve(table | changes, [], where="test")[0]


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        ({"preset": "vapo"}, {"steps": 50}, r"alone for 50 steps, and the stage has 50: the policy would never"),
        ({"preset": "vapo"}, {"steps": 51}, None),
        ({"preset": "vapo", "critic": {"pretraining_steps": 10}}, {"steps": 50}, None),
        (
            {"preset": "vapo"},
            {"steps": 60, "optim": {"warmup_steps": 11}},
            "more than the 10 steps in which",
        ),
        ({"preset": "prorl"}, {"steps": 200}, "would never move the reference: the stage has 200 steps"),
        ({"preset": "prorl"}, {"steps": 201}, None),
        ({"preset": "prorl", "reference": "none"}, {"steps": 100}, None),
        ({"preset": "prorl", "reference": {"every": 0, "patience": 2}}, {}, "held-out evaluations, of which there are"),
        ({"preset": "prorl", "reference": {"every": 0, "patience": 2}}, HELDOUT, "held-out evaluations"),
        ({"preset": "prorl", "reference": {"patience": 2}}, HELDOUT | {"evaluation": {"every": 5}}, None),
        ({"preset": "kl_cov"}, {}, "kl_cov would do nothing"),
        ({"preset": "kl_cov"}, {"trainer": {"updates_per_batch": 2}}, None),
        ({"preset": "kl_cov"}, {"trainer": {"epochs": 2}}, None),
        ({"preset": "kl_cov", "proximal": "behavior"}, {}, None),
        ({"preset": "grpo"}, TWO_EPOCHS, None),
        ({"preset": "ppo"}, TWO_EPOCHS, None),
        ({"preset": "a3po"}, TWO_EPOCHS, None),
        ({"preset": "reinforce_is"}, TWO_EPOCHS, None),
        ({"preset": "opd", "gate": "clip"}, TWO_EPOCHS | {"stage": [{"kind": "distill"}]}, None),
        (
            {"preset": "reinforce"},
            TWO_EPOCHS,
            "would not notice that the policy has moved since it was drawn: gate none",
        ),
        ({"preset": "reinforce", "corrections": ["token_tis"]}, TWO_EPOCHS, "would not notice"),
        ({"preset": "grpo", "proximal": "current"}, TWO_EPOCHS, "gate clip, proximal current"),
        ({"preset": "trpo"}, TWO_EPOCHS, "to the edge of its trust region in one step"),
        ({}, TWO_EPOCHS | {"stage": [{"kind": "sft"}]}, "sft is no policy gradient.* Use more steps"),
        ({"preset": "online_dpo"}, TWO_EPOCHS | {"stage": [{"kind": "preference"}]}, "is no policy gradient"),
        ({"preset": "gkd"}, TWO_EPOCHS | {"stage": [{"kind": "distill"}]}, "is no policy gradient"),
        ({}, TWO_EPOCHS | {"stage": [{"kind": "rejection"}]}, "a stage of kind rejection trains nothing"),
        ({"preset": "grpo"}, {"stage": [{"kind": "distill"}]}, "reads no teacher: it would learn nothing"),
        ({"preset": "opd"}, {"stage": [{"kind": "distill"}]}, None),
    ],
)
def test_what_could_never_act_in_a_stage_is_refused(objective, changes, message) -> None:
    config = config_of(objective, **changes)
    if message is None:
        check_stage(config)
        return
    with pytest.raises(UserError, match=message):
        check_stage(config)


@pytest.mark.parametrize(
    ("objective", "is_corrected"),
    [
        ({"preset": "grpo"}, False),
        ({"preset": "dapo", "corrections": []}, False),
        ({"preset": "reinforce"}, False),
        ({"preset": "gspo", "proximal": "current"}, False),
        ({"preset": "grpo", "corrections": ["token_tis"]}, True),
        ({"preset": "grpo", "corrections": ["top_entropy"]}, False),
        ({"preset": "grpo", "proximal": "behavior"}, True),
        ({"preset": "deepseek_v32"}, True),
        ({"preset": "opd"}, True),
    ],
)
@pytest.mark.parametrize("updates", [1, 2])
def test_stale_samples_without_a_correction_are_told(objective, is_corrected, updates) -> None:
    changes = {"trainer": {"updates_per_batch": updates}}
    fresh, stale = (config_of(objective, rollout={"max_staleness": bound}, **changes) for bound in (0, 2))
    assert doubts_about(fresh, resolve_objective(fresh)) == []
    doubts = doubts_about(stale, resolve_objective(stale))
    assert len(doubts) == (not is_corrected)
    assert all("nothing corrects for their age" in doubt and '["token_tis"]' in doubt for doubt in doubts)


def test_presets_made_for_asynchronous_training_carry_a_correction() -> None:
    meant = [name for name, preset in PRESETS.items() if "asynchronous" in preset.note or "staleness" in preset.note]
    assert {"decoupled_ppo", "olmorl", "scalerl"} <= set(meant)
    for name in (*meant, "a3po", "prime_rl"):
        config = config_of({"preset": name}, rollout={"max_staleness": 4}, steps=1000)
        assert doubts_about(config, resolve_objective(config)) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_of_ours_is_in_doubt(path: Path) -> None:
    for config in load_recipe(path):
        assert doubts_about(config, resolve_objective(config)) == []


FP8 = {"engine": {"weights": "fp8"}}


def test_matrices_in_fp8_bring_truncated_importance_weights_unless_the_recipe_says_otherwise() -> None:
    def corrections(objective: dict[str, Any], **changes: Any) -> list[str]:
        return [factor.name for factor in resolve_objective(config_of(objective, **changes)).corrections]  # type: ignore[union-attr]

    assert corrections({"preset": "grpo"}) == []
    assert corrections({"preset": "grpo"}, **FP8) == ["token_tis"]
    assert corrections({"preset": "top_entropy"}, **FP8) == ["top_entropy", "token_tis"]
    assert corrections({"preset": "mis"}, **FP8) == ["token_mis"]
    assert corrections({"preset": "grpo", "corrections": []}, **FP8) == []
    assert corrections({"preset": "grpo", "corrections": ["sequence_mis"]}, **FP8) == ["sequence_mis"]


def test_the_resolved_recipe_says_what_fp8_brought() -> None:
    written = with_sampler_correction(config_of({"preset": "grpo"}, **FP8))
    assert written.objective.corrections == ["token_tis"]
    assert with_sampler_correction(written) == written
    plain = config_of({"preset": "grpo"})
    assert with_sampler_correction(plain) is plain


def test_fp8_without_a_correction_is_doubted() -> None:
    config = config_of({"preset": "grpo", "corrections": []}, **FP8)
    (doubt,) = doubts_about(config, resolve_objective(config))
    assert "draws from other weights than are trained" in doubt
    config = config_of({"preset": "grpo"}, **FP8)
    assert doubts_about(config, resolve_objective(config)) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"kind": "vllm"}, 'does not quantise for "vllm"'),
        ({"kind": "sglang", "address": "http://127.0.0.1:1"}, 'does not quantise for "sglang"'),
        ({"numerics": "exact"}, "exclude each other"),
    ],
)
def test_fp8_is_refused_where_it_would_do_nothing_or_break_a_promise(engine: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config_of({"preset": "grpo"}, engine={"weights": "fp8", **engine})


@pytest.mark.parametrize(("preset", "words"), [("ppo", "has a critic"), ("trpo", "has a (critic|step of its own)")])
def test_what_scales_no_loss_is_refused_in_float16(preset: str, words: str) -> None:
    model = {"new": {}, "dtype": "float16"}
    with pytest.raises(UserError, match=words):
        resolve_objective(config_of({"preset": preset}, model=model))
    resolve_objective(config_of({"preset": "grpo"}, model=model))


def test_exact_mode_is_refused_in_float16() -> None:
    with pytest.raises(UserError, match="is made for float32 and bfloat16"):
        config_of({"preset": "grpo"}, model={"new": {}, "dtype": "float16"}, engine={"numerics": "exact"})
