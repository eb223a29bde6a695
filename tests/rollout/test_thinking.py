"""Thinking is closed at its budget: the text that is put in is seen by all and trained by nobody."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from temper.batching import CreditRules, make_batch, pack, rows_of
from temper.batching.measure import measure_groups
from temper.build import build_stage, check_stage, first_model
from temper.commands.training.train import train
from temper.config import resolve as resolve_recipe
from temper.config import to_toml
from temper.engine.local.engine import EngineSettings, LocalEngine
from temper.engine.pieces import join
from temper.errors import ContextFull, UserError
from temper.objectives import resolve
from temper.protocols import EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.thinking import Thinking, draw
from temper.runs.reader import RunReader
from temper.runs.store.arrays import ARRAY_TYPES, PLANES, unpack_array
from temper.runs.store.encode import untrained_rows
from temper.types import (
    Batch,
    Completion,
    Finish,
    Group,
    Message,
    Request,
    Sample,
    SamplingParams,
    Score,
    Status,
    StepReport,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import END, FakeScorer, Letters
from tests.fakes.models import make_family_model
from tests.fakes.sampler import FakeSampler
from tests.rollout.test_exact import ROOMY, differing, make_model
from tests.trainer.test_local import is_same, make_trainer, weights

LETTERS = Letters()
TASK = Task(id="t", messages=(Message(role="user", content="ab"),))


def ids(text: str) -> list[int]:
    return LETTERS.encode(text)


def thinking(budget: int = 4, closing: str = "</>.", end: str = "</>") -> Thinking:
    return Thinking(budget=budget, closing_ids=tuple(ids(closing)), end=end, end_ids=tuple(ids(end)))


class Said(FakeScorer):
    """Keeps what it judged."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        self.texts.append(trajectory.text)
        return Score.of(1.0), {}


class Turns:
    """Answers ">" until it has heard enough."""

    def __init__(self, count: int) -> None:
        self._left = count

    async def start(self, task: Task, seed: int) -> EnvOpening:
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        self._left -= 1
        return EnvReply(messages=(Message(role="user", content=">"),), is_done=self._left == 0)

    async def close(self) -> None:
        """Nothing is open."""


def rambling(request: Request) -> list[int]:
    """Thinks for ever, and answers as soon as its thinking is closed."""
    return [*ids("42"), END] if LETTERS.decode(request.prompt_ids).endswith("</>.") else ids("x" * 50)


def play(
    script: Any, *, turns: int = 1, given: Thinking | None = None, episode_tokens: int = 0, **params: Any
) -> tuple[Trajectory, FakeSampler, Said]:
    sampler, scorer = FakeSampler(script), Said()
    setup = EpisodeSetup(
        sampler=sampler,
        renderer=LETTERS,
        scorer=scorer,
        make_env=lambda name: Turns(turns),
        params=SamplingParams(**{"max_new_tokens": 20, "stop_ids": (END,)} | params),
        max_turns=turns,
        episode_seconds=5.0,
        max_episode_tokens=episode_tokens,
        thinking=given or thinking(),
        seed=0,
    )
    trajectory = asyncio.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))
    return trajectory, sampler, scorer


def test_an_answer_that_thinks_too_long_is_closed_and_answers() -> None:
    trajectory, sampler, scorer = play(rambling)
    (turn,) = trajectory.turns
    assert scorer.texts == [turn.message.content] == ["xxxx</>.42"]
    assert trajectory.status is Status.COMPLETED
    completion = turn.completion
    assert completion.token_ids == [*ids("xxxx</>.42"), END]
    assert completion.loss_mask.tolist() == [1] * 4 + [0] * 4 + [1] * 3
    assert completion.logprobs == [-1.0] * 4 + [0.0] * 4 + [-1.0] * 3
    assert completion.versions == [0] * 4 + [-1] * 4 + [0] * 3
    assert completion.params == SamplingParams(max_new_tokens=20, stop_ids=(END,)), "as the whole was asked for"
    assert (trajectory.num_tokens, trajectory.oldest_version, trajectory.newest_version) == (7, 0, 0)
    first, second = sampler.requests
    assert first.id == second.id, "its random numbers go on"
    assert second.prompt_ids == (*first.prompt_ids, *ids("xxxx</>."))
    assert (first.params.max_new_tokens, second.params.max_new_tokens) == (4, 12)


