"""Steps are labelled by what the policy makes of them; labelled solutions are read back as training data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from temper.envs.env import make_env
from temper.errors import UserError
from temper.rollout.episode import EpisodeSetup
from temper.stages.step_labels import LabelledSteps, Labelling, label_solution, label_solutions, spoken, write_rows
from temper.tasks.dataset import read_file
from temper.types import Message, Request, SamplingParams, Score, Task
from tests.fakes.episodes import FakeScorer
from tests.fakes.sampler import FakeSampler

STOP = 0
TASK = Task(id="t", messages=(Message(role="user", content="q"),), answer="y")


class Characters:
    """One id per character; the stop token has no text."""

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools: object = ()) -> tuple[int, ...]:
        return tuple(ord(c) for message in messages for c in message.content)

    def extend_ids(self, *_: object, tools: object = ()) -> tuple[int, ...]:
        raise AssertionError("one turn only")

    def completion_ids(self, text: str) -> list[int]:
        return [*map(ord, text), STOP]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, (i for i in ids if i)))


class EndsInYes(FakeScorer):
    """1 for a solution that ends in y, 0 otherwise; silent about one with a question mark."""

    async def score(self, task: Task, trajectory: object) -> tuple[Score, Mapping[str, Score]]:
        text = trajectory.text  # type: ignore[attr-defined]
        if "?" in text:
            return Score.unscorable("the judge is silent"), {}
        return Score.of(float(text.endswith("y"))), {}


def policy(request: Request) -> list[int]:
    """Gets there unless it has said x; once it has said h, only in every other sample."""
    said, sample = Characters().decode(request.prompt_ids), int(request.id.rpartition("/")[2])
    fails = "x" in said or ("h" in said and sample % 2 == 1)
    return [ord("n" if fails else "y"), STOP]


def setup(max_new_tokens: int = 64) -> EpisodeSetup:
    return EpisodeSetup(
        sampler=FakeSampler(policy),
        renderer=Characters(),
        scorer=EndsInYes(),
        make_env=make_env,
        params=SamplingParams(max_new_tokens=max_new_tokens, stop_ids=(STOP,)),
        max_turns=1,
        episode_seconds=5.0,
        seed=0,
    )


def label(text: str, *, max_new_tokens: int = 64, min_share: float = 0.0) -> LabelledSteps | str:
    async def run() -> LabelledSteps | str:
        own = setup(max_new_tokens)
        solution = await spoken(own, Characters().completion_ids, TASK, text)
        return await label_solution(own, TASK, solution, Labelling(samples=4, min_share=min_share), "r")

    return asyncio.run(run())


def labels_of(text: str, **more: float) -> tuple[bool, ...]:
    labelled = label(text, min_share=more.get("min_share", 0.0))
    assert isinstance(labelled, LabelledSteps)
    return labelled.labels


def test_a_step_is_bad_when_nothing_that_follows_it_succeeds() -> None:
    labelled = label("a\n\nbx\n\nn")
    assert isinstance(labelled, LabelledSteps)
    assert labelled.steps == ("a", "bx", "n")
    assert labelled.rates == (1.0, 0.0, 0.0)
    assert labelled.labels == (True, False, False)


def test_the_last_step_is_judged_by_the_solution_itself() -> None:
    assert labels_of("a\n\nx\n\ny") == (True, False, True)  # after x the policy fails, but this solution does not
    assert labels_of("a\n\nb") == (True, False)  # the policy would get there, but this solution ends elsewhere


def test_the_share_of_successes_that_is_enough_can_be_set() -> None:
    assert labels_of("h\n\ny") == (True, True)
    assert labels_of("h\n\ny", min_share=0.5) == (True, True)
    assert labels_of("h\n\ny", min_share=0.51) == (False, True)


def test_separators_before_between_and_behind_the_steps_are_no_steps() -> None:
    labelled = label("\n\na\n\n\n\nbx\n\n \n\nn\n\n")
    assert isinstance(labelled, LabelledSteps)
    assert (labelled.steps, labelled.rates) == (("a", "bx", "n"), (1.0, 0.0, 0.0))
    assert labels_of("a\n\nb\n\n ") == (True, False)  # space behind the last step is no state to continue from


@pytest.mark.parametrize(
    ("text", "max_new_tokens", "reason"),
    [
        ("\n\n", 64, "no steps"),
        ("a?\n\nb", 64, "the judge is silent"),
        ("aaaa\n\nb", 4, "longer than max_new_tokens=4"),
    ],
)
def test_solutions_without_labels_say_why(text: str, max_new_tokens: int, reason: str) -> None:
    found = label(text, max_new_tokens=max_new_tokens)
    assert isinstance(found, str)
    assert reason in found


def test_a_share_outside_of_0_and_1_is_refused() -> None:
    with pytest.raises(UserError, match="min_share=2"):
        Labelling(min_share=2)


def test_labelled_solutions_are_read_back_as_tasks(tmp_path: Path) -> None:
    async def run() -> tuple[list[LabelledSteps], Mapping[str, int]]:
        own = setup()
        texts = ("a\n\nbx\n\nn", "a?\n\nb", "one\n\ny")
        solutions = [(TASK, await spoken(own, Characters().completion_ids, TASK, text)) for text in texts]
        return await label_solutions(own, solutions, Labelling(samples=2))

    labelled, reasons = asyncio.run(run())
    assert reasons == {"the judge is silent": 1}
    path = tmp_path / "steps.jsonl"
    write_rows(path, labelled)
    assert not list(tmp_path.glob(".tmp-*"))
    assert json.loads(path.read_text().splitlines()[0])["rates"] == [1.0, 0.0, 0.0]
    first, second = read_file(path).tasks
    assert (first.answer, first.extra["step_labels"]) == ("a\n\nbx\n\nn", "1,0,0")
    assert (second.answer, second.extra["step_labels"]) == ("one\n\ny", "1,1")
    assert first.messages == TASK.messages
