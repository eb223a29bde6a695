r"""Ways to write an answer of the MATH data set differently.

Owns: rules on the text of a gold answer. Refuses: asking any verifier; a rule applies only where its label is certain,
and returns None elsewhere. These rules keep the value, those of changes.py do not; the ones whose name ends in "_said"
make a whole response.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fractions import Fraction

Rule = Callable[[str, random.Random], str | None]

INTEGER = re.compile(r"-?[0-9]{1,9}")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
POLYNOMIAL = re.compile(r"-?[0-9]*[a-z](?:\^\{?[0-9]+\}?)?(?:\s?[+-]\s?[0-9]*(?:[a-z](?:\^\{?[0-9]+\}?)?)?(?<=\w|\}))+")
ROOT = re.compile(r"([0-9]+)\s?\\sqrt\{([0-9]+)\}")
PI = re.compile(r"([0-9]+)\s?\\pi|\\frac\{([0-9]+)\}\{([0-9]+)\}\s?\\pi")
WORD = re.compile(r"\\(?:text|mbox)\{([A-Za-z]{3,})\}")
CHOICE = re.compile(r"\\text\{\(?([A-Z])\)?\}|\(\\text\{([A-Z])\}\)")
BASED = re.compile(r"(-?[0-9]+)_\{?([0-9]+)\}?")
INTERVAL = re.compile(r"([(\[])([^()\[\],]+),([^()\[\],]+)([)\]])")
COMPLEX = re.compile(r"(-?[0-9]+)\s?([+-])\s?([0-9]+)i")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})")
LINE = re.compile(r"([a-z]) = (\S.*[a-z].*)")
NUMBERS = r"-?(?:[0-9]+|\\[dt]?frac\{[0-9]+\}\{[0-9]+\})"
LIST = re.compile(rf"{NUMBERS}(?:,\s*{NUMBERS})+")
TUPLE = re.compile(rf"(?:\\left)?\(\s*({NUMBERS}(?:\s*,\s*{NUMBERS})+)\s*(?:\\right)?\)")


def integer(gold: str) -> int | None:
    return int(gold) if INTEGER.fullmatch(gold) else None


def fraction(gold: str) -> Fraction | None:
    match = FRACTION.fullmatch(gold)
    return Fraction(int(match[1] + match[2]), int(match[3])) if match and int(match[3]) else None


def listed(gold: str) -> list[str] | None:
    r"""The numbers of "1, 2, \frac{1}{2}"; not of "1,234", which is one."""
    if not LIST.fullmatch(gold) or re.search(r"[0-9],[0-9]{3}(?![0-9])", gold):
        return None
    return [part.strip() for part in gold.split(",")]


def pair_parts(gold: str) -> list[str] | None:
    match = TUPLE.fullmatch(gold)
    return [part.strip() for part in match[1].split(",")] if match else None


def interval(gold: str) -> tuple[str, str, str, str] | None:
    """Bracket, ends, bracket; only where it cannot be a point of the plane."""
    match = INTERVAL.fullmatch(re.sub(r"\\left|\\right", "", gold))
    if match is None or not ("infty" in gold or "[" in gold or "]" in gold):
        return None
    return match[1], match[2].strip(), match[3].strip(), match[4]


def write_fraction(value: Fraction, name: str = "frac") -> str:
    return rf"{'-' if value < 0 else ''}\{name}{{{abs(value.numerator)}}}{{{value.denominator}}}"


# What keeps the value.


def spaces(gold: str, draw: random.Random) -> str | None:
    if re.search(r"text|mbox|begin|\\!|\{,\}", gold) or not re.search(r"[+=,]|(?<=\w)-", gold):
        return None
    return re.sub(r"\s*([+=]|(?<=[\w}])-|,(?![0-9]{3}))\s*", r" \1 ", gold)


def no_spaces(gold: str, draw: random.Random) -> str | None:
    if re.search(r"text|mbox|[A-Za-z]\s[A-Za-z]|[0-9]\s[0-9]", gold) or " " not in gold:
        return None
    return gold.replace(" ", "")


def thin_space(gold: str, draw: random.Random) -> str | None:
    return re.sub(r",\s*", r",\\, ", gold) if pair_parts(gold) or listed(gold) else None


def display_fraction(gold: str, draw: random.Random) -> str | None:
    return gold.replace(r"\frac", draw.choice((r"\dfrac", r"\tfrac"))) if r"\frac" in gold else None


def slash(gold: str, draw: random.Random) -> str | None:
    value = fraction(gold)
    return f"{value.numerator}/{value.denominator}" if value is not None and value.denominator > 1 else None


def exact_decimal(gold: str, draw: random.Random) -> str | None:
    value = fraction(gold)
    if value is None or 10**4 % value.denominator:
        return None
    return f"{float(value):.4f}".rstrip("0").rstrip(".")


def scaled_fraction(gold: str, draw: random.Random) -> str | None:
    match, factor = FRACTION.fullmatch(gold), draw.randrange(2, 6)
    return rf"{match[1]}\frac{{{int(match[2]) * factor}}}{{{int(match[3]) * factor}}}" if match else None


def mixed_number(gold: str, draw: random.Random) -> str | None:
    value = fraction(gold)
    if value is None or value < 1 or value.denominator == 1:
        return None
    whole, rest = divmod(value, 1)
    return f"{whole}{write_fraction(rest)}"


def sign_inside(gold: str, draw: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    return rf"\frac{{-{match[2]}}}{{{match[3]}}}" if match and match[1] else None


def digits_grouped(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    return f"{value:,}".replace(",", draw.choice((",", "{,}", r",\!"))) if value and abs(value) > 999 else None


def with_decimal_point(gold: str, draw: random.Random) -> str | None:
    return f"{gold}.{draw.choice(('0', '00'))}" if integer(gold) is not None else None


def named(gold: str, draw: random.Random) -> str | None:
    is_scalar = integer(gold) is not None or fraction(gold) is not None or ROOT.fullmatch(gold)
    return f"{draw.choice('xnkm')}{draw.choice(('=', ' = '))}{gold}" if is_scalar else None


def unnamed(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"[a-z]\s?=\s?(-?[0-9]+|-?\\frac\{[0-9]+\}\{[0-9]+\})", gold)
    return match[1] if match else None


def with_unit(gold: str, draw: random.Random) -> str | None:
    unit = draw.choice((r"\text{ cm}", r"\text{ units}", r" \text{ square inches}", r"\,\text{m}^2", r"\text{ people}"))
    return gold + unit if (integer(gold) or 0) > 1 else None


def without_unit(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"([0-9]+(?:\\pi)?)\s?\\(?:text|mbox)\{[a-z ]+\}", gold)
    return match[1] if match else None


def degrees(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"([0-9]+)\^\{?\\circ\}?", gold)
    return draw.choice((match[1], match[1] + r"^{\circ}", match[1] + r"\text{ degrees}")) if match else None


def percent(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"([0-9]+)\\%", gold)
    return draw.choice((match[1], match[1] + "%", match[1] + r"\text{ percent}")) if match else None


def dollars(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"\\\$\s?([0-9.,]+)", gold)
    return draw.choice((match[1], match[1] + r"\text{ dollars}", f"${match[1]}")) if match else None


def sized_brackets(gold: str, draw: random.Random) -> str | None:
    if not (pair_parts(gold) or interval(gold)) or r"\left" in gold:
        return None
    return rf"\left{gold[:-1]}\right{gold[-1]}"


def reordered(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    return ", ".join(reversed(parts)) if parts and parts != parts[::-1] else None


def braced(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    return rf"\{{{', '.join(parts)}\}}" if parts and len(set(parts)) == len(parts) else None


def joined_by_word(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    return rf"{parts[0]} \text{{ {draw.choice(('and', 'or'))} }} {parts[1]}" if parts and len(parts) == 2 else None


def solved_for(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    if not parts or len(parts) != 2:
        return None
    between = draw.choice((r" \text{ or } x=", ", x=", ", "))
    return f"x={parts[0]}{between}{parts[1]}"


def as_inequality(gold: str, draw: random.Random) -> str | None:
    found = interval(gold)
    if found is None or gold.count("infty") == 2:
        return None
    left, low, high, right = found
    lower, upper = r"\le" if left == "[" else "<", r"\le" if right == "]" else "<"
    if "infty" in low:
        return rf"x {upper} {high}"
    if "infty" in high:
        lower = r"\ge" if left == "[" else ">"
        return rf"x {lower} {low}"
    return rf"{low} {lower} x {upper} {high}"


def as_membership(gold: str, draw: random.Random) -> str | None:
    return rf"x \in {gold}" if interval(gold) else None


def union_reordered(gold: str, draw: random.Random) -> str | None:
    return r" \cup ".join(reversed([part.strip() for part in gold.split(r"\cup")])) if r"\cup" in gold else None


def terms_reordered(gold: str, draw: random.Random) -> str | None:
    if not POLYNOMIAL.fullmatch(gold):
        return None
    terms = re.findall(r"[+-]?[^+-]+", gold.replace(" ", ""))
    turned = "".join(term if term[0] in "+-" else f"+{term}" for term in reversed(terms))
    return turned.removeprefix("+")


def written_products(gold: str, draw: random.Random) -> str | None:
    if not POLYNOMIAL.fullmatch(gold) or not re.search(r"[0-9][a-z]", gold):
        return None
    return re.sub(r"(?<=[0-9])(?=[a-z])", draw.choice((r" \\cdot ", "*", " ")), gold)


def braced_exponent(gold: str, draw: random.Random) -> str | None:
    return re.sub(r"\^([0-9])(?![0-9])", r"^{\1}", gold) if re.search(r"\^[0-9](?![0-9])", gold) else None


def under_the_root(gold: str, draw: random.Random) -> str | None:
    match = ROOT.fullmatch(gold)
    return rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}" if match else None


def bare_root(gold: str, draw: random.Random) -> str | None:
    match = ROOT.fullmatch(gold)
    return rf"{match[1]}\sqrt {match[2]}" if match and len(match[2]) == 1 else None


def pi_elsewhere(gold: str, draw: random.Random) -> str | None:
    match = PI.fullmatch(gold)
    if match is None:
        return None
    return rf"\pi \cdot {match[1]}" if match[1] else rf"\frac{{{match[2]}\pi}}{{{match[3]}}}"


def bare_word(gold: str, draw: random.Random) -> str | None:
    match = WORD.fullmatch(gold)
    return draw.choice((match[1], rf"\textbf{{{match[1]}}}", rf"\mathrm{{{match[1]}}}")) if match else None


def word_in_other_case(gold: str, draw: random.Random) -> str | None:
    match = WORD.fullmatch(gold)
    return rf"\text{{{match[1].upper() if match[1].islower() else match[1].lower()}}}" if match else None


def bare_choice(gold: str, draw: random.Random) -> str | None:
    match = CHOICE.fullmatch(gold)
    letter = match and (match[1] or match[2])
    return draw.choice((letter, f"({letter})", rf"\text{{({letter})}}", rf"\textbf{{{letter}}}")) if letter else None


def base_braced(gold: str, draw: random.Random) -> str | None:
    match = BASED.fullmatch(gold)
    return draw.choice((f"{match[1]}_{{{match[2]}}}", rf"{match[1]}_{{\text{{{match[2]}}}}}")) if match else None


def square_brackets(gold: str, draw: random.Random) -> str | None:
    return gold.replace("{pmatrix}", "{bmatrix}") if MATRIX.fullmatch(gold) else None


def parts_swapped(gold: str, draw: random.Random) -> str | None:
    match = COMPLEX.fullmatch(gold)
    return (
        f"{'-' if match[2] == '-' else ''}{match[3]}i {'' if match[1][0] == '-' else '+'}{match[1]}" if match else None
    )


def clock_braced(gold: str, draw: random.Random) -> str | None:
    match = CLOCK.fullmatch(gold)
    return (
        draw.choice((rf"{match[1]}{{:}}{match[2]}", rf"\text{{{gold}}}", rf"{match[1]}\!:\!{match[2]}"))
        if match
        else None
    )


def sides_swapped(gold: str, draw: random.Random) -> str | None:
    match = LINE.fullmatch(gold)
    return f"{match[2]} = {match[1]}" if match else None


def worked_out(gold: str, draw: random.Random) -> str | None:
    value, less = integer(gold), draw.randrange(2, 9)
    return f"{value - less} + {less} = {gold}" if value and value > 9 else None


def power_of_ten(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    if not value or value % 1000 or not 1000 <= value < 10**7:
        return None
    zeros = len(gold) - len(gold.rstrip("0"))
    return rf"{gold.rstrip('0')} \times 10^{{{zeros}}}"


def math_mode(gold: str, draw: random.Random) -> str | None:
    return None if "$" in gold or "text" in gold else draw.choice(("${}$", r"\displaystyle {}", r"\({}\)")).format(gold)


def final_period(gold: str, draw: random.Random) -> str | None:
    return None if "text" in gold else gold + "."


def sentence_said(gold: str, draw: random.Random) -> str | None:
    if integer(gold) is None:
        return None
    frames = (
        "The final answer is {}, as required.", "So the answer is ${}$.", "We conclude.\n\n**Answer:** {}",
        "The answer is {} because nothing else fits.", "Therefore there are {} of them.", "Checking again, we get {}!",
        "The answer is therefore {}.", "Thus the final answer is: {}.", "Hence the total is {} in all.", "#### {}",
        "<answer>{}</answer>", "It cannot be less, so it equals {}.",
        "Final Answer: The final answer is ${}$. I hope it is correct.",
    )  # fmt: skip
    return draw.choice(frames).format(gold)


def box_in_prose_said(gold: str, draw: random.Random) -> str | None:
    frames = (
        "Hence the answer is $\\boxed{{{}}}$, as required.", "First we got 7. Then $$\\boxed{{ {} }}$$",
        "So \\[ \\boxed{{{}}}. \\]", "Is it 3? No.\nIt is \\boxed{{{}}}", "\\fbox{{${}$}}",
        "The result, $\\boxed{{{0}}}$, was found above. So $\\boxed{{{0}}}$.",
    )  # fmt: skip
    return None if "$" in gold else draw.choice(frames).format(gold)


KEEPING: tuple[Rule, ...] = (
    spaces, no_spaces, thin_space, display_fraction, slash, exact_decimal, scaled_fraction, mixed_number, sign_inside,
    digits_grouped, with_decimal_point, named, unnamed, with_unit, without_unit, degrees, percent, dollars,
    sized_brackets, reordered, braced, joined_by_word, solved_for, as_inequality, as_membership, union_reordered,
    terms_reordered, written_products, braced_exponent, under_the_root, bare_root, pi_elsewhere, bare_word,
    word_in_other_case, bare_choice, base_braced, square_brackets, parts_swapped, clock_braced, sides_swapped,
    worked_out, power_of_ten, math_mode, final_period, sentence_said, box_in_prose_said,
)  # fmt: skip
