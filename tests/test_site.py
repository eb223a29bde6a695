"""The site is docs/, and nothing on it needs a network or an address that is not there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_link_out_of_docs_leads_to_a_copy_on_the_site(hooks: ModuleType) -> None:
    home = PurePosixPath("docs/tutorials/agent.md")
    text = "[`run`](../../temper/loop.py) [rewards](../rewards.md#math) [top](#top) [paper](https://arxiv.org/abs/1)"
    assert hooks.lead_into_site(text, home, "tutorials/agent.md") == (
        "[`run`](../source/temper/loop.py.md) [rewards](../rewards.md#math) [top](#top) [paper](https://arxiv.org/abs/1)"
    )


def test_a_link_of_a_copied_page_leads_back_into_the_site(hooks: ModuleType) -> None:
    readme = hooks.lead_into_site(
        "![it](docs/demo.svg) [d](recipes/demo.toml)", PurePosixPath("README.md"), "source/README.md.md"
    )
    assert readme == "![it](../demo.svg) [d](recipes/demo.toml.md)"


def test_a_link_to_nothing_and_a_link_in_code_stay_as_they_are(hooks: ModuleType) -> None:
    text = "[gone](../nothing.py)\n```\n[code](../README.md)\n```\n[`x`](../README.md)"
    led = hooks.lead_into_site(text, PurePosixPath("docs/a.md"), "a.md")
    assert led == "[gone](../nothing.py)\n```\n[code](../README.md)\n```\n[`x`](source/README.md.md)"


def test_a_copied_file_is_whole_and_a_folder_lists_its_files(hooks: ModuleType) -> None:
    assert (ROOT / "recipes/demo.toml").read_text() in hooks.copy_of("recipes/demo.toml")
    assert "- [chat.py](examples/chat.py)" in hooks.copy_of("examples")


def test_lists_and_tables_after_a_paragraph_get_a_blank_line_and_code_does_not(hooks: ModuleType) -> None:
    assert hooks.space_blocks("Words:\n- one\ngoes on\n- two") == "Words:\n\n- one\ngoes on\n- two"
    assert hooks.space_blocks("Words:\n| a |\n|---|") == "Words:\n\n| a |\n|---|"
    code = "```\nx\n- y\n```"
    assert hooks.space_blocks(code) == code


@pytest.mark.heavy
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 80
    loaded = re.compile(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^\s\">]*")
    assert [(page.name, found) for page in pages for found in loaded.findall(page.read_text())] == []
