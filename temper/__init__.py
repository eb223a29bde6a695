"""Temper: reinforcement-learning post-training of language models, small, exact, and honest about failure.

    import temper
    run = temper.train(model="models/smollm2-135m", data="train.jsonl", reward="math", preset="dapo", steps=100)
    policy = temper.load(run.best)
    print(policy.chat("What is 17 + 25?"))

Everything here is imported when it is first used: `import temper` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from temper.version import __version__

if TYPE_CHECKING:
    from temper.commands.python import Policy, Run, evaluate, load, train
    from temper.errors import TemperError, UserError
    from temper.objectives import Objective
    from temper.protocols import Env, EnvOpening, EnvReply, Reward
    from temper.runs.reader import RunReader
    from temper.types import Message, Score, Task, Trajectory

_PLACES = {
    "train": "temper.commands.python",
    "load": "temper.commands.python",
    "evaluate": "temper.commands.python",
    "Policy": "temper.commands.python",
    "Run": "temper.commands.python",
    "RunReader": "temper.runs.reader",
    "Objective": "temper.objectives",
    "Env": "temper.protocols",
    "EnvOpening": "temper.protocols",
    "EnvReply": "temper.protocols",
    "Reward": "temper.protocols",
    "Message": "temper.types",
    "Score": "temper.types",
    "Task": "temper.types",
    "TemperError": "temper.errors",
    "Trajectory": "temper.types",
    "UserError": "temper.errors",
}
"""Where each name is defined."""

__all__ = [
    "Env",
    "EnvOpening",
    "EnvReply",
    "Message",
    "Objective",
    "Policy",
    "Reward",
    "Run",
    "RunReader",
    "Score",
    "Task",
    "TemperError",
    "Trajectory",
    "UserError",
    "__version__",
    "evaluate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'temper' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value  # the next look finds it without a detour
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
