"""What a recipe may say. A recipe is TOML; each `[[stage]]` table overrides the rest of the file.

Owns: keys, defaults, types, and rules that need no data and no model. Refuses: reading files (recipe.py), and building
anything (build/).
The text under each field is its help.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_serializer, field_validator, model_validator

from temper.config.cluster import ClusterConfig
from temper.config.engine import EngineConfig
from temper.config.model import ModelConfig
from temper.config.preset_names import why_unknown
from temper.config.section import Factor, Section, require_auto_or_number
from temper.config.sources import DataConfig, PromptConfig, RewardConfig, SourceConfig, StageSource, part_names
from temper.config.thinking import ThinkingConfig
from temper.errors import did_you_mean
from temper.types import Scalar


class EnvConfig(Section):
    """Where episodes are played."""

    name: str = ""
    """An environment ("single_turn", "calculator", ...), or "package.module:Class" of your own. Empty: as each task
    says, which is single_turn unless its source says otherwise."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of the environment."""
    allow: list[str] = []
    """Names of tools that cannot be undone (a payment, a mail) and that the policy may use all the same, e.g. ["pay"].
    Any other such call is described to the policy and not carried out."""
    place: Literal["here", "process"] = "here"
    """Where environments live: in this process, whose interpreter they share with everything else; or in worker
    processes, for code that computes in Python or holds the interpreter. An episode stays in one worker to its end."""
    workers: int = Field(2, ge=1)
    """Processes, each with many episodes: about as many as cores that may be used. Needs place = "process"."""
    call_seconds: float = Field(30.0, gt=0)
    """Deadline of one start, step or close in a worker. One that gives no sign of life for so long is killed, and
    its episodes are played anew. Needs place = "process"."""

    @model_validator(mode="after")
    def _has_workers(self) -> EnvConfig:
        fields = type(self).model_fields
        for name in ("workers", "call_seconds"):
            if self.place == "here" and getattr(self, name) != fields[name].default:
                raise ValueError(f'{name} is of environments in processes: set place = "process", or leave it out')
        return self


class RolloutConfig(Section):
    """How many answers are drawn for a step, of which weights, and which of them are trained."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks trained per step."""
    group_size: int = Field(8, ge=1)
    """Completions per task."""
    max_staleness: int = Field(0, ge=0)
    """S: how many versions old a trained token may be. 0 is synchronous training. Above 0 the objective should correct
    for it, e.g. objective.corrections = ["token_tis"]; a run warns where nothing does."""
    order: Literal["draw", "finished"] = "draw"
    """Which groups a step takes: the first that were drawn, or the first that finish, so that one slow group holds up
    nobody. Needs max_staleness above 0, which bounds how late a group may be: then it is waited for; or a control that
    puts groups off."""
    controls: list[Factor] = []
    """What is started, cut, interrupted and put off, e.g. ["partial", {name = "oversample", factor = 1.5}]: see
    docs/asynchrony.md."""
    drop_degenerate: bool | None = None
    """Replace groups whose rewards are all equal by fresh ones (dynamic sampling). Unset: what the preset wants. With
    max_staleness above 0 they start at once; at 0 in rounds, each as long as its longest answer."""
    max_rounds: int = Field(10, ge=1)
    """Give up when this many times groups_per_step were rolled without filling a step."""
    max_turns: int = Field(1, ge=1)
    """Turns of one episode."""
    max_episode_tokens: int = Field(0, ge=0)
    """Tokens drawn over all turns of one episode; 0: no limit but that of each turn."""
    max_episode_cost: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Cost of one episode, 0: no limit. What tools say that a call costs, or an agent's price_per_token of what it
    drew: what would pass it is refused, and the episode is cut (docs/environments.md)."""
    retries: int = Field(0, ge=0)
    """How often an episode that failed (environment error, time-out) is played anew before it is given up; held-out
    episodes, too."""
    episode_seconds: float = Field(600.0, gt=0)
    """Deadline of one episode; past it the episode is TIMEOUT and not trained."""
    step_seconds: float = Field(3600.0, gt=0)
    """Deadline for filling one step."""
    error_limit: float = Field(0.1, ge=0, le=1)
    """Stop when more than this share of a step's episodes failed or could not be scored because of an error; of a
    held-out evaluation's, too, where the others give the score."""
    transcripts_gb: float = Field(2.0, ge=0)
    """What the newest rollouts may take in run.db with all their words and tokens, in GB; inf: no limit. Older ones
    keep score, status, length and side effects; the ledger of what was trained stays whole. The largest of all stages
    counts."""
    thinking: ThinkingConfig | None = None
    """Close the thinking of answers at a budget of tokens, e.g. {budget = 1024}, and let them answer. In evaluations,
    too."""
    keep: Factor = "correct"
    """What a rejection stage keeps of a group: "correct", "best", or {name = "top", k = 2, cap = 4}."""


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: float = Field(1.0, gt=0)
    """Of the draws: below 1 narrower than the model, above 1 wider."""
    max_new_tokens: int = Field(64, ge=1)
    """Longest completion of one turn, in tokens."""
    top_k: int = Field(0, ge=0)
    """Draw among this many most likely tokens; 0: all. The trainer then renormalises over the same tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draw among the most likely tokens that hold this probability together; 1: all."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Draw among tokens at least this share as likely as the likeliest; 0: all."""
    stop: list[str] = []
    """Texts that end a completion."""


