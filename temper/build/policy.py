"""Opening a checkpoint in order to ask it: model, tokenizer, renderer and engine.

Owns: how a checkpoint is opened by every verb and from Python, and how an engine is sized. Refuses: training; the
weights do not change while a policy is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from temper.build.models import pick_device, pick_dtype
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.decoder import Numerics
from temper.models.load import ModelShape, end_ids, load_model, load_tokenizer, read_shape
from temper.tasks.chat_options import set_chat_options
from temper.tasks.render import Renderer
from temper.types import Message, Request, SamplingParams, Scalar

BLOCK_SIZE = 16
"""Tokens per KV block."""
TOKENS_PER_STEP = 2048
USUAL_LENGTH = 2048
"""Tokens of a usual sequence, prompt included."""


@dataclass(frozen=True, kw_only=True)
class PolicyDescription:
    """What a checkpoint says of itself before its weights are read."""

    folder: Path
    shape: ModelShape
    tokenizer: Any
    end_ids: tuple[int, ...]
    """Every id that ends a turn."""

    def make_renderer(self, system: str = "", template: str = "{prompt}") -> Renderer:
        """UserError for a tokenizer without a chat template."""
        return Renderer(self.tokenizer, system, template, eos_ids=self.end_ids)


def describe_policy(folder: Path, chat_options: Mapping[str, Scalar] = MappingProxyType({})) -> PolicyDescription:
    """Reads a checkpoint directory without its weights. UserError for one that cannot be played.

    chat_options: variables of its chat template, over those that its training wrote there.
    """
    tokenizer = load_tokenizer(folder)
    set_chat_options(tokenizer, chat_options)
    return PolicyDescription(
        folder=folder, shape=read_shape(folder), tokenizer=tokenizer, end_ids=end_ids(folder, tokenizer)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many sequences an engine draws together, and how long they are."""

    seed: int = 0
    max_running: int = 64
    max_length: int = 0
    """Longest sequence, prompt included; 0: the model's context."""
    usual_length: int = USUAL_LENGTH
    """The cache has room for this many tokens of every running sequence, and at least for one of the longest. Sequences
    that grow beyond that are preempted, never refused."""


def open_engine(
    policy: PolicyDescription,
    room: Room,
    *,
    device: str = "auto",
    dtype: str = "auto",
    numerics: Numerics = "fast",
    decode: Callable[[list[int]], str] | None = None,
) -> LocalEngine:
    """Loads the weights into an engine: bfloat16 on a GPU, float32 on a CPU, unless a type is given.

    decode: text of token ids; only requests with stop texts need it.
    """
    where = pick_device(device)
    model = load_model(policy.folder, pick_dtype(dtype, where), where, numerics)
    longest = room.max_length or policy.shape.max_context
    tokens = max(room.max_running * min(longest, _whole_blocks(room.usual_length)), longest)
    settings = size_engine(seed=room.seed, max_running=room.max_running, max_length=longest, kv_tokens=tokens)
    return LocalEngine(model, settings, decode=decode)


def size_engine(
    *, seed: int, max_running: int, max_length: int, kv_tokens: int, tokens_per_step: int = TOKENS_PER_STEP
) -> EngineSettings:
    """An engine whose cache holds `kv_tokens`, with a block more for every running sequence."""
    return EngineSettings(
        seed=seed,
        block_size=BLOCK_SIZE,
        num_blocks=-(-kv_tokens // BLOCK_SIZE) + max_running + 2,
        max_running=max_running,
        tokens_per_step=max(tokens_per_step, max_running + 1),
        max_length=max_length,
    )


def _whole_blocks(length: int) -> int:
    return -(-length // BLOCK_SIZE) * BLOCK_SIZE


@dataclass(kw_only=True)
class OpenPolicy:
    """A checkpoint that can be asked. Close its engine when done."""

    description: PolicyDescription
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


def open_policy(folder: Path, room: Room = Room(), *, dtype: str = "auto") -> OpenPolicy:
    """Loads a checkpoint directory in order to talk to it."""
    description = describe_policy(folder)
    renderer = description.make_renderer()  # first: what has no chat template is refused before weights are read
    return OpenPolicy(description=description, renderer=renderer, engine=open_engine(description, room, dtype=dtype))
