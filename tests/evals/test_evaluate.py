"""A held-out score counts what it says it counts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from temper.envs.env import make_env
from temper.envs.single_turn import SingleTurn
from temper.errors import BackendError
from temper.evals.evaluate import Evaluation, HeldOut, constant_answer_score, constant_scores, evaluate, prompts_hash
from temper.protocols import EnvReply
from temper.rollout.episode import EpisodeSetup
from temper.types import Message, Publication, Request, SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler


class Digits:
    """The prompt is a number; so is the answer."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools=()) -> tuple[int, ...]:
        return (int(messages[-1].content) + 10,)

    def extend_ids(self, *_: object, tools=()) -> tuple[int, ...]:
        raise AssertionError("one turn only")

    def decode(self, ids: Sequence[int]) -> str:
        return str(ids[0] - 10)


class Equal(FakeScorer):
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        if task.answer == "broken":
            return Score.error("verifier crashed"), {}
        return Score.of(float(trajectory.text == task.answer)), {}


def tasks(*answers: str) -> list[Task]:
    return [Task(id=f"t{i}", messages=(Message(role="user", content=str(i)),), answer=a) for i, a in enumerate(answers)]


def setup(sampler: FakeSampler) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=sampler, renderer=Digits(), scorer=Equal(), make_env=make_env,
        params=SamplingParams(max_new_tokens=4, stop_ids=(1,)), max_turns=1, episode_seconds=5.0, seed=0,
    )  # fmt: skip


def echo(request: Request) -> list[int]:
    return [request.prompt_ids[0], 1]


