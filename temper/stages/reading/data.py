"""Everything a stage reads that is not weights: tasks, held-out set, renderer, reward. Shared by training and dry runs.

Owns: turning the data part of a configuration into objects, and every check that data allows. No weights are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from temper.catalogue import reward_of, source_of
from temper.config import RewardConfig, RunConfig, SourceConfig, StageSource
from temper.errors import UserError
from temper.models.load import ModelShape, end_ids, load_tokenizer, read_shape
from temper.objectives import Objective
from temper.rewards.composite import CompositeReward
from temper.serve.records import Speech
from temper.stages.reading.recorded import RecordNeeds, RecordReader
from temper.tasks.chat_options import set_chat_options
from temper.tasks.dataset import MAX_NAMED, FileSource, NamedSource, Stream, TaskSource, fingerprint, take_all
from temper.tasks.lengths import measure_texts
from temper.tasks.render import Renderer
from temper.types import SamplingParams, Task, Trajectory

PROBE_TASKS = 256
"""Training tasks looked at before a run: their prompts are rendered and measured, their answers checked."""
KNOWN_TASKS = 100_000
"""Training tasks at most whose prompts are compared with the held-out ones before a run."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a kind of stage reads its data."""

    share_sampled: Callable[[Objective, Sequence[Task]], float]
    """Probability that a step trains on what the policy draws, given the first training task; the other steps read
    given rows. Given none, before data is read: the most that it may be."""
    compares: Callable[[Sequence[Task]], bool] | None = None
    """Whether these held-out tasks bring answers that are compared, in place of being answered. None: never."""
    needs_of_records: Callable[[Objective], RecordNeeds] | None = None
    """What recorded episodes must have to be trained on. None: the kind does not train on them."""


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
    longest_row: int
    """Tokens of a given row at most: the context, or trainer.max_length where that is less."""
    share_sampled: float
    """Probability that a step trains on what the policy draws."""
    is_heldout_compared: bool
    """Whether held-out tasks bring answers that are compared, in place of being answered."""
    left_out: tuple[str, ...] = ()
    """Rows of files that skip_bad left out: place and reason of each."""
    recorded: Mapping[str, tuple[Trajectory, ...]] = field(default_factory=dict)
    """Recorded attempts at each training task, by its id. Empty: the stage does not train on records."""

    @property
    def is_rolling(self) -> bool:
        """Whether the stage trains on what it samples, in some of its steps at least."""
        return self.share_sampled > 0

    @property
    def has_groups(self) -> bool:
        """Whether the stage trains on groups of drawn answers: its own, or recorded ones."""
        return self.is_rolling or bool(self.recorded)

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """What the model sees, or saw, of a training task."""
        if task.id in self.recorded:
            return self.recorded[task.id][0].turns[0].completion.prompt_ids
        return self.renderer.prompt_ids(self.renderer.prompt_messages(task))


def open_data(
    config: RunConfig, objective: Objective, reading: Reading, model_folder: Path, tokenizer: Any = None
) -> StageData:
    """Reads and checks all data of a stage. Raises UserError for anything that would fail later.

    tokenizer: in place of the model's own, whose chat template is not there either.
    """
    shape = read_shape(model_folder)  # first: it refuses families that cannot be trained
    if tokenizer is None:
        tokenizer = load_tokenizer(model_folder)
        set_chat_options(tokenizer, config.prompt.chat_options)
    renderer = Renderer(
        tokenizer,
        system=config.prompt.system,
        template=config.prompt.template,
        eos_ids=end_ids(model_folder, tokenizer),
        by_source=_words(config),
    )
    sources_said, judges = (*config.train, *config.heldout), config.evaluation.reward
    rubric = reward_of(config.reward, sources_said)
    verifier = reward_of(judges, sources_said) if judges else rubric
    room = _Room(renderer, tokenizer, config, shape.max_context)
    heldout, is_compared = _heldout(config, reading, room)
    longest_row = min(config.trainer.max_length or shape.max_context, shape.max_context)
    reader = _record_reader(config, objective, reading, renderer, heldout, Speech.of(tokenizer), longest_row)
    sources = _training_sources(config, reader)
    share = 0.0
    if not config.is_recorded:
        share = reading.share_sampled(objective, _peek(_open_stream(config, sources, heldout), 1))
    answers = share > 0
    if answers:
        sources = [room.fit(source, part, "train") for source, part in zip(sources, config.train, strict=True)]
    stream = _open_stream(config, sources, heldout)
    probe = _peek(_open_stream(config, sources, heldout), PROBE_TASKS)
    rubric.require_scorable(heldout)
    verifier.require_scorable(heldout)
    if answers and config.reward:
        # Every row of a file, not only the probed ones: an answer that cannot be parsed must not end day two.
        rubric.require_scorable(chain(probe, _rows(sources)))
    asked = (*(() if is_compared else heldout), *(probe if answers else ()))
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
        longest_row=longest_row,
        share_sampled=share,
        is_heldout_compared=is_compared,
        left_out=(*room.left_out, *reader.left_out),
        recorded=reader.members,
    )


