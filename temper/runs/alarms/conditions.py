"""When an alarm's condition holds: pure functions of the last values of a few metrics. Time is the last axis.

Owns: the statistics. Medians, and the median distance from them as noise: one odd step neither raises an alarm nor
hides one. Leading axes are free, so that thousands of histories can be judged at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = Mapping[str, Array]
"""Each metric over the same checks, oldest first."""
Given = Mapping[str, float]
"""Thresholds. "recent" is how many of the last checks must agree."""


class Sight(NamedTuple):
    """What a condition found."""

    is_true: NDArray[np.bool_]
    numbers: dict[str, Array]
    """For the text; "value" is what the alarm reports."""


Condition = Callable[[Rows, Given], Sight]

NORMAL = 1.4826
"""Deviation of a normal distribution over its median absolute deviation."""


def _median(values: Array) -> Array:
    return np.asarray(np.median(values, axis=-1))


def _noise(values: Array) -> Array:
    return NORMAL * _median(np.abs(values - _median(values)[..., None]))


def _jitter(values: Array) -> Array:
    return NORMAL * _median(np.abs(np.diff(values, axis=-1))) / np.sqrt(2)


def _recent(values: Array, given: Given) -> Array:
    return values[..., -int(given["recent"]) :]


def _before(values: Array, given: Given) -> Array:
    return values[..., : -int(given["recent"])]


def checks_failed(rows: Rows, given: Given) -> Sight:
    """Something did not hold before training began. The thresholds were applied where it was measured."""
    failed = rows["ready/failed"][..., -1]
    return Sight(failed > 0, {"value": failed})


def reward_jumped(rows: Rows, given: Given) -> Sight:
    """The reward rose by more than the noise of steps and by more than half of what responses differ by."""
    reward = rows["reward/mean"]
    before, now = _median(_before(reward, given)), _median(_recent(reward, given))
    spread = _median(_before(rows["reward/std"], given))
    least = np.maximum(given["min_jump"], given["spread"] * spread)
    is_true = (now - before > least) & (now - before > given["noise"] * _noise(_before(reward, given)))
    return Sight(is_true, {"value": now, "before": before})


def length_grew(rows: Rows, given: Given) -> Sight:
    """Noise is that between neighbours: measured from the median, a steady growth would hide itself."""
    length = rows["gen/len_mean"]
    before, now = _median(_before(length, given)), _median(_recent(length, given))
    grown = now - before
    is_true = (now > given["factor"] * before) & (grown > given["min_tokens"])
    return Sight(is_true & (grown > given["noise"] * _jitter(_before(length, given))), {"value": now, "before": before})


def entropy_fell(rows: Rows, given: Given) -> Sight:
    """Entropy fell against the oldest checks of the window. A solved task is left out: nothing is left to explore."""
    entropy = rows["policy/entropy"]
    before, now = _median(entropy[..., : int(given["oldest"])]), _median(_recent(entropy, given))
    is_solved = _median(_recent(rows["data/all_pass"], given)) >= given["solved"]
    return Sight(
        (now < given["factor"] * before) & (now < given["floor"]) & ~is_solved, {"value": now, "before": before}
    )


def experts_are_crowded(rows: Rows, given: Given) -> Sight:
    """The most chosen experts get a larger share than in the oldest checks of the window."""
    load = rows["route/load_max"]
    before, now = _median(load[..., : int(given["oldest"])]), _median(_recent(load, given))
    return Sight((now > given["factor"] * before) & (now > given["floor"]), {"value": now, "before": before})


def routers_are_certain(rows: Rows, given: Given) -> Sight:
    """The entropy of routers fell against the oldest checks of the window."""
    entropy = rows["route/entropy"]
    before, now = _median(entropy[..., : int(given["oldest"])]), _median(_recent(entropy, given))
    return Sight(now < given["factor"] * before, {"value": now, "before": before})


def kl_rose(rows: Rows, given: Given) -> Sight:
    """The distance from the reference, or from the policy that drew, rose; whichever is further is reported."""
    found = []
    for name in ("policy/kl_ref_k3", "policy/kl_old_k3"):
        before = _before(rows[name], given)
        usual, now = _median(before), _recent(rows[name], given).min(axis=-1)
        is_high = (now > given["floor"]) & (now > given["factor"] * usual)
        found.append((is_high & (now > usual + given["noise"] * _noise(before)), now, usual))
    (is_reference, reference, reference_usual), (is_old, old, old_usual) = found
    is_first = is_reference | (~is_old & (reference >= old))
    return Sight(
        is_reference | is_old,
        {"value": np.where(is_first, reference, old), "before": np.where(is_first, reference_usual, old_usual)},
    )


def mismatch_over_budget(rows: Rows, given: Given) -> Sight:
    """Weights that moved since the tokens were drawn, by age or by earlier updates of the same batch, differ for a good
    reason: then only the divergence counts, with a wider budget."""
    divergence = _recent(rows["mismatch/kl_k3"], given).min(axis=-1)
    gap = _recent(rows["mismatch/logp_abs_max"], given).min(axis=-1)
    correlation = _recent(rows["mismatch/corr"], given).max(axis=-1)
    is_fresh = _recent(rows["stale/max"] + rows["policy/kl_old_k3"], given).max(axis=-1) == 0
    is_apart = (divergence > given["kl"]) | (gap > given["gap"]) | (correlation < given["corr"])
    is_true = np.where(is_fresh, is_apart, divergence > given["moved"] * given["kl"])
    return Sight(is_true, {"value": divergence, "worst": gap, "correlation": correlation})


def _is_repeating(rows: Rows, given: Given) -> NDArray[np.bool_]:
    """Members of a group say the same, and it is not the right answer of an easy task."""
    same, solved = rows["data/dup_response_rate"], rows["data/all_pass"]
    return np.asarray(
        (_median(_recent(same, given)) >= given["same"]) & (_median(_recent(solved, given)) < given["solved"])
    )


def signal_is_gone(rows: Rows, given: Given) -> Sight:
    """Too many groups are degenerate, and not because their members are identical: that is an alarm of its own."""
    share = _median(_recent(rows["data/degenerate"], given))
    idle = _median(_recent(rows["adv/frac_zero"], given))
    is_true = (share >= given["limit"]) & (idle >= given["idle"]) & ~_is_repeating(rows, given)
    passes, fails = (_median(_recent(rows[name], given)) for name in ("data/all_pass", "data/all_fail"))
    return Sight(is_true, {"value": share, "passes": passes, "fails": fails})


def nothing_was_learned(rows: Rows, given: Given) -> Sight:
    """Since the stage began, in so many checks, no group told answers apart and no gradient came from elsewhere. Asked
    once: a stage that had a signal and lost it is the subject of other rules."""
    degenerate, norm = rows["data/degenerate"], rows["policy/grad_norm"]
    is_time = degenerate.shape[-1] == int(given["patience"])
    is_true = is_time & (degenerate.min(axis=-1) == 1) & (norm.max(axis=-1) <= given["norm"])
    passes, fails = (rows[name].mean(axis=-1) for name in ("data/all_pass", "data/all_fail"))
    return Sight(np.asarray(is_true), {"value": norm.max(axis=-1), "passes": passes, "fails": fails})


def members_are_identical(rows: Rows, given: Given) -> Sight:
    return Sight(_is_repeating(rows, given), {"value": _median(_recent(rows["data/dup_response_rate"], given))})


def gradient_is_zero(rows: Rows, given: Given) -> Sight:
    """The gradient is zero though the advantages are not."""
    norm = _recent(rows["policy/grad_norm"], given).max(axis=-1)
    return Sight((norm == 0) & (_recent(rows["adv/abs_mean"], given).min(axis=-1) > 0), {"value": norm})


def is_not_finite(rows: Rows, given: Given) -> Sight:
    loss, norm = rows["loss"][..., -1], rows["policy/grad_norm"][..., -1]
    return Sight(~(np.isfinite(loss) & np.isfinite(norm)), {"value": norm, "loss": loss})


def weights_stand_still(rows: Rows, given: Given) -> Sight:
    """The weights do not change though there is a gradient."""
    change = _recent(rows["policy/update_norm_ratio"], given).max(axis=-1)
    norm = _recent(rows["policy/grad_norm"], given).min(axis=-1)
    return Sight((change == 0) & (norm > 0), {"value": change, "norm": norm})


def rate_is_high(*names: str) -> Condition:
    """The sum of some shares, or one distance, is above a limit."""

    def condition(rows: Rows, given: Given) -> Sight:
        total = rows[names[0]]
        for name in names[1:]:
            total = total + rows[name]
        share = _median(_recent(total, given))
        return Sight(share > given["limit"], {"value": share})

    return condition


def scores_are_missing(rows: Rows, given: Given) -> Sight:
    """Responses without a score over all that were drawn: the trained ones, as often as groups were drawn for one."""
    missing = _recent(rows["data/unscorable"], given)
    scored = _recent(rows["data/trained_trajectories"] * np.maximum(1.0, rows["data/gen_factor"]), given)
    share = _median(missing / np.maximum(1.0, missing + scored))
    return Sight(share > given["limit"], {"value": share})


def judge_changed(rows: Rows, given: Given) -> Sight:
    """Kappa is below where it began by more than chance explains: the interval was taken where it was measured."""
    fall = rows["judge/kappa_fall"][..., -1]
    return Sight(fall > given["min_fall"], {"value": fall})


def throughput_fell(rows: Rows, given: Given) -> Sight:
    """Fewer tokens a second, and longer steps: shorter answers alone also give fewer, and are not a fault."""
    seconds = rows["seconds/total"]
    speed = rows["sys/train_tokens"] / np.maximum(seconds, 1e-9)
    before, now = _median(_before(speed, given)), _median(_recent(speed, given))
    is_longer = _median(_recent(seconds, given)) > _median(_before(seconds, given))
    is_true = (now < given["factor"] * before) & (before - now > given["noise"] * _noise(_before(speed, given)))
    return Sight(is_true & is_longer, {"value": now, "before": before})


def trainer_waits(rows: Rows, given: Given) -> Sight:
    """Only where sampling and training overlap: some trained token is older than the weights."""
    waited, total = (_recent(rows[name], given).sum(axis=-1) for name in ("seconds/rollout", "seconds/total"))
    share = waited / np.maximum(total, 1e-9)
    is_overlapping = rows["stale/max"].max(axis=-1) > 0
    return Sight(is_overlapping & (share > given["limit"]), {"value": share})


def memory_grows(rows: Rows, given: Given) -> Sight:
    """Memory grows in every quarter of the window; a longest batch that was just met makes a single stair."""
    memory = rows["sys/peak_memory_bytes"] / 2**30
    quarters = [_median(part) for part in np.array_split(memory, 4, axis=-1)]
    steps = [later > given["factor"] * earlier for earlier, later in itertools.pairwise(quarters)]
    return Sight(np.logical_and.reduce(steps), {"value": quarters[-1], "before": quarters[0]})


def chosen_are_displaced(rows: Rows, given: Given) -> Sight:
    """Margins rose and the chosen answers became less likely, at every recent check: by themselves, or against the
    reference, where easy and hard batches do not hide it. Noise is that between neighbours: a steady fall would hide
    itself."""
    is_falling: NDArray[np.bool_] | bool = False
    for name in ("preference/chosen_logprob", "preference/chosen_reward"):
        before, recent = _before(rows[name], given), _recent(rows[name], given)
        usual = _median(before)
        fallen = usual - _median(recent)
        is_large = (fallen > given["share"] * np.abs(usual)) & (fallen > given["noise"] * _jitter(before))
        is_falling = is_falling | (is_large & (recent.max(axis=-1) < usual))
    margin, chosen = rows["preference/margin"], rows["preference/chosen_logprob"]
    is_apart = _median(_recent(margin, given)) > _median(_before(margin, given))
    numbers = {
        "value": _median(_recent(chosen, given)),
        "before": _median(_before(chosen, given)),
        "reward": _median(_recent(rows["preference/chosen_reward"], given)),
    }
    return Sight(np.asarray(is_falling & is_apart), numbers)


def length_is_rewarded(rows: Rows, given: Given) -> Sight:
    """Only where there is a reference: without one the reward is a mean log-probability, which length moves anyway."""
    correlation = _recent(rows["preference/reward_length_correlation"], given)
    share = _recent(rows["preference/accuracy"], given)
    now = _median(correlation)
    return Sight((now > given["limit"]) & (correlation.min(axis=-1) > 0), {"value": now, "accuracy": _median(share)})


def reward_left_heldout(rows: Rows, given: Given) -> Sight:
    """From the first two evaluations of the window to the last two: the reward rose by more than its noise and by more
    than the held-out interval could hide, and the held-out score, though not perfect, did not rise."""
    reward, error, score = rows["heldout/reward"], rows["heldout/reward_error"], rows["heldout/score"]
    rise = reward[..., -2:].min(axis=-1) - reward[..., :2].max(axis=-1)
    change = score[..., -2:].mean(axis=-1) - score[..., :2].mean(axis=-1)
    noise = np.hypot(error[..., -1], error[..., 0])
    width = np.maximum(rows["heldout/half_width"][..., -1], rows["heldout/half_width"][..., 0])
    is_up = (rise > given["min_rise"]) & (rise > given["noise"] * noise) & (rise > given["widths"] * width)
    return Sight(is_up & (change <= 0) & (score[..., -1] < 1.0), {"value": rise, "change": change})


def heldout_stalled(rows: Rows, given: Given) -> Sight:
    score, step = rows["heldout/score"], rows["heldout/step"]
    patience = int(given["patience"])
    if score.shape[-1] <= patience:
        return Sight(np.zeros(score.shape[:-1], bool), {"value": score[..., -1]})
    best = score[..., :-patience].argmax(axis=-1)[..., None]
    top = np.take_along_axis(score, best, axis=-1)[..., 0]
    later = score[..., -patience:].max(axis=-1)
    at = np.take_along_axis(step, best, axis=-1)[..., 0]
    return Sight(later <= top + given["min_gain"], {"value": later, "best": top, "step": at})
