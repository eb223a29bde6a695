from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from temper.errors import UserError
from temper.rewards.user import UserReward
from temper.types import Message, Score, Task, Trajectory

Say = Callable[[str], Trajectory]


def test_the_function_gets_prompt_response_and_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.chdir(tmp_path)  # a file beside the recipe can be named
    (tmp_path / "my_reward_here.py").write_text(
        "def f(prompt, response, answer): return [prompt, response, answer] == ['q', 'r', None]"
    )
    task = Task(id="t", messages=(Message(role="system", content="s"), Message(role="user", content="q")))
    reward = UserReward("my_reward_here:f", workers=1)

    async def go() -> Score:
        score = await reward.score(task, say("r"))
        await reward.close()
        return score

    assert asyncio.run(go()) == Score.of(1.0)


def test_none_is_unscorable(misbehaving: str, say: Say) -> None:
    reward = UserReward(f"{misbehaving}:reward", workers=1)

    async def go() -> Score:
        score = await reward.score(Task(id="t", messages=()), say("none"))
        await reward.close()
        return score

    assert asyncio.run(go()) == Score.unscorable("the function returned None")


def test_mistakes_in_the_name_are_found_at_once(misbehaving: str) -> None:
    with pytest.raises(UserError, match="cannot import no_such_module"):
        UserReward("no_such_module:f")
    with pytest.raises(UserError, match='Did you mean "reward"'):
        UserReward(f"{misbehaving}:rewards")
    with pytest.raises(UserError, match=r"must take \(prompt, response, answer\)"):
        UserReward(f"{misbehaving}:two_arguments")
