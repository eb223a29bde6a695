"""Rows, masks and credit."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from temper.batching import CreditRules, assign_credit, make_batch, pack, rows_of, rows_of_groups, with_column
from temper.objectives import POLICY_GRADIENTS, Scored, Tokens, measures_batch, objective_loss, resolve
from temper.rewards.score import PartRule, combine, weigh
from temper.types import Sample, Score, Status

PLAIN = [
    name
    for name, preset in POLICY_GRADIENTS.items()
    if not (preset.needs - {"reference", "proximal"}) and not measures_batch(preset)
    if preset.advantage.name != "per_reward"
]
"""Policy gradients that need nothing but log-probabilities and one reward. The others: tests/trainer."""


def rules(preset: str = "dapo", overrides=None, **fields) -> CreditRules:
    return CreditRules(objective=resolve(preset, overrides), max_new_tokens=8, **fields)


def credited(groups, given: CreditRules):
    return assign_credit(rows_of_groups(groups), groups, given, version=0)


def drawn(row: Sample, values: list) -> list:
    return [value for value, is_drawn in zip(values, row.loss_mask, strict=True) if is_drawn]


def no_pass(rows, policy):
    raise AssertionError(f"no {policy} pass is needed")


# Rows


def test_masks_come_from_lengths_and_the_drawn_end_token_is_trained(group, turn) -> None:
    # Pad id = end id = 0. One answer stopped after 3 tokens, the last is the end token; one was cut at 5.
    stopped, cut = turn([7, 0], [5, 6, 0]), turn([7, 0], [5, 0, 0, 6, 5])
    made = group([(1.0, [stopped]), (0.0, [cut])], statuses=[Status.COMPLETED, Status.TRUNCATED_LENGTH])
    rows = rows_of_groups([made])
    assert [row.num_actions for row in rows] == [3, 5]
    assert rows[0].loss_mask == [0, 0, 1, 1, 1]
    assert rows[1].token_ids == [7, 0, 5, 0, 0, 6, 5]


def test_a_turn_that_extends_everything_before_it_continues_the_row(group, turn) -> None:
    trajectory = group([(1.0, [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 8, 9], [5], version=2)])]).trajectories[0]
    (row,) = rows_of(trajectory)
    assert row.token_ids == [1, 2, 3, 4, 8, 9, 5]
    assert row.loss_mask == [0, 0, 1, 1, 0, 0, 1]
    assert row.versions == [-1, -1, 0, 0, -1, -1, 2]
    assert row.behavior_logprobs == pytest.approx([0, 0, -0.1, -0.2, 0, 0, -0.1])


@pytest.mark.parametrize(
    "second_prompt",
    [[1, 2, 8, 9], [1, 2, 3, 9, 8], [1, 2, 3], [9, 2, 3, 4, 8]],
    ids=["thoughts removed", "token rewritten", "shorter", "system prompt changed"],
)
def test_a_prompt_that_rewrote_history_forks_a_row(group, turn, second_prompt) -> None:
    trajectory = group([(1.0, [turn([1, 2], [3, 4]), turn(second_prompt, [5])])]).trajectories[0]
    first, second = rows_of(trajectory)
    assert (first.token_ids, first.loss_mask) == ([1, 2, 3, 4], [0, 0, 1, 1])
    assert (second.token_ids, second.loss_mask) == ([*second_prompt, 5], [0] * len(second_prompt) + [1])


def test_every_drawn_token_is_trained_exactly_once_however_rows_fork(group, turn) -> None:
    rng = random.Random(0)
    for _ in range(50):
        history, turns, said = [1], [], []
        for _ in range(rng.randint(1, 5)):
            if rng.random() < 0.4:
                history = history[: rng.randint(1, len(history))]
            history = history + [rng.randint(2, 9) for _ in range(rng.randint(0, 3))]
            answer = [rng.randint(2, 9) for _ in range(rng.randint(0, 3))]
            turns.append(turn(history, answer))
            said += answer
            history = history + answer
        rows = rows_of(group([(1.0, turns)]).trajectories[0])
        assert [token for row in rows for token in drawn(row, row.token_ids)] == said
        assert all(row.num_actions for row in rows)


def test_unscorable_and_failed_members_have_no_rows(group) -> None:
    made = group([(1.0, 2), (None, 2), (0.0, 2)], statuses=[Status.COMPLETED, Status.COMPLETED, Status.TIMEOUT])
    assert [row.index for row in rows_of_groups([made])] == [0]


# Credit


def test_an_unscorable_member_is_left_out_of_the_mean(group) -> None:
    batch = credited([group([(1.0, 1), (None, 1), (0.0, 1), (0.0, 1)])], rules("dr_grpo"))
    (rows,) = batch.updates
    assert [row.index for row in rows] == [0, 2, 3]
    assert [drawn(row, row.advantages)[0] for row in rows] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert batch.metrics["data/unscorable"] == 1


def test_credit_sits_on_drawn_tokens_only(group, turn) -> None:
    two_turns = [turn([1], [3]), turn([1, 3, 8], [5])]
    (rows,) = credited([group([(1.0, two_turns), (0.0, 2)])], rules("dr_grpo")).updates
    assert rows[0].advantages == [0, 0.5, 0, 0.5]
    assert rows[0].weights == pytest.approx([0, 1 / 16, 0, 1 / 16])


def test_turns_are_compared_with_those_that_saw_the_same(group, turn) -> None:
    """The second turns of the first two members begin behind the same first one; the third said something else."""
    members = [
        (1.0, [turn([1], [3]), turn([1, 3, 8], [5])]),
        (0.0, [turn([1], [3]), turn([1, 3, 8], [6])]),
        (0.0, [turn([1], [4]), turn([1, 4, 8], [5])]),
    ]
    given = rules("dr_grpo", {"advantage": {"name": "state_returns", "gamma": 1.0}})
    (rows,) = credited([group(members)], given).updates
    found = [drawn(row, row.advantages) for row in rows]
    assert found == [pytest.approx(x) for x in ([4 / 3, 2 / 3 + 0.5], [-2 / 3, -1 / 3 - 0.5], [-2 / 3, -1 / 3])]


def test_turns_that_began_in_a_state_of_one_name_are_compared_whatever_was_said_before(group, turn) -> None:
    """The numbers of docs/environments.md: both reach the goal, the second member's first turn changed nothing."""

    def found(start: str | None, door: str | None) -> list[list[float]]:
        straight = [turn([1], [3], state=start), turn([1, 3, 8], [5], state=door)]
        first, second, third = ([1], [4]), ([1, 4, 7], [3]), ([1, 4, 7, 3, 8], [5])
        detour = [turn(*first, state=start), turn(*second, state=start), turn(*third, state=door)]
        given = rules("dr_grpo", {"advantage": {"name": "state_returns", "gamma": 0.5}})
        (rows,) = credited([group([(1.0, straight), (1.0, detour)])], given).updates
        return [drawn(row, row.advantages) for row in rows]

    assert found("start", "door") == [pytest.approx(x) for x in ([1 / 12, 0], [-1 / 6, 1 / 12, 0])]
    assert found(None, None) == [pytest.approx(x) for x in ([1 / 8, 0], [-1 / 8, 0, 0])]
    assert found(None, "half \ud83d") == found(None, None), "the last turns of both were worth the same"


