"""What a suite is: data and a few lines of TOML. One TOML file is one suite; those beside this file come with Temper.

Owns: finding and reading suites, their tasks, how final answers are taken from responses, the hash of what is asked.
Refuses: running them (attempts.py) and generators that come with environments; the caller passes those in.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from temper.config.recipe import merge, parse_override
from temper.config.section import Section
from temper.config.sections import EnvConfig
from temper.config.sources import PromptConfig, RewardConfig, SourceConfig
from temper.config.thinking import ThinkingConfig
from temper.envs.agents.agent import NAME as AGENT
from temper.envs.library.problems import READERS, read_problems, read_rows
from temper.errors import UserError, did_you_mean, install_line
from temper.evals.scores import CORRECT_AT
from temper.plugins import load_function
from temper.rewards.mathematics.answers import find_answers
from temper.rewards.mathematics.forms import form, plain_number
from temper.tasks.dataset import read_file
from temper.tasks.generators import make_source
from temper.types import Task

FOLDER = Path(__file__).parent / "suites"
HOW_TO_ADD = "Your own suite is a TOML file: see docs/evaluation.md, and give its path"

AnswerOf = Callable[[str], str | None]
"""The final answer of a response, written so that equal answers are equal texts; None: it states none."""


class SuiteSource(SourceConfig):
    """Where a suite's tasks come from: exactly one of path, problems and generator."""

    problems: str = ""
    """A set that is read as published: gsm8k, humaneval, math, mbpp, svamp. Without a path: the shipped sample."""
    columns: dict[str, str] = Field({})
    """New columns from those of a row, e.g. {prompt = "{Body} {Question}"}. Text goes in as it is, all else as JSON."""

    @model_validator(mode="after")
    def _one_origin(self) -> SuiteSource:
        if bool(self.problems or self.path) == bool(self.generator):
            raise ValueError("give exactly one of path, problems and generator")
        if self.problems and self.problems not in READERS:
            raise ValueError(f'problems = "{self.problems}" is unknown. Known: {", ".join(READERS)}')
        if self.generator and not self.size:
            raise ValueError("size is missing: a generated suite needs one, e.g. size = 100")
        return self


class DecodingConfig(Section):
    """How often and how each prompt is asked, unless the command line says otherwise."""

    temperature: float = Field(0.6, ge=0)
    """0 is greedy."""
    samples: int = Field(4, ge=1)
    """Per prompt."""
    max_new_tokens: int = Field(512, ge=1)
    """Most tokens of one turn."""
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: list[str] = Field([])
    max_turns: int = Field(1, ge=1)
    episode_seconds: float = Field(600.0, gt=0)
    thinking: ThinkingConfig | None = None
    """Close the thinking of answers at a budget of tokens, as rollout.thinking does in training."""

    @model_validator(mode="after")
    def _greedy_once(self) -> DecodingConfig:
        if self.temperature == 0 and self.samples > 1:
            raise ValueError(
                f"temperature = 0 gives the same answer samples={self.samples} times. Use samples = 1, or a temperature"
            )
        return self


class Suite(Section):
    """One TOML file."""

    name: str = ""
    """Empty: the name of the file."""
    about: str = ""
    """One line for people."""
    source: str = ""
    """Where the published data comes from."""
    license: str = ""
    """License of the published data."""
    data: SuiteSource
    prompt: PromptConfig = PromptConfig()
    env: EnvConfig = EnvConfig()
    reward: list[RewardConfig] = Field(min_length=1)
    """Parts of the score, as in a recipe."""
    decoding: DecodingConfig = DecodingConfig()
    correct_at: float = CORRECT_AT
    """Score from which a sample is correct."""
    answer: str = ""
    """How the final answer is found, for majority votes: math, math_strict, line, text, or "package.module:function" of
    your own (text in, text or None out). Empty: the suite has none, and no majority."""
    say: str = "{answer}"
    """How the commonest gold answer is said to the verifier, for its score. Empty: gold answers cannot be said."""

    @model_validator(mode="after")
    def _leads_its_episodes(self) -> Suite:
        if self.env.name == AGENT:
            raise ValueError(
                'env.name = "agent": a suite leads its episodes turn by turn, and an agent leads its own. Name another '
                "environment, or let temper train play the agent: it scores its [heldout] tasks"
            )
        return self

    @property
    def is_sample(self) -> bool:
        """Whether it reads what ships with Temper instead of the published data."""
        path = self.data.path
        return bool(self.data.problems and not path) or bool(path and Path(path).parent == FOLDER)


