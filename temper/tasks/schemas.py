"""Rows of published data sets: which shape a row has, and the task that it is.

Owns: the known shapes, and every complaint about a row. Refuses: files (files.py), tokens (render.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from temper.types import Message, Scalar, Task

ROLES = ("system", "user", "assistant", "tool")
STEP_SEPARATOR = "\n\n"
"""Between the steps of a step-labelled answer; the reward "process" splits completions by the same."""

Row = dict[str, Any]
"""The columns that a row has. Whoever reads a column takes it out; what is left over stays with the task."""
Read = tuple[Sequence[Message], str, dict[str, Scalar]]
"""Messages before the answer, the answer, and what else a stage reads of it."""

_ROLE_OF = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "function_call": "assistant", "tool": "tool", "observation": "tool", "ipython": "tool",
    "function": "tool", "function_response": "tool",
}  # fmt: skip
_MAY_FOLLOW = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Who may speak after whom; "" is the beginning."""
_LISTS = ("messages", "conversations")
_PROMPTS = ("prompt", "question")
_ANSWERS = ("completion", "response", "answer")
_LABELS = ("label", "kto_tag")
_NOT_TEXT = ("images", "videos", "audios")


class BadRow(Exception):
    """What is wrong with one row, and what to do."""


@dataclass(frozen=True, slots=True)
class Schema:
    """One shape that rows have."""

    name: str
    columns: str
    """The shape in words, for messages to people; "?" marks what may be absent."""
    fits: Callable[[Row], bool]
    read: Callable[[Row], Read]

    def task(self, task_id: str, row: Row) -> Task:
        """Raises BadRow. Scalars in columns that the schema does not know stay in `extra`, all else in
        `columns`."""
        row = _present(row)
        if unseen := [name for name in _NOT_TEXT if row.pop(name, None)]:
            raise BadRow(f'"{unseen[0]}" is not empty, and only text can be trained. Remove such rows.')
        tools = read_tools(row.pop("tools", None))
        messages, answer, extra = self.read(row)
        rest = {name: value for name, value in row.items() if isinstance(value, (str, int, float, bool))}
        columns = {name: value for name, value in row.items() if name not in rest}
        extra = {**rest, **extra, **tools}
        return Task(id=task_id, messages=tuple(messages), answer=answer, extra=extra, columns=columns)


def schema_of(row: Any) -> Schema:
    """The first known shape that the row has; raises BadRow when there is none."""
    if not isinstance(row, dict):
        raise BadRow(f"the row is {row!r:.60}, not an object with named columns.")
    present = _present(row)
    for schema in SCHEMAS:
        if schema.fits(present):
            return schema
    known = "\n".join(f"  {schema.name}: {schema.columns}" for schema in SCHEMAS)
    raise BadRow(
        f"the columns {', '.join(present) or 'none'} are of no known schema. Known:\n{known}\n"
        "Rename the columns, or say which are prompt and answer with prompt_field and answer_field."
    )


def check_turns(messages: Sequence[Message]) -> None:
    """Raises BadRow when somebody says nothing, or speaks out of turn: most chat templates would not say so."""
    before = ""
    for message in messages:
        if message.role not in _MAY_FOLLOW[before]:
            where = f"after {before}" if before else "first"
            allowed = " or ".join(_MAY_FOLLOW[before])
            raise BadRow(f"the roles do not alternate: {message.role} speaks {where}, where {allowed} must.")
        if not message.content.strip() and message.role in ("user", "assistant"):
            raise BadRow(f"a message of role {message.role} is empty. Remove the row.")
        before = message.role


def _present(row: Row) -> Row:
    """Without the columns that are None: Parquet writes these where a row has no such column."""
    return {name: value for name, value in row.items() if value is not None}


def _has(*alternatives: Sequence[str]) -> Callable[[Row], bool]:
    """Whether a row has one column of each of these."""
    return lambda row: all(any(name in row for name in names) for names in alternatives)


def _take(row: Row, names: Collection[str]) -> Any:
    """The first of these columns that the row has, and takes it out; None when it has none of them."""
    return next((row.pop(name) for name in names if name in row), None)


def _read_conversation(row: Row) -> Read:
    messages = [*_system(row), *_messages(_take(row, _LISTS))]
    while messages and messages[-1].role != "assistant":
        messages.pop()  # nobody answers them: nothing there can be learned
    if not messages:
        raise BadRow("there is no assistant turn, so there is nothing to learn. Remove the row.")
    return _supervised(messages, trained=messages)


def _read_instruction(row: Row) -> Read:
    messages = [*_system(row), *_instruction(row), *_said("output", row.pop("output"))]
    return _supervised(messages, trained=messages)


def _read_completion(row: Row) -> Read:
    prompt, completion = [*_system(row), *_asked(_take(row, _PROMPTS))], _said("completion", _take(row, _ANSWERS))
    return _supervised([*prompt, *completion], trained=completion)


