"""Alarms: raised once, kept over a resume, silent on noise, configured by one key, in step with their page."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from temper.errors import UserError
from temper.runs.alarms import alarms as alarms_module
from temper.runs.alarms.alarms import Alarms, StopRun, line_of
from temper.runs.alarms.conditions import Array
from temper.runs.alarms.rules import RULES, AlarmRule, as_markdown, configure
from temper.runs.records import AlarmRecord
from temper.runs.store.run_store import RunStore, open_run
from temper.types import Batch, EvaluationResult, Group, Score, StepReport, Task, Trajectory
from tests.fakes.selection import mostly_heavy

DOCS = Path(__file__).parent.parent.parent.parent / "docs" / "alarms.md"
NOTHING = Batch(updates=())


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(
        stage=0, step=step, version=step, loss=0.1, metrics={n.replace("__", "/"): v for n, v in metrics.items()},
        seconds={"rollout": 0.1, "forward_backward": 0.2, "publish": 0.3}, system={"sys/train_tokens": 100.0},
        groups_trained=1, groups_dropped=0, max_staleness=0,
    )  # fmt: skip


def result(step: int, score: float, name: str = "sampled") -> EvaluationResult:
    return EvaluationResult(
        stage=0, step=step, name=name, score=score, low=score - 0.05, high=score + 0.05, num_prompts=8,
        samples_per_prompt=1, constant_score=0.1, budget={},
    )  # fmt: skip


def watch(folder: Path, **settings: Any) -> tuple[Alarms, list[AlarmRecord]]:
    found: list[AlarmRecord] = []
    return Alarms(configure(settings), folder, found.append, lambda text: None), found


def truncated(rates: list[float]) -> list[StepReport]:
    return [report(step, gen__truncation_rate=rate, reward__mean=0.5) for step, rate in enumerate(rates, start=1)]


def test_an_alarm_is_raised_once_and_again_only_after_it_was_over(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path)
    for step in truncated([0.1] * 5 + [0.9] * 20 + [0.1] * 20 + [0.9] * 20):
        alarms.append(step, NOTHING)
    assert [(alarm.rule, alarm.step) for alarm in found] == [("truncation", 8), ("truncation", 48)]
    assert found[0].value == 0.9
    assert found[0].text == "90% of responses are cut at the length limit"
    assert "WARN step 8 truncation: 90% of responses" in line_of(found[0])


def test_a_metric_that_flutters_around_its_limit_is_one_alarm(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path)
    for step in truncated([0.9] * 5 + ([0.1] * 5 + [0.9] * 5) * 10):
        alarms.append(step, NOTHING)
    assert len(found) == 1


def test_a_resumed_run_raises_what_an_uninterrupted_one_raises(tmp_path: Path) -> None:
    rates = [0.1] * 4 + [0.9] * 20 + [0.1] * 20 + [0.9] * 10
    steps = truncated(rates)
    evaluations = {step: result(step, 0.5 - step / 1000) for step in range(5, len(rates), 5)}

    def feed(recorder: Alarms | RunStore, first: int, last: int) -> None:
        for step in steps[first:last]:
            recorder.append(step, NOTHING)
            if step.step in evaluations:
                recorder.evaluation(evaluations[step.step])

    whole, expected = watch(tmp_path, held_out_stalled="warn")
    feed(whole, 0, len(steps))
    assert {"truncation", "held_out_stalled"} == {alarm.rule for alarm in expected}
    for cut in (0, 3, 6, 20, 30, 45, 50):
        folder = tmp_path / f"cut-{cut}"
        store = open_run(folder, config="", resume=False)
        feed(store, 0, cut)
        store.close()
        before, found = watch(folder, held_out_stalled="warn")
        feed(before, 0, cut)
        after, found_after = watch(folder, held_out_stalled="warn")
        after.replay(0)
        assert not found_after, "what was told before is not told again"
        feed(after, cut, len(steps))
        assert [(a.rule, a.step, a.text) for a in (*found, *found_after)] == [
            (a.rule, a.step, a.text) for a in expected
        ]


def test_forgetting_the_past_would_be_noticed(tmp_path: Path) -> None:
    """The mutation: without replay the alarm that is on already would be raised again."""
    alarms, found = watch(tmp_path)
    steps = truncated([0.9] * 20)
    for step in steps[:10]:
        alarms.append(step, NOTHING)
    forgetful, again = watch(tmp_path)
    for step in steps[10:]:
        forgetful.append(step, NOTHING)
    assert len(found) == len(again) == 1


def test_early_stopping_names_the_best_step(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path, held_out_stalled={"level": "stop", "patience": 3})
    for step, score in ((5, 0.4), (10, 0.7), (15, 0.6), (20, 0.7), (25, 0.65)):
        alarms.evaluation(result(step, score, name="greedy"))
        alarms.evaluation(result(step, score))
    assert [(alarm.step, alarm.level) for alarm in found] == [(25, "stop")]
    assert "the best is 0.700 at step 10" in found[0].text
    assert alarms.is_called
    with pytest.raises(StopRun, match=r"at step 10.*--resume"):
        asyncio.run(alarms.hold())
    assert not alarms.is_called


def test_a_pause_ends_with_a_file_and_never_by_an_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms_module, "POLL_SECONDS", 0.01)
    alarms, _ = watch(tmp_path, truncation="pause")
    said: list[str] = []
    alarms.say = said.append
    (tmp_path / "resume").touch()
    for step in truncated([0.9] * 5):
        alarms.append(step, NOTHING)

    async def go() -> None:
        holding = asyncio.create_task(alarms.hold())
        await asyncio.sleep(0.1)
        assert not holding.done(), "the old file must not end the pause"
        (tmp_path / "resume").touch()
        await asyncio.wait_for(holding, 30)

    asyncio.run(go())
    assert f"touch {tmp_path / 'resume'}" in said[0]
    assert said[-1] == "going on"
    assert not (tmp_path / "resume").exists()


def test_a_pause_that_nobody_ends_stops_the_run(tmp_path: Path) -> None:
    alarms, _ = watch(tmp_path, truncation={"level": "pause", "pause_hours": 0})
    for step in truncated([0.9] * 5):
        alarms.append(step, NOTHING)
    with pytest.raises(StopRun, match="nobody ended the pause"):
        asyncio.run(alarms.hold())


def test_defaults_never_stop_but_for_numbers_that_are_none_before_rl_begins_and_where_nothing_was_trained() -> None:
    stopping = [rule.name for rule in RULES if rule.level in ("pause", "stop")]
    assert stopping == ["nothing_to_learn", "not_finite", "readiness"]


def degenerate_step(step: int, *, share: float = 1.0, norm: float = 0.0) -> StepReport:
    shares = {"data__degenerate": share, "data__all_fail": 0.5, "data__all_pass": 0.5}
    return report(step, **shares, policy__grad_norm=norm, adv__abs_mean=0.0)


def two_prompts(step: int) -> Batch:
    """An easy prompt and a hard one, whose answers are all alike."""
    groups = [
        Group(
            id=f"{name}#{step}", draw=2 * step + place, task=Task(id=name, messages=()),
            trajectories=tuple(
                dataclasses.replace(
                    Trajectory.saying(name, "!"), group_id=f"{name}#{step}", index=k, score=Score.of(value)
                )
                for k in range(2)
            ),
        )
        for place, (name, value) in enumerate({"hard": 0.0, "easy": 1.0}.items())
    ]  # fmt: skip
    return Batch(updates=(), groups=tuple(groups))


def test_a_stage_that_never_had_a_signal_stops_with_pass_rates_by_prompt(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path, no_learning_signal="off")
    for step in range(1, 61):
        alarms.append(degenerate_step(step), two_prompts(step))
    assert [(alarm.rule, alarm.step, alarm.level) for alarm in found] == [("nothing_to_learn", 30, "stop")]
    assert "in none of the first 30 steps had a group two different rewards, and the gradient was 0" in found[0].text
    assert "120 answers to 2 prompts: 1 all wrong, 1 all right" in found[0].text
    assert "Pass rates by prompt: 0% of 60 hard, 100% of 60 easy" in found[0].text
    with pytest.raises(StopRun, match=r"stopped after step 30.*Pass rates by prompt.*Change \[\[train\]\]"):
        asyncio.run(alarms.hold())


@pytest.mark.parametrize("odd", [{"share": 0.9}, {"norm": 1e-3}], ids=["a group that differed", "a gradient"])
def test_a_stage_that_had_something_to_learn_once_is_not_stopped_for_its_lack(
    tmp_path: Path, odd: dict[str, float]
) -> None:
    alarms, found = watch(tmp_path, no_learning_signal="off")
    for step in range(1, 100):
        alarms.append(degenerate_step(step, **(odd if step == 17 else {})), NOTHING)
    assert found == []


def test_a_resumed_stage_counts_steps_and_prompts_from_its_beginning(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    store = open_run(folder, config="", resume=False)
    for step in range(1, 21):
        store.append(degenerate_step(step), two_prompts(step))
    store.close()
    after, found = watch(folder, no_learning_signal="off", nothing_to_learn={"patience": 25})
    after.replay(0)
    for step in range(21, 40):
        after.append(degenerate_step(step), two_prompts(step))
    assert [(alarm.rule, alarm.step) for alarm in found] == [("nothing_to_learn", 25)]
    assert "Pass rates by prompt: 0% of 50 hard, 100% of 50 easy" in found[0].text


def test_values_that_are_not_finite_stop_the_run_and_spoil_no_other_rule(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path)
    for step in range(1, 40):
        odd = step == 20
        metrics = {"policy__grad_norm": float("nan") if odd else 1.0, "reward__mean": float("inf") if odd else 0.5}
        alarms.append(report(step, **metrics, reward__std=0.1, gen__len_mean=50.0), NOTHING)
    assert [(alarm.rule, alarm.step, alarm.value) for alarm in found] == [("not_finite", 20, None)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy_colapse": "stop"}, 'rule "entropy_colapse" is unknown. Did you mean "entropy_collapse"?'),
        ({"mismatch": "halt"}, "alarms.mismatch: level 'halt' is unknown. Use one of off, note, warn, pause, stop."),
        ({"length_blowup": {"factr": 3}}, 'key "factr" is unknown. Did you mean "factor"?'),
        ({"length_blowup": {"factor": "3"}}, "alarms.length_blowup.factor='3' is not a number"),
        ({"length_blowup": {"factor": True}}, "alarms.length_blowup.factor=True is not a number"),
        ({"length_blowup": {"recent": 1.5}}, "recent=1.5 is not a whole number"),
        ({"length_blowup": {"recent": 14}}, "use up to 7"),
        ({"length_blowup": {"window": 3}}, "window=3 is too small: it needs at least 15"),
        ({"held_out_stalled": {"patience": 20, "window": 10}}, "needs at least 21"),
        ({"truncation": {"level": "pause", "pause_hours": 1000}}, "pause_hours=1000 is more than 144"),
    ],
)
def test_mistakes_in_the_recipe_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(settings)
    assert message in str(caught.value)


def test_the_recipe_changes_levels_and_thresholds() -> None:
    rules = {
        rule.name: rule
        for rule in configure(
            {"entropy_collapse": "stop", "length_blowup": {"level": "stop", "factor": 3}, "throughput_drop": "off"}
        )
    }
    assert rules["entropy_collapse"].level == rules["length_blowup"].level == "stop"
    assert rules["length_blowup"].thresholds["factor"] == 3
    assert rules["throughput_drop"].level == "off"
    assert len(rules) == len(RULES)


def test_experts_have_a_wider_budget_for_mismatch() -> None:
    def budget(**facts: bool) -> float:
        return next(rule for rule in configure({}, **facts) if rule.name == "mismatch").thresholds["kl"]

    assert (budget(), budget(is_moe=True)) == (0.01, 0.05)


def test_a_rule_that_is_off_is_silent(tmp_path: Path) -> None:
    alarms, found = watch(tmp_path, truncation="off")
    for step in truncated([0.9] * 20):
        alarms.append(step, NOTHING)
    assert not found


def test_the_page_shows_the_rules_as_they_are() -> None:
    assert as_markdown() in DOCS.read_text(), "put as_markdown() of temper.runs.alarms.rules into docs/alarms.md again"


def test_every_rule_can_say_what_it_saw() -> None:
    for rule in RULES:
        rows = {name: np.ones(rule.window) for name in rule.names}
        sight = rule.condition(rows, rule.thresholds)
        if rule.name == "held_out_stalled":
            assert sight.is_true
        rule.saw.format(**{**rule.thresholds, **{name: float(number) for name, number in sight.numbers.items()}})


# How a healthy metric looks: its level, and its relative noise from step to step.
LEVELS: dict[str, tuple[float, float]] = {
    "reward/mean": (0.4, 0.15), "reward/std": (0.45, 0.1), "gen/len_mean": (200.0, 0.15), "policy/entropy": (0.3, 0.3),
    "policy/kl_ref_k3": (0.03, 0.4), "policy/kl_old_k3": (0.002, 0.6), "mismatch/kl_k3": (0.002, 0.5),
    "mismatch/logp_abs_max": (0.8, 0.4), "mismatch/corr": (0.999, 0.0005), "stale/max": (0.0, 0.0),
    "data/degenerate": (0.5, 0.2), "adv/frac_zero": (0.5, 0.2), "data/all_pass": (0.2, 0.4),
    "data/all_fail": (0.3, 0.4), "data/dup_response_rate": (0.3, 0.4), "policy/grad_norm": (0.5, 0.5),
    "adv/abs_mean": (0.5, 0.1), "loss": (0.1, 1.0), "policy/update_norm_ratio": (1e-4, 0.3),
    "gen/truncation_rate": (0.15, 0.25), "data/unscorable": (0.5, 0.5), "data/trained_trajectories": (256.0, 0.02),
    "data/gen_factor": (1.2, 0.1), "gen/tool_error_rate": (0.06, 0.4), "gen/tool_timeout_rate": (0.01, 0.5),
    "sys/train_tokens": (60000.0, 0.15), "seconds/total": (10.0, 0.2), "seconds/rollout": (3.0, 0.3),
    "sys/peak_memory_bytes": (4e10, 0.0), "preference/chosen_logprob": (-40.0, 0.1), "preference/margin": (1.0, 0.3),
    "preference/reward_length_correlation": (0.2, 0.4), "preference/accuracy": (0.7, 0.1),
    "preference/log_ratio": (0.2, 0.5),
    "preference/chosen_reward": (-0.3, 0.3),
    "heldout/score": (0.5, 0.06), "heldout/half_width": (0.06, 0.1), "heldout/step": (1.0, 0.0),
    "heldout/reward": (0.4, 0.05), "heldout/reward_error": (0.02, 0.2), "judge/kappa_fall": (-0.1, 0.3),
    "route/load_max": (2.5, 0.1), "route/entropy": (2.0, 0.1), "route/moved_frac": (0.03, 0.4),
    "route/shift": (0.05, 0.3),
}  # fmt: skip
STEADY = [rule for rule in RULES if rule.level != "off" and rule.name != "readiness"]
"""Rules that look at every step; readiness looks once, before the first."""

Noise = Callable[[np.random.Generator, tuple[int, int]], Array]


def normal(random: np.random.Generator, shape: tuple[int, int]) -> Array:
    return random.standard_normal(shape)


def lingering(random: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Each step remembers half of the one before."""
    noise = random.standard_normal(shape)
    for step in range(1, shape[1]):
        noise[:, step] = 0.5 * noise[:, step - 1] + np.sqrt(0.75) * noise[:, step]
    return noise


