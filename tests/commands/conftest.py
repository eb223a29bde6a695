"""Shared by tests of commands: a suite small enough to be played in a second."""

from __future__ import annotations

from pathlib import Path

import pytest

SUITE = """
answer = "text"

[data]
generator = "spell_backward"
options = {min_letters = 1, max_letters = 2}
size = 6

[[reward]]
kind = "edit"

[decoding]
temperature = 1.0
samples = 2
max_new_tokens = 4
"""


@pytest.fixture
def suite_text() -> str:
    return SUITE


@pytest.fixture
def suite(suite_text: str, tmp_path: Path) -> str:
    """The file of the suite."""
    path = tmp_path / "letters.toml"
    path.write_text(suite_text)
    return str(path)
