# ruff: noqa: RUF001 - look-alikes are what this file is about
from __future__ import annotations

import unicodedata

import pytest

from temper.rewards.form.visible import as_read, num_visible, visible


def test_every_character_that_unicode_calls_a_format_or_a_control_is_invisible() -> None:
    # Signs of Arabic, Syriac and Kaithi numbers are formats that are shown; Egyptian ones join hieroglyphs.
    shown = [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)]
    for code in range(0x20000):
        character = chr(code)
        if unicodedata.category(character) in ("Cf", "Cc") and not character.isspace() and code not in shown:
            assert visible(f"a{character}b") == "ab", hex(code)


@pytest.mark.parametrize("text", ["naïve, 日本語", "می‌خواهم", "👨‍👩‍👧", "a\tb\n c", "x² ≤ 3"])
def test_what_people_write_stays(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    "text", ["\u200b", "\u2800\u3164 \u00a0", "\u200d\u200d", "\u0301", "\U000e0041\ufe0f", "\x00"]
)
def test_a_text_of_nothing_shows_nothing(text: str) -> None:
    assert num_visible(text) == 0


def test_what_shows_is_counted() -> None:
    assert num_visible("a b\u200b c") == 3
    assert num_visible("é e\u0301 日本") == 4


@pytest.mark.parametrize(
    "text", ["the bаd word", "the b\u200bad word", "the ｂａｄ word", "the b\u0332ad word", "the 𝐛𝐚𝐝 word"]
)
def test_a_disguised_word_is_read_as_what_it_looks_like(text: str) -> None:
    assert as_read(text) == "the bad word"


def test_an_accent_is_part_of_its_letter() -> None:
    assert as_read("él y el résumé") == "él y el résumé"


def test_a_text_in_another_alphabet_is_not_taken_for_latin() -> None:
    assert as_read("сор и мусор") == "сор и мусор"
