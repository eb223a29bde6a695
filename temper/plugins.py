"""Functions that recipes name: finding "package.module:function" or "file.py:function", and checking options against a
signature.

Owns: the messages for names and options that do not fit. Refuses: registries; each package keeps its own.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from temper.errors import UserError, did_you_mean, nearest_file
from temper.types import Scalar

_GIVEN: dict[str, Callable[..., Any]] = {}
"""Functions handed over in Python, by the name that a recipe calls them. They live as long as the process."""
_LOADING: list[str] = []
"""Files that are being run in order to find a function in them, outermost first."""
UNNAMED = "python:"
"""Before the name of a function that no file holds: one typed into a notebook, a closure, a lambda."""


def name_function(function: Callable[..., Any]) -> str:
    """A name under which a recipe finds this function: in its module, in its file, or as long as this process lives."""
    name, module = function.__qualname__, function.__module__
    path = inspect.getsourcefile(function) if inspect.isfunction(function) or inspect.isclass(function) else None
    if "." in name or "<" in name:
        target = f"{UNNAMED}{name.rpartition('.')[2]}"
    elif module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    elif path is not None and Path(path).is_file():
        target = f"{Path(path).resolve()}:{name}"
    else:
        target = f"{UNNAMED}{name}"
    _GIVEN[target] = function
    return target


def given_function(target: str) -> Callable[..., Any] | None:
    """The function that Python code of this process handed over under that name."""
    return _GIVEN.get(target)


def loading_file() -> str | None:
    """The file that is being run at the moment only to find a function in it."""
    return _LOADING[-1] if _LOADING else None


def load_function(target: str, *, where: str) -> Callable[..., Any]:
    """The function that "package.module:function" or "folder/file.py:function" names; `where` begins the message."""
    if (given := given_function(target)) is not None:
        return given
    if target.startswith(UNNAMED):
        raise UserError(
            f"{where}: this function was handed over in Python and stands in no file, so it cannot be found again. "
            "Hand it over again (temper.train(..., resume=True)), or put it into a file"
        )
    module_name, _, function_name = target.rpartition(":")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except Exception as error:
        from temper.calls import explain_error  # only now: workers that find a function should stay small

        raise UserError(f"{where}: cannot import {module_name} ({explain_error(error)})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(
            f'{where}: {module_name} has no function "{function_name}".{did_you_mean(function_name, known)}'
        )
    return function  # type: ignore[no-any-return]


def _import(name: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: a file beside the recipe can be named, and shadows nothing
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    """Runs a file as a module, once. Its folder can be imported from, after everything else."""
    resolved = path.expanduser().resolve()
    name = f"{resolved.stem}_{hashlib.sha256(str(resolved).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None or not resolved.is_file():
        raise UserError(f"{path} is not there.{nearest_file(path)}")
    if (folder := str(resolved.parent)) not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _LOADING.append(str(path))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _LOADING.pop()
    return module


def split_named(
    entry: str | Mapping[str, Scalar], known: Iterable[str], *, where: str, example: str
) -> tuple[str, dict[str, Scalar]]:
    """Name and options of what a recipe names: "band", or {name = "band", low = 0.2}. UserError for a name that is not
    known; `example` shows how one is written."""
    options: dict[str, Scalar] = {"name": entry} if isinstance(entry, str) else dict(entry)
    name, known = options.pop("name", None), list(known)
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"{where} {name!r} is unknown.{did_you_mean(str(name), known)} Known: {', '.join(known)}. Write e.g. "
            f"{example}"
        )
    return name, options


def require_options(function: Callable[..., Any], options: Mapping[str, object], *, where: str, skip: int = 0) -> None:
    """Refuses options that the signature does not name, lacks, or types differently.

    skip: leading parameters that are not options. A function with **options checks names of its own.
    """
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[skip:]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name: parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    for name, value in options.items():
        if name in named:
            _require_type(name, value, named[name].annotation, where)
        elif not takes_any:
            known = ", ".join(sorted(named)) or "none"
            raise UserError(f'{where}: option "{name}" is unknown.{did_you_mean(name, named)} Known: {known}.')
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options:
            raise UserError(f'{where}: option "{name}" is missing. Add options.{name} to it.')


def _require_type(name: str, value: object, wanted: object, where: str) -> None:
    """Only plain types are checked: what a user's function annotates otherwise is its own business."""
    if wanted not in (int, float, str, bool):
        return
    is_right = isinstance(value, int | float) if wanted is float else isinstance(value, wanted)  # type: ignore[arg-type]
    if not is_right or (isinstance(value, bool) and wanted is not bool):
        raise UserError(f"{where}: option {name}={value!r} must be of type {wanted.__name__}.")  # type: ignore[attr-defined]
