"""What a recipe may say. A recipe is TOML; each `[[stage]]` table overrides the rest of the file.

Owns: keys, defaults, types, and rules that need no data and no model. Refuses: reading files (recipe.py), and building
anything (build/).
The text under each field is its help.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from temper.config.model import ModelConfig
from temper.config.section import Factor, Scalar, Section

StageKind = Literal["rl", "sft", "reward_model", "rejection", "preference", "distill"]


class SourceConfig(Section):
    """Where tasks come from: a file or a generator, exactly one."""

    path: str = ""
    """A .jsonl, .json or .parquet file, or a folder that save_to_disk of the package datasets wrote."""
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
    skip_bad: bool = False
    """Leave out what cannot be used, e.g. prompts too long for the context, in place of an error that names it."""
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
    """math, code, exact, contains, f1, edit, rearranged, format, tags, json_schema, ifeval, length, repetition,
    language, judge, pairwise, rubric, evolving_rubric, reward_model, process, discriminator, env, countdown,
    reasoning_gym or verifiers; or "package.module:function" of your own."""
    weight: float = 1.0
    gate: bool = False
    """The whole reward is 0 unless this part is at least 1. A gate has no weight of its own."""
    clip: tuple[float, float] | None = None
    """Bounds of the part before weighting."""
    optional: bool = False
    """Leave the part out where it cannot be scored. Otherwise the response then has no score at all."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of the reward, e.g. {pattern = "<answer>.*</answer>"}."""


class EnvConfig(Section):
    """Where episodes are played."""

    name: str = ""
    """An environment ("single_turn", "calculator", ...), or "package.module:Class" of your own. Empty: as each task
    says, which is single_turn unless its source says otherwise."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of the environment."""


class RolloutConfig(Section):
    groups_per_step: int = Field(8, ge=1)
    """Tasks trained per step."""
    group_size: int = Field(8, ge=1)
    """Completions per task."""
    max_staleness: int = Field(0, ge=0)
    """S: how many versions old a trained token may be. 0 is synchronous training. Above 0 the objective should correct
    for it, e.g. objective.corrections = ["token_tis"]; a run warns where nothing does."""
    drop_degenerate: bool | None = None
    """Replace groups whose rewards are all equal by fresh ones (dynamic sampling). Unset: what the preset wants. With
    max_staleness above 0 they start at once; at 0 in rounds, each as long as its longest answer."""
    max_rounds: int = Field(10, ge=1)
    """Give up when this many times groups_per_step were rolled without filling a step."""
    max_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    max_episode_tokens: int = Field(0, ge=0)
    """Tokens drawn over all turns of one episode; 0: no limit but that of each turn."""
    retries: int = Field(0, ge=0)
    """How often an episode that failed (environment error, time-out) is played anew before it is given up."""
    episode_seconds: float = Field(600.0, gt=0)
    """Deadline of one episode; past it the episode is TIMEOUT and not trained."""
    step_seconds: float = Field(3600.0, gt=0)
    """Deadline for filling one step."""
    error_limit: float = Field(0.1, ge=0, le=1)
    """Stop when more than this share of a step's episodes failed or could not be scored because of an error."""
    transcripts_gb: float = Field(2.0, ge=0)
    """What the newest rollouts may take in run.db with all their words and tokens, in GB; inf: no limit. Older ones
    keep score, status and length; the ledger of what was trained stays whole. The largest of all stages counts."""
    keep: Factor = "correct"
    """What a rejection stage keeps of a group: "correct", "best", or {name = "top", k = 2, cap = 4}."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(64, ge=1)
    top_k: int = Field(0, ge=0)
    """Draw among this many most likely tokens; 0: all. The trainer then renormalises over the same tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: list[str] = []
    """Texts that end a completion."""