def test_weights_are_those_of_the_weighting(group) -> None:
    groups = [group([(1.0, 3), (0.0, 2)]), group([(1.0, 1), (0.0, 2)], draw=1)]
    expected = {
        "grpo": [1 / 12, 1 / 8, 1 / 4, 1 / 8],
        "dapo": [1 / 8] * 4,
        "dr_grpo": [1 / 32] * 4,
        "reinforce": [1 / 4] * 4,
    }
    for preset, weights in expected.items():
        (rows,) = credited(groups, rules(preset)).updates
        assert [drawn(row, row.weights)[0] for row in rows] == pytest.approx(weights)


def test_each_update_has_its_own_denominator_and_whole_groups(group) -> None:
    groups = [group([(1.0, 3), (0.0, 1)], draw=d) for d in range(2)] + [group([(1.0, 1), (0.0, 1)], draw=2)]
    rows = rows_of_groups(groups)
    batch = assign_credit(rows, groups, rules("dapo", updates=3), version=0)
    assert [{row.group_id for row in update} for update in batch.updates] == [{"g0"}, {"g1"}, {"g2"}]
    assert [sum(sum(row.weights) for row in update) for update in batch.updates] == pytest.approx([1, 1, 1])
    assert drawn(batch.updates[2][0], batch.updates[2][0].weights) == [0.5]


def test_groups_spread_evenly_when_they_do_not_divide(group) -> None:
    groups = [group([(1.0, 1), (0.0, 1)], draw=d) for d in range(5)]
    rows = rows_of_groups(groups)
    batch = assign_credit(rows, groups, rules(updates=2), version=0)
    assert [len(update) for update in batch.updates] == [6, 4]


