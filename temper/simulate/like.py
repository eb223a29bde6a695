"""Speeds and lengths of a run that has finished, from its run.db.

Owns: which recorded seconds grow with tokens and which do not; how long a decode step takes by how many are in it.
Refuses: recipes; whoever has them says what the run's were.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from temper.errors import UserError
from temper.rollout.drops import DEGENERATE
from temper.runs.reader import RunReader
from temper.simulate.speeds import Speeds

BY_TOKEN = ("pack", "reference", "proximal", "critic", "measure", "forward_backward", "trace")
BY_UPDATE = ("optimizer",)
BY_STEP = ("train_other",)
STANDING_STILL = ("publish", "record", "release", "other")
"""Phases in which nothing is drawn where sampler and trainer share a process."""
LEAST_STEPS = 3
PACE_ROUNDS = 30
"""Of finding out how slow each step was as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What the run's recipe said."""

    stage: int
    """Its number, from 0."""
    groups_per_step: int
    max_staleness: int
    max_running: int
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    speeds: Speeds
    groups: tuple[tuple[int, ...], ...]
    """Lengths of the members' answers, by group."""
    degenerate: float
    """Share of the groups that was dropped because all members had one reward."""
    seconds_per_step: float
    """Without evaluations, checkpoints and what comes before step 1. A mean, while speeds are medians: steps that run
    ahead are in turn long and short."""


@dataclass(slots=True)
class _Group:
    draw: int
    outcome: str
    lengths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def is_trained(self) -> bool:
        return self.outcome == "trained"


def read_run(reader: RunReader, settings: RunSettings) -> MeasuredRun:
    """Raises UserError for a run with too few steps to measure."""
    phases = _phases(reader, settings.stage)
    steps = sorted(phases)[1:]  # the first one is seldom like the others
    if len(steps) < LEAST_STEPS:
        raise UserError(
            f"{reader.folder}: its stage {settings.stage + 1} has {len(phases)} steps with seconds, and "
            f"{LEAST_STEPS + 1} or more are needed to measure speeds. Let it run longer"
        )
    rolled = _groups(reader, settings.stage)
    drawn = {point.step: point.value or 0.0 for point in reader.metric("sys/rollout_tokens") if _is_in(point, settings)}
    trained = {point.step: point.value or 0.0 for point in reader.metric("sys/train_tokens") if _is_in(point, settings)}

    def usual(names: Sequence[str], each: Callable[[int], float] = lambda step: 1.0) -> float:
        return statistics.median(
            sum(phases[step].get(name, 0.0) for name in names) / max(each(step), 1e-9) for step in steps
        )

    rounds = [_round(rolled.get(step, [])) for step in steps]
    lengths = {step: [n for group in rolled.get(step, []) if group.is_trained for n in group.lengths] for step in steps}
    prompt = statistics.median(
        max(0.0, trained.get(step, 0.0) - sum(own)) / max(1, len(own)) for step, own in lengths.items()
    )
    if _start_together(rolled, steps, settings):
        decoding = _fit_rounds(rounds, prompt)
        decoding["request"] += _late_seconds(rounds, [phases[step].get("rollout", 0.0) for step in steps])
    else:
        decoding = _fit_means(reader, settings)
    everyone = [group for step in steps for group in rolled.get(step, [])]
    speeds = Speeds(
        **decoding,
        credit_token=usual(("credit",), lambda step: drawn.get(step, 0.0)),
        train_token=usual(BY_TOKEN, lambda step: trained.get(step, 0.0)),
        train_step=(usual(BY_UPDATE) + usual(BY_STEP)) / settings.updates,
        publish=usual(STANDING_STILL),
        after_step=usual(("canary",)),
    )
    return MeasuredRun(
        speeds=speeds,
        groups=tuple(tuple(group.lengths) for group in everyone if group.lengths),
        degenerate=statistics.fmean(group.outcome == f"dropped:{DEGENERATE}" for group in everyone),
        seconds_per_step=statistics.fmean(step_seconds(phases[step]) for step in steps),
    )


BESIDE = ("warm_up", "parity", "evaluate", "checkpoint")
"""Phases that are not of the step itself."""


def step_seconds(phases: Mapping[str, float]) -> float:
    """Of a step, without what is done now and then."""
    return sum(seconds for name, seconds in phases.items() if name not in BESIDE)


def _is_in(point: object, settings: RunSettings) -> bool:
    return getattr(point, "stage", None) == settings.stage


def _phases(reader: RunReader, stage: int) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in reader.query("SELECT step, name, seconds FROM seconds WHERE stage = ?", stage):
        found.setdefault(row["step"], {})[row["name"]] = row["seconds"]
    return found


def _groups(reader: RunReader, stage: int) -> dict[int, list[_Group]]:
    """By step, in draw order."""
    found: dict[tuple[int, str], _Group] = {}
    for row in reader.query(
        "SELECT step, group_id, draw, outcome FROM groups WHERE stage = ? ORDER BY step, draw", stage
    ):
        found[row["step"], row["group_id"]] = _Group(draw=row["draw"], outcome=row["outcome"])
    for row in reader.query(
        "SELECT step, group_id, num_tokens, seconds FROM trajectories WHERE stage = ? AND member >= 0 AND "
        "num_tokens > 0 ORDER BY step, group_id, member",
        stage,
    ):
        found[row["step"], row["group_id"]].lengths.append(row["num_tokens"])
        found[row["step"], row["group_id"]].seconds.append(row["seconds"])
    by_step: dict[int, list[_Group]] = {}
    for (step, _), group in found.items():
        by_step.setdefault(step, []).append(group)
    return by_step


