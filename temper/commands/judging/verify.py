"""`temper verify`: runs a verifier over a golden set, or lets the attack pack loose on it.

Owns: running, counting and printing. Refuses: mending a verdict; a row without a number is reported, never counted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper import calls
from temper.catalogue import REWARDS
from temper.commands.progress import show_work
from temper.errors import UserError
from temper.evals.error_rates import Rate, error_rates
from temper.rewards.composite import CompositeReward
from temper.rewards.golden.golden_rows import GoldenRow, load_attacks, load_golden
from temper.rewards.mathematics.answers import find_answers, gold_answer
from temper.rewards.mathematics.forms import is_refused
from temper.rewards.mathematics.second_opinion import second_opinion
from temper.rewards.registry import RewardFactory, make_reward
from temper.rewards.workers.pool import WorkerFailed, WorkerPool
from temper.types import Scalar, Score, ScoreKind

ACCEPTED = 0.5
"""A golden response with at least this score counts as accepted. An attack has scored with anything above 0."""
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Verification:
    """Every row with its score."""

    kind: str
    is_attack: bool
    scored: tuple[tuple[GoldenRow, Score], ...]

    @property
    def wrong(self) -> list[tuple[GoldenRow, Score]]:
        """Verdicts that contradict the label; among attacks, those that scored."""
        return [
            pair for pair in self.scored if pair[1].value is not None and self._accepts(pair[1]) != pair[0].is_correct
        ]

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """False positives, false negatives; rows without a number are left out."""
        return error_rates((row.is_correct, self._accepts(score)) for row, score in self.scored if score.is_value)

    @property
    def parts(self) -> dict[str, tuple[Rate, Rate]]:
        """The rates by file of the golden set, and by its parts where its categories name them as "part: rule"."""
        found: dict[str, list[tuple[bool, bool]]] = {}
        for row, score in self.scored:
            part, mark, _ = row.category.partition(": ")
            name = row.id.rpartition(":")[0] + (f", {part}" if mark else "")
            if score.is_value:
                found.setdefault(name, []).append((row.is_correct, self._accepts(score)))
        return {name: error_rates(verdicts) for name, verdicts in found.items()}

    @property
    def reasons(self) -> Counter[tuple[ScoreKind, str]]:
        """Rows without a number, by kind and reason."""
        return Counter((score.kind, score.reason or "") for _, score in self.scored if not score.is_value)

    @property
    def is_fine(self) -> bool:
        """No attack scored; no golden row failed to get a number because the verifier broke."""
        if self.is_attack:
            return not self.wrong
        return not any(kind is ScoreKind.ERROR for kind, _ in self.reasons)

    def _accepts(self, score: Score) -> bool:
        assert score.value is not None, "only values are counted"
        return score.value > 0 if self.is_attack else score.value >= ACCEPTED


def verify(
    kind: str,
    *,
    golden: Path | None = None,
    attack: bool = False,
    options: Mapping[str, Scalar] | None = None,
    rewards: Mapping[str, RewardFactory] = REWARDS,
) -> Verification:
    """Scores the golden set of a kind of reward, or its attacks."""
    rows = load_attacks(kind) if attack else load_golden(kind, golden)
    if not rows:
        raise UserError(f'the attack pack has nothing for reward "{kind}"')
    with show_work(f"{len(rows):,} verdicts of {kind}"):
        scored = calls.run(_score_all(kind, rows, options or {}, rewards))
    return Verification(kind, attack, tuple(zip(rows, scored, strict=True)))


def read_options(text: str) -> dict[str, Scalar]:
    """Options of a reward from the command line."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise UserError(
            f"--options {text!r} is no JSON: {error}. Write e.g. --options '{{\"strict\": true}}'"
        ) from error
    if not isinstance(options, dict):
        raise UserError(f"--options {text!r} must be a JSON object, e.g. '{{\"strict\": true}}'")
    return options


