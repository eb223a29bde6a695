"""Preference rows compare completions and nothing else; references are asked once; groups become pairs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from temper.batching.pack import pack
from temper.batching.rows import rows_of_groups
from temper.errors import UserError
from temper.models.tiny import character_tokenizer
from temper.objectives.policy.reference_rules import REFERENCE_RULES
from temper.objectives.presets.preferences import DPO, KTO, NASH_MD, SIMPO
from temper.rollout.buffer import StepGroups
from temper.stages.preference import Preferences, heldout_rewards, labelled_batch, offline_source, pair_batch
from temper.stages.preference_credit import pairs_of, wins_of
from temper.stages.reading.examples import example_rows
from temper.stages.reading.preference_rows import RowRules, labelled_rows, pair_rows
from temper.stages.reading.reference_cache import References
from temper.tasks.dataset import FileSource, Stream
from temper.tasks.render import Renderer
from temper.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Sample,
    Scalar,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import Letters

RULES = RowRules(Letters(), 16)


class Scorer:
    """A trainer's score: each drawn token has a log-probability by what stands before it; counts rows by model."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, tuple[int, ...]]] = []

    def __call__(self, samples: Sequence[Sample], who: str) -> list[list[float]]:
        self.rows += [(who, tuple(sample.token_ids)) for sample in samples]
        shift = 0.25 if who == "policy" else 0.0
        return [
            [(shift - (sum(s.token_ids[: place + 1]) % 7) / 8) * is_drawn for place, is_drawn in enumerate(s.loss_mask)]
            for s in samples
        ]

    def asked(self, who: str) -> int:
        return sum(name == who for name, _ in self.rows)


def pair(name: str = "t", answer: str | None = "yes", **extra: Scalar) -> Task:
    columns: dict[str, Scalar] = {"rejected": "no", **extra}
    return Task(id=name, messages=(Message(role="user", content="ab"),), answer=answer, extra=columns)


def labelled(name: str, answer: str, label: bool, prompt: str = "ab") -> Task:
    return Task(id=name, messages=(Message(role="user", content=prompt),), answer=answer, extra={"label": label})


PAIRS = tuple(
    Task(
        id=f"p{number}",
        messages=(Message(role="user", content="abcde"[: 1 + number]),),
        answer="x" * (1 + number),
        extra={"rejected": "y" * (5 - number)},
    )
    for number in range(5)
)


def stream() -> Stream:
    return Stream([FileSource("pairs", PAIRS)], [1.0], seed=3)


def take(source: Preferences, step: int) -> tuple[Sample, ...]:
    (samples,) = asyncio.run(source.take(step)).updates
    return samples


# --- rows ---