def _round(groups: Sequence[_Group]) -> list[tuple[int, float]]:
    """(tokens, seconds) of all answers of a step."""
    return [pair for group in groups for pair in zip(group.lengths, group.seconds, strict=True)]


def _start_together(rolled: Mapping[int, Sequence[_Group]], steps: Sequence[int], settings: RunSettings) -> bool:
    """Whether all answers of a step began with it. Where groups are replaced, others follow in rounds of their own."""
    if settings.max_staleness > 0:
        return False
    sizes = [(len(rolled.get(step, [])), len(_round(rolled.get(step, [])))) for step in steps]
    return all(groups <= settings.groups_per_step and 0 < all_ <= settings.max_running for groups, all_ in sizes)


def _late_seconds(rounds: Sequence[Sequence[tuple[int, float]]], waited: Sequence[float]) -> float:
    """What a step waits for beyond its last answer, by answer: starting episodes, scoring them, taking groups."""
    later = [seconds - max(own for _, own in pairs) for pairs, seconds in zip(rounds, waited, strict=True)]
    return max(0.0, statistics.median(later)) / statistics.median(map(len, rounds))


def _fit_rounds(rounds: Sequence[Sequence[tuple[int, float]]], prompt: float) -> dict[str, float]:
    """Seconds of a decode step by how many are in it, and by how many tokens these have in the cache.

    Where all answers of a step start together, each one's seconds are those of as many decode steps as it has tokens,
    and how many were in each of these is known from the lengths of the others.
    """
    works = [_work_of_answers(pairs, prompt) for pairs in rounds]
    seconds = [np.asarray([own for _, own in pairs]) for pairs in rounds]
    beginning, step, row, cached = _fit_usual(works, seconds)
    # What an answer waits for before its first step are the beginnings of all: one more answer, one more of them.
    begin_one = beginning / statistics.median(map(len, rounds))
    return {"decode_step": step, "decode_row": row, "decode_kv": cached, "request": begin_one}


def _fit_means(reader: RunReader, settings: RunSettings) -> dict[str, float]:
    """The same from what is known otherwise, means over steps: seconds of a decode step, and how many were in it."""
    points = _means(reader, settings)
    if not points:
        raise UserError(
            f"{reader.folder}: its sampler did not count what it drew, so its speed is not known. Use a synchronous "
            "run (rollout.max_staleness = 0) that replaces no groups, with engine.max_running of groups_per_step * "
            "group_size or more"
        )
    step, row = fit_non_negative(
        np.asarray([[1.0, running] for running, _ in points]), np.asarray([seconds for _, seconds in points])
    )
    return {"decode_step": step, "decode_row": row, "request": 0.0}


def _work_of_answers(pairs: Sequence[tuple[int, float]], prompt: float) -> NDArray[np.float64]:
    """By answer of one round: 1, its decode steps, and summed over these how many were in each and what was cached."""
    lengths = np.asarray([length for length, _ in pairs])
    places = np.arange(1, int(lengths.max()) + 1)
    running = (lengths[None, :] >= places[:, None]).sum(1)
    cached = running * (prompt + places)
    return np.stack(
        [np.ones(len(lengths)), lengths, np.cumsum(running)[lengths - 1], np.cumsum(cached)[lengths - 1]], axis=1
    ).astype(np.float64)


def _fit_usual(works: Sequence[NDArray[np.float64]], seconds: Sequence[NDArray[np.float64]]) -> list[float]:
    """A fit over rounds some of which were slower as a whole, since the machine did something else: each is brought to
    the pace of the median before its shape counts."""
    paces = np.ones(len(works))
    for _ in range(PACE_ROUNDS):
        found = fit_non_negative(
            np.concatenate(works), np.concatenate([own / pace for own, pace in zip(seconds, paces, strict=True)])
        )
        expected = [float((work @ np.asarray(found)).sum()) for work in works]
        paces = np.asarray([own.sum() / max(all_, 1e-9) for own, all_ in zip(seconds, expected, strict=True)])
        paces = np.maximum(paces / np.median(paces), 1e-9)
    return found


def _means(reader: RunReader, settings: RunSettings) -> list[tuple[float, float]]:
    """By training step: how many were in a decode step, and its seconds."""
    occupancy = {p.step: p.value for p in reader.metric("sys/occupancy") if _is_in(p, settings) and p.value}
    rates = {p.step: p.value for p in reader.metric("sys/decode_tok_s") if _is_in(p, settings) and p.value}
    both = sorted(occupancy.keys() & rates.keys())[1:]
    running = {step: (occupancy[step] or 0.0) * settings.max_running for step in both}
    return [(running[step], running[step] / (rates[step] or 1.0)) for step in both]


def fit_non_negative(columns_NK: NDArray[np.float64], values_N: NDArray[np.float64]) -> list[float]:
    """Least squares; coefficients that would be negative are 0, and the others are fitted without them."""
    kept = list(range(columns_NK.shape[1]))
    while kept:
        found = np.linalg.lstsq(columns_NK[:, kept], values_N, rcond=None)[0]
        if (found >= 0).all():
            return [float(found[kept.index(k)]) if k in kept else 0.0 for k in range(columns_NK.shape[1])]
        kept.remove(kept[int(found.argmin())])
    return [0.0] * columns_NK.shape[1]
