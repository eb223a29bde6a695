"""What a batch looked like, in numbers: rewards, lengths, groups without signal, staleness.

Owns: definitions over whole batches, before they are split. "Generated" is what this step rolled, trained and dropped
groups together, so that filtering does not flatter the reward. A histogram is ten shares, name/00 to name/09; a
percentile is the value at rank ceil(n * q). Refuses: metrics of the policy (objectives/policy/measures.py).
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from temper.batching.reflection import reflection_metrics
from temper.objectives import Credit, Objective, PolicyObjective
from temper.objectives.objective import shaped
from temper.types import REFUSED, EventKind, Finish, Group, Status, Trajectory, array_of

BINS = 10
SOLVED = 1.0
"""A response with at least this score is correct."""
GRAM = 4
RECENT_STEPS = 8
"""How long a prompt counts as seen."""
_FAILED = (Status.TOOL_ERROR, Status.TIMEOUT, Status.ABORTED)


def measure_groups(groups: Sequence[Group], dropped: Sequence[tuple[Group, str]], version: int) -> dict[str, float]:
    """Metrics of rewards, generation, data and staleness. `version` is that of the weights to be trained."""
    generated = [*groups, *(group for group, _ in dropped)]
    trajectories = [trajectory for group in generated for trajectory in group.trajectories]
    trained = [trajectory for group in groups for trajectory in group.trainable]
    return {
        **_reward_metrics([reward for group in generated for reward in group.rewards]),
        **_part_metrics([trajectory for group in generated for trajectory in group.trainable]),
        **_generation_metrics([trajectory for trajectory in trajectories if trajectory.num_tokens]),
        **_data_metrics(generated, num_accepted=len(groups)),
        "data/unscorable": float(sum(not t.score.is_value for t in trajectories)),
        "data/env_error": float(sum(t.status in _FAILED for t in trajectories)),
        "gen/env_reset_fail": float(sum(t.status in _FAILED and not t.turns for t in trajectories)),
        "sys/replayed": float(sum(event.kind is EventKind.REPLAYED for t in trajectories for event in t.events)),
        **_staleness_metrics(trained, version),
        **_source_metrics(generated),
    }


def measure_advantages(advantages_N: Tensor, lengths_B: Tensor) -> dict[str, float]:
    """Over trajectories, where the mean counts if credit differs inside one; and over tokens, as adv/token_*."""
    if not len(lengths_B):
        return {}
    by_trajectory_B = torch.stack([part.mean() for part in torch.split(advantages_N, lengths_B.tolist())])
    return _advantage_metrics("adv/", by_trajectory_B) | _advantage_metrics("adv/token_", advantages_N)


def measure_shaping(objective: Objective, credit: Credit) -> dict[str, float]:
    """Mean reward after the objective's shaping; nothing where it does not shape."""
    if not isinstance(objective, PolicyObjective) or not objective.shaping or not len(credit.rewards):
        return {}
    return {"reward/shaped_mean": shaped(objective, credit).rewards.mean().item()}


def _advantage_metrics(prefix: str, values: Tensor) -> dict[str, float]:
    return {
        f"{prefix}mean": values.mean().item(),
        f"{prefix}std": values.std(unbiased=False).item(),
        f"{prefix}min": values.amin().item(),
        f"{prefix}max": values.amax().item(),
        f"{prefix}abs_mean": values.abs().mean().item(),
        f"{prefix}frac_zero": (values == 0).double().mean().item(),
    }


class RecentPrompts:
    """Which tasks the last RECENT_STEPS steps trained. Part of a checkpoint: a resumed run measures the same."""

    def __init__(self) -> None:
        self._steps: deque[list[str]] = deque(maxlen=RECENT_STEPS)

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """data/prompt_repeat_rate of a step's groups; then they count as seen."""
        seen = {name for step in self._steps for name in step}
        names = [group.task.id for group in groups]
        self._steps.append(names)
        return {"data/prompt_repeat_rate": statistics.fmean(name in seen for name in names)} if names else {}

    def state(self) -> list[str]:
        """One line per step: its task ids as a JSON list."""
        return [json.dumps(names) for names in self._steps]

    def load_state(self, state: Iterable[str]) -> None:
        self._steps = deque((json.loads(line) for line in state), maxlen=RECENT_STEPS)


def _reward_metrics(rewards: list[float]) -> dict[str, float]:
    if not rewards:
        return {}
    return {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}


