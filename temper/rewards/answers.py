"""Final answers in responses: where they stand, and when a response has stated none, or too many.

Owns: extraction. Refuses: judging an answer (forms.py, math_worker.py).
"""

from __future__ import annotations

import re

from temper.rewards.forms import NUMBER

MAX_NUMBERS = 8
"""In a last sentence without "=": more is a list of guesses, not an answer."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(?:final\s+answer|answer)(?:\*\*)?\s*(?:is|are|equals|=|:)(?:\*\*)?\s*:?\s*((?:[^.!?\n]|[.!](?=\S))++)(?!\?)",
    re.IGNORECASE,
)
_COUNTED = re.compile(rf"([+-]?\s?(?:\\?\$|€|£)?\s?(?:{NUMBER})(?:/[0-9]+)?\s?(?:\\?%)?)((?:\s[A-Za-z'-]+)*)")
_MANY = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|or|and|to|half|halves|thirds|quarters|percent)\b"
)
_FRACTION = r"\\[dt]?frac\{[0-9]+\}\{[0-9]+\}"
# A minus after a word or a closing bracket subtracts, as in "5-3"; elsewhere it is a sign.
_LAST = re.compile(rf"(?<![\w)\]}}])-?(?:{_FRACTION}|(?:{NUMBER})(?:/[0-9]+)?\s?(?:\\?%)?)|(?:{NUMBER})(?:\\?%)?")
_LISTED = re.compile(r"[\s,;/|$]*(?:(?:or|and|to|then|maybe|perhaps)\b|\.\.+|…|\\ldots|\\dots)?[\s,;/|$]*")
_DENIED = re.compile(r"(?:\bnot|n't|\bnever|\bneither|\bnor)(?:\s[a-z]+){0,2}[\s$]*$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[^.][.!?])\s+|\n+")


def find_answers(text: str, *, is_strict: bool = False, require_boxed: bool = False) -> tuple[str, ...]:
    r"""The distinct final answers of a response, in the first form that it uses; () when there is none.

    Forms: complete \boxed{...}; <answer>...</answer>; "#### ..."; "the answer is ..."; the last number of the last
    sentence (not when strict). Thoughts before </think> do not count. A right response states one answer.
    """
    text = text.rpartition("</think>")[2]
    if _BOX.search(text) or require_boxed:
        return _distinct(find_boxes(text))
    for stated in (_TAG.findall(text), _after_marks(text), [_phrase(said) for said in _PHRASE.findall(text)]):
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
    found, place = [], 0
    while match := _BOX.search(text, place):
        content = _balanced(text, match.end())
        if content is None:
            place = match.end()
            continue
        place = match.end() + len(content)
        while (inner := _BOX.match(content.strip())) and content.strip().endswith("}"):
            content = content.strip()[inner.end() : -1]
        found.append(content.strip().rstrip("."))
    return found


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)  # "\{" is a printed brace and counts nothing
        if depth == 0:
            return text[start : brace.start()]
    return None


def _after_marks(text: str) -> list[str]:
    """The line after each "####"."""
    return [part.strip().partition("\n")[0].rstrip(" .") for part in text.split("####")[1:]]


def _phrase(said: str) -> str:
    """ "42 apples in all" states 42; "41 or 42" states all of it, which equals nothing."""
    said = said.strip(" *:.")
    if (match := _COUNTED.fullmatch(said)) and not _MANY.search(match[2]):
        return match[1].strip()
    return said


def _last_number(text: str) -> str | None:
    """The last number of the last sentence, unless it is denied or one of a list."""
    sentence = _SENTENCE_END.split(text.strip())[-1]
    numbers = list(_LAST.finditer(sentence))
    if not numbers or (len(numbers) > MAX_NUMBERS and "=" not in sentence):
        return None
    if _DENIED.search(sentence[: numbers[-1].start()]):
        return None
    if len(numbers) > 1 and _LISTED.fullmatch(sentence, numbers[-2].end(), numbers[-1].start()):
        return None
    return numbers[-1].group().strip()


def _distinct(answers: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answers))
