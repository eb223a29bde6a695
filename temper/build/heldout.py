"""What is measured on held-out tasks: answers that the policy draws, or the side of a pair that it prefers.

Owns: which of the two a stage's held-out set asks for. Refuses: drawing and judging (evals/).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from temper.build.sources import Parts, reference_cache, row_maker
from temper.data import StageData
from temper.evals.evaluate import Evaluation, HeldOut, constant_answer_score, evaluate
from temper.evals.pairs import Reliability, judge_pairs, judge_steps, pair_results, result_of
from temper.runs.records import AuditRecord
from temper.stages.preference import heldout_rewards
from temper.stages.preference_rows import RowRules
from temper.stages.reward_model import Calibration, scores_of
from temper.tasks.dataset import fingerprint
from temper.types import EvaluationResult, Task

Audit = Callable[[Sequence[AuditRecord]], None]
Measure = Callable[[int, Mapping[str, float], Audit | None], Awaitable[list[EvaluationResult]]]
"""(step, metrics of that step, where transcripts go) -> held-out scores of the weights of now."""

CALIBRATION_TASKS = 512
"""Training examples that a scale is taken from when nothing is held out."""


def make_measure(parts: Parts) -> Measure:
    if "scores" in parts.objective.needs:
        return _Scores(parts)
    if parts.config.stage == "preference" and any("rejected" in task.extra for task in parts.data.heldout):
        return _Preferred(parts)
    return _Answers(parts)


class _Answers:
    """Greedy and sampled answers, judged by the verifier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._heldout: HeldOut | None = None

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts, config = self._parts, self._parts.config.evaluation
        if self._heldout is None or parts.data.verifier.learns:  # the commonest answer's worth changes with it
            self._heldout = await _held_out(parts.data, parts)
        ways = (
            Evaluation(name="greedy", temperature=0.0, samples=1, max_new_tokens=config.max_new_tokens),
            Evaluation(
                name="sampled",
                temperature=config.temperature or parts.config.sampling.temperature,
                samples=config.samples,
                max_new_tokens=config.max_new_tokens,
                top_p=config.top_p,
            ),
        )
        reward = metrics.get("reward/mean")
        results = []
        for way in ways:
            result, audits = await evaluate(self._heldout, way, stage=parts.index, step=step, reward=reward)
            if audit is not None:
                audit(audits)
            results.append(result)
        # Of the sampled ones, and by the training reward: that is what training climbs, and a verifier that steers
        # training is no longer held out.
        seen = results[-1].details.get("reward_mean")
        if isinstance(seen, float):
            parts.trainer.observe(seen)
        return results


async def _held_out(data: StageData, parts: Parts) -> HeldOut:
    return HeldOut(
        setup=parts.setup,
        tasks=data.heldout,
        verifier=data.verifier,
        verifier_name=data.verifier_name,
        constant_score=await constant_answer_score(data.verifier, data.heldout),
        error_limit=parts.config.rollout.error_limit,
    )


class _Preferred:
    """The share of held-out pairs whose chosen side has the higher implicit reward."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._references = reference_cache(parts, "heldout-references.bin")
        self._references.start()

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts = self._parts
        assert parts.objective.loss is not None, "a preference stage trains a direct loss"
        rules = RowRules(parts.data.renderer, parts.data.shape.max_context)
        chosen, rejected = await asyncio.to_thread(
            heldout_rewards, parts.objective.loss, parts.data.heldout, rules, self._references, parts.trainer.score
        )
        return [pair_results(chosen, rejected, stage=parts.index, step=step, budget=_budget(parts.data.heldout))]


class _Scores:
    """How often a scalar head is right about held-out pairs or steps."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts = self._parts
        said, truth = await asyncio.to_thread(_head_scores, parts, parts.data.heldout)
        name = "steps" if _is_steps(parts) else "pairs"
        result = result_of(
            _judged(parts, said, truth), stage=parts.index, step=step, name=name, budget=_budget(parts.data.heldout)
        )
        return [result]


def calibration_writer(parts: Parts) -> Callable[[Path], None] | None:
    """What puts the scale and the calibration report of a reward model into its checkpoints; None for other stages."""
    if "scores" not in parts.objective.needs:
        return None
    tasks = parts.data.heldout or parts.data.probe[:CALIBRATION_TASKS]

    def score() -> tuple[list[list[float]], list[list[float]]]:
        return _head_scores(parts, tasks)

    def judge(said: list[list[float]], truth: list[list[float]]) -> Mapping[str, object]:
        return _judged(parts, said, truth).as_json()

    return Calibration(score, judge, is_scaled=not _is_steps(parts))


def _is_steps(parts: Parts) -> bool:
    return parts.objective.loss is not None and parts.objective.loss.name == "steps"


def _head_scores(parts: Parts, tasks: Sequence[Task]) -> tuple[list[list[float]], list[list[float]]]:
    make_rows = row_maker(parts.config, parts.objective, parts.data)
    return scores_of(lambda rows: parts.trainer.score(rows, "policy"), tasks, make_rows)


def _judged(parts: Parts, said: list[list[float]], truth: list[list[float]]) -> Reliability:
    if _is_steps(parts):
        return judge_steps(said, truth)
    scores = [score for row in said for score in row]  # one per row, the chosen one first
    return judge_pairs(scores[0::2], scores[1::2])


def _budget(tasks: Sequence[Task]) -> dict[str, str | int]:
    digest = hashlib.sha256("".join(fingerprint(task) for task in tasks).encode()).hexdigest()
    return {"examples": len(tasks), "prompts_sha256": digest}
