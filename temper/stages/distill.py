"""Distillation as a source of batches: the student's own samples, given texts, or now one and now the other.

Owns: the kind "distill", which of the two a step trains on, credit without a reward, which directory teaches which
domain. Refuses: the loss (objectives/losses/divergences.py), the teacher's passes (trainer/), rolling, and reading.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from temper.config import RunConfig
from temper.errors import UserError
from temper.models.load import find_checkpoint, read_shape, require_same_tokenizer
from temper.objectives import DirectLoss, Objective, PolicyObjective
from temper.objectives.losses.divergences import DIVERGENCE_LOSSES
from temper.protocols import BatchSource
from temper.rollout.buffer import StepGroups
from temper.stages.kind import StageKind, require_whole_updates
from temper.stages.parts import Parts
from temper.stages.reading.data import Reading
from temper.stages.sampling import credit_by_objective, rollout_source
from temper.stages.sft import examples_of, text_rows
from temper.types import Batch, Group, Scalar, Score, Task, Trajectory

REWARD_METRICS = ("reward/", "data/degenerate", "data/all_", "data/group_std", "data/p_hist", "gen/len_correct",
                  "gen/len_wrong")  # fmt: skip
"""Beginnings of metrics that say nothing where nothing is rewarded."""


def share_of_samples(objective: Objective) -> float:
    """Probability that a step trains on samples of the student. Losses of drawn tokens have no other text to train."""
    if not isinstance(objective, DirectLoss):
        return 1.0
    return float(dict(objective.loss.arguments).get("lmbda", 1.0) or 0.0)


def trains_on_samples(seed: int, step: int, lmbda: float) -> bool:
    """Whether this step does: the same for equal seed and step, whatever came before, so that a resume agrees."""
    digest = hashlib.blake2b(f"{seed}/{step}/gkd".encode(), digest_size=8).digest()
    return int.from_bytes(digest) < lmbda * 2**64


def distill_source(
    objective: Objective,
    *,
    seed: int,
    examples: Callable[[], BatchSource],
    roller: Callable[[], BatchSource],
    max_staleness: int,
) -> BatchSource:
    """The source of a distillation stage. `examples` and `roller` make one each, over the same stream of tasks."""
    lmbda = share_of_samples(objective)
    if lmbda in (0.0, 1.0):
        return roller() if lmbda else examples()
    if max_staleness:
        raise UserError(
            f"rollout.max_staleness={max_staleness} with lmbda={lmbda}: samples drawn ahead would wait through steps "
            f"on given texts and grow older than that. Use max_staleness = 0, or lmbda = 1"
        )
    return Mixture(examples(), roller, lmbda=lmbda, seed=seed)


class Mixture:
    """Implements protocols.BatchSource: every step from one of two sources over one stream of tasks."""

    def __init__(self, examples: BatchSource, roller: Callable[[], BatchSource], *, lmbda: float, seed: int) -> None:
        """`roller` makes a fresh one that samples with the weights of now. A lasting one would count the steps that it
        did not feed as room for more samples, and sample ahead of its bound."""
        self._examples, self._roller = examples, roller
        self._lmbda, self._seed = lmbda, seed
        self._state = dict(examples.state())

    @property
    def num_queued(self) -> int | None:
        """Samples are drawn for one step at a time: none wait between two."""
        return None

    async def start(self) -> None:
        await self._examples.start()

    async def take(self, step: int) -> Batch:
        is_sampled = trains_on_samples(self._seed, step, self._lmbda)
        batch = await (self._sampled(step) if is_sampled else self._given(step))
        return dataclasses.replace(batch, metrics={**batch.metrics, "distillation/on_policy": float(is_sampled)})

    async def _given(self, step: int) -> Batch:
        batch = await self._examples.take(step)
        self._state |= self._examples.state()
        return batch

    async def _sampled(self, step: int) -> Batch:
        roller = self._roller()
        roller.load_state(self._state)
        await roller.start()
        try:
            batch = await roller.take(step)
            self._state |= roller.state()
        finally:
            await roller.close()
        return batch

    async def release(self, version: int) -> None:
        await self._examples.release(version)

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return dict(self._state)

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._state = dict(state)
        self._examples.load_state(state)

    async def close(self) -> None:
        await self._examples.close()


class NoReward:
    """Implements rollout.episode.Scorer: every episode that ended, cut or not, counts the same. About one that failed
    nobody asks, and it stays an error."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(0.0), {}

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        return *await self.score(task, trajectory), ()

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]:
        return parts

    async def evolve(self, groups: Sequence[Group]) -> None:
        """Nothing learns."""


def unrewarded(credit: Callable[[StepGroups], Batch]) -> Callable[[StepGroups], Batch]:
    """The credit without metrics of a reward that nobody gave."""

    def without(taken: StepGroups) -> Batch:
        batch = credit(taken)
        metrics = {name: value for name, value in batch.metrics.items() if not name.startswith(REWARD_METRICS)}
        return dataclasses.replace(batch, metrics=metrics)

    return without


def teacher_folders(student: Path, teachers: Mapping[str, str]) -> dict[str, Path]:
    """The directory of each domain's teacher. UserError for one that is missing, that Temper computes wrongly, or whose
    tokenizer is another."""
    folders = {
        domain: find_checkpoint(path, f"model.teachers.{domain}" if domain else "model.teacher")
        for domain, path in teachers.items()
    }
    for folder in folders.values():
        read_shape(folder)  # refuses families that would teach nonsense
        require_same_tokenizer(student, folder)
    return folders


def _source(parts: Parts) -> BatchSource:
    # The recipe's reward judges held-out answers; what it says of a sample must not decide whether that is distilled.
    unjudged = dataclasses.replace(parts, setup=dataclasses.replace(parts.setup, scorer=NoReward()))
    credit = unrewarded(credit_by_objective(parts))
    return distill_source(
        parts.objective,
        seed=parts.config.seed,
        examples=lambda: examples_of(parts),
        roller=lambda: rollout_source(unjudged, credit, compares=False, is_judged=False),
        max_staleness=parts.config.rollout.max_staleness,
    )


def _check(config: RunConfig, objective: Objective) -> None:
    """Samples have no reward here: without a teacher in the objective there is nothing to learn."""
    require_whole_updates(config)
    if isinstance(objective, PolicyObjective) and "teacher" not in objective.needs:
        raise UserError(
            f"a stage of kind distill has no reward, and objective {objective.name} reads no teacher: it would learn "
            f'nothing. Use objective.preset = "opd" or "gkd", or a stage of kind rl'
        )


def _describe(objective: Objective) -> dict[str, str]:
    share = share_of_samples(objective)
    return {"samples": f"of the student in {share:.0%} of the steps; given texts in the others"}


KIND = StageKind(
    name="distill",
    preset="gkd",
    losses=(None, *DIVERGENCE_LOSSES),
    reading=Reading(share_sampled=lambda objective, tasks: share_of_samples(objective)),
    make_source=_source,
    make_rows=text_rows,
    check=_check,
    describe=lambda config, objective, data: _describe(objective),
)
