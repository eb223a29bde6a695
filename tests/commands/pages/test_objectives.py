"""The page about objectives is what the code says, and its pictures show what the gates do."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.commands.pages.objectives import RATIOS, gate_curve, page_text, write_page
from temper.objectives import PRESETS
from temper.objectives.policy.gates import GATES, cispo, clip, none
from temper.objectives.resolve import REGISTRY

DOCS = Path(__file__).parents[3] / "docs"


def at(curve: list[float], ratio: float) -> float:
    return curve[int((RATIOS - ratio).abs().argmin())]


def test_the_page_in_docs_is_the_one_the_code_writes() -> None:
    assert (DOCS / "objectives.md").read_text() == page_text(), 'run "temper presets --page docs"'


def test_every_preset_and_factor_is_on_the_page() -> None:
    text = page_text()
    for name in [*PRESETS, *(factor for builders in REGISTRY.values() for factor in builders)]:
        assert f"`{name}" in text, name


def test_every_gate_has_a_picture(tmp_path: Path) -> None:
    write_page(tmp_path)
    drawn = {path.name for path in (tmp_path / "gates").glob("*.svg")}
    assert drawn == {f"{name}.svg" for name in (*GATES, "together")}
    assert drawn == {path.name for path in (DOCS / "gates").glob("*.svg")}, 'run "temper presets --page docs"'


def test_the_curve_of_a_clip_is_the_clip() -> None:
    for sign in (1.0, -1.0):
        gain, weight = gate_curve(clip(low=0.2, high=0.2), sign)
        assert at(gain, 1.0) == 0.0
        assert at(weight, 1.1) == pytest.approx(1.1)
        assert at(weight, 0.9) == pytest.approx(0.9)
        assert at(gain, 1.1) == pytest.approx(0.1 * sign, abs=1e-4)
        stopped, going = (2.0, 0.5) if sign > 0 else (0.5, 2.0)
        assert at(weight, stopped) == 0.0
        assert at(weight, going) == pytest.approx(going)
        assert at(gain, 6.0 if sign > 0 else 0.1) == pytest.approx(0.2, abs=0.02)


def test_the_gain_of_gates_that_stop_gradients_is_what_the_gradient_climbs() -> None:
    gain, weight = gate_curve(cispo(cap=5.0), 1.0)
    assert at(gain, 3.0) == pytest.approx(2.0, abs=1e-3)
    assert at(weight, 5.5) == pytest.approx(5.0)
    assert at(gate_curve(none(), 1.0)[1], 4.0) == 1.0
