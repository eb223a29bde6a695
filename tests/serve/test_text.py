"""The text of a stream adds up, whatever the pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from temper.serve.text import REPLACEMENT, TextStream, Words


def byte_words() -> Words:
    """One token per byte, so that every character beyond ASCII is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: place for place, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Words(PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False))


WORDS = byte_words()
VOCABULARY = 256


def pieces_of(ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream, pieces, place = TextStream(WORDS, stops), [], 0
    for cut in [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]:
        pieces.append(stream.push(ids[place:cut]))
        place = cut
    return [*pieces, stream.finish()], stream.was_cut


@given(st.text(max_size=30), st.lists(st.integers(0, 200), max_size=20))
def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(text: str, cuts: list[int]) -> None:
    ids = list(WORDS.encode(text, is_start=True))
    pieces, _ = pieces_of(ids, cuts)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_even_bytes_that_are_no_text_join_to_what_the_tokenizer_decodes(ids: list[int], cuts: list[int]) -> None:
    pieces, _ = pieces_of(ids, cuts)
    assert "".join(pieces) == WORDS.decode(ids)


@given(
    st.text("ab€", max_size=25),
    st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 200), max_size=20),
)
def test_nothing_of_a_stop_text_is_ever_sent(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = list(WORDS.encode(text, is_start=True))
    pieces, was_cut = pieces_of(ids, cuts, tuple(stops))
    places = [text.find(stop) for stop in stops if stop in text]
    whole = "".join(pieces)
    assert was_cut == bool(places)
    # Which of two stop texts comes first depends on which one was complete first, as it does while drawing.
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)
    assert whole == text if not places else len(whole) in {text.find(stop) for stop in stops if stop in text}


def test_text_that_might_become_a_stop_text_waits_and_is_sent_when_it_does_not() -> None:
    stream = TextStream(WORDS, ("STOP",))
    said = [stream.push(list(WORDS.encode(part, is_start=False))) for part in ("go ST", "A", "Y STO")]
    assert said == ["go ", "STA", "Y "]
    assert stream.finish() == "STO"
    assert not stream.was_cut


@pytest.mark.parametrize(("text", "expected"), [("a", [97]), ("é", [0xC3]), ("€", [0xE2])])
def test_the_bytes_of_a_token_are_known_even_when_it_is_half_a_character(text: str, expected: list[int]) -> None:
    first = WORDS.encode(text, is_start=True)[0]
    assert WORDS.token(first)[1] == expected


def test_a_stream_that_sent_every_token_at_once_would_be_caught() -> None:
    halves = [WORDS.decode([token]) for token in WORDS.encode("€", is_start=True)]
    assert "".join(halves) != "€"
