"""What is measured on held-out tasks when the policy answers them.

Owns: the ways in which it answers, and what the trainer hears of it. Refuses: drawing and judging (evals/), and what a
kind of stage measures in another way (its own file).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from temper.evals.evaluate import Evaluation, HeldOut, constant_scores, evaluate
from temper.runs.records import AuditRecord, EffectRecord
from temper.stages.parts import Parts
from temper.tasks.dataset import fingerprint
from temper.types import EvaluationResult, Task

Audit = Callable[[Sequence[AuditRecord], Sequence[EffectRecord]], None]
Measure = Callable[[int, Mapping[str, float], Audit | None], Awaitable[list[EvaluationResult]]]
"""(step, metrics of that step, where transcripts and side effects go) -> held-out scores of the weights of now."""


def measure_answers(parts: Parts) -> Measure:
    return Answers(parts)


class Answers:
    """Greedy and sampled answers, judged by the verifier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._heldout: HeldOut | None = None

    async def __call__(self, step: int, metrics: Mapping[str, float], audit: Audit | None) -> list[EvaluationResult]:
        parts, config = self._parts, self._parts.config.evaluation
        if self._heldout is None or parts.data.verifier.learns:  # the commonest answer's worth changes with it
            self._heldout = await _held_out(parts)
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
        results = list[EvaluationResult]()
        for way in ways:
            found, audits, effects = await evaluate(self._heldout, way, stage=parts.index, step=step, reward=reward)
            if audit is not None:
                audit(audits, effects)
            results += found
        # Of the sampled ones, and by the training reward: that is what training climbs, and a verifier that steers
        # training is no longer held out.
        seen = next(result for result in results if result.name == "sampled").details.get("reward_mean")
        if isinstance(seen, float):
            parts.trainer.observe(seen)
        return results


async def _held_out(parts: Parts) -> HeldOut:
    data = parts.data
    return HeldOut(
        setup=parts.setup,
        tasks=data.heldout,
        verifier=data.verifier,
        verifier_name=data.verifier_name,
        constant_scores=await constant_scores(data.verifier, data.heldout),
        error_limit=parts.config.rollout.error_limit,
        retries=parts.config.rollout.retries,
    )


def comparison_budget(tasks: Sequence[Task]) -> dict[str, str | int]:
    """What a measure without answers costs, and on which tasks: two results with equal budgets can be compared."""
    digest = hashlib.sha256("".join(fingerprint(task) for task in tasks).encode()).hexdigest()
    return {"examples": len(tasks), "prompts_sha256": digest}
