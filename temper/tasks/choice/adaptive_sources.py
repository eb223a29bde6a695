"""adaptive_sources: a mixture draws more from sources that teach, and never stops drawing from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from temper.errors import UserError, did_you_mean
from temper.tasks.choice.chooser import Chooser, StageFacts
from temper.types import Group, PromptHistory, Scalar


def difference(group: Group) -> float:
    """1 when its rewards differ, so that a comparison teaches something."""
    return float(not group.is_degenerate)


def variance(group: Group) -> float:
    """4 p (1 - p) of its mean reward p within 0 and 1: 1 in the middle, 0 at both ends."""
    mean = min(1.0, max(0.0, sum(group.rewards) / len(group.rewards)))
    return 4 * mean * (1 - mean)


SIGNALS: dict[str, Callable[[Group], float]] = {"difference": difference, "variance": variance}


class AdaptiveSources(Chooser):
    """Each source has the share floor + (1 - n floor) w s / sum(w s) of the draws: w its weight in the recipe, s its
    running signal, n how many sources there are. A source begins with signal 1 and keeps its own while it is not drawn;
    where no source has any, the recipe's weights count."""

    name = "adaptive_sources"
    goes_by_prompt = False

    def __init__(self, *, floor: float = 0.1, signal: str = "difference", newest: float = 0.2) -> None:
        """`floor`: least share of every source. `signal`: what a group teaches, "difference" (1 when its rewards
        differ) or "variance" (4 p (1 - p) of its mean reward). `newest`: weight of the newest step in that signal."""
        if signal not in SIGNALS:
            raise UserError(
                f'data.choose: {self.name}: signal "{signal}" is unknown.{did_you_mean(signal, SIGNALS)} '
                f"Known: {', '.join(SIGNALS)}"
            )
        if not 0 < newest <= 1:
            raise UserError(f"data.choose: {self.name}: newest={newest:g} must be above 0 and at most 1")
        if not 0 < floor < 1:
            raise UserError(
                f"data.choose: {self.name}: floor={floor:g} must be above 0 and below 1: without one, a source without "
                f"signal would never be measured again"
            )
        self._floor, self._signal_of, self._newest = floor, SIGNALS[signal], newest
        self._facts = StageFacts(sources=(), weights=(), steps=0)
        self._signals: dict[str, float] = {}

    def open(self, facts: StageFacts) -> None:
        count = len(facts.sources)
        if len(set(facts.sources)) < 2:
            raise UserError(
                f"data.choose: {self.name} moves draws from one source to another, and there is only "
                f"{facts.sources[0]}. Add a [[train]] table with another name, or leave it out"
            )
        if self._floor * count > 1:
            raise UserError(
                f"data.choose: {self.name}: floor={self._floor:g} for each of {count} sources is more than all draws. "
                f"Use at most floor = {1 / count:.3g}"
            )
        self._facts = facts
        self._signals = dict.fromkeys(facts.sources, 1.0)

    def weights(self) -> Sequence[float]:
        facts = self._facts
        worth = [w * self._signals[name] for w, name in zip(facts.weights, facts.sources, strict=True)]
        worth = worth if sum(worth) > 0 else list(facts.weights)
        free = 1 - self._floor * len(worth)
        return [self._floor + free * one / sum(worth) for one in worth]

    def learn(self, groups: Sequence[Group], before: Mapping[str, PromptHistory]) -> dict[str, float]:
        for name, old in self._signals.items():
            found = [self._signal_of(group) for group in groups if group.task.source == name and group.rewards]
            if found:
                self._signals[name] = (1 - self._newest) * old + self._newest * sum(found) / len(found)
        return {}

    def measure(self) -> dict[str, float]:
        shares = dict.fromkeys(self._facts.sources, 0.0)
        for name, share in zip(self._facts.sources, self.weights(), strict=True):
            shares[name] += share
        return {f"data/weight/{name}": share for name, share in shares.items()} | {
            f"data/signal/{name}": signal for name, signal in self._signals.items()
        }

    def state(self) -> dict[str, Scalar]:
        return dict(self._signals)

    def load_state(self, state: Mapping[str, Scalar]) -> None:
        self._signals |= {name: float(value) for name, value in state.items() if name in self._signals}