class ObjectiveConfig(Section):
    """A preset, and what differs from it. Factors left unset are the preset's."""

    preset: str = ""
    """Empty: what the stage is for: grpo, sft, dpo, reward_model or gkd."""
    shaping: list[Factor] | None = None
    """What is done to rewards before they are compared."""
    advantage: Factor | None = None
    """How rewards become credit, e.g. "group_mean_std" or "gae"."""
    normalizers: list[Factor] | None = None
    """What is done to advantages: whiten, clip, drop."""
    critic: Factor | None = None
    """How a critic is trained; only advantages that need values have one."""
    proximal: Factor | None = None
    """What the ratio is taken against: "trainer" (its own log-probabilities when the batch started), "behavior" (the
    sampler's), "interpolated" or "current"."""
    ratio: Factor | None = None
    """Over what the ratio of new to old probability is taken: a token, a sequence."""
    gate: Factor | None = None
    """How far one update may move a token, e.g. {name = "clip", low = 0.2, high = 0.28}."""
    emphasis: list[Factor] | None = None
    """What changes advantages inside the loss."""
    corrections: list[Factor] | None = None
    """Multipliers and keep rules: for the sampler's mismatch and staleness, by entropy, by covariance."""
    weighting: Factor | None = None
    """What every token counts in the loss, e.g. "token_mean" or "sequence_mean"."""
    regularizers: list[Factor] | None = None
    """What is added to the loss: KL to the reference, entropy."""
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

    @field_validator("preset")
    @classmethod
    def _is_known(cls, preset: str) -> str:
        if preset and (why := why_unknown(preset)):
            raise ValueError(why)
        return preset


class OptimConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = Field(1e-6, ge=0)
    """Of AdamW, after warm-up."""
    critic_learning_rate: float | None = Field(None, ge=0)
    """Learning rate of the critic, if there is one. Same schedule, but over all steps: the policy's begins with the
    first step that trains the policy. Unset: ten times learning_rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """After warm-up. linear and cosine fall towards 0, which they would reach one step after the last; wsd (warm-up,
    stable, decay) stays at the full rate and falls linearly in the last fifth."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, decoupled from the gradient."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's decay rate of the mean gradient."""
    beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW's decay rate of the mean squared gradient."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the mean squared gradient."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Longer gradients are scaled down to this norm."""
    states: Literal["auto", "float32", "bfloat16", "8bit"] = "auto"
    """How AdamW's two moments are held between updates: 8, 4 or 2 bytes per parameter. The compact ones are rounded at
    random, the same on every run; AdamW computes in float32 whatever holds them. auto: the widest that fits into what
    is free on the GPU; float32 on a CPU."""
    offload: bool = False
    """On a GPU: moments and what masters need beside the weights live in the memory of the host, and pass through the
    GPU during the update. Same bits, more time."""


