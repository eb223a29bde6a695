"""A tool's schema is its signature, and arguments that do not fit are refused in words, never bent."""

from __future__ import annotations

import json
from typing import Any, Literal, Optional

import pytest

from temper.envs.tool_calls import Call, describe_tools
from temper.envs.tools import ArgumentsRefused, Tool, ToolSet, make_tool, mismatch, tool
from temper.errors import UserError


@tool(effect="read", seconds=3.0)
def find(
    query: str,
    limit: int = 5,
    kind: Literal["page", "image"] = "page",
    scores: list[float] | None = None,
    near: Optional[str] = None,  # noqa: UP045 - the older spelling is understood, too
    exact: bool = False,
) -> str:
    """Looks something
    up.

    Args:
        query: what to look for
        limit (int): at most so many
    """
    return query


def refused(arguments: Any) -> str:
    with pytest.raises(ArgumentsRefused) as caught:
        ToolSet([find]).bind(Call("find", arguments))
    return str(caught.value)


def test_the_schema_says_what_the_signature_says() -> None:
    function = find.schema["function"]
    assert find.schema["type"] == "function"
    assert (function["name"], function["description"]) == ("find", "Looks something up.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "description": "at most so many", "default": 5},
            "kind": {"type": "string", "enum": ["page", "image"], "default": "page"},
            "scores": {"type": ["array", "null"], "items": {"type": "number"}, "default": None},
            "near": {"type": ["string", "null"], "default": None},
            "exact": {"type": "boolean", "default": False},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    json.dumps(find.schema)


def test_arguments_that_fit_are_passed_on_as_they_are() -> None:
    arguments = {"query": "a", "limit": 2, "kind": "image", "scores": [1, 0.5], "near": None, "exact": True}
    assert ToolSet([find]).bind(Call("find", arguments)) == (find, arguments)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "'query' is missing"),
        ({"query": 3}, "'query' must be of type string, got 3"),
        ({"query": "a", "limit": "2"}, "'limit' must be of type integer, got '2'"),
        ({"query": "a", "limit": True}, "'limit' must be of type integer, got true"),
        ({"query": "a", "limit": 2.0}, "'limit' must be of type integer, got 2.0"),
        ({"query": "a", "kind": "film"}, "'kind' must be one of 'page', 'image', got 'film'"),
        ({"query": "a", "scores": [1.0, "x"]}, "'scores 2' must be of type number, got 'x'"),
        ({"query": "a", "exact": 1}, "'exact' must be of type boolean, got 1"),
        ({"query": "a", "depth": 1}, "'depth' is unknown, known: query, limit"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_reason(arguments: dict[str, Any], reason: str) -> None:
    assert reason in refused(arguments)


def test_an_unknown_tool_names_the_nearest() -> None:
    with pytest.raises(ArgumentsRefused, match="no tool 'fnd', did you mean 'find'"):
        ToolSet([find]).bind(Call("fnd", {}))
    with pytest.raises(ArgumentsRefused, match="no tool 'zzz', known: find"):
        ToolSet([find]).bind(Call("zzz", {}))


def test_plain_arguments_are_read_as_the_schema_wants_them() -> None:
    tools = ToolSet([find])
    assert tools.bind(Call("find", "'a, b', 3, image"))[1] == {"query": "a, b", "limit": 3, "kind": "image"}
    assert tools.bind(Call("find", "7, limit=2, exact=true"))[1] == {"query": "7", "limit": 2, "exact": True}
    assert tools.bind(Call("find", "x, near=none, scores=[1, 2.5]"))[1] == {
        "query": "x",
        "near": None,
        "scores": [1, 2.5],
    }
    assert "'limit' must be of type integer, got 'two'" in refused("a, two")
    assert "'query' is missing" in refused("")
    assert "given twice" in refused("a, query=b")
    assert "at most 6" in refused("a,1,page,[],b,true,more")


def test_a_lone_argument_is_everything_between_the_parentheses() -> None:
    def run(code: str) -> None: ...

    assert ToolSet([make_tool(run)]).bind(Call("run", "print(1, 'a=b')"))[1] == {"code": "print(1, 'a=b')"}


def test_secrets_are_no_part_of_the_schema_and_cannot_be_given() -> None:
    @tool(secrets=("api_token",))
    def fetch(path: str, api_token: str) -> str:
        return path

    assert "api_token" not in json.dumps(fetch.schema)
    with pytest.raises(ArgumentsRefused, match="'api_token' is unknown"):
        ToolSet([fetch]).bind(Call("fetch", {"path": "x", "api_token": "mine"}))
    with pytest.raises(UserError, match="no argument of the function"):
        make_tool(fetch.run, secrets=("other",))


def test_schemas_from_elsewhere_are_checked_as_far_as_they_are_understood() -> None:
    schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 3}, {"type": "null"}]}
    assert mismatch(2, schema) is None
    assert mismatch(None, schema) is None
    assert "fits none" in str(mismatch(4, schema))
    nested = {"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}}
    assert mismatch({"a": {}}, nested) == "argument 'b' is missing"


def test_functions_that_cannot_be_tools_are_refused_at_once() -> None:
    def untyped(a) -> None: ...  # type: ignore[no-untyped-def]
    def odd(a: set[int]) -> None: ...
    def starred(*a: int) -> None: ...
    def wrong(a: int = "x") -> None: ...  # type: ignore[assignment]

    for function in (untyped, odd, starred, wrong):
        with pytest.raises(UserError, match=f"tool {function.__name__}"):
            make_tool(function)
    with pytest.raises(UserError, match="two tools"):
        ToolSet([find, find])
    with pytest.raises(UserError, match="effect 'maybe'"):
        Tool(name="x", description="", parameters={}, run=print, effect="maybe")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a name is"):
        Tool(name="x y", description="", parameters={}, run=print)


def test_tools_can_be_described_in_words() -> None:
    words = describe_tools(ToolSet([find]).schemas, "auto")
    assert "find(query, limit, kind, scores, near, exact): Looks something up." in words
