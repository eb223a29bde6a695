"""Guarantee: training on records is training on the same rollouts drawn now, to the bit; what is not fit is refused.

Planted faults: a log-probability that is off by a thousandth, scores that change between a kill and a resume.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from temper.batching import CreditRules
from temper.batching.pack import pack
from temper.batching.samples import make_batch
from temper.build import check_stage
from temper.config import StageSource, resolve
from temper.errors import BackendError, UserError
from temper.models.tiny import character_tokenizer
from temper.objectives import resolve as resolve_preset
from temper.rollout.buffer import StepGroups
from temper.serve.episodes import read_episodes, write_scores
from temper.serve.records import RecordFile, Speech
from temper.stages.kinds import KINDS
from temper.stages.reading.recorded import RecordNeeds, RecordReader
from temper.stages.recorded import RecordedGroups, RecordedSettings
from temper.tasks.dataset import Stream, fingerprint
from temper.trainer.local import LocalTrainer, TrainerSettings
from temper.trainer.optim import OptimizerSettings
from temper.types import Batch, Completion, Finish, Group, SamplingParams, Score, Status, Task, Trajectory
from tests.fakes.models import make_family_model
from tests.fakes.recorded import PARAMS, SPEECH, ask, completion, say, write_episode, write_pairs

POLICY = RecordNeeds(min_members=2, behavior=True)
SETTINGS = RecordedSettings(groups_per_step=2, min_members=2, drop_degenerate=False, max_rounds=2)


def reader(needs: RecordNeeds = POLICY, **changes: Any) -> RecordReader:
    asked = {"speech": SPEECH, "params": PARAMS, "longest_row": 64, "excluded": frozenset[str]()}
    return RecordReader(needs=needs, **{**asked, **changes})


def read(path: Path, *, skip_bad: bool = False, needs: RecordNeeds = POLICY, **changes: Any) -> RecordReader:
    found = reader(needs, **changes)
    found.read([StageSource(records=str(path), skip_bad=skip_bad)])
    return found


def source_of(
    path: Path, credit: Callable[[StepGroups], Batch], settings: RecordedSettings = SETTINGS
) -> RecordedGroups:
    found = reader()
    tasks = found.read([StageSource(records=str(path))])
    return RecordedGroups(Stream(tasks, [1.0], seed=0), found.members, settings, credit)


def as_it_is(taken: StepGroups) -> Batch:
    return Batch(updates=(), groups=taken.groups, dropped=taken.dropped)


# Two groups: one of two turns with an observation between them, one cut at its limit.
def rollouts(first_logprob: float = -3.0, version: int = 7) -> list[Group]:
    def draw(prompt: list[int], drawn: list[int], **more: Any) -> Completion:
        return completion(prompt, drawn, first_logprob=first_logprob, version=version, **more)

    two = [
        say("one", draw([2, 5], [7, 8, 1]), ask("go on")),
        say("two", draw([2, 5, 7, 8, 1, 9], [11, 12, 1])),
    ]
    members = [
        ("a", two, 1.0, Status.COMPLETED),
        ("a", [say("no", draw([2, 5], [13, 1]))], 0.0, Status.COMPLETED),
        ("b", [say("b", draw([2, 6], [14, 15, 16], finish=Finish.LENGTH))], 0.25, Status.TRUNCATED_LENGTH),
        ("b", [say("c", draw([2, 6], [17, 1]))], 0.75, Status.COMPLETED),
    ]
    groups = []
    for number, name in enumerate("ab"):
        task = Task(id=name, messages=(ask(name),))
        own = tuple(
            Trajectory(
                task_id=name, group_id=f"{name}#{number}", index=index, turns=tuple(turns), status=status,
                score=Score.of(score), opening=task.messages,
            )
            for index, (_, turns, score, status) in enumerate(one for one in members if one[0] == name)
        )  # fmt: skip
        groups.append(Group(id=f"{name}#{number}", draw=number, task=task, trajectories=own))
    return groups


def write_rollouts(path: Path, groups: list[Group]) -> None:
    file = RecordFile(path, SPEECH)
    for group in groups:
        for member in group.trajectories:
            write_episode(file, f"{group.id}/{member.index}", member.turns, member.opening)
    file.close()
    values = [member.score for group in groups for member in group.trajectories]
    last = [episode.last for episode in read_episodes(path)]
    write_scores(path, dict(zip(last, values, strict=True)), "exact")


Gradient = dict[str, torch.Tensor]


def trained(preset: str, batch_of: Callable[[Callable[[StepGroups], Batch]], Batch]) -> tuple[Batch, Gradient]:
    """A step's batch, and its gradient in float64."""
    model = make_family_model()
    objective = resolve_preset(preset, {"corrections": ["token_tis"]} if preset in ("grpo", "gspo") else {})
    rules = CreditRules(objective=objective, max_new_tokens=8)
    settings = TrainerSettings(optimizer=OptimizerSettings(learning_rate=0.1), temperature=1.0, total_steps=10)
    packing = partial(pack, tokens_per_microbatch=64, dtype=torch.float64)
    trainer = LocalTrainer(model, character_tokenizer("abc"), objective, settings, pack=packing)

    def credit(taken: StepGroups) -> Batch:
        return make_batch(taken.groups, rules, score=trainer.score, version=0, dropped=taken.dropped)

    found: Gradient = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: found.update({name: p.grad.clone()}))
    batch = batch_of(credit)
    trainer.step(batch)
    return batch, found


