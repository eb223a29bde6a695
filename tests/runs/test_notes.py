"""Tags and notes that people keep with a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from temper.errors import UserError
from temper.runs.notes import FILE, RunNotes, make_notes, read_notes, write_notes


def test_what_was_written_comes_back_and_nothing_else_lies_there(tmp_path: Path) -> None:
    assert read_notes(tmp_path) == RunNotes()
    notes = make_notes(["  best  of all ", "best of all", "", "ü"], " <b>good</b>\nline two ")
    write_notes(tmp_path, notes)
    assert read_notes(tmp_path) == notes == RunNotes(tags=("best of all", "ü"), note="<b>good</b>\nline two")
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("tags", [["x" * 41], ["a,b"], [str(place) for place in range(21)]])
def test_tags_that_are_none_are_refused(tags: list[str]) -> None:
    with pytest.raises(UserError, match="tag"):
        make_notes(tags, "")


def test_a_note_without_end_is_refused() -> None:
    with pytest.raises(UserError, match="4,001 letters"):
        make_notes([], "x" * 4001)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"tags": "a", "note": ""}', '{"tags": [1], "note": ""}', '{"tags": []}']
)
def test_a_damaged_file_is_named_and_not_written_over(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    for work in (lambda: read_notes(tmp_path), lambda: write_notes(tmp_path, RunNotes())):
        with pytest.raises(UserError, match=r"notes\.json .*Mend it or remove it"):
            work()
    assert (tmp_path / FILE).read_text() == content


def test_a_folder_that_cannot_be_written_to_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_notes(tmp_path / "gone", RunNotes(note="x"))
