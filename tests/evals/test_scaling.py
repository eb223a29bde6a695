"""Test-time scaling does what it says to a scripted model, and counts every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from temper.errors import BackendError, ContextFull, UserError
from temper.evals.comparison.curves import best_of, expected_choice, majority, panel, single
from temper.evals.scaling import CHECK, ScalingAttempt, ScalingSetup, ThinkingBudget, draw_samples, force_budget, refine
from temper.types import Finish, Message, Request, SamplingParams, Score, Task, Trajectory
from tests.fakes.episodes import FakeScorer, Letters
from tests.fakes.sampler import FakeSampler

END = 0


class Dialogue(Letters):
    """Prompts are the messages, each after its role's first letter."""

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return tuple(self.encode("".join(f"[{message.role[0]}]{message.content}" for message in messages) + "[a]"))

    def extend_ids(self, prompt_ids, completion_ids, replies, history, tools=()) -> tuple[int, ...]:
        assert history[-1].role == "assistant", "the history ends with what the model said"
        return (*prompt_ids, *completion_ids, *self.encode("".join(f"[u]{reply.content}" for reply in replies) + "[a]"))


class LastLetter(FakeScorer):
    """Right when the text ends with the gold answer."""

    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]:
        if task.answer is None:
            return Score.unscorable("no gold"), {}
        return Score.of(float(trajectory.text.endswith(task.answer))), {}


def setup(script: Callable[[str, Request], str], *, max_new_tokens: int = 50) -> tuple[ScalingSetup, FakeSampler]:
    """`script` gets the text so far and says the text to come; "|" ends the turn."""

    def tokens(request: Request) -> list[int]:
        text = script(Letters().decode(request.prompt_ids), request)
        for stop in request.params.stop:  # as engines do: the token that completes it is the last
            if stop in text:
                text = text[: text.index(stop) + len(stop)]
        ids = [END if letter == "|" else ord(letter) for letter in text]
        return ids

    class Stopping(FakeSampler):
        async def generate(self, request: Request):
            completion = await super().generate(request)
            text = Dialogue().decode(completion.token_ids)
            is_stopped = any(text.endswith(stop) for stop in request.params.stop)
            return replace(completion, finish=Finish.STOP) if is_stopped else completion

    sampler = Stopping(tokens)
    params = SamplingParams(max_new_tokens=max_new_tokens, stop_ids=(END,))
    return (
        ScalingSetup(
            sampler=sampler,
            renderer=Dialogue(),
            scorer=LastLetter(),
            params=params,
            answer_of=lambda text: text[-1:] or None,
        ),
        sampler,
    )


def task(answer: str | None = "7", name: str = "t0") -> Task:
    return Task(id=name, messages=(Message(role="user", content="3+4"),), answer=answer)


def forced(script: Callable[[str, Request], str], budget: ThinkingBudget) -> tuple[ScalingAttempt, FakeSampler]:
    scaling, sampler = setup(script)
    ((attempt,),) = asyncio.run(force_budget(scaling, [task()], 1, budget))
    return attempt, sampler


def test_a_model_that_stops_early_is_made_to_go_on_and_finds_the_answer() -> None:
    def hasty(text: str, request: Request) -> str:
        return ", it is 7|" if text.endswith("Wait") else "it is 5|"

    free, _ = forced(hasty, ThinkingBudget(max_tokens=40))
    assert (free.whole, free.is_right, free.num_drawn, free.num_injected) == ("it is 5", False, 8, 0)
    made, sampler = forced(hasty, ThinkingBudget(min_tokens=10, max_tokens=40, continuation=" Wait"))
    assert made.whole == "it is 5 Wait, it is 7"
    assert made.text == ", it is 7"  # the answer that was given up is not judged
    assert made.is_right
    assert (made.num_drawn, made.num_injected) == (8 + 10, 5)  # the replaced end was drawn, and is counted
    assert Dialogue().decode(sampler.requests[1].prompt_ids).endswith("[a]it is 5 Wait")
    assert END not in sampler.requests[1].prompt_ids