@pytest.mark.parametrize("preset", ["grpo", "decoupled_ppo", "reinforce_is", "gspo"])
def test_the_gradient_is_that_of_the_same_rollouts_drawn_now(preset: str, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.db", rollouts())
    write_rollouts(tmp_path / "off.db", rollouts(first_logprob=-3.001))

    def from_file(name: str) -> tuple[Batch, Gradient]:
        return trained(preset, lambda credit: asyncio.run(source_of(tmp_path / name, credit).take(1)))

    online, wanted = trained(preset, lambda credit: credit(StepGroups(groups=tuple(rollouts(version=0)), dropped=())))
    batch, found = from_file("r.db")
    assert [len(update) for update in batch.updates] == [len(update) for update in online.updates] == [4]
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-9)
    assert max(gradient.abs().max() for gradient in wanted.values()) > 1e-3
    _, off = from_file("off.db")
    assert max((off[name] - wanted[name]).abs().max() for name in wanted) > 1e-7, "log-probabilities are not read"


def test_groups_are_episodes_of_one_prompt_with_their_scores(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    batch = asyncio.run(source_of(tmp_path / "r.db", as_it_is).take(1))
    assert sorted(group.rewards for group in batch.groups) == [[0.5, 1.0], [1.0, 0.0]]
    assert {t.oldest_version for group in batch.groups for t in group.trajectories} == {0}
    assert batch.metrics["data/passes"] == 1.0
    assert [group.id.rpartition("#")[2] for group in batch.groups] == ["0", "1"]


def test_a_resumed_stage_goes_on_with_the_next_groups(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    whole, first, second = (
        source_of(tmp_path / "r.db", as_it_is, replace(SETTINGS, groups_per_step=1)) for _ in range(3)
    )
    wanted = [asyncio.run(whole.take(step)).groups for step in range(1, 6)]
    found = [asyncio.run(first.take(step)).groups for step in (1, 2)]
    second.load_state(first.state())
    found += [asyncio.run(second.take(step)).groups for step in (3, 4, 5)]
    assert found == wanted


def test_a_stage_does_not_resume_on_other_scores(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    state = source_of(tmp_path / "r.db", as_it_is).state()
    write_scores(tmp_path / "r.db", {1: Score.of(0.25)}, "people")
    with pytest.raises(UserError, match="Resume with the same training sources"):
        source_of(tmp_path / "r.db", as_it_is).load_state(state)


def test_groups_without_a_difference_are_dropped_until_there_is_nothing_else(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db", scores=(1.0, 0.0, 1.0, 1.0))
    picky = replace(SETTINGS, groups_per_step=1, drop_degenerate=True)
    source = source_of(tmp_path / "r.db", as_it_is, picky)
    batches = [asyncio.run(source.take(step)) for step in range(1, 5)]
    assert all(group.rewards == [1.0, 0.0] for batch in batches for group in batch.groups)
    assert sum(len(batch.dropped) for batch in batches) >= 3
    write_pairs(tmp_path / "equal.db", scores=(1.0, 1.0, 1.0, 1.0))
    with pytest.raises(BackendError, match="recorded groups were dropped and 0 of 1 found"):
        asyncio.run(source_of(tmp_path / "equal.db", as_it_is, picky).take(1))


def test_records_of_another_tokenizer_or_template_are_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    with pytest.raises(UserError, match=r"4 of 4 episodes cannot be trained on.*another tokenizer"):
        read(tmp_path / "r.db", speech=Speech(tokenizer="other", template="chat"))
    with pytest.raises(UserError, match="another chat template"):
        read(tmp_path / "r.db", speech=Speech(tokenizer="ids", template="other"))
    write_pairs(tmp_path / "unknown.db", speech=Speech())
    with pytest.raises(UserError, match="another tokenizer"):
        read(tmp_path / "unknown.db")


def test_records_without_scores_are_refused_or_left_out(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db", scores=(1.0, 0.0, None, None))
    with pytest.raises(UserError, match=r"2 of 4.*\(first: b0\): it has no score: temper score-records"):
        read(tmp_path / "r.db")
    found = read(tmp_path / "r.db", skip_bad=True)
    assert len(found.members) == 1
    assert [line.partition(":")[0] for line in found.left_out] == ["b0", "b1"]
    write_scores(tmp_path / "r.db", {3: Score.error("crashed"), 4: Score.of(1.0)}, "math")
    with pytest.raises(UserError, match=r"its score is no number \(crashed\)"):
        read(tmp_path / "r.db")
    with pytest.raises(UserError, match=r"b1.*fewer than 2 attempts"):
        read(tmp_path / "r.db")


def test_a_prompt_with_one_record_is_refused_where_attempts_are_compared(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r.db", SPEECH)
    write_episode(file, "alone", [say("x", completion([2, 5], [7, 1]))], [ask("q")])
    file.close()
    write_scores(tmp_path / "r.db", {1: Score.of(1.0)}, "people")
    with pytest.raises(UserError, match="fewer than 2 attempts at its prompt"):
        read(tmp_path / "r.db")
    assert len(read(tmp_path / "r.db", needs=RecordNeeds(chats=True)).members) == 1


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (None, "no log-probabilities"),
        (replace(PARAMS, temperature=0.0), "drawn greedily"),
        (replace(PARAMS, temperature=0.7), r"drawn with temperature = 0.7: set sampling.temperature = 0.7, which is 1"),
        (replace(PARAMS, top_p=0.9), "drawn with top_p = 0.9"),
    ],
)
def test_draws_that_no_policy_gradient_can_correct_are_refused(
    params: SamplingParams | None, said: str, tmp_path: Path
) -> None:
    file = RecordFile(tmp_path / "r.db", SPEECH)
    for name in ("one", "two"):
        write_episode(file, name, [say("x", completion([2, 5], [7, 1], params=params))], [ask("q")])
    file.close()
    write_scores(tmp_path / "r.db", {1: Score.of(1.0), 2: Score.of(0.0)}, "people")
    with pytest.raises(UserError, match=said):
        read(tmp_path / "r.db")
    assert read(tmp_path / "r.db", needs=RecordNeeds(min_members=2)).members, "a loss of pairs reads no such thing"


def test_conversations_side_by_side_are_refused_where_credit_goes_along_tokens(tmp_path: Path) -> None:
    """One conversation, a helper that is asked between its two turns, and another that goes straight on."""
    file = RecordFile(tmp_path / "r.db", SPEECH)
    first, more = say("x", completion([2, 5], [7, 1]), ask("more")), say("y", completion([2, 5, 7, 1, 9], [8, 1]))
    write_episode(file, "straight", [first, more], [ask("q")])
    write_episode(file, "helped", [first, say("z", completion([3, 3], [6, 1])), more], [ask("q")])
    file.close()
    write_scores(tmp_path / "r.db", {2: Score.of(1.0), 5: Score.of(0.0)}, "people")
    assert [episode.played.turn_order for episode in read_episodes(tmp_path / "r.db")] == [(0, 1), (0, 2, 1)]
    make = KINDS["rl"].reading.needs_of_records
    assert make is not None
    wanted = {name: make(resolve_preset(name)) for name in ("ppo", "grpo")}
    assert len(read(tmp_path / "r.db", needs=replace(wanted["grpo"], min_members=1)).members) == 1
    with pytest.raises(UserError, match=r"1 of 2 .*first: helped.*do not stand in the order of time"):
        read(tmp_path / "r.db", needs=wanted["ppo"])
    kept = read(tmp_path / "r.db", needs=wanted["ppo"], skip_bad=True)
    assert [len(members) for members in kept.members.values()] == [1], "its turns stand as they came"


def test_records_longer_than_the_context_are_refused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    with pytest.raises(UserError, match=r"more tokens than fit \(4\)"):
        read(tmp_path / "r.db", longest_row=4)


def test_prompts_that_are_held_out_are_not_trained_on(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    held_out = fingerprint(Task(id="h", messages=(ask("question  5"),)))
    found = read(tmp_path / "r.db", excluded=frozenset({held_out}))
    assert [own[0].opening[0].content for own in found.members.values()] == ["question 6"]


def write_days(folder: Path, days: dict[str, list[tuple[str, int, float]]]) -> dict[str, StageSource]:
    """A file chats.db for every day: name, last id of the prompt, and score of each of its episodes."""
    for day, episodes in days.items():
        (folder / day).mkdir()
        file = RecordFile(folder / day / "chats.db", SPEECH)
        for number, (name, prompt, _) in enumerate(episodes):
            turn = say(name, completion([2, prompt], [10 + number, 1]))
            write_episode(file, f"{day}-{name}", [turn], [ask(f"question {prompt}")])
        file.close()
        scores = {number: Score.of(score) for number, (_, _, score) in enumerate(episodes, 1)}
        write_scores(folder / day / "chats.db", scores, "exact")
    return {day: StageSource(records=str(folder / day / "chats.db")) for day in days}


def said_to(found: RecordReader) -> dict[str, list[str]]:
    """By the words of a task's attempts: what was answered."""
    return {own[0].opening[0].content: [one.turns[0].message.content for one in own] for own in found.members.values()}


MONDAY = [("a", 5, 1.0), ("b", 5, 0.0)]


def test_files_of_one_name_keep_their_attempts_apart(tmp_path: Path) -> None:
    parts = write_days(tmp_path, {"mon": MONDAY, "tue": [("c", 6, 0.5), ("d", 6, 1.0)]})
    found = reader()
    sources = found.read([*parts.values()])
    assert said_to(found) == {"question 5": ["a", "b"], "question 6": ["c", "d"]}
    assert [found.members[task.id][0].opening for source in sources for task in source.tasks] == [
        task.messages for source in sources for task in source.tasks
    ]
    assert [task.id for source in sources for task in source.tasks] == ["1/chats.db:1", "2/chats.db:1"]


def test_a_stage_of_several_files_resumes_with_the_next_groups_also_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [*write_days(tmp_path, {"mon": MONDAY, "tue": [("c", 6, 0.5), ("d", 6, 1.0)], "wed": MONDAY}).values()]

    def opened(parts: list[StageSource]) -> RecordedGroups:
        found = reader()
        sources = found.read(parts)
        weights = [float(bool(source.size)) for source in sources]
        one = replace(SETTINGS, groups_per_step=1)
        return RecordedGroups(Stream(sources, weights, seed=1), found.members, one, as_it_is)

    whole, first = opened(parts), opened(parts)
    wanted = [asyncio.run(whole.take(step)).groups for step in range(1, 6)]
    assert {len(group.trajectories) for groups in wanted for group in groups} == {2, 4}, "not drawn from both"
    found = [asyncio.run(first.take(step)).groups for step in (1, 2)]
    monkeypatch.chdir(tmp_path)
    second = opened([StageSource(records=f"{day}/chats.db") for day in ("mon", "tue", "wed")])
    second.load_state(first.state())
    assert found + [asyncio.run(second.take(step)).groups for step in (3, 4, 5)] == wanted


def test_equal_prompts_of_several_files_are_one_group(tmp_path: Path) -> None:
    parts = write_days(tmp_path, {"mon": [("a", 5, 1.0), ("b", 6, 0.0)], "tue": [("c", 6, 1.0), ("d", 5, 0.5)]})
    found = reader()
    first, second = found.read([*parts.values()])
    assert said_to(found) == {"question 5": ["a", "d"], "question 6": ["b", "c"]}
    assert (first.size, second.size) == (2, 0), "a prompt is the task of one source"
    cut = reader()
    cut.read([parts["mon"].model_copy(update={"size": 1}), parts["tue"]])
    assert said_to(cut) == {"question 5": ["a", "d"]}
    with pytest.raises(UserError, match=r"tue/chats.db: weight=2 acts on nothing.* have all its prompts"):
        reader().read([parts["mon"], parts["tue"].model_copy(update={"weight": 2.0})])


def test_a_file_that_nothing_is_trained_on_is_refused_also_beside_others(tmp_path: Path) -> None:
    parts = write_days(tmp_path, {"mon": [*MONDAY, ("e", 6, 1.0)], "tue": [("c", 6, 0.5)]})
    with pytest.raises(UserError, match=r"tue/chats.db: nothing is left to train on: .* cut off by the size"):
        reader().read([parts["mon"].model_copy(update={"size": 1}), parts["tue"]])


def test_a_prompt_with_too_few_attempts_in_all_files_is_refused_or_left_out(tmp_path: Path) -> None:
    parts = write_days(tmp_path, {"mon": MONDAY, "tue": [("c", 6, 0.5), ("d", 5, 1.0)]})
    with pytest.raises(UserError, match=r"tue/chats.db: 1 of 2 .*first: tue-c\): fewer than 2 attempts"):
        reader().read([*parts.values()])
    found = reader()
    found.read([parts["mon"], parts["tue"].model_copy(update={"skip_bad": True})])
    assert said_to(found) == {"question 5": ["a", "b", "d"]}


def test_a_copy_of_a_file_counts_once(tmp_path: Path) -> None:
    parts = write_days(tmp_path, {"mon": MONDAY})
    shutil.copy(tmp_path / "mon" / "chats.db", tmp_path / "copy.db")
    file = RecordFile(tmp_path / "copy.db", SPEECH)
    write_episode(file, "later", [say("later", completion([2, 5], [9, 1]))], [ask("question 5")])
    file.close()
    write_scores(tmp_path / "copy.db", {3: Score.of(0.5)}, "people")
    copy = StageSource(records=str(tmp_path / "copy.db"))
    with pytest.raises(UserError, match=r"2 of 3 .*first: mon-a\): it is in .*mon/chats.db, too: a copy counts once"):
        reader().read([parts["mon"], copy])
    found = reader()
    found.read([parts["mon"], copy.model_copy(update={"skip_bad": True})])
    assert said_to(found) == {"question 5": ["a", "b", "later"]}


def test_plain_completions_are_refused_where_chats_become_rows(tmp_path: Path) -> None:
    write_pairs(tmp_path / "r.db")
    file = RecordFile(tmp_path / "r.db", SPEECH)
    write_episode(file, "cmpl-1", [say("x", completion([2, 5], [7, 1]))], [], has_session=False)
    file.close()
    write_scores(tmp_path / "r.db", {5: Score.of(1.0)}, "people")
    needs = KINDS["rejection"].reading.needs_of_records
    assert needs is not None
    wanted = needs(resolve_preset("grpo"))
    with pytest.raises(UserError, match=r"1 of 5 .*first: cmpl-1/0\): it is a plain completion, and only chats"):
        read(tmp_path / "r.db", needs=wanted)
    assert len(read(tmp_path / "r.db", needs=wanted, skip_bad=True).members) == 2
    assert len(read(tmp_path / "r.db").members) == 2, "a policy gradient takes it for an attempt at its prompt"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stage": [{"kind": "sft"}]}, "a stage of kind sft does not train on records"),
        ({"objective": {"preset": "remax"}}, "one more attempt at temperature 0, which records have not"),
        ({"rollout": {"max_staleness": 1}}, "rollout.max_staleness is about drawing"),
        ({"data": {"choose": ["no_positive_resampling"]}}, "data.choose"),
        ({"stage": [{"kind": "preference", "objective": {"preset": "nash_md"}}]}, "draws opponents"),
        ({"stage": [{"kind": "rejection", "prompt": {"system": "Be kind."}}]}, "once more"),
    ],
)
def test_settings_that_records_cannot_serve_are_refused(
    changes: dict[str, Any], said: str, tiny_recipe: dict[str, Any]
) -> None:
    recipe = {**tiny_recipe, "train": [{"records": "r.db"}], "stage": [{"kind": "rl"}], **changes}
    with pytest.raises(UserError, match=said):
        check_stage(resolve(recipe, [], where="recipe")[0])


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([{"records": "r.db", "path": "x.jsonl"}], "exactly one of path, generator and records"),
        ([{"records": "r.db", "answer_field": "gold"}], "answer_field is about tasks that are asked"),
        ([{"records": "r.db"}, {"path": "x.jsonl"}], "cannot be mixed in one stage"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(
    sources: list[dict[str, Any]], said: str, tiny_recipe: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=said):
        resolve({**tiny_recipe, "train": sources, "stage": [{"kind": "rl"}]}, [], where="recipe")


def test_a_policy_gradient_on_records_is_corrected_unless_the_recipe_says_otherwise(
    tiny_recipe: dict[str, Any],
) -> None:
    recipe = {**tiny_recipe, "train": [{"records": "r.db"}], "stage": [{"kind": "rl"}], "reward": []}
    del recipe["heldout"]
    objective = check_stage(resolve(recipe, [], where="recipe")[0])
    assert [factor.name for factor in objective.corrections] == ["token_tis"]  # type: ignore[union-attr]
    left_alone = check_stage(resolve({**recipe, "objective": {"corrections": []}}, [], where="recipe")[0])
    assert not left_alone.corrections  # type: ignore[union-attr]
