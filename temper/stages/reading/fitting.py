"""Every row of the files that a stage reads, looked at before its first step.

Owns: which rows are made for the look, and what is said about those that cannot be trained. Refuses: prompts that the
model answers (data.py), and making rows (the kinds of stages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from temper.config import RunConfig
from temper.errors import UserError
from temper.stages.reading.data import StageData
from temper.stages.reading.examples import RowTooLong
from temper.tasks.lengths import measure_texts
from temper.types import Sample, Task

TEMPLATE_TOKENS = 512
"""That a chat template writes around a conversation, at most: a default system message, the preamble of tools."""
TURN_TOKENS = 16
"""That it writes around a message, at most."""
MAX_NAMED = 20

MakeRows = Callable[[Task], Sequence[Sample]]
"""The rows of one task. Raises RowTooLong, and UserError for what cannot be trained."""


def require_rows(config: RunConfig, make_rows: MakeRows, data: StageData) -> None:
    """Raises UserError that names the rows which would end the stage in the middle. Rows that are too long are none
    where trainer.max_length drops them, unless nothing else is left."""
    if not data.rows:
        return
    drops_long, num_long, bad = config.trainer.max_length > 0, 0, list[tuple[str, str]]()
    for task in _suspects(data, data.longest_row):
        try:
            make_rows(task)
        except RowTooLong as error:
            num_long += 1
            if not drops_long or num_long == len(data.rows):
                bad.append((task.id, str(error)))
        except UserError as error:
            bad.append((task.id, str(error)))
    if bad:
        others = [name for name, _ in bad[1:]]
        also = f"\n{len(others)} more rows are bad: {', '.join(others[:MAX_NAMED])}" if others else ""
        raise UserError(f"{bad[0][1]}{also}{', ...' if len(others) > MAX_NAMED else ''}")


def _suspects(data: StageData, limit: int) -> list[Task]:
    """Rows that may be bad: too long with what the template adds, without an answer, labelled by steps, or with a mark
    inside that ends a turn. The others need not be made."""
    ends = [str(data.tokenizer.convert_ids_to_tokens(stop)) for stop in data.renderer.stop_ids]
    texts = [_text(task) for task in data.rows]
    turns = max(len(task.messages) for task in data.rows) + 1
    room = max(0, limit - TEMPLATE_TOKENS - TURN_TOKENS * turns)
    long = {place for place, _ in measure_texts(data.tokenizer, texts, room).over}
    return [
        task
        for place, (task, text) in enumerate(zip(data.rows, texts, strict=True))
        if place in long or not task.answer or "step_labels" in task.extra or any(end in text for end in ends)
    ]


def _text(task: Task) -> str:
    """All that the rows of a task are made of: of a pair more than one row, and never less."""
    columns = (str(task.extra.get(name, "")) for name in ("rejected", "tools"))
    return "\n".join([*(message.content for message in task.messages), task.answer or "", *columns])