def _record_reader(
    config: RunConfig,
    objective: Objective,
    reading: Reading,
    renderer: Renderer,
    heldout: Sequence[Task],
    speech: Speech,
    longest_row: int,
) -> RecordReader:
    """What reads recorded episodes as this stage needs them."""
    # A kind that trains on none may still be shown their prompts: a dry run has nothing else of rows to come.
    needs = RecordNeeds() if reading.needs_of_records is None else reading.needs_of_records(objective)
    shown = (replace(task, messages=renderer.prompt_messages(task)) for task in heldout if task.messages)
    sampling = config.sampling
    return RecordReader(
        needs=needs,
        speech=speech,
        params=SamplingParams(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
        ),
        longest_row=longest_row,
        # Clients have asked in their own words, or in those that the recipe would show.
        excluded=frozenset(fingerprint(task) for task in (*heldout, *shown)),
    )


def _training_sources(config: RunConfig, reader: RecordReader) -> list[TaskSource]:
    """Of records all files together: what was asked in several of them is one group."""
    opened = reader.read(config.train) if config.is_recorded else [source_of(part) for part in config.train]
    return [_labelled(source, part, config) for source, part in zip(opened, config.train, strict=True)]


def require_judge(config: RunConfig, data: StageData) -> None:
    """Refuses held-out tasks that nobody could judge."""
    if data.heldout and not (data.is_heldout_compared or config.reward or config.evaluation.reward):
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
    # Records whose prompts are all tasks of a file before them have none to draw.
    weights = [0.0 if source.size == 0 else part.weight for source, part in zip(sources, config.train, strict=True)]
    return Stream(sources, weights, seed=config.seed, excluded=excluded)


def _heldout(config: RunConfig, reading: Reading, room: _Room) -> tuple[tuple[Task, ...], bool]:
    """Held-out tasks, and whether their answers are compared. Those that are to be answered must fit."""
    sources = [_labelled(source_of(part), part, config) for part in config.heldout]
    tasks = [source.task(index) for source in sources for index in range(source.size or 0)]
    is_compared = bool(tasks) and reading.compares is not None and reading.compares(tasks)
    if not is_compared:
        sources = [room.fit(source, part, "heldout") for source, part in zip(sources, config.heldout, strict=True)]
    return take_all(sources), is_compared


def _labelled(source: TaskSource, part: StageSource, config: RunConfig) -> TaskSource:
    """The source, whose tasks bear its name where the stage tells its sources apart."""
    is_told_apart = part.is_particular or len(config.train) > 1 or len(config.heldout) > 1
    return NamedSource(source, part.label) if is_told_apart else source


def _words(config: RunConfig) -> dict[str, tuple[str, str]]:
    """System message and template of the sources that have their own."""
    common = config.prompt
    return {
        source.label: (
            common.system if source.system is None else source.system,
            common.template if source.template is None else source.template,
        )
        for source in (*config.train, *config.heldout)
        if source.is_particular
    }


def _peek(stream: Stream, count: int) -> tuple[Task, ...]:
    return tuple(stream.next()[1] for _ in range(count))