class Generous(Equal):
    """A training reward that likes everything."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(1.0), {}


def held_out(sampler: FakeSampler, heldout: Sequence[Task], reward: Equal | None = None, **changes: Any) -> HeldOut:
    """Judged by Equal; `reward`: another training reward."""
    verifier = Equal()
    shared = dataclasses.replace(setup(sampler), scorer=reward or verifier)
    made = HeldOut(setup=shared, tasks=heldout, verifier=verifier, verifier_name="equal", constant_scores={"": 0.25})
    return dataclasses.replace(made, **changes)


GREEDY = Evaluation(name="greedy", temperature=0.0, samples=1)
SAMPLED = Evaluation(name="sampled", temperature=0.5, samples=3)


def test_the_score_is_the_share_of_right_answers_with_its_interval() -> None:
    sampler = FakeSampler(echo)
    (result,), *_ = asyncio.run(evaluate(held_out(sampler, tasks("0", "1", "9", "9")), SAMPLED, stage=1, step=7))
    assert (result.score, result.num_prompts, result.samples_per_prompt) == (0.5, 4, 3)
    assert result.low < 0.5 < result.high
    assert {request.params.temperature for request in sampler.requests} == {0.5}
    assert len({request.id for request in sampler.requests}) == 12
    assert all(request.id.startswith("eval/1/7/sampled/") for request in sampler.requests)


def test_an_evaluation_has_decoding_settings_of_its_own_and_keeps_them_with_the_result() -> None:
    sampler = FakeSampler(echo)
    heldout = held_out(sampler, tasks("0"))
    trained = dataclasses.replace(heldout.setup.params, top_k=5, top_p=0.9, top_logprobs=3, entropy=True)
    heldout = dataclasses.replace(heldout, setup=dataclasses.replace(heldout.setup, params=trained))
    own = dataclasses.replace(SAMPLED, top_p=0.5, max_new_tokens=2)
    (result,), *_ = asyncio.run(evaluate(heldout, own, stage=0, step=0))
    (asked,) = {request.params for request in sampler.requests}
    assert asked == dataclasses.replace(
        trained, temperature=0.5, top_p=0.5, max_new_tokens=2, top_logprobs=0, entropy=False
    )
    assert {name: result.budget[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens", "verifier")} == {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_new_tokens": 2, "verifier": "equal"
    }  # fmt: skip
    (inherited,), *_ = asyncio.run(evaluate(heldout, SAMPLED, stage=0, step=1))
    assert (inherited.budget["top_p"], inherited.budget["max_new_tokens"]) == (0.9, 4)
    (greedy,), *_ = asyncio.run(evaluate(heldout, GREEDY, stage=0, step=2))
    assert (greedy.budget["temperature"], greedy.budget["top_p"], greedy.budget["top_k"]) == (0.0, 1.0, 0)


@pytest.mark.parametrize("when", ["while tokens are drawn", "after the last token"])
def test_weights_that_change_during_an_evaluation_end_it(when: str) -> None:
    publication = Publication(version=8, tensors={})

    async def load_meanwhile(request: Request) -> None:
        if request.id.endswith("t1/0/0") and when == "while tokens are drawn":
            await sampler.load(publication)

    class Late(Equal):
        async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
            await sampler.load(publication)
            return await super().score(task, trajectory)

    sampler = FakeSampler(echo, delay=load_meanwhile)
    reward = Late() if when == "after the last token" else None
    heldout = held_out(sampler, tasks("0", "1"), reward)
    with pytest.raises(BackendError, match="version 0 were to be evaluated, and the sampler loaded version 8"):
        asyncio.run(evaluate(heldout, GREEDY, stage=0, step=0))
    (again,), *_ = asyncio.run(evaluate(dataclasses.replace(heldout, setup=setup(sampler)), GREEDY, stage=0, step=1))
    assert again.score == 1.0, "at the new version from its start, nothing is wrong"


def test_a_sampler_that_breaks_is_one_error_and_not_one_for_every_attempt() -> None:
    def broken(request: Request) -> list[int]:
        raise BackendError("it was killed")

    with pytest.raises(BackendError, match="it was killed"):
        asyncio.run(evaluate(held_out(FakeSampler(broken), tasks("0", "1", "2")), GREEDY, stage=0, step=0))


def test_the_held_out_verifier_gives_the_score_and_the_training_reward_shows_its_flattery() -> None:
    heldout = held_out(FakeSampler(echo), tasks("0", "1", "2", "9"), Generous())
    (result,), audits, _ = asyncio.run(evaluate(heldout, GREEDY, stage=0, step=3, reward=0.95))
    assert result.score == 0.75
    assert result.details["reward_mean"] == 1.0
    assert result.details["proxy_gap"] == 0.25
    assert result.details["reward_heldout_gap"] == pytest.approx(0.2)
    assert {(audit.task_id, audit.reward, audit.heldout) for audit in audits if audit.kind == "top"} == {
        ("t0", 1.0, 1.0), ("t1", 1.0, 1.0), ("t2", 1.0, 1.0), ("t3", 1.0, 0.0)
    }  # fmt: skip


def test_without_a_verifier_of_its_own_an_evaluation_claims_no_gap() -> None:
    (result,), *_ = asyncio.run(evaluate(held_out(FakeSampler(echo), tasks("0", "9")), GREEDY, stage=0, step=0))
    assert "proxy_gap" not in result.details
    assert "reward_heldout_gap" not in result.details
    assert result.details["reward_mean"] == result.score == 0.5


def test_details_hold_pass_at_k_lengths_and_truncation() -> None:
    def sometimes(request: Request) -> list[int]:
        """Right in the first of four attempts, cut short in the last."""
        attempt = int(request.id.split("/")[-2])
        right = request.prompt_ids[0]
        return [right if attempt == 0 else 19, *([2] * 9 if attempt == 3 else [1])]

    way = Evaluation(name="sampled", temperature=1.0, samples=4)
    (result,), *_ = asyncio.run(evaluate(held_out(FakeSampler(sometimes), tasks("0", "1")), way, stage=0, step=0))
    assert result.score == 0.25
    at_2, cut = result.details["pass@2"], result.details["truncated"]
    assert isinstance(at_2, Mapping)
    assert isinstance(cut, Mapping)
    assert at_2["score"] == 0.5
    assert at_2["low"] < 0.5 < at_2["high"]
    assert cut["score"] == 0.25
    assert result.details["tokens"]["score"] == (3 * 2 + 4) / 4


def test_details_hold_how_many_answers_look_back() -> None:
    class Talking(Digits):
        def decode(self, ids: Sequence[int]) -> str:
            return {20: "wait, 4", 21: "no, that is wrong. wait: 4"}.get(ids[0], "4")

    def sometimes(request: Request) -> list[int]:
        return [{0: 20, 1: 21}.get(int(request.id.split("/")[-2]), 14), 1]

    heldout = held_out(FakeSampler(sometimes), tasks("4", "4"))
    heldout = dataclasses.replace(heldout, setup=dataclasses.replace(heldout.setup, renderer=Talking()))
    way = Evaluation(name="sampled", temperature=1.0, samples=4)
    (result,), *_ = asyncio.run(evaluate(heldout, way, stage=0, step=0))
    reflection, backtracking = result.details["reflection"], result.details["backtracking"]
    assert isinstance(reflection, Mapping)
    assert isinstance(backtracking, Mapping)
    assert (reflection["score"], backtracking["score"]) == (0.5, 0.25)
    assert reflection["low"] < 0.5 < reflection["high"]


def test_a_failed_verifier_is_not_a_wrong_answer() -> None:
    heldout = held_out(FakeSampler(echo), tasks("0", "broken"))
    with pytest.raises(BackendError, match=r"task t1 could not be scored: verifier crashed \(1 of 2 attempts\)"):
        asyncio.run(evaluate(heldout, GREEDY, stage=0, step=0))


def test_a_few_failures_within_the_limit_are_left_out_and_counted() -> None:
    heldout = held_out(FakeSampler(echo), tasks("0", "broken"), error_limit=0.5)
    (result,), audits, _ = asyncio.run(evaluate(heldout, GREEDY, stage=0, step=0))
    assert result.score == 1.0
    unscorable = result.details["unscorable"]
    assert isinstance(unscorable, Mapping)
    assert unscorable["score"] == 0.5
    assert {audit.heldout for audit in audits if audit.kind == "random"} == {1.0, None}
    everything = dataclasses.replace(heldout, tasks=tasks("broken"), error_limit=1.0)
    with pytest.raises(BackendError, match=r"\(1 of 1 attempts\)$"):
        asyncio.run(evaluate(everything, GREEDY, stage=0, step=0))


class FailsFirst(SingleTurn):
    """Its first `failures` episodes break, whichever they are."""

    begun = failures = 0

    async def step(self, message: Message) -> EnvReply:
        FailsFirst.begun += 1
        if FailsFirst.begun <= FailsFirst.failures:
            raise RuntimeError("no connection")
        return await super().step(message)


def failing(failures: int, **changes: Any) -> HeldOut:
    """Two tasks, both answered rightly where their episodes do not break."""
    FailsFirst.begun, FailsFirst.failures = 0, failures
    made = held_out(FakeSampler(echo), tasks("0", "1"), **changes)
    return dataclasses.replace(made, setup=dataclasses.replace(made.setup, make_env=lambda name: FailsFirst()))


def test_a_held_out_episode_that_fails_is_played_anew_as_in_training() -> None:
    heldout = failing(2, retries=2)
    (result,), *_ = asyncio.run(evaluate(heldout, GREEDY, stage=0, step=0))
    assert result.score == 1.0
    assert result.details["unscorable"]["score"] == 0.0
    ids = [request.id for request in heldout.setup.sampler.requests]
    assert sorted(ids) == [
        "eval/0/0/greedy/t0/0/0", "eval/0/0/greedy/t0/0/retry 1/0",
        "eval/0/0/greedy/t1/0/0", "eval/0/0/greedy/t1/0/retry 1/0",
    ], "each attempt draws other numbers, and nothing else changes them"  # fmt: skip


def test_held_out_episodes_that_fail_name_the_keys_that_help() -> None:
    with pytest.raises(BackendError, match=r"no connection, .* \(1 of 2 attempts\)\. ") as caught:
        asyncio.run(evaluate(failing(1, error_limit=0.1), GREEDY, stage=0, step=0))
    assert "rollout.retries=0 is how often an episode that fails is played anew" in str(caught.value)
    assert "rollout.error_limit=0.1 is the share of attempts that may be left out" in str(caught.value)
    with pytest.raises(BackendError, match=r"\(2 of 2 attempts\)") as caught:
        asyncio.run(evaluate(failing(4, error_limit=0.1, retries=1), GREEDY, stage=0, step=0))
    assert "rollout.retries=1 is" in str(caught.value)
    assert "error_limit" not in str(caught.value), "without any score there is no result, whatever the limit"
    with pytest.raises(BackendError, match="verifier crashed") as caught:
        asyncio.run(evaluate(held_out(FakeSampler(echo), tasks("0", "broken")), GREEDY, stage=0, step=0))
    assert "retries" not in str(caught.value), "an answer that cannot be judged is not played anew"


def test_the_commonest_answer_is_scored_on_every_task() -> None:
    assert asyncio.run(constant_answer_score(Equal(), tasks("3", "3", "5", "3"))) == 0.75


def test_the_budget_tells_other_prompts_apart() -> None:
    assert prompts_hash(tasks("1", "2")) == prompts_hash(tasks("1", "2")) != prompts_hash(tasks("1", "3"))


def test_sets_with_names_have_results_of_their_own_beside_that_of_all() -> None:
    """Drawn once: the parts are of the same answers as the whole."""
    sampler = FakeSampler(echo)
    mixed = [dataclasses.replace(task, source="ab"[place > 0]) for place, task in enumerate(tasks("0", "1", "9", "9"))]
    scores = asyncio.run(constant_scores(Equal(), mixed))
    assert scores == {"": 0.5, "a": 1.0, "b": pytest.approx(2 / 3)}
    heldout = held_out(sampler, mixed, constant_scores=scores)
    (whole, first, second), *_ = asyncio.run(evaluate(heldout, SAMPLED, stage=1, step=7, reward=0.75))
    assert [one.name for one in (whole, first, second)] == ["sampled", "sampled/a", "sampled/b"]
    assert [one.score for one in (whole, first, second)] == [0.5, 1.0, pytest.approx(1 / 3)]
    assert [one.num_prompts for one in (whole, first, second)] == [4, 1, 3]
    assert [one.constant_score for one in (whole, first, second)] == [0.5, 1.0, pytest.approx(2 / 3)]
    assert len({str(one.budget["prompts_sha256"]) for one in (whole, first, second)}) == 3
    assert [one.details.get("reward_heldout_gap") for one in (whole, first, second)] == [0.25, None, None]
    assert len(sampler.requests) == 12
    assert asyncio.run(constant_scores(Equal(), tasks("0", "1"))).keys() == {""}