@pytest.mark.parametrize("thought", ["</>x", "x</>", "</>"])
def test_who_closes_thinking_in_time_is_not_interrupted(thought: str) -> None:
    def script(request: Request) -> list[int]:
        whole = [*ids(thought), *ids("yyyyyy"), END]
        return whole[len(request.prompt_ids) - 2 :]

    trajectory, _, scorer = play(script)
    assert scorer.texts == [f"{thought}yyyyyy"]
    assert not trajectory.turns[0].completion.injected
    assert trajectory.num_tokens == len(thought) + 7


def test_an_answer_within_the_budget_is_asked_for_once() -> None:
    trajectory, sampler, _ = play(lambda request: [*ids("7"), END])
    assert len(sampler.requests) == 1
    assert trajectory.turns[0].completion.params == SamplingParams(max_new_tokens=20, stop_ids=(END,))


def test_an_end_that_texts_leave_out_is_known_by_its_token() -> None:
    special = dataclasses.replace(thinking(), end_ids=(END, ord("t")))
    assert special.is_over([ord("x"), END, ord("t")], LETTERS.decode)
    assert not special.is_over([END, ord("x"), ord("t")], LETTERS.decode)
    assert not special.is_over([ord("x")], LETTERS.decode)


def test_what_follows_ends_at_the_limit_of_the_whole_answer() -> None:
    trajectory, _, _ = play(lambda request: ids("x" * 50), max_new_tokens=11)
    assert trajectory.status is Status.TRUNCATED_LENGTH
    assert trajectory.text == "xxxx</>.xxx"
    assert trajectory.num_tokens == 7
    (row,) = rows_of(trajectory)
    assert row.loss_mask == [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]


def test_without_room_for_an_answer_nothing_is_put_in() -> None:
    trajectory, sampler, _ = play(lambda request: ids("x" * 50), max_new_tokens=8)
    assert trajectory.text == "x" * 8
    assert len(sampler.requests) == 1


def test_every_turn_has_a_budget_of_its_own_and_the_episode_counts_what_was_drawn() -> None:
    trajectory, _, _ = play(rambling, turns=2)
    assert [turn.message.content for turn in trajectory.turns] == ["xxxx</>.42"] * 2
    (row,) = rows_of(trajectory)
    assert LETTERS.decode(row.token_ids) == "abxxxx</>.42>xxxx</>.42"
    drawn = "".join(chr(token) for token, m in zip(row.token_ids, row.loss_mask, strict=True) if m)
    assert drawn == f"xxxx42{chr(END)}" * 2
    assert [v for v, m in zip(row.versions, row.loss_mask, strict=True) if not m] == [-1] * 11
    _, short, _ = play(rambling, turns=2, episode_tokens=16)
    limits = [request.params.max_new_tokens for request in short.requests]
    assert limits == [4, 8, 4, 1], "7 of 16 were drawn, 9 are left: 4, the text, and 1"


def test_most_likely_tokens_and_keep_sets_stay_at_their_tokens() -> None:
    trajectory, _, _ = play(rambling, top_k=2, top_logprobs=2)
    completion = trajectory.turns[0].completion
    keep_ids, top_ids = completion.keep_ids, completion.top_ids
    assert keep_ids is not None
    assert top_ids is not None
    for place, token in enumerate(completion.token_ids):
        is_drawn = bool(completion.loss_mask[place])
        assert list(keep_ids[place]) == ([token, token + 1] if is_drawn else [])
        assert (token in top_ids[place]) == is_drawn
    (row,) = rows_of(trajectory)
    (microbatch,) = pack([row], 100)
    assert microbatch.keep_counts is not None
    assert microbatch.keep_counts.tolist() == [0, 0] + [2] * 4 + [0] * 4 + [2] * 3
    assert microbatch.top_logprobs is not None
    assert microbatch.top_logprobs[microbatch.loss_mask == 0].abs().max() == 0


# A sampler with stop texts, and one that fails


