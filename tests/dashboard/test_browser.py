"""The dashboard in a real browser (chromium, headless), over runs that were really trained. `make browser` runs it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from temper.dashboard.registry import Registry
from temper.dashboard.server import make_app, make_server
from temper.listening import listen
from temper.runs.store.schema import prepare

pytestmark = pytest.mark.browser

PAGES = ("overview", "rollouts", "tokens", "data", "systems", "evaluations", "config")
PATIENCE_SECONDS = 20.0
ATTACK = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2> &lt;b&gt; & \"quoted\" 'text'"
RECIPE = """
name = "tiny"
sampling = { max_new_tokens = 4 }
model = { new = { layers = 1, width = 32, heads = 2, kv_heads = 1, mlp_width = 64, context = 32 } }
heldout = { generator = "spell_backward", seed = 2, size = 8, options = { min_letters = 1, max_letters = 2 } }

[alarms]
readiness = "off"

[[train]]
generator = "spell_backward"
seed = 1
options = { min_letters = 1, max_letters = 2 }

[[reward]]
kind = "edit"

[[stage]]
kind = "sft"
steps = 3
trainer = { examples_per_step = 8 }

[[stage]]
kind = "rl"
steps = 6
optim = { learning_rate = 1e-3 }
rollout = { groups_per_step = 4, group_size = 4 }
evaluation = { every = 3 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs: as trained, with another learning rate in its recipe, with planted attacks, and one just begun."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "plain.toml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(folder / "plain")]
    trained = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    for name in ("other", "planted"):
        shutil.copytree(folder / "plain", folder / name)
    config = folder / "other" / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.001", "learning_rate = 0.0005"))
    plant(folder / "planted")
    (folder / "new").mkdir()
    (folder / "new" / "config.toml").write_text('name = "new"\n')
    connection = sqlite3.connect(folder / "new" / "run.db", isolation_level=None)
    prepare(connection)
    connection.close()
    return folder


