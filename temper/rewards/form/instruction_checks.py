"""Checks of instructions that a program can verify, in the manner of IFEval: one pure function per instruction id.

Owns: the table of checks. Refuses: regular expressions that can take more than one pass; these read what a model wrote.
What is forbidden or limited is looked for in the text as it is read, look-alike letters included; what is asked for
must be written as asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import product

from temper.rewards.form.language import SCRIPTS, detect_language
from temper.rewards.form.visible import as_read, num_visible

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, bound: count >= bound,
    "less than": lambda count, bound: count < bound,
}
COMMAS = ",\uff0c\ufe50\ufe10\uff64\u3001\u060c\u201a"
"""Commas of all scripts, and the low quotation mark that looks like one."""
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
POSTSCRIPTS = {"P.S.": re.compile(r"p\.\s?s\."), "P.P.S": re.compile(r"p\.\s?p\.\s?s")}
_WORD = re.compile(r"\w[\w\u0300-\u036f]*")  # accents, written as marks of their own, end no word
_CAPITALS = re.compile(r"[\w'\u2019-]+")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\]")
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")
_TITLE = re.compile(r"<<([^\n<>]+)>>")
# The end of a run of marks is looked at once per run, not once per mark.
_SENTENCE_END = re.compile(
    r"(?<![.!?\u2026\u06d4])[.!?\u2026\u06d4]++(?=[\"'\u201d\u2019)\]*_]{0,3}(?:\s|$))|[\u3002\uff01\uff1f\u0964]+"
)
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|e\.g|i\.e|no|fig|[a-z])$", re.IGNORECASE)


def keywords_exist(text: str, *, keywords: Sequence[str]) -> bool:
    folded = text.casefold()
    return all(keyword.casefold() in folded for keyword in keywords)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    return RELATIONS[relation](_read_for(relation, text).casefold().count(keyword.casefold()), frequency)


def no_forbidden_words(text: str, *, forbidden_words: Sequence[str]) -> bool:
    # In each reading: a word may be disguised, or be written in another alphabet itself.
    readings = {text, as_read(text)}
    return not any(
        re.search(rf"\b{re.escape(word)}\b", reading, re.IGNORECASE) for word in forbidden_words for reading in readings
    )


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    return RELATIONS[let_relation](_read_for(let_relation, text).lower().count(letter.lower()), let_frequency)


def response_language(text: str, *, language: str) -> bool:
    return detect_language(text) == language


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    return RELATIONS[relation](count_sentences(text), num_sentences)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    return RELATIONS[relation](len(_WORD.findall(text)), num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Separated by ***; an empty one inside is a mistake."""
    parts = _without_empty_ends(text.split("***"))
    return len(parts) == num_paragraphs and all(parts)


