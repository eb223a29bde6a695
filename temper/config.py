"""What a recipe may say. A recipe is TOML; each `[[stage]]` table overrides the rest of the file.

Owns: keys, defaults, types, and rules that need no data and no model. Refuses: building anything (build.py does).
The text under each field is its help.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from temper.errors import UserError, did_you_mean
from temper.types import Scalar

Factor = str | dict[str, Scalar]
"""A named function, or a table with its name and arguments: "clip" or {name = "clip", high = 0.28}."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NewModelConfig(Section):
    """A small random Llama model with a character tokenizer, made when the run starts."""

    layers: int = Field(4, ge=1)
    width: int = Field(128, ge=8)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    """Heads that hold keys and values; divides `heads`."""
    mlp_width: int = Field(384, ge=8)
    context: int = Field(256, ge=8)
    """Longest sequence, in tokens."""
    alphabet: str = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=?.,:;!'() "
    """Characters of the tokenizer; anything else in a prompt is an error."""

    @model_validator(mode="after")
    def _heads_divide(self) -> NewModelConfig:
        if self.width % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"width={self.width} must be a multiple of heads={self.heads}, and heads of kv_heads={self.kv_heads}"
            )
        return self


class ModelConfig(Section):
    path: str = ""
    """Hugging Face checkpoint directory to start from. A later stage starts from the one before it."""
    new: NewModelConfig | None = None
    """Make a small model instead of reading `path`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of weights and forward pass; auto: bfloat16 on a GPU, float32 on a CPU. Master weights, moments, head and
    log-probabilities are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class SourceConfig(Section):
    """Where tasks come from: a file (JSONL or Parquet) or a generator, exactly one."""

    path: str = ""
    """A .jsonl or .parquet file."""
    generator: str = ""
    """A generator's name ("spell_backward", "reasoning_gym"), or "package.module:function" of your own."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of the generator."""
    prompt_field: str = "prompt"
    """Column with the prompt: text, or a list of {role, content}."""
    answer_field: str = "answer"
    """Column with the gold answer."""
    answer_pattern: str = ""
    """Regular expression whose first group is the answer inside that column, e.g. "#### (.+)" for GSM8K."""
    size: int = Field(0, ge=0)
    """Use only this many tasks; 0: all of a file, unbounded for a generator (a held-out set needs a size)."""
    seed: int = 0
    """Of a generator. Held-out prompts are kept out of training whatever the seeds."""
    weight: float = Field(1.0, gt=0)
    """Share in a mixture of sources."""

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if bool(self.path) == bool(self.generator):
            raise ValueError("give exactly one of path and generator")
        return self


class PromptConfig(Section):
    system: str = ""
    """System message put before every prompt; empty: none."""
    template: str = "{prompt}"
    """How a text prompt becomes the user message."""

    @model_validator(mode="after")
    def _has_slot(self) -> PromptConfig:
        if "{prompt}" not in self.template:
            raise ValueError(f'template {self.template!r} lacks the slot "{{prompt}}"')
        return self


class RewardConfig(Section):
    kind: str
    """exact, contains, edit, rearranged, math, format or reasoning_gym; or "package.module:function" of your own."""
    weight: float = 1.0
    options: dict[str, Scalar] = {}
    """Arguments of the reward, e.g. {pattern = "<answer>.*</answer>"}."""


