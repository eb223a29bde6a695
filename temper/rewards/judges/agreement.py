"""How far a judge says what people say: measured before a run, and again while it trains.

Owns: labelled cases, Cohen's kappa and its interval, and whether kappa fell. Refuses: asking (judge.py and others are
handed in), and deciding what a fall means (runs/alarms/rules.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from temper.errors import BackendError, UserError
from temper.protocols import Reward
from temper.types import Completion, Finish, Message, Scalar, Score, ScoreKind, Status, Task, Trajectory, Turn

LABELLED = "labelled"
"""Group of what is asked here, so that no case is taken for a rollout."""
UNSCORABLE = math.inf
"""The category of a judge that would not answer: it agrees with no label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledCase:
    """A response and what a person says it is worth."""

    task: Task
    response: str
    label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeAgreement:
    """How far a judge and people say the same. The interval is Wilson's of the agreement, 95%, put on kappa's scale."""

    agreement: float
    kappa: float
    low: float
    high: float
    num_labelled: int
    """Cases that the judge answered, unreadably or not."""
    num_unscorable: int
    """Counted as disagreement."""


class LabelledSet:
    """The cases of one judge, and how far it agreed with them when the run began. Without a path nothing is measured.

    Cases are read once per process: a file that is edited under a run changes no measurement of it.
    """

    def __init__(self, judge: Reward, *, path: str, floor: float, model: str) -> None:
        self._judge = judge
        self._path = path
        self._floor = floor
        self._model = model
        self._cases: Sequence[LabelledCase] = ()
        self._begun: JudgeAgreement | None = None
        self._begun_with = ""
        """Digest of the cases that it was measured on: with others it says nothing."""

    async def start(self) -> dict[str, float]:
        """Metrics of the agreement, {} without a labelled set. Raises UserError for a judge below the floor, and
        BackendError for one that fails. A resumed run keeps the agreement that it began with."""
        if not self._path:
            return {}
        self._cases = read_labelled(Path(self._path))
        found = await measure_agreement(self._judge, self._cases)
        if found.kappa < self._floor:
            raise UserError(
                f'judge "{self._judge.name}" (model {self._model}) agrees with {self._path} at kappa {found.kappa:.3f} '
                f"[{found.low:.3f}, {found.high:.3f}], below kappa_floor={self._floor}. Use a better judge or "
                "better instructions; lowering the floor trains on its mistakes."
            )
        if self._begun is None or self._begun_with != _digest(self._cases):
            self._begun, self._begun_with = found, _digest(self._cases)
        return {f"{self._judge.name}/{key}": value for key, value in _metrics(found).items()}

    async def measure(self) -> dict[str, float]:
        """See protocols.LabelledCases. A case that ends in an error is counted as one and left out of the agreement;
        when too few are left to measure it, only the errors are told."""
        if self._begun is None or not self._cases:
            return {}
        scores = await _ask(self._judge, self._cases)
        answered = [pair for pair in zip(self._cases, scores, strict=True) if pair[1].kind is not ScoreKind.ERROR]
        errors = {"labelled_errors": float(len(scores) - len(answered))}
        if len({case.label for case, _ in answered}) < 2:
            return errors
        found = agreement_of(self._cases, answered)
        return {**_metrics(found), "kappa_fall": kappa_fall(self._begun, found), **errors}

    def state(self) -> dict[str, Scalar]:
        return {} if self._begun is None else {**asdict(self._begun), "cases": self._begun_with}

    def load_state(self, state: Mapping[str, Scalar]) -> None:
        if state:
            known: dict[str, Any] = {name: value for name, value in state.items() if name != "cases"}
            self._begun, self._begun_with = JudgeAgreement(**known), str(state["cases"])


def kappa_fall(start: JudgeAgreement, now: JudgeAgreement) -> float:
    """Lower end of the 95% interval of start - now: above 0, kappa fell, and not by chance.

    Both intervals combined as by Newcombe 1998, method 10. It takes the two for independent; on the same cases they are
    not, which makes it the more careful.
    """
    return start.kappa - now.kappa - math.hypot(start.kappa - start.low, now.high - now.kappa)


