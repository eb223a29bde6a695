r"""What kind of thing an answer is: a number or expression, words, a list, a tuple or interval, a union, a matrix, an
equation, a bound, a numeral of another base, a time.

Owns: taking an answer apart at its commas, brackets, relations and words, and comparing like with like. Refuses: the
mathematics of single expressions; whether two of them are equal is asked of the caller. Runs in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from temper.rewards.mathematics.forms import clean, plain_number

Equal = Callable[[str, str, bool], bool]
"""Whether two expressions are equal: gold, answer, whether the answer must be evaluated."""

RATIO = "ratio of "
"""Before both expressions when the question is whether one is a constant multiple of the other."""
MAX_PARTS = 60
"""Most parts of a list; each is compared with each."""
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mbox|hbox)\s*\{([^{}]*)\}")
_WORDY = re.compile(r"[A-Za-z][A-Za-z0-9 ,.'&:-]*")
_BARE = re.compile(r"[A-Za-z](?:\s?,\s?[A-Za-z])*|[A-Z]{2}|[A-Za-z]{3,}(?:[ ,.'&-]+[A-Za-z]+)*(?: [0-9]{1,4})?")
_JOIN = re.compile(
    r"\\text\s*\{\s*,?\s*(or|and)\s*\}|(?<=[\s0-9)}\]])(or|and)(?=\s)|\\(vee|lor|wedge|land)(?![A-Za-z])"
)
_SIGNS = {r"\leq": "<=", r"\le": "<=", r"\leqslant": "<=", r"\geq": ">=", r"\ge": ">=", r"\geqslant": ">=", r"\lt": "<",
          r"\gt": ">", r"\neq": "!=", r"\ne": "!=", "<": "<", ">": ">", "=": "=", "<=": "<=", ">=": ">="}  # fmt: skip
_SIGN = re.compile(r"\\(?:leqslant|geqslant|leq|geq|le|ge|lt|gt|neq|ne)(?![A-Za-z])|[<>]=?|=")
_ABOUT = re.compile(r"\\(?:approx|simeq|doteq)(?![A-Za-z])")
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!=", "=": "="}
_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_\{?\w+\}?)?|[A-Za-z]\s?\(\s?[A-Za-z0-9,\s]+\)|\\(?:angle|overline|triangle)\s?\{?[A-Z]+\}?"
    r"|\([A-Za-z](?:\s?,\s?[A-Za-z])+\)"
)
_VARIABLE = re.compile(r"[A-Za-z](?:\s?\([A-Za-z]\))?|\\(?!pi|infty)[a-z]+")
_MEMBER = re.compile(r"\s*([A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])\s*")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_BASED = re.compile(r"([+-]?)\s?([0-9A-Za-z]++(?:\.[0-9A-Za-z]++)?)\s*+(?:_\s?\{?\s?|base\s++)([0-9]{1,2})\s?\}?")
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "sixteen": 16,
}  # fmt: skip
_BASE_WORD = re.compile(rf"(?<=_\{{)(?:{'|'.join(_BASES)})(?=\}})")
_CLOCK = re.compile(r"([0-9]+)\s?:\s?([0-9]+)(?:\s?:\s?([0-9]+))?\s*+([AaPp])?\.?\s?(?:[Mm]\.?)?")
_REALS = re.compile(r"\\mathbb\s?\{?R\}?|\\Bbb\s?\{?R\}?|\\R|all real numbers", re.IGNORECASE)
_LETTERS = re.compile(r"[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_INFINITY = re.compile(r"([+-]?)\s?(?:\\infty|infinity|oo)")


@dataclass(frozen=True, slots=True)
class Shape:
    """An answer, taken apart."""

    kind: str
    """scalar, words, list, tuple, union, matrix, relation, based or clock."""
    text: str = ""
    """The text of a scalar, of words or a numeral; the brackets of a tuple, signs of a relation, kind of a matrix."""
    parts: tuple[Shape, ...] = ()
    name: str = ""
    """What it is said to be the value of, as x in "x = 5"."""
    sides: tuple[str, ...] = ()
    """All sides but the last of an equation of numbers: "6 * 7" in "6 * 7 = 42"."""


def are_equal(gold: str, answer: str, equal: Equal) -> bool:
    """Whether two answers state the same."""
    return _same(read(gold), read(answer), equal)


def read(text: str) -> Shape:
    """The shape of an answer."""
    text = clean(text).strip(" ,;")
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].strip(" ,;")
    if plain_number(text) is not None:
        return Shape("scalar", text)
    if (words := _words(text)) is not None:
        return words
    if text.startswith(r"\begin") and (matrix := _enclosed(text)):
        return matrix
    if _REALS.fullmatch(text):
        return _interval("(", r"-\infty", r"\infty", ")")
    if (match := _MEMBER.match(text)) and match.end() < len(text):
        return replace(read(text[match.end() :]), name=match[1])
    parts = _split(text)
    if len(parts) > 1:
        return _several(parts)
    if len(pieces := _cut(text, re.compile(r"\\cup(?![A-Za-z])|\\bigcup(?![A-Za-z])"))) > 1:
        return Shape("union", parts=tuple(read(piece) for piece in pieces))
    if len(_cut(text, _SIGN)) > 1 or len(_cut(text, _ABOUT)) > 1:
        return _relation(text)
    return _enclosed(text) or _numeral(text) or _scalar(text)


def _words(text: str) -> Shape | None:
    """Letters, words and choices. Two small letters side by side are a product; three or more are a word."""
    bare = _TEXT.sub(r" \1 ", text)
    is_text = bare != text
    bare = re.sub(r"\s+", " ", bare).strip(" .")
    if match := re.fullmatch(r"\(\s?([A-Za-z]+)\s?\)", bare):
        bare = match[1]
    if not _WORDY.fullmatch(bare):
        return None
    if not is_text and not _BARE.fullmatch(bare):
        return None
    if re.fullmatch("infinity|pi", bare, re.IGNORECASE):
        return None
    items = [item for item in re.split(r"\s?,?\s(?:and|or)\s|\s?,\s?", bare) if item]
    if all(len(item) == 1 for item in items):
        return Shape("words", ",".join(sorted(items)))  # choices: their order says nothing, their case does
    return Shape("words", ",".join(items).casefold())


def _several(parts: Sequence[str]) -> Shape:
    """Parts between commas, "and", "or": bounds make a union, everything else a list."""
    shapes = [read(part) for part in parts]
    if all(shape.kind in ("tuple", "union") and shape.name for shape in shapes) and _SIGN.search(parts[0]):
        return Shape("union", parts=tuple(_without_name(shape) for shape in shapes), name=shapes[0].name)
    names = [shape.name for shape in shapes]
    is_shared = len({name for name in names if name}) <= 1
    if is_shared:
        return Shape("list", parts=tuple(_without_name(shape) for shape in shapes), name=names[0])
    return Shape("list", parts=tuple(shapes))


def _relation(text: str) -> Shape:
    """ "x = 5" is 5 by the name of x, "6*7 = 42" is 42 with a side, "x < 5" is an interval; all else stays whole."""
    exact, *rounded = _cut(text, _ABOUT)
    if rounded:
        return read(rounded[0] if _NAME.fullmatch(exact.strip()) else exact)
    sides = [side.strip() for side in _cut(text, _SIGN)]
    signs = [_SIGNS[sign] for sign in _cut_signs(text)]
    if "" in sides:
        return Shape("relation", " ".join(signs) + " ?", tuple(Shape("scalar", side) for side in sides))
    if set(signs) == {"="}:
        return _equation(sides)
    bounds = _bounds(sides, signs)
    if bounds is not None:
        return bounds
    return Shape("relation", " ".join(signs), tuple(_scalar(side) for side in sides))


def _equation(sides: list[str]) -> Shape:
    *others, last = sides
    if _has_letters(last) and _NAME.fullmatch(last) and not any(_has_letters(side) for side in others):
        others, last = [last, *others[:-1]], others[-1]
    elif len(sides) == 2 and _NAME.fullmatch(last) and not _NAME.fullmatch(others[0]):
        others, last = [last], others[0]
    numbers = tuple(side for side in others if not _has_letters(side) and not _TEXT.fullmatch(side))
    named = [side for side in others if _has_letters(side)]
    if named and not _NAME.fullmatch(named[0]):
        return Shape("relation", " ".join(["="] * (len(sides) - 1)), tuple(_scalar(side) for side in sides))
    name = named[0] if len(named) == 1 and _VARIABLE.fullmatch(named[0]) and "(" not in named[0] else ""
    return replace(read(last), name=name, sides=numbers)


def _bounds(sides: list[str], signs: list[str]) -> Shape | None:
    """Bounds of one variable as an interval: "1 < x \\le 2" is (1, 2]."""
    places = [place for place, side in enumerate(sides) if _VARIABLE.fullmatch(side)]
    if len(sides) == 3 and 1 in places:
        places = [1]
    if len(places) != 1:
        return None
    place, variable = places[0], sides[places[0]]
    if len(sides) == 2:
        value, sign = (sides[1], signs[0]) if place == 0 else (sides[0], _TURNED[signs[0]])
        if sign == "!=":
            ends = (_interval("(", r"-\infty", value, ")"), _interval("(", value, r"\infty", ")"))
            return Shape("union", parts=ends, name=variable)
        if sign[0] == "<":
            shape = _interval("(", r"-\infty", value, "]" if sign == "<=" else ")")
        else:
            shape = _interval("[" if sign == ">=" else "(", value, r"\infty", ")")
        return replace(shape, name=variable)
    if len(sides) == 3 and place == 1 and signs[0][0] == signs[1][0] and signs[0][0] in "<>":
        low, high = (0, 1) if signs[0][0] == "<" else (1, 0)
        left, right = "[" if "=" in signs[low] else "(", "]" if "=" in signs[high] else ")"
        return replace(_interval(left, sides[2 * low], sides[2 * high], right), name=variable)
    return None


def _enclosed(text: str) -> Shape | None:
    """Sets, tuples, intervals, matrices, and what stands in brackets of its own."""
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in re.split(r"\\\\(?:\s?\[[^\]]*\])?|\\cr(?![A-Za-z])", match[2]) if row.strip()]
        cells = tuple(Shape("row", parts=tuple(read(cell) for cell in row.split("&"))) for row in rows)
        return Shape("matrix", "||" if match[1] in ("v", "V") else "", cells)
    if text in (r"\emptyset", r"\varnothing", r"\{\}"):
        return Shape("list", "{}")
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text):
        condition = re.split(r"\\mid(?![A-Za-z])|\||:", text[2:-2], maxsplit=1)
        if len(condition) == 2 and _SIGN.search(condition[1]) and _VARIABLE.match(condition[0].strip()):
            return read(condition[1])
        inner = read(text[2:-2])
        return replace(inner, text="{}") if inner.kind == "list" else Shape("list", "{}", (inner,))
    if text[:1] in "([{" and text[-1:] in ")]}" and len(text) > 2 and _closes_at_end(text):
        parts = _cut(text[1:-1], re.compile("[,;]"))
        if len(parts) > 1 and text[0] != "{":
            return Shape("tuple", text[0] + text[-1], tuple(read(part) for part in parts))
        if text[0] + text[-1] in ("()", "{}"):
            return read(text[1:-1])
    return None


def _numeral(text: str) -> Shape | None:
    bare = _BASE_WORD.sub(lambda word: str(_BASES[word.group()]), _TEXT.sub(r"\1", text).strip())
    if match := _BASED.fullmatch(bare.replace("(", "").replace(")", "")):
        base = int(match[3])
        digits = match[2].upper().replace(".", "")
        if 2 <= base <= 36 and digits.isalnum() and any(digit.isdigit() for digit in digits):
            return Shape("based", match[1].replace("+", "") + match[2].upper().lstrip("0"), name=str(base))
    if match := _CLOCK.fullmatch(bare.replace("{:}", ":")):
        numbers = ":".join(str(int(number)) for number in match.groups()[:3] if number)
        return Shape("clock", numbers, name=(match[4] or "").lower())
    return None


def _scalar(text: str) -> Shape:
    """One expression; with a sign of plus or minus it is two."""
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text):
        plus, minus = (re.sub(r"\\(pm|mp)(?![A-Za-z])", sign, text) for sign in (_plus, _minus))
        return Shape("list", parts=(Shape("scalar", plus), Shape("scalar", minus)))
    return Shape("scalar", text)


def _plus(sign: re.Match[str]) -> str:
    return "+" if sign[1] == "pm" else "-"


def _minus(sign: re.Match[str]) -> str:
    return "-" if sign[1] == "pm" else "+"


def _interval(left: str, low: str, high: str, right: str) -> Shape:
    return Shape("tuple", left + right, (read(low), read(high)))


def _without_name(shape: Shape) -> Shape:
    return replace(shape, name="") if shape.kind not in ("based", "clock") else shape


def _has_letters(text: str) -> bool:
    return _LETTERS.search(_COMMAND.sub("", _TEXT.sub("", text))) is not None or r"\theta" in text


def _same(gold: Shape, answer: Shape, equal: Equal) -> bool:
    if gold.kind in ("based", "clock"):
        return _same_numeral(gold, answer, equal)
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.kind != "relation" and answer.kind == "relation":
        return _is_stated_by(answer, gold, equal) or _same_relation(_as_equation(gold), answer, equal)
    if gold.kind == "relation" and answer.kind == "scalar":
        return _same_relation(gold, _as_equation(answer), equal)
    if gold.kind == "tuple" and gold.text == "()" and answer.kind == "list" and (named := _coordinates(answer)):
        return _same_in_order(gold.parts, named, equal)
    if not all(_same(_without_sides(gold), Shape("scalar", side), _unevaluated(equal)) for side in answer.sides):
        return False
    if gold.kind == "list" or answer.kind == "list" or "union" in (gold.kind, answer.kind):
        return _same_collection(gold, answer, equal)
    if gold.kind != answer.kind or (gold.text != answer.text and gold.kind != "scalar"):
        return gold.kind == "relation" == answer.kind and _same_relation(gold, answer, equal)
    if gold.kind == "scalar":
        return _same_scalar(gold, answer, equal)
    if gold.kind == "relation":
        return _same_relation(gold, answer, equal)
    return _same_in_order(gold.parts, answer.parts, equal)


def _is_stated_by(relation: Shape, gold: Shape, equal: Equal) -> bool:
    """ "a + b = 42" states 42."""
    *_, last = relation.parts
    return set(relation.text.split()) == {"="} and not _has_letters(last.text) and _same(gold, last, equal)


def _as_equation(shape: Shape) -> Shape:
    """ "y = 2x", which is 2x by the name of y, as an equation again; nothing where it has no name."""
    if shape.kind != "scalar" or not shape.name:
        return Shape("relation")
    return Shape("relation", "=", (Shape("scalar", shape.name), Shape("scalar", shape.text)))


def _coordinates(answer: Shape) -> tuple[Shape, ...]:
    """3 and 4 of "x = 3, y = 4"; () when the names are not letters in order."""
    names = [part.name for part in answer.parts]
    is_ordered = all(len(name) == 1 for name in names) and sorted(set(names)) == names
    return tuple(_without_name(part) for part in answer.parts) if is_ordered else ()


def _same_scalar(gold: Shape, answer: Shape, equal: Equal) -> bool:
    ends = _INFINITY.fullmatch(gold.text), _INFINITY.fullmatch(answer.text)
    if ends[0] or ends[1]:
        return bool(ends[0] and ends[1]) and ("-" in gold.text) == ("-" in answer.text)
    return any(equal(text, answer.text, True) for text in (gold.text, *gold.sides))


def _same_numeral(gold: Shape, answer: Shape, equal: Equal) -> bool:
    """A base that only gold has is taken as meant; so is a.m. or p.m. on one side only."""
    if answer.kind == gold.kind:
        is_half_told = gold.kind == "clock" and not (gold.name and answer.name)
        return gold.text == answer.text and (gold.name == answer.name or is_half_told)
    if gold.kind == "based":
        return answer.kind == "scalar" and gold.text == answer.text.lstrip("0")
    ratio = gold.text.split(":")
    return answer.kind == "scalar" and len(ratio) == 2 and equal("/".join(ratio), answer.text, True)


def _same_collection(gold: Shape, answer: Shape, equal: Equal) -> bool:
    """In any order. A collection of one is its element."""
    left, right = (shape.parts if shape.kind in ("list", "union") else (shape,) for shape in (gold, answer))
    if len(left) != len(right) or len(left) > MAX_PARTS:
        return False
    if len(left) > 1 and {gold.kind, answer.kind} not in ({"list"}, {"union"}):
        return False
    rest = list(right)
    for part in left:
        place = next((place for place, other in enumerate(rest) if _same(part, other, equal)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _same_relation(gold: Shape, answer: Shape, equal: Equal) -> bool:
    """Side by side, read from either end. Equations may also differ by a factor."""
    if len(gold.parts) != len(answer.parts):
        return False
    signs = answer.text.split()
    turned = " ".join(_TURNED.get(sign, sign) for sign in reversed(signs))
    if gold.text == answer.text and _same_in_order(gold.parts, answer.parts, equal):
        return True
    if gold.text == turned and _same_in_order(gold.parts, answer.parts[::-1], equal):
        return True
    if gold.text != "=" or answer.text != "=":
        return False
    left, right = (f"({shape.parts[0].text})-({shape.parts[1].text})" for shape in (gold, answer))
    return equal(RATIO + left, RATIO + right, False)


def _same_in_order(left: Sequence[Shape], right: Sequence[Shape], equal: Equal) -> bool:
    return len(left) == len(right) and all(_same(one, other, equal) for one, other in zip(left, right, strict=True))


def _without_sides(shape: Shape) -> Shape:
    return replace(shape, sides=(), name="")


def _unevaluated(equal: Equal) -> Equal:
    return lambda gold, answer, is_final: equal(gold, answer, False)


def _split(text: str) -> list[str]:
    """At commas, semicolons and words that join, outside of brackets."""
    joined = _JOIN.sub(",", text)
    parts = [part.strip() for part in _cut(joined, re.compile(r"[,;]")) if part.strip()]
    return parts if plain_number(text) is None else [text]


def _cut(text: str, separator: re.Pattern[str]) -> list[str]:
    """At separators outside of brackets."""
    pieces, start = [], 0
    for match in _outside(text, separator):
        pieces.append(text[start : match.start()])
        start = match.end()
    return [*pieces, text[start:]]


def _cut_signs(text: str) -> list[str]:
    return [match.group() for match in _outside(text, _SIGN)]


def _outside(text: str, separator: re.Pattern[str]) -> list[re.Match[str]]:
    depths, depth = [], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        depths.append(depth)
    return [match for match in separator.finditer(text) if depths[match.start()] <= 0]


def _closes_at_end(text: str) -> bool:
    """Whether the bracket at the start closes at the end: in "(1)(2)" it does not."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return place == len(text) - 1
    return False
