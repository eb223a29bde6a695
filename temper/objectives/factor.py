"""A factor: one pure function of an objective, with its name, its arguments, and what it needs to run.

Owns: the wrapper that makes `clip(high=0.28)` both callable and printable. Refuses: mathematics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from temper.errors import UserError
from temper.types import Scalar

Arguments = ParamSpec("Arguments")
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")


@dataclass(frozen=True)
class Factor(Generic[Inputs, Output]):
    """Two factors are equal when name and arguments are: `clip() == clip(low=0.2)`."""

    name: str
    arguments: tuple[tuple[str, Scalar | None], ...]
    needs: frozenset[str] = field(compare=False)
    """Passes that must have run: "reference", "proximal", "entropy" (with gradient)."""
    min_group: int = field(compare=False)
    """Smallest group_size for which the factor means anything."""
    run: Callable[Inputs, Output] = field(compare=False, repr=False)

    def __call__(self, *inputs: Inputs.args, **named: Inputs.kwargs) -> Output:
        return self.run(*inputs, **named)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.arguments if value is not None)
        return f"{self.name}({shown})" if shown else self.name


def factor(
    *, needs: Iterable[str] = (), min_group: int = 1
) -> Callable[[Callable[Arguments, Callable[Inputs, Output]]], Callable[Arguments, Factor[Inputs, Output]]]:
    """Decorates a builder: its arguments are the settings, the function it returns is the mathematics."""

    def decorate(
        build: Callable[Arguments, Callable[Inputs, Output]],
    ) -> Callable[Arguments, Factor[Inputs, Output]]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Factor[Inputs, Output]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = tuple(bound.arguments.items())
            run = build(*args, **kwargs)
            return Factor(build.__name__, arguments, frozenset(needs), min_group, run)

        return built

    return decorate


def require(condition: bool, message: str) -> None:
    """Refuses a setting that the mathematics does not allow."""
    if not condition:
        raise UserError(message)
