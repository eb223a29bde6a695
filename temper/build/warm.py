"""What is compiled, recorded and allocated before step 1, so that it is as fast as the steps after it.

Owns: what a stage will meet, in numbers, and what is said meanwhile. Refuses: CPUs, where nothing is compiled and every
bit stays as it was.
"""

from __future__ import annotations

import asyncio

import torch

from temper.batching.made_up import RowShape, made_up_rows
from temper.build.memory import workload_of
from temper.build.models import pick_device
from temper.build.stage import Stage
from temper.engine.fleet.fleet import Fleet
from temper.engine.local.engine import LocalEngine
from temper.engine.local.mixture import WithOpponent
from temper.engine.local.warming import ExpectedRequests
from temper.planning.workload import Workload
from temper.stages.kinds import kind_of
from temper.types import Sample

COMPILING = "compiling kernels"


async def warm_up(stage: Stage, first_step: int) -> None:
    """On a GPU: the engine's recordings, and then, as memory goes, the trainer's largest microbatch."""
    if pick_device(stage.config.model.device).type != "cuda":
        return
    work = workload_of(stage.config, stage.objective, stage.data, stage.origin)
    await warm_engine(stage, work)
    await warm_trainer(stage, work)
    stage.listeners.doing(f"comparing sampler and trainer, measuring the held-out score before step {first_step}", "")


async def warm_engine(stage: Stage, work: Workload) -> None:
    """An engine that draws for evaluations alone is left as it is: its recordings are no part of a step."""
    if not stage.data.is_rolling or not isinstance(stage.sampler, LocalEngine | WithOpponent | Fleet):
        return

    def tell(done: int, total: int) -> None:
        stage.listeners.doing(COMPILING, f"recording {done + 1} of {total} sizes")

    await stage.sampler.warm_up(expected_requests(stage, work), tell)


async def warm_trainer(stage: Stage, work: Workload) -> None:
    """A microbatch that does not fit is no reason to stop: rows are rarely as long as they may become."""
    if not kind_of(stage.config).trains:
        return
    rows = planned_rows(stage, work)
    num_tokens = sum(len(row.token_ids) for row in rows)
    stage.listeners.doing(COMPILING, f"a microbatch of {num_tokens:,} tokens")
    try:
        await asyncio.to_thread(stage.trainer.warm_up, rows)
    except torch.OutOfMemoryError:
        stage.listeners.warn(
            f"a microbatch of {num_tokens:,} tokens, the largest that may come, does not fit into the memory that is "
            f"left. If a step runs out of it, lower trainer.tokens_per_microbatch or sampling.max_new_tokens"
        )
        torch.cuda.empty_cache()


def expected_requests(stage: Stage, work: Workload) -> ExpectedRequests:
    """With a held-out set as many rows as the engine takes: all of its prompts are asked at once."""
    config, data = stage.config, stage.data
    in_flight = config.rollout.groups_per_step * (1 + config.rollout.max_staleness)
    num_rows = config.engine.max_running if data.heldout else in_flight * config.rollout.group_size
    return ExpectedRequests(
        num_rows=min(num_rows, config.engine.max_running),
        num_prompts=in_flight,
        prompt_tokens=max(1, work.prompt_tokens),
        longest=data.longest_prompt + config.longest_completion,
        params=stage.setup.params,
    )


def planned_rows(stage: Stage, work: Workload) -> list[Sample]:
    """The largest microbatch that is planned, of rows as long as they may become."""
    params, is_rolling = stage.setup.params, stage.data.is_rolling
    shape = RowShape(
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.completion_tokens,
        vocabulary=stage.data.shape.vocab_size,
        version=stage.trainer.version,
        num_top=params.top_logprobs if is_rolling else 0,
        has_keep_sets=is_rolling and bool(params.top_k or params.top_p < 1 or params.min_p),
        teacher=next(iter(stage.config.model.taught_by), ""),
    )
    return made_up_rows(shape, num_rows=work.num_rows, group_size=work.group_size)