def _part_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """Each part of the reward over the members that have it, before and after weighting."""
    if all(len(trajectory.score_parts) < 2 for trajectory in trajectories):
        return {}  # a single part is the reward
    found: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for suffix, parts in (("", trajectory.score_parts), ("_weighted", trajectory.weighted_parts)):
            for name, score in parts.items():
                if score.value is not None:
                    found.setdefault(f"reward/{name}{suffix}", []).append(score.value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _generation_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    if not trajectories:
        return {}
    lengths = [trajectory.num_tokens for trajectory in trajectories]
    return {
        "gen/len_mean": statistics.fmean(lengths),
        "gen/len_max": float(max(lengths)),
        "gen/len_p95": float(_percentile(lengths, 95)),
        **_lengths_by_verdict(trajectories),
        "gen/eos_rate": statistics.fmean(t.turns[-1].completion.finish is Finish.STOP for t in trajectories),
        "gen/interrupt_rate": statistics.fmean(
            any(turn.completion.finish is Finish.INTERRUPT for turn in t.turns) for t in trajectories
        ),
        "gen/closed_rate": statistics.fmean(
            any(len(turn.completion.injected) for turn in t.turns) for t in trajectories
        ),
        "gen/format_valid_rate": statistics.fmean(t.status is not Status.BAD_FORMAT for t in trajectories),
        **_repetition(trajectories),
        **reflection_metrics(trajectories),
        "gen/truncation_rate": statistics.fmean(t.status is Status.TRUNCATED_LENGTH for t in trajectories),
        "gen/turns_mean": statistics.fmean(len(t.turns) for t in trajectories),
        **_event_metrics(trajectories),
    }


def _lengths_by_verdict(trajectories: list[Trajectory]) -> dict[str, float]:
    """Mean length of correct and of wrong responses. Wrong ones growing alone: the model rambles when it is lost."""
    by_verdict: dict[str, list[int]] = {}
    for trajectory in trajectories:
        if trajectory.score.value is not None:
            name = "gen/len_correct" if trajectory.score.value >= SOLVED else "gen/len_wrong"
            by_verdict.setdefault(name, []).append(trajectory.num_tokens)
    return {name: statistics.fmean(lengths) for name, lengths in by_verdict.items()}


def _repetition(trajectories: list[Trajectory]) -> dict[str, float]:
    """Share of a response's 4-grams of drawn tokens that it has drawn before, over responses that have any."""
    shares = []
    for trajectory in trajectories:
        drawn = [turn.completion.drawn(turn.completion.token_ids) for turn in trajectory.turns]
        count, different = count_grams(drawn)
        if count:
            shares.append(1 - different / count)
    return {"gen/repetition_rate": statistics.fmean(shares)} if shares else {}


def count_grams(pieces: Sequence[NDArray[np.int32]]) -> tuple[int, int]:
    """How many 4-grams of neighbouring tokens the pieces have together, and how many different ones. Exact."""
    starts = np.flatnonzero(np.concatenate([np.arange(len(piece)) < len(piece) - GRAM + 1 for piece in pieces]))
    if not len(starts):
        return 0, 0
    ids = np.concatenate(pieces)
    # A token gets the place of one of its occurrences as its name: numbers so small that four of them are one number.
    last = np.empty(int(ids.max()) + 1, dtype=np.uint32)
    last[ids] = np.arange(len(ids), dtype=np.uint32)
    names = last[ids].astype(np.uint64)
    if len(ids) > 1 << 16:  # then two of them, and the pairs get names
        pairs = np.unique(names[:-1] << np.uint64(32) | names[1:], return_inverse=True)[1].astype(np.uint64)
        grams = pairs[starts] << np.uint64(32) | pairs[starts + 2]
    else:
        grams = names[starts]
        for place in range(1, GRAM):
            grams = grams << np.uint64(16) | names[starts + place]
    grams.sort()
    return len(starts), 1 + int(np.count_nonzero(grams[1:] != grams[:-1]))


def _event_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """What agents did, per episode and per call; nothing for runs without environments that report events."""
    events = [event for t in trajectories for event in t.events]
    if not events:
        return {}
    counts = Counter(event.kind for event in events)
    calls = max(1, counts[EventKind.TOOL_CALL])
    num_episodes = len(trajectories)
    num_solved = sum(t.score.value is not None and t.score.value >= SOLVED for t in trajectories)
    return {
        "gen/tool_calls_mean": counts[EventKind.TOOL_CALL] / num_episodes,
        "gen/tool_error_rate": counts[EventKind.TOOL_ERROR] / calls,
        "gen/tool_timeout_rate": counts[EventKind.TOOL_TIMEOUT] / calls,
        "gen/bad_call_rate": counts[EventKind.BAD_CALL] / num_episodes,
        "gen/permission_denied": sum(counts[kind] for kind in REFUSED) / num_episodes,
        "gen/model_calls_mean": counts[EventKind.MODEL_CALL] / num_episodes,
        "gen/side_effect_rate": counts[EventKind.SIDE_EFFECT] / num_episodes,
        "gen/cost_per_success": sum(event.cost for event in events) / max(1, num_solved),
    }


def _data_metrics(generated: Sequence[Group], num_accepted: int) -> dict[str, float]:
    """Shares of generated groups. A task score is 1 when solved and 0 when not; values between are neither."""
    if not generated:
        return {}
    rewards = [group.rewards for group in generated]
    return {
        "data/degenerate": statistics.fmean(group.is_degenerate for group in generated),
        "data/all_pass": statistics.fmean(bool(r) and min(r) >= 1.0 and max(r) - min(r) <= 1e-8 for r in rewards),
        "data/all_fail": statistics.fmean(bool(r) and max(r) <= 0.0 and max(r) - min(r) <= 1e-8 for r in rewards),
        "data/group_std_mean": statistics.fmean(statistics.stdev(r) if len(r) > 1 else 0.0 for r in rewards),
        "data/effective_groups": float(num_accepted),
        "data/gen_factor": len(generated) / max(1, num_accepted),
        # In whole numbers: 10 * 0.3 is less than 3, and a group of 3 in 10 would land one bin too low.
        **_histogram("data/p_hist", Counter(BINS * sum(x >= SOLVED for x in r) // len(r) for r in rewards if r)),
        **_duplicates(generated),
    }


def _duplicates(generated: Sequence[Group]) -> dict[str, float]:
    """Share of responses whose drawn tokens are those of another member of their group."""
    shared = []
    for group in generated:
        drawn = [
            tuple(array_of(turn.completion.token_ids).tobytes() for turn in t.turns)
            for t in group.trajectories
            if t.num_tokens
        ]
        counts = Counter(drawn)
        shared += [counts[tokens] > 1 for tokens in drawn]
    return {"data/dup_response_rate": statistics.fmean(shared)} if shared else {}


def _source_metrics(generated: Sequence[Group]) -> dict[str, float]:
    """The same for every source of tasks, where a stage tells its sources apart."""
    found: dict[str, float] = {}
    for name in sorted({group.task.source for group in generated} - {""}):
        groups = [group for group in generated if group.task.source == name]
        rewards = [reward for group in groups for reward in group.rewards]
        drawn = [t for group in groups for t in group.trajectories if t.num_tokens]
        found[f"source/{name}/groups"] = float(len(groups))
        found[f"source/{name}/degenerate"] = statistics.fmean(group.is_degenerate for group in groups)
        if rewards:
            found[f"source/{name}/reward"] = statistics.fmean(rewards)
        if drawn:
            found[f"source/{name}/length"] = statistics.fmean(t.num_tokens for t in drawn)
            found[f"source/{name}/truncated"] = statistics.fmean(t.status is Status.TRUNCATED_LENGTH for t in drawn)
    return found


def _staleness_metrics(trained: list[Trajectory], version: int) -> dict[str, float]:
    if not trained:
        return {}
    ages = [version - trajectory.oldest_version for trajectory in trained]
    drawn_by: Counter[int] = Counter()
    for turn in (turn for trajectory in trained for turn in trajectory.turns):
        found, counts = np.unique(turn.completion.drawn(turn.completion.versions), return_counts=True)
        drawn_by.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    in_flight = [trajectory.newest_version - trajectory.oldest_version for trajectory in trained]
    return {
        "stale/mean": statistics.fmean(ages),
        "stale/max": float(max(ages)),
        "stale/p95": float(_percentile(ages, 95)),
        "stale/in_flight": statistics.fmean(in_flight),
        "stale/in_queue": statistics.fmean(ages) - statistics.fmean(in_flight),
        "stale/mixed_version_frac": statistics.fmean(versions > 0 for versions in in_flight),
        **_histogram("stale/token_hist", {version - drawn: count for drawn, count in drawn_by.items()}),
    }


def _percentile(values: Sequence[int], percent: int) -> int:
    return sorted(values)[-(-len(values) * percent // 100) - 1]


def _histogram(name: str, counts: Mapping[int, int]) -> dict[str, float]:
    """Shares by place; what lies beyond the last bin is counted there. All ten are reported, also empty ones."""
    if not counts:
        return {}
    total = sum(counts.values())
    inside = {place: count for place, count in counts.items() if place < BINS - 1}
    beyond = total - sum(inside.values())
    return {f"{name}/{place:02d}": ({**inside, BINS - 1: beyond}.get(place, 0)) / total for place in range(BINS)}