def heavy_tailed(random: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Now and then far off: Student's t with four degrees of freedom."""
    return np.asarray(random.standard_t(4, shape) / np.sqrt(2))


@pytest.mark.parametrize("noise", mostly_heavy([normal, lingering, heavy_tailed], keep=(heavy_tailed,)))
@pytest.mark.parametrize("rule", STEADY, ids=lambda rule: rule.name)
def test_stationary_noise_is_no_alarm(rule: AlarmRule, noise: Noise) -> None:
    """Fewer than one in a hundred runs of 1,000 steps raises anything."""
    num_runs, num_steps = 200, 1000
    random = np.random.default_rng(len(rule.name))
    history = {}
    for name in rule.names:
        level, size = LEVELS[name]
        history[name] = level * np.exp(size * np.clip(noise(random, (num_runs, num_steps)), -8, 8))
    raised = np.zeros(num_runs, bool)
    for last in range(rule.least, rule.window):  # young runs, with less to go by at every step
        rows = {name: values[:, :last] for name, values in history.items()}
        raised |= rule.condition(rows, rule.thresholds).is_true
    for part in np.array_split(np.arange(num_runs), 10):
        rows = {name: sliding_window_view(values[part], rule.window, axis=-1) for name, values in history.items()}
        raised[part] |= rule.condition(rows, rule.thresholds).is_true.any(axis=-1)
    assert raised.mean() < 0.01


def test_the_simulation_sees_a_rule_that_is_too_keen() -> None:
    keen = next(rule for rule in configure({"length_blowup": {"factor": 1, "noise": 1, "min_tokens": 0}})
                if rule.name == "length_blowup")  # fmt: skip
    with pytest.raises(AssertionError):
        test_stationary_noise_is_no_alarm(dataclasses.replace(keen), normal)


def preferences_going(chosen: Callable[[int], float], reward: Callable[[int], float], correlation: float) -> set[str]:
    """Rules that fire in 100 steps of preference training, with batches that differ by 30% in log-probability."""
    random, found = np.random.default_rng(0), set()
    history: dict[str, list[float]] = {}
    for step in range(1, 101):
        row = {
            "preference/chosen_logprob": chosen(step) * float(np.exp(0.3 * random.standard_normal())),
            "preference/chosen_reward": reward(step) + 0.02 * float(random.standard_normal()),
            "preference/margin": 0.02 * step,
            "preference/reward_length_correlation": correlation + 0.15 * float(random.standard_normal()),
            "preference/accuracy": 0.8,
            "preference/log_ratio": 0.0,
        }
        for name, value in row.items():
            history.setdefault(name, []).append(value)
        for rule in RULES:
            if rule.name in ("likelihood_displacement", "length_exploitation") and step >= rule.least:
                rows = {name: np.array(history[name][-rule.window :]) for name in rule.names}
                if rule.condition(rows, rule.thresholds).is_true:
                    found.add(rule.name)
    return found


def test_chosen_answers_that_lose_against_the_reference_are_seen_through_batches_that_differ() -> None:
    assert preferences_going(lambda step: -40.0, lambda step: 0.004 * step, 0.1) == set()
    assert preferences_going(lambda step: -40.0, lambda step: -0.01 * step, 0.1) == {"likelihood_displacement"}
    assert preferences_going(lambda step: -40.0, lambda step: 0.004 * step, 0.7) == {"length_exploitation"}
    # The mutation: judged by log-probabilities alone, the fall drowns in what batches differ by.
    assert preferences_going(lambda step: -40.0 - 0.1 * step, lambda step: 0.0, 0.1) == set()
