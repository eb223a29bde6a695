r"""Makes math_pairs.jsonl: gold answers of the MATH data set beside the same answer written differently, or another.

    python -m temper.rewards.golden.make_pairs train.jsonl test.jsonl > temper/rewards/golden/math_pairs.jsonl
The files are those of MATH (Hendrycks et al. 2021, MIT licence), one JSON object with "solution" per line.
Owns: drawing golds for the rules, putting answers into responses, which part a pair is in. Refuses: asking a verifier.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from temper.rewards.golden.changes import CHANGING
from temper.rewards.golden.rewritings import KEEPING, Rule
from temper.rewards.mathematics.answers import find_boxes

SEED = 17
PAIRS_PER_RULE = 16
FRAMES = (r"\boxed{{{}}}", r"We find that the answer is $\boxed{{{}}}$.", "Therefore,\n\\[ \\boxed{{{}}} \\]")

Row = dict[str, object]


def gold_answers(paths: Iterable[Path]) -> list[str]:
    """The distinct last boxes of the solutions, in a fixed order."""
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").splitlines())
    boxes = (find_boxes(json.loads(line)["solution"]) for line in lines)
    return sorted({found[-1] for found in boxes if found and found[-1]})


def part(gold: str) -> str:
    """All pairs of one gold are in one part. The reward was mended with a view of "seen" only."""
    return "unseen" if hashlib.sha256(gold.encode()).digest()[0] % 2 else "seen"


def pairs(golds: Sequence[str], seed: int = SEED) -> Iterator[Row]:
    known = set()
    for is_correct, rules in ((True, KEEPING), (False, CHANGING)):
        for rule in rules:
            draw = random.Random(f"{seed} {rule.__name__}")
            count = 0
            for gold in draw.sample(golds, len(golds)):
                response = _respond(rule, gold, draw)
                if response is None or (gold, response) in known:
                    continue
                known.add((gold, response))
                yield {
                    "category": f"{part(gold)}: {rule.__name__}",
                    "answer": gold,
                    "response": response,
                    "is_correct": is_correct,
                }
                count += 1
                if count == PAIRS_PER_RULE:
                    break


def _respond(rule: Rule, gold: str, draw: random.Random) -> str | None:
    text = rule(gold, draw)
    if text is None or rule.__name__.endswith("_said"):
        return text
    return None if text == gold else draw.choice(FRAMES).format(text)


if __name__ == "__main__":
    for row in pairs(gold_answers(map(Path, sys.argv[1:]))):
        print(json.dumps(row, ensure_ascii=False))