def paragraph_first_word(text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Separated by an empty line; the nth, from 1, starts with that word."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    first = _CAPITALS.search(paragraphs[nth_paragraph - 1])
    return first is not None and first.group().strip("'\u2019_").casefold() == first_word.casefold()


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    return sum(num_visible(inner) > 0 for inner in _PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    pattern = POSTSCRIPTS.get(postscript_marker) or re.compile(re.escape(postscript_marker.lower()))
    found = pattern.search(text.lower())
    return found is not None and num_visible(text[found.end() :].strip(" .:*\n")) > 0


def number_bullets(text: str, *, num_bullets: int) -> bool:
    """Lines that begin with "*" or "-", rulers made of these apart."""
    lines = [line.strip() for line in text.splitlines()]
    bullets = [
        line
        for line in lines
        if line.startswith(("*", "-")) and not line.startswith("**") and num_visible(line.strip("*- "))
    ]
    return len(bullets) == num_bullets


def constrained_response(text: str) -> bool:
    """Exactly one of the allowed answers; all of them is none."""
    return sum(answer in text for answer in ANSWERS) == 1


def number_highlights(text: str, *, num_highlights: int) -> bool:
    found = [(bold or plain).strip() for bold, plain in _HIGHLIGHT.findall(text)]
    return sum(num_visible(part) > 0 for part in found) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Headings with different numbers, "SECTION 1", "SECTION 2": one heading repeated is one section."""
    numbers = re.findall(rf"{re.escape(section_spliter)}\s?(\d+)", text)
    return len(set(numbers)) >= num_sections


def json_format(text: str) -> bool:
    """An object or a list, in a code fence or not."""
    lines = text.strip().splitlines()
    if len(lines) > 1 and lines[0].strip().lower() in ("```json", "```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    try:
        value = json.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict | list)


def has_title(text: str) -> bool:
    return any(map(num_visible, _TITLE.findall(text)))


def two_responses(text: str) -> bool:
    parts = _without_empty_ends(text.split("******"))
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """First the request word for word, then an answer."""
    request, response = prompt_to_repeat.strip().casefold(), text.strip().casefold()
    return response.startswith(request) and bool(response[len(request) :].strip())


def ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').casefold().endswith(end_phrase.strip().casefold())


def capital_words(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    return RELATIONS[capital_relation](sum(word.isupper() for word in _CAPITALS.findall(text)), capital_frequency)


def all_capitals(text: str) -> bool:
    return text.isupper() and detect_language(text) in ("en", None)


def all_lowercase(text: str) -> bool:
    return text.islower() and detect_language(text) in ("en", None)


def no_comma(text: str) -> bool:
    return not any(comma in text for comma in COMMAS)


def in_quotation_marks(text: str) -> bool:
    stripped = text.strip()
    return len(stripped) > 2 and stripped[0] == stripped[-1] == '"' and num_visible(stripped[1:-1]) > 0


CHECKS: dict[str, Callable[..., bool]] = {
    "change_case:capital_word_frequency": capital_words,
    "change_case:english_capital": all_capitals,
    "change_case:english_lowercase": all_lowercase,
    "combination:repeat_prompt": repeat_prompt,
    "combination:two_responses": two_responses,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:json_format": json_format,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:number_bullet_lists": number_bullets,
    "detectable_format:number_highlighted_sections": number_highlights,
    "detectable_format:title": has_title,
    "keywords:existence": keywords_exist,
    "keywords:forbidden_words": no_forbidden_words,
    "keywords:frequency": keyword_frequency,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:nth_paragraph_first_word": paragraph_first_word,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "punctuation:no_comma": no_comma,
    "startend:end_checker": ends_with,
    "startend:quotation": in_quotation_marks,
}
"""By instruction id. Arguments are named as in IFEval's data, its spelling included."""

CHOICES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), tuple(RELATIONS)),
    "language": tuple(SCRIPTS),
}
"""Arguments that only some values fit."""


def count_sentences(text: str) -> int:
    """Pieces with a word in them, ended by a mark that ends sentences, a new paragraph or the end of the text."""
    count = 0
    for paragraph in text.split("\n\n"):
        start = 0
        for end in (*(match.end() for match in _SENTENCE_END.finditer(paragraph)), len(paragraph)):
            piece = paragraph[start:end]
            # Only the last characters: looking back over the whole piece each time would take more than one pass.
            is_abbreviation = end < len(paragraph) and _ABBREVIATION.search(piece[-8:].rstrip("."))
            if not is_abbreviation or not piece.endswith("."):
                count += _WORD.search(piece) is not None
                start = end
    return count


def loose_variants(text: str) -> list[str]:
    """The text as is, without its first or last line ("Sure, here it is:"), and each of these without asterisks."""
    lines = text.split("\n")
    cuts = (lines[first : len(lines) - last] for first, last in product((0, 1), repeat=2))
    variants = ["\n".join(cut).strip() for cut in cuts]
    return [*variants, *(variant.replace("*", "") for variant in variants)]


def _read_for(relation: str, text: str) -> str:
    """For an upper bound, also what only looks like the thing counts; for a lower one, only the thing itself."""
    return as_read(text) if relation == "less than" else text


def _without_empty_ends(parts: Sequence[str]) -> list[str]:
    stripped = [part.strip() if num_visible(part) else "" for part in parts]
    start = 1 if stripped and not stripped[0] else 0
    end = len(stripped) - 1 if len(stripped) > 1 and not stripped[-1] else len(stripped)
    return stripped[start:end]
