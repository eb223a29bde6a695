"""A real model through the engine. TEMPER_TEST_MODEL names its directory, e.g. that of SmolLM2-135M-Instruct."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.load import load_model
from temper.types import Completion, Request, SamplingParams

MODEL = os.environ.get("TEMPER_TEST_MODEL", "")
DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
PROMPTS, NEW = 64, 32
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL, reason="TEMPER_TEST_MODEL names no model directory"),
    pytest.mark.skipif(not (DATA / "gsm8k").is_dir(), reason=f"no GSM8K under {DATA}"),
]


def prompts() -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    lines = (DATA / "gsm8k" / "test.jsonl").read_text().splitlines()[:PROMPTS]
    chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    return [tuple(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]


def test_greedy_answers_to_64_real_prompts_are_those_of_transformers_up_to_ties() -> None:
    """Where they part, the two best tokens are so close that rounding decides; nowhere else."""
    asked = prompts()
    settings = EngineSettings(
        seed=0, block_size=16, num_blocks=2000, max_running=PROMPTS, tokens_per_step=4096, max_length=1024
    )
    engine = LocalEngine(load_model(Path(MODEL), torch.float32, torch.device("cpu")), settings)
    params = SamplingParams(temperature=0.0, max_new_tokens=NEW, top_logprobs=2)

    async def run() -> list[Completion]:
        requests = [Request(id=f"r{i}", prompt_ids=ids, params=params) for i, ids in enumerate(asked)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    drawn = asyncio.run(run())
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    equal = 0
    for ids, completion in zip(asked, drawn, strict=True):
        with torch.inference_mode():
            whole = torch.tensor([[*ids, *completion.token_ids]])
            best = reference(whole).logits[0, len(ids) - 1 : -1].argmax(-1).tolist()
        for place, (ours, theirs) in enumerate(zip(completion.token_ids, best, strict=True)):
            if ours != theirs:
                first, second = completion.top_logprobs[place]  # type: ignore[index]
                assert first - second < 1e-4, f"token {place}: not a tie"
        equal += completion.token_ids == best
    assert equal >= PROMPTS - 2
