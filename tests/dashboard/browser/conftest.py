"""Runs that were really trained, the dashboard served to them, and chromium to look at it. `make browser` runs it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from temper.dashboard.registry import Registry
from temper.dashboard.server import make_app, make_server
from temper.listening import listen
from temper.runs.state import ended_row
from temper.runs.store.schema import STEP_TABLES, prepare

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

[[reward]]
kind = "exact"
weight = 0.5

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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs made of one: as trained ("plain"), with another learning rate and a control ("other") or another seed
    ("seed", whose rewards are 0.5 higher), without its imitation ("alone", whose proximal policy is the sampler),
    failed, killed, with planted attacks, and one just begun ("new")."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "plain.toml"
    recipe.write_text(RECIPE)
    command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(folder / "plain")]
    trained = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert trained.returncode == 0, trained.stderr
    for name in ("other", "seed", "alone", "failed", "killed", "planted"):
        shutil.copytree(folder / "plain", folder / name)
    change_recipe(folder / "other", "learning_rate = 0.001", "learning_rate = 0.0005")
    for name, value in (("flow/cut", 2), ("flow/put_off", 3), ("flow/overtaken", 1), ("flow/late_step", 1)):
        rows = f"SELECT stage, step, '{name}', {value} FROM metrics WHERE name = 'sys/step_time' AND stage = 1"
        write(folder / "other", f"INSERT INTO metrics (stage, step, name, value) {rows}")
    change_recipe(folder / "seed", "\nseed = 0\nmirrors", "\nseed = 7\nmirrors")
    write(folder / "seed", "UPDATE metrics SET value = value + 0.5 WHERE name = 'reward/mean'")
    drop_imitation(folder / "alone")
    make_behavior_proximal(folder / "alone")
    write(folder / "plain", "UPDATE metrics SET value = value + 0.01 WHERE name = 'policy/kl_old_k3'")
    end(folder / "failed", *ended_row("failed", f"ValueError: it broke {ATTACK}"))
    end(folder / "killed", "heartbeat", repr(time.time() - 3600))
    change_recipe(folder / "planted", "keep = 2", "keep = 3")
    plant(folder / "planted")
    (folder / "new").mkdir()
    (folder / "new" / "config.toml").write_text('name = "new"\n')
    connection = sqlite3.connect(folder / "new" / "run.db", isolation_level=None)
    prepare(connection)
    connection.close()
    return folder


def write(folder: Path, *statements: str) -> None:
    with sqlite3.connect(folder / "run.db") as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def change_recipe(folder: Path, before: str, after: str) -> None:
    config = folder / "config.toml"
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after))


def drop_imitation(folder: Path) -> None:
    """Leaves the RL stage, as the first of a run without any other."""
    tables = (*STEP_TABLES, "stages")
    write(folder, *(f"DELETE FROM {table} WHERE stage = 0" for table in tables))
    write(folder, *(f"UPDATE {table} SET stage = 0" for table in tables))
    config = folder / "config.toml"
    config.write_text("[[stage]]" + config.read_text().split("[[stage]]")[2])


def make_behavior_proximal(folder: Path) -> None:
    """As if the recipe had taken the sampler's log-probabilities for the proximal policy's: two metrics are one."""
    change_recipe(folder, "[stage.objective]\n", '[stage.objective]\nproximal = "behavior"\n')
    same = "m.name = 'mismatch/kl_k3' AND m.stage = metrics.stage AND m.step = metrics.step"
    write(
        folder,
        f"UPDATE metrics SET value = (SELECT value FROM metrics m WHERE {same}) WHERE name = 'policy/kl_old_k3'",
    )


def end(folder: Path, name: str, value: str) -> None:
    """A run that did not reach its end, with one more row about itself."""
    write(folder, "DELETE FROM meta WHERE name = 'finished'")
    with sqlite3.connect(folder / "run.db") as connection:
        connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
    connection.close()


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
        connection.execute("UPDATE prompts SET task_id = ? || task_id, source = ?", (ATTACK, ATTACK))
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
        kinds = ("side_effect", "described", "denied", "tool_call")
        done = [{"turn": 0, "kind": kind, "name": f"pay{ATTACK}", "detail": ATTACK, "cost": 0.0} for kind in kinds]
        connection.execute("UPDATE trajectories SET events = ? WHERE member < 2", (json.dumps(done),))
    connection.close()


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
        """run "": the table of all."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}/#/{f'{self.ids[run]}/{page}' if run else page}{query}")
        self.wait("document.querySelector('#page .page > *') && !document.querySelector('.failure')", f"page {page}")

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def wait(self, condition: str, what: str) -> None:
        """Until the JavaScript expression is true. One that fails is not true yet: what it reads may not be there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.run(f"try {{ return Boolean({condition}) }} catch {{ return false }}"):
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

    def hash(self) -> str:
        """What stands in the address behind the #."""
        return str(self.run("return location.hash"))

    def copy_link(self) -> None:
        """Opens what is in the address in an empty page, as somebody does who got the link."""
        address = self.driver.current_url
        self.driver.get("about:blank")
        self.driver.get(address)
        self.wait("document.querySelector('#page .page > *')", "the page of a copied link")

    def choose(self, selector: str, value: str) -> None:
        self.run(
            "const field = document.querySelector(arguments[0]); field.value = arguments[1];"
            "field.dispatchEvent(new Event('input', {bubbles: true}));"
            "field.dispatchEvent(new Event('change', {bubbles: true}))",
            selector,
            value,
        )

    def curves(self, chart: str) -> dict[str, dict[str, Any]]:
        """What a chart draws, by name; edges of bands as "edge 0", "edge 1"."""
        holder = f"document.querySelector('[data-chart=\"{chart}\"] .chart')"
        self.wait(f"{holder}?.chart.traces?.length", f"curves of {chart}")
        return self.run(
            f"return Object.fromEntries({holder}.chart.traces.map((trace, at) => "
            "[trace.meta === 'edge' ? `edge ${at}` : trace.name, {x: trace.x, y: trace.y}]))"
        )

    def title(self, chart: str, axis: str) -> str:
        """Title of an axis as drawn."""
        holder = f"document.querySelector('[data-chart=\"{chart}\"] .chart')"
        self.run(f"{holder}.scrollIntoView({{block: 'center'}})")
        self.wait(f"{holder}.querySelector('.{axis}title')", f"title of {axis}")
        return str(self.run(f"return {holder}.querySelector('.{axis}title').textContent"))

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
def downloads(chromium: Any, tmp_path: Path) -> Path:
    """Folder that files are downloaded to."""
    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    chromium.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
    return tmp_path


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


@pytest.fixture(scope="session")
def attack() -> str:
    """Text that would run if it were taken for markup."""
    return ATTACK


Query = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture(scope="session")
def query(folder: Path) -> Query:
    """query(run, text, *values): rows of its run.db."""

    def rows(run: str, text: str, *values: Any) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(f"file:{folder / run}/run.db?mode=ro", uri=True)
        try:
            return connection.execute(text, values).fetchall()
        finally:
            connection.close()

    return rows
