"""Steps begin where they should, and their values are the means of what really came after them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from temper.envs.env import make_env
from temper.errors import BackendError, TaskError, UserError
from temper.protocols import EnvOpening, EnvReply
from temper.rollout.episode import EpisodeSetup, run_episode
from temper.rollout.steps import StepSplit, estimate_steps, step_starts
from temper.types import (
    Completion,
    Event,
    EventKind,
    Finish,
    Message,
    Request,
    SamplingParams,
    Score,
    Status,
    Task,
    Trajectory,
    Turn,
)
from tests.fakes.episodes import END, FakeScorer, Letters
from tests.fakes.sampler import FakeSampler

STOP = 0
PIECES = [b"", b"a", b"b", b"\n", b"\n\n", b"a\nb", b"b\n", b"\na", b"\na\nb", "ü".encode()[:1], "ü".encode()[1:]]
A, B, NEWLINE, TWO_NEWLINES, A_NEWLINE_B, B_NEWLINE, NEWLINE_A, TWO_LINES, HALF, OTHER_HALF = range(1, 11)
YES, NO, SILENCE = 20, 21, 22
TASK = Task(id="t", messages=(Message(role="user", content="q"),))
PROMPT = (50, 51)


class Pieces:
    """Ids are pieces of bytes, as in a byte-level tokenizer; the stop token has no text."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools=()) -> tuple[int, ...]:
        return PROMPT

    def extend_ids(self, *_: object, tools=()) -> tuple[int, ...]:
        raise AssertionError("one turn only")

    def decode(self, ids: Sequence[int]) -> str:
        words = {YES: b"yes", NO: b"no", SILENCE: b"?"}
        return b"".join(words.get(i) or PIECES[i] for i in ids).decode(errors="replace")


