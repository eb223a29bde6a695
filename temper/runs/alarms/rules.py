"""The alarms a run raises by itself: what each watches, when it fires, what it says. One table.

Owns: names, thresholds, levels, words. Refuses: statistics (conditions.py), history and actions (alarms.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from temper.errors import UserError, did_you_mean
from temper.runs.alarms import conditions
from temper.runs.alarms.conditions import Condition
from temper.types import Scalar

Level = Literal["off", "note", "warn", "pause", "stop"]
LEVELS: tuple[Level, ...] = get_args(Level)
LONGEST_PAUSE_HOURS = 144.0
"""Shorter than the longest sleep of a source of batches (rollout/source.py)."""
MOE_DIVERGENCE = 0.05
"""Budget of "mismatch" for a mixture of experts, whose routers disagree sooner."""


@dataclass(frozen=True, kw_only=True)
class AlarmRule:
    """A condition over the last checks of some metrics. A check is a step or an evaluation that has all of `needs`."""

    name: str
    level: Level
    """What is done; "off": nothing, ever."""
    needs: tuple[str, ...] = ()
    """heldout/* are made at each evaluation, seconds/* and loss at each step; the others are metrics of a step."""
    otherwise: Mapping[str, float] = field(default_factory=dict)
    """Metrics that some runs lack, with the value that is taken then. Without `needs`, one of them must be there."""
    window: int
    """Checks remembered."""
    least: int
    """Checks without which nothing is said: young runs are noisy."""
    condition: Condition
    thresholds: Mapping[str, float]
    calm: int = 10
    """Checks in a row that must be quiet before it is raised again."""
    pause_hours: float = 24.0
    """With level "pause": how long the run waits for a person before it stops."""
    names_prompts: bool = False
    """Whether it also says how often each prompt was solved, in its first checks of a stage."""
    is_about_nan: bool = False
    """Values that are not finite are its subject; all other rules leave such checks out."""
    saw: str
    meaning: str
    advice: str

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.needs, *self.otherwise)


_ALL_PASS = {"data/all_pass": 0.0}
_REPEATING = {"recent": 10, "same": 0.9, "solved": 0.9}

RULES: tuple[AlarmRule, ...] = (
    AlarmRule(
        name="reward_hacking", level="warn", window=32, least=4, calm=1, condition=conditions.reward_left_heldout,
        needs=("heldout/score", "heldout/half_width", "heldout/reward", "heldout/reward_error"),
        thresholds={"min_rise": 0.05, "noise": 6, "widths": 1.5},
        saw="reward rose by {value:.3g} while the held-out score changed by {change:+.3f}",
        meaning="The policy found what the reward pays for and the task does not ask for.",
        advice="Read the rollouts with the highest reward; mend or gate the reward; stop at the best held-out step.",
    ),
    AlarmRule(
        name="reward_jump", level="note", window=30, least=25, condition=conditions.reward_jumped,
        needs=("reward/mean", "reward/std"), thresholds={"recent": 5, "noise": 6, "min_jump": 0.1, "spread": 0.5},
        saw="reward jumped from {before:.3g} to {value:.3g}",
        meaning="An exploit was found, or the verifier or the data changed. Learning is seldom that quick.",
        advice="Compare rollouts from before and after the jump.",
    ),
    AlarmRule(
        name="length_blowup", level="warn", window=50, least=15, condition=conditions.length_grew,
        needs=("gen/len_mean", "reward/mean"), thresholds={"recent": 5, "factor": 2, "noise": 6, "min_tokens": 6},
        saw="responses grew from {before:.1f} to {value:.1f} tokens",
        meaning="Length is being rewarded, or the policy has lost its end token.",
        advice="Look at gen/truncation_rate and at long rollouts; use a length penalty or token-mean weighting.",
    ),
    AlarmRule(
        name="entropy_collapse", level="warn", window=200, least=20, condition=conditions.entropy_fell,
        needs=("policy/entropy", "reward/mean"), otherwise=_ALL_PASS,
        thresholds={"recent": 5, "oldest": 10, "factor": 0.2, "floor": 0.05, "solved": 0.5},
        saw="entropy fell from {before:.3g} to {value:.2g} nats a token, and the task is not solved",
        meaning="The policy is certain before it is right: groups agree and nothing new is tried.",
        advice="Lower the learning rate, raise clip high, add an entropy or KL term; go back to an earlier checkpoint.",
    ),
    AlarmRule(
        name="kl_spike", level="warn", window=30, least=12, condition=conditions.kl_rose,
        otherwise={"policy/kl_ref_k3": 0.0, "policy/kl_old_k3": 0.0},
        thresholds={"recent": 2, "factor": 10, "floor": 0.1, "noise": 10},
        saw="KL per token rose from {before:.2g} to {value:.2g} nats",
        meaning="One update moved the policy far: too high a learning rate, or a batch with extreme advantages.",
        advice="Lower the learning rate or max_grad_norm, use fewer updates per batch, raise the KL coefficient.",
    ),
    AlarmRule(
        name="mismatch", level="warn", window=3, least=3, condition=conditions.mismatch_over_budget,
        needs=("mismatch/kl_k3", "mismatch/logp_abs_max", "stale/max"),
        otherwise={"mismatch/corr": 1.0, "policy/kl_old_k3": 0.0},
        thresholds={"recent": 3, "kl": 0.01, "gap": 5, "corr": 0.99, "moved": 10},
        saw="sampler and trainer disagree: KL {value:.2g}, worst token {worst:.2g} nats, correlation {correlation:.3f}",
        meaning="Their numerics, weights or sampling settings differ: the update is not for the policy that acted.",
        advice="Read docs/mismatch.md; try engine.numerics = \"exact\", or a correction such as token_tis.",
    ),
    AlarmRule(
        name="expert_collapse", level="warn", window=200, least=20, condition=conditions.experts_are_crowded,
        needs=("route/load_max",), thresholds={"recent": 5, "oldest": 10, "factor": 1.5, "floor": 2},
        saw="the most chosen experts do {value:.2g} times the mean work, {before:.2g} times at first",
        meaning="Routers send ever more tokens to few experts; the others learn nothing and are lost in the end.",
        advice="Use model.routers = {balance = 0.001}, or {frozen = true}; lower the learning rate.",
    ),
    AlarmRule(
        name="router_collapse", level="warn", window=200, least=20, condition=conditions.routers_are_certain,
        needs=("route/entropy",), thresholds={"recent": 5, "oldest": 10, "factor": 0.5},
        saw="the routers' entropy fell from {before:.3g} to {value:.2g} nats",
        meaning="Routers are ever surer of the same few experts; tokens try no others, and load crowds next.",
        advice="Use model.routers = {z = 0.001} or {frozen = true}; lower the learning rate; look at route/load_max.",
    ),
    AlarmRule(
        name="routes_moved", level="warn", window=5, least=5, condition=conditions.rate_is_high("route/moved_frac"),
        needs=("route/moved_frac",), thresholds={"recent": 5, "limit": 0.2},
        saw="the trainer's routers would not choose {value:.0%} of the experts that the sampler took",
        meaning="Answers come from other weights or numerics: many updates of a batch, old samples, or other routes.",
        advice="Lower the learning rate, updates_per_batch or max_staleness; freeze routers; read docs/experts.md.",
    ),
    AlarmRule(
        name="router_shift", level="warn", window=5, least=5, condition=conditions.rate_is_high("route/shift"),
        needs=("route/shift",), thresholds={"recent": 5, "limit": 0.22},
        saw="during the updates of a batch routers moved by {value:.2g} nats from the experts that they had chosen",
        meaning="exp(-0.22) is 0.8, the floor of rspo: the mean token is cut to it, and tokens no longer differ.",
        advice="Use fewer updates per batch or a lower learning rate; model.routers = {frozen = true}; replay routes.",
    ),
    AlarmRule(
        name="no_learning_signal", level="warn", window=10, least=10, condition=conditions.signal_is_gone,
        needs=("data/degenerate", "adv/frac_zero"),
        otherwise={**_ALL_PASS, "data/all_fail": 0.0, "data/dup_response_rate": 0.0},
        thresholds={**_REPEATING, "limit": 0.9, "idle": 0.5},
        saw="{value:.0%} of groups have equal rewards ({passes:.0%} all right, {fails:.0%} all wrong)",
        meaning="Tasks are too easy or too hard for this policy, or the reward does not tell answers apart.",
        advice="Mix in tasks of another difficulty, give partial credit, use larger groups or supervised warm-up.",
    ),
    AlarmRule(
        name="nothing_to_learn", level="stop", window=200, least=1, condition=conditions.nothing_was_learned,
        needs=("data/degenerate", "policy/grad_norm"), otherwise={**_ALL_PASS, "data/all_fail": 0.0},
        thresholds={"patience": 30, "norm": 1e-8}, names_prompts=True,
        saw="in none of the first {patience:.0f} steps had a group two different rewards, and the gradient was 0 "
            "({passes:.0%} of groups all right, {fails:.0%} all wrong)",
        meaning="Nothing has been trained. Tasks are too easy or too hard, or the reward does not tell answers apart.",
        advice="Change [[train]] or [[reward]], raise rollout.group_size, or train a stage of kind \"sft\" first.",
    ),
    AlarmRule(
        name="zero_gradient", level="warn", window=3, least=3, condition=conditions.gradient_is_zero,
        needs=("policy/grad_norm",), otherwise={"adv/abs_mean": 1.0}, thresholds={"recent": 3},
        saw="the gradient is exactly 0 though advantages are not",
        meaning="Parameters are frozen, the loss is detached from them, or every token is clipped or masked.",
        advice="Look for requires_grad = False and at the clip and mask fractions.",
    ),
    AlarmRule(
        name="not_finite", level="stop", window=1, least=1, condition=conditions.is_not_finite,
        needs=("loss",), otherwise={"policy/grad_norm": 0.0}, thresholds={}, is_about_nan=True,
        saw="loss {loss:.3g}, gradient norm {value:.3g}",
        meaning="Numbers overflowed. The trainer refuses such updates itself; this one came past it.",
        advice="Go back to the last checkpoint; lower the learning rate; use float32 to find the place.",
    ),
    AlarmRule(
        name="parameters_unchanged", level="warn", window=5, least=5, condition=conditions.weights_stand_still,
        needs=("policy/update_norm_ratio", "policy/grad_norm"), thresholds={"recent": 5},
        saw="no weight has changed, though the gradient has norm {norm:.3g}",
        meaning="The learning rate is 0, by its setting or its schedule, or the optimiser was given nothing to move.",
        advice="Look at policy/learning_rate and optim.schedule; with an adapter, check that it is what is trained.",
    ),
    AlarmRule(
        name="identical_members", level="warn", window=10, least=10, condition=conditions.members_are_identical,
        needs=("data/dup_response_rate",), otherwise=_ALL_PASS, thresholds=_REPEATING,
        saw="{value:.0%} of responses equal another of their group, and the task is not solved",
        meaning="Groups cannot compare anything: the temperature is too low, or entropy is gone.",
        advice="Sample at temperature 1 without top_k or top_p; go back to where entropy was higher.",
    ),
    AlarmRule(
        name="truncation", level="warn", window=5, least=5, condition=conditions.rate_is_high("gen/truncation_rate"),
        needs=("gen/truncation_rate", "reward/mean"), thresholds={"recent": 5, "limit": 0.5},
        saw="{value:.0%} of responses are cut at the length limit",
        meaning="Answers do not fit, or the policy does not end them; their reward is about the limit, not the task.",
        advice="Raise sampling.max_new_tokens, train on examples that end, or shape the reward by length.",
    ),
    AlarmRule(
        name="verifier_errors", level="warn", window=5, least=3, condition=conditions.scores_are_missing,
        needs=("data/unscorable", "data/trained_trajectories", "data/gen_factor"),
        thresholds={"recent": 3, "limit": 0.02},
        saw="{value:.1%} of responses could not be scored",
        meaning="The verifier crashes, times out or finds nothing to judge by; what remains is a biased sample.",
        advice="Run \"temper report\" for the reasons; give the verifier more time; mend the tasks it fails on.",
    ),
    AlarmRule(
        name="judge_changed", level="warn", window=1, least=1, calm=1, condition=conditions.judge_changed,
        needs=("judge/kappa_fall",), thresholds={"min_fall": 0},
        saw="a judge agrees less with its labelled set than at the start: kappa fell by at least {value:.3f}",
        meaning="The endpoint serves another model under the same name: what is rewarded now is something else.",
        advice="Look at judge/kappa/* and the verdicts of group \"labelled\"; restore the judge; resume from before.",
    ),
    AlarmRule(
        name="tool_errors", level="warn", window=5, least=5,
        condition=conditions.rate_is_high("gen/tool_error_rate", "gen/tool_timeout_rate"),
        needs=("gen/tool_error_rate", "gen/tool_timeout_rate"), thresholds={"recent": 5, "limit": 0.25},
        saw="{value:.0%} of tool calls failed or timed out",
        meaning="A tool or its service is down, or the policy calls it wrongly.",
        advice="Look at the events of some rollouts; raise rollout.retries; restart the service.",
    ),
    AlarmRule(
        name="throughput_drop", level="warn", window=60, least=30, condition=conditions.throughput_fell,
        needs=("sys/train_tokens", "seconds/total"), thresholds={"recent": 10, "factor": 0.5, "noise": 4},
        saw="throughput fell from {before:,.0f} to {value:,.0f} trained tokens a second, and steps take longer",
        meaning="The machine is shared or throttled, a verifier or tool got slow, or the cache is too small.",
        advice="Look at the time split of a step, at sys/preemptions and at what else runs on the machine.",
    ),
    AlarmRule(
        name="trainer_starving", level="note", window=20, least=10, condition=conditions.trainer_waits,
        needs=("seconds/rollout", "seconds/total", "stale/max"), thresholds={"recent": 10, "limit": 0.6},
        saw="the trainer waits {value:.0%} of the time for rollouts, though answers go on over steps",
        meaning="Sampling is the bottleneck.",
        advice="Raise rollout.max_staleness or engine.max_running so that more is drawn together; shorten rollouts.",
    ),
    AlarmRule(
        name="memory_growth", level="warn", window=100, least=100, condition=conditions.memory_grows,
        needs=("sys/peak_memory_bytes",), thresholds={"factor": 1.03},
        saw="memory grew steadily from {before:.2f} to {value:.2f} GiB",
        meaning="Something keeps what it should let go, e.g. a reward that collects transcripts; or lengths grow.",
        advice="Look at gen/len_max; checkpoint often; leave out your own rewards and environments one by one.",
    ),
    AlarmRule(
        name="likelihood_displacement", level="warn", window=50, least=30, condition=conditions.chosen_are_displaced,
        needs=("preference/chosen_logprob", "preference/margin"), otherwise={"preference/chosen_reward": 0.0},
        thresholds={"recent": 10, "share": 0.05, "noise": 8},
        saw="chosen answers became less likely (log-probability {before:.3g} to {value:.3g}, reward {reward:+.2g}) "
        "while the margin rose",
        meaning="Pairs are separated by making both answers unlikely; what becomes likely is in no data set.",
        advice="Use rpo or dpo_shift, raise beta, lower the learning rate, leave out near-identical pairs.",
    ),
    AlarmRule(
        name="length_exploitation", level="warn", window=30, least=20, condition=conditions.length_is_rewarded,
        needs=("preference/reward_length_correlation", "preference/accuracy", "preference/log_ratio"),
        thresholds={"recent": 20, "limit": 0.5},
        saw="implicit reward and length correlate by {value:.2f} (accuracy {accuracy:.0%})",
        meaning="The policy learns that longer is better, from pairs whose chosen side is the longer one.",
        advice="Use length_normalized, ipo or simpo; balance the pairs by preference/length_difference.",
    ),
    AlarmRule(
        name="readiness", level="stop", window=1, least=1, calm=1, condition=conditions.checks_failed,
        needs=("ready/failed",),
        thresholds={"prompts": 200, "format": 0.9, "errors": 0.01, "mixed": 0.3, "distinct": 1.5, "truncated": 0.1},
        saw="{value:.0f} of the five checks before RL failed",
        meaning="RL would learn little or the wrong thing from this policy. Looked at once, before the first RL step.",
        advice="Read the table it prints, and docs/rejection.md; \"stop\" refuses to start, \"note\" starts anyway.",
    ),
    AlarmRule(
        name="held_out_stalled", level="off", window=1000, least=2, calm=1, condition=conditions.heldout_stalled,
        needs=("heldout/score", "heldout/step"), thresholds={"patience": 5, "min_gain": 0},
        saw="no better held-out score for {patience:.0f} evaluations; the best is {best:.3f} at step {step:.0f}",
        meaning="This recipe has given what it has, or has begun to overfit its reward.",
        advice="Take the best step's checkpoint; change the data or the reward before training on.",
    ),
)  # fmt: skip


def configure(settings: Mapping[str, str | Mapping[str, Scalar]], *, is_moe: bool = False) -> tuple[AlarmRule, ...]:
    """The rules of a run: the table, changed by the recipe's `alarms`: a level, or a table with level and thresholds.

    alarms = { entropy_collapse = "stop", length_blowup = { level = "pause", factor = 3 }, throughput_drop = "off" }
    """
    known = {rule.name: rule for rule in RULES}
    if is_moe:
        mismatch = known["mismatch"]
        known["mismatch"] = dataclasses.replace(mismatch, thresholds={**mismatch.thresholds, "kl": MOE_DIVERGENCE})
    for name, setting in settings.items():
        if name not in known:
            raise UserError(
                f'alarms: rule "{name}" is unknown.{did_you_mean(name, known)} Rules: {", ".join(sorted(known))}.'
            )
        known[name] = _changed(known[name], {"level": setting} if isinstance(setting, str) else setting)
    return tuple(known.values())


def _changed(rule: AlarmRule, setting: Mapping[str, Scalar]) -> AlarmRule:
    wanted = setting.get("level", "warn" if rule.level == "off" else rule.level)
    level = next((level for level in LEVELS if level == wanted), None)
    if level is None:
        raise UserError(f"alarms.{rule.name}: level {wanted!r} is unknown. Use one of {', '.join(LEVELS)}.")
    numbers: dict[str, float] = {}
    allowed = (*rule.thresholds, "window", "pause_hours")
    for key, value in setting.items():
        if key == "level":
            continue
        if key not in allowed:
            raise UserError(
                f'alarms.{rule.name}: key "{key}" is unknown.{did_you_mean(key, allowed)} '
                f"Allowed: level, {', '.join(allowed)}."
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UserError(f"alarms.{rule.name}.{key}={value!r} is not a number from 0 up.")
        numbers[key] = float(value)
    changed = dataclasses.replace(
        rule,
        level=level,
        window=int(numbers.pop("window", rule.window)),
        pause_hours=numbers.pop("pause_hours", rule.pause_hours),
        thresholds={**rule.thresholds, **numbers},
    )
    _require_sense(changed, rule)
    return changed


def _require_sense(changed: AlarmRule, rule: AlarmRule) -> None:
    """Counts are whole and fit into the window; a pause ends."""
    where = f"alarms.{rule.name}"
    counts = {key: changed.thresholds[key] for key in ("recent", "oldest", "patience") if key in changed.thresholds}
    for key, count in counts.items():
        if count < 1 or count != int(count):
            raise UserError(f"{where}.{key}={count:g} is not a whole number from 1 up.")
        most = rule.least if rule.thresholds[key] == rule.least else rule.least // 2  # half is for what was before
        if count > most and key != "patience":
            raise UserError(
                f"{where}.{key}={count:g} is too many: this rule speaks after {rule.least}, use up to {most}."
            )
    least = max(rule.least, 1 + int(counts.get("patience", 0)))
    if changed.window < least:
        raise UserError(f"{where}.window={changed.window} is too small: it needs at least {least} checks.")
    if changed.pause_hours > LONGEST_PAUSE_HOURS:
        raise UserError(f"{where}.pause_hours={changed.pause_hours:g} is more than {LONGEST_PAUSE_HOURS:g}.")


def as_markdown() -> str:
    """The table of docs/alarms.md."""
    lines = ["| rule | level | watches | checks | thresholds | says | usually means | try |", "|" + "---|" * 8]
    for rule in RULES:
        watches = ", ".join(f"`{name}`" for name in rule.names)
        thresholds = ", ".join(f"{name} {value:g}" for name, value in rule.thresholds.items()) or "none"
        cells = (f"`{rule.name}`", rule.level, watches, f"{rule.least} to {rule.window}", thresholds, rule.saw)
        lines.append(f"| {' | '.join((*cells, rule.meaning, rule.advice))} |")
    return "\n".join(lines)
