"""Preferences as a source of batches: pairs and labelled completions from files, or pairs made from rollouts.

Owns: the kind "preference", KTO's baseline, the held-out measure of pairs. Refuses: rows (reading/preference_rows.py),
which samples are compared (preference_credit.py), and the losses (objectives/losses/pairs.py).
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from temper.batching.samples import ScoreFn
from temper.config import RunConfig
from temper.errors import UserError
from temper.evals.pairs import pair_results
from temper.objectives import DirectLoss, Loss, Objective
from temper.objectives.losses.pairs import PAIR_LOSSES, implicit_rewards
from temper.objectives.losses.preferences import Pairs
from temper.objectives.losses.unpaired import kto_baseline, mismatched_rows
from temper.protocols import BatchSource
from temper.rollout.draws import TaskStream
from temper.stages.kind import StageKind, require_whole_updates
from temper.stages.measures import Audit, Measure, comparison_budget, measure_answers
from temper.stages.parts import Parts
from temper.stages.preference_credit import Choose, pairs_of, wins_of
from temper.stages.reading.data import Reading, StageData
from temper.stages.reading.examples import MAX_SKIPS, RowTooLong
from temper.stages.reading.preference_rows import RowRules, labelled_rows, make_row, on_drawn, pair_rows, rows_maker
from temper.stages.reading.recorded import RecordNeeds
from temper.stages.reading.reference_cache import References
from temper.stages.reading.stream import StreamSource
from temper.stages.sampling import group_source
from temper.types import Batch, EvaluationResult, Sample, Task

Draw = tuple[int, Task]


def pair_batch(draws: Sequence[Draw], rules: RowRules, references: References | None) -> Batch:
    """Pairs of equal share. Without `references` the trainer asks the reference itself, if the loss needs one."""
    pairs = [pair_rows(rules, task) for _, task in draws]
    rows = [
        replace(row, group_id=f"{task.id}#{draw}", weights=on_drawn(row, 1 / len(pairs)))
        for (draw, task), pair in zip(draws, pairs, strict=True)
        for row in pair
    ]
    return _examples(rows if references is None else references.fill(rows), len(draws))


def labelled_batch(draws: Sequence[Draw], rules: RowRules, references: References, score: ScoreFn) -> Batch:
    """Completions of equal share, and on their tokens the batch's baseline: how much likelier than the reference the
    policy of now finds completions after prompts that they do not belong to."""
    members = [(f"{task.id}#{draw}", task, row) for draw, task in draws for row in labelled_rows(rules, task)]
    # Good ones first: neighbours are then of different tasks, also where a task gave one of each.
    members.sort(key=lambda member: -member[2].reward)
    if len(draws) < 2:
        raise UserError("kto compares with completions of other prompts. Use trainer.examples_per_step of 2 or more")
    others = [members[place] for place in mismatched_rows(len(members))]
    strangers = [_mismatched(rules, row, other) for (_, _, row), (_, _, other) in zip(members, others, strict=True)]
    count = len(members)
    filled = references.fill([*(row for _, _, row in members), *strangers])
    baseline = kto_baseline(_sums(score(strangers, "policy")), _sums(_references(filled[count:])))
    rows = [
        replace(row, group_id=name, weights=on_drawn(row, 1 / count), advantages=on_drawn(row, baseline))
        for (name, _, _), row in zip(members, filled[:count], strict=True)
    ]
    return _examples(rows, len(draws))


def _mismatched(rules: RowRules, own: Sample, other: Sample) -> Sample:
    """The prompt of one row and the completion of another, cut where the context ends."""
    prompt, completion = own.token_ids[: own.loss_mask.index(1)], other.token_ids[other.loss_mask.index(1) :]
    return make_row(own.group_id, 2, prompt, completion[: max(1, rules.max_length - len(prompt))], 0.0)


def _sums(columns: Iterable[Sequence[float]]) -> torch.Tensor:
    return torch.tensor([sum(column) for column in columns], dtype=torch.float64)


def _references(rows: Iterable[Sample]) -> list[Sequence[float]]:
    return [row.reference_logprobs or [] for row in rows]


def _examples(rows: Sequence[Sample], num_tasks: int) -> Batch:
    lengths = [row.num_actions for row in rows]
    metrics = {"data/examples": float(num_tasks), "gen/len_mean": statistics.fmean(lengths)}
    return Batch(updates=(tuple(rows),), metrics=metrics)


class Preferences(StreamSource):
    """Implements protocols.BatchSource over a stream of pairs or of labelled completions."""

    def __init__(
        self,
        stream: TaskStream,
        make_batch: Callable[[Sequence[Draw]], Batch],
        *,
        batch_size: int,
        references: References | None = None,
        make_rows: Callable[[Task], object] | None = None,
    ) -> None:
        """`make_rows`: makes the rows of one task; tasks that it raises TooLong for are passed over and counted. None:
        a task that does not fit is an error."""
        super().__init__(stream)
        self._make_batch = make_batch
        self._batch_size, self._references, self._make_rows = batch_size, references, make_rows

    async def start(self) -> None:
        if self._references is not None:
            await asyncio.to_thread(self._references.start)

    async def take(self, step: int) -> Batch:
        draws, dropped = list[Draw](), 0
        while len(draws) < self._batch_size:
            draw, task = self._stream.next()
            try:
                if self._make_rows is not None:
                    self._make_rows(task)
                draws.append((draw, task))
            except RowTooLong:
                dropped += 1
                if dropped > MAX_SKIPS:
                    raise
        batch = await asyncio.to_thread(self._make_batch, draws)
        if self._make_rows is None:
            return batch
        return replace(batch, metrics={**batch.metrics, "data/too_long": float(dropped)})


def offline_source(
    objective: DirectLoss,
    stream: TaskStream,
    rules: RowRules,
    references: References,
    score: ScoreFn,
    batch_size: int,
    *,
    drops_long: bool = False,
) -> Preferences:
    """The source of a preference objective that reads a data set. `score` is the trainer's. `drops_long`: tasks longer
    than the rules allow are passed over and counted."""
    if objective.loss.reads == "wins":
        raise UserError(
            f"{objective.loss.name} compares fresh rollouts of policy and opponent, and the training data brings pairs "
            "of its own. Train on prompts with a [[reward]], or use an objective for pairs, e.g. dpo"
        )
    is_labelled = objective.loss.reads == "labelled"
    # A reference that moves is asked at every step.
    is_cached = "reference" in objective.needs and objective.reference is None

    def make_batch(draws: Sequence[Draw]) -> Batch:
        if is_labelled:
            return labelled_batch(draws, rules, references if is_cached else References(score), score)
        return pair_batch(draws, rules, references if is_cached else None)

    make_rows = rows_maker(objective.loss, rules) if drops_long else None
    return Preferences(stream, make_batch, batch_size=batch_size, references=references, make_rows=make_rows)


def heldout_rewards(
    direct_loss: Loss, tasks: Sequence[Task], rules: RowRules, references: References, score: ScoreFn
) -> tuple[list[float], list[float]]:
    """Implicit rewards of the chosen and of the rejected side of held-out pairs, by the policy of now."""
    rows = [row for task in tasks for row in pair_rows(rules, task)]
    policy = _sums(score(rows, "policy")).view(-1, 2)
    reference = _sums(_references(references.fill(rows))).view(-1, 2) if "reference" in direct_loss.needs else None
    lengths = torch.tensor([row.num_actions for row in rows]).view(-1, 2)
    pairs = Pairs(
        chosen_logprobs=policy[:, 0],
        rejected_logprobs=policy[:, 1],
        chosen_lengths=lengths[:, 0],
        rejected_lengths=lengths[:, 1],
        weights=torch.zeros(len(tasks)),
        reference_chosen_logprobs=None if reference is None else reference[:, 0],
        reference_rejected_logprobs=None if reference is None else reference[:, 1],
    )
    chosen, rejected = implicit_rewards(direct_loss, pairs)
    return chosen.tolist(), rejected.tolist()


class _Preferred:
    """The share of held-out pairs whose chosen side has the higher implicit reward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._references = parts.references("heldout-references.bin")
        self._references.start()

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts, tasks = self._parts, self._parts.data.heldout
        rules = RowRules(parts.data.renderer, parts.data.shape.max_context)
        loss, score = _direct(parts.objective).loss, parts.trainer.score
        chosen, rejected = await asyncio.to_thread(heldout_rewards, loss, tasks, rules, self._references, score)
        return [pair_results(chosen, rejected, stage=parts.index, step=step, budget=comparison_budget(tasks))]