class TrainerConfig(Section):
    """How a batch is read and taken apart."""

    tokens_per_microbatch: int | Literal["auto"] = "auto"
    """Packed tokens of one forward pass, 16 or more. Changes memory and speed, never the gradient. auto: the most up to
    65536 that fits into what is free on the GPU; 8192 on a CPU."""
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps of one pass over a batch; the groups are split over them."""
    epochs: int = Field(1, ge=1, le=4)
    """Passes over a batch, as PPO makes them: from the second on the groups are split into fresh minibatches, and all
    passes compare with the policy that the batch started with. Only for policy gradients that notice its moving."""
    examples_per_step: int = Field(64, ge=1)
    """Examples or pairs of one step, in stages that read them."""
    max_length: int = Field(0, ge=0)
    """Stages that read examples or pairs: those of more tokens are dropped and counted (data/too_long). 0: one longer
    than the model's context is an error before the first step."""
    reproducible: bool = True
    """On a GPU: gradients of attention are added up in a fixed order, so that two equal runs end with equal bits.
    false: kernels that are faster on rows of thousands of tokens. With max_staleness above 0 it is as if false."""

    @property
    def updates_of_batch(self) -> int:
        """Optimiser steps that a batch is trained for."""
        return self.updates_per_batch * self.epochs

    @field_validator("tokens_per_microbatch", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        return require_auto_or_number(value, least=16)


class EvaluationConfig(Section):
    """Held-out evaluations: how often, and under which budget."""

    every: int = Field(0, ge=0)
    """Steps between held-out evaluations. Both ends of a stage are always evaluated when there is a held-out set."""
    samples: int = Field(1, ge=1)
    """Sampled completions per held-out prompt, beside one greedy."""
    temperature: float | None = Field(None, gt=0)
    """Of those samples. Unset: as in training; the same below."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Of those samples."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest held-out completion of one turn, in tokens."""
    reward: list[RewardConfig] = []
    """A verifier that training never sees, for the held-out score. Empty: the training reward judges itself."""


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept."""

    every: int = Field(50, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints kept per stage."""


class RunConfig(Section):
    """One stage, resolved."""

    name: str = "run"
    """Name of the run directory, runs/NAME, and of the run in every report."""
    stage: str = "rl"
    """rl, sft, reward_model, rejection, preference or distill. In a [[stage]] table it is called `kind`."""
    steps: int = Field(100, ge=1)
    """Optimiser steps of the stage; of a rejection stage, steps of rollouts."""
    seed: int = 0
    """Of all randomness: the order of the data, sampling, new weights."""
    model: ModelConfig = ModelConfig()
    train: list[StageSource] = []
    """Training tasks; several are a mixture by weight."""
    heldout: list[StageSource] = []
    """Tasks for evaluation: one [heldout] table, or several [[heldout]], each with its own results beside those of all.
    Never trained on: equal prompts are removed from every training source."""
    data: DataConfig = DataConfig()
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
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alarms: dict[str, Factor] = {}
    """Levels and thresholds that differ from docs/alarms.md: a level (off, note, warn, pause, stop), or a table such as
    {level = "stop", factor = 3}."""
    mirrors: list[Literal["tensorboard", "trackio", "wandb"]] = []
    """Dashboards of others that get the run's numbers too, as files in the run directory. The first stage's count."""

    @property
    def is_recorded(self) -> bool:
        """Whether the stage trains on recorded episodes."""
        return any(source.records for source in self.train)

    @property
    def longest_completion(self) -> int:
        """In tokens, training or evaluating."""
        return max(self.sampling.max_new_tokens, (self.evaluation.max_new_tokens or 0) if self.heldout else 0)

    @field_validator("heldout", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [] if value is None else [value] if isinstance(value, Mapping | SourceConfig) else value

    @field_serializer("heldout", mode="wrap")
    def _as_written(self, value: list[StageSource], write: SerializerFunctionWrapHandler) -> Any:
        written = write(value)
        return written[0] if len(written) == 1 else written

    @model_validator(mode="after")
    def _complete(self) -> RunConfig:
        if not self.train:
            raise ValueError("no training tasks: add a [[train]] table with a path or a generator")
        if self.is_recorded and not all(source.records for source in self.train):
            raise ValueError("records and tasks cannot be mixed in one stage: give each a [[stage]] of its own")
        if any(source.records for source in self.heldout):
            raise ValueError("held-out tasks are asked anew, and records were asked already: give heldout.path")
        if any(source.generator and not source.size for source in self.heldout):
            raise ValueError("heldout.size is missing: a generated held-out set needs a size, e.g. size = 256")
        if self.evaluation.reward and not self.heldout:
            raise ValueError("evaluation.reward judges held-out tasks, and there are none: add a [heldout] table")
        self._require_judges()
        if bool(self.model.path) == bool(self.model.new):
            raise ValueError("give exactly one of model.path and [model.new]")
        if self.model.dtype == "float16" and self.engine.numerics == "exact":
            raise ValueError(
                'engine.numerics = "exact" is made for float32 and bfloat16, not for model.dtype = "float16"'
            )
        if self.cluster.address and not self.cluster.is_on_ray:
            raise ValueError(
                f'cluster.address is that of a Ray cluster, and cluster.place = "{self.cluster.place}": '
                f"leave one of them out"
            )
        self._require_sampler_processes()
        if self.optim.warmup_steps > self.steps:
            raise ValueError(f"optim.warmup_steps={self.optim.warmup_steps} is more than steps={self.steps}")
        return self

    def _require_sampler_processes(self) -> None:
        """For what the recipe says of them."""
        has_servers = bool(self.engine.addresses)
        if self.engine.place == "here" and (keys := self.cluster.sampler_keys(has_servers=has_servers)):
            instead = "give engine.address a list of servers" if has_servers else 'set engine.place = "process"'
            raise ValueError(f"cluster.{keys[0]} is about sampler processes: {instead}, or leave it out")

    def _require_judges(self) -> None:
        """Every reward that a source names is there, and sources of one name say the same."""
        known = {*part_names(self.reward), *part_names(self.evaluation.reward)}
        said: dict[str, tuple[object, ...]] = {}
        for source in (*self.train, *self.heldout):
            for name in source.rewards:
                if name not in known:
                    raise ValueError(
                        f'source {source.label}: reward "{name}" is unknown.{did_you_mean(name, known)} Known: '
                        f"{', '.join(sorted(known)) or 'none'}. A [[reward]] table has a name or is called by its kind"
                    )
            says = (source.rewards, source.system, source.template)
            if said.setdefault(source.label, says) != says:
                raise ValueError(
                    f'two sources are called "{source.label}" and differ in rewards, system or template. Give each a '
                    f"name of its own"
                )