async def _score_all(
    kind: str, rows: Sequence[GoldenRow], options: Mapping[str, Scalar], rewards: Mapping[str, RewardFactory]
) -> list[Score]:
    """One reward per set of options, all closed in the end."""
    chosen = [{**row.options, **options} for row in rows]
    keys = [json.dumps(each, sort_keys=True) for each in chosen]
    rubrics: dict[str, CompositeReward] = {}
    limit = asyncio.Semaphore(AT_ONCE)

    async def score(row: GoldenRow, key: str) -> Score:
        async with limit:
            task = row.task()
            if (reason := await asyncio.to_thread(rubrics[key].check, task)) is not None:
                return Score.error(reason)
            return (await rubrics[key].score(task, row.trajectory()))[0]

    try:
        for key, each in zip(keys, chosen, strict=True):
            if key not in rubrics:
                rubrics[key] = CompositeReward([(make_reward(kind, each, rewards), 1.0)])
        return list(await asyncio.gather(*(score(row, key) for row, key in zip(rows, keys, strict=True))))
    finally:
        await asyncio.gather(*(rubric.close() for rubric in rubrics.values()))


def render(result: Verification) -> str:
    """What the command prints."""
    lines = [f'{len(result.scored)} {"attacks" if result.is_attack else "golden rows"} on reward "{result.kind}"']
    if result.is_attack:
        lines.append(f"scored: {len(result.wrong)}. None may.")
    else:
        positive, negative = result.rates
        lines += [f"false positives: {positive}", f"false negatives: {negative}"]
        if len(result.parts) > 1:
            lines += [
                f"  {name}: positives {wrong}, negatives {missed}" for name, (wrong, missed) in result.parts.items()
            ]
        if result.kind == "math":
            judged, against = cross_check([row for row, _ in result.scored])
            lines.append(f"second opinion: judged {judged} labels, contradicts {len(against)}")
            lines += [f"contradicted label: {row.id}" for row in against]
    for (kind, reason), count in result.reasons.most_common():
        lines.append(f"{kind.value}: {count} x {reason}")
    for row, score in result.wrong:
        lines.append(
            f"wrong verdict {score.value:g} on {row.id} ({row.category}): {row.answer!r} <- {row.response!r:.160}"
        )
    return "\n".join(lines)


def cross_check(rows: Sequence[GoldenRow]) -> tuple[int, list[GoldenRow]]:
    """How many labels of mathematical rows the second checker could judge, and those it contradicts.

    Only rows with one answer: what several answers are worth is a rule of the reward, not mathematics.
    """
    judged, against = 0, []
    for row in rows:
        answers = find_answers(row.response)
        if row.answer is None or len(answers) != 1 or is_refused(answers[0]):
            continue
        opinion = second_opinion(gold_answer(row.answer), answers[0])
        judged += opinion is not None
        if opinion is (not row.is_correct):
            against.append(row)
    return judged, against


def compare(result: Verification) -> str:
    """Temper's math reward, math-verify alone and string equality on the same golden rows."""
    if result.kind != "math" or result.is_attack:
        raise UserError('--compare is for the golden set of reward "math"')
    rows = [row for row, _ in result.scored if row.answer is not None]
    alone = _math_verify_alone(rows)
    strings = [(find_answers(row.response) or ("",))[-1].strip() == (row.answer or "").strip() for row in rows]
    failed = sum(verdict is None for verdict in alone)
    judged = [(row.is_correct, verdict) for row, verdict in zip(rows, alone, strict=True) if verdict is not None]
    table = [
        (f'reward "{result.kind}"', *result.rates, sum(result.reasons.values())),
        ("math-verify alone", *error_rates(judged), failed),
        ("equal strings", *error_rates(zip((row.is_correct for row in rows), strings, strict=True)), 0),
    ]
    lines = [
        f"{name}\n  false positives {positive}\n  false negatives {negative}\n  without a verdict {missing}"
        for name, positive, negative, missing in table
    ]
    return "\n".join(lines)


def _math_verify_alone(rows: Sequence[GoldenRow]) -> list[bool | None]:
    """On the whole response, as its documentation has it; None where it failed or hung."""
    pool = WorkerPool("temper.rewards.mathematics.checking:verify_response", size=2, deadline_seconds=10.0)

    async def ask(row: GoldenRow) -> bool | None:
        try:
            return bool(await pool.call(row.answer, row.response))
        except WorkerFailed:
            return None

    async def ask_all() -> list[bool | None]:
        return list(await asyncio.gather(*(ask(row) for row in rows)))

    try:
        return calls.run(ask_all())
    finally:
        pool.close()
