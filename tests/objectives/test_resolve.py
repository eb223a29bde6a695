"""Names become objectives; mistakes become sentences."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from temper.errors import UserError
from temper.objectives import (
    DIRECT_LOSSES,
    FAMILIES,
    POLICY_GRADIENTS,
    PRESETS,
    DirectLoss,
    RowKind,
    check_objective,
    compare,
    describe,
    resolve,
)
from temper.objectives.policy.gates import cispo, clip
from temper.objectives.policy.weighting import token_mean
from temper.objectives.resolve import REGISTRY, kinds_of

ROWS = """
    reinforce reinforce_is ppo trpo grpo grpo_r1 dr_grpo dapo gspo gspo_token cispo sapo dppo_tv dppo_kl dppo_topk
    prime_rl maxrl simko mgpo rloo reinforce_pp reinforce_pp_baseline remax vapo vineppo olmorl scalerl decoupled_ppo
    a3po tis mis sequence_mis geo_rs rspo vespo rgpo lambda_grpo prorl deepseek_v32 clip_cov kl_cov intellect2 gmpo opd
"""
"""Algorithms that must have a preset."""

UNVERIFIED = """
    rgpo lambda_grpo mgpo entropy_advantage prorl dppo_topk scalerl reinforce_pp_baseline deepseek_v32 rspo vapo
    grpo_r1 vineppo opd_top_k power