def plant(folder: Path) -> None:
    """Attacks in every text that a policy, a task or a rule can write, in a run that is not finished."""
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "<img src=x onerror=window.hacked=4>.json").write_text("{")
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"a"', '"<img src=x onerror=window.hacked=3>"'))
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("DELETE FROM meta WHERE name = 'finished'")
        connection.execute("UPDATE meta SET value = '9e9' WHERE name = 'heartbeat'")
        connection.execute("UPDATE stages SET name = name || '<i>s</i>'")
        connection.execute("UPDATE trajectories SET text = ?, reason = ?, messages = NULL", (ATTACK, ATTACK))
        prompt = json.dumps([{"role": "user", "content": ATTACK}])
        connection.execute("UPDATE groups SET prompt = ?, answer = ?, task_id = ? || task_id", (prompt, ATTACK, ATTACK))
        alarm = (1, 3, time.time(), "rule" + ATTACK, "warn", 0.5, ATTACK, ATTACK, ATTACK)
        connection.execute(
            "INSERT INTO alarms (stage, step, time, rule, level, value, text, meaning, advice) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            alarm,
        )
        audit = (1, 3, "greedy", 0, "top", "task", prompt, ATTACK, 1.0, 0.0)
        connection.execute(
            "INSERT OR REPLACE INTO audits (stage, step, evaluation, place, kind, task_id, prompt, text, reward, "
            "heldout) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            audit,
        )
        connection.execute("INSERT INTO events VALUES (?, 'warning', ?)", (time.time(), ATTACK))
    connection.close()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    app, streams = make_app(Registry([folder]), "127.0.0.1")
    server = make_server(app, streams)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=15)
    bound.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from selenium import webdriver

    programs = [shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")]
    if None in programs:
        pytest.fail("chromium or chromedriver is missing: apt-get install -y chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    driver.set_page_load_timeout(PATIENCE_SECONDS)
    yield driver
    driver.quit()


class Browser:
    """A page and what a reader does with it. Every wait has a deadline."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address
        with urllib.request.urlopen(f"{address}/api/runs", timeout=10) as answer:
            self.ids = {run["name"]: run["id"] for run in json.load(answer)}

    def open(self, run: str, page: str, query: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/#/{self.ids[run]}/{page}{query}")
        self.wait("document.querySelector('#page .page > *') && !document.querySelector('.failure')", f"page {page}")

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait(self, condition: str, what: str) -> None:
        """Until the JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < deadline, f"waited in vain for {what}: {self.text('body')[:600]}"
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def count(self, selector: str) -> int:
        return self.run("return document.querySelectorAll(arguments[0]).length", selector)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()  # in one go: g and its letter belong together

    def fill(self, name: str, value: str) -> None:
        script = (
            "const field = document.querySelector(`form [name=${arguments[0]}]`); field.value = arguments[1];"
            "field.dispatchEvent(new Event('change', {bubbles: true}))"
        )
        self.run(script, name, value)

    def problems(self) -> list[str]:
        """What the console complained of since the last look."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def is_hacked(self) -> bool:
        """Whether text of a run became markup: a script ran, or elements appeared that no page of ours makes."""
        return bool(
            self.run("return window.hacked || document.querySelectorAll('#page img, #page script, #page i').length")
        )

    def size(self, width: int, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.fixture
def browser(chromium: Any, server: str) -> Iterator[Browser]:
    browser = Browser(chromium, server)
    browser.size(1280)
    browser.problems()
    yield browser
    chromium.get(server)  # storage belongs to an address: it cannot be emptied from a blank page
    browser.run("localStorage.clear()")
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    chromium.get("about:blank")


def query(folder: Path, text: str, *values: Any) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)
    try:
        return connection.execute(text, values).fetchall()
    finally:
        connection.close()


@pytest.mark.parametrize("run", ["plain", "new"])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_loads_without_a_complaint_of_the_console(browser: Browser, run: str, page: str) -> None:
    browser.open(run, page)
    if page in ("overview", "data", "systems", "evaluations") and run == "plain":
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
    browser: Browser, folder: Path, name: str, value: str, condition: str
) -> None:
    browser.open("plain", "rollouts")
    join = "FROM trajectories t JOIN groups g USING (stage, step, group_id)"
    every = query(folder / "plain", f"SELECT COUNT(*) {join}")[0][0]
    expected = query(folder / "plain", f"SELECT COUNT(*) {join} WHERE {condition}")[0][0]
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


def test_a_token_shows_what_the_run_recorded(browser: Browser, folder: Path) -> None:
    from temper.runs.store.arrays import unpack_array

    browser.open("plain", "tokens")
    browser.wait("document.querySelectorAll('.token').length > 3", "tokens")
    stage, step, draw = query(
        folder / "plain", "SELECT stage, step, MIN(draw) FROM groups WHERE step = 6 AND stage = 1"
    )[0]
    blobs = query(
        folder / "plain",
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
def test_text_of_a_run_is_shown_and_never_run(browser: Browser, page: str) -> None:
    browser.open("planted", page)
    if page == "rollouts":
        browser.wait("document.querySelector('.row')", "rollouts")
        browser.click(".row")
        browser.wait("document.querySelector('.member')", "the group")
    if page in ("overview", "data", "systems"):
        browser.wait("document.querySelector('.js-plotly-plot .main-svg')", "a chart")
    if page in ("overview", "rollouts", "tokens", "evaluations"):
        browser.wait(
            f"document.querySelector('#page').textContent.includes({json.dumps(ATTACK)})", "the attack as text"
        )
    assert not browser.is_hacked()
    assert browser.problems() == []


def test_a_page_that_made_markup_of_text_would_be_caught(browser: Browser) -> None:
    browser.open("planted", "rollouts")
    browser.run("document.querySelector('#page').innerHTML = arguments[0]", ATTACK)
    assert browser.is_hacked()


def test_the_keyboard_reaches_every_page(browser: Browser) -> None:
    browser.open("plain", "overview")
    for place, page in enumerate(PAGES, start=1):
        browser.press(str(place))
        browser.wait(f"location.hash.includes('/{page}')", f"key {place}")
        browser.press("g", "o")
        browser.wait("location.hash.includes('/overview')", "g o")
        browser.press("g", page[0])
        browser.wait(f"location.hash.includes('/{page}')", f"g {page[0]}")
    browser.press("2")
    browser.wait("document.querySelector('input[type=search]')", "the search field")
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
    browser.wait("document.querySelector('table')", "the difference")
    keys = browser.run("return [...document.querySelectorAll('tbody tr td:first-child')].map((cell) => cell.innerText)")
    assert [key for key in keys if "learning_rate" in key]
    assert all("learning_rate" in key for key in keys)


def test_a_server_that_is_gone_is_said_in_words(browser: Browser, folder: Path) -> None:
    browser.open("plain", "overview")
    browser.run("window.fetch = () => Promise.reject(new TypeError('planted'))")
    browser.press("4")
    browser.wait("document.querySelector('.failure')?.innerText.includes('cannot be reached')", "the error")