def test_truncated_members_may_be_left_out_of_loss_and_denominator_but_not_of_the_mean(group) -> None:
    cut = [Status.COMPLETED, Status.TRUNCATED_LENGTH]
    made = [group([(1.0, 2), (0.0, 6)], statuses=cut)]
    (with_cut,), (without,) = (credited(made, rules("dapo", train_truncated=t)).updates for t in (True, False))
    assert [row.index for row in with_cut] == [0, 1]
    assert [row.index for row in without] == [0]
    assert drawn(without[0], without[0].weights) == [0.5, 0.5]
    assert drawn(without[0], without[0].advantages) == drawn(with_cut[0], with_cut[0].advantages)


def test_an_update_without_rows_is_left_out(group) -> None:
    made = [group([(1.0, 2), (0.0, 2)], statuses=[Status.TRUNCATED_LENGTH] * 2)]
    assert credited(made, rules(train_truncated=False)).updates == ()
    assert credited([], rules()).updates == ()


def test_the_same_task_drawn_twice_is_two_groups(group) -> None:
    twice = [group([(1.0, 1), (1.0, 1)], task="same"), group([(0.0, 1), (0.0, 1)], draw=1, task="same")]
    (rows,) = credited(twice, rules("dr_grpo")).updates
    assert all(row.advantages == [0.0] * len(row.advantages) for row in rows)


def test_advantages_may_be_given_per_token(group) -> None:
    per_token = dataclasses.replace(resolve("dapo").advantage, run=lambda credit: torch.arange(5.0).double())
    objective = dataclasses.replace(resolve("dapo"), advantage=per_token)
    made = [group([(1.0, 3), (0.0, 2)])]
    (rows,) = credited(made, CreditRules(objective=objective, max_new_tokens=8)).updates
    assert [drawn(row, row.advantages) for row in rows] == [[0, 1, 2], [3, 4]]


def test_kl_in_reward_uses_the_proximal_and_reference_passes(group) -> None:
    passes = {"policy": -1.0, "reference": -3.0}

    def logprobs(rows, policy):
        return [[passes[policy] * drawn_here for drawn_here in row.loss_mask] for row in rows]

    made = [group([(1.0, 2), (0.0, 4)])]
    batch = make_batch(made, rules("rloo"), score=logprobs, version=0)
    (rows,) = batch.updates
    # R - 0.05 * 2 per token: 0.8 and -0.4; leave-one-out of two is the difference.
    assert [drawn(row, row.advantages)[0] for row in rows] == pytest.approx([1.2, -1.2])
    assert drawn(rows[0], rows[0].reference_logprobs) == [-3, -3]
    assert drawn(rows[0], rows[0].proximal_logprobs) == [-1, -1]
    assert batch.metrics["reward/mean"] == 0.5


@pytest.mark.parametrize("observation", [[], [8, 9, 8]])
def test_a_critics_advantages_skip_what_the_policy_did_not_draw(group, turn, observation) -> None:
    """Worked numbers: R = (0, 0, 1), V = (.2, .5, .7); an observation between the first two changes nothing."""
    turns = [turn([1, 2], [3]), turn([1, 2, 3, *observation], [5, 6])]
    made = [group([(1.0, turns)])]

    def score(rows, who):
        values = iter([0.2, 0.5, 0.7])
        assert who == "critic"
        return [[next(values) if is_drawn else 99.0 for is_drawn in row.loss_mask] for row in rows]

    given = rules("ppo", {"shaping": [], "normalizers": []})
    (rows,) = make_batch(made, given, score=score, version=0).updates
    assert drawn(rows[0], rows[0].advantages) == pytest.approx([0.76075, 0.485, 0.3])
    assert drawn(rows[0], rows[0].targets) == pytest.approx([0.96075, 0.985, 1.0])
    assert len(rows[0].token_ids) == 5 + len(observation)


def test_step_values_reach_the_tokens_of_their_steps(group) -> None:
    """Worked numbers: values (.25, .5, .25, .75), reward 1 -> (.25, -.25, .5, .25)."""
    made = group([(1.0, 6), (0.0, 2)])
    first = dataclasses.replace(made.trajectories[0], step_starts=(0, 1, 3, 5), step_values=(0.25, 0.5, 0.25, 0.75))
    second = dataclasses.replace(made.trajectories[1], step_starts=(0,), step_values=(0.5,))
    groups = [dataclasses.replace(made, trajectories=(first, second))]
    (rows,) = make_batch(groups, rules("vineppo"), score=no_pass, version=0).updates
    assert drawn(rows[0], rows[0].advantages) == pytest.approx([0.25, -0.25, -0.25, 0.5, 0.5, 0.25])
    assert drawn(rows[1], rows[1].advantages) == pytest.approx([-0.5, -0.5])