"""
"""Presets with a form or a constant that is not established by public code, or that is pieced together."""


def test_every_known_algorithm_is_a_preset() -> None:
    assert set(ROWS.split()) <= set(PRESETS)


def test_what_is_not_established_says_why() -> None:
    assert {name for name, preset in PRESETS.items() if preset.why_experimental} == set(UNVERIFIED.split())
    for name in UNVERIFIED.split():
        assert all(reason in describe(name) for reason in PRESETS[name].why_experimental)
        assert "(experimental)" in describe(name)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_passes_its_own_checks(name) -> None:
    check_objective(PRESETS[name], group_size=max(1, PRESETS[name].min_group))


def test_none_leaves_the_presets_factor() -> None:
    assert resolve("grpo", dict.fromkeys(REGISTRY)) == PRESETS["grpo"]


def test_presets_that_are_made_for_experts_have_the_numbers_of_their_papers() -> None:
    """GSPO, arXiv 2507.18071; IcePop, arXiv 2510.18855; RSPO, arXiv 2510.23027."""
    assert resolve("gspo", {}).ratio.name == "sequence_geometric"
    assert resolve("gspo", {}).gate == clip(low=3e-4, high=4e-4)
    (icepop,) = resolve("mis", {}).corrections
    assert (icepop.name, dict(icepop.arguments)) == ("token_mis", {"low": 0.5, "high": 5.0})
    rspo = resolve("rspo", {})
    assert (rspo.ratio.name, dict(rspo.ratio.arguments)) == ("router_shift", {"floor": 0.8})
    assert (rspo.gate.name, dict(rspo.gate.arguments)) == ("gmpo", {"band": 0.4})


def test_a_name_replaces_a_factor() -> None:
    assert resolve("grpo", {"gate": "cispo"}).gate == cispo()


def test_a_table_with_a_name_starts_from_that_factors_defaults() -> None:
    assert resolve("gspo", {"gate": {"name": "clip", "high": 0.28}}).gate == clip(low=0.2, high=0.28)


def test_a_table_without_a_name_changes_the_presets_own_factor() -> None:
    assert resolve("gspo", {"gate": {"high": 5e-4}}).gate == clip(low=3e-4, high=5e-4)
    assert resolve("rloo", {"shaping": [{"coefficient": 0.1}]}).shaping[0].arguments == (("coefficient", 0.1),)


def test_a_list_replaces_a_list_and_may_be_empty() -> None:
    assert [c.name for c in resolve("grpo", {"corrections": ["token_tis", "veto"]}).corrections] == [
        "token_tis",
        "veto",
    ]
    assert resolve("rloo", {"shaping": []}).needs == frozenset()


def test_needs_are_the_union_over_factors() -> None:
    assert resolve("grpo").needs == frozenset()
    assert resolve("rloo").needs == {"reference", "proximal"}
    both = [{"name": "kl", "coefficient": 0.1}, {"name": "entropy_bonus", "coefficient": 0.1}]
    assert resolve("grpo", {"regularizers": both}).needs == {"reference", "entropy"}


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("drgrpo", {}, r'objective "drgrpo" is unknown\. Did you mean "dr_grpo"\? Run "temper presets"'),
        ("grpo", {"gate": "clp"}, r'objective\.gate "clp" is unknown\. Did you mean "clip"\?'),
        (
            "grpo",
            {"gate": {"hihg": 0.3}},
            r'argument "hihg" is unknown\. Did you mean "high"\? Allowed: low, high, dual',
        ),
        ("grpo", {"gate": {"high": "wide"}}, r"high='wide' must be of type float"),
        ("grpo", {"gate": {"high": True}}, r"high=True must be of type float"),
        ("grpo", {"weighting": {"name": "constant_length", "length": 2.5}}, r"length=2\.5 must be of type int"),
        ("grpo", {"gait": "clip"}, r"objective\.gait is unknown"),
        ("grpo", {"regularizers": ["kl"]}, r"argument coefficient is missing"),
        ("grpo", {"corrections": "veto"}, r"must be a list, e\.g\. \['veto'\]"),
        ("grpo", {"gate": ["clip"]}, r"takes one factor, not a list"),
        ("grpo", {"corrections": [{"cap": 3.0}]}, r"lacks a name\. Known: token_importance, token_tis"),
    ],
)
def test_mistakes_are_named(preset, overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        resolve(preset, overrides)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "maxrl", "mgpo"])
def test_group_size_one_is_refused_by_group_baselines(name) -> None:
    with pytest.raises(UserError, match=f"group_size=1 is too small for objective {name}"):
        check_objective(resolve(name), group_size=1)
    check_objective(resolve(name), group_size=2)


@pytest.mark.parametrize("name", ["reinforce", "ppo", "remax", "reinforce_pp", "opd"])
def test_objectives_without_a_group_baseline_accept_group_size_one(name) -> None:
    check_objective(resolve(name), group_size=1)


KL = {"name": "kl", "coefficient": 0.1}


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("grpo", {"proximal": "behavior", "corrections": ["token_tis"]}, "token_tis would count it twice"),
        ("simko", {"gate": "dppo_topk"}, "likeliest tokens of both the sampler and the trainer"),
        ("grpo", {"advantage": "gae"}, "gae needs a critic"),
        ("ppo", {"critic": "none"}, "gae needs a critic"),
        ("grpo", {"reference": {"name": "reset", "every": 5}, "regularizers": [KL]}, None),
        ("grpo", {"controllers": [{"name": "adaptive_kl", "target": 1.0}]}, "steer kl, which objective grpo does not"),
        ("grpo", {"controllers": [{"name": "adaptive_kl", "target": 1.0}], "regularizers": [KL]}, None),
        (
            "grpo",
            {"shaping": [{"name": "clip_reward", "low": 0.0, "high": 1.0}, "soft_overlong"]},
            r"out of order\. Use \['soft_overlong', 'clip_reward'\]",
        ),
        ("gdpo", {"shaping": ["soft_overlong"]}, "per_reward compares the parts"),
        ("dapo", {"advantage": "turn_returns"}, "compares what turns were paid, which objective.shaping"),
        ("dapo", {"advantage": "turn_returns", "shaping": []}, None),
        ("opd", {"shaping": ["soft_overlong"]}, "reads a teacher and no reward"),
        ("reinforce", {"shaping": ["exclude_truncated_from_stats"]}, "advantage raw has none"),
        ("grpo", {"shaping": ["exclude_truncated_from_stats"]}, None),
        ("grpo", {"critic": "gae_targets"}, "that advantage group_mean_std does not read"),
        ("reinforce", {"ratio": "sequence_product"}, "the gate none takes no ratio"),
        ("reinforce", {"proximal": "behavior"}, "proximal behavior would do nothing"),
        ("reinforce", {"proximal": "current", "corrections": ["token_tis"]}, None),
        ("reinforce", {"proximal": "behavior", "regularizers": [KL]}, None),
        ("reinforce", {"proximal": "behavior", "regularizers": [KL | {"estimator": "k2"}]}, "would do nothing"),
        ("beta_dpo", {"controllers": []}, "Add objective.controllers"),
        ("grpo", {"controllers": ["margin_memory"]}, "margin_memory would do nothing"),
        ("grpo", {"corrections": ["batch_normalize"]}, "rescales what other corrections do, and there is none"),
        ("grpo", {"corrections": ["token_tis", "batch_normalize"]}, None),
        ("grpo", {"corrections": ["token_tis", "kept_denominator"]}, "no correction drops any"),
        ("grpo", {"corrections": ["token_mis", "kept_denominator"]}, None),
        ("grpo", {"corrections": ["batch_normalize", "kept_denominator", "token_tis"]}, "twice together"),
        ("simko", {"corrections": ["clip_cov"]}, "clip_cov cannot ask"),
        ("grpo", {"proximal": "behavior", "corrections": ["opsm"]}, None),
        ("prorl", {"reference": "none"}, None),
    ],
)
def test_combinations_that_would_train_something_else_are_refused(preset, overrides, message) -> None:
    objective = resolve(preset, overrides)
    if message is None:
        check_objective(objective, group_size=8)
        return
    with pytest.raises(UserError, match=message):
        check_objective(objective, group_size=8)


def test_a_moving_reference_that_nothing_reads_is_refused() -> None:
    """The rule itself asks for a reference, so look at the others."""
    with pytest.raises(UserError, match="nothing compares with one"):
        check_objective(resolve("grpo", {"reference": {"name": "reset", "every": 5}}), group_size=8)


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_shows_formula_factors_source_and_note(name) -> None:
    text, preset = describe(name), PRESETS[name]
    used = (preset.loss,) if isinstance(preset, DirectLoss) else (preset.gate, preset.advantage)
    for part in (preset.formula, preset.source, preset.note, *map(str, used)):
        assert part
        assert part in text


def test_a_description_with_a_direct_loss_names_its_rows_and_no_factor_that_it_cannot_have() -> None:
    text = describe("dpo")
    assert "reads         pairs" in text
    assert kinds_of(PRESETS["dpo"]) == {"loss", "controllers", "reference"}
    assert kinds_of(PRESETS["sft"]) == {"loss", "controllers", "reference", "weighting"}
    assert not [kind for kind in REGISTRY.keys() - kinds_of(PRESETS["dpo"]) if f"  {kind} " in text]
    assert ("gate", "clip(low=0.2, high=0.2)", "-") in compare("grpo", "dpo")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("gate", "cispo"),
        ("regularizers", [{"name": "kl", "coefficient": 0.1}]),
        ("weighting", "token_mean"),
        ("step", "trpo"),
    ],
)
def test_a_factor_that_a_direct_loss_would_leave_idle_is_refused(kind: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"objective.{kind} would do nothing: dpo has the direct loss dpo"):
        resolve("dpo", {kind: value})
    with pytest.raises(UserError, match=r"objective\.loss would do nothing: grpo is a policy gradient"):
        resolve("grpo", {kind: value, "loss": {"name": "dpo", "beta": 0.3}})
    with pytest.raises(UserError, match=r'objective\.loss "none" is unknown'):
        resolve("dpo", {"loss": "none"})


def test_a_loss_changes_with_its_arguments_and_brings_a_weighting_where_it_needs_one() -> None:
    changed = resolve("dpo", {"loss": {"beta": 0.3}})
    assert isinstance(changed, DirectLoss)
    assert changed.loss.argument("beta") == 0.3
    other = resolve("dpo", {"loss": "gkd"})
    assert other.weighting is not None
    assert resolve("gkd", {"loss": "dpo"}).weighting is None


@pytest.mark.parametrize("name", DIRECT_LOSSES)
def test_a_direct_loss_says_what_it_reads_and_has_no_credit(name: str) -> None:
    preset = DIRECT_LOSSES[name]
    assert preset.loss.reads in get_args(RowKind)
    assert preset.loss.is_weighed == (preset.weighting is not None)
    assert preset.credit_factors == ()
    with pytest.raises(UserError, match="weighting"):
        dataclasses.replace(preset, weighting=token_mean() if preset.weighting is None else None)


def test_a_weighting_acts_beside_direct_losses_of_tokens_alone() -> None:
    assert resolve("sft", {"weighting": "sequence_mean"}).weighting.name == "sequence_mean"
    assert resolve("gkd", {"weighting": "sequence_mean"}).weighting.name == "sequence_mean"
    with pytest.raises(UserError, match=r"objective.weighting would do nothing"):
        resolve("reward_model", {"weighting": "token_mean"})


def test_too_small_a_group_names_who_compares() -> None:
    with pytest.raises(UserError, match="nash_md compares a completion"):
        check_objective(resolve("nash_md"), group_size=1)


def test_every_preset_is_in_one_family_and_the_first_alone_has_no_losses() -> None:
    names = [preset.name for family in FAMILIES.values() for preset in family]
    assert sorted(names) == sorted(PRESETS)
    first, *others = FAMILIES.values()
    assert {preset.name for preset in first} == set(POLICY_GRADIENTS)
    assert {preset.name for family in others for preset in family} == set(DIRECT_LOSSES)


def test_compare_shows_only_what_differs() -> None:
    rows = {kind: (left, right) for kind, left, right in compare("grpo", "dapo")}
    assert set(rows) == {"shaping", "gate", "weighting", "wants"}
    assert rows["gate"] == ("clip(low=0.2, high=0.2)", "clip(low=0.2, high=0.28)")


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_registered_factor_is_registered_under_its_name_and_documented(kind) -> None:
    for name, build in REGISTRY[kind].items():
        assert build.__name__ == name
        assert len((build.__doc__ or "").split()) > 3, f"{kind} {name} says too little"
