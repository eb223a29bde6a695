"""Who may import whom. The picture: docs/walk.md. To mend a failure, move the shared piece down a layer."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent / "temper"
LAYERS: dict[str, int] = {
    **dict.fromkeys(("types", "protocols", "errors", "plugins", "calls", "storable", "sandbox", "asking"), 0),
    **dict.fromkeys(("listening", "version", "interpreter", "children", "turnstile"), 0),
    **dict.fromkeys(("folders", "markers", "terminal"), 0),
    **dict.fromkeys(("config", "guide", "objectives", "rewards", "tasks", "envs", "runs", "models"), 1),
    **dict.fromkeys(("batching", "catalogue"), 2),
    **dict.fromkeys(("engine", "trainer"), 3),
    "rollout": 4,
    **dict.fromkeys(("parity", "evals", "dashboard", "serve", "planning", "cluster"), 5),
    **dict.fromkeys(("stages", "loop"), 6),
    **dict.fromkeys(("build", "simulate"), 7),
    "commands": 8,
    "cli": 9,
    "__main__": 10,
    "__init__": 11,  # the Python door: what a user imports, and nobody else
}
HEAVY = {"vllm", "sglang", "ray", "trl", "uvicorn", "fastapi"}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "base", "misc", "manager"}
MODULES = sorted(ROOT.rglob("*.py"))


def package_of(module: str) -> str:
    """The layer-bearing part of a dotted name: temper.engine.local.rows -> engine."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


@cache
def imports_of(path: Path) -> list[tuple[str, int, bool]]:
    """(module, line, is it at the top of the file)."""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "temper" else [node.module]
            )
            found += [(name, node.lineno, id(node) in top) for name in names]
    return found


def test_modules_import_only_lower_layers_and_their_own_package() -> None:
    found = []
    for path in MODULES:
        own = package_of(dotted(path))
        assert own in LAYERS, f"{own} has no layer: add it to LAYERS and to docs/walk.md"
        for module, line, _ in imports_of(path):
            if module.split(".")[0] != "temper":
                continue
            other = package_of(module)
            if not (other == own or LAYERS[other] < LAYERS[own] or LAYERS[other] == LAYERS[own] == 0):
                found.append(f"{path}:{line} (layer {LAYERS[own]}) imports {module} (layer {LAYERS[other]})")
    assert found == [], "pass the object in from build/, or move what both need to a lower layer"


def test_heavy_third_parties_are_imported_inside_functions() -> None:
    found = [
        f"{path}:{line}: {module}"
        for path in MODULES
        for module, line, is_top in imports_of(path)
        if is_top and module.split(".")[0] in HEAVY
    ]
    assert found == [], "import them inside their functions"


def test_no_drawer_is_called_miscellaneous() -> None:
    assert not [path for path in ROOT.rglob("*") if path.stem in FORBIDDEN_NAMES]


def circles_of(sources: dict[str, str]) -> list[list[str]]:
    """Modules that import each other, in whatever way: at the top, inside a function, for types alone."""
    edges: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                edges[name] |= {alias.name for alias in node.names} & sources.keys()
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                edges[name] |= (full & sources.keys()) | (
                    {node.module} & sources.keys() if full - sources.keys() else set()
                )
        edges[name].discard(name)
    while leaves := [name for name, others in edges.items() if not others & edges.keys()]:
        for name in leaves:
            del edges[name]
    return [sorted(others & edges.keys() | {name}) for name, others in sorted(edges.items())]


def test_no_modules_import_each_other() -> None:
    names = [(dotted(path).removesuffix(".__init__"), path) for path in MODULES]
    assert circles_of({name: path.read_text() for name, path in names}) == []


def test_a_circle_through_a_function_or_through_types_would_be_seen() -> None:
    one, two = "from temper.b import x", "def f():\n    from temper.a import y"
    typed = "if TYPE_CHECKING:\n    from temper import a"
    assert circles_of({"temper.a": one, "temper.b": two})
    assert circles_of({"temper.a": one, "temper.b": typed})
    assert not circles_of({"temper.a": one, "temper.b": ""})


def test_a_sideways_import_would_be_seen() -> None:
    assert LAYERS["engine"] == LAYERS["trainer"], "engine and trainer must not import each other"
    assert package_of("temper.engine.local.rows") == "engine"


def test_one_name_is_one_class() -> None:
    """A public class that has a namesake is looked up in the wrong file sooner or later."""
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
