"""Runs in one chart: by kind of stage, along steps, tokens or time, seeds as mean and spread; and links to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Browser = Any
Query = Callable[..., list[tuple[Any, ...]]]
SFT_STEPS, RL_STEPS = 3, 6


def test_runs_meet_where_their_rl_begins(browser: Browser) -> None:
    """One has imitation before it, as its stage 0; the other's stage 0 is RL."""
    browser.open("plain", "overview", f"?compare={browser.ids['alone']}")
    curves = browser.curves("reward")
    expected = [SFT_STEPS + step for step in range(1, RL_STEPS + 1)]
    assert curves["plain"]["x"] == curves["alone"]["x"] == expected
    assert curves["plain"]["y"] == curves["alone"]["y"], "the same numbers in the same places"
    browser.open("alone", "overview", f"?compare={browser.ids['plain']}")
    assert browser.curves("reward")["alone"]["x"] == expected, "also from the other side"


def test_a_kind_of_stage_is_chosen_for_all_runs(browser: Browser) -> None:
    browser.open("plain", "overview", f"?compare={browser.ids['alone']}")
    browser.choose("#stage", "rl")
    curves = browser.curves("reward")
    assert curves["plain"]["x"] == curves["alone"]["x"] == list(range(1, RL_STEPS + 1))
    browser.choose("#stage", "sft")
    browser.wait("!document.querySelector('[data-chart=length] .chart').chart.traces.some((t) => t.name === 'alone')",
                 "the run without imitation to leave")  # fmt: skip


@pytest.mark.parametrize(("axis", "column"), [("drawn", "tokens_drawn"), ("trained", "tokens_trained")])
def test_tokens_are_an_axis(browser: Browser, query: Query, axis: str, column: str) -> None:
    browser.open("plain", "overview", "?kind=rl")
    browser.choose("#axis", axis)
    browser.wait(f"document.querySelector('[data-chart=reward] .chart').chart.layout?.xaxis.title === 'tokens {axis}'",
                 "the axis")  # fmt: skip
    spent = [row[0] for row in query("plain", f"SELECT {column} FROM steps WHERE stage = 1 ORDER BY step")]
    assert browser.curves("reward")["mean"]["x"] == [sum(spent[: place + 1]) for place in range(len(spent))]
    assert browser.title("reward", "x") == f"tokens {axis}"
    assert browser.title("reward", "y") == "reward"


def test_time_is_an_axis_and_stages_follow_each_other(browser: Browser, query: Query) -> None:
    browser.open("plain", "overview", "?x=seconds")
    totals = dict(query("plain", "SELECT stage, SUM(seconds) FROM seconds GROUP BY stage"))
    found = browser.curves("reward")["mean"]["x"]
    assert found[-1] == pytest.approx(totals[0] + totals[1])
    assert found[0] > totals[0], "RL begins where imitation ended"
    assert browser.title("reward", "x") == "time in steps (s)"


def test_seeds_become_their_mean_and_their_spread(browser: Browser, query: Query) -> None:
    browser.open("plain", "overview")
    browser.click("#seeds")
    browser.wait("document.querySelector('[data-chart=reward] .chart').chart.traces?.length === 3", "mean and edges")
    plain = [row[0] for row in query("plain", "SELECT value FROM metrics WHERE name = 'reward/mean' ORDER BY step")]
    curves = browser.curves("reward")
    (mean,) = [curve for name, curve in curves.items() if not name.startswith("edge")]
    low, high = curves["edge 0"], curves["edge 1"]
    # failed and killed are copies of plain with its recipe and its numbers; seed is 0.5 higher.
    assert mean["y"] == pytest.approx([value + 0.5 / 4 for value in plain])
    assert low["y"] == pytest.approx(plain)
    assert high["y"] == pytest.approx([value + 0.5 for value in plain])
    assert "(4 runs)" in browser.run("return document.querySelector('[data-chart=reward] .chart').chart.traces[2].name")
    assert "from the lowest to the highest" in browser.text("[data-chart=reward]")
    browser.open("plain", "overview", f"?seeds=1&compare={browser.ids['other']}")
    names = [name for name in browser.curves("reward") if not name.startswith("edge")]
    assert len(names) == 2, "another learning rate is another curve"
    assert "other" in names


def test_a_copied_link_shows_the_same_view(browser: Browser) -> None:
    browser.open("plain", "overview")
    browser.choose("#stage", "rl")
    browser.choose("#axis", "drawn")
    browser.choose("#scale", "log")
    browser.choose("#smoothing", "0.5")
    browser.run("[...document.querySelectorAll('.checks label')].find((one) => one.textContent === 'alone').click()")
    browser.wait("document.querySelector('[data-chart=reward] .chart').chart.traces.length === 4", "both, smoothed")
    shown = browser.curves("reward")
    browser.copy_link()
    assert browser.curves("reward") == shown
    values = "return ['stage', 'axis', 'scale', 'smoothing'].map((id) => document.getElementById(id).value)"
    assert browser.run(values) == ["rl", "drawn", "log", "0.5"]
    assert browser.run("return document.querySelector('[data-chart=reward] .chart').chart.isLog")
    browser.press("g", "m")
    browser.wait("location.hash.includes('/metrics')", "another page")
    browser.wait("document.querySelector('#axis')?.value === 'drawn'", "the choices on the other page")
    assert browser.run(values) == ["rl", "drawn", "log", "0.5"]


def test_kl_and_mismatch_are_shown_once_when_they_are_one_number(browser: Browser) -> None:
    browser.open("alone", "overview")
    browser.curves("mismatch")
    assert browser.count("[data-chart=kl]") == 0
    told = browser.text("[data-chart=mismatch]")
    assert "The KL from the proximal policy is the same number" in told
    assert 'proximal = "behavior"' in told
    browser.open("plain", "overview")
    assert "kl old k3" in browser.curves("kl")
    assert "the same number" not in browser.text("[data-chart=mismatch]")
