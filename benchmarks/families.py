"""Which of transformers' causal models Temper computes rightly: a tiny random model of each is tried.

    python benchmarks/families.py                  # all of them; writes temper/models/families.json
    python benchmarks/families.py qwen3 jamba      # these, and writes nothing; with --write, what changed for them
A family is tried when its log-probabilities by packed, chunked and cached passes equal those of its own forward pass,
the local engine draws greedily what that pass says (batched, preempted, behind a found prefix), packed rows keep apart,
and a publication of its weights is taken over. Any other is refused, with what was seen as the reason.
A family of which no tiny model can be made is left out: one that is loaded is compared with itself (models/proof.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.models import proof
from temper.models.load import prepare
from temper.parity.isolation import check_isolation
from temper.trainer.weights import publish
from temper.types import Request, SamplingParams

TABLE = Path(__file__).parents[1] / "temper" / "models" / "families.json"
VOCABULARY, CONTEXT, NEW_TOKENS = 97, 128, 12
MAX_PARAMETERS = 6_000_000
"""A model that is larger, although made tiny, has parts beside its decoder."""
MAX_GAP = 1e-3
"""Nats, in float32."""
SECONDS = 60
REASONED = ("refused", "left out")
TIGHT = {"block_size": 4, "num_blocks": 40, "max_running": 3, "tokens_per_step": 16, "max_length": CONTEXT}
"""Chunked prefill, few rows, and so few blocks that sequences are preempted."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "hidden_size_per_layer_input": 8, "expert_dim": 32,
    "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "moe_intermediate_size": 32, "dim_ff": 96,
    "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 96, "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "rotary_dim": 8, "kv_channels": 16,
    "max_position_embeddings": CONTEXT, "n_positions": CONTEXT, "max_seq_len": CONTEXT,
    "sliding_window": 8, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "moe_num_experts": 4, "moe_k": 2, "first_k_dense_replace": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16,
    "v_head_dim": 12,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 32,
    "mamba_expand": 2, "n_mamba_heads": 4, "mamba_n_groups": 1, "mamba_d_ssm": 128,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
"""Small numbers for those of these fields that a configuration has."""

LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
"""Latent attention: keys are rotated in a part of their own, and heads share nothing."""
WINDOWED: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 2}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk1": LATENT, "axk2": LATENT, "deepseek_v2": LATENT, "deepseek_v3": LATENT, "deepseek_v32": LATENT,
    "glm4_moe_lite": LATENT, "glm_moe_dsa": LATENT, "longcat_flash": LATENT, "youtu": LATENT, "minicpm3": LATENT,
    "qwen2": WINDOWED, "qwen3": WINDOWED, "qwen3_moe": WINDOWED,
    "qwen2_moe": {"use_sliding_window": False}, "phimoe": {"sliding_window": CONTEXT},  # see MASKED_WINDOWS
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2, "index_head_dim": 16,
                           "layer_types": ["minimax_m3_sparse", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "n_groups": 1, "mamba_head_dim": 32},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
}  # fmt: skip
"""What one family needs beyond that."""


@dataclass(frozen=True)
class Trial:
    name: str
    verdict: str
    """"tried", "refused" or "left out"."""
    reason: str = ""
    gap: float = 0.0


class NotTiny(Exception):
    """No tiny model of the family can be made."""


def tiny_config(name: str) -> Any:
    """The family's own configuration with small numbers in it, and one layer of each kind that it has."""
    kind = CONFIG_MAPPING[name]
    whole = kind()
    text = whole.get_text_config()
    small = {key: value for key, value in SMALL.items() if _has(text, key)} | OVERRIDES.get(name, {})
    if "layer_types" not in small and (types := getattr(text, "layer_types", None)):
        kinds = sorted(set(types))
        small["layer_types"] = [kinds[place % len(kinds)] for place in range(SMALL["num_hidden_layers"])]
    # What a family derives from other settings cannot be given.
    names = {key: text.attribute_map.get(key, key) for key in small}
    small = {key: small[key] for key in small if not isinstance(getattr(type(text), names[key], None), property)}
    if text is whole:
        return kind(**small)
    part = next((part for part in ("text_config", "decoder") if getattr(whole, part, None) is text), None)
    if part is None:
        raise NotTiny("its decoder has no configuration of its own")
    return kind(**{part: small})


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # one that differs between layers
        return False


