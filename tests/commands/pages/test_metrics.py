"""docs/metrics.md is what the tables say."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.commands.pages.metrics import explain, page_text, write_page
from temper.runs.metrics import METRICS, describe
from temper.runs.time_split import PHASES

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_in_the_repository_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page_text(), "run: temper metrics --page docs"


def test_the_page_names_every_metric_once_and_every_phase(tmp_path: Path) -> None:
    text = write_page(tmp_path).read_text()
    for metric in METRICS:
        assert text.count(f"\n| `{metric.name}` |") == 1
    assert all(f"| `{phase}` |" in text for phase in PHASES)


def test_every_row_has_as_many_cells_as_its_header() -> None:
    tables = [block.splitlines() for block in page_text().split("\n\n") if block.startswith("| ")]
    assert len(tables) >= 8
    for table in tables:
        cells = [line.replace("\\|", "").count("|") for line in table]
        assert set(cells) == {cells[0]}


def test_one_metric_is_explained_with_unit_and_mask() -> None:
    metric = describe("data/p_hist/03")
    assert metric is not None
    assert explain(metric).startswith("data/p_hist/*: Groups by share of responses")
    assert explain(metric).endswith("ten shares, /00 to /09 over generated groups with scores, in share")


def test_a_changed_definition_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PHASES, "rollout", "something else")
    assert PAGE.read_text() != page_text()
