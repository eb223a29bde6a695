from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from temper.envs.adapters.gymnasium import GymnasiumEnv, gymnasium
from temper.envs.env import find_env
from temper.envs.threads import check_isolation_of_episodes
from temper.errors import TaskError, UserError, install_line
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task

gym = pytest.importorskip("gymnasium")

MOVES = ["left", "down", "right", "up"]
WALK = ("down", "down", "right", "right", "down", "right")  # over the ice of the 4x4 map, round its holes


class Awkward(gym.Env):  # type: ignore[misc, name-defined]
    """Text in, text out; words make it misbehave."""

    action_space = gym.spaces.Text(max_length=8)
    observation_space = gym.spaces.Text(max_length=99)
    closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"number {self.np_random.integers(10**6)}", {}

    def step(self, action: str) -> Any:
        if action == "crash":
            raise RuntimeError("the pole fell over")
        if action == "hang":
            time.sleep(3.0)
        return f"you said {action}", 0.25, False, action == "late", {}

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture(autouse=True)
def registered() -> Any:
    gym.register("Awkward-v0", entry_point=Awkward)
    gym.register("Corridor-v0", entry_point=Corridor)
    yield
    del gym.registry["Awkward-v0"], gym.registry["Corridor-v0"]


def lake(index: int = 0, **options: Any) -> Task:
    return gymnasium(index, 0, id="FrozenLake-v1", actions=MOVES, is_slippery=False, **options)


async def play(task: Task, *said: str, env: GymnasiumEnv | None = None) -> list[EnvReply]:
    env = env or GymnasiumEnv()
    try:
        await env.start(task, 0)
        return [await env.step(Message(role="assistant", content=text)) for text in said]
    finally:
        await env.close()


def test_a_walk_over_frozen_lake_is_paid_at_the_goal() -> None:
    task = lake()
    assert task.messages[0].content.endswith("[S]FFF\nFHFH\nFFFH\nHFFG"), "the player's place must be seen"
    replies = asyncio.run(play(task, *(f"I think I go {move.title()}." for move in WALK)))
    assert [reply.reward for reply in replies] == [0, 0, 0, 0, 0, 1]
    assert [reply.is_done for reply in replies] == [False] * 5 + [True]
    assert "HFF[G]" in replies[-1].messages[0].content


def states(task: Task, *said: str, env: GymnasiumEnv | None = None) -> list[str | None]:
    async def visited() -> list[str | None]:
        playing = env or GymnasiumEnv()
        opening = await playing.start(task, 0)
        replies = [await playing.step(Message(role="assistant", content=text)) for text in said]
        await playing.close()
        return [opening.state, *(reply.state for reply in replies)]

    return asyncio.run(visited())


def test_a_cell_that_is_said_to_be_the_state_is_one_state_whichever_way_led_to_it() -> None:
    there_and_back = states(lake(observation_is_state=True), "right", "left", "down", "what?")
    assert there_and_back[0] is not None
    assert there_and_back[0] == there_and_back[2]
    assert len(set(there_and_back)) == 4, "a bad action is a state of its own: too many of them end the episode"
    assert states(lake(observation_is_state=True), "down")[1] == there_and_back[3]
    assert states(lake(), "down", env=GymnasiumEnv(observation_is_state=True))[1] == there_and_back[3], "or to the env"