def cohens_kappa(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """(agreement, kappa, low, high) of two raters' categories: (p_o - p_e) / (1 - p_e)."""
    size = len(pairs)
    left, right = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    observed = sum(a == b for a, b in pairs) / size
    expected = sum(left[category] * right[category] for category in left) / size**2
    if len(left) < 2:
        raise UserError("the labels are all the same, so agreement with them shows nothing. Label good and bad cases.")
    z = 1.959964
    centre = (observed + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(observed * (1 - observed) / size + z * z / (4 * size * size))
    kappa, low, high = ((share - expected) / (1 - expected) for share in (observed, centre - half, centre + half))
    return observed, kappa, low, high


async def measure_agreement(judge: Reward, labelled: Sequence[LabelledCase]) -> JudgeAgreement:
    """The judge's scores, each taken to the nearest label in use, against the labels. Raises BackendError when it fails
    on a case."""
    if not labelled:
        raise UserError("the labelled set is empty.")
    scores = await _ask(judge, labelled)
    for case, score in zip(labelled, scores, strict=True):
        if score.kind is ScoreKind.ERROR:
            raise BackendError(f'judge "{judge.name}" failed on labelled case {case.task.id}: {score.reason}')
    return agreement_of(labelled, list(zip(labelled, scores, strict=True)))


def agreement_of(labelled: Sequence[LabelledCase], answered: Sequence[tuple[LabelledCase, Score]]) -> JudgeAgreement:
    """Agreement on the cases that were answered; scores are taken to the nearest label of all cases."""
    categories = sorted({case.label for case in labelled})
    pairs = [(case.label, _category(score, categories)) for case, score in answered]
    agreement, kappa, low, high = cohens_kappa(pairs)
    return JudgeAgreement(
        agreement=agreement, kappa=kappa, low=low, high=high,
        num_labelled=len(pairs), num_unscorable=sum(verdict == UNSCORABLE for _, verdict in pairs),
    )  # fmt: skip


async def _ask(judge: Reward, labelled: Sequence[LabelledCase]) -> list[Score]:
    return await asyncio.gather(*(_guarded(judge, case, place) for place, case in enumerate(labelled)))


async def _guarded(judge: Reward, case: LabelledCase, place: int) -> Score:
    try:
        return await judge.score(case.task, _said(case, place))
    except Exception as error:  # the rim: a measurement must not end the run that it watches
        return Score.error(f"{type(error).__name__}: {error}")


def _category(score: Score, categories: Sequence[float]) -> float:
    value = score.value
    return UNSCORABLE if value is None else min(categories, key=lambda label: abs(label - value))


def _metrics(found: JudgeAgreement) -> dict[str, float]:
    return {"agreement": found.agreement, "kappa": found.kappa, "kappa_low": found.low, "kappa_high": found.high}


def _digest(labelled: Sequence[LabelledCase]) -> str:
    asked = [[case.task.messages[0].content, case.task.answer, dict(case.task.extra)] for case in labelled]
    rows = [[*question, case.response, case.label] for question, case in zip(asked, labelled, strict=True)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def read_labelled(path: Path) -> list[LabelledCase]:
    """One case per line: {"prompt": ..., "response": ..., "label": ..., "answer": ...}."""
    try:
        lines = path.expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'labelled="{path}" cannot be read ({error}).') from error
    return [_labelled(f"{path.name}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]


def _labelled(place: str, line: str) -> LabelledCase:
    try:
        row = json.loads(line)
        task = Task(
            id=place,
            messages=(Message(role="user", content=str(row["prompt"])),),
            answer=None if row.get("answer") is None else str(row["answer"]),
            extra={"rubric": row["rubric"]} if isinstance(row.get("rubric"), str) else {},
        )
        case = LabelledCase(task=task, response=str(row["response"]), label=float(row["label"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place}: a row must have prompt, response and a number as label ({error!r}).") from error
    if not 0 <= case.label <= 1:
        raise UserError(f"{place}: label={case.label} must lie in [0, 1].")
    return case


def _said(case: LabelledCase, index: int) -> Trajectory:
    completion = Completion(prompt_ids=(), token_ids=[], logprobs=[], versions=[], finish=Finish.STOP)
    turn = Turn(completion=completion, message=Message(role="assistant", content=case.response))
    unscored = Score.unscorable("not scored yet")
    return Trajectory(
        task_id=case.task.id, group_id=LABELLED, index=index, turns=(turn,), status=Status.COMPLETED, score=unscored
    )
