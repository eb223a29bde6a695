"""Guarantee: what a rejection stage keeps can be read as examples, survives a kill to the bit, and is never empty.

The sampler is a script, everything above it is real. Planted faults: a harvest that forgets, gold answers under a name
that a reader would train on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from temper.envs.env import make_env
from temper.errors import UserError
from temper.evals.suites import ANSWERS
from temper.models.tiny import character_tokenizer
from temper.rollout.buffer import Buffer, StepGroups
from temper.rollout.episode import EpisodeSetup
from temper.rollout.selection import read_selection
from temper.rollout.source import RolloutSettings, RolloutSource
from temper.stages.reading.examples import example_rows
from temper.stages.rejection import KEPT_FILE, Harvest, KeepRules, KeptRow, Rejection, keep_of
from temper.tasks.dataset import Stream, read_file
from temper.tasks.generators import make_source
from temper.tasks.render import Renderer
from temper.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Publication,
    Request,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler

RENDERER = Renderer(character_tokenizer("abcdefghijklmnopqrstuvwxyz "), template="spell {prompt}")
STEPS = 6


def backward_or_not(request: Request) -> list[int]:
    """Right in about half of all samples; the name of the request alone decides."""
    numbers = random.Random(request.id)
    word = RENDERER.decode(request.prompt_ids).removeprefix("spell ")
    answer = word[::-1] if numbers.random() < 0.5 else "".join(numbers.choices("abc", k=2))
    return RENDERER.completion_ids(answer)


def hopeless(request: Request) -> list[int]:
    return RENDERER.completion_ids("no")


class Exact(FakeScorer):
    """The reward; every seventh verdict is an error."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        is_broken = random.Random(f"{task.id} {trajectory.index}").random() < 0.15
        score = Score.error("verifier crashed") if is_broken else Score.of(float(trajectory.text == task.answer))
        return score, {"exact": score}


def open_stage(sampler: FakeSampler, *, version: int = 0, keep: object = "correct", staleness: int = 0) -> Rejection:
    setup = EpisodeSetup(
        sampler=sampler, renderer=RENDERER, scorer=Exact(), make_env=make_env,
        params=SamplingParams(max_new_tokens=8, stop_ids=RENDERER.stop_ids), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip
    options = {"min_letters": 1, "max_letters": 2}
    stream = Stream([make_source("spell_backward", options, seed=1, size=12)], [1.0], seed=0)
    buffer = Buffer(groups_per_step=4, max_staleness=staleness, max_rounds=10, version=version)
    settings = RolloutSettings(
        group_size=4, min_members=1, drop_degenerate=False, error_limit=0.9, step_seconds=5.0, prefix="stage 1"
    )
    harvest = Harvest(read_selection(keep, ANSWERS))  # type: ignore[arg-type]
    rules = KeepRules(show=RENDERER.prompt_messages, seed=7)
    credit = partial(keep_of, rules=rules, harvest=harvest, version=version)
    return Rejection(RolloutSource(setup, stream, buffer, settings, credit), harvest, steps=STEPS)


async def run(stage: Rejection, sampler: FakeSampler, first: int, last: int) -> list[Batch]:
    await sampler.load(Publication(version=first - 1, tensors={}))
    await stage.start()
    batches = []
    try:
        for step in range(first, last + 1):
            batches.append(await stage.take(step))
            await sampler.load(Publication(version=step, tensors={}))
            await stage.release(step)
    finally:
        await stage.close()
    return batches


def whole(**settings: object) -> tuple[Rejection, list[Batch]]:
    sampler = FakeSampler(backward_or_not)
    stage = open_stage(sampler, **settings)  # type: ignore[arg-type]
    return stage, asyncio.run(run(stage, sampler, 1, STEPS))


def file_of(harvest: Harvest, folder: Path) -> bytes:
    folder.mkdir(exist_ok=True)
    harvest.save(folder)
    return (folder / KEPT_FILE).read_bytes()


def test_what_is_kept_is_read_back_as_examples_and_trains_what_was_said(tmp_path: Path) -> None:
    stage, batches = whole()
    file_of(stage.harvest, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / KEPT_FILE).read_text().splitlines()]
    tasks = read_file(tmp_path / KEPT_FILE).tasks
    assert len(tasks) == len(lines) == len(stage.harvest.rows) > 5
    for task, line in zip(tasks, lines, strict=True):
        assert task.answer == line["completion"] == line["gold"], "only what is correct"
        assert set(line) == {
            "prompt", "completion", "gold", "score", "sampler_version", "seed", "task_id", "group_id", "index"
        }  # fmt: skip
        assert (line["seed"], line["score"]) == (7, 1.0)
        (row,) = example_rows(RENDERER, task, max_length=64)
        start = row.loss_mask.index(1)
        assert RENDERER.decode(row.token_ids[start:]) == line["completion"]
        assert RENDERER.decode(row.token_ids[:start]) == f"spell {line['completion'][::-1]}", "the template once"
    versions = [line["sampler_version"] for line in lines]
    assert versions == sorted(versions)
    assert set(versions) > {0, 1}
    assert all(batch.updates == () for batch in batches), "nothing is trained"


