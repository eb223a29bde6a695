"""What is said when a GPU has no room while a stage is loaded or runs.

Owns: the message, and the key to change. Refuses: planning (memory.py), and going on: a run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from temper.build.memory import describe_peak, workload_of
from temper.config import RunConfig
from temper.config.memory import KEYS
from temper.errors import BackendError, OutOfMemory
from temper.objectives import Objective
from temper.planning.choice import LEAST_RUNNING, cache_tokens
from temper.planning.gpus import GIB
from temper.planning.host import free_host_bytes
from temper.planning.memory import plan_memory
from temper.planning.workload import Workload, by_gpu
from temper.stages.reading.data import StageData
from temper.trainer.memory import find_full

LEAST_MICROBATCH = 1024
"""A smaller one is no advice: single rows are longer."""
Less = Callable[[Workload], str]
"""A change of one key that takes less memory than there is now; "": it is at its least, or would change nothing."""


@contextmanager
def explain_out_of_memory(
    config: RunConfig, objective: Objective, data: StageData, origin: Path, *, phase: str = "a pass outside of the step"
) -> Iterator[None]:
    """Out of memory inside becomes a BackendError that says in which phase, what was planned, and what to change.

    `phase`: what is done inside, where the error does not say it. `origin`: directory of the stage's model.
    """
    try:
        yield
    except Exception as error:
        if (full := find_full(error, phase)) is None:
            raise
        raise BackendError(_explain_full(full, config, objective, data, origin)) from error


def _explain_full(error: OutOfMemory, config: RunConfig, objective: Objective, data: StageData, origin: Path) -> str:
    work = workload_of(config, objective, data, origin)
    planned = max((plan_memory(side) for side in by_gpu(work).values()), key=lambda plan: plan.needed_bytes)
    changes = (less(work) for less in LESS.get(error.phase, LESS["scoring"]))
    change = next(filter(None, changes), "") or "Use a smaller model, shorter rows or a larger GPU"
    return (
        f"{error}. Planned were {planned.peak_bytes / GIB:.1f} GiB, {describe_peak(planned)}; what other programs hold "
        f"on the GPU comes on top. What was saved is whole. {change}; then go on with --resume"
    )


def _smaller_microbatch(work: Workload) -> str:
    """Half of what a microbatch has, which may be less than it might have. A row is in one, however long it is."""
    size = max(LEAST_MICROBATCH, work.row_tokens, work.microbatch_tokens // 2)
    return f"Set {KEYS['tokens_per_microbatch']} = {size}" if size < work.microbatch_tokens else ""


def _recomputed(work: Workload) -> str:
    """First at all; then from inputs that wait on the host."""
    key, kind = KEYS["gradient_checkpointing"], work.choice.gradient_checkpointing
    if not kind:
        return f"Set {key} = true"
    return f'Set {key} = "offload"' if kind != "offload" else ""


def _states_away(work: Workload) -> str:
    """In place of narrower ones: a run is resumed with the states that it was started with."""
    if work.offload or not work.trains:
        return ""
    held = plan_memory(replace(work, offload=True)).host_bytes
    free = free_host_bytes()
    is_room = free is None or held <= free
    return f"Set optim.offload = true (with {held / GIB:.1f} GiB of the memory of each host)" if is_room else ""


def _frozen_away(work: Workload) -> str:
    return "Set model.offload = true" if work.frozen and not work.offload_frozen and not work.parts else ""


def _smaller_cache(work: Workload) -> str:
    """Of an engine on a trainer's GPU. It has a number even where the recipe leaves it to what is enough."""
    return _smaller_cache_anywhere(work) if work.engines_here else ""


def _smaller_cache_anywhere(work: Workload) -> str:
    size = cache_tokens(work, 0.5)
    is_planned = work.samples and work.engine != "elsewhere"
    return f"Set {KEYS['kv_tokens']} = {size}" if is_planned and size < work.choice.kv_tokens else ""


def _smaller_passes(work: Workload) -> str:
    """Of an engine: a pass has a token of every running sequence at least."""
    size = work.pass_tokens // 2
    return f"Set engine.tokens_per_step = {size}" if size > work.max_running else ""


def _fewer_running(work: Workload) -> str:
    """Logits of a first token and of a recorded step are those of all running sequences."""
    size = work.max_running // 2
    return f"Set engine.max_running = {size}" if size >= LEAST_RUNNING else ""


LESS: dict[str, Sequence[Less]] = {
    "loading": (_smaller_cache, _frozen_away, _states_away),
    "rollout": (_smaller_cache_anywhere, _smaller_passes, _fewer_running),
    "forward_backward": (_smaller_microbatch, _recomputed, _states_away, _frozen_away, _smaller_cache),
    "critic": (_smaller_microbatch, _recomputed, _states_away, _frozen_away, _smaller_cache),
    "optimizer": (_states_away, _frozen_away, _smaller_cache),
    # Without a gradient nothing is kept that could be computed again.
    "scoring": (_smaller_microbatch, _frozen_away, _states_away, _smaller_cache),
}
"""What helps when a phase of a step finds no room, the cheapest first; other phases score rows."""