def tiny_model(name: str, seed: int = 0) -> Any:
    """Random, with numbers so large that every layer and every earlier token matters."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(tiny_config(name), trust_remote_code=False).eval()
            if (size := sum(parameter.numel() for parameter in model.parameters())) > MAX_PARAMETERS:
                raise NotTiny(f"it has {size / 1e6:.0f} million parameters that no setting of a decoder makes fewer")
            for parameter in model.parameters():
                nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
            for buffer in (b for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")):
                nn.init.normal_(buffer, 0.0, 0.1)
    except NotTiny:
        raise
    except Exception as error:
        raise NotTiny(_in_one_line(error)) from error
    return model


def try_family(name: str, seeds: Sequence[int] = (0, 1)) -> Trial:
    try:
        with _time_limit(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return max((_try(name, seed) for seed in seeds), key=lambda trial: (trial.verdict == "refused", trial.gap))
    except (NotTiny, TimeoutError) as error:
        return Trial(name, "left out", str(error) or "it takes too long")


def _try(name: str, seed: int) -> Trial:
    model = tiny_model(name, seed)
    is_blind = _is_blind(model)
    try:
        model = prepare(model)
        gap, silent = proof.gap_to_own_pass(model, seed=seed), proof.silent_layers(model)
        if not gap <= MAX_GAP:
            why = f"layers {silent} never ask Temper for attention; " if silent else ""
            return Trial(name, "refused", f"{why}log-probabilities differ by {gap:.2g} nats on average", gap)
        if is_blind:
            raise NotTiny("what it says does not depend on earlier tokens enough to be compared")
        gap = max(gap, _engine_gap(model), check_isolation(model, VOCABULARY))
    except (NotTiny, TimeoutError):
        raise
    except Exception as error:
        return Trial(name, "refused", f"Temper's pass through it fails: {_in_one_line(error)}")
    if not gap <= MAX_GAP:
        return Trial(name, "refused", f"the engine's log-probabilities differ by up to {gap:.2g} nats", gap)
    return Trial(name, "tried", gap=gap)


def _is_blind(model: Any) -> bool:
    ids = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(3))
    ids[1] = ids[0]
    ids[1, 19:22] = (ids[0, 19:22] + 1) % VOCABULARY
    try:
        with torch.inference_mode():
            first, second = model(input_ids=ids, use_cache=False).logits[:, -1].float().log_softmax(-1)
    except Exception as error:
        raise NotTiny(f"its own pass fails: {_in_one_line(error)}") from error
    return bool((first - second).abs().max() < 100 * MAX_GAP)


def _engine_gap(model: Any) -> float:
    """Largest difference between what the engine reports of greedy tokens and the best that the own pass has."""
    engine = LocalEngine(model, EngineSettings(seed=0, **TIGHT))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in (5, 30, 17, 26, 1)]
    prompts += [prompts[1][:20] + prompts[2][:4], prompts[1]]

    async def ask() -> list[Any]:
        await engine.load(publish(model, 1))
        params = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
        asked = [Request(id=str(n), prompt_ids=tuple(prompt), params=params) for n, prompt in enumerate(prompts)]
        first = await asyncio.gather(*(engine.generate(request) for request in asked))
        # A second turn, behind prefixes that are found again.
        more = [Request(id=f"again {one.id}", prompt_ids=(*one.prompt_ids, *done.token_ids, 5), params=params)
                for one, done in zip(asked, first, strict=True)]  # fmt: skip
        second = await asyncio.gather(*(engine.generate(request) for request in more))
        await engine.close()
        return list(zip((*asked, *more), (*first, *second), strict=True))

    gaps = []
    for request, completion in asyncio.run(ask()):
        row = torch.tensor([*request.prompt_ids, *completion.token_ids])
        with torch.inference_mode(), proof.own_attention(model):
            logprobs = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(-1)
        before = slice(len(request.prompt_ids) - 1, len(row) - 1)
        drawn = logprobs[before].gather(1, row[len(request.prompt_ids) :, None])[:, 0]
        reported = torch.tensor(completion.logprobs)
        gaps += [(drawn - reported).abs().max(), (logprobs[before].amax(-1) - reported).abs().max()]
    return float(torch.stack(gaps).max())


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families by model_type; none: all, and the table is written")
    parser.add_argument("--write", action="store_true", help="put the families that are named into the table")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    trials = {}
    for name in asked.names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        trials[name] = trial = try_family(name)
        print(f"{name:26} {trial.verdict:9} {trial.gap:8.1e} {trial.reason}", flush=True)
    if asked.write or not asked.names:
        write(trials, json.loads(TABLE.read_text()) if asked.names else {})


def write(trials: Mapping[str, Trial], table: Mapping[str, Any]) -> None:
    """Writes the table, with these trials in place of what it said of them."""
    kept = {
        **dict.fromkeys(table.get("tried", ()), ("tried", "")),
        **{name: (verdict, why) for verdict in REASONED for name, why in table.get(verdict, {}).items()},
    }
    all_of_them = sorted({**kept, **{name: (trial.verdict, trial.reason) for name, trial in trials.items()}}.items())
    made: dict[str, Any] = {
        "made by": f"benchmarks/families.py with transformers {transformers.__version__}",
        "tried": [name for name, (verdict, _) in all_of_them if verdict == "tried"],
        **{key: {name: why for name, (verdict, why) in all_of_them if verdict == key} for key in REASONED},
    }
    TABLE.write_text(json.dumps(made, indent=1) + "\n")
    counts = (f"{len(made[key])} {key}" for key in ("tried", *REASONED))
    print(f"{TABLE}: {', '.join(counts)}", file=sys.stderr)


if __name__ == "__main__":
    main()