def test_the_metrics_count_every_response_once() -> None:
    stage, batches = whole()
    for batch in batches:
        assert len(batch.groups) == 4
        responses = sum(len(group.trajectories) for group in batch.groups)
        best = [max(group.rewards) for group in batch.groups if group.rewards]
        assert batch.metrics["keep/best_of_n"] == pytest.approx(sum(best) / len(best))
        assert batch.metrics["keep/share"] * responses == pytest.approx(round(batch.metrics["keep/share"] * responses))
        assert batch.metrics["keep/share"] + batch.metrics["keep/duplicates"] <= 1
        assert batch.metrics["reward/mean"] <= batch.metrics["keep/best_of_n"]
    kept = sum(batch.metrics["keep/share"] * 16 for batch in batches)
    assert kept == pytest.approx(len(stage.harvest.rows)), "a word has one right answer, so nothing is replaced"
    assert batches[-1].metrics["keep/rows"] == len(stage.harvest.rows)
    first = batches[0]
    without = [g for g in first.groups if not any(reward >= 1 for reward in g.rewards)]
    assert first.metrics["keep/prompts_without"] == len(without) / 4


def test_a_prompt_that_is_drawn_again_adds_no_copy_and_a_cap_holds_over_all_draws() -> None:
    stage, _ = whole()
    rows = stage.harvest.rows
    assert len({(row.prompt, row.texts[-1]) for row in rows}) == len(rows), "12 prompts were drawn twice each"
    assert len({row.prompt for row in rows}) == stage.harvest.num_prompts == len(rows)
    everything, _ = whole(keep={"name": "correct", "threshold": 0.0})
    capped, _ = whole(keep={"name": "correct", "threshold": 0.0, "cap": 2})
    counts = [sum(other.prompt == row.prompt for other in capped.harvest.rows) for row in capped.harvest.rows]
    assert max(counts) == 2
    assert len(everything.harvest.rows) > len(capped.harvest.rows)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_stage_keeps_the_same_to_the_bit(stop: int, staleness: int, tmp_path: Path) -> None:
    uninterrupted, batches = whole(staleness=staleness)
    sampler = FakeSampler(backward_or_not)
    killed = open_stage(sampler, staleness=staleness)

    async def until() -> dict[str, object]:
        """The state as a checkpoint takes it: after the step, before its release."""
        await killed.start()
        try:
            for step in range(1, stop + 1):
                await killed.take(step)
                await sampler.load(Publication(version=step, tensors={}))
                state = json.loads(json.dumps(killed.state()))
                await killed.release(step)
        finally:
            await killed.close()
        return dict(state)

    state = asyncio.run(until())
    sampler = FakeSampler(backward_or_not)
    resumed = open_stage(sampler, version=stop, staleness=staleness)
    resumed.load_state(state)  # type: ignore[arg-type]
    rest = asyncio.run(run(resumed, sampler, stop + 1, STEPS))
    if staleness == 0:
        assert file_of(resumed.harvest, tmp_path / "a") == file_of(uninterrupted.harvest, tmp_path / "b")
    keeps = [{k: v for k, v in b.metrics.items() if k.startswith("keep/")} for b in (*batches[stop:], *rest)]
    assert keeps[: len(rest)] == keeps[len(rest) :]
    plain = [[dataclasses.replace(row, sampler_version=0) for row in s.harvest.rows] for s in (resumed, uninterrupted)]
    assert plain[0] == plain[1]


