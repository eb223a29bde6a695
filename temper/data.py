"""Everything a stage reads that is not weights: tasks, held-out set, renderer, reward. Shared by training and dry runs.

Owns: turning the data part of a configuration into objects, and every check that data allows. No weights are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from temper.config import RewardConfig, RunConfig, SourceConfig
from temper.envs.adapters.gymnasium import gymnasium
from temper.envs.adapters.reasoning_gym import ReasoningGymReward, reasoning_gym, reasoning_gym_mix
from temper.envs.adapters.textarena import textarena
from temper.envs.adapters.verifiers import VerifiersReward, verifiers
from temper.envs.library.calculator import arithmetic, arithmetic_demo
from temper.envs.library.countdown import CountdownReward, countdown
from temper.envs.library.files import files
from temper.envs.library.game import game
from temper.envs.library.problems import PROBLEMS
from temper.envs.library.search import search
from temper.envs.library.shop import shop
from temper.errors import UserError
from temper.models.load import ModelShape, end_ids, load_tokenizer, read_shape
from temper.models.materialize import whole
from temper.rewards.registry import REWARDS, RewardFactory, make_reward
from temper.rewards.rubric import Part, Rubric
from temper.rewards.workers import WorkerPool
from temper.tasks.dataset import Stream, TaskSource, fingerprint, read_file, take_all
from temper.tasks.generators import GENERATORS, Generator, make_source
from temper.tasks.render import Renderer
from temper.types import Scalar, Task

ENV_GENERATORS: dict[str, Generator] = {
    **PROBLEMS,
    "arithmetic": arithmetic,
    "arithmetic_demo": arithmetic_demo,
    "countdown": countdown,
    "files": files,
    "game": game,
    "gymnasium": gymnasium,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_mix": reasoning_gym_mix,
    "search": search,
    "shop": shop,
    "textarena": textarena,
    "verifiers": verifiers,
}
"""Generators that come with an environment."""
PROBE_TASKS = 256
"""Training tasks looked at before a run: their prompts are rendered and measured, their answers checked."""
PREFERENCE_COLUMNS = ("rejected", "label")
"""Of a task's extra: another answer, which is worse; whether its answer is good."""
KNOWN_TASKS = 100_000
"""Training tasks at most whose prompts are compared with the held-out ones before a run."""


@dataclass(frozen=True, kw_only=True)
class StageData:
    """What a stage reads."""

    shape: ModelShape
    tokenizer: Any
    renderer: Renderer
    rubric: Rubric
    verifier: Rubric
    """Judges held-out tasks; the rubric itself unless the recipe names another."""
    verifier_name: str
    """Of what it is made of; equal for verifiers whose scores can be compared."""
    stream: Stream
    heldout: tuple[Task, ...]
    probe: tuple[Task, ...]
    """The first training tasks, for checks; drawing them does not advance the stream."""
    known: tuple[Task, ...]
    """Training tasks that can be listed: rows of files and the probe, without held-out ones. Empty when nothing is held
    out."""
    longest_prompt: int
    """In tokens, over all of these that the model is asked to answer."""

    @property
    def has_preferences(self) -> bool:
        """Whether training tasks say themselves which answer is better, or whether one is good."""
        return _has_pairs(self.probe)