class Judge(FakeScorer):
    """1 for an answer that ends in yes, 0 for no, nothing for ?. Remembers what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Trajectory] = []

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        self.seen.append(trajectory)
        if trajectory.text.endswith("?"):
            return Score.unscorable("the judge is silent"), {}
        return Score.of(float(trajectory.text.endswith("yes"))), {}


def completion(ids: list[int], finish: Finish = Finish.STOP) -> Completion:
    count = len(ids)
    return Completion(
        prompt_ids=PROMPT, token_ids=ids, logprobs=[-0.5] * count, versions=[3] * count, finish=finish
    )  # fmt: skip


def trajectory(ids: list[int], score: Score | None = None, num_turns: int = 1) -> Trajectory:
    turn = Turn(completion=completion(ids), message=Message(role="assistant", content=Pieces().decode(ids)))
    return Trajectory(
        task_id="t", group_id="g", index=2, turns=(turn,) * num_turns, status=Status.COMPLETED,
        score=score or Score.of(1.0),
    )  # fmt: skip


def make_setup(sampler: FakeSampler, judge: Judge | None = None, seconds: float = 5.0) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=sampler, renderer=Pieces(), scorer=judge or Judge(), make_env=make_env,
        params=SamplingParams(max_new_tokens=10, stop_ids=(STOP,), temperature=0.8, top_logprobs=3), max_turns=1,
        episode_seconds=seconds, seed=0,
    )  # fmt: skip


def place_of(request: Request) -> tuple[int, int]:
    """(step, sample) out of a request id."""
    _, step, sample = request.id.rsplit("/", 2)
    return int(step.removeprefix("step ")), int(sample)


def answering(successes: Sequence[int]) -> Callable[[Request], list[int]]:
    """From step s, the first successes[s] continuations end in yes, all others in no."""

    def script(request: Request) -> list[int]:
        step, sample = place_of(request)
        return [YES if sample < successes[step] else NO, STOP]

    return script


def estimate(setup: EpisodeSetup, attempt: Trajectory, split: StepSplit) -> Trajectory:
    return asyncio.run(estimate_steps(setup, TASK, attempt, split, "r"))


@pytest.mark.parametrize(
    ("ids", "starts"),
    [
        ([A, B, STOP], [0]),
        ([A, NEWLINE, B, NEWLINE, A, STOP], [0, 2, 4]),
        # The token that spans the separator began before it; what follows it is the next step.
        ([A, A_NEWLINE_B, B, STOP], [0, 2]),
        ([A, B_NEWLINE, A, STOP], [0, 2]),
        # A token that begins with the separator began in the step before as well.
        ([A, NEWLINE_A, B, STOP], [0, 2]),
        # Two boundaries inside one token are one beginning.
        ([A, TWO_LINES, B, STOP], [0, 2]),
        # Empty lines are not steps.
        ([A, NEWLINE, NEWLINE, B, STOP], [0, 3]),
        ([A, TWO_NEWLINES, NEWLINE, B, STOP], [0, 3]),
        # The stop token belongs to the last step, also right after a separator.
        ([A, NEWLINE, B, NEWLINE, STOP], [0, 2]),
        ([A, NEWLINE, STOP], [0]),
        ([NEWLINE, STOP], [0]),
        ([STOP], [0]),
        # A character in two tokens: the first of them begins the step, in text that is not decodable yet.
        ([A, NEWLINE, HALF, OTHER_HALF, B, STOP], [0, 2]),
        ([HALF, OTHER_HALF, NEWLINE, HALF, OTHER_HALF, STOP], [0, 3]),
    ],
)
def test_a_step_begins_with_the_first_token_behind_a_separator(ids: list[int], starts: list[int]) -> None:
    assert step_starts(completion(ids), StepSplit(), Pieces().decode) == starts


def test_a_cut_answer_has_no_stop_token_to_spare() -> None:
    cut = completion([A, NEWLINE, B], Finish.LENGTH)
    assert step_starts(cut, StepSplit(), Pieces().decode) == [0, 2]
    assert step_starts(cut, StepSplit(tokens=2), Pieces().decode) == [0, 2]
    assert step_starts(completion([A, NEWLINE], Finish.LENGTH), StepSplit(), Pieces().decode) == [0]


def test_a_separator_of_a_character_in_two_tokens_ends_with_the_second() -> None:
    ids = [A, HALF, OTHER_HALF, B, A, STOP]
    assert step_starts(completion(ids), StepSplit(separator="ü"), Pieces().decode) == [0, 3]


def test_a_separator_is_text_and_no_pattern() -> None:
    assert step_starts(completion([A, B, A, STOP]), StepSplit(separator="."), Pieces().decode) == [0]


@pytest.mark.parametrize(("tokens", "starts"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (4, [0]), (9, [0])])
def test_steps_of_so_many_tokens_ignore_the_text_and_spare_the_stop_token(tokens: int, starts: list[int]) -> None:
    split = StepSplit(tokens=tokens)
    assert step_starts(completion([A, NEWLINE, A, B, STOP]), split, Pieces().decode) == starts
    assert step_starts(completion([STOP]), split, Pieces().decode) == [0]


def test_every_token_lies_in_the_step_of_its_first_character() -> None:
    source = random.Random(0)
    for _ in range(300):
        ids = [source.choice([A, B, NEWLINE, TWO_NEWLINES, A_NEWLINE_B, B_NEWLINE, NEWLINE_A, TWO_LINES])
               for _ in range(source.randint(1, 12))]  # fmt: skip
        text = Pieces().decode(ids)
        # Independently: number the steps of characters, then look at each token's first one.
        step_of_character, step = [], 0
        for place, character in enumerate(text):
            if place and text[place - 1] == "\n" and character != "\n":
                step += 1
            step_of_character.append(step)
        steps = [step_of_character[len(Pieces().decode(ids[:i]))] for i in range(len(ids))]
        expected = [i for i in range(len(ids)) if i == 0 or steps[i] != steps[i - 1]]
        assert step_starts(completion(ids, Finish.LENGTH), StepSplit(), Pieces().decode) == expected


def test_values_are_the_share_of_continuations_that_succeed() -> None:
    sampler, judge = FakeSampler(answering([1, 2, 4])), Judge()
    attempt = trajectory([A, NEWLINE, B, NEWLINE, YES, STOP])
    found = estimate(make_setup(sampler, judge), attempt, StepSplit(samples=4))
    assert found.step_starts == (0, 2, 4)
    assert found.step_values == (0.25, 0.5, 1.0)
    assert found.extra_tokens == 24, "three states, four continuations each, of two tokens"
    rest = dataclasses.replace(found, step_starts=(), step_values=(), extra_tokens=0)
    assert rest == attempt, "nothing else is touched"


def test_each_state_is_continued_so_often_from_its_exact_tokens_with_what_is_left_of_the_budget() -> None:
    sampler, judge = FakeSampler(answering([0, 0, 9])), Judge()
    estimate(make_setup(sampler, judge), trajectory([A, NEWLINE, B, NEWLINE, YES, STOP]), StepSplit())
    assert len(sampler.requests) == 3 * 9
    assert len({request.id for request in sampler.requests}) == 3 * 9
    for request in sampler.requests:
        step, _ = place_of(request)
        prefix = (A, NEWLINE, B, NEWLINE)[: 2 * step]
        assert request.prompt_ids == PROMPT + prefix
        assert request.params.max_new_tokens == 10 - len(prefix)
        assert (request.params.temperature, request.params.stop_ids) == (0.8, (STOP,))
        assert request.params.top_logprobs == 0, "nobody trains on continuations"
    assert {request.id for request in sampler.requests} == {f"r/step {s}/{k}" for s in range(3) for k in range(9)}


def test_the_reward_sees_prefix_and_continuation_as_one_answer() -> None:
    sampler, judge = FakeSampler(answering([1, 1])), Judge()
    estimate(make_setup(sampler, judge), trajectory([A, NEWLINE, NO, STOP]), StepSplit(samples=1))
    whole = judge.seen[1]
    assert whole.turns[0].completion.prompt_ids == PROMPT
    assert whole.turns[0].completion.token_ids == [A, NEWLINE, YES, STOP]
    assert whole.turns[0].completion.versions == [3, 3, 0, 0]
    assert whole.text == "a\nyes"
    assert (whole.status, whole.task_id, whole.group_id, whole.index) == (Status.COMPLETED, "t", "g", 2)
    assert not whole.score.is_value, "the verdict on the original must not leak into its continuations"


def test_a_continuation_that_runs_out_of_tokens_is_scored_as_truncated() -> None:
    judge = Judge()
    setup = make_setup(FakeSampler(lambda request: [A] * 20), judge)
    found = estimate(setup, trajectory([A, NEWLINE, YES, STOP]), StepSplit(samples=2))
    assert found.step_values == (0.0, 0.0)
    assert {t.status for t in judge.seen} == {Status.TRUNCATED_LENGTH}
    assert {t.num_tokens for t in judge.seen} == {10}


def test_continuations_without_a_value_are_left_out_of_the_mean() -> None:
    setup = make_setup(FakeSampler(lambda r: [(YES, SILENCE, NO)[place_of(r)[1] % 3], STOP]))
    found = estimate(setup, trajectory([YES, STOP]), StepSplit(samples=3))
    assert found.step_values == (0.5,), "a failure is never a reward: 1/3 would count it as zero"


def test_a_state_without_any_value_makes_the_trajectory_unscorable_and_says_why() -> None:
    setup = make_setup(FakeSampler(lambda request: [SILENCE if place_of(request)[0] == 1 else YES, STOP]))
    found = estimate(setup, trajectory([A, NEWLINE, YES, STOP]), StepSplit(samples=3))
    assert found.score == Score.unscorable("step 1 has no value: the judge is silent")
    assert not found.is_trainable
    assert found.step_starts == found.step_values == ()


def test_slow_refused_and_aborted_continuations_have_no_value() -> None:
    async def fault(request: Request) -> None:
        if place_of(request)[1] == 0:
            await asyncio.sleep(60)
        if place_of(request)[1] == 1:
            raise TaskError("no room to answer")
        if place_of(request)[1] == 2:
            await sampler.abort(request.id)

    sampler = FakeSampler(lambda request: [YES, STOP], delay=fault)
    setup = make_setup(sampler, seconds=0.05)
    assert estimate(setup, trajectory([YES, STOP]), StepSplit(samples=4)).step_values == (1.0,)
    for count, reason in ((1, "longer than 0.05 s"), (3, "longer than 0.05 s")):
        assert reason in str(estimate(setup, trajectory([YES, STOP]), StepSplit(samples=count)).score.reason)


def test_a_broken_backend_ends_it() -> None:
    async def broken(request: Request) -> None:
        raise BackendError("the engine failed")

    setup = make_setup(FakeSampler(lambda request: [STOP], delay=broken))
    with pytest.raises(ExceptionGroup) as caught:
        estimate(setup, trajectory([YES, STOP]), StepSplit())
    assert caught.group_contains(BackendError, match="the engine failed")


def test_all_continuations_of_all_states_wait_together_and_their_order_changes_nothing() -> None:
    waiting: list[str] = []

    async def until_all_are_here(request: Request) -> None:
        waiting.append(request.id)
        async with asyncio.timeout(5):
            while len(waiting) < 6:
                await asyncio.sleep(0)
        await asyncio.sleep(random.Random(request.id).random() * 0.01)

    def keyed(request: Request) -> list[int]:
        return [random.Random(request.id).choice([YES, NO]), STOP]

    attempt, split = trajectory([A, NEWLINE, YES, STOP]), StepSplit(samples=3)
    together = estimate(make_setup(FakeSampler(keyed, delay=until_all_are_here)), attempt, split)
    assert len(waiting) == 6
    assert together == estimate(make_setup(FakeSampler(keyed)), attempt, split)


class Counting:
    """An environment of up to three turns: says how often it was spoken to. `shift` makes it start elsewhere."""

    shift = 0

    async def start(self, task: Task, seed: int) -> EnvOpening:
        self.heard: list[str] = []
        return EnvOpening(messages=task.messages)

    async def step(self, message: Message) -> EnvReply:
        self.heard.append(message.content)
        answer = Message(role="user", content=str(len(self.heard) + self.shift))
        return EnvReply(messages=(answer,), is_done=len(self.heard) == 3)

    async def close(self) -> None:
        """Nothing is open."""


class LastWord(FakeScorer):
    """1 when the last turn says y."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        return Score.of(float(trajectory.turns[-1].message.content.endswith("y"))), {}


