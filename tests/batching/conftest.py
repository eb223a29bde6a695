"""Makes groups as the rollout would, from plain lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from temper.types import Completion, Finish, Group, Message, Score, Status, Task, Trajectory, Turn


def make_turn(prompt: Sequence[int], drawn: Sequence[int], version: int = 0, state: str | None = None) -> Turn:
    completion = Completion(
        prompt_ids=tuple(prompt),
        token_ids=list(drawn),
        logprobs=[-0.1 * (place + 1) for place in range(len(drawn))],
        versions=[version] * len(drawn),
        finish=Finish.STOP,
    )
    return Turn(completion=completion, message=Message(role="assistant", content=""), state=state)


@pytest.fixture
def turn() -> Callable[..., Turn]:
    return make_turn


@pytest.fixture
def group() -> Callable[..., Group]:
    """A group from (reward or None, lengths or turns) per member. Reward None: unscorable."""

    def make(
        members: Sequence[tuple[float | None, int | list[Turn]]],
        *,
        draw: int = 0,
        statuses: Sequence[Status] = (),
        task: str = "task",
    ) -> Group:
        trajectories = []
        for index, (reward, what) in enumerate(members):
            turns = [make_turn([1, 2], range(10, 10 + what))] if isinstance(what, int) else what
            trajectories.append(
                Trajectory(
                    task_id=task,
                    group_id=f"g{draw}",
                    index=index,
                    turns=tuple(turns),
                    status=statuses[index] if statuses else Status.COMPLETED,
                    score=Score.unscorable("no answer") if reward is None else Score.of(reward),
                )
            )
        prompt = Task(id=task, messages=(Message(role="user", content=""),))
        return Group(id=f"g{draw}", draw=draw, task=prompt, trajectories=tuple(trajectories))

    return make