def drawn_by(script: str, given: Thinking, *, stop: Sequence[str] = (), context: int = 99) -> Completion:
    """What is drawn where a sampler says `script` whatever it is asked, up to a stop text in what it said itself."""
    params = SamplingParams(max_new_tokens=20, stop_ids=(END,), stop=tuple(stop))
    request = Request(id="r", prompt_ids=(1, 2), params=params)

    async def generate(asked: Request) -> Completion:
        num_before = len(asked.prompt_ids) - 2
        if len(asked.prompt_ids) > context:
            raise ContextFull("full")
        said = script[num_before:][: asked.params.max_new_tokens]
        ends = [said.find(text) + len(text) for text in stop if text in said]
        finish = Finish.STOP if ends else Finish.LENGTH
        said = said[: min(ends)] if ends else said
        return Completion(
            prompt_ids=asked.prompt_ids, token_ids=ids(said), logprobs=np.arange(len(said), dtype=np.float32) - 9,
            versions=[3] * len(said), finish=finish, entropies=[0.5] * len(said), params=asked.params,
        )  # fmt: skip

    return asyncio.run(draw(generate, request, given, LETTERS.decode))


def test_a_stop_text_ends_the_answer_on_either_side_of_the_seam_and_across_it() -> None:
    closed = thinking(budget=6)
    assert LETTERS.decode(drawn_by("x;;xxxxx", closed, stop=[";;"]).token_ids) == "x;;"
    behind = drawn_by("xxxxxx____ab;;cd", closed, stop=[";;"])  # four places are those of the closing text
    assert (LETTERS.decode(behind.token_ids), behind.finish) == ("xxxxxx</>.ab;;", Finish.STOP)
    across = drawn_by("</>xx;;cdefgh", closed, stop=[";;"])
    assert (LETTERS.decode(across.token_ids), across.finish) == ("</>xx;;", Finish.STOP)
    assert across.logprobs == [-9, -8, -7, -6, -5, -4, -9]
    assert across.entropies == [0.5] * 7
    put_in = drawn_by("xxxxxx____;cdefgh", closed, stop=[".;"])
    assert LETTERS.decode(put_in.token_ids) == "xxxxxx</>.;"
    assert put_in.entropies == [0.5] * 6 + [0.0] * 4 + [0.5]


def test_a_full_context_cuts_the_answer_where_it_is() -> None:
    cut = drawn_by("x" * 30, thinking(), context=8)
    assert (LETTERS.decode(cut.token_ids), cut.finish) == ("xxxx", Finish.LENGTH)
    assert not cut.injected


def test_an_answer_that_was_aborted_behind_the_text_was_never_given_it() -> None:
    first = Completion(prompt_ids=(1,), token_ids=[5], logprobs=[-1.0], versions=[0], finish=Finish.LENGTH)
    nothing = dataclasses.replace(first, token_ids=[], logprobs=[], versions=[], finish=Finish.ABORT)
    joined = join(first, (7, 7), nothing)
    assert (joined.token_ids, joined.finish, len(joined.injected)) == ([5], Finish.ABORT, 0)


def test_what_was_put_in_cannot_have_been_drawn() -> None:
    fields: dict[str, Any] = {"prompt_ids": (1,), "token_ids": [5, 6], "finish": Finish.STOP, "injected": range(1, 2)}
    with pytest.raises(AssertionError, match="was not drawn"):
        Completion(logprobs=[-1.0, 0.0], versions=[0, 0], **fields)
    with pytest.raises(AssertionError, match="was not drawn"):
        Completion(logprobs=[-1.0, -1.0], versions=[0, -1], **fields)


# Sampler and trainer


def closed_completions(model: Any, given: Thinking | None, **asked: Any) -> list[Completion]:
    engine = LocalEngine(model, EngineSettings(seed=5, max_length=200, **ROOMY))
    params = SamplingParams(max_new_tokens=20, **asked)
    prompts = [tuple((7 * i + 3 * j) % 299 for j in range(length)) for i, length in enumerate((3, 40, 17, 70, 9))]

    async def run() -> list[Completion]:
        requests = [Request(id=f"r{i}", prompt_ids=prompt, params=params) for i, prompt in enumerate(prompts)]
        decode = lambda drawn: "".join(f"<{token}>" for token in drawn)  # noqa: E731
        return await asyncio.gather(*(draw(engine.generate, request, given, decode) for request in requests))

    return asyncio.run(run())


