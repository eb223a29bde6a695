"""Nothing that a model, an environment or a reward says fails to be written, and what was replaced can be seen."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from temper.storable import storable, storable_text, to_json, without_halves

TEXTS = st.text(st.characters(exclude_categories=()))
HUGE = st.sampled_from([400, 5000]).map(lambda digits: -(10**digits))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), HUGE, TEXTS,
              st.binary(), st.just({1, 2}), st.just(object())),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.one_of(TEXTS, st.integers()), inner)),
    max_leaves=8,
)  # fmt: skip


def test_what_cannot_be_written_is_a_visible_escape_and_the_rest_stays() -> None:
    assert storable_text("a\ud83d b\x00c é 😀\n") == r"a\ud83d b\x00c é 😀" + "\n"
    assert without_halves("a\ud83d\x00") == "a\\ud83d\x00", "a tokenizer takes NUL"
    assert json.loads(to_json({"said": "\udfff"})) == {"said": r"\udfff"}
    assert to_json({"b": "é", "a": 1.5}) == '{"a": 1.5, "b": "é"}'


def test_numbers_that_a_column_cannot_hold_become_infinite() -> None:
    assert (storable(2**63 - 1), storable(10**400), storable(-(10**400))) == (2**63 - 1, math.inf, -math.inf)
    assert json.loads(to_json([10**5000, 1])) == [math.inf, 1]


@given(TEXTS)
def test_any_text_can_be_encoded_and_stays_when_it_could_be(text: str) -> None:
    storable_text(text).encode()
    without_halves(text).encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert without_halves(text) == text


@given(VALUES)
def test_any_value_has_a_json_that_can_be_encoded_and_read_back(value: Any) -> None:
    json.dumps(json.loads(to_json(value).encode()), ensure_ascii=False).encode()


class Broken:
    def __str__(self) -> str:
        raise ValueError("no words")


def test_what_cannot_even_be_written_out_is_named_by_its_type() -> None:
    assert storable(Broken()) == "<Broken>"
    assert storable([10**5000]) == "<list>"
    assert to_json({"a": Broken()}) == '{"a": "<Broken>"}'


def test_nesting_without_end_is_cut() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "..." in to_json(endless)
