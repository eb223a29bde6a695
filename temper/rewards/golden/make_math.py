r"""Makes math.jsonl: pairs of a gold answer and a response whose verdict follows from how both were made.

    python -m temper.rewards.golden.make_math > temper/rewards/golden/math.jsonl
Owns: templates. Refuses: asking any verifier; a label that a verifier gave could not show its mistakes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import gcd

Pair = tuple[str, str, bool]
"""Gold, final answer as written, whether they are equal."""
DRAWS = 10
FRAMES = (
    r"We add up and find \boxed{{{}}}.",
    "Step by step this gives\n#### {}",
    "After simplifying, the answer is {}.",
    r"Therefore $x$ has the value we want: $\boxed{{{}}}$",
)


def integers(draw: random.Random) -> Iterator[Pair]:
    n = draw.randrange(12, 9999)
    yield from ((str(n), text, True) for text in (str(n), f"{n}.0", f"{n:,}", f"+{n}"))
    yield from ((str(n), text, False) for text in (str(n + 1), f"-{n}", f"{n}0", f"{n}.5", str(n)[::-1] + "7"))


def thousands(draw: random.Random) -> Iterator[Pair]:
    n = draw.randrange(10**4, 10**7)
    grouped = f"{n:,}"
    for text in (str(n), grouped, grouped.replace(",", "{,}"), grouped.replace(",", r"\,"), rf"\${grouped}"):
        yield grouped, text, True
    yield grouped, str(n + 1000), False
    yield grouped, grouped.replace(",", "."), False


def decimals(draw: random.Random) -> Iterator[Pair]:
    value = Fraction(draw.randrange(101, 9999), 100)
    text = f"{float(value):.2f}"
    yield text, f"{text}0", True
    yield text, rf"\frac{{{value.numerator}}}{{{value.denominator}}}", True
    yield text, f"{float(value) + 0.01:.2f}", False
    yield text, text.replace(".", ""), False


def fractions(draw: random.Random) -> Iterator[Pair]:
    above, below = draw.randrange(2, 30), draw.choice((7, 9, 11, 13))
    if gcd(above, below) > 1 or above == below:
        above = 2
    gold = rf"\frac{{{above}}}{{{below}}}"
    right = (f"{above}/{below}", rf"\dfrac{{{above}}}{{{below}}}", rf"\tfrac{{{3 * above}}}{{{3 * below}}}")
    yield from ((gold, text, True) for text in right)
    wrong = (f"{below}/{above}", rf"-{gold}", f"{above / below:.2f}", rf"\frac{{{above + 1}}}{{{below}}}")
    yield from ((gold, text, False) for text in wrong)


def mixed(draw: random.Random) -> Iterator[Pair]:
    whole, above, below = draw.randrange(1, 9), draw.choice((1, 3)), 4
    gold = f"{whole}.{25 * above}"
    yield gold, rf"{whole}\frac{{{above}}}{{{below}}}", True
    yield gold, rf"{whole} {above}/{below}", True
    yield gold, f"{whole * below + above}/{below}", True
    yield gold, rf"{whole + 1}\frac{{{above}}}{{{below}}}", False
    yield gold, f"{whole * above}/{below}", False


def percents(draw: random.Random) -> Iterator[Pair]:
    p = draw.randrange(2, 99)
    gold = rf"{p}\%"
    yield from ((gold, text, True) for text in (f"{p}%", f"{p} percent", str(p), f"{p / 100:g}"))
    yield from ((gold, text, False) for text in (f"{p + 1}%", f"{p / 100:g}%", f"{100 * p}%"))
    yield f"{p / 100:g}", f"{p}%", True
    yield f"{p / 100:g}", f"{p / 100:g}%", False


def units(draw: random.Random) -> Iterator[Pair]:
    n = draw.randrange(2, 90)
    short, long, other = draw.choice(
        [("cm", "centimeters", "km"), ("kg", "kilograms", "grams"), ("hours", "hr", "minutes"), ("m", "meters", "feet")]
    )
    gold = rf"{n}\text{{ {short}}}"
    right = (str(n), f"{n} {short}", f"{n} {long}", rf"{n}\,\mathrm{{{short}}}")
    yield from ((gold, text, True) for text in right)
    yield from ((gold, text, False) for text in (f"{n} {other}", f"{n + 1} {short}", rf"{n}\text{{ {other}}}"))
    yield str(n), f"{n} {long}", True


def money_and_angles(draw: random.Random) -> Iterator[Pair]:
    n = draw.randrange(3, 170)
    right = (rf"\${n}", f"${n}.00", f"{n} dollars", str(n))
    yield from ((rf"\${n}", text, True) for text in right)
    yield rf"\${n}", rf"\${n}.50", False
    yield rf"\${n}", f"{n} cents", False
    right = (rf"{n}^\circ", rf"{n}^{{\circ}}", f"{n} degrees", str(n))
    yield from ((rf"{n}^\circ", text, True) for text in right)
    yield rf"{n}^\circ", rf"{180 - n}^\circ" if n != 90 else "91", False


def intervals(draw: random.Random) -> Iterator[Pair]:
    a = draw.randrange(-9, 9)
    b = a + draw.randrange(1, 9)
    gold = rf"[{a}, {b})"
    yield gold, rf"\left[{a},{b}\right)", True
    yield gold, f"[{a},{b})", True
    yield from ((gold, text, False) for text in (f"[{a},{b}]", f"({a},{b})", f"[{a},{b + 1})"))
    yield rf"(-\infty,{a}]", rf"\left( -\infty, {a} \right]", True
    yield rf"(-\infty,{a}]", rf"(-\infty,{a})", False


def sets_and_tuples(draw: random.Random) -> Iterator[Pair]:
    a, b, c = draw.sample(range(1, 30), 3)
    gold = rf"\{{{a}, {b}, {c}\}}"
    yield gold, rf"\left\{{{c},{a},{b}\right\}}", True
    yield gold, rf"\{{{a},{b}\}}", False
    yield gold, rf"\{{{a},{b},{c + 1}\}}", False
    yield f"({a}, {b})", rf"\left({a},{b}\right)", True
    yield f"({a}, {b})", f"({b},{a})", False
    yield f"({a}, {b})", f"({a},{b + 1})", False
    yield f"({a}, {b})", rf"\{{{a},{b}\}}", False


def roots_and_pi(draw: random.Random) -> Iterator[Pair]:
    k, n = draw.randrange(2, 9), draw.choice((2, 3, 5, 7))
    gold = rf"{k}\sqrt{{{n}}}"
    yield gold, rf"\sqrt{{{k * k * n}}}", True
    yield gold, rf"{k} \sqrt{n}", True
    yield gold, rf"\sqrt{{{k * n}}}", False
    yield gold, rf"{k + 1}\sqrt{{{n}}}", False
    yield rf"\frac{{{k}\pi}}{{{n}}}", rf"{k}\pi/{n}", True
    yield rf"\frac{{{k}\pi}}{{{n}}}", rf"\frac{{{k}}}{{{n}}}", False


def polynomials(draw: random.Random) -> Iterator[Pair]:
    a, b = draw.sample(range(1, 12), 2)
    gold = rf"x^2+{a + b}x+{a * b}"
    yield gold, rf"(x+{a})(x+{b})", True
    yield gold, rf"{a * b} + {a + b}x + x^{{2}}", True
    yield gold, rf"(x-{a})(x-{b})", False
    yield gold, rf"x^2+{a + b}x+{a * b + 1}", False


def equations(draw: random.Random) -> Iterator[Pair]:
    n = draw.randrange(3, 99)
    yield str(n), f"x = {n}", True
    yield str(n), f"x={n + 1}", False
    yield f"x={n}", str(n), True
    yield str(n), f"{n + 1} = {n}", False
    yield str(n), f"{n} or {n + 1}", False
    yield str(n), f"{n}, {n + 1}", False


TEMPLATES: tuple[Callable[[random.Random], Iterator[Pair]], ...] = (
    integers, thousands, decimals, fractions, mixed, percents, units, money_and_angles, intervals, sets_and_tuples,
    roots_and_pi, polynomials, equations,
)  # fmt: skip


def rows() -> Iterator[dict[str, object]]:
    draw = random.Random(5)
    seen = set()
    for template in TEMPLATES:
        for gold, answer, is_correct in (pair for _ in range(DRAWS) for pair in template(draw)):
            # Free text ends where a sentence does; only short plain answers are put into every frame.
            frame = draw.choice(FRAMES if template in (integers, decimals, percents) else FRAMES[::3])
            row = {
                "category": template.__name__,
                "answer": gold,
                "response": frame.format(answer),
                "is_correct": is_correct,
            }
            if (key := (gold, answer)) not in seen:
                seen.add(key)
                yield row


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row, ensure_ascii=False))