def as_trajectory(completion: Completion, index: int = 0, reward: float = 0.0) -> Trajectory:
    turn = Turn(completion=completion, message=Message(role="assistant", content=""))
    return Trajectory(
        task_id="t", group_id="g", index=index, turns=(turn,), status=Status.COMPLETED, score=Score.of(reward)
    )


CLOSE = Thinking(budget=7, closing_ids=(11, 12, 13), end="<11><12>", end_ids=(11, 12))


@pytest.mark.parametrize("asked", [{}, {"top_k": 20}], ids=["whole vocabulary", "top_k"])
def test_sampler_and_trainer_agree_to_the_bit_around_what_was_put_in(asked: dict[str, Any]) -> None:
    model = make_model("llama", "exact")
    completions = closed_completions(model, CLOSE, **asked)
    assert all(completion.token_ids[7:10] == [11, 12, 13] for completion in completions)
    rows = [row for index, c in enumerate(completions) for row in rows_of(as_trajectory(c, index))]
    assert [row.num_actions for row in rows] == [17] * 5
    assert differing(model, rows, 1.0, 100_000) == 0
    moved = [dataclasses.replace(row, token_ids=[1, *list(row.token_ids)[1:]]) for row in rows]
    assert differing(model, moved, 1.0, 100_000) > 0, "the check can fail"


def test_who_is_not_interrupted_draws_what_would_have_been_drawn_without_a_budget() -> None:
    model = make_model("llama", "exact")
    plain = closed_completions(model, None)
    in_two = closed_completions(model, dataclasses.replace(CLOSE, end="<", end_ids=(0,)))
    assert [c.token_ids for c in in_two] == [c.token_ids for c in plain]
    assert [c.logprobs for c in in_two] == [c.logprobs for c in plain]
    assert not any(c.injected for c in in_two)


def credited_rows() -> list[Sample]:
    """Two answers, both closed, with credit."""
    completions = [
        Completion(
            prompt_ids=(1, 2), token_ids=[5, 6, 30, 31, place, 9], logprobs=[-1.0, -1.0, 0.0, 0.0, -1.0, -1.0],
            versions=[0, 0, -1, -1, 0, 0], finish=Finish.STOP, injected=range(2, 4),
        )
        for place in (7, 8)
    ]  # fmt: skip
    members = tuple(as_trajectory(c, index, float(index)) for index, c in enumerate(completions))
    group = Group(id="g", draw=0, task=TASK, trajectories=members)
    rules = CreditRules(objective=resolve("dapo"), max_new_tokens=8)
    (rows,) = make_batch([group], rules, score=lambda rows, who: [], version=0).updates
    return list(rows)


def changed(row: Sample, **columns: float) -> Sample:
    """With other numbers in the columns where the text was put in."""
    given = {name: [value if place in (4, 5) else x for place, x in enumerate(getattr(row, name))]
             for name, value in columns.items()}  # fmt: skip
    return dataclasses.replace(row, **given)  # type: ignore[arg-type]


def trained(rows: Sequence[Sample]) -> dict[str, torch.Tensor]:
    trainer = make_trainer(make_family_model(dtype=torch.float32), resolve("dapo", {"proximal": "behavior"}))
    trainer.step(Batch(updates=(tuple(rows),)))
    return weights(trainer)


def test_tokens_that_were_put_in_have_no_gradient() -> None:
    rows = credited_rows()
    assert [row.weights for row in rows] == [[0, 0, 1 / 8, 1 / 8, 0, 0, 1 / 8, 1 / 8]] * 2, "nor a share in any mean"
    expected = trained(rows)
    odd = [changed(row, behavior_logprobs=-7.0, advantages=-5.0, weights=3.0) for row in rows]
    assert is_same(trained(odd), expected)
    assert not is_same(trained([changed(row, loss_mask=1) for row in odd]), expected), "a mask of 1 would be seen"