def open_data(config: RunConfig, model_folder: Path) -> StageData:
    """Reads and checks all data of a stage. Raises UserError for anything that would fail later."""
    tokenizer = load_tokenizer(model_folder)
    shape = read_shape(model_folder)
    renderer = Renderer(
        tokenizer,
        system=config.prompt.system,
        template=config.prompt.template,
        eos_ids=end_ids(model_folder, tokenizer),
    )
    rewards: dict[str, RewardFactory] = {
        **REWARDS,
        "countdown": CountdownReward,
        "reasoning_gym": partial(ReasoningGymReward, WorkerPool),
        "verifiers": VerifiersReward,
    }
    rubric = _rubric(config.reward, rewards)
    judges = config.evaluation.reward
    verifier = _rubric(judges, rewards) if judges else rubric
    heldout = take_all(_source(config.heldout)) if config.heldout else ()
    sources = [_source(part) for part in config.train]
    stream = _open_stream(config, sources, heldout)
    probe = _peek(_open_stream(config, sources, heldout), PROBE_TASKS)
    rubric.require_scorable(heldout)
    verifier.require_scorable(heldout)
    answers = config.stage in ("rl", "rejection", "distill") or (config.stage == "preference" and not _has_pairs(probe))
    if answers and config.reward:
        # Every row of a file, not only the probed ones: an answer that cannot be parsed must not end day two.
        rows = (take_all(source) for source in sources if source.size is not None)
        rubric.require_scorable(chain(probe, *rows))
    asked = (*(probe if answers else ()), *(heldout if config.stage != "reward_model" else ()))
    longest = max((len(renderer.prompt_ids(renderer.prompt_messages(task))) for task in asked), default=0)
    if asked and longest + config.longest_completion > shape.max_context:
        raise UserError(
            f"the longest prompt has {longest} tokens; with max_new_tokens={config.longest_completion} that is more "
            f"than the model's context of {shape.max_context}. Use at most "
            f"max_new_tokens={max(1, shape.max_context - longest)}, shorter prompts, or a model with a longer context"
        )
    return StageData(
        shape=shape,
        tokenizer=tokenizer,
        renderer=renderer,
        rubric=rubric,
        verifier=verifier,
        verifier_name=_verifier_name(judges or config.reward, verifier),
        stream=stream,
        heldout=heldout,
        probe=probe,
        known=_known(sources, probe, heldout),
        longest_prompt=longest,
    )


def require_judge(config: RunConfig, data: StageData) -> None:
    """Refuses held-out tasks of a preference stage that nobody could judge."""
    has_judge = config.reward or config.evaluation.reward or any("rejected" in task.extra for task in data.heldout)
    if config.stage == "preference" and data.heldout and not has_judge:
        raise UserError(
            "held-out tasks that are no pairs are answered and judged, and there is no reward to judge by. Add a "
            '[[reward]] table, e.g. kind = "exact", or hold out pairs (columns chosen and rejected)'
        )


def _has_pairs(tasks: Sequence[Task]) -> bool:
    return any(name in tasks[0].extra for name in PREFERENCE_COLUMNS)


def _rubric(parts: Sequence[RewardConfig], rewards: dict[str, RewardFactory]) -> Rubric:
    return Rubric(
        [
            Part(make_reward(part.kind, _options(part), rewards), part.weight, part.gate, part.clip, part.optional)
            for part in parts
        ]
    )


def _options(part: RewardConfig) -> dict[str, Scalar | list[Scalar]]:
    """Rewards read whole models only."""
    path = part.options.get("path")
    if not isinstance(path, str) or not (folder := Path(path).expanduser()).is_dir():
        return part.options
    return {**part.options, "path": str(whole(folder))}


def _verifier_name(parts: Sequence[RewardConfig], verifier: Rubric) -> str:
    """Its kinds, and a hash of everything that decides its scores: options, weights, what judges are asked."""
    content = ([part.model_dump() for part in parts], verifier.state()["fingerprints"])
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    return f"{'+'.join(part.kind for part in parts)} {digest[:12]}"


def _known(sources: Sequence[TaskSource], probe: Sequence[Task], heldout: Sequence[Task]) -> tuple[Task, ...]:
    if not heldout:
        return ()
    excluded = {fingerprint(task) for task in heldout}
    listed = (source.task(index) for source in sources if source.size is not None for index in range(source.size))
    first = {fingerprint(task): task for task in islice(chain(probe, listed), KNOWN_TASKS)}
    return tuple(task for name, task in first.items() if name not in excluded)


def _open_stream(config: RunConfig, sources: Sequence[TaskSource], heldout: Sequence[Task]) -> Stream:
    excluded = frozenset(fingerprint(task) for task in heldout)
    return Stream(sources, [part.weight for part in config.train], seed=config.seed, excluded=excluded)


def _source(config: SourceConfig) -> TaskSource:
    if config.path:
        path = Path(config.path).expanduser()
        return read_file(
            path, config.prompt_field, config.answer_field, config.answer_pattern, config.size, config.skip_bad
        )
    generators = {**GENERATORS, **ENV_GENERATORS}
    return make_source(config.generator, config.options, seed=config.seed, size=config.size, generators=generators)


def _peek(stream: Stream, count: int) -> tuple[Task, ...]:
    return tuple(stream.next()[1] for _ in range(count))