def _direct(objective: Objective) -> DirectLoss:
    assert isinstance(objective, DirectLoss), "a preference stage trains a direct loss"
    return objective


def _check_data(config: RunConfig, objective: Objective, data: StageData) -> None:
    """Refuses prompts without pairs where nothing could make them."""
    if not data.has_groups:
        return
    if not config.reward and data.is_rolling:
        raise UserError(
            "a preference stage compares pairs: its training data has none (columns chosen and rejected, or label), "
            "and there is no [[reward]] to compare samples by. Add either"
        )
    require_opponent(config, objective)
    if config.rollout.group_size < 2 and data.is_rolling:
        raise UserError("rollout.group_size = 1 leaves no two answers to compare. Use 2 or more")
    if (loss := _direct(objective).loss).reads == "labelled":
        raise UserError(
            f"objective {loss.name} reads a data set: its baseline comes from mismatched completions. Give data with "
            f'pairs or labels, or use objective.preset = "online_dpo"'
        )


def _source(parts: Parts) -> BatchSource:
    config, trainer, objective = parts.config, parts.trainer, _direct(parts.objective)
    if not parts.data.has_groups:
        return offline_source(
            objective,
            parts.data.stream,
            RowRules(parts.data.renderer, parts.data.longest_row),
            parts.references(),
            trainer.score,
            batch_size=config.trainer.examples_per_step,
            drops_long=config.trainer.max_length > 0,
        )
    updates = config.trainer.updates_per_batch
    if objective.loss.reads == "wins":
        return group_source(parts, lambda taken: wins_of(taken, version=trainer.version, updates=updates))
    choose: Choose = "extremes" if objective.loss.opponent_share is None else "sides"
    return group_source(
        parts,
        lambda taken: pairs_of(taken, version=trainer.version, updates=updates, choose=choose, seed=config.seed),
    )


