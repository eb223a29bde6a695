"""One chart and what can be done with it; the page of every metric."""

from __future__ import annotations

import csv
import json
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Browser = Any
Query = Callable[..., list[tuple[Any, ...]]]
REWARD = "document.querySelector('[data-chart=reward] .chart')"


def button(browser: Browser, chart: str, text: str) -> None:
    browser.run(
        "[...document.querySelectorAll(`[data-chart='${arguments[0]}'] .chart-tools button`)]"
        ".find((one) => one.textContent === arguments[1]).click()",
        *(chart, text),
    )


def downloaded(folder: Path, name: str) -> Path:
    deadline = time.monotonic() + 20
    while not (folder / name).is_file():
        assert time.monotonic() < deadline, f"{name} did not come: {list(folder.iterdir())}"
        time.sleep(0.05)
    return folder / name


def open_chart(browser: Browser, query: str = "") -> None:
    browser.open("plain", "overview", query)
    browser.wait(f"{REWARD}?.querySelector('.main-svg')", "the chart")


def test_a_zoom_shows_how_to_leave_it(browser: Browser) -> None:
    open_chart(browser)
    reset = "document.querySelector('[data-chart=reward] .chart-tools button')"
    assert browser.run(f"return {reset}.checkVisibility()") is False
    browser.run(f"Plotly.relayout({REWARD}, {{'xaxis.range': [4, 6]}})")
    browser.wait(f"{reset}.checkVisibility() && {reset}.textContent === 'Reset zoom'", "the way back")
    button(browser, "reward", "Reset zoom")
    browser.wait(f"!{reset}.checkVisibility() && {REWARD}._fullLayout.xaxis.autorange", "the whole curve")


def test_a_logarithm_says_what_it_cannot_show(browser: Browser) -> None:
    open_chart(browser)
    assert browser.run(f"return {REWARD}._fullLayout.yaxis.type") == "linear"
    button(browser, "staleness", "log")
    assert "12 of 12 points are 0 or less" in browser.text("[data-chart=staleness] .left-out")
    button(browser, "reward", "log")
    browser.wait(f"{REWARD}._fullLayout.yaxis.type === 'log'", "the axis")
    browser.copy_link()
    browser.wait(f"{REWARD}?._fullLayout?.yaxis.type === 'log'", "the axis of a copied link")
    assert browser.run("return document.querySelector('[data-chart=entropy] .chart').chart.isLog") is False
    browser.choose("#scale", "log")
    browser.wait("document.querySelector('[data-chart=entropy] .chart').chart.isLog", "all of them")


def test_a_chart_fills_the_window_and_comes_back(browser: Browser) -> None:
    open_chart(browser)
    button(browser, "reward", "Full size")
    browser.wait(f"document.querySelector('dialog.full')?.open && {REWARD}.clientHeight > 600", "the full size")
    browser.wait(f"{REWARD}.querySelector('.main-svg').clientHeight > 600", "the curve in full size")
    browser.copy_link()
    browser.wait("document.querySelector('dialog.full')?.open", "the full size of a copied link")
    browser.press("\ue00c")  # Escape
    browser.wait("!document.querySelector('dialog.full')", "the page again")
    assert browser.run("return document.querySelector('.grid').firstChild.dataset.chart") == "reward", "in its place"
    assert "full=" not in browser.hash()
    button(browser, "reward", "Full size")
    browser.press("4")
    browser.wait("location.hash.includes('/tokens') && !document.querySelector('dialog.full')", "another page")


def test_the_numbers_of_a_chart_can_be_taken_away(browser: Browser, downloads: Path, query: Query) -> None:
    open_chart(browser, "?kind=rl")
    button(browser, "reward", "CSV")
    with downloaded(downloads, "Reward.csv").open() as file:
        rows = list(csv.DictReader(file))
    recorded = query("plain", "SELECT step, value FROM metrics WHERE name = 'reward/mean' ORDER BY step")
    assert [(int(row["step"]), float(row["reward"])) for row in rows] == [(s, pytest.approx(v)) for s, v in recorded]
    assert {row["series"] for row in rows} == {"mean"}
    assert rows[0]["point"] == "rl step 1"
    button(browser, "held-out_score", "CSV")
    with downloaded(downloads, "Held-out_score.csv").open() as file:
        scores = list(csv.DictReader(file))
    low = query("plain", "SELECT low FROM evaluations WHERE name = 'greedy' AND stage = 1 ORDER BY step")
    assert [float(row["low"]) for row in scores if row["series"] == "greedy"] == [pytest.approx(v) for (v,) in low]


