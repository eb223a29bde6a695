"""What the recipes of recipes/models need on the hardware they name, planned from published shapes without any weights.

    python benchmarks/recipes.py --out docs

writes the table of docs/recipes.md anew. Rows of the samples that come with Temper stand in for the data sets, and four
characters count as a token: the figures are those of `temper plan` but for the length of prompts.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper.build import StagePlan
from temper.commands.plan import plan_stages

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes" / "models"
BEGIN, END = "<!-- models -->", "<!-- /models -->"
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "tie_word_embeddings", "max_position_embeddings")  # fmt: skip
SAMPLE = ('train=[{generator="gsm8k",seed=1}]', 'heldout={generator="gsm8k",seed=2,size=8}')
"""Rows that ship with Temper, in place of data sets that would have to be fetched."""


def _shape(family: str, *numbers: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **dict(zip(KEYS, numbers, strict=True)), **more}


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": _shape("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B-Instruct": _shape("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B-Instruct": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768),
    "Qwen/Qwen3-0.6B": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, True, 40960, head_dim=128),
    "Qwen/Qwen3-1.7B": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, True, 40960, head_dim=128),
    "Qwen/Qwen3-4B": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, True, 40960, head_dim=128),
    "Qwen/Qwen3-8B": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 40960, head_dim=128),
    "Qwen/Qwen3-32B": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936, False, 40960, head_dim=128),
    "Qwen/Qwen3-30B-A3B": _shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False, 40960, head_dim=128,
                                 moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8),
    "meta-llama/Llama-3.2-1B-Instruct": _shape("llama", 2048, 8192, 16, 32, 8, 128256, True, 131072, head_dim=64),
    "meta-llama/Llama-3.1-8B-Instruct": _shape("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
    "HuggingFaceTB/SmolLM3-3B": _shape("smollm3", 2048, 11008, 36, 16, 4, 128256, True, 65536),
    "allenai/OLMo-2-0425-1B-Instruct": _shape("olmo2", 2048, 8192, 16, 16, 16, 100352, False, 4096),
    "google/gemma-3-1b-it": _shape("gemma3_text", 1152, 6912, 26, 4, 1, 262144, True, 32768, head_dim=256,
                                   sliding_window=512, sliding_window_pattern=6),
}  # fmt: skip
"""config.json of the models, by their name on the hub: what memory and time depend on."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """What a recipe of recipes/models says of itself."""

    path: Path
    title: str
    """What it does, without the last full stop."""
    has_run: bool
    gpus: int
    gpu: str
    model: str


def read_recipe(path: Path) -> ModelRecipe:
    head = path.read_text().partition("\n")[0]
    found = re.fullmatch(r"# (.+)\. (Not run yet; planned for|Ran on) (\d+) x ([\w-]+)\.", head)
    if found is None:
        raise SystemExit(
            f'{path}: its first line must end with "Not run yet; planned for N x GPU." or "Ran on N x GPU."'
        )
    title, said, gpus, gpu = found.groups()
    model = re.search(r'^path = "(.+)"$', path.read_text(), re.MULTILINE)
    assert model is not None, f"{path} names no model"
    return ModelRecipe(path=path, title=title, has_run=said == "Ran on", gpus=int(gpus), gpu=gpu, model=model.group(1))


def plan(recipe: ModelRecipe, folder: Path) -> StagePlan:
    """Of its only stage; `folder` gets the description of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[recipe.model]))
    overrides = [*SAMPLE, f"model.path={folder}"]
    (planned,) = plan_stages(recipe.path, overrides=overrides, gpu=recipe.gpu, gpus=recipe.gpus)
    return planned.plan


def table_lines() -> Iterator[str]:
    yield "| recipe | what | hardware | planned GiB of each GPU | planned s/step | run? |"
    yield "|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for recipe in map(read_recipe, sorted(FOLDER.glob("*.toml"))):
            found = plan(recipe, Path(folder) / recipe.path.stem)
            name = f"[`{recipe.path.stem}`](../recipes/models/{recipe.path.name})"
            needed, there = found.memory.needed_bytes / 2**30, found.gpu.usable_bytes / 2**30
            yield (
                f"| {name} | {recipe.title} | {recipe.gpus} x {recipe.gpu} | {needed:.0f} of {there:.0f} | "
                f"{found.time.total:.0f} | {'yes' if recipe.has_run else 'no'} |"
            )


def with_table(page: str) -> str:
    """The page with the table made anew."""
    before, _, rest = page.partition(BEGIN)
    return "\n".join((before + BEGIN, *table_lines(), END)) + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder with recipes.md")
    page = parser.parse_args().out / "recipes.md"
    page.write_text(with_table(page.read_text()))


if __name__ == "__main__":
    main()
