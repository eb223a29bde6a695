"""The same pairs in the same order through TRL's DPOTrainer and through Temper: equal losses, step by step."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.models.load import load_model, load_tokenizer
from temper.models.tiny import make_tiny_model
from temper.objectives import Objective
from temper.objectives.losses.pairs import PAIR_LOSSES
from temper.objectives.presets.preferences import DPO, IPO, ROBUST
from temper.stages.preference import offline_source
from temper.stages.reading.preference_rows import RowRules
from temper.stages.reading.reference_cache import References
from temper.tasks.render import Renderer
from temper.trainer.local import AuxiliaryModels, LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Message, Sample, Task

pytest.importorskip("trl")
pytest.importorskip("datasets")
import datasets
from trl import DPOConfig, DPOTrainer

pytestmark = pytest.mark.heavy
STEPS, BATCH, RATE, CONTEXT = 20, 4, 3e-3, 64
TOLERANCE = 1e-4
LETTERS = "abcdefghijklmnopqrstuvwxyz "


class InOrder:
    """The pairs again and again: the second time the reference is not asked any more."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks: Iterator[tuple[int, Task]] = enumerate(cycle(tasks))

    def next(self) -> tuple[int, Task]:
        return next(self._tasks)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Any) -> None:
        """Never resumed here."""


class Recorded(DPOTrainer):
    """Takes pairs in order, and keeps each step's loss unrounded."""

    def _get_train_sampler(self, *rest: Any, **named: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *rest: Any, **named: Any) -> Any:
        loss = super().compute_loss(*rest, **named)
        self.__dict__.setdefault("losses", []).append(float(loss.detach()))
        return loss


def make_pairs(count: int) -> list[Task]:
    draw = random.Random(7)

    def text(longest: int) -> str:
        return "".join(draw.choice(LETTERS[:-1]) for _ in range(draw.randint(1, longest)))

    return [
        Task(
            id=f"p{number}",
            messages=(Message(role="user", content=text(12)),),
            answer=text(20),
            extra={"rejected": text(20)},
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("dpo") / "model", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64,
        context=CONTEXT, alphabet=LETTERS, seed=3,
    )  # fmt: skip


def by_trl(folder: Path, tasks: list[Task], output: Path, **settings: Any) -> tuple[list[float], float]:
    """Losses of all steps, and the seconds they took."""
    rows = [
        {
            "prompt": [{"role": "user", "content": task.messages[0].content}],
            "chosen": [{"role": "assistant", "content": task.answer}],
            "rejected": [{"role": "assistant", "content": task.extra["rejected"]}],
        }
        for task in tasks
    ]
    config = DPOConfig(
        output_dir=str(output), per_device_train_batch_size=BATCH, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch", beta=0.1,
        max_length=CONTEXT, precompute_ref_log_probs=True, bf16=False, use_cpu=True, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, seed=0, **settings,
    )  # fmt: skip
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(folder),
    )
    started = time.perf_counter()
    trainer.train()
    return trainer.losses, time.perf_counter() - started


def by_temper(
    folder: Path, tasks: list[Task], objective: Objective, change: Callable[[Sample], Sample] | None = None
) -> tuple[list[float], float]:
    cpu = torch.device("cpu")
    model, reference = (load_model(folder, torch.float32, cpu) for _ in range(2))
    tokenizer = load_tokenizer(folder)
    optimizer = OptimizerSettings(learning_rate=RATE, max_grad_norm=1.0)
    trainer = LocalTrainer(
        model,
        tokenizer,
        objective,
        TrainerSettings(optimizer=optimizer, temperature=1.0, total_steps=STEPS, traces=False),
        pack=partial(pack, tokens_per_microbatch=4096, together="group"),
        others=AuxiliaryModels(reference=reference),
    )
    rules = RowRules(Renderer(tokenizer), CONTEXT)
    source = offline_source(objective, InOrder(tasks), rules, References(trainer.score), trainer.score, BATCH)

    async def run() -> list[float]:
        losses = []
        for step in range(1, STEPS + 1):
            batch = await source.take(step)
            if change is not None:
                batch = replace(batch, updates=tuple(tuple(map(change, update)) for update in batch.updates))
            losses.append(trainer.step(batch).loss)
        return losses

    started = time.perf_counter()
    losses = asyncio.run(run())
    return losses, time.perf_counter() - started


def distance(first: list[float], second: list[float]) -> float:
    return max(abs(one - two) for one, two in zip(first, second, strict=True))


CASES: list[tuple[dict[str, Any], Objective]] = [
    ({"loss_type": ["sigmoid"]}, DPO),
    ({"loss_type": ["ipo"]}, IPO),
    ({"loss_type": ["robust"], "label_smoothing": 0.1}, ROBUST),
]


@pytest.mark.parametrize(("settings", "objective"), CASES, ids=lambda value: getattr(value, "name", ""))
def test_twenty_steps_have_the_losses_of_trl(
    settings: dict[str, Any], objective: Objective, model_folder: Path, tmp_path: Path
) -> None:
    """Ten batches, twice: the second time the reference's log-probabilities come from the cache."""
    tasks = make_pairs(BATCH * STEPS // 2)
    theirs, their_seconds = by_trl(model_folder, tasks, tmp_path, **settings)
    ours, our_seconds = by_temper(model_folder, tasks, objective)
    assert len(theirs) == STEPS
    assert abs(theirs[-1] - theirs[0]) > 20 * TOLERANCE, "a curve that does not move proves little"
    assert distance(theirs, ours) < TOLERANCE
    print(
        f"{objective.name}: {distance(theirs, ours):.1e} apart; TRL {their_seconds:.2f} s, Temper {our_seconds:.2f} s"
    )


def test_the_comparison_rejects_what_is_slightly_wrong(model_folder: Path, tmp_path: Path) -> None:
    """The mutations: another beta, the end token left out, a token of the prompt trained, pairs of another order."""
    tasks = make_pairs(BATCH * STEPS // 2)
    theirs, _ = by_trl(model_folder, tasks, tmp_path)

    def without_end(row: Sample) -> Sample:
        return replace(row, loss_mask=[*row.loss_mask[:-1], 0], weights=[*row.weights[:-1], 0.0])

    def with_prompt(row: Sample) -> Sample:
        place = row.loss_mask.index(1) - 1
        return replace(row, loss_mask=[m or int(i == place) for i, m in enumerate(row.loss_mask)])

    other_beta = replace(DPO, loss=PAIR_LOSSES["dpo"](beta=0.101))
    for name, wrong in {
        "beta": by_temper(model_folder, tasks, other_beta),
        "end": by_temper(model_folder, tasks, DPO, without_end),
        "prompt": by_temper(model_folder, tasks, DPO, with_prompt),
        "order": by_temper(model_folder, tasks[::-1], DPO),
    }.items():
        assert distance(theirs, wrong[0]) > TOLERANCE, name