def test_the_picture_of_a_chart_can_be_taken_away(browser: Browser, downloads: Path) -> None:
    open_chart(browser)
    button(browser, "reward", "PNG")
    picture = downloaded(downloads, "Reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert (int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])) == (2000, 1120)
    assert browser.problems() == []


def test_imitation_and_rl_have_no_loss_in_common(browser: Browser, query: Query) -> None:
    open_chart(browser)
    for kind, stage in (("sft", 0), ("rl", 1)):
        recorded = query("plain", "SELECT loss FROM steps WHERE stage = ? ORDER BY step", stage)
        assert browser.curves(f"loss_{kind}")["loss"]["y"] == pytest.approx([value for (value,) in recorded])
    browser.open("alone", "overview")
    assert len(browser.curves("loss")["loss"]["y"]) == 6


def test_parts_of_the_reward_are_on_the_overview(browser: Browser, query: Query) -> None:
    open_chart(browser)
    curves = browser.curves("reward_parts")
    assert set(curves) == {"edit", "exact"}
    for part, curve in curves.items():
        name = f"reward/{part}_weighted"
        recorded = query("plain", "SELECT value FROM metrics WHERE name = ? ORDER BY step", name)
        assert curve["y"] == pytest.approx([value for (value,) in recorded])


def chart_titles(browser: Browser) -> list[str]:
    return browser.run("return [...document.querySelectorAll('.metric-group .chart')].map((one) => one.chart.title)")


def test_every_recorded_metric_has_a_chart(browser: Browser, query: Query) -> None:
    browser.open("plain", "metrics")
    browser.run("[...document.querySelectorAll('.tools button')].find((one) => one.textContent === 'Open all').click()")
    recorded = {name for (name,) in query("plain", "SELECT DISTINCT name FROM metrics")}
    titles = chart_titles(browser)
    shares = {name.rpartition("/")[0] + "/*" for name in recorded if name[-3:-2] == "/" and name[-2:].isdigit()}
    alone = {name for name in recorded if f"{name.rpartition('/')[0]}/*" not in shares}
    assert set(titles) == alone | shares | {"loss, sft", "loss, rl"}
    assert len(titles) == len(set(titles))
    groups = browser.run("return [...document.querySelectorAll('.metric-group')].map((one) => one.dataset.group)")
    assert set(groups) == {name.partition("/")[0] for name in recorded} | {"loss"}
    every = "[...document.querySelectorAll('.metric-group .chart')]"
    browser.wait(f"{every}.every((one) => one.chart.traces)", "all curves")
    told = browser.run(f"return {every}.filter((one) => !one.chart.traces.length).map((one) => one.chart.title)")
    assert told == [], "and every chart a curve"
    assert browser.problems() == []


def test_metrics_are_searched_by_name_unit_and_meaning(browser: Browser) -> None:
    browser.open("plain", "metrics")
    browser.press("/")
    assert browser.run("return document.activeElement.id") == "metric-search"
    browser.press("gradient")
    with urllib.request.urlopen(f"{browser.address}/api/runs/{browser.ids['plain']}/metrics", timeout=10) as answer:
        meant = [one["name"] for one in json.load(answer) if "gradient" in f"{one['name']} {one['meaning']}".lower()]
    assert meant
    assert not [name for name in meant if "gradient" in name], "found by what they mean"
    browser.wait(f"document.querySelector('.tools [role=status]').innerText.startsWith('{len(meant)} of')", "the found")
    assert chart_titles(browser) == meant
    browser.choose("#metric-search", "kl_k3")
    browser.wait("document.querySelectorAll('.metric-group .chart').length === 1", "one")
    assert chart_titles(browser) == ["mismatch/kl_k3"]
    browser.copy_link()
    browser.wait("document.querySelectorAll('.metric-group .chart').length === 1", "one, in a copied link")
    assert chart_titles(browser) == ["mismatch/kl_k3"]
    browser.choose("#metric-search", "no such thing")
    browser.wait("document.querySelector('.empty')?.innerText.includes('No metric fits')", "the empty state")


def test_open_groups_are_in_the_link(browser: Browser) -> None:
    browser.open("plain", "metrics")
    browser.click("[data-group=policy] summary")
    browser.wait("document.querySelectorAll('[data-group=policy] .chart').length > 5", "the group")
    shown = set(chart_titles(browser))
    browser.copy_link()
    browser.wait("document.querySelectorAll('[data-group=policy] .chart').length > 5", "the group of a copied link")
    assert set(chart_titles(browser)) == shown
    browser.click("[data-group=policy] summary")
    browser.wait("!document.querySelectorAll('[data-group=policy] .chart').length", "the group to close")


def test_one_metric_of_two_runs_is_one_chart(browser: Browser) -> None:
    browser.open("plain", "metrics", f"?q=reward/mean&compare={browser.ids['alone']}&kind=rl")
    curves = browser.curves("reward_mean")
    assert curves["plain"] == curves["alone"]