def test_metrics_count_what_was_drawn() -> None:
    rows_group = Group(
        id="g", draw=0, task=TASK,
        trajectories=(play(rambling)[0], play(lambda request: [*ids("7"), END])[0]),
    )  # fmt: skip
    metrics = measure_groups([rows_group], (), 2)
    assert metrics["gen/closed_rate"] == 0.5
    assert metrics["gen/len_mean"] == (7 + 2) / 2
    assert metrics["stale/token_hist/02"] == 1.0, "what was put in has no age"
    assert metrics["stale/max"] == 2.0


def test_the_store_masks_what_was_put_in_also_where_nothing_is_trained() -> None:
    report = StepReport(
        stage=0, step=1, version=1, loss=0.0, metrics={}, seconds={}, system={}, groups_trained=0, groups_dropped=1,
        max_staleness=0,
    )  # fmt: skip
    (row,) = untrained_rows(report, play(rambling)[0])
    mask = unpack_array(row[5 + list(ARRAY_TYPES).index("loss_mask")], "loss_mask", PLANES)
    assert mask.tolist() == [0, 0] + [1] * 4 + [0] * 4 + [1] * 3


# A run


def recipe_with(recipe: dict[str, Any], given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    stage = {**recipe["stage"][1], "steps": 2, "sampling": {"max_new_tokens": 8}, **changes}
    stage["rollout"] = {"groups_per_step": 2, "group_size": 4, "thinking": given}
    return {**recipe, "stage": [stage], "engine": {"numerics": "exact"}}


def test_a_run_with_a_budget_is_on_policy_to_the_bit_and_shows_what_was_put_in(
    tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    table = recipe_with(tiny_recipe, {"budget": 3, "closing": "zy", "end": "zy"})
    path.write_text(to_toml(resolve_recipe(table, [], where="tiny")))
    train(path, run=tmp_path / "run")
    with RunReader(tmp_path / "run") as reader:
        steps = [reader.metrics_at(0, step.step) for step in reader.steps()]
        results = reader.evaluations()
        closed = [t for step in (1, 2) for t in reader.trajectories(0, step) if t.text and t.text[3:5] == "zy"]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["gen/closed_rate"] > 0
        assert metrics["mismatch/logp_abs_max"] == 0.0
        assert metrics["policy/ratio_max"] == 1.0
    assert {result.budget["thinking_budget"] for result in results} == {3}
    for trajectory in closed:
        (row,) = trajectory.rows
        first = list(row.loss_mask).index(1)
        assert list(row.loss_mask[first : first + 6]) == [1, 1, 1, 0, 0, 1], "three letters, the text, and on"
        assert list(row.versions[first + 3 : first + 5]) == [-1, -1]
        assert trajectory.num_tokens == sum(row.loss_mask)
    assert len(closed) > 4


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        ({"budget": 6, "closing": "zy", "end": "zy"}, {}, "leave nothing of sampling.max_new_tokens=8 for an answer"),
        ({"budget": 3, "closing": "z<|end|>", "end": "z"}, {}, "holds a token that ends the turn"),
        ({"budget": 3, "closing": "zy", "end": "z"}, {"sampling": {"max_new_tokens": 8, "stop": ["zy"]}}, "stop text"),
        ({"budget": 3, "closing": "zy", "end": "z"}, {"objective": {"preset": "vineppo"}}, "from inside an answer"),
        ({"budget": 3, "closing": "ZY", "end": "Z"}, {}, "cannot encode"),
        (
            {"budget": 3, "closing": "zy", "end": "z"},
            {"evaluation": {"max_new_tokens": 5}},
            "leave nothing of evaluation.max_new_tokens=5 for an answer",
        ),
    ],
)
def test_a_budget_that_could_never_act_is_refused(
    tiny_recipe: dict[str, Any], tmp_path: Path, given: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    (config,) = resolve_recipe(recipe_with(tiny_recipe, given, **changes), [], where="tiny")
    check_stage(config)
    with pytest.raises(UserError, match=message):
        build_stage(config, 0, first_model(config, tmp_path))


def test_a_closing_text_that_closes_nothing_is_refused(tiny_recipe: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not hold end='</think>', so thinking would go on"):
        resolve_recipe(recipe_with(tiny_recipe, {"budget": 3, "closing": "zy"}), [], where="tiny")
