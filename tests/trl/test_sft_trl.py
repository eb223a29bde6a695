"""The same data in the same order through TRL's SFTTrainer and through Temper: equal losses, step by step."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM

from temper.batching.pack import pack
from temper.models.load import load_model, load_tokenizer
from temper.models.tiny import make_tiny_model
from temper.objectives.losses.likelihood import SFT, likelihood
from temper.stages.sft import Examples
from temper.tasks.dataset import read_file
from temper.tasks.render import Renderer
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Task

pytest.importorskip("trl")
pytest.importorskip("datasets")
import datasets
from trl import SFTConfig, SFTTrainer

pytestmark = pytest.mark.heavy
STEPS, BATCH, RATE = 20, 4, 3e-3
TOLERANCE = 1e-4
# TRL needs the template to say which tokens an assistant generates; for everything else it is the tiny model's.
GENERATION = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class InOrder:
    def __init__(self, tasks: tuple[Task, ...]) -> None:
        self._tasks: Iterator[tuple[int, Task]] = enumerate(tasks)

    def next(self) -> tuple[int, Task]:
        return next(self._tasks)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Any) -> None:
        """Never resumed here."""


class Recorded(SFTTrainer):
    """Takes rows in order, and keeps each step's loss unrounded."""

    def _get_train_sampler(self, *rest: Any, **named: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def compute_loss(self, *rest: Any, **named: Any) -> Any:
        result = super().compute_loss(*rest, **named)
        loss = result[0] if isinstance(result, tuple) else result
        self.__dict__.setdefault("losses", []).append(float(loss.detach()))
        return result


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    alphabet = "abcdefghijklmnopqrstuvwxyz "
    return make_tiny_model(
        tmp_path / "model", layers=2, width=32, heads=2, kv_heads=1, mlp_width=64, context=64, alphabet=alphabet, seed=3
    )


def words(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=draw.randint(2, 9))).strip() or "a"


def completions() -> list[dict[str, Any]]:
    """One prompt, one answer."""
    draw = random.Random(0)
    return [
        {
            "prompt": [{"role": "user", "content": words(draw)}],
            "completion": [{"role": "assistant", "content": words(draw)}],
        }
        for _ in range(STEPS * BATCH)
    ]


def conversations() -> list[dict[str, Any]]:
    """One to three answers in each; all of them are trained."""
    draw = random.Random(1)
    return [
        {
            "messages": [
                {"role": role, "content": words(draw)}
                for _ in range(draw.randint(1, 3))
                for role in ("user", "assistant")
            ]
        }
        for _ in range(STEPS * BATCH)
    ]


def losses_of_trl(folder: Path, rows: list[dict[str, Any]], out: Path, smoothing: float) -> tuple[list[float], float]:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = GENERATION
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows),
        args=SFTConfig(
            output_dir=str(out),
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            label_smoothing_factor=smoothing,
            gradient_checkpointing=False,
            assistant_only_loss="messages" in rows[0],
            completion_only_loss=None if "messages" in rows[0] else True,
            max_length=None,
            packing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    start = time.perf_counter()
    trainer.train()
    return trainer.losses, time.perf_counter() - start


def losses_of_temper(
    folder: Path, rows: list[dict[str, Any]], out: Path, smoothing: float
) -> tuple[list[float], float]:
    path = out / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective, tokenizer = replace(SFT, loss=likelihood(smoothing=smoothing)), load_tokenizer(folder)
    settings = TrainerSettings(
        optimizer=OptimizerSettings(learning_rate=RATE), temperature=1.0, total_steps=STEPS, traces=False
    )
    trainer = LocalTrainer(
        load_model(folder, torch.float32, torch.device("cpu")),
        tokenizer,
        objective,
        settings,
        pack=lambda samples: pack(samples, 4096),
    )
    stream = InOrder(read_file(path).tasks)
    source = Examples(stream, Renderer(tokenizer), objective, batch_size=BATCH, max_length=64)
    start = time.perf_counter()
    losses = [trainer.step(asyncio.run(source.take(step))).metrics["loss/likelihood"] for step in range(1, STEPS + 1)]
    return losses, time.perf_counter() - start


@pytest.mark.parametrize(("make", "smoothing"), [(completions, 0.0), (conversations, 0.0), (completions, 0.2)])
def test_the_loss_curve_is_that_of_trl(
    make: Callable[[], list[dict[str, Any]]],
    smoothing: float,
    model_folder: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    rows = make()
    theirs, their_seconds = losses_of_trl(model_folder, rows, tmp_path / "trl", smoothing)
    ours, our_seconds = losses_of_temper(model_folder, rows, tmp_path, smoothing)
    assert len(ours) == len(theirs) == STEPS
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{make.__name__}: largest difference {worst:.2e}, TRL {their_seconds:.2f} s, Temper {our_seconds:.2f} s")
    record_property("speed_over_trl", their_seconds / our_seconds)
    assert worst < TOLERANCE
    assert ours[0] - ours[-1] > 0.1, "a curve that does not move proves little"
