"""A made-up run, step by step, for the tests of the run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.runs.store.run_store import RunStore, open_run
from temper.types import (
    Batch,
    Completion,
    EvaluationResult,
    Finish,
    Group,
    Message,
    Sample,
    Score,
    Status,
    StepReport,
    Task,
    Trajectory,
    Turn,
)

StepMaker = Callable[..., tuple[StepReport, Batch]]


def make_trajectory(group_id: str, index: int, score: Score, status: Status = Status.COMPLETED) -> Trajectory:
    completion = Completion(
        prompt_ids=(5, 6), token_ids=[7, 8, index], logprobs=[-0.1, -0.2, -0.3], versions=[3, 3, 4], finish=Finish.STOP
    )
    turn = Turn(completion=completion, message=Message(role="assistant", content=f"<b>answer</b> {index}"))
    return Trajectory(
        task_id="t",
        group_id=group_id,
        index=index,
        turns=(turn,),
        status=status,
        score=score,
        score_parts={"exact": score},
    )


def make_group(draw: int, scores: tuple[Score, ...], stage: int = 0) -> Group:
    group_id = f"stage {stage}/{draw}"
    task = Task(id=f"train.jsonl:{draw % 3}", messages=(Message(role="user", content="1 + 1?"),), answer="2")
    members = tuple(make_trajectory(group_id, index, score) for index, score in enumerate(scores))
    return Group(id=group_id, draw=draw, task=task, trajectories=members)


def make_sample(group_id: str, index: int, advantage: float) -> Sample:
    mask = [0, 0, 1, 1, 1]
    return Sample(
        group_id=group_id,
        index=index,
        token_ids=[5, 6, 7, 8, index],
        loss_mask=mask,
        behavior_logprobs=[0.0, 0.0, -0.1, -0.2, -0.3],
        versions=[-1, -1, 3, 3, 4],
        advantages=[advantage * m for m in mask],
        weights=[m / 6 for m in mask],
        proximal_logprobs=[0.0, 0.0, -0.11, -0.21, -0.31] if index == 0 else None,
    )


@pytest.fixture
def make_step() -> StepMaker:
    """make_step(step, stage=0, **more metrics): one trained group of two, one dropped group with a verifier error."""

    def make(step: int, stage: int = 0, **metrics: float) -> tuple[StepReport, Batch]:
        trained = make_group(2 * step, (Score.of(1.0), Score.of(0.0)), stage)
        dropped = make_group(2 * step + 1, (Score.of(1.0), Score.error("verifier timed out")), stage)
        samples = (make_sample(trained.id, 0, 1.0), make_sample(trained.id, 1, -1.0))
        report = StepReport(
            stage=stage,
            step=step,
            version=step,
            loss=0.5 / step,
            metrics={
                "reward/mean": step / 10,
                "policy/entropy": 1.0 / 3.0,
                **metrics,
            },
            seconds={"rollout": 3.0, "train": 1.0},
            system={"sys/rollout_tok_s": 100.0 + step},
            groups_trained=1,
            groups_dropped=1,
            max_staleness=0,
        )
        return report, Batch(updates=(samples,), groups=(trained,), dropped=((dropped, "degenerate"),))

    return make


@pytest.fixture
def make_evaluation() -> Callable[..., EvaluationResult]:
    def make(step: int, score: float, stage: int = 0, name: str = "greedy", tokens: int = 16) -> EvaluationResult:
        return EvaluationResult(
            stage=stage,
            step=step,
            name=name,
            score=score,
            low=score - 0.05,
            high=score + 0.05,
            num_prompts=100,
            samples_per_prompt=1,
            constant_score=0.02,
            budget={"max_new_tokens": tokens, "prompts_sha256": "ab"},
        )

    return make


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A new run in tmp_path/run; tests close it."""
    return open_run(tmp_path / "run", config="steps = 5\n", resume=False)


@pytest.fixture(scope="session")
def wait() -> Callable[[Callable[[], bool]], None]:
    """wait(is_true): for something that another thread is about to do."""

    def until(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.02)

    return until
