"""Prompts with a fixed true pass rate each, answered without a model: what choosers are tried on.

Owns: the rule by which cases are made, and how a stage would draw and consume them. Refuses: learning; nothing gets
easier, so what changes is the choice alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from temper.rollout.source import TaskStream
from temper.tasks.choice.memory import PromptMemory
from temper.tasks.dataset import FileSource
from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn

GROUP_SIZE = 8
_SAID = Turn(
    completion=Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP),
    message=Message(role="assistant", content="x"),
)
_SCORES = {reward: Score.of(reward) for reward in (0.0, 1.0)}


def make_group(task: Task, draw: int, rewards: Sequence[float | None]) -> Group:
    """None: an answer that could not be scored."""
    members = [
        Trajectory(
            task_id=task.id,
            group_id=f"{task.id}#{draw}",
            index=index,
            turns=(_SAID,),
            status=Status.COMPLETED,
            score=Score.error("the verifier failed") if reward is None else _SCORES.get(reward) or Score.of(reward),
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=f"{task.id}#{draw}", draw=draw, task=task, trajectories=tuple(members))


def make_tasks(name: str, size: int, source: str = "") -> FileSource:
    tasks = [
        Task(id=f"{name}:{i}", messages=(Message(role="user", content=f"{name} {i}"),), source=source)
        for i in range(size)
    ]
    return FileSource(name, tuple(tasks))


def true_rates(case: int, tasks: Sequence[Task]) -> dict[str, float]:
    """The rule: U-shaped, as pass rates of real sets are: many prompts nearly solved, many nearly hopeless."""
    chance = random.Random(f"case {case}")
    return {task.id: chance.betavariate(0.35, 0.35) for task in tasks}


@dataclass(frozen=True, kw_only=True)
class Class:
    """Answers prompts by their true pass rates. The same draw of the same prompt is answered alike."""

    rates: Mapping[str, float]
    seed: int = 0

    def answer(self, task: Task, draw: int) -> Group:
        chance = random.Random(f"{self.seed}/{task.id}/{draw}")
        return make_group(task, draw, [float(chance.random() < self.rates[task.id]) for _ in range(GROUP_SIZE)])


def play_steps(
    stream: TaskStream, memory: PromptMemory, pupils: Class, steps: Sequence[int], groups_per_step: int
) -> Iterator[tuple[list[Group], dict[str, float]]]:
    """Groups and metrics of these steps, as a synchronous stage draws and consumes them."""
    for step in steps:
        groups = []
        for _ in range(groups_per_step):
            draw, task = stream.next()
            groups.append(pupils.answer(task, draw))
        _, metrics = memory.learn(step, groups)
        yield groups, metrics


def signal_share(groups: Sequence[Group]) -> float:
    return sum(not group.is_degenerate for group in groups) / len(groups)