def _read_labelled(row: Row) -> Read:
    """One of the three above with a verdict on its answer; earlier turns are its context."""
    label = _take(row, _LABELS)
    messages, answer, _ = next(schema for schema in _SUPERVISED if schema.fits(row)).read(row)
    return messages, answer, {"label": label}


def _read_steps(row: Row) -> Read:
    steps, labels = row.pop("completions"), row.pop("labels")
    if not isinstance(steps, list) or not isinstance(labels, list) or not steps or len(steps) != len(labels):
        raise BadRow('"completions" and "labels" must be lists with one label for each step.')
    for step in steps:
        if not isinstance(step, str) or not step.strip():
            raise BadRow(f'"completions" holds {step!r:.60}; each step must be text.')
        if STEP_SEPARATOR in step.strip():
            raise BadRow(f"the step {step!r:.60} has an empty line inside, and steps are told apart by empty lines.")
    if not all(label in (0, 1) for label in labels):
        raise BadRow(f'"labels" is {labels!r:.60}; each must be true or false.')
    asked = [*_system(row), *_asked(_take(row, _PROMPTS))]
    said = _spoken(STEP_SEPARATOR.join(step.strip() for step in steps))
    messages, answer, _ = _supervised([*asked, said], trained=())
    return messages, answer, {"step_labels": ",".join(str(int(label)) for label in labels)}


def _read_pair(row: Row) -> Read:
    prompt = [*_system(row), *_pair_prompt(row)]
    chosen, rejected = (_side(name, row.pop(name), is_alone=not prompt) for name in ("chosen", "rejected"))
    if chosen[0].role != "assistant":
        same = _common(chosen, rejected)
        prompt, chosen, rejected = _agreed(prompt, same), chosen[len(same) :], rejected[len(same) :]
    if len(chosen) != 1 or len(rejected) != 1:
        raise BadRow("the two sides differ before their last turn; a pair is two answers to one conversation.")
    _supervised([*prompt, rejected[0]], trained=())
    messages, answer, _ = _supervised([*prompt, chosen[0]], trained=())
    if answer.strip() == rejected[0].content.strip():
        raise BadRow("chosen and rejected are equal, so there is nothing to prefer. Remove the row.")
    margin = row.pop("margin", None)
    if not isinstance(margin, (int, float, type(None))):
        raise BadRow(f'"margin" is {margin!r:.60}; it must be a number.')
    return messages, answer, {"rejected": rejected[0].content, **({} if margin is None else {"margin": float(margin)})}


