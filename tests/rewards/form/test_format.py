from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from temper.errors import UserError
from temper.rewards.form.format import FormatReward, JsonSchemaReward, TagsReward
from temper.rewards.form.json_schema import JsonSchema, find_json
from temper.types import Score, Task, Trajectory

Say = Callable[[str], Trajectory]
TASK = Task(id="t:1", messages=())


def values(reward: FormatReward | TagsReward | JsonSchemaReward, responses: list[Trajectory]) -> list[Score]:
    async def go() -> list[Score]:
        scores = [await reward.score(TASK, response) for response in responses]
        await reward.close()
        return scores

    return asyncio.run(go())


def test_format_matches_the_whole_response_over_lines(say: Say) -> None:
    reward = FormatReward(pattern="<think>.*</think>\\s*<answer>.*</answer>")
    texts = ["<think>a\nb</think>\n<answer>5</answer>\n", "x <think></think><answer></answer>"]
    assert values(reward, [say(text) for text in texts]) == [Score.of(1.0), Score.of(0.0)]


def test_a_regex_bomb_is_zero_with_a_reason_and_the_next_response_is_scored(say: Say) -> None:
    """A response that could bring an error about would be left out of the means instead."""
    reward = FormatReward(pattern="(a+)+b", deadline_seconds=1.0)
    bomb, right = values(reward, [say("a" * 64), say("aab")])
    assert (bomb.value, bool(bomb.reason)) == (0.0, True)
    assert right == Score.of(1.0)


@pytest.mark.parametrize("hidden", ["\u200b", "\u2060\ufeff", "\U000e0041", "\u3164"])
def test_what_nobody_sees_fills_no_form(say: Say, hidden: str) -> None:
    pattern = FormatReward(pattern="<think>.+</think>.*")
    assert [score.value for score in values(pattern, [say(f"<think>{hidden}</think>5"), say("<think>a</think>5")])] == [
        0.0, 1.0
    ]  # fmt: skip
    tags = [f"<think>{hidden}</think><answer>5</answer>", f"<th{hidden}ink>a</think><answer>5</answer>"]
    assert [score.value for score in values(TagsReward(), [say(text) for text in tags])] == [0.0, 0.0]
    schema = JsonSchemaReward(schema='{"type": "string", "minLength": 1}')
    assert [score.value for score in values(schema, [say(json.dumps(hidden)), say('"a"')])] == [0.0, 1.0]


def test_a_pattern_that_does_not_compile_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="not a regular expression"):
        FormatReward(pattern="(")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>5</answer>", 1.0),
        (" <think>a\n</think>\n\n<answer> 5 </answer>\n", 1.0),
        ("<think></think><answer>5</answer>", 0.0),  # no reasoning in the right form
        ("<think> \n</think><answer>5</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<answer>5</answer><think>a</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a<answer>5</answer></think>", 0.0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0.0),  # answer spam
        ("<think>a</think><think>a</think><answer>5</answer>", 0.0),
        ("<think>a</think> so <answer>5</answer>", 0.0),
        ("<think>a</think><answer>5</answer> or 6", 0.0),
        ("</think>a<think><answer>5</answer>", 0.0),
        ("<think>a</answer></think><answer>5</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_come_once_in_order_and_filled(say: Say, text: str, value: float) -> None:
    assert values(TagsReward(tags="think answer"), [say(text)]) == [Score.of(value)]


def test_tags_can_ask_for_more_than_a_character(say: Say) -> None:
    reward = TagsReward(tags="think", min_characters=5)
    assert values(reward, [say("<think>a b c</think>"), say("<think>a b c d e</think>")]) == [Score.of(0), Score.of(1)]


@pytest.mark.parametrize("tags", ["", "a a", "<a>", "a b/"])
def test_tags_that_are_no_names_are_the_users_mistake(tags: str) -> None:
    with pytest.raises(UserError, match="must be different names"):
        TagsReward(tags=tags)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 1]}, "maxItems": 2},
        "kind": {"const": {"deep": [True]}},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "Ada"}, True),
        ({"name": "Ada", "age": 36, "tags": ["a", 1], "kind": {"deep": [True]}, "note": None}, True),
        ({"name": "Ada", "age": 36.0}, True),
        ({}, False),
        ([], False),
        (None, False),
        ({"name": ""}, False),
        ({"name": "Adaline"}, False),
        ({"name": 5}, False),
        ({"name": "Ada", "age": 36.5}, False),
        ({"name": "Ada", "age": -1}, False),
        ({"name": "Ada", "age": 151}, False),
        ({"name": "Ada", "age": True}, False),
        ({"name": "Ada", "tags": ["c"]}, False),
        ({"name": "Ada", "tags": [True]}, False),
        ({"name": "Ada", "tags": ["a", "a", "a"]}, False),
        ({"name": "Ada", "kind": {"deep": [1]}}, False),
        ({"name": "Ada", "note": 1}, False),
        ({"name": "Ada", "other": 1}, False),
    ],
)
def test_values_fit_a_schema_or_not(value: Any, fits: bool) -> None:
    assert JsonSchema(json.dumps(PERSON)).fits(value) == (fits, [])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "Ada"}', 1.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        ('Here: {"name": "Ada"}', 0.0),
        ('{"name": "Ada"} {"name": "Bob"}', 0.0),
        ('{"name": 5, "name": "Ada"}', 0.0),  # which of the two is it?
        ('{"name": "Ada"', 0.0),
        ("[" * 100_000, 0.0),
        ("1" * 10_000, 0.0),
        ("NaN", 0.0),
        ("", 0.0),
    ],
)
def test_only_json_alone_counts(say: Say, text: str, value: float) -> None:
    assert values(JsonSchemaReward(schema=json.dumps(PERSON)), [say(text)]) == [Score.of(value)]


def test_patterns_run_in_a_worker_and_a_bomb_is_zero_with_a_reason(say: Say) -> None:
    reward = JsonSchemaReward(schema='{"pattern": "^(a+)+$"}', deadline_seconds=1.0)
    texts = ['"aa"', '"b"', "5", json.dumps("a" * 64 + "b")]
    scores = values(reward, [say(text) for text in texts])
    assert scores[:3] == [Score.of(1.0), Score.of(0.0), Score.of(1.0)]
    assert (scores[3].value, bool(scores[3].reason)) == (0.0, True)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "no valid JSON"),
        ("5", "must be an object"),
        ('{"requierd": []}', 'Did you mean "required"'),
        ('{"$ref": "#"}', 'has "\\$ref"'),
        ('{"type": "text"}', "type 'text'"),
        ('{"properties": {"a": {"anyOf": []}}}', "schema.properties.a"),
        ('{"items": {"format": "date"}}', "schema.items"),
        ('{"pattern": "("}', "no regular expression"),
        ('{"minimum": "1"}', "no number"),
        ('{"required": "name"}', "no list"),
    ],
)
def test_a_schema_that_is_not_understood_is_the_users_mistake(schema: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        JsonSchemaReward(schema=schema)


def test_null_is_json() -> None:
    assert JsonSchema('{"type": "null"}').fits(find_json("null")) == (True, [])
    assert JsonSchema("true").fits(find_json("nul")) == (False, [])
