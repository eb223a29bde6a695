"""Checks per second of the math reward, through its public interface, beside math-verify called directly. One table.

    python benchmarks/verifiers.py
Plain: GSM8K-style responses that end in a number. LaTeX: the golden rows whose gold answer is not a plain number.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from temper.rewards.golden.golden_rows import GoldenRow, load_golden
from temper.rewards.mathematics.checking import verify_response
from temper.rewards.mathematics.forms import form, plain_number
from temper.rewards.mathematics.math import MathReward

SOLUTION = (
    "Each box holds {a} pencils, so {b} boxes hold {a} * {b} = {c} pencils.\n"
    "The school gives away {d} of them on Monday and buys {e} new ones on Tuesday.\n"
    "That leaves {c} - {d} + {e} = {f} pencils at the end of the week.\n"
)
ENDS = ("#### {}", "The answer is {}.", r"\boxed{{{}}}", "So the school has {} pencils.")


def plain_rows(count: int) -> list[GoldenRow]:
    draw = random.Random(0)
    rows = []
    for place in range(count):
        a, b, d, e = (draw.randrange(2, 100) for _ in range(4))
        f = a * b - d + e
        body = SOLUTION.format(a=a, b=b, c=a * b, d=d, e=e, f=f)
        answer = f + draw.choice((0, 0, 1))
        response = body + draw.choice(ENDS).format(f"{answer:,}")
        rows.append(GoldenRow(id=f"plain:{place}", answer=str(f), response=response, is_correct=answer == f))
    return rows


def latex_rows() -> list[GoldenRow]:
    return [row for row in load_golden("math") if plain_number(form(row.answer or "").text) is None]


def through_reward(rows: Sequence[GoldenRow], workers: int) -> float:
    """Checks per second, workers started and warm."""
    pairs = [(row.task(), row.trajectory()) for row in rows]
    reward = MathReward(workers=workers)

    async def score_all() -> float:
        await asyncio.gather(*(reward.score(*pair) for pair in pairs[: 4 * workers]))
        start = time.perf_counter()
        await asyncio.gather(*(reward.score(*pair) for pair in pairs))
        return len(pairs) / (time.perf_counter() - start)

    async def run() -> float:
        try:
            return await score_all()
        finally:
            await reward.close()

    return asyncio.run(run())


def directly(rows: Sequence[GoldenRow]) -> float:
    start = time.perf_counter()
    for row in rows:
        verify_response(row.answer or "", row.response)
    return len(rows) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000, help="plain rows")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    plain, latex = plain_rows(arguments.rows), latex_rows()
    table = Table("answers", "rows", f"math reward, {arguments.workers} workers", "math-verify, this process")
    for name, rows, few in (("plain numbers", plain, plain[:300]), ("LaTeX", latex, latex)):
        ours, theirs = through_reward(rows, arguments.workers), directly(few)
        table.add_row(name, str(len(rows)), f"{ours:,.0f} per second", f"{theirs:,.0f} per second")
    Console().print(table)


if __name__ == "__main__":
    main()