def test_both_sides_follow_the_prompt_and_only_they_and_their_ends_are_compared() -> None:
    chosen, rejected = pair_rows(RULES, pair())
    assert chosen.token_ids == [97, 98, *map(ord, "yes"), 0]
    assert chosen.loss_mask == [0, 0, 1, 1, 1, 1]
    assert rejected.loss_mask == [0, 0, 1, 1, 1]
    assert (chosen.index, chosen.reward, rejected.index, rejected.reward) == (0, 1.0, 1, 0.0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (pair(rejected="yes"), "task t: chosen and rejected are equal"),
        (pair(answer=""), "task t: the chosen completion is empty"),
        (pair(rejected=" \n"), "task t: the rejected completion is empty"),
        (pair(answer=None), "task t is no pair.*no answer"),
        (Task(id="t", messages=(), answer="yes", extra={"label": True}), "task t is no pair.*columns label"),
        (
            pair(rejected="n" * 14),
            "task t: the rejected completion with its prompt has 17 tokens, more than the limit of 16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pairs_that_cannot_be_trained_are_named(task: Task, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pair_rows(RULES, task)


TRIMS = (
    "{% for tool in tools or [] %}{{ 'T' + tool['function']['name'] }}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | trim + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
"""A template that trims what is said and shows tools, and a tool."""


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyzT \n")
    tokenizer.chat_template = TRIMS
    return Renderer(tokenizer, system="be brief", template="say {prompt}")


@pytest.mark.parametrize("tools", ["", json.dumps([ADD])], ids=["alone", "with tools"])
@pytest.mark.parametrize("answer", ["yes", " yes \n", "y e s"])
def test_a_chosen_answer_has_the_tokens_of_the_same_conversation_in_supervised_training(
    renderer: Renderer, tools: str, answer: str
) -> None:
    extra = {"tools": tools} if tools else {}
    task = pair(answer=answer, rejected="no ", **extra)
    chosen, rejected = pair_rows(RowRules(renderer, 64), task)
    for row, said in ((chosen, answer), (rejected, "no ")):
        (imitated,) = example_rows(renderer, dataclasses.replace(task, answer=said), max_length=64)
        assert row.token_ids == imitated.token_ids
        assert row.loss_mask == imitated.loss_mask
    shown = renderer.decode(chosen.token_ids)
    assert ("Tadd" in shown) == bool(tools)
    assert "say ab" in shown
    assert shown.endswith(answer.strip())


def test_pairs_longer_than_the_limit_are_dropped_and_counted_where_that_is_asked_for() -> None:
    rules = RowRules(Letters(), 7)  # p0 to p4 have 1 + 5 + 1 to 5 + 5 + 1 tokens on their longer side
    source = offline_source(SIMPO, stream(), rules, References(Scorer()), Scorer(), batch_size=4, drops_long=True)
    batch = asyncio.run(source.take(1))
    assert {row.group_id.partition("#")[0] for row in batch.updates[0]} == {"p0", "p1", "p2"}
    assert batch.metrics["data/too_long"] > 0
    with pytest.raises(UserError, match="more than the limit of 7"):
        asyncio.run(offline_source(SIMPO, stream(), rules, References(Scorer()), Scorer(), batch_size=5).take(1))


@pytest.mark.parametrize("is_chosen", [True, False])
def test_who_sampled_which_side_is_kept_for_xpo(is_chosen: bool) -> None:
    chosen, rejected = pair_rows(RULES, pair(is_chosen_from_policy=is_chosen))
    assert (chosen.versions[-1], rejected.versions[-1]) == ((0, -1) if is_chosen else (-1, 0))
    assert chosen.versions[0] == rejected.versions[0] == -1


def test_weights_are_one_over_the_pairs_and_a_task_drawn_twice_is_two_pairs() -> None:
    (rows,) = pair_batch([(0, pair()), (1, pair()), (2, pair("u"))], RULES, None).updates
    assert {w for row in rows for w, m in zip(row.weights, row.loss_mask, strict=True) if m} == {1 / 3}
    assert {w for row in rows for w, m in zip(row.weights, row.loss_mask, strict=True) if not m} == {0.0}
    assert [row.group_id for row in rows] == ["t#0", "t#0", "t#1", "t#1", "u#2", "u#2"]
    assert {row.reference_logprobs is None for row in rows} == {True}
    assert all(len(m.lengths) == 2 for m in pack(rows, 1, together="group"))


def test_labels_come_from_their_column_or_from_a_pair() -> None:
    (row,) = labelled_rows(RULES, labelled("t", "yes", False))
    assert row.reward == 0.0
    assert [row.reward for row in labelled_rows(RULES, pair())] == [1.0, 0.0]
    for bad in (pair(rejected="no", label=True), labelled("t", "yes", True)):
        labelled_rows(RULES, bad)
    without = Task(id="t", messages=(), answer="yes", extra={"label": 1})
    with pytest.raises(UserError, match="true or false"):
        labelled_rows(RULES, without)


# --- KTO's baseline ---


def test_the_baseline_is_of_each_prompt_with_the_completion_before_it_in_the_batch() -> None:
    score = Scorer()
    draws = [(0, labelled("s", "one", True, "p")), (1, labelled("t", "two", True, "qq")),
             (2, labelled("u", "six", False, "rrr"))]  # fmt: skip
    batch = labelled_batch(draws, RULES, References(score), score)
    expected = ["psix\0", "qqone\0", "rrrtwo\0"]
    assert [ids for who, ids in score.rows if who == "policy"] == [tuple(map(ord, text)) for text in expected]
    (rows,) = batch.updates
    # The policy is 0.25 above the reference at each of the 4 tokens.
    assert {a for row in rows for a, m in zip(row.advantages, row.loss_mask, strict=True) if m} == {1.0}
    assert [row.reward for row in rows] == [1.0, 1.0, 0.0]
    assert {w for row in rows for w, m in zip(row.weights, row.loss_mask, strict=True) if m} == {1 / 3}


def test_no_prompt_of_a_pair_taken_apart_meets_its_own_other_answer() -> None:
    score = Scorer()
    labelled_batch([(0, PAIRS[0]), (1, PAIRS[1])], RULES, References(score), score)
    strangers = [ids for who, ids in score.rows if who == "policy"]
    own = {tuple(row.token_ids) for task in PAIRS[:2] for row in pair_rows(RULES, task)}
    assert len(strangers) == 4
    assert not own & set(strangers)
    with pytest.raises(UserError, match="2 or more"):
        labelled_batch([(0, PAIRS[0])], RULES, References(score), score)


def test_a_strange_completion_is_cut_where_the_context_ends() -> None:
    score = Scorer()
    draws = [(0, labelled("s", "x" * 12, True, "p")), (1, labelled("t", "y", True, "q" * 13))]
    labelled_batch(draws, RULES, References(score), score)
    assert max(len(ids) for _, ids in score.rows) == 16


# --- the source ---


def source(score: Scorer, path: Path | None = None, **changes: Any) -> Preferences:
    objective = dataclasses.replace(DPO, **changes)
    return offline_source(objective, stream(), RULES, References(score, path), score, 3)


def test_the_reference_is_asked_once_for_every_row_of_a_run() -> None:
    score = Scorer()
    given = source(score)
    rows = [row for step in range(1, 12) for row in take(given, step)]
    assert len(rows) == 66
    assert score.asked("reference") == 10
    fresh = Scorer()(rows, "reference")
    assert [row.reference_logprobs for row in rows] == fresh


@pytest.mark.parametrize("changes", [{"loss": SIMPO.loss}, {"reference": REFERENCE_RULES["soft_update"]()}])
def test_without_a_frozen_reference_nothing_is_cached(changes: dict[str, Any]) -> None:
    """The mutation: a cache under a moving reference would hold what it said at the start."""
    score = Scorer()
    rows = take(source(score, **changes), 1)
    assert score.rows == []
    assert {row.reference_logprobs is None for row in rows} == {True}


@pytest.mark.parametrize("objective", [DPO, KTO])
def test_a_resumed_source_gives_the_same_rows_and_scores_nothing_twice(objective: Any, tmp_path: Path) -> None:
    def make(score: Scorer, path: Path) -> Preferences:
        return offline_source(objective, stream(), RULES, References(score, path), score, 3)

    whole = make(Scorer(), tmp_path / "whole.bin")
    expected = [take(whole, step) for step in range(1, 7)]
    before = make(Scorer(), tmp_path / "cut" / "references.bin")
    for step in range(1, 4):
        take(before, step)
    score = Scorer()
    after = make(score, tmp_path / "cut" / "references.bin")
    asyncio.run(after.start())
    after.load_state(before.state())
    assert [take(after, step) for step in range(4, 7)] == expected[3:]
    if objective is DPO:
        assert score.asked("reference") == 0  # nine draws of five pairs have met them all


@pytest.mark.parametrize("lost", [1, 9, 60])
def test_a_block_that_was_cut_is_scored_again_as_a_whole(lost: int, tmp_path: Path) -> None:
    path, rows = tmp_path / "references.bin", [row for task in PAIRS for row in pair_rows(RULES, task)]
    first = References(Scorer(), path)
    first.fill(rows[:4])
    size = path.stat().st_size
    expected = first.fill(rows)
    path.write_bytes(path.read_bytes()[:-lost])
    score = Scorer()
    second = References(score, path)
    second.start()
    assert len(second) == 4
    assert path.stat().st_size == size
    assert second.fill(rows) == expected
    assert score.asked("reference") == 6
    third = References(Scorer(), path)
    third.start()
    assert len(third) == 10


def test_what_another_reference_said_is_not_believed(tmp_path: Path) -> None:
    path, rows = tmp_path / "references.bin", list(pair_rows(RULES, pair()))
    References(Scorer(), path, "model A").fill(rows)
    for identity, known in (("model A", 2), ("model B", 0)):
        cache = References(Scorer(), path, identity)
        cache.start()
        assert len(cache) == known


def test_held_out_pairs_are_scored_by_policy_and_reference() -> None:
    score = Scorer()
    references = References(score)
    assert DPO.loss is not None
    chosen, rejected = heldout_rewards(DPO.loss, PAIRS, RULES, references, score)
    heldout_rewards(DPO.loss, PAIRS, RULES, references, score)
    assert (score.asked("policy"), score.asked("reference")) == (20, 10)
    # The policy is 0.25 above the reference at each token, end included; beta is 0.1.
    assert chosen == pytest.approx([0.1 * 0.25 * (2 + number) for number in range(5)])
    assert rejected == pytest.approx([0.1 * 0.25 * (6 - number) for number in range(5)])


def test_nash_md_on_a_data_set_is_refused() -> None:
    with pytest.raises(UserError, match="fresh rollouts"):
        source(Scorer(), loss=NASH_MD.loss)


def test_kto_asks_a_moving_reference_at_every_step() -> None:
    score = Scorer()
    given = source(score, loss=KTO.loss, reference=REFERENCE_RULES["soft_update"]())
    for step in range(1, 5):
        take(given, step)
    assert max(Counter(row for row in score.rows if row[0] == "reference").values()) > 1


# --- pairs from rollouts ---


def member(group: str, index: int, text: str, score: Score, version: int = 4) -> Trajectory:
    ids = list(map(ord, text))
    completion = Completion(
        prompt_ids=(1, 2), token_ids=ids, logprobs=[-1.0] * len(ids), versions=[version] * len(ids), finish=Finish.STOP
    )
    turn = Turn(completion=completion, message=Message(role="assistant", content=text))
    return Trajectory(
        task_id="t", group_id=group, index=index, turns=(turn,), status=Status.COMPLETED, score=score
    )  # fmt: skip


def group(draw: int, *members: tuple[str, float | None], opponents: int = 0) -> Group:
    """The last `opponents` of the members are not the policy's."""
    name, num_own = f"t#{draw}", len(members) - opponents
    scored = [
        member(
            name,
            index,
            text,
            Score.error("judge is away") if value is None else Score.of(value),
            version=4 if index < num_own else -1,
        )
        for index, (text, value) in enumerate(members)
    ]
    return Group(id=name, draw=draw, task=pair(), trajectories=tuple(scored))


def taken(*groups: Group) -> StepGroups:
    return StepGroups(groups=groups, dropped=())


def test_the_best_and_the_worst_of_a_group_are_a_pair() -> None:
    first = group(1, ("aa", 0.3), ("b", 0.9), ("ccc", 0.1), ("d", None), ("eee", 0.1), ("f", 0.9))
    batch = pairs_of(taken(group(2, ("g", 1.0), ("h", 0.0)), first), version=5)
    (rows,) = batch.updates
    assert [(row.group_id, row.index, row.reward, bytes(row.token_ids[2:])) for row in rows] == [
        ("t#1", 1, 1.0, b"b"), ("t#1", 2, 0.0, b"ccc"), ("t#2", 0, 1.0, b"g"), ("t#2", 1, 0.0, b"h"),
    ]  # fmt: skip
    assert {row.weights[-1] for row in rows} == {0.5}
    assert batch.metrics["stale/max"] == 1.0
    assert [g.draw for g in batch.groups] == [1, 2]


def test_groups_without_a_pair_are_dropped_with_the_reason() -> None:
    groups = [group(0, ("a", 0.5), ("b", 0.5)), group(1, ("a", 1.0), ("b", None)), group(2, ("a", 1.0), ("a", 0.0)),
              group(3, ("a", 0.1), ("b", 0.1 + 1e-12))]  # fmt: skip
    batch = pairs_of(taken(*groups), version=4)
    assert batch.updates == ()
    assert [reason for _, reason in batch.dropped] == [
        "equal rewards", "fewer than two scored members", "both sides say the same", "equal rewards",
    ]  # fmt: skip


def test_two_members_at_random_are_the_same_after_a_resume_and_not_always_the_extremes() -> None:
    groups = [group(draw, ("a", 0.1), ("bb", 0.4), ("ccc", 0.7), ("dddd", 0.9)) for draw in range(20)]
    first, again = (pairs_of(taken(*groups), version=4, choose="random", seed=1) for _ in range(2))
    assert first.updates == again.updates
    (rows,) = first.updates
    chosen = [row.index for row in rows if row.reward == 1.0]
    rejected = [row.index for row in rows if row.reward == 0.0]
    assert all(better > worse for better, worse in zip(chosen, rejected, strict=True))
    assert len(set(zip(chosen, rejected, strict=True))) > 3
    assert pairs_of(taken(*groups), version=4, choose="random", seed=2).updates != first.updates


def test_updates_are_batches_of_their_own() -> None:
    groups = [group(draw, ("a", 0.0), ("b", 1.0)) for draw in range(3)]
    updates = pairs_of(taken(*groups), version=4, updates=2).updates
    assert [len(update) for update in updates] == [4, 2]
    assert [update[0].weights[-1] for update in updates] == [0.5, 1.0]


DUEL = group(0, ("a", 0.2), ("bb", 0.9), ("cccc", 0.2), ("dddd", 0.5), opponents=2)


def test_wins_are_against_opponents_and_only_the_policys_members_are_trained() -> None:
    others = [
        group(1, ("e", 1.0), ("f", None), ("g", 1.0), ("h", 0.0), opponents=2),
        group(2, ("i", 1.0), ("j", 0.0), ("k", None), ("l", None), opponents=2),
        group(3, ("m", None), ("n", 1.0), opponents=1),
        group(4, ("o", 0.0), ("p", 1.0)),
    ]
    batch = wins_of(taken(DUEL, *others), version=6)
    (rows,) = batch.updates
    assert [(row.group_id, row.index, row.advantages[-1]) for row in rows] == [
        ("t#0", 0, 0.25), ("t#0", 1, 1.0), ("t#1", 0, 0.75),
    ]  # fmt: skip
    assert {row.versions[-1] for row in rows} == {4}
    assert {row.weights[-1] for row in rows} == {1 / 3}
    assert {reason for _, reason in batch.dropped} == {"no scored member of the policy, or none of its opponent"}
    assert [g.draw for g, _ in batch.dropped] == [2, 3, 4]


def test_a_pair_across_the_sides_is_the_one_whose_rewards_differ_most() -> None:
    groups = [
        DUEL,  # 0.9 of the policy against 0.2
        group(1, ("a", 0.4), ("b", 0.5), ("c", 0.6), ("d", 1.0), opponents=2),  # 1.0 of the opponent against 0.4
        group(2, ("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 0.0), opponents=2),  # never two of one side
        group(3, ("a", 1.0), ("b", None), opponents=1),
        group(4, ("a", 0.5), ("b", 0.5), opponents=1),
    ]
    batch = pairs_of(taken(*groups), version=4, choose="sides")
    (rows,) = batch.updates
    assert [(row.group_id, row.index, row.reward, row.versions[-1]) for row in rows] == [
        ("t#0", 1, 1.0, 4), ("t#0", 2, 0.0, -1), ("t#1", 3, 1.0, -1), ("t#1", 0, 0.0, 4),
        ("t#2", 1, 1.0, 4), ("t#2", 3, 0.0, -1),
    ]  # fmt: skip
    assert [reason for _, reason in batch.dropped] == [
        "no scored member of the policy, or none of its opponent", "equal rewards",
    ]  # fmt: skip


@pytest.mark.parametrize("credit", [wins_of, partial(pairs_of, choose="sides")], ids=["wins", "pairs"])
def test_opponents_are_in_no_figure_about_the_policy(credit: Callable[..., Batch]) -> None:
    """Its rewards, lengths and age are those of its own members; groups are compared whole."""
    metrics = credit(taken(DUEL), version=6).metrics
    assert metrics["reward/mean"] == pytest.approx(0.55)
    assert (metrics["gen/len_max"], metrics["gen/len_mean"]) == (2.0, 1.5)
    assert (metrics["stale/max"], metrics["stale/token_hist/02"]) == (2.0, 1.0)
    assert metrics["preference/win_rate"] == pytest.approx((0.25 + 1.0) / 2)
    assert not any(name.startswith("mismatch/") for name in metrics)
    alone = credit(taken(group(0, ("a", 0.5), ("b", 0.1), opponents=1)), version=4).metrics
    assert alone["data/degenerate"] == 0.0, "a member and an opponent are two to compare"
    assert DUEL.oldest_version == 4, "the buffer's bound on age is for the policy's members"


def test_a_policy_gradient_refuses_opponents() -> None:
    with pytest.raises(AssertionError, match="opponents get no policy gradient"):
        rows_of_groups([DUEL])
