r"""How a mathematical answer may be written: one normal form, units, percent, and writings that never count.

Owns: rules about writing, all of them in docs/rewards.md. Refuses: finding answers in text (answers.py) and mathematics
beyond plain numbers (math_worker.py).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

NEAR = Fraction(1, 10**5)
"""Numbers that differ by less are left to math-verify, which rounds decimals to 6 places."""
MAX_PLAIN_DIGITS = 15
"""math-verify computes decimals in double precision; longer ones are left to it."""
MAX_ANSWER_CHARACTERS = 1000
"""Longer ones are no final answer, and a feast for a parser."""

MAX_DEPTH = 20
"""Of brackets in brackets; the parser behind math-verify takes exponential time."""

NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_PLAIN = re.compile(
    rf"(?P<sign>[+-]?)\s?(?:(?P<number>{NUMBER})|(?:(?P<whole>[0-9]+)(?:\s(?=[0-9])|\s?&))?"
    r"(?P<above>[0-9]+)\s?/\s?(?P<below>[0-9]+))(?:\s(?P<many>hundred|thousand|million|billion|trillion|dozen))?"
)
_FRACTION = re.compile(r"\s?\\frac\{([0-9]+)\}\{([0-9]+)\}")
MANY = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

# What people type for the same sign. Other characters that only look like ASCII ones are refused below.
_SIGNS = str.maketrans({
    "\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": " ", "\u00d7": r"\times ", "÷": "/", "·": r"\cdot ",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "≤": r"\le ", "≥": r"\ge ", "\u222a": r"\cup ", "∅": r"\emptyset ",
})  # fmt: skip
_REWRITES = [(re.compile(pattern), new) for pattern, new in [
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})\s*([0-9])(?![0-9])", r"\1{\2}"),
    (r"\{,\}|,\\!", ","),
    (r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))", ""),
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
    (r"^\\(?:text|textbf|mathbf|mathrm|mbox|textrm)\{([^{}]*)\}$", r"\1"),
]]  # fmt: skip

# Shown differently than parsed, or hidden from the reader: nobody can say what such an answer states.
_TRICKS = re.compile(
    r"\\(?:[hv]?phantom|textcolor|color|href|url|class|style|hspace|vspace|kern|mkern|[rlc]?lap|raisebox|scalebox|tiny"
    r"|def|let|newcommand|renewcommand|if|iffalse|fi|else|input|include|write|csname|cancel|xcancel|bcancel|sout|not"
    r"|f?boxed|fbox|overset|underset|stackrel|hidden|require)(?![A-Za-z])"
    r"|%(?=\s*[^\s,)\]}$])"  # starts a comment in LaTeX: the rest of the line is not shown
)
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*[0-9.,]+[\s{(]*(?:\^|\*\*)")
_HUGE = re.compile(r"(?:\^|\*\*)[\s{(]*[+-]?[0-9]{5,}|[0-9]{5,}\s*!|[0-9)}]\s*!\s*[)}]*\s*!")
_POWER_OF_TEN = re.compile(r"(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{[+-]?[0-9]+\}|[+-]?[0-9]+)$")
_WITHIN_NUMBERS = frozenset(["frac", "sqrt", "times", "cdot", "approx", "pi", "log", "ln", "sin", "cos", "tan"])
"""Commands that may stand in a number."""
_RELATION = re.compile("[<>:;|]")
_UNEVALUATED = re.compile(r"[0-9)}]\s*(?:[+*!-]|\\(?:times|cdot|div|pm|binom))|\\binom|[0-9]\s*\\?[({]")

_ALIASES = """
mm millimeter millimeters millimetre millimetres; cm centimeter centimeters centimetre centimetres;
m meter meters metre metres; km kilometer kilometers kilometre kilometres; inch inches in; foot feet ft;
yard yards yd; mile miles mi; g gram grams; kg kilogram kilograms; mg milligram milligrams; lb lbs pound pounds;
ounce ounces oz; ton tons; liter liters litre litres l; ml milliliter milliliters millilitre millilitres;
gallon gallons gal; second seconds sec secs s; minute minutes min mins; hour hours hr hrs h; day days; week weeks;
month months; year years yr yrs; degree degrees; radian radians rad; dollar dollars usd; euro euros eur; gbp;
cent cents; yen; mph; kmh kph; hz hertz; newton newtons; joule joules j; watt watts w; volt volts v;
% percent percentage percents; celsius; fahrenheit; unit units
"""
UNITS = {name: group.split()[0] for group in _ALIASES.split(";") for name in group.split()}
"""Every known name of a unit, to the one it goes by here."""
_CURRENCY = {"$": "dollar", "\\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "USD": "dollar"}
_PREFIX = re.compile(r"([+-]?)\s?(\\?\$|€|£|¥|USD)\s?(?=[+-]?[0-9.\\])")
_DEGREES = re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?\s?(?:\\(?:text|mathrm)\{)?\s?([CF])?\}?$|\s?\\degree$")
_TEXT_TAIL = re.compile(
    r"(?<=[0-9})])\s?\\(?:text|mathrm|mbox|textrm|textbf)\{\s*([^{}\\0-9]*?)\.?\s*\}(\^\{?[23]\}?)?$"
)
_WORD_TAIL = re.compile(r"(?<=[0-9})])(\s?)([A-Za-z][A-Za-z /]*(?:\^\{?[23]\}?)?|\\?%|\\?\$|€|£)\.?$")
_NAME = re.compile(r"^(?:[A-Za-z](?:_\{?\w\}?)?|\\[a-z]+|[A-Za-z]\([A-Za-z]\))\s?=\s?")
_COMMAND = re.compile(r"\\[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Form:
    """An answer, taken apart."""

    text: str
    """Without the unit, as plain_number and math-verify take it."""
    unit: str = ""
    """Its name in UNITS, also a compound like "km/hour"; empty when there is none or nobody knows it."""


@lru_cache(maxsize=4096)
def form(text: str) -> Form:
    """The normal form of an answer."""
    text = text.strip().translate(_SIGNS)
    text = _unwrap(text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.strip()
    if match := _PREFIX.match(text):
        rest = _without_unit(text[match.end() :])
        return Form(match[1] + rest.text, _CURRENCY[match[2]])
    return _without_unit(text)


def _unwrap(text: str) -> str:
    """Without the marks of math mode around the whole of it."""
    for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if text.startswith(start) and text.endswith(end) and len(text) > len(start) + len(end):
            return text[len(start) : -len(end)].strip()
    return text.removesuffix("$") if text.count("$") == 1 and not text.endswith("\\$") else text


def _without_unit(text: str) -> Form:
    if match := _DEGREES.search(text):
        return Form(text[: match.start()].strip(), {"C": "celsius", "F": "fahrenheit"}.get(match[1] or "", "degree"))
    if match := _TEXT_TAIL.search(text):
        head, words = text[: match.start()].strip(), match[1].strip()
        if words in MANY:
            return Form(f"{head} {words}")
        return Form(head, unit_name(words + (match[2] or "")) or "")
    if match := _WORD_TAIL.search(text):
        name = unit_name(match[2])
        # "5m" may be five times m; with a space, or a longer name, it is metres.
        if name is not None and (match[1] or len(match[2]) > 1 or not match[2].isalpha()):
            return Form(text[: match.start()].strip(), name)
    return Form(text)


def unit_name(words: str) -> str | None:
    """The unit that these words name, "" for unspecific "units"; None when it is not known."""
    words = words.strip().lower().replace("\\", "").replace("{", "").replace("}", "")
    if words in ("$", "€", "£"):
        return _CURRENCY[words]
    words = re.sub(r"\b(?:square|sq)\s+(\w+)", r"\1^2", words)
    words = re.sub(r"\bcubic\s+(\w+)", r"\1^3", words).replace(" per ", "/")
    parts = [part.strip().partition("^") for part in words.split("/")]
    if any(name not in UNITS for name, _, _ in parts):
        return None
    names = [UNITS[name] + mark + power for name, mark, power in parts]
    return "" if names[0].startswith("unit") else "/".join(names)


def plain_number(text: str) -> Fraction | None:
    """The value of an integer, decimal, number with thousands commas, fraction or mixed number; None for all else."""
    match = _PLAIN.fullmatch(_FRACTION.sub(_plain_fraction, text.strip()))
    if match is None or sum(c.isdigit() for c in text) > MAX_PLAIN_DIGITS:
        return None
    if match["number"]:
        value = Fraction(match["number"].replace(",", ""))
    elif int(match["below"]) == 0:
        return None
    else:
        value = int(match["whole"] or 0) + Fraction(int(match["above"]), int(match["below"]))
    value *= MANY.get(match["many"], 1)
    return -value if match["sign"] == "-" else value


def _plain_fraction(match: re.Match[str]) -> str:
    r"""After a digit it is the fraction of a mixed number, which "&" marks: "1\frac{1}{2}" is not "11/2"."""
    is_mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{'&' if is_mixed else ''}{match[1]}/{match[2]}"


def is_refused(answer: str) -> bool:
    """Whether it is written so that it never counts: tricks of LaTeX, look-alike or invisible characters, towers."""
    if len(answer) > MAX_ANSWER_CHARACTERS or _TRICKS.search(answer):
        return True
    if not answer.isascii() and any(_is_lookalike(character) for character in answer.translate(_SIGNS)):
        return True
    return bool(_TOWER.search(answer) or _HUGE.search(answer)) or _depth(answer) > MAX_DEPTH


def _depth(text: str) -> int:
    """Of brackets, whether they match or not."""
    depths = accumulate((character in "({[") - (character in ")}]") for character in text)
    return max(depths, default=0)


def _is_lookalike(character: str) -> bool:
    """Digits of other scripts, letters styled as mathematics, and characters that are not shown."""
    if character.isascii():
        return False
    category = unicodedata.category(character)
    if category[0] == "N" or category in ("Cf", "Cc", "Co", "Cn"):
        return True
    return unicodedata.normalize("NFKC", character).isascii()


def sides(gold: str, answer: str) -> tuple[str, ...]:
    """What the answer claims to be equal to gold: "x = 5" claims 5, "41 = 42" claims both. Equations are one claim."""
    if "=" in gold or "=" not in answer or "," in answer:
        return (answer,)
    *others, last = answer.split("=")
    return (*(side for side in others if not re.search("[A-Za-z]", _COMMAND.sub("", side))), last)


def decide(gold: str, answer: str, *, is_final: bool = True) -> bool | None:
    """Whether an answer equals gold, as far as writing and plain numbers tell; None: it takes math-verify.

    is_final: not one of the earlier sides of an equation, which may be sums.
    """
    left, right = form(gold), form(answer)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if _are_other_brackets(left.text, right.text):
        return False
    wanted = plain_number(_NAME.sub("", left.text))
    if wanted is None:
        # Names of days, letters of choices and the like: math-verify reads some as products of symbols.
        return True if left.text.casefold() == right.text.casefold() else None
    given = plain_number(right.text)
    if given is None:
        return False if is_final and _is_no_number(right.text) else None
    if left.unit != right.unit and "%" in (left.unit, right.unit):
        return _equal_percent(wanted, given, is_gold_percent=left.unit == "%")
    if wanted == given:
        return True
    return None if abs(wanted - given) < NEAR else False


def _equal_percent(wanted: Fraction, given: Fraction, *, is_gold_percent: bool) -> bool:
    """One side says percent: p% is p/100, and p where a percentage was plainly asked for."""
    percent, other = (wanted, given) if is_gold_percent else (given, wanted)
    # 0.5% is not 0.5: where gold is a share, a forgotten percent sign is no excuse.
    return percent == 100 * other or (percent == other and (is_gold_percent or abs(wanted) >= 1))


def _is_no_number(text: str) -> bool:
    """Bounds, integrals and the like, and sums or products, which may just repeat the question: asked was a number."""
    if not _WITHIN_NUMBERS.issuperset(name[1:] for name in _COMMAND.findall(text)) or _RELATION.search(text):
        return True
    if re.search("[A-Za-z]", _COMMAND.sub("", text)):
        return False
    return _UNEVALUATED.search(_POWER_OF_TEN.sub("", text)) is not None and "\\frac" not in text


def _are_other_brackets(gold: str, answer: str) -> bool:
    r"""Sets against tuples and intervals: math-verify takes (1,2), [1,2] and \{1,2\} apart only in some directions."""
    if "," not in gold or "," not in answer:
        return False
    return {_bracket(gold), _bracket(answer)} == {"set", "ordered"}


def _bracket(text: str) -> str:
    if text.startswith((r"\{", "{")):
        return "set"
    return "ordered" if text.startswith(("(", "[")) else ""
