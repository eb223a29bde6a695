"""What a batch looked like, in numbers: rewards, lengths, groups without signal, staleness.

Owns: definitions over whole batches. "Generated" is what this step rolled, trained and dropped groups together, so that
filtering does not flatter the reward. Refuses: metrics of the policy (objectives/objective.py).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from temper.types import EventKind, Group, Status, Trajectory

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
        **_staleness_metrics(trained, version),
    }


def measure_advantages(advantages_N: Tensor, lengths_B: Tensor) -> dict[str, float]:
    """Over trajectories; where credit differs inside one, its mean counts."""
    if not len(lengths_B):
        return {}
    by_trajectory_B = torch.stack([part.mean() for part in torch.split(advantages_N, lengths_B.tolist())])
    return {
        "adv/mean": by_trajectory_B.mean().item(),
        "adv/std": by_trajectory_B.std(unbiased=False).item(),
        "adv/min": by_trajectory_B.amin().item(),
        "adv/max": by_trajectory_B.amax().item(),
        "adv/abs_mean": by_trajectory_B.abs().mean().item(),
        "adv/frac_zero": (by_trajectory_B == 0).double().mean().item(),
    }


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
        "gen/truncation_rate": statistics.fmean(t.status is Status.TRUNCATED_LENGTH for t in trajectories),
        "gen/turns_mean": statistics.fmean(len(t.turns) for t in trajectories),
        **_event_metrics(trajectories),
    }


def _event_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    """What agents did, per episode and per call; nothing for runs without environments that report events."""
    events = [event for t in trajectories for turn in t.turns for event in turn.events]
    if not events:
        return {}
    counts = Counter(event.kind for event in events)
    calls = max(1, counts[EventKind.TOOL_CALL])
    num_episodes = len(trajectories)
    num_solved = sum(t.score.value is not None and t.score.value >= 1.0 for t in trajectories)
    return {
        "gen/tool_calls_mean": counts[EventKind.TOOL_CALL] / num_episodes,
        "gen/tool_error_rate": counts[EventKind.TOOL_ERROR] / calls,
        "gen/tool_timeout_rate": counts[EventKind.TOOL_TIMEOUT] / calls,
        "gen/bad_call_rate": counts[EventKind.BAD_CALL] / num_episodes,
        "gen/permission_denied": counts[EventKind.DENIED] / num_episodes,
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
    }


def _staleness_metrics(trained: list[Trajectory], version: int) -> dict[str, float]:
    if not trained:
        return {}
    ages = [version - trajectory.oldest_version for trajectory in trained]
    newest = [max(v for turn in t.turns for v in turn.completion.versions) for t in trained]
    is_mixed = [new > trajectory.oldest_version for new, trajectory in zip(newest, trained, strict=True)]
    return {
        "stale/mean": statistics.fmean(ages),
        "stale/max": float(max(ages)),
        "stale/mixed_version_frac": statistics.fmean(is_mixed),
    }
