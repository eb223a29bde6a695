"""What episodes are played with in tests: a renderer of letters, a scorer that need only score, tasks in one line."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from temper.tasks.render import SpokenRow
from temper.types import Group, Message, Score, Task, Trajectory

END = 0
"""The id that ends a turn."""


class Letters:
    """Implements rollout.episode.EpisodeRenderer and stages' ExampleRenderer: one id per character, less `shift`."""

    def __init__(self, shift: int = 0) -> None:
        self._shift = shift

    def prompt_messages(self, task: Task) -> tuple[Message, ...]:
        return task.messages

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[int, ...]:
        return tuple(self.encode("".join(message.content for message in messages)))

    def extend_ids(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        replies: Sequence[Message],
        history: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        return (*prompt_ids, *completion_ids, *self.prompt_ids(replies))

    def spoken_rows(
        self, messages: Sequence[Message], turns: int | None = 1, tools: Sequence[Any] = ()
    ) -> list[SpokenRow]:
        """The last message is trained, with its end."""
        row = SpokenRow(text="")
        row.add(self.prompt_ids(messages[:-1]), is_trained=False)
        row.add([*self.encode(messages[-1].content), END], is_trained=True)
        return [row]

    def encode(self, text: str) -> list[int]:
        return [ord(character) - self._shift for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token + self._shift) for token in ids if token != END)


class FakeScorer(ABC):
    """Implements rollout.episode.Scorer for a subclass that scores: parts weigh 1, nothing is learned."""

    @abstractmethod
    async def score(self, task: Task, trajectory: Trajectory) -> tuple[Score, Mapping[str, Score]]: ...

    async def score_turns(
        self, task: Task, trajectory: Trajectory
    ) -> tuple[Score, Mapping[str, Score], Sequence[float]]:
        return *await self.score(task, trajectory), ()

    def weighted(self, parts: Mapping[str, Score]) -> Mapping[str, Score]:
        return parts

    async def evolve(self, groups: Sequence[Group]) -> None:  # noqa: B027 - a default that does nothing
        """Learns nothing."""


def ask(content: str, answer: str | None = None, name: str = "t", **more: Any) -> Task:
    """A task of one user message."""
    return Task(id=name, messages=(Message(role="user", content=content),), answer=answer, **more)
