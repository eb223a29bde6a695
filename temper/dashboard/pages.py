"""The answer behind each page, as plain data. Owns: what a page shows. Refuses: HTML; text of a model stays text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from temper.dashboard import queries, recipes
from temper.dashboard.database import Database, reading
from temper.dashboard.prompts import spread
from temper.dashboard.series import Point, by_stage, make_axes, together
from temper.dashboard.suites import suites
from temper.dashboard.tokens import Tokenizers
from temper.runs.metrics import describe
from temper.runs.store.arrays import unpack_array

OVERVIEW = (
    "reward/mean", "reward/std", "policy/entropy", "policy/kl_ref_k3", "policy/kl_old_k3", "policy/grad_norm",
    "policy/clip_frac_high", "policy/clip_frac_low", "gen/len_mean", "gen/len_max", "gen/truncation_rate",
    "mismatch/kl_k3", "mismatch/logp_abs_mean", "stale/mean", "stale/max", "data/degenerate", "sys/rollout_tok_s",
    "sys/train_tok_s",
)  # fmt: skip
DATA = ("data/all_pass", "data/all_fail", "data/degenerate")
CHOOSING = ("data/skipped_share", "data/solved_share", "data/in_band", "data/pool_", "data/weight/")
"""Beginnings of metrics that show what choosers did."""
LOSS = "loss"
"""Every step has one, supervised ones included; it is a column of its own, not a metric."""
RECENT_STEPS = 50
"""Steps over which idle time and staleness are shown."""
WAITING = ("rollout", "data")
"""Phases in which the trainer has nothing to do."""
NUM_BINS = 10
NUM_PROMPTS = 20
"""Prompts that are listed as the hardest, and as many as the easiest."""
NUM_FAMILIES = 12
FLOAT_ARRAYS = ("behavior_logprobs", "policy_logprobs", "entropies", "advantages", "weights")


class Missing(Exception):
    """What was asked for is not in the run."""


def overview(folder: Path) -> dict[str, Any]:
    with reading(folder) as database:
        known = queries.metric_names(database)
        names = [name for name in dict.fromkeys((*OVERVIEW, *known)) if name in known and _is_of_overview(name)]
        return {
            "series": _series(database, [*names, LOSS]),
            "proximal": _proximal(folder),
            "evaluations": queries.evaluations(database),
            "alarms": queries.alarms(database),
            "events": queries.events(database),
        }


def _is_of_overview(name: str) -> bool:
    return name in OVERVIEW or name.startswith("reward/")  # every part of the reward


def _proximal(folder: Path) -> list[str]:
    """Log-probabilities that each stage takes for those of the proximal policy, where its recipe names them."""
    objectives = (stage.get("objective") for stage in recipes.recipe_stages(folder))
    return [str(table.get("proximal", "")) if isinstance(table, dict) else "" for table in objectives]


def axes(folder: Path) -> dict[str, Any]:
    """By stage: tokens and seconds that had passed at the end of each step."""
    with reading(folder) as database:
        return make_axes(queries.progress(database))


def metrics(folder: Path) -> list[dict[str, str]]:
    with reading(folder) as database:
        names = queries.metric_names(database)
    found = []
    for name in names:
        meant = describe(name)
        keys = ("unit", "reduction", "meaning")
        found.append({"name": name, **{key: "" if meant is None else getattr(meant, key) for key in keys}})
    return [*found, {"name": LOSS, "unit": "loss", "reduction": "once per step", "meaning": "What the step minimised"}]


def series(folder: Path, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    with reading(folder) as database:
        return _series(database, names)


def _series(database: Database, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """A metric that the run does not have is an empty curve."""
    return {
        name: by_stage(queries.losses(database) if name == LOSS else queries.metric(database, name)) for name in names
    }


def rollouts(folder: Path, wanted: queries.RolloutFilter, offset: int, limit: int) -> dict[str, Any]:
    with reading(folder) as database:
        rows, more = queries.rollouts(database, wanted, offset, limit)
        is_counted = not more and (rows or not offset)  # the list reached its end
        total, is_whole = (offset + len(rows), True) if is_counted else queries.count_rollouts(database, wanted)
    return {"rows": rows, "more": more, "total": total, "is_whole": is_whole, "statuses": queries.STATUSES}


def group(folder: Path, stage: int, step: int, group_id: str) -> dict[str, Any]:
    with reading(folder) as database:
        found = _group(database, stage, step, group_id)
        members = queries.members(database, stage, step, group_id)
        rows = queries.token_rows(database, stage, step, group_id)
    shown = ("member", "status", "score", "score_kind", "reason", "parts", "weighted", "num_tokens", "text")
    return {
        **found,
        "members": [
            {**{name: member[name] for name in shown}, "mean_advantage": _mean_advantage(rows, member["member"])}
            for member in members
        ],
    }


def _group(database: Database, stage: int, step: int, group_id: str) -> dict[str, Any]:
    found = queries.group(database, stage, step, group_id)
    if found is None:
        raise Missing(f"step {step} of stage {stage} has no group {group_id[:80]!r}")
    return found


def _mean_advantage(rows: Sequence[Mapping[str, Any]], member: int) -> float | None:
    """Over the tokens that the member drew; None: it was not trained."""
    trained = [row for row in rows if row["member"] == member and row["advantages"] is not None]
    drawn = [_array(row, "advantages")[_array(row, "loss_mask") == 1] for row in trained]
    values = np.concatenate(drawn) if drawn else np.zeros(0)
    return float(values.mean()) if len(values) else None


def trajectory(folder: Path, key: tuple[int, int, str], member: int, tokenizers: Tokenizers) -> dict[str, Any]:
    with reading(folder) as database:
        found = _group(database, *key)
        said = next((row for row in queries.members(database, *key) if row["member"] == member), None)
        rows = [row for row in queries.token_rows(database, *key) if row["member"] == member]
        verdicts = queries.verdicts(database, *key, member)
    if said is None:
        raise Missing(f"group {key[2][:80]!r} has no member {member}")
    return {**found, **said, "verdicts": verdicts, "rows": [_token_row(row, folder, tokenizers) for row in rows]}


def _token_row(row: Mapping[str, Any], folder: Path, tokenizers: Tokenizers) -> dict[str, Any]:
    ids = _array(row, "token_ids").tolist()
    whole = {name: _array(row, name).tolist() for name in ("loss_mask", "versions")}
    # Six digits are more than a chart shows and half the size of a float64's seventeen.
    parts = {
        name: None if row[name] is None else [float(f"{value:.6g}") for value in _array(row, name).tolist()]
        for name in FLOAT_ARRAYS
    }
    return {"pieces": tokenizers.pieces(folder, ids), "token_ids": ids, **whole, **parts}


def _array(row: Mapping[str, Any], name: str) -> Any:
    return unpack_array(row[name], name, row["codec"])


def data(folder: Path) -> dict[str, Any]:
    with reading(folder) as database:
        rates = queries.group_rates(database)
        tasks = queries.group_tasks(database)
        outcomes, distinct = queries.ledger_counts(database)
        hardest, easiest, ties = _extremes(database, rates, tasks)
        curves = _series(database, DATA)
        chosen = _series(database, [name for name in queries.metric_names(database) if name.startswith(CHOOSING)])
        spreads = spread(database)
    dropped = {name.removeprefix("dropped:"): count for name, count in outcomes.items() if name.startswith("dropped:")}
    return {
        "histogram": _histogram(rates),
        "series": curves,
        "ledger": {
            "drawn": sum(outcomes.values()),
            "distinct": distinct,
            "trained": outcomes.get("trained", 0),
            "dropped": dropped,
        },
        "hardest": hardest,
        "easiest": easiest,
        "ties": ties,
        "curriculum": _curriculum(rates, tasks),
        "chosen": chosen,
        "spread": spreads,
    }


Rate = tuple[int, int, str, float]


def _histogram(rates: Sequence[Rate]) -> dict[str, Any]:
    """Group pass rates in the first and in the last quarter of the steps that drew any."""
    steps = sorted({(stage, step) for stage, step, _, _ in rates})
    quarter = max(1, len(steps) // 4)
    early, late = set(steps[:quarter]), set(steps[-quarter:])
    values = [rate for *_, rate in rates]
    low, high = min([0.0, *values]), max([1.0, *values])
    edges = np.linspace(low, high, NUM_BINS + 1)

    def counts(chosen: set[tuple[int, int]]) -> list[int]:
        return np.histogram([rate for stage, step, _, rate in rates if (stage, step) in chosen], edges)[0].tolist()

    return {"edges": edges.tolist(), "early": counts(early), "late": counts(late)}


def _extremes(
    database: Database, rates: Sequence[Rate], tasks: Mapping[tuple[int, int, str], str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, dict[str, int]]]:
    """Prompts by their mean pass rate over all draws: lowest first, highest first; and how many tie with the last of
    each list, so that nobody takes the cut for a rank."""
    drawn: dict[str, list[float]] = {}
    newest: dict[str, tuple[int, int, str]] = {}
    for stage, step, group_id, rate in rates:
        task_id = tasks[stage, step, group_id]
        drawn.setdefault(task_id, []).append(rate)
        newest[task_id] = (stage, step, group_id)
    means = sorted((sum(values) / len(values), -len(values), task_id) for task_id, values in drawn.items())

    def describe_prompt(rate: float, task_id: str) -> dict[str, Any]:
        stage, step, group_id = newest[task_id]
        prompt = _group(database, stage, step, group_id)["prompt"]
        asked = str(prompt[-1]["content"]) if prompt else ""
        place = {"stage": stage, "step": step, "group_id": group_id}
        shown = asked[: queries.SHOWN_TEXT]
        return {"task_id": task_id, "rate": rate, "draws": len(drawn[task_id]), "prompt": shown, **place}

    easiest = sorted(means, key=lambda entry: (-entry[0], entry[1], entry[2]))
    listed = [[describe_prompt(rate, task) for rate, _, task in order[:NUM_PROMPTS]] for order in (means, easiest)]
    ties = {name: _ties(order) for name, order in (("hardest", means), ("easiest", easiest))}
    return listed[0], listed[1], ties


def _ties(order: Sequence[tuple[float, int, str]]) -> dict[str, int]:
    """Prompts with the pass rate of the last one listed: all of them, and those in the list."""
    last = order[min(len(order), NUM_PROMPTS) - 1][0] if order else 0.0
    equal = [place for place, (rate, _, _) in enumerate(order) if rate == last]
    return {"all": len(equal), "listed": sum(place < NUM_PROMPTS for place in equal)}


def _curriculum(rates: Sequence[Rate], tasks: Mapping[tuple[int, int, str], str]) -> dict[str, Any] | None:
    """Mean pass rate by task family over steps; None when all tasks are of one family."""
    families = Counter(_family(tasks[stage, step, group_id]) for stage, step, group_id, _ in rates)
    if len(families) < 2:
        return None
    sums: dict[str, dict[tuple[int, int], list[float]]] = {name: {} for name, _ in families.most_common(NUM_FAMILIES)}
    for stage, step, group_id, rate in rates:
        steps = sums.get(_family(tasks[stage, step, group_id]))
        if steps is not None:
            steps.setdefault((stage, step), []).append(rate)
    points: dict[str, list[Point]] = {
        name: [(*key, sum(values) / len(values)) for key, values in steps.items()] for name, steps in sums.items()
    }
    return {name: by_stage(found) for name, found in points.items()}


def _family(task_id: str) -> str:
    """Generator or file of a task: "arithmetic:1:17" is of "arithmetic"."""
    return task_id.partition(":")[0]


def systems(folder: Path) -> dict[str, Any]:
    with reading(folder) as database:
        names = [name for name in queries.metric_names(database) if name.startswith(("sys/", "stale/", "flow/"))]
        return {
            "seconds": together(queries.seconds(database)),
            "series": _series(database, names),
            "units": {name: _unit(name) for name in names},
            "staleness": _staleness(queries.drawn_versions(database, RECENT_STEPS)),
            "idle": _idle(database, names),
        }


def experts(folder: Path, stage: int | None, step: int | None) -> dict[str, Any]:
    """How tokens of one step were spread over experts, the last one unless told otherwise: by layer, tokens of each
    expert over the mean of its layer."""
    with reading(folder) as database:
        steps = queries.loaded_steps(database)
        if not steps:
            return {"steps": []}
        wanted = steps[-1] if stage is None or step is None else (stage, step)
        found = queries.loads(database, *wanted)
        if found is None:
            raise Missing(f"no experts were counted in step {wanted[1]} of stage {wanted[0]}")
        layers, counts = found
        mean = np.maximum(counts.mean(axis=1, keepdims=True), 1e-9)
        shown = {"layers": layers, "loads": (counts / mean).round(3).tolist(), "tokens": counts.tolist()}
        return {"steps": steps, "stage": wanted[0], "step": wanted[1], **shown}


def _unit(name: str) -> str:
    meant = describe(name)
    return "" if meant is None else meant.unit


def _staleness(rows: Sequence[tuple[int, bytes, bytes, str]]) -> dict[str, list[int]]:
    """How many versions old the weights were that drew each row's oldest token, over the last steps."""
    ages: Counter[int] = Counter()
    for version, mask, versions, codec in rows:
        drawn = unpack_array(versions, "versions", codec)[unpack_array(mask, "loss_mask", codec) == 1]
        drawn = drawn[drawn >= 0]  # no version drew the rest: it is a data set's or an opponent's
        if len(drawn):
            ages[version - 1 - int(drawn.min())] += 1  # a step trains on the weights before its own version
    return {"ages": sorted(ages), "counts": [ages[age] for age in sorted(ages)]}


