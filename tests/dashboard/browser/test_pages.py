"""Every page in a real browser (chromium, headless), over runs that were really trained. `make browser` runs it."""

from __future__ import annotations

import json
import sqlite3
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

PAGES = ("overview", "metrics", "rollouts", "tokens", "data", "systems", "evaluations", "config", "effects")
LETTERS = {"effects": "f"}
"""Behind g, where it is not the first of the name."""
Browser = Any
"""The fixture's class, in conftest.py."""
Query = Callable[..., list[tuple[Any, ...]]]


@pytest.mark.parametrize("run", ["plain", "new"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_loads_without_a_complaint_of_the_console(browser: Browser, run: str, page: str) -> None:
    browser.open(run, page)
    if page in ("overview", "metrics", "data", "systems", "evaluations") and run == "plain":
        browser.wait("document.querySelector('.js-plotly-plot .main-svg')", "a chart")
    assert browser.text("#nav [aria-current]").lower() == page
    assert browser.count(".failure") == 0
    assert len(browser.text("#page")) > 40  # a run that has just begun says what would appear
    assert browser.problems() == []


def test_a_result_that_cannot_be_read_stands_at_the_top_with_its_reason(browser: Browser) -> None:
    browser.open("planted", "evaluations")
    browser.wait("document.querySelector('.unreadable')", "the files that cannot be read")
    shown = browser.text(".unreadable")
    assert "<img src=x onerror=window.hacked=4>.json" in shown, "its name is text"
    assert "it is not JSON (" in shown
    assert "No suite was run" not in browser.text("#page"), "a missing result is no missing evaluation"
    assert not browser.is_hacked()
    browser.open("plain", "evaluations")
    assert browser.count(".unreadable") == 0


def test_a_complaint_would_be_noticed(browser: Browser) -> None:
    browser.open("plain", "config")
    browser.run("console.error('planted')")
    assert any("planted" in problem for problem in browser.problems())


def test_an_unknown_run_and_an_unknown_page_are_said_in_words(browser: Browser) -> None:
    browser.open("plain", "config")
    browser.run("location.hash = '#/nobody/overview'")
    browser.wait("document.querySelector('#page').innerText.includes('No such run')", "the error")
    browser.run("location.hash = arguments[0]", f"#/{browser.ids['plain']}/nothing")
    browser.wait("document.querySelector('.failure')?.innerText.includes('There is no page')", "the error")


@pytest.mark.parametrize(
    ("name", "value", "condition"),
    [
        ("min_reward", "0.5", "t.score >= 0.5"),
        ("max_length", "2", "t.num_tokens <= 2"),
        ("step_to", "2", "t.step <= 2"),
        ("q", "b", "(t.text LIKE '%b%' OR g.prompt LIKE '%b%')"),
        ("task", "no such task", "0"),
    ],
)
def test_a_filter_shows_the_rollouts_that_fit(
    browser: Browser, query: Query, name: str, value: str, condition: str
) -> None:
    browser.open("plain", "rollouts")
    join = "FROM trajectories t JOIN groups g USING (stage, step, group_id)"
    every = query("plain", f"SELECT COUNT(*) {join}")[0][0]
    expected = query("plain", f"SELECT COUNT(*) {join} WHERE {condition}")[0][0]
    browser.wait(f"document.querySelectorAll('.row').length === {min(50, every)}", "all rollouts")
    browser.fill(name, value)
    if expected:
        browser.wait(f"document.querySelectorAll('.row').length === {min(50, expected)}", f"{expected} rollouts")
    else:
        browser.wait("document.querySelector('.empty')?.innerText.includes('No rollouts')", "the empty state")
    assert name in browser.run("return location.hash")  # the address can be sent to somebody else
    browser.run("[...document.querySelectorAll('form button')].at(-1).click()")
    browser.wait(f"document.querySelectorAll('.row').length === {min(50, every)}", "all rollouts again")


def test_a_row_opens_its_group_side_by_side(browser: Browser) -> None:
    browser.open("plain", "rollouts")
    browser.wait("document.querySelector('.row')", "rollouts")
    browser.press("j", "j", "k")
    assert browser.run("return [...document.querySelectorAll('.row')].indexOf(document.activeElement)") == 0
    browser.press("\ue007")  # Enter
    browser.wait("document.querySelectorAll('.member').length === 4", "four members")
    browser.press("\ue00c")  # Escape
    browser.wait("document.querySelectorAll('.member').length === 0", "the group to close")
    assert browser.problems() == []


def test_a_token_shows_what_the_run_recorded(browser: Browser, query: Query) -> None:
    from temper.runs.store.arrays import unpack_array

    browser.open("plain", "tokens")
    browser.wait("document.querySelectorAll('.token').length > 3", "tokens")
    stage, step, draw = query("plain", "SELECT stage, step, MIN(draw) FROM groups WHERE step = 6 AND stage = 1")[0]
    blobs = query(
        "plain",
        "SELECT token_ids, loss_mask, behavior_logprobs, advantages, codec FROM token_rows JOIN groups "
        "USING (stage, step, group_id) WHERE stage = ? AND step = ? AND draw = ? AND member = 0",
        *(stage, step, draw),
    )[0]
    names = ("token_ids", "loss_mask", "behavior_logprobs", "advantages")
    arrays = (unpack_array(blob, name, blobs[-1]) for blob, name in zip(blobs, names, strict=False))
    ids, mask, logprobs, advantages = arrays
    drawn = int(mask.argmax())
    assert browser.count(".token") == len(ids)
    browser.run("document.querySelectorAll('.token')[arguments[0]].focus()", drawn)
    facts = browser.run(
        "return Object.fromEntries([...document.querySelectorAll('.token-card dt')].map("
        "(name) => [name.innerText, name.nextSibling.innerText]))"
    )
    assert facts["Id"] == str(ids[drawn])
    assert float(facts["Log-prob, sampler"]) == pytest.approx(logprobs[drawn], abs=1e-4)
    assert float(facts["Advantage"]) == pytest.approx(advantages[drawn], abs=1e-3)
    assert {"Ratio", "Weights version", "Loss weight", "Entropy", "Log-prob, trainer"} <= set(facts)
    browser.press("\ue012")  # left: into the prompt
    browser.wait("document.querySelector('.token-card').innerText.includes('no (masked)')", "the token before")
    browser.run("[...document.querySelectorAll('.choice button')].at(-1).click()")
    colors = browser.run("return [...document.querySelectorAll('.token')].map((token) => token.style.backgroundColor)")
    assert [color != "transparent" for color in colors] == mask.astype(bool).tolist()


def test_new_steps_arrive_without_drawing_the_page_anew(browser: Browser, folder: Path) -> None:
    browser.open("planted", "overview")
    browser.wait("document.querySelector('.chart').data?.[0]?.x.length === 6", "the reward of six steps")
    browser.run("document.querySelector('.chart').isTheSame = true")
    browser.wait("document.querySelector('#live').dataset.state === 'running'", "the stream")
    connection = sqlite3.connect(folder / "planted" / "run.db")
    try:
        with connection:
            for table in ("steps", "metrics"):
                names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                copied = ", ".join("step + 1" if name == "step" else name for name in names)
                connection.execute(f"INSERT INTO {table} SELECT {copied} FROM {table} WHERE stage = 1 AND step = 6")
        browser.wait("document.querySelector('.chart').data[0].x.length === 7", "the seventh step")
        browser.wait("document.querySelector('.tiles').innerText.includes('step 7')", "the progress")
    finally:
        with connection:
            for table in ("steps", "metrics"):
                connection.execute(f"DELETE FROM {table} WHERE stage = 1 AND step = 7")
        connection.close()
    assert browser.run("return document.querySelector('.chart').isTheSame") is True
    assert browser.problems() == []


@pytest.mark.parametrize("page", PAGES)
def test_text_of_a_run_is_shown_and_never_run(browser: Browser, page: str, attack: str) -> None:
    browser.open("planted", page)
    if page == "rollouts":
        browser.wait("document.querySelector('.row')", "rollouts")
        browser.click(".row")
        browser.wait("document.querySelector('.member')", "the group")
    if page in ("overview", "data", "systems"):
        browser.wait("document.querySelector('.js-plotly-plot .main-svg')", "a chart")
    if page in ("overview", "rollouts", "tokens", "evaluations"):
        browser.wait(
            f"document.querySelector('#page').textContent.includes({json.dumps(attack)})", "the attack as text"
        )
    assert not browser.is_hacked()
    assert browser.problems() == []


def test_a_page_that_made_markup_of_text_would_be_caught(browser: Browser, attack: str) -> None:
    browser.open("planted", "rollouts")
    browser.run("document.querySelector('#page').innerHTML = arguments[0]", attack)
    assert browser.is_hacked()


def test_the_keyboard_reaches_every_page(browser: Browser) -> None:
    browser.open("plain", "overview")
    for place, page in enumerate(PAGES, start=1):
        browser.press(str(place))
        browser.wait(f"location.hash.includes('/{page}')", f"key {place}")
        browser.press("g", "o")
        browser.wait("location.hash.includes('/overview')", "g o")
        letter = LETTERS.get(page, page[0])
        browser.press("g", letter)
        browser.wait(f"location.hash.includes('/{page}')", f"g {letter}")
    browser.press("0")
    browser.wait("location.hash.startsWith('#/runs')", "key 0")
    browser.press("g", "o")
    browser.wait("location.hash.includes('/overview')", "g o, from the table back to the run")
    browser.press("g", "u")
    browser.wait("location.hash.startsWith('#/runs')", "g u")
    browser.press("3")
    browser.wait("document.querySelector('input[name=q]') && location.hash.includes('/rollouts')", "the search field")
    browser.press("/")
    assert browser.run("return document.activeElement.name") == "q"
    browser.press("2", "g", "o")  # in a field, keys are text
    assert browser.run("return document.activeElement.value") == "2go"
    browser.press("\ue00c", "?")
    browser.wait("document.querySelector('dialog').open", "the help")
    browser.press("\ue00c")
    browser.wait("!document.querySelector('dialog').open", "the help to close")


def test_everything_that_can_be_used_has_a_name(browser: Browser) -> None:
    script = """return [...document.querySelectorAll('button, select, input, a[href]')].filter((node) =>
        !(node.textContent.trim() || node.ariaLabel || node.labels?.[0]?.textContent.trim()))
        .map((node) => node.id || node.name)"""
    for page in PAGES:
        browser.open("plain", page)
        assert browser.run(script) == []


def test_dark_and_light_follow_the_system_and_the_reader(browser: Browser) -> None:
    def background() -> str:
        return browser.run("return getComputedStyle(document.body).backgroundColor")

    def prefer(value: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": value}]
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    prefer("light")
    browser.open("plain", "overview")
    light = background()
    prefer("dark")
    browser.open("plain", "overview")
    assert background() != light
    browser.click("#theme")
    assert background() == light
    browser.open("plain", "overview")
    assert background() == light  # remembered, against the system
    assert browser.problems() == []


def is_too_wide(browser: Browser) -> bool:
    return browser.run(
        "return document.documentElement.scrollWidth > innerWidth || document.body.scrollWidth > innerWidth"
    )


def test_nothing_sticks_out_of_a_telephone(browser: Browser) -> None:
    browser.size(390, 800)
    for run in ("plain", "planted"):
        for page in PAGES:
            browser.open(run, page)
            if page == "rollouts":
                browser.wait("document.querySelector('.row')", "rollouts")
                browser.click(".row")
                browser.wait("document.querySelector('.member')", "the group")
            browser.wait(
                "!document.querySelector('.chart') || document.querySelector('.main-svg, .chart .empty')", "charts"
            )
            assert not is_too_wide(browser), f"{run} {page}"
    browser.run("document.querySelector('#page').append(Object.assign(document.createElement('div'), "
                "{style: 'width: 800px', innerText: 'x'}))")  # fmt: skip
    assert is_too_wide(browser)


def test_runs_are_compared_in_one_chart_and_smoothed(browser: Browser) -> None:
    browser.open("plain", "overview")
    browser.wait("document.querySelector('.chart').data?.length === 1", "one curve")
    box = "[...document.querySelectorAll('.checks label')].find((one) => one.textContent === 'other')"
    browser.run(f"{box}.querySelector('input').click()")
    browser.wait("document.querySelector('.chart').data.length === 2", "two curves")
    assert browser.run("return document.querySelector('.chart').data.map((trace) => trace.name)") == ["plain", "other"]
    browser.run("const slider = document.querySelector('#smoothing'); slider.value = 0.9;"
                "slider.dispatchEvent(new Event('input'))")  # fmt: skip
    browser.wait("document.querySelector('.chart').data.length === 4", "each smoothed, with itself behind it")
    raw, smooth = browser.run("return document.querySelector('.chart').data.slice(0, 2).map((trace) => [...trace.y])")
    assert smooth[0] == pytest.approx(raw[0])  # it begins where the curve does
    assert max(smooth) - min(smooth) < max(raw) - min(raw)


def test_two_configurations_differ_in_what_was_changed(browser: Browser) -> None:
    browser.open("plain", "config", f"?with={browser.ids['other']}")
    browser.wait("document.querySelector('[aria-label=Differences]')", "the difference")
    cells = "[aria-label=Differences] tbody td:first-child"
    keys = browser.run(f"return [...document.querySelectorAll('{cells}')].map((cell) => cell.innerText)")
    assert [key for key in keys if "learning_rate" in key]
    assert all("learning_rate" in key for key in keys)


def test_a_server_that_is_gone_is_said_in_words(browser: Browser, folder: Path) -> None:
    browser.open("plain", "overview")
    browser.run("window.fetch = () => Promise.reject(new TypeError('planted'))")
    browser.press("4")
    browser.wait("document.querySelector('.failure')?.innerText.includes('cannot be reached')", "the error")


def test_rollouts_show_their_prompts_and_how_many_there_are(browser: Browser, query: Query) -> None:
    browser.open("plain", "rollouts")
    browser.wait("document.querySelector('.row')", "rollouts")
    (total,) = query("plain", "SELECT COUNT(*) FROM trajectories")[0]
    assert f"50 of {total} rollouts" in browser.text(".pages")
    asked, best = query(
        "plain",
        "SELECT g.prompt, (SELECT MAX(score) FROM trajectories) FROM trajectories t "
        "JOIN groups g USING (stage, step, group_id) WHERE step = 6 ORDER BY g.draw, t.member LIMIT 1",
    )[0]
    row = browser.run("return [...document.querySelector('.row').children].map((cell) => cell.innerText)")
    assert json.loads(asked)[-1]["content"] in row
    browser.fill("min_reward", str(best / 2))
    (some,) = query("plain", "SELECT COUNT(*) FROM trajectories WHERE score >= ?", best / 2)[0]
    assert 0 < some < total
    browser.wait(f"document.querySelector('.pages')?.innerText.includes('of {some} rollouts')", "the total of a filter")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_group_is_opened_below_the_header_and_is_in_the_link(browser: Browser, width: int) -> None:
    browser.size(width, 700)
    browser.open("plain", "rollouts")
    browser.wait("document.querySelector('.row')", "rollouts")
    browser.run("document.querySelectorAll('.row')[40].scrollIntoView(); "
                "document.addEventListener('scrollend', () => { window.scrolled = true; });"
                "document.querySelectorAll('.row')[40].click()")  # fmt: skip
    browser.wait("document.querySelector('.member') && window.scrolled", "the group")
    for part in ("h2", ".message"):
        seen = (
            f"const node = document.querySelector('[aria-label=Group] {part}');"
            "const box = node.getBoundingClientRect();"
            "return node.contains(document.elementFromPoint(box.left + 20, box.top + 5))"
        )
        browser.wait(f"(() => {{ {seen} }})()", f"{part} of the group in sight, below the header")
    assert browser.text(".member b").startswith("Member 0: reward ")
    browser.copy_link()
    browser.wait("document.querySelector('.member')", "the group of a copied link")
    browser.press("\ue00c")  # Escape
    browser.wait("!document.querySelector('.member') && !location.hash.includes('group=')", "the group to close")


def test_the_colour_of_tokens_is_in_the_link(browser: Browser) -> None:
    browser.open("plain", "tokens")
    browser.wait("document.querySelectorAll('.token').length > 3", "tokens")
    browser.run("[...document.querySelectorAll('.choice button')].at(-1).click()")
    browser.copy_link()
    browser.wait("document.querySelectorAll('.token').length > 3", "tokens")
    assert browser.run("return [...document.querySelectorAll('.choice button')].at(-1).ariaPressed") == "true"


def test_ties_among_the_hardest_prompts_are_said(browser: Browser) -> None:
    browser.open("plain", "data")
    browser.wait("document.querySelector('[aria-label=\"Hardest prompts\"] .row')", "prompts")
    with urllib.request.urlopen(f"{browser.address}/api/runs/{browser.ids['plain']}/data", timeout=10) as answer:
        data = json.load(answer)
    more = {side: data["ties"][side]["all"] > data["ties"][side]["listed"] for side in ("hardest", "easiest")}
    assert any(more.values()), "24 groups of prompts with one or two letters"
    told = browser.run("return [...document.querySelectorAll('.ties')].map((one) => one.innerText)")
    assert len(told) == sum(more.values())
    side = next(side for side, is_tied in more.items() if is_tied)
    assert told[0].startswith(f"{data['ties'][side]['all']} prompts have the pass rate")


def test_prompts_are_sorted_searched_and_opened(browser: Browser, query: Query) -> None:
    names = query("plain", "SELECT task_id, MAX(rate) FROM prompts GROUP BY task_id ORDER BY 2 DESC")
    browser.open("plain", "data")
    rows = "document.querySelectorAll('[aria-label=\"Prompts\"] .row')"
    browser.wait(f"{rows}.length === {min(50, len(names))}", "all prompts")
    for _ in range(2):
        browser.click('[data-sort="rate"]')  # as it was: ascending; so the first click turns it round
        browser.wait(f"{rows}.length > 0", "prompts in another order")
    browser.click('[data-sort="attempts"]')
    browser.wait("location.hash.includes('sort=attempts')", "the order in the address")
    browser.choose("#prompt-search", names[0][0])
    browser.wait("document.querySelector('.prompt-list').innerText.includes('that fit')", "the search")
    assert names[0][0] in browser.text('[aria-label="Prompts"] .row')
    browser.copy_link()
    browser.wait(f"{rows}.length > 0 && {rows}.length < {len(names)}", "the same search from the link")
    browser.click('[aria-label="Prompts"] .row')
    browser.wait("document.querySelectorAll('.member').length === 4", "its newest group")
    assert browser.problems() == []


def test_side_effects_are_filtered_turned_over_and_lead_to_their_episode(browser: Browser, query: Query) -> None:
    (episodes,) = query("planted", "SELECT COUNT(*) FROM trajectories WHERE events IS NOT NULL")[0]
    browser.open("planted", "effects")
    rows = "document.querySelectorAll('.row')"
    browser.wait(f"{rows}.length === {min(50, 3 * episodes)}", "calls of all kinds")
    assert "<script>window.hacked=1</script>" in browser.text(".row"), "what a model wrote is text"
    browser.choose("[name=outcome]", "described")
    told = "[...document.querySelectorAll('.row .badge')].map((one) => one.textContent)"
    browser.wait(f"{told}.length && {told}.every((one) => one === 'described')", "described calls alone")
    assert browser.count(".row") == min(50, episodes)
    assert "outcome=described" in browser.hash()
    browser.choose("[name=tool]", "no such tool")
    browser.wait("document.querySelector('.empty')?.innerText.includes('No call fits')", "that none fits")
    browser.choose("[name=tool]", "pay<scr")
    browser.wait(f"{rows}.length > 0", "calls of a tool")
    browser.copy_link()
    browser.wait(
        f"{rows}.length > 0 && document.querySelector('[name=tool]').value === 'pay<scr'", "the same from the link"
    )
    browser.click(".row")
    browser.wait("location.hash.includes('/tokens') && document.querySelector('.event')", "the episode")
    assert not browser.is_hacked()
    assert browser.problems() == []
    browser.open("plain", "effects")
    assert "Nothing was changed" in browser.text("#page")


@pytest.mark.parametrize(
    ("run", "page"),
    [("planted", "effects"), ("plain", "data"), ("plain", "rollouts")],
    ids=["side effects", "prompts", "rollouts"],
)
def test_a_list_whose_address_asks_for_an_impossible_part_begins_at_its_start(
    browser: Browser, run: str, page: str
) -> None:
    for offset in ("-5", "0.5", "1e999", "x"):
        browser.open(run, page, f"?offset={offset}")
        browser.wait("document.querySelector('.pages [role=status]')", "a list")
        assert browser.text(".pages [role=status]").startswith("1")
        assert browser.run("return document.querySelector('[data-key=previous]').disabled")
    assert browser.problems() == []


@pytest.mark.parametrize(("run", "page"), [("planted", "effects"), ("plain", "rollouts")])
def test_a_list_is_turned_over_and_back_and_its_link_shows_the_same_part(browser: Browser, run: str, page: str) -> None:
    told = "document.querySelector('.pages [role=status]').innerText"
    browser.open(run, page)
    browser.wait(f"{told}.startsWith('1')", "the first part")
    browser.click("[data-key=next]")
    browser.wait(f"{told}.startsWith('51')", "the second part")
    assert "offset=50" in browser.hash()
    browser.copy_link()
    browser.wait(f"{told}.startsWith('51')", "the same from the link")
    browser.click("[data-key=previous]")
    browser.wait(f"{told}.startsWith('1') && !location.hash.includes('offset')", "the first part again")
    assert browser.problems() == []


def test_pass_rates_of_prompts_are_drawn_as_shares_of_the_whole(browser: Browser) -> None:
    browser.open("plain", "data")
    curves = browser.curves("prompts_by_pass_rate")
    sums = [sum(values) for values in zip(*(curve["y"] for curve in curves.values()), strict=True)]
    assert sums == pytest.approx([1.0] * 6)
    assert browser.count('[data-chart="what_draws_passed_over"][hidden]') == 1, "this recipe chooses nothing"


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_of_data_fits_its_width(browser: Browser, width: int) -> None:
    browser.size(width)
    browser.open("plain", "data")
    browser.wait("document.querySelector('[aria-label=\"Prompts\"] .row')", "prompts")
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_no_chart_of_the_system_mixes_units(browser: Browser) -> None:
    browser.open("plain", "systems")
    browser.wait("[...document.querySelectorAll('.chart')].every((one) => one.chart.traces)", "charts")
    with urllib.request.urlopen(f"{browser.address}/api/runs/{browser.ids['plain']}/systems", timeout=10) as answer:
        units = json.load(answer)["units"]
    charts = browser.run(
        "return [...document.querySelectorAll('.chart')].map((one) => "
        "[one.chart.title, one.chart.y, one.chart.layout.showlegend ?? true, one.chart.traces.map((t) => t.name)])"
    )
    by_title = {title: (unit, legend, names) for title, unit, legend, names in charts}
    shown = [name.removeprefix("sys/").replace("_", " ") for name, unit in units.items() if unit == "share"]
    assert set(by_title["Shares"][2]) <= set(shown)
    assert by_title["Requests in flight"][2] == ["inflight"]
    assert by_title["Staleness over the steps"] == ("versions", True, ["mean age", "95 of 100 are not older", "oldest"])
    assert by_title["Ages of trained tokens"][2] == ["0 versions"]
    assert all(unit for unit, _, _ in by_title.values()), "every axis says what it counts"


def test_charts_of_controls_are_there_where_controls_did_something(browser: Browser) -> None:
    shown = (
        "return Object.fromEntries([...document.querySelectorAll('.chart')].filter((one) => one.checkVisibility())"
        ".map((one) => [one.chart.title, one.chart.traces.map((t) => t.name)]))"
    )
    drawn = "[...document.querySelectorAll('.chart')].every((one) => one.chart.traces)"
    browser.open("other", "systems")
    browser.wait(drawn, "charts")
    charts = browser.run(shown)
    assert charts["Groups that are late"] == [
        "a later one is trained",
        "cut since the step before",
        "wait for a late step",
    ]
    assert charts["Late steps"] == ["late step"]
    assert "Interrupted answers" not in charts
    browser.open("plain", "systems")
    browser.wait(drawn, "charts")
    charts = browser.run(shown)
    assert "Throughput" in charts
    assert not {"Groups that are late", "Late steps"} & set(charts)


def test_the_recipe_begins_with_what_it_changes(browser: Browser) -> None:
    browser.open("plain", "config")
    table = "[aria-label='Keys that differ from the defaults']"
    browser.wait(f'document.querySelector("{table} tbody tr")', "the changes")
    rows = browser.run(
        f'return [...document.querySelectorAll("{table} tbody tr")].map((row) => '
        "[...row.children].map((cell) => cell.innerText))"
    )
    assert ["rl", "optim.learning_rate", "0.001", "0.000001"] in rows
    assert ["all", "sampling.max_new_tokens", "4", "64"] in rows
    assert not [row for row in rows if row[1] == "optim.beta1"], "a default"
    assert browser.run("return document.querySelector('.toml').checkVisibility()") is False, "all keys on demand"
    assert browser.run("return document.documentElement.scrollHeight") < 2500
    browser.click(".stack > :last-child summary")
    browser.wait("document.querySelector('.toml').checkVisibility()", "every key")
