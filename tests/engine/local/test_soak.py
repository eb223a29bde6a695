"""A thousand random requests leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models.load import prepare
from temper.types import Completion, Finish, Publication, Request, SamplingParams

NUM_BLOCKS = 40


def make_engine() -> LocalEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    settings = EngineSettings(
        seed=1, block_size=4, num_blocks=NUM_BLOCKS, max_running=16, tokens_per_step=64, max_length=48
    )
    model = prepare(AutoModelForCausalLM.from_config(config).eval())
    return LocalEngine(model, settings, decode=lambda ids: "".join(chr(97 + token % 26) for token in ids))


def random_request(random: Random, name: str, said: list[tuple[int, ...]]) -> Request:
    """A new text, or the next turn of one that was said before."""
    start = random.choice(said) if said and random.random() < 0.5 else ()
    prompt = (*start, *(random.randrange(29) for _ in range(random.randint(1, 12))))[-36:]
    params = SamplingParams(
        temperature=random.choice((0.0, 0.7, 1.0)),
        max_new_tokens=random.randint(1, 10),
        stop_ids=tuple(random.sample(range(29), random.randint(0, 2))),
        top_k=random.choice((0, 0, 0, 5)),
        stop=random.choice(((), (), ("ab", "c"))),
        top_logprobs=random.choice((0, 0, 2)),
        entropy=random.random() < 0.1,
    )
    return Request(id=name, prompt_ids=prompt, params=params)


def soak(engine: LocalEngine, random: Random, count: int) -> list[Completion]:
    """Rounds of requests at once; some are aborted, interrupted or cancelled, and the weights change in between."""
    completions: list[Completion] = []

    async def run() -> None:
        said: list[tuple[int, ...]] = []
        for turn in range(count // 25):
            asked = [random_request(random, f"{turn}/{k}", said) for k in range(25)]
            tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
            for _ in range(random.randint(0, 12)):
                await asyncio.sleep(0)
            await engine.abort(random.choice(asked).id)
            await engine.interrupt(random.choice(asked).id)
            if random.random() < 0.3:
                tensors = {name: value * 0.9 for name, value in engine._model.named_parameters()}
                await engine.load(Publication(version=engine.version + 1, tensors=tensors))
            done, waiting = await asyncio.wait(tasks, timeout=60)
            assert not waiting
            completions.extend(task.result() for task in done)
            said = [(*c.prompt_ids, *c.token_ids) for c in (task.result() for task in done)]

    asyncio.run(run())
    return completions


def reachable(*roots: Any) -> int:
    """Python objects that can be reached from the engine's own."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        found = stack.pop()
        is_foreign = isinstance(found, type | torch.nn.Module) or type(found).__name__ in (
            "module",
            "function",
            "method",
        )
        if id(found) in seen or is_foreign:
            continue
        seen.add(id(found))
        stack.extend(gc.get_referents(found))
    return len(seen)


@pytest.mark.heavy
def test_a_thousand_random_requests_leave_nothing_behind() -> None:
    engine, random = make_engine(), Random(3)
    with torch.no_grad():
        completions = soak(engine, random, 300)
        after_some = reachable(engine._scheduler, engine._stepper.meter)
        completions += soak(engine, random, 700)
    after_all = reachable(engine._scheduler, engine._stepper.meter)
    assert len(completions) == 1000
    assert {completion.finish for completion in completions} == set(Finish)
    totals = engine.utilisation()
    assert totals["temper_engine_preemptions_total"] > 0
    assert totals["temper_engine_found_tokens_total"] > 0
    assert not engine.has_work
    scheduler = engine._scheduler
    assert not scheduler.live
    assert not scheduler.waiting
    assert not scheduler._leaders._by_prompt
    assert not any(scheduler.rows.sequences)
    assert scheduler.pool.num_free == NUM_BLOCKS - 1
    assert not scheduler.pool._references.any()
    # What is known of prefixes is bounded by the blocks: a few objects each.
    assert abs(after_all - after_some) < 10 * NUM_BLOCKS, (after_some, after_all)