class RolloutConfig(Section):
    groups_per_step: int = Field(8, ge=1)
    """Tasks trained per step."""
    group_size: int = Field(8, ge=1)
    """Completions per task."""
    max_staleness: int = Field(0, ge=0)
    """S: how many versions old a trained token may be. 0 is synchronous training."""
    drop_degenerate: bool | None = None
    """Replace groups whose rewards are all equal by fresh ones (dynamic sampling). Unset: what the preset wants."""
    max_rounds: int = Field(10, ge=1)
    """Give up when this many times groups_per_step were rolled without filling a step."""
    max_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    episode_seconds: float = Field(600.0, gt=0)
    """Deadline of one episode; past it the episode is TIMEOUT and not trained."""
    step_seconds: float = Field(3600.0, gt=0)
    """Deadline for filling one step."""
    error_limit: float = Field(0.1, ge=0, le=1)
    """Stop when more than this share of a step's episodes failed or could not be scored because of an error."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(64, ge=1)


class ObjectiveConfig(Section):
    """A preset, and what differs from it. Factors left unset are the preset's."""

    preset: str = "grpo"
    shaping: list[Factor] | None = None
    advantage: Factor | None = None
    ratio: Factor | None = None
    gate: Factor | None = None
    corrections: list[Factor] | None = None
    weighting: Factor | None = None
    regularizers: list[Factor] | None = None
    proximal: Literal["trainer", "behavior"] = "trainer"
    """What the ratio is taken against: the trainer's own log-probabilities when the batch started, or the sampler's."""
    train_truncated: bool = True
    """Train on completions that were cut at the length limit."""


