r"""Ways to make an answer of the MATH data set another answer.

Owns: rules on the text of a gold answer that change what it states. Refuses: asking any verifier; a rule applies only
where it is certain that the value changes, and returns None elsewhere.
"""

from __future__ import annotations

import random
import re

from temper.rewards.golden.rewritings import (
    BASED,
    CHOICE,
    CLOCK,
    COMPLEX,
    FRACTION,
    LINE,
    MATRIX,
    PI,
    POLYNOMIAL,
    ROOT,
    WORD,
    Rule,
    as_inequality,
    fraction,
    integer,
    interval,
    listed,
    pair_parts,
)  # fmt: skip


def off_by_one(gold: str, draw: random.Random) -> str | None:
    """One number of many kinds of answers. Zeros, powers of one and words are left alone: there it may not matter."""
    if re.search(r"(?<![0-9])0|(?<![0-9])1\^|text|mbox|_|\\pm|sqrt\[|:|circ", gold):
        return None
    numbers = list(re.finditer(r"(?<![0-9.])[0-9]{1,6}(?![0-9.]|,[0-9]{3})", gold))
    if not numbers:
        return None
    chosen = draw.choice(numbers)
    return f"{gold[: chosen.start()]}{int(chosen.group()) + 1}{gold[chosen.end() :]}"


def digits_swapped(gold: str, draw: random.Random) -> str | None:
    if integer(gold) is None or len(gold) < 2 or gold[-1] == gold[-2] or gold[-2] == "-":
        return None
    return gold[:-2] + gold[-1] + gold[-2]


def other_sign(gold: str, draw: random.Random) -> str | None:
    if not (integer(gold) or fraction(gold) or ROOT.fullmatch(gold) or PI.fullmatch(gold)):
        return None
    return gold.removeprefix("-") if gold.startswith("-") else f"-{gold}"


def turned_over(gold: str, draw: random.Random) -> str | None:
    match = FRACTION.fullmatch(gold)
    return rf"{match[1]}\frac{{{match[3]}}}{{{match[2]}}}" if match and match[2] not in ("0", match[3]) else None


def rounded(gold: str, draw: random.Random) -> str | None:
    value = fraction(gold)
    return f"{float(value):.2f}" if value is not None and 10**9 % value.denominator else None


def ten_times(gold: str, draw: random.Random) -> str | None:
    return f"{gold}0" if integer(gold) else None


