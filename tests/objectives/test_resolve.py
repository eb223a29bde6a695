"""Names become objectives; mistakes become sentences."""

from __future__ import annotations

import pytest

from temper.errors import UserError
from temper.objectives import PRESETS, check_group_size, check_proximal, compare, describe, resolve
from temper.objectives.gates import cispo, clip
from temper.objectives.resolve import REGISTRY


def test_the_seven_presets_are_there_and_established() -> None:
    assert set(PRESETS) == {"reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"}
    assert not any(preset.experimental for preset in PRESETS.values())


def test_none_leaves_the_presets_factor() -> None:
    assert resolve("grpo", dict.fromkeys(REGISTRY)) == PRESETS["grpo"]


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
        ("grpo", {"corrections": [{"cap": 3.0}]}, r"lacks a name\. Known: token_tis"),
    ],
)
def test_mistakes_are_named(preset, overrides, message) -> None:
    with pytest.raises(UserError, match=message):
        resolve(preset, overrides)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_group_size_one_is_refused_by_group_baselines(name) -> None:
    with pytest.raises(UserError, match=f"group_size=1 is too small for objective {name}"):
        check_group_size(resolve(name), 1)
    check_group_size(resolve(name), 2)


def test_reinforce_accepts_group_size_one() -> None:
    check_group_size(resolve("reinforce"), 1)


def test_a_correction_on_top_of_the_samplers_own_ratio_is_refused() -> None:
    corrected = resolve("grpo", {"corrections": ["token_tis"]})
    with pytest.raises(UserError, match="token_tis would count it twice"):
        check_proximal(corrected, "behavior")
    check_proximal(corrected, "trainer")
    check_proximal(resolve("grpo"), "behavior")


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_shows_formula_factors_source_and_note(name) -> None:
    text, preset = describe(name), PRESETS[name]
    for part in (preset.formula, preset.source, preset.note, str(preset.gate), str(preset.advantage)):
        assert part
        assert part in text


def test_compare_shows_only_what_differs() -> None:
    rows = {kind: (left, right) for kind, left, right in compare("grpo", "dapo")}
    assert set(rows) == {"gate", "weighting", "wants"}
    assert rows["gate"] == ("clip(low=0.2, high=0.2)", "clip(low=0.2, high=0.28)")


@pytest.mark.parametrize("kind", REGISTRY)
def test_every_registered_factor_is_registered_under_its_name_and_documented(kind) -> None:
    for name, build in REGISTRY[kind].items():
        assert build.__name__ == name
        assert "Specification" in (build.__doc__ or "")