def _common(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    """What two conversations begin with, up to the last turn of the shorter: the rest are the two answers."""
    last = min(len(chosen), len(rejected)) - 1
    pairs = zip(chosen[:last], rejected[:last], strict=True)
    return [message for message, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _agreed(prompt: Sequence[Message], same: list[Message]) -> list[Message]:
    """The conversation that both sides begin with, under the row's system message. A prompt column only repeats it."""
    system = [message for message in prompt if message.role == "system"]
    asked = [message for message in prompt if message.role != "system"]
    if asked and asked != [message for message in same if message.role != "system"]:
        raise BadRow('"chosen" and "rejected" are conversations that do not begin with "prompt".')
    return same if any(message.role == "system" for message in same) else [*system, *same]


def _supervised(messages: Sequence[Message], trained: Sequence[Message]) -> Read:
    """The last turn is the answer. `trained`: where assistants are to be learned from; the last one always is."""
    check_turns(messages)
    if messages[-1].role != "assistant":
        raise BadRow(f"the last turn is of role {messages[-1].role}; it must be the assistant's.")
    turns = sum(message.role == "assistant" for message in trained)
    everyone = sum(message.role == "assistant" for message in messages)
    extra: dict[str, Scalar] = {}
    if turns > 1:
        extra["trained_turns"] = "all" if turns == everyone else str(turns)
    return messages[:-1], messages[-1].content, extra


def _pair_prompt(row: Row) -> list[Message]:
    if any(name in row for name in _PROMPTS):
        return _asked(_take(row, _PROMPTS))
    if "instruction" in row:
        return _instruction(row)
    return _messages(_take(row, _LISTS)) if any(name in row for name in _LISTS) else []


def _side(name: str, value: Any, *, is_alone: bool) -> list[Message]:
    """One answer, or a whole conversation. Text that is alone must be a transcript, else nothing was asked."""
    if not isinstance(value, str) or not is_alone:
        return _said(name, value)
    pieces = re.split(r"\n\n(Human|Assistant):", "\n\n" + value.lstrip("\n"))
    if pieces[0].strip() or len(pieces) < 5:
        raise BadRow(f'there is no prompt, and "{name}" is no transcript ("\\n\\nHuman: ...\\n\\nAssistant: ...").')
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(pieces[1::2], pieces[2::2], strict=True)
    return [Message(role=roles[speaker], content=text.strip()) for speaker, text in pairs]


def _system(row: Row) -> list[Message]:
    system = row.pop("system", "")
    if not isinstance(system, str):
        raise BadRow(f'"system" is {system!r:.60}; it must be text.')
    return [Message(role="system", content=system)] if system.strip() else []


def _instruction(row: Row) -> list[Message]:
    parts = [row.pop("instruction"), row.pop("input", "")]
    if not all(isinstance(part, str) for part in parts):
        raise BadRow(f'"instruction" and "input" are {parts!r:.60}; they must be text.')
    history = row.pop("history", [])
    if not isinstance(history, list) or not all(isinstance(turn, (list, tuple)) and len(turn) == 2 for turn in history):
        raise BadRow(f'"history" is {history!r:.60}; it must be a list of [asked, answered].')
    past = [message for asked, answered in history for message in (*_asked(asked), *_said("history", answered))]
    return [*past, *_asked("\n".join(part for part in parts if part.strip()))]


def _asked(prompt: Any) -> list[Message]:
    return [Message(role="user", content=prompt)] if isinstance(prompt, str) else _messages(prompt)


def _said(name: str, value: Any) -> list[Message]:
    """What an assistant said: text, one message, or messages."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f'"{name}" is empty, so there is nothing to learn. Remove the row.')
        return [_spoken(value)]
    return _messages([value] if isinstance(value, dict) else value)


def _spoken(text: str) -> Message:
    return Message(role="assistant", content=text)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{value!r:.60} is neither text nor a list of messages ({{role, content}} or {{from, value}}).")
    # Data sets write an empty system message where others write none.
    messages = [m for m in map(_message, value) if m.role != "system" or m.content.strip()]
    if not messages:
        raise BadRow("a list of messages holds nothing but an empty system message. Remove the row.")
    return messages


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"{value!r:.60} is no message; write {{role, content}} or {{from, value}}.")
    message = _present(value)
    said, calls = message.get("role", message.get("from")), message.get("tool_calls", [])
    if not isinstance(said, str) or said not in _ROLE_OF:
        raise BadRow(f"a message has role {said!r}; allowed: {', '.join(_ROLE_OF)}.")
    unread = [name for name in ("reasoning_content", "thinking", "audio") if message.get(name)]
    if unread or message.get("weight", 1) != 1:
        raise BadRow(
            f'a message has "{(*unread, "weight")[0]}", which is not read. Write what it means into its content.'
        )
    content = _text(message.get("content", message.get("value", "")))
    if said == "function_call":
        content = _call(content)
    text = "\n".join([*([content] if content else []), *map(_call, calls if isinstance(calls, list) else [calls])])
    return Message(role=_ROLE_OF[said], content=text, name=str(message.get("name", "")) if said == "tool" else "")


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise BadRow(f"a message holds {content!r:.60}; only text can be trained.")
    return "".join(part["text"] for part in parts)


def _call(call: Any) -> str:
    """As Hermes and Qwen write it: what the tool environments read by default."""
    try:
        call = json.loads(call) if isinstance(call, str) else call
        if isinstance(call, list):
            return "\n".join(map(_call, call))
        function = call.get("function") or call
        arguments = function.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        written = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    except (ValueError, AttributeError, KeyError) as error:
        raise BadRow(f"a tool call is {call!r:.60}; it must be JSON with name and arguments.") from error
    return f"<tool_call>\n{written}\n</tool_call>"


def read_tools(value: Any) -> dict[str, Scalar]:
    """JSON schemas of tools, as text: the template shows them to the model."""
    try:
        tools = json.loads(value or "[]") if isinstance(value, str) else (value or [])
    except ValueError as error:
        raise BadRow(f'"tools" is {value!r:.60}, which is not JSON.') from error
    if not isinstance(tools, list):
        raise BadRow(f'"tools" is {value!r:.60}; it must be a list of JSON schemas.')
    return {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}


def _is_labelled(row: Row) -> bool:
    """A label that is not a truth value belongs to some other data set, and stays a column."""
    labels = [row[name] for name in _LABELS if name in row]
    return bool(labels) and isinstance(labels[0], bool) and any(schema.fits(row) for schema in _SUPERVISED)


_SUPERVISED = (
    Schema("conversation", "{messages or conversations, system?, tools?}", _has(_LISTS), _read_conversation),
    Schema(
        "instruction",
        "{instruction, input?, output, system?, history?}",
        _has(("instruction",), ("output",)),
        _read_instruction,
    ),
    Schema(
        "completion",
        "{prompt or question, completion or response or answer, system?}",
        _has(_PROMPTS, _ANSWERS),
        _read_completion,
    ),
)
SCHEMAS = (
    Schema(
        "pair",
        "{prompt?, chosen, rejected, margin?}, where the prompt may be any of those below",
        _has(("chosen",), ("rejected",)),
        _read_pair,
    ),
    Schema(
        "steps",
        "{prompt or question, completions: [...], labels: [...]}",
        _has(_PROMPTS, ("completions",), ("labels",)),
        _read_steps,
    ),
    Schema("labelled", "any of those below, and label: true or false", _is_labelled, _read_labelled),
    *_SUPERVISED,
)
"""In the order in which rows are tried."""
