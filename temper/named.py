"""Functions that recipes name: finding "package.module:function", and checking options against a signature.

Owns: the messages for names and options that do not fit. Refuses: registries; each package keeps its own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from temper.errors import UserError, did_you_mean


def load_function(target: str, *, where: str) -> Callable[..., Any]:
    """The function that "package.module:function" names; `where` begins the error message."""
    module_name, _, function_name = target.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: a file beside the recipe can be named, and shadows nothing
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(f"{where}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value)]
        raise UserError(
            f'{where}: {module_name} has no function "{function_name}".{did_you_mean(function_name, known)}'
        )
    return function  # type: ignore[no-any-return]


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