def several_turns(script: Callable[[Request], list[int]], env: type[Counting] = Counting) -> tuple[Any, EpisodeSetup]:
    sampler = FakeSampler(script)
    params = SamplingParams(max_new_tokens=10, stop_ids=(END,), temperature=0.8)
    return sampler, EpisodeSetup(
        sampler=sampler, renderer=Letters(), scorer=LastWord(), make_env=lambda _: env(), params=params, max_turns=4,
        episode_seconds=5.0, seed=0,
    )  # fmt: skip


def test_turns_are_steps_whose_values_are_those_of_episodes_played_anew_from_them() -> None:
    def script(request: Request) -> list[int]:
        """The attempt says ab, c, dy. Played anew from turn 1 nobody succeeds, from turn 2 one of two, from 3 both."""
        if "step" not in request.id:
            return [*Letters().encode({"0": "ab", "1": "c", "2": "dy"}[request.id.rsplit("/", 1)[1]]), END]
        place, turn = request.id.rsplit("/", 1)
        step, sample = place_of(dataclasses.replace(request, id=place))
        says_yes = (step, sample) in ((1, 1), (2, 0), (2, 1)) and turn == "2"
        return [*Letters().encode("y" if says_yes else "n"), END]

    sampler, setup = several_turns(script)
    attempt = asyncio.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))
    assert [turn.message.content for turn in attempt.turns] == ["ab", "c", "dy"]
    before = len(sampler.requests)
    found = asyncio.run(estimate_steps(setup, TASK, attempt, StepSplit(samples=2), "r"))
    assert found.step_starts == (0, 3, 5), "turns drew 3, 2 and 3 tokens"
    assert found.step_values == (0.0, 0.5, 1.0)
    fresh = sampler.requests[before:]
    assert len(fresh) == 2 * (3 + 2 + 1), "turns that were heard again are not drawn again"
    assert found.extra_tokens == 2 * len(fresh)
    begun = [request.prompt_ids for request in fresh if request.id.endswith("step 2/0/2")]
    assert begun == [attempt.turns[2].completion.prompt_ids], "from exactly what the attempt saw"