def test_a_greedy_attempt_is_the_baseline_and_is_not_trained(group) -> None:
    made = group([(1.0, 2), (0.0, 3)])
    greedy = dataclasses.replace(group([(0.25, 4)]).trajectories[0], index=-1)
    groups = [dataclasses.replace(made, greedy=greedy)]
    (rows,) = make_batch(groups, rules("remax", {"shaping": []}), score=no_pass, version=0).updates
    assert [drawn(row, row.advantages)[0] for row in rows] == pytest.approx([0.75, -0.25])
    assert [row.index for row in rows] == [0, 1]
    assert groups[0].tokens_drawn == 9


def test_parts_of_the_reward_are_credited_one_by_one(group) -> None:
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 10.0}, {"right": 0.0}]
    made = group([(1.0, 1), (1.0, 1), (0.0, 1)])
    weights = {"right": 1.0, "short": 0.5}
    members = tuple(
        dataclasses.replace(t, weighted_parts={name: Score.of(weights[name] * value) for name, value in given.items()})
        for t, given in zip(made.trajectories, parts, strict=True)
    )
    groups = [dataclasses.replace(made, trajectories=members)]
    given = rules("gdpo", {"normalizers": []}, part_weights=weights)
    (rows,) = credited(groups, given).updates
    right = torch.tensor([1.0, 0.0, 0.0]).double()
    right = (right - right.mean()) / right.std()
    expected = [right[0] - 0.5 / 2**0.5, right[1] + 0.5 / 2**0.5, right[2]]
    assert [drawn(row, row.advantages)[0] for row in rows] == pytest.approx([float(e) for e in expected], abs=1e-5)


def test_a_long_episode_of_short_turns_is_punished_by_the_limit_of_episodes_alone(group, turn) -> None:
    """Nine tokens in three turns of at most eight each; and of at most ten together."""
    turns = [turn([1], [5, 6, 7]), turn([1, 5, 6, 7, 2], [5, 6, 7]), turn([1, 5, 6, 7, 2, 5, 6, 7, 2], [5, 6, 7])]
    made = [group([(1.0, turns), (1.0, 2)])]
    free, bound = (credited(made, rules("dapo", max_episode_tokens=limit)) for limit in (0, 10))
    assert free.metrics["reward/shaped_mean"] == 1.0
    assert bound.metrics["reward/shaped_mean"] == pytest.approx(1 - 0.5 / 2)


def test_a_closed_gate_is_never_pushed_up(group) -> None:
    """Whatever the parts are worth before the gate: its member is nobody's better, and not above its group's mean."""
    rng = random.Random(3)
    for _ in range(100):
        bounds = {name: rng.choice([None, (0.0, rng.uniform(0.1, 1.0))]) for name in ("right", "short")}
        part_rules = {"form": PartRule(is_gate=True)} | {
            name: PartRule(weight=rng.uniform(0.1, 3.0), clip=bounds[name]) for name in bounds
        }
        made = group([(0.0, rng.randint(1, 5)) for _ in range(4)])
        is_open = [True, True, False, rng.random() < 0.5]
        members = []
        for member, opens in zip(made.trajectories, is_open, strict=True):
            raw = {"form": float(opens), "right": rng.choice([0.0, 1.0]), "short": rng.uniform(0.0, 5.0)}
            parts = {name: Score.of(value + (not opens)) for name, value in raw.items()} | {"form": Score.of(opens)}
            members.append(
                dataclasses.replace(
                    member,
                    score=combine(parts, part_rules),
                    score_parts=parts,
                    weighted_parts=weigh(parts, part_rules),
                )
            )
        weights = {name: rule.weight if rule.adds else 0.0 for name, rule in part_rules.items()}
        groups = [dataclasses.replace(made, trajectories=tuple(members))]
        (rows,) = credited(groups, rules("gdpo", {"normalizers": []}, part_weights=weights)).updates
        given = [drawn(row, row.advantages)[0] for row in rows]
        for advantage, opens in zip(given, is_open, strict=True):
            assert opens or (advantage <= 0 and advantage == pytest.approx(min(given)))


