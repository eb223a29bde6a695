"""Which credit learns faster with tools: by trajectory, turn, state or step? One supervised checkpoint, several seeds.

    python benchmarks/credit.py --task calculator --seeds 3
    python benchmarks/credit.py --task shop --seeds 3 --samples 2 --credits trajectory,turn,step
    python benchmarks/credit.py --task shop --seeds 3 --credits trajectory,turn --whole
Every run starts from the same supervised checkpoint and sees the same rewards: the environment pays half a point for
the way, in the turn that goes it, and one for the end. Only objective.advantage differs. Held-out scores count the end
alone, at temperature 1, on tasks that no setting was chosen by. What a finished run achieved is kept beside it
(NAME.json) and not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learning import interval

from temper.config import RunConfig, load_recipe, merge, to_toml
from temper.envs.library.calculator import Calculator
from temper.envs.library.shop import Shop, ShopEnv, judge
from temper.protocols import EnvOpening, EnvReply
from temper.runs.reader import RunReader
from temper.types import Message, Task

CREDITS = {
    "trajectory": "group_mean",
    "turn": "turn_returns",
    "state": "state_returns",
    "step": "step_values",
}
"""None divides by a deviation, so that they differ in what they compare alone. Step values are those of turns, and the
episodes that estimate them are drawn on top of all others."""
WAY = 0.5
"""Paid for the way, by turn."""
HELDOUT_SEED = 7919
"""Of tasks that the recipes do not hold out."""
SAMPLES = 2
"""Of each held-out task."""
DEADLINE_SECONDS = 3600
ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).resolve()


class PayingCalculator(Calculator):
    """Pays the turn in which the calculator first says the answer, and the turn that answers."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self._wanted, self._is_found = task.answer, False
        return await super().start(task, seed)

    async def step(self, message: Message) -> EnvReply:
        reply = await super().step(message)
        if reply.is_done:
            return dataclasses.replace(reply, reward=float(message.content.strip() == self._wanted))
        is_first = not self._is_found and any(said.content == self._wanted for said in reply.messages)
        self._is_found |= is_first
        return dataclasses.replace(reply, reward=WAY * is_first)


class PayingShop(ShopEnv):
    """Pays the turn that makes a call of the solution hold, and takes it back from one that undoes it; then the end."""

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self._calls, self._held = json.loads(str(task.extra["solution"])), 0.0
        return await super().start(task, seed)

    async def step(self, message: Message) -> EnvReply:
        reply = await super().step(message)
        before, self._held = self._held, share_held(self._calls, self._start, self._shop)
        is_reached = judge(self._start, self._shop, self._goal, 0.0) == 1.0
        reward = WAY * (self._held - before) + (reply.reward or 0.0)
        return dataclasses.replace(reply, reward=reward, result="reached" if is_reached else "missed")


def share_held(calls: Sequence[tuple[str, dict[str, Any]]], start: Shop, shop: Shop) -> float:
    """The share of these calls whose effect is seen in the shop."""
    placed = [order for id, order in shop.orders.items() if id not in start.orders]
    holds = {
        "cancel": lambda order: shop.orders[order]["is_cancelled"],
        "add": lambda item, count=1: (Counter(shop.cart) + shop.bought)[item] == count,
        "use_coupon": lambda code: code in (shop.coupon, *(order["coupon"] for order in placed)),
        "pay": lambda: bool(placed),
    }
    return statistics.fmean(holds[name](**arguments) for name, arguments in calls)