class ObjectiveConfig(Section):
    """A preset, and what differs from it. Factors left unset are the preset's."""

    preset: str = ""
    """Empty: what the stage is for: grpo, sft, dpo, reward_model or gkd."""
    shaping: list[Factor] | None = None
    """What is done to rewards before they are compared."""
    advantage: Factor | None = None
    normalizers: list[Factor] | None = None
    """What is done to advantages: whiten, clip, drop."""
    critic: Factor | None = None
    """How a critic is trained; only advantages that need values have one."""
    proximal: Factor | None = None
    """What the ratio is taken against: "trainer" (its own log-probabilities when the batch started), "behavior" (the
    sampler's), "interpolated" or "current"."""
    ratio: Factor | None = None
    gate: Factor | None = None
    emphasis: list[Factor] | None = None
    """What changes advantages inside the loss."""
    corrections: list[Factor] | None = None
    """Multipliers and keep rules: for the sampler's mismatch and staleness, by entropy, by covariance."""
    weighting: Factor | None = None
    regularizers: list[Factor] | None = None
    controllers: list[Factor] | None = None
    """What adapts a coefficient while training: adaptive_kl, adaptive_entropy."""
    reference: Factor | None = None
    """When the reference model follows the policy; unset and not in the preset: never."""
    step: Factor | None = None
    """A constrained step (trpo) in place of AdamW."""
    loss: Factor | None = None
    """A loss that is no policy gradient, e.g. {name = "dpo", beta = 0.05}: of pairs, of scores, of likelihood, of the
    distance from a teacher."""
    train_truncated: bool | None = None
    """Train on completions that were cut at the length limit. Unset: yes, unless the preset filters them."""


class OptimConfig(Section):
    learning_rate: float = Field(1e-6, ge=0)
    critic_learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the critic, if there is one. Same schedule, but over all steps: the policy's begins with the
    first step that trains the policy. Unset: ten times learning_rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up. linear and cosine fall towards 0, which they would reach one step after the last; wsd (warm-up,
    stable, decay) stays at the full rate and falls linearly in the last fifth."""
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the mean gradient."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay rate of the mean squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the mean squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)


class TrainerConfig(Section):
    tokens_per_microbatch: int = Field(8192, ge=16)
    """Packed tokens of one forward pass. Changes memory and speed, never the gradient."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps per batch; the groups are split over them."""
    examples_per_step: int = Field(64, ge=1)
    """Examples or pairs of one step, in stages that read them."""
    max_length: int = Field(0, ge=0)
    """Stages that read examples or pairs: those of more tokens are dropped and counted (data/too_long). 0: one longer
    than the model's context is an error before the first step."""


class EngineConfig(Section):
    kind: Literal["local", "vllm", "sglang"] = "local"
    """Who draws the tokens: Temper's own engine, vLLM in this process, or an SGLang server."""
    address: str = ""
    """Where the SGLang server listens, e.g. "http://127.0.0.1:30000"."""
    numerics: Literal["fast", "exact"] = "fast"
    """exact: local engine and trainer compute log-probabilities that are equal to the bit, whatever is batched."""
    kv_tokens: int = Field(0, ge=0)
    """Tokens the KV cache can hold; 0: enough for max_running sequences of the longest prompt and completion."""
    kv_after_load: Literal["keep", "recompute"] = "keep"
    """Keys and values of running sequences when new weights arrive between two of their tokens."""
    max_running: int = Field(256, ge=1)
    """Sequences decoded together."""
    tokens_per_step: int = Field(4096, ge=16)
    """Prefill and decode tokens of one engine step."""
    graphs: bool = True
    """On a GPU: decode steps are recorded as CUDA graphs and replayed."""
    steps_per_sync: int = Field(8, ge=1)
    """On a GPU: replayed decode steps between two looks of the host. A sequence that ends in between wastes the rest of
    them."""
    max_logprob_gap: float | None = None
    """Largest mean |sampled - recomputed| log-probability that may start. Unset: the checked-in budget."""

    @field_validator("kind", mode="before")
    @classmethod
    def _address_apart(cls, value: object) -> object:
        if isinstance(value, str) and value.startswith("sglang+"):
            address = value.removeprefix("sglang+")
            raise ValueError(f'the address has a key of its own: engine = {{kind = "sglang", address = "{address}"}}')
        return value

    @field_validator("steps_per_sync", mode="before")
    @classmethod
    def _graphs_apart(cls, value: object) -> object:
        if value == 0:
            raise ValueError("0 is no number of steps. Without graphs is engine.graphs = false")
        return value

    @model_validator(mode="after")
    def _has_address(self) -> EngineConfig:
        if (self.kind == "sglang") != bool(self.address):
            raise ValueError(
                'an engine of kind "sglang" needs its address, and no other has one: '
                'engine = {kind = "sglang", address = "http://127.0.0.1:30000"}'
            )
        if self.address and not self.address.startswith(("http://", "https://")):
            raise ValueError(f'address "{self.address}" must begin with http:// or https://')
        return self


class EvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Steps between held-out evaluations. Both ends of a stage are always evaluated when there is a held-out set."""
    samples: int = Field(1, ge=1)
    """Sampled completions per held-out prompt, beside one greedy."""
    temperature: float | None = Field(None, gt=0)
    """Of those samples. Unset: as in training; the same below."""
    top_p: float | None = Field(None, gt=0, le=1)
    max_new_tokens: int | None = Field(None, ge=1)
    reward: list[RewardConfig] = []
    """A verifier that training never sees, for the held-out score. Empty: the training reward judges itself."""


class CheckpointConfig(Section):
    every: int = Field(50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept per stage."""


class RunConfig(Section):
    """One stage, resolved."""

    name: str = "run"
    stage: StageKind = "rl"
    """rl, sft, reward_model, rejection, preference or distill. In a [[stage]] table it is called `kind`."""
    steps: int = Field(100, ge=1)
    seed: int = 0
    model: ModelConfig = ModelConfig()
    train: list[SourceConfig] = []
    """Training tasks; several are a mixture by weight."""
    heldout: SourceConfig | None = None
    """Tasks for evaluation. Never trained on: equal prompts are removed from every training source."""
    prompt: PromptConfig = PromptConfig()
    env: EnvConfig = EnvConfig()
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
    alarms: dict[str, Factor] = {}
    """Levels and thresholds that differ from docs/alarms.md: a level (off, note, warn, pause, stop), or a table such as
    {level = "stop", factor = 3}."""
    mirrors: list[Literal["tensorboard", "trackio", "wandb"]] = []
    """Dashboards of others that get the run's numbers too, as files in the run directory. The first stage's count."""

    @property
    def longest_completion(self) -> int:
        """In tokens, training or evaluating."""
        return max(self.sampling.max_new_tokens, (self.heldout and self.evaluation.max_new_tokens) or 0)

    @model_validator(mode="after")
    def _complete(self) -> RunConfig:
        if not self.train:
            raise ValueError("no training tasks: add a [[train]] table with a path or a generator")
        if self.heldout and self.heldout.generator and not self.heldout.size:
            raise ValueError("heldout.size is missing: a generated held-out set needs a size, e.g. size = 256")
        # A reward model and preferences are judged by the pairs they are given: data.py looks whether there are any.
        has_pairs = self.stage in ("reward_model", "preference")
        needs_reward = self.stage in ("rl", "rejection") or (self.heldout and not has_pairs)
        if needs_reward and not self.reward:
            raise ValueError('no reward: add a [[reward]] table, e.g. kind = "exact"')
        if self.evaluation.reward and not self.heldout:
            raise ValueError("evaluation.reward judges held-out tasks, and there are none: add a [heldout] table")
        if bool(self.model.path) == bool(self.model.new):
            raise ValueError("give exactly one of model.path and [model.new]")
        if self.optim.warmup_steps > self.steps:
            raise ValueError(f"optim.warmup_steps={self.optim.warmup_steps} is more than steps={self.steps}")
        groups, updates = self.rollout.groups_per_step, self.trainer.updates_per_batch
        if self.stage in ("rl", "preference", "distill") and groups % updates:
            raise ValueError(
                f"rollout.groups_per_step={groups} does not divide over trainer.updates_per_batch={updates}. "
                f"Use a multiple, e.g. groups_per_step={-(-groups // updates) * updates}"
            )
        return self
