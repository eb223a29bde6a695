"""Temper from Python: `temper.train`, `temper.load` and `temper.evaluate`, in scripts and in notebooks.

Owns: turning Python objects (rows, functions, keyword arguments) into a recipe, and what comes back. Refuses: rules of
its own; a recipe made here is checked by the same code, with the same messages, as one that is read from a file.
Heavy imports happen inside the functions: `import temper` is quick.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from temper.commands.launchers import require_one_process
from temper.errors import UserError
from temper.plugins import loading_file, name_function

if TYPE_CHECKING:
    from temper.build.policy import OpenPolicy
    from temper.runs.report.report import Report
    from temper.runs.results import SuiteResult

WHERE = "temper.train"
ROWS = "data"
"""Folder of a run with rows that were handed over in Python."""
ANSWER_SECONDS = 3600.0
"""How long one call of a policy may take."""
LOOK_SECONDS = 0.2
"""Between two looks at a thread: Ctrl-C is noticed in between."""

Rows = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A file, a table of recipe keys ({"generator": ...}), or rows: a list of dicts, a datasets.Dataset."""
Named = str | Mapping[str, Any] | Callable[..., Any]
"""What a recipe names: its name, a table of recipe keys, or the function or class itself."""
Conversation = str | Sequence[Mapping[str, str]]
"""What a user says, or messages with role and content."""
Value = TypeVar("Value")


def train(
    model: str | Path | Mapping[str, Any] | None = None,
    data: Rows | None = None,
    reward: Named | Sequence[Named] | None = None,
    *,
    recipe: str | Path | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    **keys: Any,
) -> Run:
    """Trains and returns the run.

    model: a checkpoint directory. data: a file or rows. reward: a function (prompt, response, answer) -> number or
    None, a name such as "math", or several of them.
    recipe: a TOML file to start from; everything else is put over it, and files are looked for beside it first. Further
    keyword arguments are keys of a recipe:
    steps=100, preset="dapo", rollout={"group_size": 16}, heldout="test.jsonl" (`temper recipe` lists all).
    run: the run directory; default runs/NAME. resume: go on where that run stopped, with what is not given again taken
    from its recipe.
    """
    if (file := loading_file()) is not None:
        raise UserError(
            f"{file} was imported to find a function in it, and calls temper.train while it is. Put that call under "
            'if __name__ == "__main__":'
        )
    require_one_process(WHERE)
    from temper.commands.starts import undo_failed_start
    from temper.commands.training.train import choose_folder, train_stages
    from temper.config import look_beside, resolve

    given = {"model": model, "data": data, "reward": reward, **keys}
    base = _base(recipe, run, resume)
    name = str(keys.get("name") or base.get("name") or "run")
    folder = Path(run) if run is not None else choose_folder(name, resume=resume)
    with undo_failed_start(folder):
        table = make_table(base, given, folder / ROWS)
        stages = resolve(table, (), where=WHERE)
        if recipe is not None:
            stages = [look_beside(config, Path(recipe).parent) for config in stages]
        return Run(apart(lambda: train_stages(stages, run=folder, resume=resume)))


def load(checkpoint: str | Path, *, seed: int = 0, max_running: int = 64) -> Policy:
    """Opens a checkpoint or the newest one of a run: something to talk to. max_running: sequences drawn together."""
    from temper.build.policy import Room, open_policy
    from temper.commands.find import find_model

    room = Room(seed=seed, max_running=max_running)
    return Policy(Path(checkpoint), open_policy(find_model(Path(checkpoint)), room))


def evaluate(
    policy: Policy | str | Path, suite: str, *, data: str | Path | None = None, **decoding: Any
) -> SuiteResult:
    """A checkpoint on a suite, as `temper eval --suite` does it; saved where that saves it.

    decoding: samples, temperature, top_p, max_new_tokens, thinking_budget, limit, seed, out, force, numerics.
    """
    from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite

    path = policy.path if isinstance(policy, Policy) else Path(policy)
    try:
        asked = SuiteRequest(suite=suite, data=None if data is None else Path(data), **decoding)
    except TypeError as error:
        raise UserError(f"temper.evaluate: {error}") from error
    return apart(lambda: evaluate_suite(path, asked))


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory."""

    folder: Path

    @property
    def last(self) -> Path:
        """The newest checkpoint of its policy."""
        from temper.commands.find import find_model

        return find_model(self.folder)

    @property
    def best(self) -> Path:
        """The checkpoint with the best held-out score among those kept by the last stage; the newest if none has one.

        A recipe keeps the newest checkpoint.keep of them.
        """
        from temper.runs.reader import RunReader
        from temper.trainer.checkpoint import list_checkpoints

        last = self.last
        kept = {int(path.name.rpartition("-")[2]): path for path in list_checkpoints(last.parent)}
        stage = int(last.parent.name.partition("-")[0])
        with RunReader(self.folder) as reader:
            results = [result for result in reader.evaluations() if result.stage == stage and result.step in kept]
        if not results:
            return last
        name = "greedy" if any(result.name == "greedy" for result in results) else results[0].name
        best = max(
            (result for result in results if result.name == name), key=lambda result: (result.score, result.step)
        )
        return kept[best.step]

    def report(self) -> Report:
        """What it achieved, as `temper report` shows it."""
        from temper.runs.report.report import make_report

        return make_report(self.folder)

    def __str__(self) -> str:
        from temper.runs.report.report import render

        return render(self.report())


class Policy:
    """A checkpoint that answers. Its engine runs in a thread of its own, so it works where an event loop runs already,
    as in a notebook. A context manager; close() frees its memory."""

    def __init__(self, path: Path, opened: OpenPolicy) -> None:
        self.path = path
        self._opened = opened
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"policy {path}", daemon=True)
        self._thread.start()

    def chat(self, said: Conversation, *, temperature: float = 0.0, max_new_tokens: int = 512) -> str:
        """One answer, the likeliest tokens unless a temperature is given."""
        return self.generate([said], temperature=temperature, max_new_tokens=max_new_tokens)[0][0]

    def generate(
        self,
        prompts: Sequence[Conversation],
        n: int = 1,
        *,
        temperature: float = 1.0,
        max_new_tokens: int = 512,
        top_p: float = 1.0,
    ) -> list[list[str]]:
        """`n` answers to each prompt, all drawn together."""
        conversations = [as_messages(prompt) for prompt in prompts]
        return self._wait_for(
            self._opened.answer(conversations, n, temperature=temperature, max_new_tokens=max_new_tokens, top_p=top_p)
        )

    def close(self) -> None:
        """May be called twice."""
        if self._loop.is_closed():
            return
        self._wait_for(self._opened.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def __enter__(self) -> Policy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"temper.load({str(self.path)!r})"

    def _wait_for(self, work: Coroutine[Any, Any, Value]) -> Value:
        if self._loop.is_closed():
            work.close()
            raise UserError(f"{self.path}: this policy was closed. Load it again with temper.load")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=ANSWER_SECONDS)


def as_messages(said: Conversation) -> list[dict[str, str]]:
    """A text is what the user says."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    for message in said:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UserError(
                f'{message!r:.80} is not a message. Give texts, or lists of {{"role": ..., "content": ...}}'
            )
    return [dict(message) for message in said]


