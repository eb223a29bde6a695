"""What a recipe says of its models: where they come from, adapters, teachers, precision, memory.

Owns: these tables. Refuses: opening a directory (build/). The text under each field is its help.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from temper.config.section import Section

_SEVERAL_TEACHERS = re.compile(r"\s*\w+\s*=[^,]+(,\s*\w+\s*=[^,]+)+")


class NewModelConfig(Section):
    """A small random Llama, or Qwen3-MoE, with a character tokenizer, made when the run starts."""

    layers: int = Field(4, ge=1)
    """Decoder layers."""
    width: int = Field(128, ge=8)
    """Size of a hidden state; a multiple of `heads`."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    kv_heads: int = Field(2, ge=1)
    """Heads that hold keys and values; divides `heads`."""
    mlp_width: int = Field(384, ge=8)
    """Size inside the feed-forward layers, or inside each expert."""
    experts: int = Field(0, ge=0)
    """Experts of each layer; 0: a dense model."""
    experts_per_token: int = Field(2, ge=1)
    """How many of them a token meets."""
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
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(f"experts_per_token={self.experts_per_token} is more than the {self.experts} experts")
        return self


class LoraConfig(Section):
    """Adapters of low rank, trained in place of the weights."""

    rank: int = Field(16, ge=1)
    """Columns of each factor: more can change more and cost more."""
    alpha: float = Field(32.0, gt=0)
    """The product of both factors counts alpha / rank times; with rslora alpha / sqrt(rank) times."""
    targets: list[str] = []
    """Names of linear layers, e.g. ["q_proj", "v_proj"], and "experts": factors of this rank on every expert of a
    mixture. Empty: every linear layer of attention and feed-forward, which experts are not."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank), so that a larger rank does not learn more slowly."""
    base: Literal["full", "4bit"] = "full"
    """How the frozen model under the adapters is held: full: in model.dtype; 4bit: its linear layers in NF4, about 0.53
    bytes a parameter (QLoRA), for training and sampling alike."""


class RoutersConfig(Section):
    """Routers of a mixture of experts."""

    balance: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing loss, e.g. 0.001: E/K times the share of a row's tokens that chose an expert,
    times its mean probability, summed over experts; 1 when they are even."""
    z: float = Field(0.0, ge=0)
    """Coefficient of the z-loss, e.g. 0.001: mean square of the logarithm of the sum of exponentials of the logits."""
    bias: float = Field(0.0, ge=0)
    """For families whose routers have a bias for the choice alone, e.g. 0.001: after every update it moves by so much,
    up for experts with fewer tokens than the mean, down for those with more (balancing without a loss)."""
    frozen: bool = False
    """Routers are not trained."""

    @model_validator(mode="after")
    def _moves_or_not(self) -> RoutersConfig:
        if self.frozen and (self.balance or self.z or self.bias):
            raise ValueError("frozen routers do not move: leave balance, z and bias at 0, or frozen = false")
        return self


class ModelConfig(Section):
    """The model to start from, its adapters, teachers and precision."""

    path: str = ""
    """Hugging Face checkpoint directory to start from, or its name on the hub ("Qwen/Qwen2.5-0.5B"). A later stage
    starts from the one before it, unless it names another directory than the first stage, or "stage:KIND": what the
    last stage of that kind left."""
    new: NewModelConfig | None = None
    """Make a small model instead of reading `path`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and forward pass; auto: bfloat16 on a GPU, float32 on a CPU. Master weights, head and
    log-probabilities are always float32; moments as optim.states says. float16 has three bits more than bfloat16 and a
    small range: the loss is scaled, and an update that overflows all the same is skipped."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained and drawn from; auto: a GPU if there is one."""
    teacher: str = ""
    """Checkpoint directory of the teacher, for objectives that distil from one. Same tokenizer as the model."""
    teachers: dict[str, str] = {}
    """Several teachers, by the domain of a task: {math = "DIRECTORY", code = "DIRECTORY"}. In place of `teacher`."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights, e.g. {rank = 16}."""
    offload: bool = False
    """Reference and teacher wait on the CPU between their passes: less memory on the GPU, more time."""
    gradient_checkpointing: bool | Literal["auto", "offload"] = "auto"
    """Recompute activations in the backward pass: less memory, about a third more time. auto: where a GPU has no room
    for them; never on a CPU. "offload": on a GPU, what they are recomputed from waits in the memory of the host, for
    rows of tens of thousands of tokens."""

    routers: RoutersConfig | None = None
    """Keep the routers of a mixture of experts even, or as they are, e.g. {balance = 0.001}."""
    replay_routes: bool | Literal["reference", "measure"] = False
    """For mixtures of experts: the trainer sends every token to the experts that it met in the sampler (R3), whatever
    its own routers choose now; routers still learn. "reference": so does the reference. "measure": none does, and
    route/moved_frac tells what replay would change."""

    @field_validator("replay_routes", mode="before")
    @classmethod
    def _flag_or_reference(cls, value: object) -> object:
        if value not in (True, False, "reference", "measure"):
            raise ValueError('use true, false, "reference" or "measure"')
        return value

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _flag_or_word(cls, value: object) -> object:
        if value not in (True, False, "auto", "offload"):
            raise ValueError('use true, false, "auto" or "offload"')
        return value

    @property
    def taught_by(self) -> dict[str, str]:
        """Directories of the teachers by domain; one that teaches everyone is named "". Empty: there is none."""
        return {"": self.teacher} if self.teacher else self.teachers

    @model_validator(mode="after")
    def _one_way_to_name_teachers(self) -> ModelConfig:
        if self.teacher and self.teachers:
            raise ValueError("give one of model.teacher and model.teachers")
        if _SEVERAL_TEACHERS.fullmatch(self.teacher):
            raise ValueError(
                f'teacher = "{self.teacher}": several teachers are a table now, e.g. '
                'model.teachers = {math = "DIRECTORY", code = "DIRECTORY"}'
            )
        return self
