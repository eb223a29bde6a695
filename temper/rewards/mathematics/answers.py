"""Final answers in responses: where they stand, and when a response has stated none, or too many.

Owns: extraction. Refuses: judging an answer (forms.py, checking.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from temper.rewards.mathematics.forms import CHANGING_WORDS, NUMBER

MAX_NUMBERS = 8
"""In a last sentence without "=": more is a list of guesses, not an answer."""
LAST_CHARACTERS = 1000
"""How much of the last sentence is searched for the last number. Every other scan here is linear in the text."""
MAX_BOXES_IN_BOXES = 8

_BOX = re.compile(r"\\f?box(?:ed)?\s*+\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_STATEMENT = re.compile(r"(?:[^.!?\n]|[.!](?=\S))++")
_PHRASE = re.compile(
    r"\b(?:final\s++answer|answer)(?:\*\*)?\s*+(?:is|are|equals|=|:)(?:\*\*)?\s*+:?\s*+", re.IGNORECASE
)
_LEAD = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|simply|just|exactly|indeed|clearly|now|obviously|precisely|equal to|given by"
    r"|found to be|the|my|our)\b[\s,:]*+)++",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r",\s+(?:as|which|since|because|so|where|when|after|for|by|giving|meaning|with|completing|hence|thus|therefore|just)"
    r"\s[A-Za-z' ]*+$"
)
_COUNTED = re.compile(rf"([+-]?\s?(?:\\?\$|€|£)?\s?(?:{NUMBER})(?:/[0-9]+)?\s?(?:\\?%)?)((?:\s[A-Za-z'-]+)*+)")
_SHOWN = re.compile(r"(\$[^$]++\$)((?:\s[A-Za-z'-]+)++)")
_FRACTION = r"\\[dt]?frac\{[0-9]+\}\{[0-9]+\}"
# A minus after a word or a closing bracket subtracts, as in "5-3"; elsewhere it is a sign.
_LAST = re.compile(rf"(?<![\w)\]}}])-?(?:{_FRACTION}|(?:{NUMBER})(?:/[0-9]+)?\s?(?:\\?%)?)|(?:{NUMBER})(?:\\?%)?")
_LISTED = re.compile(r"[\s,;/|$]*(?:(?:or|and|to|then|maybe|perhaps)\b|\.\.+|…|\\ldots|\\dots)?[\s,;/|$]*")
_DENIED = re.compile(
    r"(?:\b(?:not|cannot|never|neither|nor|nobody|none|nothing|doubt|hardly|except|less|fewer|more|greater|larger|smaller"
    r"|bigger|higher|lower|below|above|under|over|beyond|exceeds?|at\s(?:least|most)|up\sto|between|but|wrong|incorrect"
    r"|unlike|instead\sof|rather\sthan)|n['\u2019]t)\b(?:\s[a-z]+){0,3}[\s$*(\\]*$",
    re.IGNORECASE,
)
_NEXT_WORD = re.compile(r"[\s,$*)}\\]*([A-Za-z]+)")
_CHANGING_NEXT = CHANGING_WORDS - {"more", "less", "fewer", "and", "to", "percent"}
_TAKEN_BACK = re.compile(r"\b(?:is|was|are|were)(?:n['\u2019]t|\s(?:not|wrong|incorrect|false|too))\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[^.][.!?])\s+|\n+")


def find_answers(text: str, *, is_strict: bool = False, require_boxed: bool = False) -> tuple[str, ...]:
    r"""The distinct final answers of a response, in the first form that it uses; () when there is none.

    Forms: complete \boxed{...}; <answer>...</answer>; "#### ..."; "the answer is ..."; the last number of the last
    sentence (not when strict). Thoughts before </think> do not count. A right response states one answer.
    """
    text = text.rpartition("</think>")[2]
    if _BOX.search(text) or require_boxed:
        return _distinct(find_boxes(text))
    for stated in (_between_tags(text), _after_marks(text), list(_phrases(text))):
        if stated:
            return _distinct(stated)
    last = None if is_strict else _last_number(text)
    return () if last is None else (last,)


def count_words(text: str, answers: tuple[str, ...]) -> int:
    """Words of a response beside tags and the answers themselves: how much it argued."""
    rest = re.sub(r"</?[A-Za-z_]+>", " ", _BOX.sub(" ", text))
    for answer in answers:
        rest = rest.replace(answer, " ")
    return len(re.findall(r"\w\w+|[0-9]", rest))


def gold_answer(text: str) -> str:
    """The gold answer as written in the data, without box and full stop."""
    boxes = find_boxes(text)
    return (boxes[-1] if boxes and boxes[-1] else text).strip().rstrip(".")


def find_boxes(text: str) -> list[str]:
    r"""The content of every complete outermost \boxed{...}, braces balanced; a box in a box alone is the inner one."""
    closes = _closing_braces(text)
    found, place = [], 0
    while match := _BOX.search(text, place):
        place = match.end()
        if (end := closes.get(place - 1)) is None:
            continue
        content, place = text[place:end].strip(), end
        for _ in range(MAX_BOXES_IN_BOXES):
            if not ((inner := _BOX.match(content)) and content.endswith("}")):
                break
            content = content[inner.end() : -1].strip()
        found.append(content.rstrip("."))
    return found


def _closing_braces(text: str) -> dict[int, int]:
    r"""Where each brace that is closed closes. "\{" is a printed brace and counts nothing."""
    closes, opened = {}, []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closes[opened.pop()] = brace.start()
    return closes


def _between_tags(text: str) -> list[str]:
    """What stands between each <answer> and the next </answer>."""
    found, start = [], None
    for tag in _TAG.finditer(text):
        if not tag[1] and start is None:
            start = tag.end()
        elif tag[1] and start is not None:
            found.append(text[start : tag.start()])
            start = None
    return found


def _after_marks(text: str) -> list[str]:
    """The line after each "####"."""
    return [part.strip().partition("\n")[0].rstrip(" .") for part in text.split("####")[1:]]


def _phrases(text: str) -> Iterator[str]:
    """What each sentence states that says "the answer is"; a question states nothing."""
    for sentence in _STATEMENT.finditer(text):
        match = _PHRASE.search(sentence.group())
        if match and text[sentence.end() : sentence.end() + 1] != "?" and (said := sentence.group()[match.end() :]):
            yield _phrase(said)


def _phrase(said: str) -> str:
    """ "42 apples in all" states 42, "42, as required" too; "41 or 42" states all of it, which equals nothing."""
    said = said.replace("**", "").strip(" *:.")
    if lead := _LEAD.match(said):
        said = said[lead.end() :]
    if again := _PHRASE.match(said):  # "Final answer: the answer is 42"
        said = said[again.end() :]
    said = _REMARK.sub("", said[:LAST_CHARACTERS]).strip(" *:.")
    for counted in (_COUNTED, _SHOWN):
        if (match := counted.fullmatch(said)) and CHANGING_WORDS.isdisjoint(match[2].lower().split()[:1]):
            return said if _states_several(match[2]) else match[1].strip()
    return said


def _states_several(words: str) -> bool:
    return re.search(r"\b(?:or|and\s+(?:not|also)|percent|halves|thirds|quarters)\b", words) is not None


def _last_number(text: str) -> str | None:
    """The last number of the last sentence, unless it is asked, denied, bounded, changed by a word or one of a list."""
    sentence = _SENTENCE_END.split(text.strip())[-1][-LAST_CHARACTERS:]
    numbers = list(_LAST.finditer(sentence))
    if not numbers or (len(numbers) > MAX_NUMBERS and "=" not in sentence) or sentence.endswith("?"):
        return None
    before, after = sentence[: numbers[-1].start()], sentence[numbers[-1].end() :]
    if _DENIED.search(before) or _TAKEN_BACK.search(after):
        return None
    if (word := _NEXT_WORD.match(after)) and word[1].lower() in _CHANGING_NEXT:
        return None
    if len(numbers) > 1 and _LISTED.fullmatch(sentence, numbers[-2].end(), numbers[-1].start()):
        return None
    return numbers[-1].group().strip()


def _distinct(answers: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answers))
