"""`temper eval`, `temper sample`, `temper export`: things to do with a trained checkpoint.

Owns: finding a checkpoint, asking it, handing it on. Refuses: training.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from temper.build import build_stage, pick_device
from temper.config import RunConfig, load_recipe
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.errors import BackendError, UserError
from temper.models.load import Head, end_ids, find_checkpoint, hidden_states, load_model, load_tokenizer, read_shape
from temper.tasks.render import Renderer
from temper.trainer.attention import PackedAttention
from temper.trainer.checkpoint import latest_checkpoint
from temper.types import EvaluationResult, Message, Request, SamplingParams

EXPORTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
NOT_EXPORTED = ("state.json", "manifest.json")
LOGIT_TOLERANCE = 1e-3


def find_model(path: Path) -> Path:
    """A checkpoint directory, or the newest checkpoint of a run directory."""
    if (path / "run.db").is_file():
        found = [latest for stage in sorted((path / "checkpoints").glob("*")) if (latest := latest_checkpoint(stage))]
        if not found:
            raise UserError(f"{path} is a run without a checkpoint yet")
        return found[-1]
    return find_checkpoint(str(path))


def evaluate_checkpoint(path: Path, recipe: Path, *, overrides: Sequence[str] = ()) -> list[EvaluationResult]:
    """Held-out scores of a checkpoint by the last stage of a recipe that has a held-out set."""
    stages = [config for config in load_recipe(recipe, overrides) if config.heldout]
    if not stages:
        raise UserError(f"{recipe} has no [heldout] table, so there is nothing to evaluate on")
    return asyncio.run(_evaluate(stages[-1], find_model(path)))


async def _evaluate(config: RunConfig, model: Path) -> list[EvaluationResult]:
    stage = build_stage(config, 0, model)
    try:
        return await stage.evaluate(step=0)
    finally:
        await stage.close()


@dataclass(kw_only=True)
class Chat:
    """A checkpoint that answers. One engine for the whole conversation."""

    engine: LocalEngine
    renderer: Renderer
    params: SamplingParams
    num_asked: int = 0

    async def answer(self, messages: Sequence[Message], count: int = 1) -> list[str]:
        """`count` answers to a conversation."""
        prompt_ids = self.renderer.prompt_ids(tuple(messages))
        self.num_asked += 1
        requests = [
            Request(id=f"{self.num_asked}/{k}", prompt_ids=prompt_ids, params=self.params) for k in range(count)
        ]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        return [self.renderer.decode(completion.token_ids) for completion in completions]


def open_chat(path: Path, *, temperature: float, max_new_tokens: int, seed: int, max_running: int) -> Chat:
    folder = find_model(path)
    tokenizer, shape = load_tokenizer(folder), read_shape(folder)
    model = load_model(folder, torch.float32, pick_device("auto"))
    length = min(shape.max_context, 8192)
    settings = EngineSettings(
        seed=seed,
        block_size=16,
        num_blocks=-(-length // 16) * max_running + 2,
        max_running=max_running,
        tokens_per_step=2048,
        max_length=length,
    )
    renderer = Renderer(tokenizer, system="", template="{prompt}", eos_ids=end_ids(folder, tokenizer))
    params = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens, stop_ids=renderer.stop_ids)
    return Chat(engine=LocalEngine(model, settings), renderer=renderer, params=params)


def export(path: Path, out: Path) -> float:
    """Copies the Hugging Face part of a checkpoint and proves by logits that plain transformers reads the same model.

    Returns the largest difference of logits.
    """
    source = find_model(path)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty. Give a new directory")
    out.mkdir(parents=True, exist_ok=True)
    for pattern in EXPORTED:
        for file in source.glob(pattern):
            if file.name not in NOT_EXPORTED:
                shutil.copy2(file, out / file.name)
    gap = compare_logits(source, out)
    if gap > LOGIT_TOLERANCE:
        raise BackendError(
            f"{out}: logits differ from the checkpoint's by {gap:.3g}; the export is not the trained model"
        )
    return gap


def compare_logits(ours: Path, theirs: Path) -> float:
    """Largest difference between Temper's forward pass of one directory and plain transformers' of another."""
    model = load_model(ours, torch.float32, torch.device("cpu"))
    plain: Any = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.randint(read_shape(ours).vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attend = PackedAttention((len(ids),), ids.device)
        mine = Head.of(model).logits(hidden_states(model, ids, torch.arange(len(ids)), attend))
        return (mine - plain(ids.unsqueeze(0)).logits[0].float()).abs().max().item()
