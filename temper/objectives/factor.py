"""A factor: one pure function of an objective, with its name, its arguments, and what it needs to run.

Owns: the wrapper that makes `clip(high=0.28)` both callable and printable. Refuses: mathematics.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

from temper.errors import UserError
from temper.types import Scalar

Arguments = ParamSpec("Arguments")
Inputs = ParamSpec("Inputs")
Output = TypeVar("Output")

NEEDS = {
    "reference": "log-probabilities of a frozen reference model",
    "proximal": "the trainer's log-probabilities when the batch starts, before credit is given",
    "teacher": "log-probabilities of a teacher model",
    "values": "a critic",
    "greedy": "one more, greedy rollout per task",
    "step_values": "extra rollouts from inside each completion",
    "turns": "nothing: it reads what each turn was paid",
    "entropy": "the entropy of each position, with gradient",
    "sampler_top_k": "the sampler's most likely tokens at each position",
    "policy_top_k": "the trainer's most likely tokens at each position",
    "router": "the router of a mixture-of-experts model",
    "batch": "a forward pass over the whole batch before the first gradient",
    "uniform": "the cross-entropy against all tokens alike, with gradient",
    "noise": "noise on the embeddings while the gradient is taken",
    "divergence": "the distance of the whole distribution from a teacher's, with gradient",
    "teacher_top_k": "a teacher's most likely tokens at each position",
    "scores": "a scalar head in place of the language-model head",
}
"""What a factor may ask for, and what that costs. The union over an objective decides which passes run."""


@dataclass(frozen=True)
class Factor(Generic[Inputs, Output]):
    """Two factors are equal when name and arguments are: `clip() == clip(low=0.2)`."""

    name: str
    arguments: tuple[tuple[str, Scalar | None], ...]
    needs: frozenset[str] = field(compare=False)
    """Keys of NEEDS."""
    min_group: int = field(compare=False)
    """Smallest group_size for which the factor means anything."""
    experimental: str = field(compare=False)
    """Why its form or a constant is not established by public code; empty when it is."""
    run: Callable[Inputs, Output] = field(compare=False, repr=False)
    along: Mapping[str, float] = field(compare=False, default_factory=dict, kw_only=True)
    """Arguments by which it goes along the tokens of a trajectory as they stand, and the value of each with which their
    order makes no difference. Empty: none does."""

    def __call__(self, *inputs: Inputs.args, **named: Inputs.kwargs) -> Output:
        return self.run(*inputs, **named)

    def argument(self, name: str) -> Any:
        return dict(self.arguments)[name]

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.arguments if value is not None)
        return f"{self.name}({shown})" if shown else self.name


def factor(
    *,
    needs: Iterable[str] = (),
    min_group: int = 1,
    experimental: str = "",
    along: Mapping[str, float] | None = None,
) -> Callable[[Callable[Arguments, Callable[Inputs, Output]]], Callable[Arguments, Factor[Inputs, Output]]]:
    """Decorates a builder: its arguments are the settings, the function it returns is the mathematics."""
    assert set(needs) <= NEEDS.keys(), f"needs {set(needs) - NEEDS.keys()} are not in NEEDS"

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
            return Factor(build.__name__, arguments, frozenset(needs), min_group, experimental, run, along=along or {})

        return built

    return decorate


def require(condition: bool, message: str) -> None:
    """Refuses a setting that the mathematics does not allow."""
    if not condition:
        raise UserError(message)