def suite_names() -> list[str]:
    """Names of the suites that come with Temper."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_suite(name: str, *, data: Path | None = None, overrides: Iterable[str] = ()) -> Suite:
    """A shipped suite by name, or a TOML file by path. data: the file with the rows, in place of the suite's own.

    overrides are "key=value" over the suite's keys, e.g. "data.options.family=chain_sum".
    """
    path = Path(name).expanduser() if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        known = suite_names()
        raise UserError(
            f'suite "{name}" is unknown.{did_you_mean(name, known)} Known: {", ".join(known)}. {HOW_TO_ADD}.'
        )
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from error
    for override in overrides:
        table = merge(table, parse_override(override))
    return _validate({"name": path.stem, **table}, path, data)


def _validate(table: dict[str, Any], file: Path, data: Path | None) -> Suite:
    try:
        suite = Suite.model_validate(table)
    except ValidationError as error:
        raise UserError("\n".join(_explain(problem, file) for problem in error.errors())) from error
    rows = suite.data.path
    if data is not None:
        if suite.data.generator:
            raise UserError(
                f'suite "{suite.name}" makes its tasks (generator {suite.data.generator}) and reads no file, so it has '
                f"no use for --data {data}. Change its options instead, e.g. --set data.options.KEY=VALUE"
            )
        rows = str(data.expanduser())
    elif rows:
        rows = str(file.parent / Path(rows).expanduser())  # a suite and its rows travel together
    return suite.model_copy(update={"data": suite.data.model_copy(update={"path": rows})})


def _explain(problem: Mapping[str, Any], file: Path) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    given = "" if problem["type"] in ("value_error", "missing") else f" (got {problem['input']!r:.80})"
    if problem["type"] == "extra_forbidden":
        return f'{file}: key "{key}" is unknown. {HOW_TO_ADD}.'
    return f"{file}: {f'{key}: ' if key else ''}{str(problem['msg']).removeprefix('Value error, ')}{given}."


def read_tasks(suite: Suite, *, limit: int = 0) -> tuple[Task, ...]:
    """The suite's tasks in order, the first `limit` of them; 0: all."""
    from temper.catalogue import GENERATORS  # heavy, and a suite that is not there never comes here

    data = suite.data
    if data.problems:
        tasks = read_problems(data.problems, data.path)
    elif data.path:
        tasks = _read_rows(Path(data.path), data)
    else:
        source = make_source(data.generator, data.options, seed=data.seed, size=data.size, generators=GENERATORS)
        tasks = tuple(source.task(index) for index in range(min(data.size, limit or data.size)))
    tasks = tasks[: limit or data.size or len(tasks)]
    if repeated := [name for name, times in Counter(task.id for task in tasks).items() if times > 1]:
        # Two results are compared task by task.
        raise UserError(f'suite "{suite.name}": {len(repeated)} ids name several tasks, e.g. "{repeated[0]}"')
    return tasks


def _read_rows(path: Path, data: SuiteSource) -> tuple[Task, ...]:
    """Rows of .jsonl, .jsonl.gz, .json or .parquet, with the suite's new columns.

    Goes through a file of the finished rows, because then one reader (tasks.dataset) checks rows everywhere.
    """
    rows = _parquet_rows(path) if path.suffix in (".parquet", ".pq") else read_rows(path)
    with tempfile.TemporaryDirectory() as folder:
        finished = Path(folder) / f"{path.name.partition('.')[0]}.jsonl"
        lines = (json.dumps(_with_columns(row, data.columns, f"{path}, row {i}")) for i, row in enumerate(rows, 1))
        finished.write_text("\n".join(lines), encoding="utf-8")
        try:
            return read_file(finished, data.prompt_field, data.answer_field, data.answer_pattern).tasks
        except UserError as error:
            raise UserError(str(error).replace(str(finished), str(path))) from error


