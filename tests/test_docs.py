"""Documentation that points at something points at something that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ADDRESS = re.compile(r"(?<![\w/.-])((?:\w+/)+\w+\.py)\b")
GUIDE = ROOT / "temper/guide"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted(GUIDE.rglob("*.md"))
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_names_that_exist(page: Path) -> None:
    for text, target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        assert path.exists(), f"{page.name}: {target} does not exist"
        name = text.strip("`")
        if path.suffix == ".py" and text.startswith("`") and name.isidentifier():
            names = {
                node.name
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            }
            assert name in names, f"{page.name}: {target} has no {name}"


def test_the_tree_in_the_walk_names_every_package() -> None:
    tree = (ROOT / "docs/walk.md").read_text().partition("## The tree")[2]
    for folder in sorted((ROOT / "temper").iterdir()):
        if folder.is_dir() and folder.name != "__pycache__":
            assert f"{folder.name}/" in tree, f"the tree lacks temper/{folder.name}/"


def test_headers_and_comments_name_files_that_exist() -> None:
    """ "Refuses: sampling (rollout/source.py)" is an address; after a move nobody finds the house."""
    packages = {path.parent.name for path in (ROOT / "temper").rglob("__init__.py")}
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "temper").rglob("*.py")]
    named = [(file, name) for file in files for name in ADDRESS.findall((ROOT / file).read_text())]
    own = [(file, name) for file, name in named if name.split("/")[0] in packages]
    assert len(own) > 20
    assert [one for one in own if not any(f"/{file}".endswith(f"/{one[1]}") for file in files)] == []


def test_the_readme_stays_short_and_everything_else_is_on_the_site() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 130