class Corridor(gym.Env):  # type: ignore[misc, name-defined]
    """Looks alike from end to end."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Text(max_length=99, charset=" .acdior")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = 0
        return "a corridor.", {}

    def step(self, action: int) -> Any:
        self.place += 1
        return "a corridor.", 0.0, self.place == 5, False, {}


@pytest.mark.parametrize("id", ["Corridor-v0", "FrozenLake-v1", "CartPole-v1"])
def test_an_observation_names_no_state_unless_someone_says_that_it_is_one(id: str) -> None:
    assert states(gymnasium(0, 0, id=id), "1", "1") == [None] * 3


class Shown(gym.Env):  # type: ignore[misc, name-defined]
    """Shows what its subclass lists, one after the other."""

    action_space = gym.spaces.Discrete(2)
    shown: tuple[Any, ...] = ()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = 0
        return self.shown[0], {}

    def step(self, action: int) -> Any:
        self.place += 1
        return self.shown[self.place], 0.0, False, False, {}


class Large(Shown):
    observation_space = gym.spaces.MultiDiscrete([3] * 1600)
    shown = tuple(np.repeat((0, middle, 0), (800, 1, 799)) for middle in (0, 1, 0))


class Paired(Shown):
    observation_space = gym.spaces.Tuple((gym.spaces.Discrete(30), gym.spaces.Discrete(2)))
    shown = ((np.int64(3), 1), (3, 0), (3, np.int64(1)))


@pytest.mark.parametrize("kind", [Large, Paired])
def test_a_name_tells_observations_apart_by_their_values_and_not_by_how_they_print(kind: type[Shown]) -> None:
    gym.register("Shown-v0", entry_point=kind)
    try:
        first, other, again = states(gymnasium(0, 0, id="Shown-v0", observation_is_state=True), "1", "1")
    finally:
        del gym.registry["Shown-v0"]
    assert first == again != other


def test_the_prompt_of_a_task_is_not_shown_twice() -> None:
    async def opening(task: Task) -> tuple[Message, ...]:
        env = GymnasiumEnv(id="FrozenLake-v1")
        messages = (await env.start(task, 0)).messages
        await env.close()
        return messages

    assert asyncio.run(opening(lake())) == lake().messages
    own = Message(role="user", content="Cross the lake.")
    assert asyncio.run(opening(Task(id="t", messages=(own,))))[0] == own


def test_bad_actions_are_named_and_too_many_end_the_episode_without_touching_the_world() -> None:
    replies = asyncio.run(play(lake(), "hm", "jump", "down", "a", "b", "c"))
    assert [[event.kind for event in reply.events] for reply in replies[:3]] == [[EventKind.BAD_CALL]] * 2 + [[]]
    assert "left, down, right, up" in replies[0].messages[0].content
    assert replies[1].reward is None
    assert (replies[-1].is_done, replies[-1].status, replies[-1].reward) == (True, Status.BAD_FORMAT, 0.0)
    env = GymnasiumEnv(max_bad_actions=1, bad_reward=-5.0)
    assert asyncio.run(play(lake(), "hm", env=env))[0].reward == -5.0


@pytest.mark.parametrize(
    ("said", "is_right"), [("1", True), ("2 or, no: 1", True), ("4", False), ("-1", False), ("1.5", False)]
)
def test_numbers_of_a_discrete_space(said: str, is_right: bool) -> None:
    task = gymnasium(0, 0, id="FrozenLake-v1", is_slippery=False)
    (reply,) = asyncio.run(play(task, said))
    assert (not reply.events) == is_right
    assert not is_right or "(Down)" in reply.messages[0].content


def test_seeds_are_passed_on_and_equal_for_a_group() -> None:
    tasks = [gymnasium(index, 0, id="Awkward-v0") for index in (0, 0, 1)]
    first, again, other = (task.messages[0].content for task in tasks)
    assert first == again != other
    slippery = gymnasium(3, 1, id="FrozenLake-v1", actions=MOVES, is_slippery=True)
    said = ["right"] * 4
    assert asyncio.run(play(slippery, *said)) == asyncio.run(play(slippery, *said))


def test_episodes_leave_no_trace_in_each_other() -> None:
    task = gymnasium(3, 1, id="FrozenLake-v1", actions=MOVES, is_slippery=True)
    asyncio.run(check_isolation_of_episodes(GymnasiumEnv, task, said=["right", "down"], other=["down", "up", "left"]))


def test_text_spaces_take_the_message_and_refuse_what_does_not_fit() -> None:
    task = gymnasium(0, 0, id="Awkward-v0")
    fine, long, late = asyncio.run(play(task, " hello ", "much too long", "late"))
    assert (fine.messages[0].content, fine.reward) == ("you said hello", 0.25)
    assert long.events[0].kind is EventKind.BAD_CALL
    assert (late.is_done, late.status) == (True, Status.TRUNCATED_TURNS)


def test_a_users_parser_and_renderer_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_gym.py").write_text(
        "def parse(text, space):\n"
        "    if text != 'go': raise ValueError('say go')\n"
        "    return 1\n"
        "def render(observation, env): return f'cell {observation}'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = gymnasium(0, 0, id="FrozenLake-v1", parser="own_gym:parse", renderer="own_gym:render", is_slippery=False)
    assert task.messages[0].content.endswith("cell 0")
    stay, go = asyncio.run(play(task, "stop", "go"))
    assert (stay.messages[0].content, go.messages[0].content) == ("say go", "cell 4")


def test_exceptions_and_hangs_cost_their_own_episode_only() -> None:
    task = gymnasium(0, 0, id="Awkward-v0")
    with pytest.raises(TaskError, match="RuntimeError: the pole fell over"):
        asyncio.run(play(task, "crash"))

    async def go() -> Any:
        hangs = asyncio.ensure_future(play(task, "hang", env=GymnasiumEnv(step_seconds=0.5)))
        fine = await play(task, "hello")
        assert not hangs.done()
        return await asyncio.gather(hangs, return_exceptions=True), fine

    (late,), fine = asyncio.run(go())
    assert isinstance(late, TaskError)
    assert "took longer than 0.5 s" in str(late)
    assert fine[0].reward == 0.25


def test_the_environment_is_closed_with_the_episode() -> None:
    task = gymnasium(0, 0, id="Awkward-v0")
    before = Awkward.closed
    asyncio.run(play(task, "hello"))
    assert Awkward.closed == before + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLake"),
        ({"id": "FrozenLake-v1", "slippery": True}, "slippery"),
        ({"id": "FrozenLake-v1", "actions": ["go"]}, "has 1 words, but the environment has 4 actions"),
        ({"id": "Pendulum-v1"}, "options.parser"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gymnasium(0, 0, **options)


def test_options_of_the_environment_are_checked_and_an_id_is_needed() -> None:
    with pytest.raises(UserError, match="step_seconds"):
        find_env("gymnasium", {"step_seconds": "long"}, {"gymnasium": GymnasiumEnv})
    with pytest.raises(UserError, match=r"env\.options\.id"):
        asyncio.run(play(Task(id="t", messages=())))


def test_without_the_package_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=re.escape(install_line("gymnasium"))):
        lake()
