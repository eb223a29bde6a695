"""Messages that the page explains are messages that Temper says."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.commands.pages.troubleshooting import SECTIONS, Trouble, troubleshooting_text
from temper.runs.alarms.rules import RULES

TEMPER = Path(__file__).parents[3] / "temper"
TROUBLES = [trouble for troubles in SECTIONS.values() for trouble in troubles]


@pytest.mark.parametrize("trouble", [one for one in TROUBLES if one.said], ids=lambda one: one.said)
def test_a_message_on_the_page_stands_in_the_code(trouble: Trouble) -> None:
    pages = TEMPER / "commands" / "pages"
    files = [path for path in TEMPER.rglob("*.py") if pages not in path.parents]
    assert any(trouble.said in path.read_text() for path in files), "it says something else now"


def test_every_entry_has_a_symptom_a_cause_and_a_cure() -> None:
    assert [one for one in TROUBLES if bool(one.said) == bool(one.seen) or not one.cause or not one.cure] == []


def test_every_alarm_is_on_the_page() -> None:
    text = troubleshooting_text()
    assert [rule.name for rule in RULES if f"| `{rule.name}`: " not in text] == []
