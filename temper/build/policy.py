"""Opening a checkpoint in order to ask it: model, tokenizer, renderer and engine.

Owns: how such an engine is sized. Refuses: training; the weights do not change while it is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper.build.models import pick_device, pick_dtype
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.load import ModelShape, end_ids, load_model, load_tokenizer, read_shape
from temper.tasks.render import Renderer
from temper.types import Message, Request, SamplingParams

BLOCK_SIZE = 16
"""Tokens per KV block."""
TOKENS_PER_STEP = 2048
USUAL_LENGTH = 2048
"""Tokens of a usual sequence: the cache has room for this many of every running one, and at least for one full context.
Sequences that grow beyond that are preempted, never refused."""


@dataclass(kw_only=True)
class OpenPolicy:
    """A checkpoint that can be asked. Close its engine when done."""

    folder: Path
    shape: ModelShape
    renderer: Renderer
    engine: LocalEngine
    num_asked: int = 0

    async def answer(
        self,
        conversations: Sequence[Sequence[Mapping[str, str]]],
        count: int,
        *,
        temperature: float,
        max_new_tokens: int,
        top_p: float = 1.0,
    ) -> list[list[str]]:
        """`count` answers to each conversation, all drawn together."""
        params = SamplingParams(
            temperature=temperature, max_new_tokens=max_new_tokens, top_p=top_p, stop_ids=self.renderer.stop_ids
        )
        requests = []
        for conversation in conversations:
            prompt_ids = self.renderer.prompt_ids(tuple(Message(**message) for message in conversation))
            self.num_asked += 1
            requests += [
                Request(id=f"{self.num_asked}/{member}", prompt_ids=prompt_ids, params=params)
                for member in range(count)
            ]
        completions = await asyncio.gather(*(self.engine.generate(request) for request in requests))
        texts = [self.renderer.decode(completion.token_ids) for completion in completions]
        return [texts[start : start + count] for start in range(0, len(texts), count)]


def open_policy(folder: Path, *, seed: int = 0, max_running: int = 64, dtype: str = "auto") -> OpenPolicy:
    """Loads a checkpoint directory: bfloat16 on a GPU, float32 on a CPU, unless a type is given."""
    tokenizer, shape, device = load_tokenizer(folder), read_shape(folder), pick_device("auto")
    model = load_model(folder, pick_dtype(dtype, device), device)
    return OpenPolicy(
        folder=folder,
        shape=shape,
        renderer=Renderer(tokenizer, eos_ids=end_ids(folder, tokenizer)),
        engine=LocalEngine(model, size_engine(seed=seed, max_running=max_running, max_length=shape.max_context)),
    )


def size_engine(*, seed: int, max_running: int, max_length: int, usual_length: int = USUAL_LENGTH) -> EngineSettings:
    """An engine with room for `max_running` sequences of a usual length, and for one of the longest."""
    tokens = max(max_running * min(max_length, usual_length), max_length)
    return EngineSettings(
        seed=seed,
        block_size=BLOCK_SIZE,
        num_blocks=-(-tokens // BLOCK_SIZE) + max_running + 2,
        max_running=max_running,
        tokens_per_step=max(TOKENS_PER_STEP, max_running + 1),
        max_length=max_length,
    )