def power_of_another_ten(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    return rf"{gold[0]}.{gold[1:]} \times 10^{{{len(gold)}}}" if value and value > 99 else None


def unevaluated_product(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    factor = next((n for n in range(2, 12) if value and value > n and value % n == 0), None)
    if value is None or factor is None:
        return None
    sign = draw.choice((r"\cdot", r"\times"))
    product = f"{factor} {sign} {value // factor}"
    return draw.choice((product, rf"\frac{{{product}}}{{1}}", f"({product})", f"{factor}*{value // factor}"))


def unevaluated_sum(gold: str, draw: random.Random) -> str | None:
    value, less = integer(gold), draw.randrange(2, 9)
    if value is None or value < 10:
        return None
    return draw.choice((f"{value - less}+{less}", f"{value + less} - {less}", rf"\frac{{{value - less}+{less}}}{{1}}"))


def summands_side_by_side(gold: str, draw: random.Random) -> str | None:
    value, less = integer(gold), draw.randrange(2, 9)
    return f"{value - less} {less}" if value and value > 10 else None


def false_equation(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    return f"{value - 1} = {gold}{draw.choice(('', ',', '.'))}" if value is not None and value > 1 else None


def as_open_bounds(gold: str, draw: random.Random) -> str | None:
    sign = draw.choice(("x <", "x >", r"\le", "> 0 +"))
    return f"{sign} {gold}" if integer(gold) is not None else None


def other_bracket(gold: str, draw: random.Random) -> str | None:
    found = interval(gold)
    if found is None:
        return None
    left, low, high, right = found
    if "infty" in low:
        return f"{left}{low}, {high}{')' if right == ']' else ']'}" if "infty" not in high else None
    return f"{'(' if left == '[' else '['}{low}, {high}{right}"


def other_strictness(gold: str, draw: random.Random) -> str | None:
    text = as_inequality(gold, draw)
    if text is None:
        return None
    strict = {r"\le": "<", r"\ge": ">", "<": r"\le", ">": r"\ge"}
    return re.sub(r"\\[lg]e|[<>]", lambda sign: strict[sign.group()], text, count=1)


def other_direction(gold: str, draw: random.Random) -> str | None:
    text = as_inequality(gold, draw)
    if text is None or len(re.findall(r"\\[lg]e|[<>]", text)) != 1:
        return None
    turned = {r"\le": r"\ge", r"\ge": r"\le", "<": ">", ">": "<"}
    return re.sub(r"\\[lg]e|[<>]", lambda sign: turned[sign.group()], text)


def interval_as_list(gold: str, draw: random.Random) -> str | None:
    found = interval(gold)
    return f"{found[1]}, {found[2]}" if found and "infty" not in gold else None


def interval_of_union_missing(gold: str, draw: random.Random) -> str | None:
    return gold.split(r"\cup")[0].strip() if r"\cup" in gold else None


def other_base(gold: str, draw: random.Random) -> str | None:
    match = BASED.fullmatch(gold)
    return f"{match[1]}_{{{int(match[2]) + 1}}}" if match and len(match[1]) > 1 else None


def other_digit_in_base(gold: str, draw: random.Random) -> str | None:
    match = BASED.fullmatch(gold)
    return (
        f"{match[1][:-1]}{(int(match[1][-1]) + 1) % int(match[2])}_{match[2]}" if match and len(match[2]) == 1 else None
    )


def order_of_pair(gold: str, draw: random.Random) -> str | None:
    parts = pair_parts(gold)
    return f"({', '.join(parts[::-1])})" if parts and parts != parts[::-1] else None


def pair_as_set(gold: str, draw: random.Random) -> str | None:
    parts = pair_parts(gold)
    return rf"\{{{', '.join(parts)}\}}" if parts else None


def element_missing(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    return ", ".join(parts[:-1]) if parts and len(set(parts)) == len(parts) else None


def element_too_many(gold: str, draw: random.Random) -> str | None:
    parts = listed(gold)
    return f"{gold}, {draw.choice(('97', '-61', '113'))}" if parts else None


def element_of_pair_missing(gold: str, draw: random.Random) -> str | None:
    parts = pair_parts(gold)
    return f"({', '.join(parts[:-1])})" if parts and len(parts) > 2 else None


def guessed_too(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    if value is None:
        return None
    return draw.choice(("{} \\text{{ or }} {}", "{}, {}", "{} \\text{{ and }} {}", "{}; {}")).format(gold, value + 3)


def anagram(gold: str, draw: random.Random) -> str | None:
    match = WORD.fullmatch(gold)
    if match is None:
        return None
    letters = draw.sample(match[1], len(match[1]))
    word = "".join(letters)
    return draw.choice((rf"\text{{{word}}}", word)) if word.lower() != match[1].lower() else None


def other_choice(gold: str, draw: random.Random) -> str | None:
    match = CHOICE.fullmatch(gold)
    letter = match and (match[1] or match[2])
    return rf"\text{{{chr(ord(letter) + 1)}}}" if letter else None


def choice_in_other_case(gold: str, draw: random.Random) -> str | None:
    return gold.swapcase() if re.fullmatch(r"[A-Za-z]", gold) else None


def variable_in_other_case(gold: str, draw: random.Random) -> str | None:
    return re.sub(r"[a-z]", lambda letter: letter.group().upper(), gold) if POLYNOMIAL.fullmatch(gold) else None


def other_variable(gold: str, draw: random.Random) -> str | None:
    letters = set(re.findall("[a-z]", gold))
    if not POLYNOMIAL.fullmatch(gold) or len(letters) != 1:
        return None
    return re.sub("[a-z]", draw.choice(sorted({"q", "w", "u"} - letters)), gold)


def other_exponent(gold: str, draw: random.Random) -> str | None:
    match = re.search(r"(?<=[a-z])\^(?:\{([0-9]+)\}|([0-9]))", gold)
    if not POLYNOMIAL.fullmatch(gold) or match is None:
        return None
    return f"{gold[: match.start()]}^{{{int(match[1] or match[2]) + 1}}}{gold[match.end() :]}"


def other_sign_within(gold: str, draw: random.Random) -> str | None:
    signs = list(re.finditer(r"(?<=\w|\})\s?[+-]\s?(?=\w)", gold))
    if not POLYNOMIAL.fullmatch(gold) or not signs:
        return None
    sign = draw.choice(signs)
    return f"{gold[: sign.start()]}{'-' if '+' in sign.group() else '+'}{gold[sign.end() :]}"


def root_forgotten(gold: str, draw: random.Random) -> str | None:
    match = ROOT.fullmatch(gold)
    return rf"{match[1]} \cdot {match[2]}" if match else None


def inside_and_outside_swapped(gold: str, draw: random.Random) -> str | None:
    match = ROOT.fullmatch(gold)
    return rf"{match[2]}\sqrt{{{match[1]}}}" if match and match[1] != match[2] else None


def pi_forgotten(gold: str, draw: random.Random) -> str | None:
    return re.sub(r"\s?\\pi", "", gold) if PI.fullmatch(gold) else None


def pi_as_decimal(gold: str, draw: random.Random) -> str | None:
    match = PI.fullmatch(gold)
    return f"{int(match[1]) * 3.14:.2f}" if match and match[1] else None


def conjugate(gold: str, draw: random.Random) -> str | None:
    match = COMPLEX.fullmatch(gold)
    return f"{match[1]} {'+' if match[2] == '-' else '-'} {match[3]}i" if match and match[3] != "0" else None


def transposed(gold: str, draw: random.Random) -> str | None:
    match = MATRIX.fullmatch(gold)
    if match is None:
        return None
    rows = [
        [cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\(?:\[[^\]]*\])?", match[1]) if row.strip()
    ]
    turned = [list(column) for column in zip(*rows, strict=True)]
    if turned == rows:
        return None
    lines = r" \\ ".join(" & ".join(row) for row in turned)
    return rf"\begin{{pmatrix}} {lines} \end{{pmatrix}}"


def other_minute(gold: str, draw: random.Random) -> str | None:
    match = CLOCK.fullmatch(gold)
    return f"{match[1]}:{(int(match[2]) + 7) % 60:02d}" if match else None


def other_side(gold: str, draw: random.Random) -> str | None:
    match = LINE.fullmatch(gold)
    return f"{match[1]} = {match[2]} + 2" if match else None


def other_unit(gold: str, draw: random.Random) -> str | None:
    match = re.fullmatch(r"([0-9]+)\s?\\(?:text|mbox)\{\s*(?:inches|feet|cm|hours|km|miles)\}", gold)
    return rf"{match[1]}\text{{ grams}}" if match else None


def more_words(gold: str, draw: random.Random) -> str | None:
    words = ("squared", "thousand", "cubed", "million", "factorial", "or less", "dozen", r"\text{ squared}")
    return f"{gold} {draw.choice(words)}" if (integer(gold) or 0) > 2 else None


def doubtful_said(gold: str, draw: random.Random) -> str | None:
    if integer(gold) is None or "-" in gold:
        return None
    frames = (
        "It must be less than {}.", "Is it {}?", "The answer is not {}.", "We get {} squared.", "It is more than {}.",
        "The answer is at least {}.", "I doubt that it is {}.", "It is anything but {}.", "The answer isn't {}.",
        "The value is {} thousand.", "Could the answer be {}?", "The answer is {} factorial.", "It is at most {}.",
        "The answer is {}, or one more.", "It cannot be {}.", "Nobody would say {}.", "The answer is below {}.",
    )  # fmt: skip
    return draw.choice(frames).format(gold)


def second_box_said(gold: str, draw: random.Random) -> str | None:
    value = integer(gold)
    return None if value is None else rf"\boxed{{{gold}}}, or perhaps \boxed{{{value + draw.randrange(1, 5)}}}."


CHANGING: tuple[Rule, ...] = (
    off_by_one, digits_swapped, other_sign, turned_over, rounded, ten_times, power_of_another_ten, unevaluated_product,
    unevaluated_sum, summands_side_by_side, false_equation, as_open_bounds, other_bracket, other_strictness,
    other_direction, interval_as_list, interval_of_union_missing, other_base, other_digit_in_base, order_of_pair,
    pair_as_set, element_missing, element_too_many, element_of_pair_missing, guessed_too, anagram, other_choice,
    choice_in_other_case, variable_in_other_case, other_variable, other_exponent, other_sign_within, root_forgotten,
    inside_and_outside_swapped, pi_forgotten, pi_as_decimal, conjugate, transposed, other_minute, other_side,
    other_unit, more_words, doubtful_said, second_box_said,
)  # fmt: skip