def test_a_model_that_never_ends_is_cut_and_asked_for_its_answer() -> None:
    def endless(text: str, request: Request) -> str:
        return " 7|" if text.endswith("Answer:") else "hm" * 100

    attempt, sampler = forced(endless, ThinkingBudget(max_tokens=12, answer_tokens=5, answer_prefix="Answer:"))
    assert attempt.whole == "hm" * 6 + "Answer: 7"
    assert attempt.text == "Answer: 7"
    assert attempt.is_right
    assert (attempt.num_drawn, attempt.num_injected) == (12 + 3, 7)
    assert [request.params.max_new_tokens for request in sampler.requests] == [12, 5]


def test_the_maximum_is_one_budget_over_all_continuations() -> None:
    def babbler(text: str, request: Request) -> str:
        return "7|" if text.endswith(":") else "abc|"

    attempt, sampler = forced(babbler, ThinkingBudget(min_tokens=9, max_tokens=10, answer_prefix=":", continuation="W"))
    assert attempt.whole == "abcWabcWab:7"
    assert [request.params.max_new_tokens for request in sampler.requests] == [10, 6, 2, 64]
    assert (attempt.num_drawn, attempt.num_injected) == (4 + 4 + 2 + 2, 3)


def test_a_model_with_nothing_to_add_is_let_go() -> None:
    def silent(text: str, request: Request) -> str:
        return "|" if "W" in text else "is 7|"

    attempt, _ = forced(silent, ThinkingBudget(min_tokens=30, max_tokens=40, continuation="W", max_continuations=3))
    assert attempt.text == "is 7"  # the last thing it said
    assert attempt.is_right
    assert (attempt.num_drawn, attempt.num_injected) == (5 + 3, 3)


def test_a_mark_of_the_end_of_thought_is_replaced_or_kept() -> None:
    def thinker(text: str, request: Request) -> str:
        if text.endswith("</t>"):
            return "It is 7|"
        return "and 7</t>" if text.endswith("Wait") else "so 5</t>"

    free, sampler = forced(thinker, ThinkingBudget(max_tokens=40, think_end="</t>"))
    assert (free.whole, free.text, free.num_injected) == ("so 5</t>It is 7", "It is 7", 0)
    assert sampler.requests[1].params.stop == ()
    made, _ = forced(thinker, ThinkingBudget(min_tokens=6, max_tokens=40, think_end="</t>", continuation=" Wait"))
    assert made.whole == "so 5 Waitand 7</t>It is 7"
    assert (made.num_drawn, made.num_injected) == (8 + 9 + 8, 5)


def test_an_impossible_budget_is_refused() -> None:
    with pytest.raises(UserError, match="0 <= min <= max"):
        ThinkingBudget(min_tokens=9, max_tokens=8)


def corrects_itself(text: str, request: Request) -> str:
    return {0: "5|", 1: "make it 6|"}.get(text.count(CHECK), "make it 7|")


def test_refinement_shows_the_conversation_and_adds_up_its_cost() -> None:
    scaling, sampler = setup(corrects_itself)
    rounds = asyncio.run(refine(scaling, [task()], 1, rounds=2))
    attempts = [members[0][0] for members in rounds]
    assert [attempt.text for attempt in attempts] == ["5", "make it 6", "make it 7"]
    assert [attempt.is_right for attempt in attempts] == [False, False, True]
    assert [attempt.num_drawn for attempt in attempts] == [2, 2 + 10, 2 + 10 + 10]
    seen = Dialogue().decode(sampler.requests[2].prompt_ids)
    assert seen == f"[u]3+4[a]5[u]{CHECK}[a]make it 6[u]{CHECK}[a]"


def test_a_conversation_that_fills_the_context_keeps_its_answer() -> None:
    def full(text: str, request: Request) -> str:
        if CHECK in text:
            raise ContextFull("no room")
        return "7|"

    scaling, _ = setup(full)
    rounds = asyncio.run(refine(scaling, [task()], 1, rounds=2))
    assert [members[0][0].num_drawn for members in rounds] == [2, 2, 2]

    def never(text: str, request: Request) -> str:
        raise ContextFull("no room")

    scaling, _ = setup(never)
    with pytest.raises(UserError, match="task t0 cannot be asked: no room"):
        asyncio.run(draw_samples(scaling, [task()], 1))


