"""The pictures of docs/dashboard: pages of `temper watch` in chromium, light, dark or as narrow as a telephone.

    python benchmarks/pictures.py runs/agent tokens docs/dashboard/tokens-dark.png --dark --click Mask
    python benchmarks/pictures.py runs/agent overview docs/dashboard/overview-390.png --width 390

Needs the packages of `make browser`, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_SECONDS = 60.0
DRAW_SECONDS = 6.0
"""For the page and its charts; plotly loads when the first of them is seen."""

PRESS = "[...document.querySelectorAll('button')].find(one => one.textContent.trim() === arguments[0]).click()"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("page", help="overview, metrics, rollouts, tokens, data, systems, evaluations, config")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--click", default="", help="the text of a button to press before the picture is taken")
    parser.add_argument("--port", type=int, default=8790)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "temper", "watch", str(arguments.run), "--port", str(arguments.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        take(arguments, f"http://127.0.0.1:{arguments.port}")
    finally:
        server.terminate()
        server.wait(timeout=10)


def take(arguments: argparse.Namespace, address: str) -> None:
    from selenium import webdriver

    wait_for(address)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if arguments.dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": arguments.width, "height": arguments.height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get(f"{address}/#/{run_id(address, arguments.run)}/{arguments.page}")
        time.sleep(DRAW_SECONDS)
        if arguments.click:
            driver.execute_script(PRESS, arguments.click)
            time.sleep(1.0)
        driver.save_screenshot(str(arguments.picture))
    finally:
        driver.quit()
    print(f"{arguments.picture}: {arguments.width} x {arguments.height}")


def run_id(address: str, run: Path) -> str:
    """What the page calls the run in its links."""
    with urllib.request.urlopen(f"{address}/api/runs", timeout=10) as answer:
        runs = json.load(answer)
    return next(one["id"] for one in runs if one["name"] == run.name)


def wait_for(address: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(address, timeout=2)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"{address} does not answer")


if __name__ == "__main__":
    main()