def _parquet_rows(path: Path) -> list[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet needs the package pyarrow. Run: {install_line('parquet')}") from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error}).") from error


def _with_columns(row: Any, columns: Mapping[str, str], where: str) -> Any:
    if not isinstance(row, dict):
        return row  # the reader of the finished rows says what is wrong with it
    try:
        # In one pass: what a row says is never taken for a slot.
        made = {name: re.sub(r"\{(\w+)\}", lambda slot: _as_text(row[slot[1]]), text) for name, text in columns.items()}
    except KeyError as error:
        raise UserError(f"{where}: there is no column {error}. Columns: {', '.join(row)}. See data.columns.") from error
    return {**{name: _plain(value) for name, value in row.items()}, **made}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _plain(value: Any) -> Any:
    """JSON has no dates or bytes; such columns are of no use to a reward and become text."""
    return json.loads(json.dumps(value, default=str))


def prompts_sha256(suite: Suite, tasks: Sequence[Task]) -> str:
    """Hash of everything that is asked: words, gold answers, what environments and verifiers read; not of task ids."""
    is_own = any(":" in part.kind for part in suite.reward)  # a function of the user's, which may read every column
    env = suite.env.model_dump(include={"name", "options"})  # where it lives is no part of the question
    # Results of before there were options stay comparable.
    words = suite.prompt.model_dump(exclude=None if suite.prompt.chat_options else {"chat_options"})
    digest = hashlib.sha256(json.dumps([words, env]).encode())
    for task in tasks:
        said = [[message.role, message.content] for message in task.messages]
        read = [task.answer, task.env, dict(task.extra), *([dict(task.columns)] if is_own else [])]
        digest.update(json.dumps([said, *read], sort_keys=True, default=str).encode())
    return digest.hexdigest()


def answer_of(suite: Suite) -> AnswerOf:
    """How the suite finds final answers."""
    if not suite.answer:
        return lambda text: None
    if ":" in suite.answer:
        return load_function(suite.answer, where=f'suite "{suite.name}", answer')
    if suite.answer not in ANSWERS:
        raise UserError(
            f'suite "{suite.name}": answer = "{suite.answer}" is unknown.{did_you_mean(suite.answer, ANSWERS)} '
            f'Known: {", ".join(ANSWERS)}, or "package.module:function".'
        )
    return ANSWERS[suite.answer]


def math_answer(text: str, *, is_strict: bool = False) -> str | None:
    """The one answer that the math reward would judge: numbers by value, everything else without space and case.

    is_strict: as with the reward's option, the last number of a response that states no answer is not one.
    """
    found = find_answers(text, is_strict=is_strict)
    if len(found) != 1 or not found[0].strip():
        return None
    written = form(found[0])
    number = plain_number(written.text)
    plain = "".join(written.text.split()).casefold() if number is None else str(number)
    return f"{plain}%" if written.unit == "%" else plain


def line_answer(text: str) -> str | None:
    """What the last <answer></answer> holds, else the last line that is not empty."""
    found = re.findall(r"<answer>(.*?)(</answer>|\Z)", text, re.DOTALL | re.IGNORECASE)
    tagged = [inner for inner, end in found if end]
    lines = [line for line in text.splitlines() if line.strip()]
    return text_answer(tagged[-1] if tagged else lines[-1] if lines else "")


def text_answer(text: str) -> str | None:
    """All of it, without case and with single spaces."""
    return " ".join(text.casefold().split()) or None


ANSWERS: dict[str, AnswerOf] = {
    "line": line_answer,
    "math": math_answer,
    "math_strict": partial(math_answer, is_strict=True),
    "text": text_answer,
}
