r"""How a mathematical answer may be written: one normal form, units, percent, and writings that never count.

Owns: rules about writing, all of them in docs/rewards.md. Refuses: finding answers in text (answers.py) and mathematics
beyond plain numbers (checking.py).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

MAX_PLAIN_DIGITS = 400
"""Numbers with more digits are left to the worker."""
ROUNDED_DIGITS = 6
"""A decimal with at least so many digits may be the rounded value of what has no end as a decimal."""
MAX_ANSWER_CHARACTERS = 1000
"""A longer text is not a final answer, and takes a parser too long."""

MAX_DEPTH = 20
"""Most brackets in brackets; the parser behind math-verify takes exponential time."""

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


def _as_command(name: re.Match[str]) -> str:
    return {"infinity": r"\infty "}.get(name[1], rf"\{name[1]} " if name[1] != "sqrt" else r"\sqrt")


def _repeating(number: re.Match[str]) -> str:
    """0.1666..., written with a bar over the 6, as a fraction."""
    whole, fixed, period = number.groups()
    below = 10 ** len(fixed) * (10 ** len(period) - 1)
    above = int(whole + fixed + period) - int(whole + fixed or 0)
    return rf"\frac{{{above}}}{{{below}}}"


_WRITINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", ""),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*([0-9]|\\pi)\s*([0-9]|\\pi)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\{[^{}]*\})\s*([0-9])(?![0-9])", r"\1{\2}"),
    (r"\{,\}|,\\!", ","),
    (r"\{:\}|(?<=[0-9])\s?\\text\s?\{\s?to\s?\}\s?(?=[0-9])", ":"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\([lr])brace(?![A-Za-z])", lambda side: r"\{" if side[1] == "l" else r"\}"),
    (r"\\begin\{array\}\s?\{[clr|\s]*\}", r"\\begin{matrix}"),
    (r"\\end\{array\}", r"\\end{matrix}"),
    (r"(?<![A-Za-z0-9.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]{1,3})(?![A-Za-z0-9.])", r"\1 \\times 10^{\2}"),
    (r"\{[0-9]{1,3}(?:,[0-9]{3})+\}", lambda number: number.group().replace(",", "")),
    (r"^\\approx(?![A-Za-z])", ""),
    (r"(?<![\\A-Za-z])(pi|sqrt|infinity|theta)(?![A-Za-z])", _as_command),
    (r"\\sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(?<![0-9])([0-9]*)\.([0-9]*)\\overline\s?\{?([0-9]+)\}?", _repeating),
    (r"(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))", ""),
    (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\s+", " "),
]
_REWRITES = [(re.compile(pattern), new) for pattern, new in _WRITINGS]
_TEXT = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox|textrm|textnormal)\s?\{([^{}]*)\}")

# Shown differently than parsed, or hidden from the reader: nobody can say what such an answer states.
_TRICKS = re.compile(
    r"\\(?:[hv]?phantom|textcolor|color|href|url|class|style|hspace|vspace|kern|mkern|[rlc]?lap|raisebox|scalebox|tiny"
    r"|def|let|newcommand|renewcommand|if|iffalse|fi|else|input|include|write|csname|cancel|xcancel|bcancel|sout|not"
    r"|f?boxed|fbox|overset|underset|stackrel|hidden|require)(?![A-Za-z])"
    r"|(?<!\\)%(?=\s*[^\s,)\]}$])"  # starts a comment in LaTeX: the rest of the line is not shown
)
_TOWER = re.compile(r"(?:\^|\*\*)[\s{(]*[0-9.,]+[\s{(]*(?:\^|\*\*)")
_HUGE = re.compile(r"[-+|!*/^=<>]{6}|(?:\^|\*\*)[\s{(]*[+-]?[0-9]{5,}|[0-9]{5,}\s*!|[0-9)}]\s*!\s*[)}]*\s*!")
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
CHANGING_WORDS = frozenset([
    "squared", "cubed", "factorial", "hundred", "thousand", "million", "billion", "trillion", "dozen", "dozens",
    "half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "tenth",
    "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "times", "less", "more", "fewer", "greater",
    "most", "least", "minus", "plus", "mod", "modulo", "or", "and", "to", "not", "but", "except", "choose", "over",
    "under", "below", "above", "inverse", "root", "negative", "base", "pi", "double", "doubled", "twice", "triple",
    "tripled", "unless", "if", "squares", "cubes", "percent", "point", "power", "powers", "raised", "divided",
    "multiplied", "am", "pm", "a.m", "p.m",
])  # fmt: skip
"""Words that, behind a number, make another number of it, or none."""
_CURRENCY = {"$": "dollar", "\\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "USD": "dollar"}
_PREFIX = re.compile(r"([+-]?)\s?(\\?\$|€|£|¥|USD)\s?(?=[+-]?[0-9.\\])")
_DEGREES = re.compile(r"\s?\^\s?\{?\s?\\circ\s?\}?\s?(?:\\(?:text|mathrm)\{)?\s?([CF])?\}?$|\s?\\degree$")
_ANGLE_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_TEXT_TAIL = re.compile(
    r"(?:(?<=[0-9})])|(?<=\\pi))\s?\\(?:text|mathrm|mbox|textrm|textbf|textnormal)\s?\{\s*([^{}\\0-9]*?)\.?\s*\}(\^\{?[23]\}?)?$"
)
_WORD_TAIL = re.compile(r"(?<=[0-9})])(\s?)([A-Za-z][A-Za-z /]*(?:\^\{?[23]\}?)?|\\?%|\\?\$|€|£)\.?$")
_COUNTED = re.compile(
    r"(?P<number>[+-]?\s?[0-9][0-9.,/\s]*?|[+-]?\s?\\frac\{[0-9]+\}\{[0-9]+\})\s(?P<words>[A-Za-z' -]*[A-Za-z])\.?"
)
_NAME = re.compile(r"^(?:[A-Za-z](?:_\{?\w\}?)?|\\[a-z]+|[A-Za-z]\([A-Za-z]\))\s?=\s?")
_COMMAND = re.compile(r"\\[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Form:
    """An answer, taken apart."""

    text: str
    """Without the unit, as plain_number and math-verify take it."""
    unit: str = ""
    """Its name in UNITS, also a compound like "km/hour"; empty when there is none or nobody knows it."""


def clean(text: str) -> str:
    """The answer with one writing for one sign, units and words left in place."""
    text = _unwrap(text.strip().translate(_SIGNS))
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return _unwrap(text.strip())


@lru_cache(maxsize=4096)
def form(text: str) -> Form:
    """The normal form of an answer."""
    text = clean(text)
    if match := _TEXT.fullmatch(text):
        text = match[1].strip()
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
    if (match := _DEGREES.search(text)) and not _ANGLE_FUNCTION.search(text):
        return Form(text[: match.start()].strip(), {"C": "celsius", "F": "fahrenheit"}.get(match[1] or "", "degree"))
    if match := _TEXT_TAIL.search(text):
        head, words = text[: match.start()].strip(), match[1].strip()
        if words in MANY:
            return Form(f"{head} {words}")
        if not CHANGING_WORDS.isdisjoint(words.lower().split()) and unit_name(words) is None:
            return Form(text)
        return Form(head, unit_name(words + (match[2] or "")) or "")
    if match := _WORD_TAIL.search(text):
        name = unit_name(match[2])
        # "5m" may be five times m; with a space, or a longer name, it is metres.
        if name is not None and (match[1] or len(match[2]) > 1 or not match[2].isalpha()):
            return Form(text[: match.start()].strip(), name)
    if match := _COUNTED.fullmatch(text):
        words = match["words"].lower().split()
        if CHANGING_WORDS.isdisjoint(words) and all(len(word) > 1 for word in words):
            return Form(match["number"].strip())
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
    """How deep brackets are nested, whether they match or not."""
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


def decide(gold: str, answer: str) -> bool | None:
    """Whether an answer equals gold, as far as writing, units and plain numbers tell; None: it takes mathematics."""
    left, right = form(gold), form(answer)
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.text == right.text and left.unit == right.unit:
        return True
    named = without_name(left.text)
    wanted, given = plain_number(named), plain_number(right.text)
    if wanted is None or given is None:
        return None
    if left.unit != right.unit and "%" in (left.unit, right.unit):
        return _equal_percent(wanted, given, is_gold_percent=left.unit == "%")
    return wanted == given or rounds_to(wanted, right.text) or rounds_to(given, named)


def without_name(text: str) -> str:
    """The text without a name in front of it: 5 of "x = 5"."""
    return _NAME.sub("", text)


def rounds_to(value: Fraction, decimal: str) -> bool:
    """Whether a decimal of ROUNDED_DIGITS or more is within a unit of its last place of a value that has no finite
    decimal."""
    digits = decimal.replace(",", "").strip()
    if not re.fullmatch(r"[+-]?[0-9]*\.[0-9]+", digits) or len(digits.lstrip("+-0.").replace(".", "")) < ROUNDED_DIGITS:
        return False
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest > 1 and abs(value - Fraction(digits)) < Fraction(1, 10 ** len(digits.partition(".")[2]))


def _equal_percent(wanted: Fraction, given: Fraction, *, is_gold_percent: bool) -> bool:
    """One side says percent: p% is p/100, and p where a percentage was plainly asked for."""
    percent, other = (wanted, given) if is_gold_percent else (given, wanted)
    # 0.5% is not 0.5: where gold is a share, a forgotten percent sign is not excused.
    return percent == 100 * other or (percent == other and (is_gold_percent or abs(wanted) >= 1))


def is_unevaluated(text: str) -> bool:
    """Whether it has bounds, integrals, sums or products. These may repeat the question, which asked for a number."""
    if not _WITHIN_NUMBERS.issuperset(name[1:] for name in _COMMAND.findall(text)) or _RELATION.search(text):
        return True
    if re.search("[A-Za-z]", _COMMAND.sub("", text)):
        return True
    return _UNEVALUATED.search(_POWER_OF_TEN.sub("", text)) is not None
