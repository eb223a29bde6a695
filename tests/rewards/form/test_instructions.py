"""Instruction checks: each followed and broken by hand, and none that silence or a filled form can satisfy."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from temper.errors import UserError
from temper.rewards.form.instruction_checks import CHECKS, count_sentences
from temper.rewards.form.instructions import InstructionReward
from temper.types import Score, ScoreKind, Task, Trajectory

DATA = Path(os.environ.get("TEMPER_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
Say = Callable[[str], Trajectory]
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, ["A BIG day", "NASA and ESA"], ["One BIG day"]
    ),
    "change_case:english_capital": ({}, ["THE END OF IT."], ["The end.", "DAS IST NICHT DAS ENDE UND DER REST", "12"]),
    "change_case:english_lowercase": ({}, ["the end of it."], ["The end.", "das ist nicht das ende und der rest"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi."}, ["Say hi.\nHi!"], ["Hi! Say hi.", "Say hi."]),
    "combination:two_responses": (
        {}, ["a\n******\nb", "******a******b"], ["a", "a******a", "a******b******c", "******"]
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2}, ["[a] and [b c]"], ["[a]", "[][]", "[[a]", "[" * 99]
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"}, ["x\nP.P.S more", "p. p. s more"], ["x P.S. y", "P.P.S"]
    ),
    "detectable_format:constrained_response": (
        {}, ["Hm. My answer is no."], ["no", "My answer is yes. My answer is no. My answer is maybe."]
    ),
    "detectable_format:json_format": ({}, ['{"a": 1}', "```json\n[1]\n```"], ["a: 1", '{"a": 1} so', "5", "[" * 99999]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"], ["SECTION 1", "SECTION 1 SECTION 1"]
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2}, ["* a\n* b", "- a\n  - b\n***\n---"], ["* a", "* a\n* b\n* c", "**bold**\n* a", "*\n*"]
    ),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2}, ["*a* **b**"], ["*a*", "** ** * *", "* a\n* b"]
    ),
    "detectable_format:title": ({}, ["<<Moon>>\nx"], ["<Moon>", "<<>>", "<< >>", "<<a\nb>>", "<" * 9999]),
    "keywords:existence": ({"keywords": ["sun", "Moon"]}, ["The SUN and the moon"], ["the sun"]),
    "keywords:forbidden_words": ({"forbidden_words": ["rock", "c++"]}, ["rocket science"], ["Rock on", "a rock."]),
    "keywords:frequency": ({"keyword": "war", "frequency": 2, "relation": "at least"}, ["War and war"], ["war"]),
    "keywords:letter_frequency": ({"letter": "Q", "let_frequency": 2, "let_relation": "less than"}, ["Quit"], ["qQ"]),
    "language:response_language": (
        {"language": "de"}, ["Das ist nicht schlecht und der Rest"], ["This is not bad", "42"]
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "elm"},
        ['A b.\n\n"Elm, and c.'], ["A b.\n\nC elm", "elm", "a\n\nelm\n\nc"]
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2}, ["a\n***\nb", "***\na\n***\nb"], ["a", "a******b", "a***b***c"]
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"}, ["One. Two!", "Dr. No paid 3.5 dollars."], ["One. Two? Three."]
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two", "... !!! ???"]
    ),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b", "", "  "]),
    "startend:end_checker": ({"end_phrase": "That is all."}, ['"Well. that is all."'], ["That is all. Bye"]),
    "startend:quotation": ({}, ['"a"', ' "a b" '], ["a", '"', '""', '"a']),
}  # fmt: skip


def task(*instructions: tuple[str, dict[str, Any]]) -> Task:
    ids, arguments = zip(*instructions, strict=True)
    return Task(id="t:1", messages=(), answer=json.dumps({"instruction_id_list": ids, "kwargs": arguments}))


def score(on: Task, response: Trajectory, **options: Any) -> Score:
    return asyncio.run(InstructionReward(**options).score(on, response))


@pytest.mark.parametrize("name", CHECKS)
def test_each_instruction_is_followed_and_broken(say: Say, name: str) -> None:
    arguments, followed, broken = CASES[name]
    for text in followed:
        assert score(task((name, arguments)), say(text)) == Score.of(1.0), text
    for text in [*broken, "", " \n"]:
        assert score(task((name, arguments)), say(text)) == Score.of(0.0), text


def test_the_score_is_a_share_or_all_or_nothing(say: Say) -> None:
    both = task(("punctuation:no_comma", {}), ("startend:quotation", {}))
    assert score(both, say("no quotes")) == Score.of(0.5)
    assert score(both, say("no quotes"), all_or_nothing=True) == Score.of(0.0)
    assert score(both, say('"quotes"'), all_or_nothing=True) == Score.of(1.0)


def test_loose_forgives_an_introduction_and_asterisks_and_nothing_else(say: Say) -> None:
    quoted = task(("startend:quotation", {}))
    wrapped = say('Sure, here it is:\n**"a"**\nAnything else?')
    assert score(quoted, wrapped) == Score.of(0.0)
    assert score(quoted, wrapped, mode="loose") == Score.of(1.0)
    assert score(quoted, say('one\ntwo\n"a"'), mode="loose") == Score.of(0.0)
    # One line, taken away, leaves nothing; nothing follows no instruction.
    assert score(task(("punctuation:no_comma", {})), say("a, b"), mode="loose") == Score.of(0.0)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("punctuation:no_coma", {}, 'Did you mean "punctuation:no_comma"'),
        ("keywords:existence", {}, "takes keywords; it was given nothing"),
        ("keywords:existence", {"keywords": "sun"}, "must be"),
        ("language:response_language", {"language": "xx"}, "must be one of"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "about"}, "at least, less than"),
    ],
)
def test_instructions_that_cannot_be_checked_are_found_when_data_is_loaded(
    say: Say, name: str, arguments: dict[str, Any], reason: str
) -> None:
    on = task((name, arguments))
    assert reason in (InstructionReward().check(on) or "")
    assert score(on, say("x")).kind is ScoreKind.ERROR


@pytest.mark.parametrize("answer", [None, "", "[]", "{}", '{"instruction_id_list": [], "kwargs": []}', "{"])
def test_a_task_without_instructions_is_refused(answer: str | None) -> None:
    assert InstructionReward().check(Task(id="t", messages=(), answer=answer)) is not None


def test_arguments_that_are_null_are_not_there() -> None:
    assert InstructionReward().check(task(("punctuation:no_comma", {"num_words": None}))) is None


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three? Four", 4),
        ("Mr. Smith met Dr. Jones, e.g. at 3.5 p.m. today.", 1),
        ("A title\n\nA sentence.", 2),
        ("Wait... what?!", 2),
        ("他来了。他走了。", 2),
        ("...", 0),
        ("", 0),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert count_sentences(text) == count


def test_an_unknown_mode_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="strict"):
        InstructionReward(mode="lose")


@pytest.mark.parametrize("piece", ["*", "[", "<", ". ", "a. ", "- ", "\n", " ", "P.", '"', "SECTION ", "*a\n", "``` "])
def test_no_check_takes_more_than_one_pass_over_a_long_text(piece: str) -> None:
    # Quadratic work on so many characters would take an hour here.
    for name, (arguments, _, _) in CASES.items():
        assert CHECKS[name](piece * (100_000 // len(piece)), **arguments) in (True, False)


def test_every_task_of_ifeval_can_be_checked() -> None:
    path = DATA / "ifeval" / "input_data.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; set TEMPER_TEST_DATA to the folder with the data files")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tasks = [Task(id=str(row["key"]), messages=(), answer=json.dumps(row)) for row in rows]
    assert [reason for on in tasks if (reason := InstructionReward().check(on))] == []
    assert {name for row in rows for name in row["instruction_id_list"]} == set(CHECKS)