PREFERENCE_COLUMNS = ("rejected", "label")
"""Of a task's extra: another answer, which is worse; whether its answer is good."""


def _share_sampled(objective: Objective, tasks: Sequence[Task]) -> float:
    """Pairs are sampled when the data says of no answer which is better, or whether it is good."""
    return 0.0 if any(name in task.extra for task in tasks[:1] for name in PREFERENCE_COLUMNS) else 1.0


def _has_pairs(tasks: Sequence[Task]) -> bool:
    return any("rejected" in task.extra for task in tasks)


def _measure(parts: Parts) -> Measure:
    return _Preferred(parts) if parts.data.is_heldout_compared else measure_answers(parts)


def _describe(data: StageData) -> dict[str, str]:
    return {"pairs": "of each group's samples, by the reward"} if data.has_groups else {}


KIND = StageKind(
    name="preference",
    preset="dpo",
    losses=tuple(PAIR_LOSSES),
    reading=Reading(
        share_sampled=_share_sampled,
        compares=_has_pairs,
        needs_of_records=lambda objective: RecordNeeds(min_members=2),
    ),
    make_source=_source,
    make_measure=_measure,
    make_rows=lambda objective, data, longest: rows_maker(_direct(objective).loss, RowRules(data.renderer, longest)),
    may_choose=True,
    together="group",
    check=lambda config, objective: require_whole_updates(config),
    check_data=_check_data,
    describe=lambda config, objective, data: _describe(data),
)


def require_opponent(config: RunConfig, objective: Objective) -> None:
    """Refuses opponents that cannot be drawn."""
    if _direct(objective).loss.opponent_share is None:
        return
    if config.engine.kind != "local":
        raise UserError(
            f"objective {objective.name} samples opponents from the reference's weights, which only the engine of this "
            f'process holds, and engine.kind = "{config.engine.kind}". Use engine.kind = "local", or '
            f'objective.preset = "online_dpo", which needs no opponent'
        )
    if (size := config.rollout.group_size) < 2 or size % 2:
        raise UserError(
            f"objective {objective.name} draws one half of each group from the policy and one half from its opponent, "
            f"and rollout.group_size = {size}. Use an even number, e.g. {max(2, size + size % 2)}"
        )
