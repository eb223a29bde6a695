"""What a recipe may say about tasks and rewards: where tasks come from, how they ask, who judges them.

Owns: these keys, and what sources and parts of a reward are called. Refuses: reading files and making rewards
(catalogue.py). The text under each field is its help.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from temper.config.section import Factor, Section
from temper.types import Scalar


class SourceConfig(Section):
    """Where tasks come from: a file or a generator, exactly one."""

    path: str = ""
    """A .jsonl, .json or .parquet file, a folder that save_to_disk of the package datasets wrote, or a data set on
    Hugging Face's hub: "owner/name", "owner/name:split" or "owner/name:configuration/split". Unnamed, the split is
    train and the configuration the only one, "default" or "main"."""
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


_OF_TASKS = ("options", "prompt_field", "answer_field", "answer_pattern", "seed", "rewards", "system", "template")
"""Keys of a source that has none of its answers yet."""


class StageSource(SourceConfig):
    """A source of a stage, which may differ from the stage's other sources in who judges it and how it asks."""

    records: str = ""
    """In place of both: a file that `temper serve --record` wrote and `temper score-records` scored. A stage of kind
    rl, rejection or preference then trains on what is recorded and draws nothing (docs/records.md). Not of held-out
    tasks."""
    name: str = Field("", pattern=r"^[\w.+-]*$")
    """What metrics, results and error messages call it. Empty: the name of its file or generator. Sources that share a
    name share the three keys below."""
    rewards: list[str] = []
    """Names of the [[reward]] tables that judge its tasks. Empty: all of them."""
    system: str | None = None
    """System message of its own, in place of prompt.system."""
    template: str | None = None
    """Template of its own, in place of prompt.template."""

    @property
    def label(self) -> str:
        """Its name, given or found."""
        file = self.path or self.records
        return self.name or (Path(file).stem if file else self.generator.rpartition(":")[2])

    @property
    def is_particular(self) -> bool:
        """Whether it says something about its tasks that does not hold for the whole stage."""
        return bool(self.name or self.rewards) or self.system is not None or self.template is not None

    @model_validator(mode="after")
    def _one_origin(self) -> StageSource:
        if [bool(self.path), bool(self.generator), bool(self.records)].count(True) != 1:
            raise ValueError("give exactly one of path, generator and records")
        fields = type(self).model_fields
        if self.records and (odd := [name for name in _OF_TASKS if getattr(self, name) != fields[name].default]):
            raise ValueError(f"{odd[0]} is about tasks that are asked, and records were asked already: leave it out")
        return self

    @field_validator("template")
    @classmethod
    def _has_slot(cls, value: str | None) -> str | None:
        return value if value is None else require_slot(value)


class DataConfig(Section):
    """Which training prompts are drawn, by what the stage has seen of them; docs/curriculum.md. Only of stages that
    sample and are judged by a reward."""

    choose: list[Factor] = []
    """Choosers, all of which have a say: "no_positive_resampling", "band", "pools", "adaptive_sources", or tables such
    as {name = "band", low = 0.1, high = 0.9, skip = 0.9}. Empty: every prompt once an epoch."""
    pass_score: float | None = None
    """An answer with at least this score passes, in histories of prompts. Unset: its score within 0 and 1 is the share
    that it passes by, so that a prompt's pass rate is its mean reward."""
    newest: float = Field(0.5, gt=0, le=1)
    """Weight of a prompt's newest group in its running pass rate; 1: only the newest group counts."""

    @model_validator(mode="before")
    @classmethod
    def _is_table(cls, value: object) -> object:
        if isinstance(value, str | list):
            raise ValueError(
                'training tasks are [[train]] tables, e.g. path = "train.jsonl"; [data] says which of them are drawn'
            )
        return value


class PromptConfig(Section):
    """How a task becomes messages."""

    system: str = ""
    """System message put before every prompt; empty: none."""
    template: str = "{prompt}"
    """How a text prompt becomes the user message."""
    chat_options: dict[str, Scalar] = {}
    """Variables of the model's chat template, e.g. {enable_thinking = false} for Qwen3 and SmolLM3, which think
    otherwise. Written into the template of every checkpoint, so that it is asked later as it was trained. A variable
    that the template does not read is an error."""

    @field_validator("template")
    @classmethod
    def _has_slot(cls, value: str) -> str:
        return require_slot(value)


def require_slot(template: str) -> str:
    if "{prompt}" not in template:
        raise ValueError(f'template {template!r} lacks the slot "{{prompt}}"')
    return template


class RewardConfig(Section):
    """One part of the reward: its kind, its weight, its options."""

    kind: str
    """math, code, exact, contains, f1, edit, rearranged, format, tags, json_schema, ifeval, length, repetition,
    language, judge, pairwise, rubric, evolving_rubric, reward_model, process, discriminator, env, countdown,
    reasoning_gym or verifiers; or "package.module:function" of your own."""
    name: str = Field("", pattern=r"^[\w.+-]*$")
    """What metrics and sources call this part. Empty: its kind, with a number from the second of a kind on."""
    weight: float = 1.0
    """Factor of this part in the sum."""
    gate: bool = False
    """The whole reward is 0 unless this part is at least 1. A gate has no weight of its own."""
    clip: tuple[float, float] | None = None
    """Bounds of the part before weighting."""
    optional: bool = False
    """Leave the part out where it cannot be scored. Otherwise the response then has no score at all."""
    options: dict[str, Scalar | list[Scalar]] = {}
    """Arguments of the reward, e.g. {pattern = "<answer>.*</answer>"}."""


def part_names(parts: Sequence[RewardConfig]) -> list[str]:
    """What the parts of a reward are called: as they say, by kind, or as a function is called."""
    given = [part.name or part.kind.rpartition(":")[2] for part in parts]
    names = [f"{name}_{count}" if (count := given[: place + 1].count(name)) > 1 else name
             for place, name in enumerate(given)]  # fmt: skip
    if len(set(names)) < len(names):
        raise ValueError(f"two parts of a reward have one name: {', '.join(names)}. Give each a name of its own")
    return names