def test_a_ledger_that_forgets_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harvest, "load_state", lambda self, state: None)
    with pytest.raises(AssertionError):
        test_a_resumed_stage_keeps_the_same_to_the_bit(3, 0, tmp_path)


def test_a_stage_that_kept_nothing_says_so_at_its_end_and_not_before() -> None:
    sampler = FakeSampler(hopeless)
    stage = open_stage(sampler)
    with pytest.raises(UserError, match="kept nothing: none of 96 responses") as caught:
        asyncio.run(run(stage, sampler, 1, STEPS))
    assert "rollout.keep = correct(threshold=1.0)" in str(caught.value)
    early = open_stage(FakeSampler(hopeless))
    asyncio.run(run(early, FakeSampler(hopeless), 1, 1))


def test_gold_answers_under_the_name_of_answers_would_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the column is called "gold"."""
    own = KeptRow.as_json
    monkeypatch.setattr(
        KeptRow, "as_json", lambda self, **kind: {**own(self, **kind), "answer": "gold " + (self.gold or "")}
    )
    with pytest.raises(AssertionError):
        test_what_is_kept_is_read_back_as_examples_and_trains_what_was_said(tmp_path)


def conversation(index: int, *said: str, score: float = 1.0) -> Trajectory:
    completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[3], finish=Finish.STOP)
    turns = [
        Turn(
            completion=completion,
            message=Message(role="assistant", content=text),
            replies=(Message(role="tool", content="seen", name="look"),),
        )
        for text in said
    ]
    return Trajectory(
        task_id="t", group_id="t#0", index=index, turns=tuple(turns), status=Status.COMPLETED, score=Score.of(score)
    )


def test_episodes_of_several_turns_are_kept_as_conversations_of_one_shape(tmp_path: Path) -> None:
    task = Task(id="t", messages=(Message(role="user", content="where"),), answer="here")
    members = (
        conversation(0, "look", "here"),
        conversation(1, "here"),
        conversation(2, "look", " ", "here"),
        conversation(3, "look", "there", score=0.0),
    )
    group = Group(id="t#0", draw=0, task=task, trajectories=members)
    renderer = Renderer(character_tokenizer("abcdefghijklmnopqrstuvwxyz "), system="be brief", template="say {prompt}")
    harvest = Harvest(read_selection("correct", ANSWERS))
    rules = KeepRules(show=renderer.prompt_messages, seed=0)
    batch = keep_of(StepGroups(groups=(group,), dropped=()), rules, harvest, version=3)
    assert batch.metrics["keep/share"] == 0.5, "an episode with a silent turn is no example"
    harvest.save(tmp_path)
    first, second = (json.loads(line)["messages"] for line in (tmp_path / KEPT_FILE).read_text().splitlines())
    assert first == [
        {"role": "user", "content": "say where"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "seen", "name": "look"},
        {"role": "assistant", "content": "here"},
    ], "as it was shown, up to the last words of the model, without the recipe's system message"
    assert second == [{"role": "user", "content": "where"}, {"role": "assistant", "content": "here"}]
    tasks = read_file(tmp_path / KEPT_FILE).tasks
    assert [t.answer for t in tasks] == ["here", "here"]
    shown = [[m.content for m in renderer.prompt_messages(t)] for t in tasks]
    assert shown == [["be brief", "say where", "look", "seen"], ["be brief", "say where"]]


def test_groups_without_any_score_count_as_prompts_without_rows() -> None:
    task = Task(id="t", messages=(Message(role="user", content="where"),))
    failed = dataclasses.replace(conversation(0, "x"), score=Score.error("crash"))
    group = Group(id="t#0", draw=0, task=task, trajectories=(failed,))
    harvest = Harvest(read_selection("best", ANSWERS))
    taken = StepGroups(groups=(), dropped=((group, "too few scored members"),))
    batch = keep_of(taken, KeepRules(show=RENDERER.prompt_messages, seed=0), harvest, version=0)
    assert batch.metrics["keep/prompts_without"] == 1.0
    assert "keep/best_of_n" not in batch.metrics
    assert not harvest.rows