def is_reached(prompt: str, response: str, answer: str | None) -> float:
    """The held-out score of a visit: PayingShop says what became of it in place of the last message."""
    return float(response == "reached")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the credits are compared on."""

    recipe: Path
    """Two stages: supervised, then reinforcement."""
    env: str
    """The class here that pays turns."""
    outcome: dict[str, Any]
    """The reward that sees the end alone."""
    practice: dict[str, Any]
    """Changes of the second stage, the same for every credit."""
    num_heldout: int


COMPARISONS = {
    "calculator": Comparison(
        recipe=ROOT / "recipes" / "agent_calculator.toml",
        env="PayingCalculator",
        outcome={"kind": "exact"},
        practice={"steps": 8, "rollout": {"groups_per_step": 32}},
        num_heldout=256,
    ),
    "shop": Comparison(
        recipe=ROOT / "recipes" / "agent_shop.toml",
        env="PayingShop",
        outcome={"kind": f"{FILE}:is_reached"},
        practice={"steps": 24, "rollout": {"groups_per_step": 16}},
        num_heldout=256,
    ),
}


@dataclass(frozen=True)
class Achieved:
    """Held-out score of one run, sampled, with its 95% interval."""

    start: tuple[float, float, float]
    end: tuple[float, float, float]
    num_drawn: int
    """Tokens that the policy drew in training, for step values too."""

    @property
    def gain(self) -> float:
        return self.end[0] - self.start[0]


def main() -> None:
    options = parse()
    runs = options.runs / options.task
    runs.mkdir(parents=True, exist_ok=True)
    comparison = COMPARISONS[options.task]
    if options.whole:
        comparison = dataclasses.replace(comparison, practice={})
    supervised, practice = load_recipe(comparison.recipe)
    run(runs, "sft", changed(supervised, heldout(supervised, comparison.num_heldout)))
    start = runs / "sft" / "checkpoints" / "0-sft" / f"step-{supervised.steps}"
    results: dict[str, list[Achieved]] = {}
    for seed in range(options.seeds):  # seed by seed, so that a queue that was stopped leaves whole comparisons
        for credit in options.credits:
            config = configured(practice, comparison, advantage_of(credit, options.samples), start)
            results.setdefault(credit, []).append(run(runs, f"{credit}-{seed}", changed(config, {"seed": seed})))
    print(f"{options.task}: held-out score in %, sampled\n\n{page(results)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(COMPARISONS), default="calculator")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--credits", type=lambda text: text.split(","), default=list(CREDITS))
    parser.add_argument("--samples", type=int, default=4, help="of each turn, for step values; the paper has 9")
    parser.add_argument("--whole", action="store_true", help="the recipe's own practice, two to four times as much")
    parser.add_argument("--runs", type=Path, default=Path("runs/credit"))
    return parser.parse_args()


def changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(merge(config.model_dump(exclude_none=True), change))


def heldout(config: RunConfig, size: int) -> dict[str, Any]:
    sources = [source.model_dump(exclude_none=True) for source in config.heldout]
    return {"heldout": [{**source, "seed": HELDOUT_SEED, "size": size} for source in sources]}


def advantage_of(credit: str, samples: int) -> dict[str, Any]:
    return {"name": CREDITS[credit], **({"samples": samples} if credit == "step" else {})}


def configured(practice: RunConfig, comparison: Comparison, advantage: dict[str, Any], start: Path) -> RunConfig:
    """The second stage with this credit, from a checkpoint."""
    table = practice.model_dump(exclude_none=True)
    table["model"] = {"path": str(start.resolve())}
    table["objective"] = {"preset": "grpo", "advantage": advantage}
    table["reward"] = [{"kind": "env"}]
    common = {
        "env": {"name": f"{FILE}:{comparison.env}"},
        "evaluation": {"every": 0, "samples": SAMPLES, "reward": [comparison.outcome]},
        "alarms": {"readiness": "off"},
        **heldout(practice, comparison.num_heldout),
    }
    return RunConfig.model_validate(merge(merge(table, common), comparison.practice))


def run(runs: Path, name: str, config: RunConfig) -> Achieved:
    """Trains unless it is done; a run that was interrupted goes on."""
    folder, recipe, kept = runs / name, runs / f"{name}.toml", runs / f"{name}.json"
    if not kept.exists():
        recipe.write_text(to_toml([config]))
        command = [sys.executable, "-m", "temper", "train", str(recipe), "--run", str(folder)]
        command += ["--resume"] if folder.exists() else []
        result = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        if result.returncode:
            raise SystemExit(f"{name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
        kept.write_text(json.dumps(asdict(read(folder))))
    found = json.loads(kept.read_text())
    return Achieved(start=tuple(found["start"]), end=tuple(found["end"]), num_drawn=found["num_drawn"])


def read(folder: Path) -> Achieved:
    with RunReader(folder) as reader:
        scores = [score for score in reader.evaluations() if score.name == "sampled"]
        num_drawn = sum(step.tokens_drawn for step in reader.steps())
    first, last = ((score.score, score.low, score.high) for score in (scores[0], scores[-1]))
    return Achieved(start=first, end=last, num_drawn=num_drawn)


HEADER = (
    "credit",
    "before",
    "after [95%], by seed",
    "gain [95% over seeds]",
    "tokens drawn a run",
    "more than by trajectory [95% over seeds]",
)


def rows(results: dict[str, list[Achieved]]) -> list[tuple[str, ...]]:
    found = []
    for credit, runs in results.items():
        before = statistics.fmean(one.start[0] for one in runs)
        after = ", ".join("{:.1f} [{:.1f}, {:.1f}]".format(*(100 * value for value in one.end)) for one in runs)
        drawn = round(statistics.fmean(one.num_drawn for one in runs), -3)
        cells = [
            f"{credit} (`{CREDITS[credit]}`)",
            f"{100 * before:.1f}",
            after,
            shown([one.gain for one in runs]),
            f"{drawn:,.0f}",
        ]
        others = results.get("trajectory", []) if credit != "trajectory" else []
        more = [one.end[0] - other.end[0] for one, other in zip(runs, others, strict=False)]
        found.append((*cells, shown(more) if more else ""))
    return found


def shown(values: Sequence[float]) -> str:
    mean, low, high = (100 * value for value in interval(values))
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def page(results: dict[str, list[Achieved]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
