"""Tokens per second of vLLM with log-probabilities, beside benchmarks/engine.py: random weights of a shape.

    python benchmarks/vllm_speed.py qwen2.5-1.5b --together 64 256
    python benchmarks/vllm_speed.py qwen3-30b-a3b-6-layers --together 64 256 --routes    # a GPU
    python benchmarks/vllm_speed.py qwen3-30b-a3b-6-layers --together 64 256 --uncompiled
Needs vLLM. Every request draws exactly --new tokens at temperature 1; tokens are neither read nor written as text. The
first time a shape is compiled, which takes minutes on a GPU; --uncompiled leaves torch.compile out, and keeps vLLM's
own kernels and recorded decode steps.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from shapes import SHAPE_HELP, configuration, shape_of

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
CONTEXT = 2048
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def start(options: argparse.Namespace, folder: str) -> Any:
    config = configuration(options.shape, context=CONTEXT)
    if config.architectures is None:
        config.architectures = [ARCHITECTURES[config.model_type]]
    config.save_pretrained(folder)
    if options.routes:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm import LLM  # type: ignore[import-not-found]

    return LLM(
        folder,
        dtype="bfloat16",
        load_format="dummy",
        trust_remote_code=False,
        max_model_len=CONTEXT,
        max_num_seqs=max(options.together),
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.6,
        enable_prefix_caching=options.routes,
        hf_overrides={"head_dtype": "float32"} if options.float32_head else {},
        **({"enable_return_routed_experts": True} if options.routes else {}),
        **({"compilation_config": UNCOMPILED} if options.uncompiled else {}),
    )


def seconds_of(llm: Any, count: int, prompt: int, new: int) -> float:
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": random.choices(range(10, 4000), k=prompt)} for _ in range(count)]
    params = SamplingParams(
        temperature=1.0, max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
    )
    begin = time.perf_counter()
    answers = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert all(len(answer.outputs[0].token_ids) == new for answer in answers)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=shape_of, help=SHAPE_HELP)
    parser.add_argument("--together", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--routes", action="store_true", help="experts: with every route told")
    parser.add_argument("--uncompiled", action="store_true", help="a GPU: without torch.compile, to start in a minute")
    parser.add_argument("--float32-head", action="store_true", help="logits in float32, as Temper asks for them")
    options = parser.parse_args()
    random.seed(0)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        llm = start(options, folder)
        print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
        for together in options.together:
            best = min(seconds_of(llm, together, options.prompt, options.new) for _ in range(3))
            print(f"{options.shape}, {together} together: {together * options.new / best:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