class OptimConfig(Section):
    learning_rate: float = Field(1e-6, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up. linear and cosine fall towards 0, which they would reach one step after the last."""
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)


class TrainerConfig(Section):
    tokens_per_microbatch: int = Field(8192, ge=16)
    """Packed tokens of one forward pass. Changes memory and speed, never the gradient."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps per batch; the groups are split over them."""
    examples_per_step: int = Field(64, ge=1)
    """Supervised stage: examples of one step."""


class EngineConfig(Section):
    block_size: int = Field(16, ge=1)
    """Tokens per KV block."""
    kv_tokens: int = Field(0, ge=0)
    """Tokens the KV cache can hold; 0: enough for max_running sequences of the longest prompt and completion."""
    max_running: int = Field(256, ge=1)
    """Sequences decoded together."""
    tokens_per_step: int = Field(4096, ge=16)
    """Prefill and decode tokens of one engine step."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs. Has no effect without a GPU."""
    max_logprob_gap: float | None = None
    """Largest mean |sampled - recomputed| log-probability that may start. Unset: the checked-in budget of the dtype."""


class EvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Steps between held-out evaluations. Both ends of a stage are always evaluated when there is a held-out set."""
    samples: int = Field(1, ge=1)
    """Sampled completions per held-out prompt, beside one greedy."""


class CheckpointConfig(Section):
    every: int = Field(50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept per stage."""


class RunConfig(Section):
    """One stage, resolved."""

    name: str = "run"
    stage: Literal["rl", "sft"] = "rl"
    steps: int = Field(100, ge=1)
    seed: int = 0
    model: ModelConfig = ModelConfig()
    train: list[SourceConfig] = []
    """Training tasks; several are a mixture by weight."""
    heldout: SourceConfig | None = None
    """Tasks for evaluation. Never trained on: equal prompts are removed from every training source."""
    prompt: PromptConfig = PromptConfig()
    reward: list[RewardConfig] = []
    """Parts of the reward; the score is their weighted sum."""
    rollout: RolloutConfig = RolloutConfig()
    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _complete(self) -> RunConfig:
        if not self.train:
            raise ValueError("no training tasks: add a [[train]] table with a path or a generator")
        if self.heldout and self.heldout.generator and not self.heldout.size:
            raise ValueError("heldout.size is missing: a generated held-out set needs a size, e.g. size = 256")
        needs_reward = self.stage == "rl" or self.heldout is not None
        if needs_reward and not self.reward:
            raise ValueError('no reward: add a [[reward]] table, e.g. kind = "exact"')
        if bool(self.model.path) == bool(self.model.new):
            raise ValueError("give exactly one of model.path and [model.new]")
        if self.optim.warmup_steps > self.steps:
            raise ValueError(f"optim.warmup_steps={self.optim.warmup_steps} is more than steps={self.steps}")
        groups, updates = self.rollout.groups_per_step, self.trainer.updates_per_batch
        if self.stage == "rl" and groups % updates:
            raise ValueError(
                f"rollout.groups_per_step={groups} does not divide over trainer.updates_per_batch={updates}. "
                f"Use a multiple, e.g. groups_per_step={-(-groups // updates) * updates}"
            )
        return self


def load_recipe(path: Path, overrides: Iterable[str] = ()) -> list[RunConfig]:
    """Reads a recipe and returns its stages in order, each fully resolved and validated."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}). Give the path of a recipe, e.g. recipes/demo.toml"
        ) from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    return resolve(table, overrides, where=str(path), text=text)


def resolve(table: Mapping[str, Any], overrides: Iterable[str], *, where: str, text: str = "") -> list[RunConfig]:
    """Merges each [[stage]] over the shared keys and validates the result."""
    shared = {key: value for key, value in table.items() if key != "stage" or not isinstance(value, list)}
    stages = table["stage"] if isinstance(table.get("stage"), list) else [{}]
    resolved = []
    for stage in stages:
        merged = merge(shared, {("stage" if key == "kind" else key): value for key, value in stage.items()})
        for override in overrides:
            merged = merge(merged, parse_override(override))
        resolved.append(_validate(merged, where=where, text=text))
    return resolved


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merge key by key; everything else is replaced. model.path and model.new replace each other."""
    out = dict(below)
    for key, value in above.items():
        is_table = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(out[key], value) if is_table else value
    return out


def parse_override(text: str) -> dict[str, Any]:
    """'a.b=c' as nested tables. The value is read as TOML, and as plain text when that fails."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise UserError(f"--set {text!r} is not of the form key=value, e.g. --set optim.learning_rate=1e-5")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for part in reversed(key.strip().split(".")):
        parsed = {part: parsed}
    return cast(dict[str, Any], parsed)


def _validate(merged: Mapping[str, Any], *, where: str, text: str) -> RunConfig:
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        problems = [_explain(problem, where, text) for problem in error.errors()]
        raise UserError("\n".join(problems)) from error


def _explain(problem: Mapping[str, Any], where: str, text: str) -> str:
    """One validation problem as a sentence with the place, the value and the nearest allowed name."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    line = _line_of(location[-1], text) if location else None
    place = f"{where}, line {line}" if line else where
    if problem["type"] == "extra_forbidden":
        allowed = sorted(_fields_at(location[:-1]))
        return (
            f'{place}: key "{key}" is unknown.{did_you_mean(location[-1], allowed)} Allowed here: {", ".join(allowed)}.'
        )
    message = str(problem["msg"]).removeprefix("Value error, ")
    given = "" if problem["type"] in ("value_error", "missing") else f" (got {problem['input']!r})"
    return f"{place}: {f'{key}: ' if key else ''}{message}{given}."


def _line_of(key: str, text: str) -> int | None:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.split("=")[0].strip() == key or line.strip().strip("[]").split(".")[-1] == key:
            return number
    return None


def _fields_at(location: Iterable[str]) -> set[str]:
    """Names allowed at a place in the configuration."""
    section: type[BaseModel] = RunConfig
    for part in location:
        if part.isdigit():
            continue
        inner = _section_of(section.model_fields[part].annotation)
        if inner is None:
            return set()
        section = inner
    return set(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Section`, `Section | None` or `list[Section]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _section_of(inner)) is not None:
            return found
    return None


def to_toml(stages: Iterable[RunConfig]) -> str:
    """Resolved stages as TOML that load_recipe reads back to the same value."""
    lines: list[str] = []
    for config in stages:
        table = config.model_dump(exclude_none=True)
        lines += ["[[stage]]", *_toml_lines({"kind": table.pop("stage"), **table}, prefix="stage."), ""]
    return "\n".join(lines)


def _toml_lines(table: Mapping[str, Any], prefix: str) -> list[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict) and not _is_tables(value)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            lines += ["", f"[{name}]", *_toml_lines(value, prefix=f"{name}.")]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]", *_toml_lines(item, prefix=f"{name}.")]
    return lines


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
