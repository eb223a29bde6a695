"""One evaluation of one checkpoint on one suite, as a JSON file that needs no mathematics to be read.

Owns: what a result holds, writing it all or not at all, and which budgets differ. Refuses: computing scores (evals).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.storable import storable_json
from temper.types import Scalar

FORMAT = 1
"""Version of the file format. Raised when a field changes its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """One attempt at one prompt."""

    score: float | None
    """None: unscorable, and `reason` says why. Never a 0 in disguise."""
    reason: str | None = None
    answer: str | None = None
    """Normalised final answer, for majority votes; None: it stated none, or the suite has no such thing."""
    num_tokens: int
    """Tokens drawn by the model, over all turns."""
    num_turns: int = 1
    status: str = "completed"
    seconds: float = 0.0
    """Duration of this attempt. Not the same from run to run; everything else is."""
    events: Mapping[str, int] = field(default_factory=dict)
    """How often each kind of event happened in the environment."""
    cost: float = 0.0
    text: str = ""
    """The last thing the model said."""
    is_closed: bool | None = None
    """Whether its thinking was closed at a budget; None: there was no budget."""
    reflects: bool | None = None
    """Whether it says that it looks again, in words of English; None: nobody looked for them. The same below."""
    backtracks: bool | None = None
    """Whether it says that it gives up what it said before."""

    def __post_init__(self) -> None:
        assert (self.score is None) == (self.reason is not None), "a sample has a score, or says why not"
        assert self.score is None or math.isfinite(self.score), f"a score is a finite number, not {self.score}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt with its samples, in the order of their seeds."""

    task_id: str
    prompt: str
    gold: str | None
    samples: tuple[SampleResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """The whole result of one suite."""

    suite: str
    checkpoint: str
    weights_sha256: str
    created: float
    """Seconds since 1970."""
    budget: Mapping[str, Scalar]
    """How it was asked and judged. Results with other budgets are about something else."""
    constant_score: float | None
    """Score of always giving the commonest gold answer; None: the suite has no gold answers that can be said."""
    metrics: Mapping[str, Mapping[str, float]]
    """By name ("pass@1", "maj@4", "tokens" ...): {"score", "low", "high"}, 95% interval."""
    prompts: tuple[PromptResult, ...]


def save(result: SuiteResult, path: Path) -> None:
    """Writes the file whole or not at all: a reader never sees half a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {"format": FORMAT, **dataclasses.asdict(result)}
    text = storable_json(json.dumps(table, ensure_ascii=False, allow_nan=False))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide the result from a dashboard of another user
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load(path: Path) -> SuiteResult:
    """Reads a file that save() wrote. Raises UserError for anything else."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}). Give a file that temper eval --out wrote"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: not a result of temper eval ({error})") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else None
        raise UserError(f"{path}: not a result of temper eval in format {FORMAT} (found {found!r}). Evaluate again")
    try:
        return _result({name: value for name, value in table.items() if name != "format"})
    except (TypeError, KeyError, AttributeError, AssertionError) as error:
        raise UserError(f"{path}: a damaged result of temper eval ({error}). Evaluate again") from error


def differing_budget(a: SuiteResult, b: SuiteResult) -> list[str]:
    """What was not the same, in words: "samples: 4 and 8". Empty: the two may be compared."""
    missing = "nothing"
    return [
        f"{name}: {a.budget.get(name, missing)} and {b.budget.get(name, missing)}"
        for name in sorted({*a.budget, *b.budget})
        if a.budget.get(name, missing) != b.budget.get(name, missing)
    ]


def _result(table: dict[str, Any]) -> SuiteResult:
    prompts = tuple(
        PromptResult(**{**prompt, "samples": tuple(SampleResult(**sample) for sample in prompt["samples"])})
        for prompt in table.pop("prompts")
    )
    return SuiteResult(**table, prompts=prompts)
