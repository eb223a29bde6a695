"""The table of runs in a real browser: states, differences, sorting, searching, notes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

Browser = Any
Query = Callable[..., list[tuple[Any, ...]]]


def open_table(browser: Browser, query: str = "") -> None:
    browser.open("", "runs", query)
    browser.wait("document.querySelector('table.runs tbody tr')", "the table")


def names(browser: Browser) -> list[str]:
    return browser.run("return [...document.querySelectorAll('table.runs tbody .run-cell a')].map((a) => a.innerText)")


def cell(browser: Browser, run: str, title: str) -> str:
    """Text of a run in the column with this title."""
    return browser.run(
        "const titles = [...document.querySelectorAll('table.runs th')].map((one) => one.innerText);"
        "const at = titles.findIndex((one) => one.replace(/ [↑↓]/, '') === arguments[1]);"
        "return document.querySelector(`[data-run='${arguments[0]}']`).children[at].innerText",
        *(browser.ids[run], title),
    )


def test_several_runs_begin_with_their_table(browser: Browser) -> None:
    browser.driver.get("about:blank")
    browser.driver.get(browser.address)
    browser.wait("location.hash === '#/runs' && document.querySelector('table.runs')", "the table")
    assert browser.text("#nav [aria-current]") == "Runs"
    assert sorted(names(browser)) == sorted(browser.ids)


def test_states_and_errors_stand_in_the_table_and_on_the_page(browser: Browser, attack: str) -> None:
    open_table(browser)
    assert cell(browser, "plain", "State") == "finished"
    assert cell(browser, "planted", "State") == "live"
    assert cell(browser, "killed", "State").startswith("dead\n")
    shown = cell(browser, "failed", "State")
    assert shown.startswith("failed\n")
    assert "ValueError: it broke" in shown
    assert not browser.is_hacked()
    browser.open("failed", "overview")
    browser.wait("document.querySelector('.ended')", "why it ended")
    assert attack in browser.text(".ended"), "the whole of it, as text"
    assert browser.text("#live").startswith("failed: ValueError")
    browser.open("killed", "overview")
    browser.wait("document.querySelector('.ended')", "why it ended")
    assert "no sign of life since" in browser.text(".ended")
    browser.open("plain", "overview")
    browser.curves("reward")
    assert browser.count(".ended") == 0
    assert not browser.is_hacked()


def test_the_score_and_what_differs_are_columns(browser: Browser, query: Query) -> None:
    open_table(browser)
    scores = query("plain", "SELECT score, low, high FROM evaluations WHERE name = 'greedy' ORDER BY stage, step")
    shown = cell(browser, "plain", "Held-out score")
    assert f"{scores[0][0]:.3f}".rstrip("0") in shown
    assert "→" in shown
    assert "[" in shown
    titles = browser.run("return [...document.querySelectorAll('table.runs th code')].map((one) => one.innerText)")
    differing = ["stages", "seed", "objective.proximal", "rl.optim.learning_rate", "checkpoint.keep"]
    assert titles == differing, "and nothing that is equal everywhere"
    assert cell(browser, "other", "rl.optim.learning_rate") == "0.0005"
    assert cell(browser, "seed", "seed") == "7"
    assert cell(browser, "alone", "stages") == "rl"


def test_any_column_sorts_and_the_link_keeps_it(browser: Browser, query: Query) -> None:
    open_table(browser)
    assert names(browser) == sorted(browser.ids)
    browser.click("[data-sort=name]")
    assert names(browser) == sorted(browser.ids, reverse=True)
    for key, down in (("recipe:seed", True), ("reward", True), ("updated", False), ("state", False), ("score", False)):
        browser.click(f"[data-sort='{key}']")
        assert browser.run("return document.activeElement.dataset.sort") == key, "the focus stays"
        if down:
            browser.click(f"[data-sort='{key}']")
        if down:
            assert names(browser)[0] == "seed", f"by {key}"
    browser.click("[data-sort='recipe:seed']")
    browser.click("[data-sort='recipe:seed']")
    before = names(browser)
    browser.copy_link()
    browser.wait("document.querySelector('table.runs tbody tr')", "the table")
    assert names(browser) == before
    assert browser.run("return document.querySelector('th[aria-sort=descending]').innerText").startswith("seed")


@pytest.mark.parametrize(
    ("words", "found"),
    [("dead", ["killed"]), ("seed=7", ["seed"]), ("it broke", ["failed"]), ("ALO", ["alone"]), ("zebra", [])],
)
def test_a_search_finds_names_states_errors_and_keys(browser: Browser, words: str, found: list[str]) -> None:
    open_table(browser)
    browser.choose("#run-search", words)
    assert names(browser) == found
    assert f"{len(found)} of {len(browser.ids)} runs" in browser.text(".tools")
    browser.copy_link()
    browser.wait("document.querySelector('table.runs tbody tr, .empty')", "the table")
    assert names(browser) == found


def test_a_row_opens_its_run_and_keys_go_through_rows(browser: Browser) -> None:
    open_table(browser)
    browser.press("j", "j")
    assert browser.run("return document.activeElement.dataset.run") == browser.ids[sorted(browser.ids)[1]]
    browser.press("\ue007")  # Enter
    browser.wait(f"location.hash.startsWith('#/{browser.ids[sorted(browser.ids)[1]]}/overview')", "the run")


def test_ticked_runs_are_compared(browser: Browser) -> None:
    open_table(browser)
    assert browser.run("return [...document.querySelectorAll('.tools button')][0].disabled")
    for run in ("plain", "alone"):
        browser.click(f"[data-run='{browser.ids[run]}'] input")
    browser.click(".tools button")
    browser.wait("location.hash.includes('/overview')", "the overview")
    assert set(browser.curves("reward")) == {"plain", "alone"}


def test_tags_and_a_note_are_kept_with_the_run_and_are_text(browser: Browser, folder: Path, attack: str) -> None:
    open_table(browser)
    try:
        browser.click(f"[data-run='{browser.ids['other']}'] .notes-cell button")
        browser.wait("document.querySelector('dialog.notes').open", "the editor")
        browser.choose("#tags", "best, <b>bold</b>, best")
        browser.choose("#note", attack)
        browser.click("dialog.notes button[type=submit]")
        browser.wait("!document.querySelector('dialog.notes').open", "the editor to close")
        browser.wait("document.querySelector('.notes-cell .badge')", "the tags")
        kept = json.loads((folder / "other" / "notes.json").read_text())
        assert kept == {"tags": ["best", "<b>bold</b>"], "note": attack}
        assert cell(browser, "other", "Tags and note").startswith("best <b>bold</b>")
        assert not browser.is_hacked()
        browser.choose("#run-search", "bold</b>")
        assert names(browser) == ["other"], "tags are searched"
        browser.click("[data-sort=name]")
        browser.click(f"[data-run='{browser.ids['other']}'] .notes-cell button")
        browser.choose("#tags", "x" * 50)
        browser.click("dialog.notes button[type=submit]")
        browser.wait("document.querySelector('dialog.notes').innerText.includes('at most 40 letters')", "the refusal")
        assert json.loads((folder / "other" / "notes.json").read_text()) == kept
    finally:
        (folder / "other" / "notes.json").unlink(missing_ok=True)
    assert [problem for problem in browser.problems() if "409" not in problem] == []


def test_the_table_notices_what_happens_to_runs(browser: Browser, folder: Path) -> None:
    open_table(browser)
    try:
        shutil.copytree(folder / "plain", folder / "later")
        browser.wait("document.querySelector('#page').innerText.includes('later')", "a new run")
    finally:
        shutil.rmtree(folder / "later")


def test_every_tab_can_be_reached_on_a_telephone(browser: Browser) -> None:
    browser.size(390, 800)
    open_table(browser)
    boxes = browser.run(
        "return [...document.querySelectorAll('#nav a')].map((one) => one.getBoundingClientRect())"
        ".map((box) => [box.left, box.right, box.top, box.bottom])"
    )
    assert len(boxes) == 10
    assert all(left >= 0 and right <= 390 and top >= 0 and bottom <= 800 for left, right, top, bottom in boxes)
    assert not browser.run("return document.documentElement.scrollWidth > innerWidth")