def test_the_same_request_ids_give_the_same_results_and_no_two_requests_share_one() -> None:
    def by_name(text: str, request: Request) -> str:
        return f"{sum(map(ord, request.id)) % 10}|"

    def run(way: str):
        scaling, sampler = setup(by_name)
        tasks = [task(name=f"t{i}") for i in range(3)]
        running = {
            "sample": lambda: draw_samples(scaling, tasks, 4),
            "budget": lambda: force_budget(scaling, tasks, 4, ThinkingBudget(min_tokens=3, max_tokens=9)),
            "refine": lambda: refine(scaling, tasks, 4, rounds=1),
        }[way]()
        return asyncio.run(running), [request.id for request in sampler.requests]

    for way in ("sample", "budget", "refine"):
        (once, names), (again, _) = run(way), run(way)
        assert once == again
        assert len(set(names)) == len(names)


def test_an_attempt_that_never_answers_ends_with_its_deadline() -> None:
    async def forever(request: Request) -> None:
        await asyncio.Event().wait()

    scaling, _ = setup(lambda text, request: "7|")
    stuck = replace(scaling, sampler=FakeSampler(lambda request: [END], delay=forever), attempt_seconds=0.01)
    with pytest.raises(BackendError, match=r"took longer than 0\.01 s"):
        asyncio.run(draw_samples(stuck, [task()], 1))


def attempt(right: bool | None, *, logprob: float = -1.0, answer: str = "x", drawn: int = 10) -> ScalingAttempt:
    score = Score.unscorable("none") if right is None else Score.of(float(right))
    return ScalingAttempt(
        text="", whole="", score=score, is_right=bool(right), answer=answer, num_drawn=drawn, mean_logprob=logprob
    )


def test_the_expected_choice_is_the_mean_over_all_subsets() -> None:
    pairs = [(0.1, 1.0), (0.5, 0.0), (0.5, 1.0), (0.7, 0.25), (0.9, 0.0), (0.9, 0.5)]

    def by_lot(subset) -> float:
        top = max(key for key, _ in subset)
        return fmean(value for key, value in subset if key == top)

    # Ties are broken by lot among those drawn; over all subsets that is the mean of the tied group.
    for k in range(1, 7):
        expected = fmean(map(by_lot, combinations(pairs, k)))
        assert expected_choice(pairs, k) == pytest.approx(expected)


def test_best_of_n_by_reward_rises_and_by_a_misleading_logprob_falls() -> None:
    rows = [[attempt(True, logprob=-3.0), *[attempt(False, logprob=-1.0) for _ in range(3)]] for _ in range(5)]
    by_reward, by_logprob = best_of(rows, by="reward"), best_of(rows, by="logprob")
    assert [point.accuracy for point in by_reward] == [0.25, 0.5, 1.0]
    assert [point.accuracy for point in by_logprob] == [0.25, 0.0, 0.0]
    assert [point.tokens for point in by_reward] == [10, 20, 40]
    assert all(point.low <= point.accuracy <= point.high for point in (*by_reward, *by_logprob))


def test_a_majority_lifts_a_model_that_is_right_more_often_than_it_repeats_a_mistake() -> None:
    rows = [
        [attempt(True, answer="7"), attempt(True, answer="7"), attempt(False, answer="1"), attempt(False, answer="2")]
    ]
    points = majority(rows * 4)
    assert [point.setting for point in points] == ["1 sample", "2 samples", "4 samples"]
    assert points[0].accuracy == 0.5
    assert points[-1].accuracy == 1.0


def test_attempts_without_a_score_cost_tokens_and_are_counted_apart() -> None:
    point = single("budget", "0 to 8", [[attempt(True, drawn=10), attempt(None, drawn=30)], [attempt(False, drawn=20)]])
    assert (point.accuracy, point.tokens, point.num_unscorable, point.num_prompts) == (0.5, 20, 1, 2)
    with pytest.raises(UserError, match="could be scored"):
        single("budget", "0 to 8", [[attempt(None)]])


def test_the_chart_has_one_line_per_mode_in_order_of_cost() -> None:
    rows = [[attempt(True), attempt(False)]] * 3
    lines = panel([*reversed(best_of(rows, by="reward")), *majority(rows)], "sums").lines
    assert [line.label for line in lines] == ["best of N by reward", "majority"]
    assert list(lines[0].xs) == [10, 20]
