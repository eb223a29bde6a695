"""`temper eval`, `temper sample`, `temper export`: things to do with a trained checkpoint.

Owns: asking a checkpoint, handing it on. Refuses: training, finding it (find.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from temper import calls
from temper.build import build_stage, require_free_ports
from temper.build.thinking import with_budget
from temper.commands.find import find_model
from temper.commands.progress import show_work
from temper.commands.training.train import outputs_of
from temper.config import RunConfig, load_recipe, refer, references
from temper.errors import BackendError, UserError
from temper.folders.integrity import verify
from temper.folders.pretrained import read_pretrained
from temper.models.load import read_shape
from temper.models.lora.materialize import load_trained, materialize
from temper.models.lora.wrapping import is_adapter_folder
from temper.models.scorer import CLASSES, score_head, scorer_kind
from temper.models.states import Head, hidden_states
from temper.stages.kinds import kind_of
from temper.trainer.passes.packed_attention import PackedAttention
from temper.types import EvaluationResult

EXPORTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
NOT_EXPORTED = ("state.json", "manifest.json")
LOGIT_TOLERANCE = 1e-3


def evaluate_checkpoint(
    path: Path, recipe: Path, *, overrides: Sequence[str] = (), thinking_budget: int | None = None
) -> list[EvaluationResult]:
    """Held-out scores of a checkpoint by the last stage of a recipe that holds out tasks for a policy.

    thinking_budget: in place of that of rollout.thinking, whose texts are used; None: as the recipe says.
    """
    stages = load_recipe(recipe, overrides)
    judging = [config for config in stages if config.heldout and kind_of(config).leaves != "scorer"]
    if not judging:
        raise UserError(f"{recipe} has no [heldout] table, so there is nothing to evaluate on")
    config = judging[-1]
    if thinking_budget is not None:
        thinking = with_budget(config.rollout.thinking, thinking_budget)
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"thinking": thinking})})
    require_free_ports([config])
    return calls.run(_evaluate(_referred(config, stages, path), find_model(path)))


def _referred(config: RunConfig, stages: Sequence[RunConfig], path: Path) -> RunConfig:
    """What it reads of other stages, from the run that the checkpoint belongs to."""
    run = next((folder for folder in (path, *path.resolve().parents[:3]) if (folder / "run.db").is_file()), None)
    outputs = {} if run is None else outputs_of(stages, run)
    if missing := [found for found in references(config) if found.kind not in outputs]:
        raise UserError(
            f'{missing[0].key} of the recipe\'s {config.stage} stage is "stage:{missing[0].kind}", and {path} is of no '
            f"run where that stage has ended. Give a run directory of this recipe, or a path in its place with --set"
        )
    return refer(config, outputs)


async def _evaluate(config: RunConfig, model: Path) -> list[EvaluationResult]:
    # Nothing is trained meanwhile and nothing is published: a sampler in a process of its own would wait for weights.
    engine = config.engine.model_copy(update={"place": "here", "threads": "auto"})
    config = config.model_copy(update={"engine": engine})
    with show_work(f"loading {model}"):
        stage = build_stage(config, 0, model)
    try:
        with show_work(f"{len(stage.data.heldout)} held-out tasks", sampler=stage.sampler):
            return await stage.evaluate(step=0)
    finally:
        await stage.close()


def export(path: Path, out: Path) -> float:
    """Copies the Hugging Face part of a checkpoint and proves by logits that plain transformers reads the same model.

    Returns the largest difference of logits.
    """
    source = find_model(path)
    verify(source)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty. Give a new directory")
    if is_adapter_folder(source):
        shutil.rmtree(out, ignore_errors=True)  # empty, if it is there
        materialize(source, out)
    else:
        _copy(source, out)
    with show_work(f"comparing {out} with {source}"):
        gap = compare_logits(source, out)
    if gap > LOGIT_TOLERANCE:
        raise BackendError(
            f"{out}: logits differ from the checkpoint's by {gap:.3g}; the export is not the trained model"
        )
    return gap


def _copy(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for pattern in EXPORTED:
        for file in source.glob(pattern):
            if file.name not in NOT_EXPORTED:
                shutil.copy2(file, out / file.name)


def compare_logits(ours: Path, theirs: Path) -> float:
    """Largest difference between Temper's forward pass of one directory and plain transformers' of another. Of a reward
    model: of its scores."""
    kind = scorer_kind(ours)
    model = load_trained(ours, torch.float32, torch.device("cpu"))
    reader = AutoModelForCausalLM if kind is None else CLASSES[kind]
    plain, _ = read_pretrained(reader, theirs, dtype=torch.float32)
    plain.eval()
    plain.config.get_text_config().pad_token_id = None  # a classifier of sequences then reads the last token
    ids = torch.randint(read_shape(ours).vocab_size, (24,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attend = PackedAttention((len(ids),), ids.device)
        states = hidden_states(model, ids, torch.arange(len(ids)), attend)
        mine = Head.of(model).logits(states) if kind is None else score_head(model)(states)
        mine = mine[-1] if kind == "conversation" else mine
        return (mine - plain(ids.unsqueeze(0)).logits[0].float()).abs().max().item()