def test_bounds_of_a_part_hold_where_parts_are_credited_one_by_one(group) -> None:
    part_rules = {"right": PartRule(), "short": PartRule(weight=2.0, clip=(0.0, 1.0))}
    parts = [{"right": Score.of(0.0), "short": Score.of(short)} for short in (1.0, 50.0, 0.0)]
    made = group([(0.0, 1), (0.0, 1), (0.0, 1)])
    members = [
        dataclasses.replace(member, score_parts=own, weighted_parts=weigh(own, part_rules))
        for member, own in zip(made.trajectories, parts, strict=True)
    ]
    groups = [dataclasses.replace(made, trajectories=tuple(members))]
    given = rules("gdpo", {"normalizers": []}, part_weights={"right": 1.0, "short": 2.0})
    (rows,) = credited(groups, given).updates
    first, second, last = (drawn(row, row.advantages)[0] for row in rows)
    assert first == second > 0 > last
    assert last == pytest.approx(-2 * (2 / 3) / (1 / 3) ** 0.5, abs=1e-4)


def test_a_learned_weighting_hands_on_its_slope(group) -> None:
    (rows,) = credited([group([(1.0, 3), (0.0, 1)])], rules("lambda_grpo")).updates
    assert rows[0].weight_slope > 0 > rows[1].weight_slope, "more power favours the longer"


# ScoringPasses


def test_one_update_without_reference_needs_no_pass(group) -> None:
    (rows,) = make_batch([group([(1.0, 1), (0.0, 1)])], rules("grpo"), score=no_pass, version=0).updates
    assert rows[0].proximal_logprobs is None
    assert rows[0].reference_logprobs is None


def test_kl_in_the_reward_asks_for_both_policies_once(group) -> None:
    calls = []

    def logprobs(rows, policy):
        calls.append(policy)
        return [[-0.5] * len(row.token_ids) for row in rows]

    groups = [group([(1.0, 1), (0.0, 1)], draw=d) for d in range(2)]
    batch = make_batch(groups, rules("rloo", updates=2), score=logprobs, version=0)
    assert calls == ["policy", "reference"]
    assert all(row.proximal_logprobs == [-0.5] * 3 for update in batch.updates for row in update)


def test_order_of_arrival_does_not_matter(group) -> None:
    groups = [group([(float(d % 2), 2), (0.5, 3)], draw=d) for d in range(4)]
    first = make_batch(groups, rules(), score=no_pass, version=0)
    second = make_batch(groups[::-1], rules(), score=no_pass, version=0)
    assert first == second


# Forks and observations do not change the gradient


def loss_and_gradient(made, preset: str):
    """Policy log-probabilities are a leaf over drawn tokens in order of member and turn."""
    overrides = {"shaping": [], "corrections": ["token_tis"], "proximal": "trainer"}
    (rows,) = credited(made, rules(preset, overrides)).updates
    proximal = [[0.9 * logprob for logprob in row.behavior_logprobs] for row in rows]
    rows = with_column(with_column(rows, "proximal_logprobs", proximal), "reference_logprobs", proximal)
    (microbatch,) = pack(rows, 10_000, torch.float64, together="group")
    behavior = microbatch.behavior_logprobs[microbatch.loss_mask.bool()]
    policy = (1.1 * behavior).requires_grad_()
    scored = Scored(logprobs=policy, entropy=-policy.detach())
    tokens = Tokens.of(microbatch, scored, num_batch_tokens=len(policy))
    loss, metrics = objective_loss(resolve(preset, overrides), tokens)
    loss.backward()
    return loss.item(), policy.grad, metrics.finish()


@pytest.mark.parametrize("preset", PLAIN)
def test_gradient_does_not_depend_on_how_a_rollout_is_split_into_rows(group, turn, preset) -> None:
    whole = [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 8], [5, 6, 7])]
    forked = [turn([1, 2], [3, 4]), turn([1, 2, 9, 8], [5, 6, 7])]
    results = [loss_and_gradient([group([(1.0, turns), (0.0, 1), (0.3, 2)])], preset) for turns in (whole, forked)]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
    # Packing may order members differently; compare as sorted.
    assert torch.allclose(results[0][1].sort().values, results[1][1].sort().values, atol=1e-12, rtol=0)
    assert results[0][2] == pytest.approx(results[1][2], abs=1e-12)


@pytest.mark.parametrize("preset", PLAIN)
def test_a_hundred_observation_tokens_change_nothing(group, turn, preset) -> None:
    rng = random.Random(1)
    first, second = [3, 4], [5, 6, 7]
    results = []
    for observation in ([], [rng.randint(0, 9) for _ in range(100)]):
        turns = [turn([1, 2], first), turn([1, 2, *first, *observation], second)]
        results.append(loss_and_gradient([group([(1.0, turns), (0.0, 1), (0.3, 2)])], preset))
    assert results[0][0] == results[1][0]
    assert results[0][1].tolist() == results[1][1].tolist()
    assert results[0][2] == results[1][2]
