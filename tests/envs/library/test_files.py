from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence

import pytest

from temper.envs.library.files import MAX_CHARACTERS, FilesEnv, FileSystem, files, judge
from temper.envs.threads import check_isolation_of_episodes, play_script
from temper.envs.tool_calls import write_call
from temper.envs.tools import ToolError
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task


def play(task: Task, said: Sequence[str], **options: object) -> list[EnvReply]:
    """Replies up to the end; a policy that has said everything says done."""
    return asyncio.run(play_script(FilesEnv(**options), task, (*said, "done")))  # type: ignore[arg-type]


def paid(task: Task, said: Sequence[str], **options: object) -> float:
    reward = play(task, said, **options)[-1].reward
    assert reward is not None
    return reward


def solution(task: Task, call_format: str = "hermes") -> list[str]:
    return [write_call(call_format, name, arguments) for name, arguments in json.loads(str(task.extra["solution"]))]


@pytest.mark.parametrize("call_format", ["hermes", "plain"])
def test_the_solution_scores_1_one_call_a_turn_or_all_in_one_message(call_format: str) -> None:
    for index in range(20):
        task = files(index, 1, max_jobs=3)
        assert paid(task, solution(task, call_format), call_format=call_format) == 1.0
        assert paid(task, ["\n".join(solution(task, call_format))], call_format=call_format) == 1.0


def test_doing_nothing_scores_0_for_every_task() -> None:
    for index in range(200):
        task = files(index, 3, max_jobs=4)
        start, goal = (json.loads(str(task.extra[name])) for name in ("start", "goal"))
        assert judge(start, start, goal, 0.25) == 0.0
        assert judge(start, goal, goal, 0.25) == 1.0


def test_a_random_policy_scores_low() -> None:
    draw, total = random.Random(0), 0.0
    for index in range(40):
        task = files(index, 2)
        paths = list(json.loads(str(task.extra["start"])))
        calls = [
            ("delete", {"path": draw.choice(paths)}),
            ("move", {"source": draw.choice(paths), "target": "archive/x"}),
        ]
        total += paid(task, [write_call("hermes", *draw.choice(calls)) for _ in range(3)])
    assert total / 40 < 0.1


def test_texts_that_should_have_been_kept_cost_when_they_are_lost_by_any_command() -> None:
    start = {"a": "one", "b": "two", "c": "three"}
    goal = {"a": "one", "b": "two", "d": "three"}
    assert judge(start, {"a": "one", "b": "two", "c": "three"}, goal, 0.25) == 0.0
    assert judge(start, {"b": "two"}, goal, 0.25) == -0.5
    system = FileSystem(start)
    system.move("a", "b")  # over b
    assert judge(start, system.files, goal, 0.25) == -0.25
    assert judge(start, {}, goal, 9.0) == -1.0


@pytest.mark.parametrize("path", ["", "..", "../x", "/", ".", "a/../..", "notes", "notes/a.txt/below"])
def test_no_path_leads_out_or_turns_a_folder_into_a_file(path: str) -> None:
    system = FileSystem({"notes/a.txt": "text"})
    for act in (lambda: system.write(path, "x"), lambda: system.move("notes/a.txt", path), lambda: system.read(path)):
        with pytest.raises(ToolError):
            act()
    assert system.files == {"notes/a.txt": "text"}


def test_commands_do_what_they_say() -> None:
    system = FileSystem({"notes/a.txt": "reed reed", "logs/b.log": "x"})
    assert system.list() == "logs/b.log\nnotes/a.txt"
    assert system.list("/notes/") == "notes/a.txt"
    assert system.replace("notes/a.txt", "reed", "kelp") == "2 replaced"
    system.copy("/notes/a.txt", "backup/a.txt")
    system.move("logs/b.log", "logs/c.log")
    system.write("new.md", "")
    system.delete("./notes/a.txt")
    assert system.files == {"backup/a.txt": "kelp kelp", "logs/c.log": "x", "new.md": ""}
    for missing in ("", "zebra"):
        with pytest.raises(ToolError):
            system.replace("logs/c.log", missing, "y")


@pytest.mark.parametrize(
    "call", ["<tool_call>no</tool_call>", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>']
)
def test_malformed_calls_are_events_and_end_the_episode_when_they_do_not_stop(call: str) -> None:
    replies = play(files(0, 0), [call] * 9)
    assert {event.kind for reply in replies for event in reply.events} == {EventKind.BAD_CALL}
    assert replies[-1].status is Status.BAD_FORMAT
    assert replies[-1].reward == 0.0


def test_episodes_share_no_state() -> None:
    task = files(0, 0)
    path = next(iter(json.loads(str(task.extra["start"]))))
    look = [write_call("hermes", "list", {}), write_call("hermes", "read", {"path": path})]
    other = [write_call("hermes", "delete", {"path": path}), *solution(task)]
    asyncio.run(check_isolation_of_episodes(FilesEnv, task, said=look, other=other))


def test_equal_seeds_give_equal_tasks_and_foreign_ones_are_refused() -> None:
    assert files(4, 2) == files(4, 2)
    assert len({files(index, 0).messages for index in range(50)}) == 50
    with pytest.raises(UserError):
        files(0, 0, num_files=1)
    with pytest.raises(UserError):
        FilesEnv(mistake_cost=-1.0)
    with pytest.raises(TaskError, match="generator"):
        asyncio.run(FilesEnv().start(Task(id="x", messages=(Message(role="user", content="?"),)), 0))


def test_a_few_calls_cannot_fill_the_machine() -> None:
    """Each replace() could multiply a file by the length of a call: four of them asked for 320 GB."""
    system = FileSystem({"a.txt": "x"})
    grow = (
        *(lambda: system.replace("a.txt", "x", "x" * 800) for _ in range(4)),
        *(lambda number=number: system.copy("a.txt", f"copy_{number}.txt") for number in range(9)),
        lambda: system.write("b.txt", "y" * MAX_CHARACTERS),
    )
    refused = []
    for call in grow:
        try:
            call()
        except ToolError as error:
            refused.append(str(error))
    assert refused
    assert all("the disk is full" in reason for reason in refused)
    assert sum(len(path) + len(text) for path, text in system.files.items()) <= MAX_CHARACTERS
    system.replace("a.txt", "x", "")  # what makes room is allowed
    system.write("a.txt", "short")
