"""What a model, a run or a file says is shown by the terminal and not obeyed, whatever verb prints it."""

from __future__ import annotations

import ast
import io
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from temper import cli
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.runs.display import Display
from temper.terminal import SafeConsole, printable

ROOT = Path(__file__).parent.parent
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202e[bold]b[/bold][link=http://x]x[/link]:smile:\x7f"
CONTROL = {*map(chr, range(32)), *map(chr, range(0x7F, 0xA0)), "\u202e"} - {"\n", "\t"}


def shown(*what: Any, **options: Any) -> str:
    out = io.StringIO()
    SafeConsole(file=out, width=200, **options).print(*what)
    return out.getvalue()


def test_control_characters_become_pictures() -> None:
    assert printable("a\x1b[31mb\x07\x7f\x9b\n\tc\r") == "a␛[31mb␇␡�\n\tc␍"
    assert printable("Café 数学 🙂") == "Café 数学 🙂"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_gets_through_in_whatever_it_stands(is_terminal: bool) -> None:
    table = Table("head", HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE))
    for what in (
        HOSTILE,
        Text(HOSTILE),
        Text(HOSTILE, style="bold"),
        Panel(HOSTILE, title=Text(HOSTILE)),
        table,
        [HOSTILE],
    ):
        text = shown(what, force_terminal=is_terminal, color_system=None)
        assert not CONTROL & set(text), repr(text)
        assert "owned" in text, "it is shown"
        assert ":smile:" in text
        assert "[bold]b[/bold]" in text
    assert "\x1b[1m" in shown(Text("b", style="bold"), force_terminal=True, color_system="standard"), "ours are obeyed"


def test_the_display_of_a_run_shows_what_it_is_told() -> None:
    out = io.StringIO()
    display = Display(SafeConsole(file=out, width=200))
    display.start(Path(HOSTILE))
    display.note(HOSTILE)
    display.show(HOSTILE)
    display.stage(HOSTILE, steps=3)
    display.close()
    assert not CONTROL & set(out.getvalue())
    assert out.getvalue().count("owned") == 4


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is an attack."""
    folder = tmp_path_factory.mktemp("hostile")
    recipe = {
        "name": "tiny",
        "model": {"new": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "mlp_width": 16, "context": 32,
                          "alphabet": "abcdefghijklmnopqrstuvwxyz\x1b]\x07"}},
        "train": [{"generator": "spell_backward", "seed": 1, "options": {"min_letters": 1, "max_letters": 2}}],
        "heldout": {"generator": "spell_backward", "seed": 2, "size": 2,
                    "options": {"min_letters": 1, "max_letters": 2}},
        "reward": [{"kind": "edit"}],
        "sampling": {"max_new_tokens": 2},
        "stage": [{"kind": "rl", "steps": 1, "rollout": {"groups_per_step": 2, "group_size": 2}}],
        "alarms": {"readiness": "off"},
    }  # fmt: skip
    (folder / "recipe.toml").write_text(to_toml(resolve(recipe, [], where="test")))
    run = train(folder / "recipe.toml", run=folder / "run")
    with sqlite3.connect(run / "run.db") as connection:
        connection.execute("DELETE FROM meta WHERE name = 'finished'")
        connection.execute("INSERT INTO meta VALUES ('ended', json_object('state', 'failed', 'text', ?))", (HOSTILE,))
        connection.execute("UPDATE trajectories SET error = ?", (HOSTILE,))
        connection.execute("UPDATE stages SET name = ?", (HOSTILE,))
        connection.execute("UPDATE evaluations SET name = ? || name", (HOSTILE,))
    connection.close()
    return run


@pytest.mark.parametrize("verb", ["report", "report --json", "sample", "eval", "export", "train", "presets", "doctor"])
def test_no_verb_lets_text_control_the_terminal(
    verb: str, hostile_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    evil = tmp_path / HOSTILE.replace("/", "|")
    arguments: dict[str, list[object]] = {
        "report": ["report", hostile_run],
        "report --json": ["report", hostile_run, "--json"],
        # A temperature at which every letter is drawn, and this alphabet has the letters of an escape sequence.
        "sample": ["sample", hostile_run, "--prompt", "ab", "--n", 16, "--temperature", 9, "--max-new-tokens", 8],
        "eval": ["eval", hostile_run, hostile_run.parent / "recipe.toml"],
        "export": ["export", hostile_run, evil],
        "train": ["train", evil],
        "presets": ["presets", HOSTILE],
        "doctor": ["doctor"],
    }
    monkeypatch.setattr(sys, "argv", ["temper", *map(str, arguments[verb])])
    with pytest.raises(SystemExit):
        cli.main()
    told = capfd.readouterr()
    assert told.out + told.err
    assert not CONTROL & set(told.out + told.err)
    if verb == "sample":
        assert "␛" in told.out, "the model did write them"


def test_everything_is_printed_through_the_safe_console() -> None:
    """Guards the class of faults: a plain console or print() in any file of the package, or markup where rich reads it
    whatever the console says."""
    careless = []
    for path in (ROOT / "temper").rglob("*.py"):
        # What runs in the sandbox has no terminal; what makes golden sets writes JSON for a file.
        if path.name == "terminal.py" or {"sandbox", "golden"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            has_markup = called == "TextColumn" and "markup" not in [word.arg for word in node.keywords]  # type: ignore[attr-defined]
            if called == "Console" or has_markup or (isinstance(node, ast.Name) and node.id == "print"):
                careless.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert careless == []
