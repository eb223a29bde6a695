"""Everything a stage reads that is not weights: tasks, held-out set, renderer, reward. Shared by training and dry runs.

Owns: turning the data part of a configuration into objects, and every check that data allows. No weights are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

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
from temper.models.lora.materialize import whole
from temper.rewards.composite import CompositeReward, Part
from temper.rewards.registry import REWARDS, RewardFactory, make_reward
from temper.rewards.workers.pool import WorkerPool
from temper.tasks.dataset import MAX_NAMED, FileSource, Stream, TaskSource, fingerprint, read_file, take_all
from temper.tasks.generators import GENERATORS, Generator, make_source
from temper.tasks.lengths import measure_texts
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
    rubric: CompositeReward
    verifier: CompositeReward
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
    rows: tuple[Task, ...]
    """All training tasks of files and of generators with an end."""
    asked: tuple[Task, ...]
    """Held-out tasks and the first training tasks that the model itself is to answer, as against reading answers."""
    longest_prompt: int
    """In tokens, over all of these and over every row of the training files that is to be answered."""
    left_out: tuple[str, ...] = ()
    """Rows of files that skip_bad left out: place and reason of each."""

    @property
    def has_preferences(self) -> bool:
        """Whether training tasks say themselves which answer is better, or whether one is good."""
        return _has_pairs(self.probe)


def open_data(config: RunConfig, model_folder: Path) -> StageData:
    """Reads and checks all data of a stage. Raises UserError for anything that would fail later."""
    shape = read_shape(model_folder)  # first: it refuses families that cannot be trained
    tokenizer = load_tokenizer(model_folder)
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
    room = _Room(renderer, tokenizer, config, shape.max_context)
    heldout = take_all(_heldout_source(config, room)) if config.heldout else ()
    sources = [_source(part) for part in config.train]
    is_paired = config.stage == "preference" and _has_pairs(_peek(_open_stream(config, sources, heldout), 1))
    answers = config.stage in ("rl", "rejection", "distill") or (config.stage == "preference" and not is_paired)
    if answers:
        sources = [room.fit(source, part, "train") for source, part in zip(sources, config.train, strict=True)]
    stream = _open_stream(config, sources, heldout)
    probe = _peek(_open_stream(config, sources, heldout), PROBE_TASKS)
    rubric.require_scorable(heldout)
    verifier.require_scorable(heldout)
    if answers and config.reward:
        # Every row of a file, not only the probed ones: an answer that cannot be parsed must not end day two.
        rubric.require_scorable(chain(probe, _rows(sources)))
    asked = (*(() if _is_compared(config, heldout) else heldout), *(probe if answers else ()))
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
        rows=_rows(sources),
        asked=asked,
        longest_prompt=room.longest(asked),
        left_out=room.left_out,
    )


def require_judge(config: RunConfig, data: StageData) -> None:
    """Refuses held-out tasks of a preference stage that nobody could judge."""
    has_judge = config.reward or config.evaluation.reward or any("rejected" in task.extra for task in data.heldout)
    if config.stage == "preference" and data.heldout and not has_judge:
        raise UserError(
            "held-out tasks that are no pairs are answered and judged, and there is no reward to judge by. Add a "
            '[[reward]] table, e.g. kind = "exact", or hold out pairs (columns chosen and rejected)'
        )


class _Room:
    """What the context leaves for prompts, and which tasks do not fit into it."""

    def __init__(self, renderer: Renderer, tokenizer: Any, config: RunConfig, max_context: int) -> None:
        self._renderer, self._tokenizer, self._config, self._max_context = renderer, tokenizer, config, max_context
        self._limit = max(0, max_context - config.longest_completion)
        self._longest = 0
        self._drops = True
        """Whether generated tasks that are too long may be dropped when they are drawn."""
        self.left_out: tuple[str, ...] = ()

    def fit(self, source: TaskSource, config: SourceConfig, key: str) -> TaskSource:
        """The source without tasks that are too long, where skip_bad allows it; else UserError names them.

        A generator without end is left as it is: what it makes is looked at when it is drawn.
        """
        if source.size is None:
            self._drops = self._drops and config.skip_bad
            return source
        tasks = [source.task(index) for index in range(source.size)]
        texts = [self._prompt(task) for task in tasks]
        lengths = measure_texts(self._tokenizer, texts, self._limit)
        over = dict(lengths.over)
        if over and (not config.skip_bad or len(over) == len(tasks)):
            self._refuse(source.name, tasks, over, key)
        kept = [place for place in range(len(tasks)) if place not in over]
        if over:
            lengths = measure_texts(self._tokenizer, [texts[place] for place in kept], self._limit)
        self._longest = max(self._longest, lengths.longest)
        if not over:
            return source
        reasons = [f"{tasks[place].id}: {count} tokens, more than {self._limit}" for place, count in over.items()]
        self.left_out += tuple(reasons)
        return FileSource(source.name, tuple(tasks[place] for place in kept), tuple(reasons))

    def longest(self, tasks: Sequence[Task]) -> int:
        """In tokens, of these and of all that were fitted. Raises UserError for text that the tokenizer cannot encode,
        and for first tasks of a generator that are too long, unless such tasks may be dropped when they are drawn."""
        sizes = [len(self._renderer.prompt_ids(self._renderer.prompt_messages(task))) for task in tasks]
        over = {place: size for place, size in enumerate(sizes) if size > self._limit}
        if over and not self._drops:
            self._refuse("generated tasks", tasks, over, "train")
        return max(self._longest, *(min(size, self._limit) for size in sizes), 0)

    def _prompt(self, task: Task) -> str:
        if not task.messages:
            return ""  # its environment opens with words of its own
        try:
            return self._renderer.render(self._renderer.prompt_messages(task), for_generation=True)
        except UserError as error:
            raise UserError(f"{task.id}: {error}") from error

    def _refuse(self, name: str, tasks: Sequence[Task], over: Mapping[int, int], key: str) -> NoReturn:
        budget, context = self._config.longest_completion, self._max_context
        is_evaluation = budget > self._config.sampling.max_new_tokens
        setting = "evaluation.max_new_tokens" if is_evaluation else "sampling.max_new_tokens"
        worst = max(over, key=lambda place: over[place])
        others = [tasks[place].id for place in over if place != worst]
        also = f" Also: {', '.join(others[:MAX_NAMED])}{', ...' if len(others) > MAX_NAMED else ''}." if others else ""
        room = context - over[worst]
        shorter = f"at most {setting}={room}, " if room > 0 else ""  # else no length of an answer would do
        raise UserError(
            f"{name}: {len(over)} of {len(tasks)} prompts are too long. {tasks[worst].id} has {over[worst]} tokens; "
            f"{f'with {setting}={budget} that' if room > 0 else 'that alone'} is more than the model's context of "
            f"{context}.{also} Use {shorter}shorter prompts, or a model with a longer context; "
            f"{key}.skip_bad = true leaves such tasks out"
        )


def _is_compared(config: RunConfig, heldout: Sequence[Task]) -> bool:
    """Whether held-out tasks bring answers that are compared, in place of being answered."""
    has_pairs = any("rejected" in task.extra for task in heldout)
    return config.stage == "reward_model" or (config.stage == "preference" and has_pairs)


def _has_pairs(tasks: Sequence[Task]) -> bool:
    return any(name in tasks[0].extra for name in PREFERENCE_COLUMNS)


def _rubric(parts: Sequence[RewardConfig], rewards: dict[str, RewardFactory]) -> CompositeReward:
    return CompositeReward(
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


def _verifier_name(parts: Sequence[RewardConfig], verifier: CompositeReward) -> str:
    """Its kinds, and a hash of everything that decides its scores: options, weights, what judges are asked."""
    content = ([part.model_dump() for part in parts], verifier.state()["fingerprints"])
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    return f"{'+'.join(part.kind for part in parts)} {digest[:12]}"


def _rows(sources: Sequence[TaskSource]) -> tuple[Task, ...]:
    listed = (source for source in sources if source.size is not None)
    return tuple(source.task(index) for source in listed for index in range(source.size or 0))


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


def _heldout_source(config: RunConfig, room: _Room) -> TaskSource:
    assert config.heldout is not None, "there are held-out tasks"
    source = _source(config.heldout)
    tasks = [source.task(index) for index in range(source.size or 0)]
    return source if _is_compared(config, tasks) else room.fit(source, config.heldout, "heldout")


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