def _idle(database: Database, names: Sequence[str]) -> dict[str, float | None]:
    """Shares of the wall time of the last steps. As the run measured them; else from its phases, which tell about the
    sampler only when the two take turns."""
    measured = {
        side: [value for *_, value in queries.metric(database, name)[-RECENT_STEPS:] if value is not None]
        for side, name in (("trainer", "sys/trainer_idle"), ("sampler", "sys/sampler_idle"))
        if name in names
    }
    idle: dict[str, float | None] = {side: sum(found) / len(found) for side, found in measured.items() if found}
    spent = queries.recent_seconds(database, RECENT_STEPS)
    total = sum(spent.values())
    if total > 0:
        idle.setdefault("trainer", sum(spent.get(name, 0.0) for name in WAITING) / total)
        stale = [value for *_, value in queries.metric(database, "stale/max")[-RECENT_STEPS:] if value]
        if "rollout" in spent and not stale:
            idle.setdefault("sampler", 1 - spent["rollout"] / total)
    return {"trainer": None, "sampler": None, **idle}


def evaluations(folder: Path) -> dict[str, Any]:
    with reading(folder) as database:
        held_out, audits = queries.evaluations(database), queries.audits(database)
    results, unreadable = suites(folder)
    return {"evaluations": held_out, "audits": audits, "suites": results, "unreadable": unreadable}


def config(folder: Path) -> dict[str, Any]:
    try:
        text = recipes.recipe_text(folder)
    except OSError as error:
        raise Missing(f"the run has no config.toml ({error.strerror})") from error
    stages = recipes.recipe_stages(folder)
    return {"toml": text, "stages": stages, "changed": recipes.changed(stages)}
