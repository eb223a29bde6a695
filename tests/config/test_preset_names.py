"""Names of presets that are answered without torch are the presets."""

from __future__ import annotations

import pytest

from temper.config.preset_names import OTHER_NAMES, PRESET_NAMES, why_unknown
from temper.config.recipe import resolve
from temper.errors import UserError
from temper.objectives import PRESETS


def test_the_names_are_those_of_the_presets_in_their_order() -> None:
    assert list(PRESETS) == list(PRESET_NAMES), "add the preset to temper/config/preset_names.py"


def test_a_preset_that_a_paper_calls_otherwise_is_found_by_its_name_there() -> None:
    assert 'Did you mean "mis"?' in why_unknown("icepop")
    assert set(OTHER_NAMES.values()) <= set(PRESET_NAMES)
    assert not set(OTHER_NAMES) & set(PRESET_NAMES)


def test_a_misspelt_preset_is_answered_with_the_nearest_and_its_line() -> None:
    assert why_unknown("grpo") == ""
    text = 'train = [{ path = "a.jsonl" }]\n[objective]\npreset = "drgrpo"\n'
    table = {"train": [{"path": "a.jsonl"}], "objective": {"preset": "drgrpo"}}
    with pytest.raises(UserError, match=r'r\.toml, line 3.*objective "drgrpo" is unknown\. Did you mean "dr_grpo"\?'):
        resolve(table, (), where="r.toml", text=text)