def test_what_was_done_to_the_world_for_the_values_stands_with_the_attempt() -> None:
    class Writing(Counting):
        async def step(self, message: Message) -> EnvReply:
            wrote = Event(kind=EventKind.SIDE_EFFECT, name="write", detail=message.content)
            return dataclasses.replace(await super().step(message), events=(wrote,))

    _, setup = several_turns(lambda request: [*Letters().encode("a"), END], Writing)
    attempt = asyncio.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))
    found = asyncio.run(estimate_steps(setup, TASK, attempt, StepSplit(samples=2), "r"))
    # From each of three turns two episodes of three turns each, those before it heard again.
    assert [event.detail for event in found.unplaced_events] == ["played for step values: a"] * (3 * 2 * 3)
    assert len(found.events) == 3 + 18


def test_an_environment_that_is_elsewhere_when_told_the_same_cannot_be_forked() -> None:
    class Moody(Counting):
        started = 0

        async def start(self, task: Task, seed: int) -> EnvOpening:
            Moody.started += 1
            self.shift = Moody.started
            return await super().start(task, seed)

    _, setup = several_turns(lambda request: [*Letters().encode("a"), END], Moody)
    attempt = asyncio.run(run_episode(setup, TASK, group_id="g", index=0, request_id="r"))
    found = asyncio.run(estimate_steps(setup, TASK, attempt, StepSplit(samples=2), "r"))
    assert found.score.value is None
    assert "step 1 has no value" in str(found.score.reason)
    assert "Moody cannot be forked" in str(found.score.reason)


def test_what_is_not_trained_is_not_estimated() -> None:
    sampler = FakeSampler(answering([1]))
    for attempt in (trajectory([YES, STOP], score=Score.error("judge answered 500")), trajectory([])):
        assert estimate(make_setup(sampler), attempt, StepSplit()) is attempt
    assert sampler.requests == []


@pytest.mark.parametrize("wrong", [{"tokens": -1}, {"separator": ""}, {"samples": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError, match=r"e\.g\."):
        StepSplit(**wrong)  # type: ignore[arg-type]
    assert StepSplit(separator="", tokens=5).samples == 9