def make_table(base: Mapping[str, Any], given: Mapping[str, Any], rows: Path) -> dict[str, Any]:
    """A recipe as TOML would have it. What is None was not given. Rows are written below `rows`."""
    from temper.config import merge

    above: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        above = merge(above, _TURNED[key](value, rows) if key in _TURNED else {key: value})
    if isinstance(base.get("stage"), list) and "stage" not in above:  # over every stage, as --set is
        return {**base, "stage": [merge(stage, above) for stage in base["stage"]]}
    return merge(base, above)


def _base(recipe: str | Path | None, run: str | Path | None, resume: bool) -> dict[str, Any]:
    from temper.config import read_table

    if recipe is not None:
        return read_table(Path(recipe))
    if resume and run is not None and (Path(run) / "config.toml").is_file():
        return read_table(Path(run) / "config.toml")
    return {}


def _model(value: str | Path | Mapping[str, Any], rows: Path) -> dict[str, Any]:
    return {"model": dict(value) if isinstance(value, Mapping) else {"path": str(value)}}


def _data(value: Rows | Sequence[Mapping[str, Any]], rows: Path) -> dict[str, Any]:
    return {"train": [_source(value, rows / "train.jsonl")]}


def _heldout(value: Rows, rows: Path) -> dict[str, Any]:
    return {"heldout": _source(value, rows / "heldout.jsonl")}


def _source(value: Rows, file: Path) -> dict[str, Any]:
    if isinstance(value, str | Path):
        return {"path": str(value)}
    if isinstance(value, Mapping):
        return _named(value, "generator")
    write_rows(value, file)
    return {"path": str(file)}


def write_rows(rows: Iterable[Mapping[str, Any]], file: Path) -> None:
    """One JSON object per line. A file with other rows is not overwritten: a resume must go on with the same data."""
    lines = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{WHERE}: row {number} of the data is {row!r:.80}, not a dict. Give a file, or rows such as "
                '{"prompt": "2 + 2 =", "answer": "4"}'
            )
        try:
            lines.append(json.dumps(dict(row)))
        except (TypeError, ValueError) as error:
            raise UserError(f"{WHERE}: row {number} of the data cannot be written as JSON: {error}") from error
    text = "".join(f"{line}\n" for line in lines)
    if file.is_file() and file.read_text(encoding="utf-8") != text:
        raise UserError(f"{file} holds other rows than those given. Resume without data, or start a new run")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _reward(value: Named | Sequence[Named], rows: Path) -> dict[str, Any]:
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return {"reward": [_judge(one) for one in several]}


def _judge(value: Named) -> dict[str, Any]:
    return _named(value if isinstance(value, Mapping) else {"kind": value}, "kind")


def _env(value: Named, rows: Path) -> dict[str, Any]:
    return {"env": _named(value if isinstance(value, Mapping) else {"name": value}, "name")}


def _named(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The table, with a name in place of a function or class."""
    value = table.get(key)
    return {**table, key: name_function(value)} if callable(value) else dict(table)


def _preset(value: str, rows: Path) -> dict[str, Any]:
    return {"objective": {"preset": value}}


_TURNED: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "model": _model,
    "data": _data,
    "heldout": _heldout,
    "env": _env,
    "reward": _reward,
    "preset": _preset,
}
"""Arguments that are not simply a key of a recipe, and what they become."""


def apart(work: Callable[[], Value]) -> Value:
    """What `work` returns or raises. It may start an event loop; where one runs already, as in a notebook, it works in
    a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    outcome: list[tuple[Literal["value", "error"], Any]] = []

    def run() -> None:
        try:
            outcome.append(("value", work()))
        except BaseException as error:
            outcome.append(("error", error))

    thread = threading.Thread(target=run, name="temper", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=LOOK_SECONDS)
    kind, value = outcome[0]
    if kind == "error":
        raise value
    return value  # type: ignore[no-any-return]
