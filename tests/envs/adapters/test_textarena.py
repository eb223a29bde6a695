from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from temper.envs.adapters import textarena as adapter
from temper.envs.adapters.textarena import TextArenaEnv, textarena
from temper.envs.threads import check_isolation_of_episodes
from temper.errors import TaskError, UserError, install_line
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task

arena = pytest.importorskip("textarena")


async def play(task: Task, *said: str, env: TextArenaEnv | None = None) -> list[EnvReply]:
    env = env or TextArenaEnv()
    replies: list[EnvReply] = []
    try:
        await env.start(task, 0)
        for text in said:
            replies.append(await env.step(Message(role="assistant", content=text)))
            if replies[-1].is_done:
                break
        return replies
    finally:
        await env.close()


def number(index: int = 0, seed: int = 0) -> Task:
    return textarena(index, seed, game="GuessTheNumber-v0")


def tic_tac_toe(player: int = 0, script: tuple[str, ...] = ("[3]", "[5]", "[8]")) -> Task:
    return textarena(0, 0, game="TicTacToe-v0", players=2, player=player, script=list(script))


def test_a_single_player_game_is_won_by_bisection() -> None:
    async def go() -> EnvReply:
        env = TextArenaEnv()
        await env.start(number(), 0)
        low, high = 1, 20
        for _ in range(10):
            guess = (low + high) // 2
            reply = await env.step(Message(role="assistant", content=f"[{guess}]"))
            if reply.is_done:
                return reply
            low, high = (guess + 1, high) if "higher" in reply.messages[0].content else (low, guess - 1)
        raise AssertionError("bisection failed: the target moved")

    reply = asyncio.run(go())
    assert (reply.reward, reply.status) == (1.0, None)
    assert "Congratulations" in reply.messages[0].content


def test_only_news_is_shown_and_never_the_policys_own_words() -> None:
    (reply,) = asyncio.run(play(number(), "My lucky guess: [1]"))
    assert "lucky" not in reply.messages[0].content
    assert "You are playing" not in reply.messages[0].content, "the prompt is in the conversation already"


def test_invalid_moves_are_events_and_the_game_decides_when_they_lose() -> None:
    first, second = asyncio.run(play(tic_tac_toe(), "over there", "somewhere"))
    assert [event.kind for event in first.events] == [EventKind.BAD_CALL]
    assert "invalid move" in first.events[0].detail
    assert (first.is_done, first.reward) == (False, None)
    assert (second.is_done, second.reward, second.status) == (True, -1.0, Status.BAD_FORMAT)
    assert [event.kind for event in second.events] == [EventKind.BAD_CALL]


def test_a_two_player_game_against_a_script_pays_each_side_its_own_reward() -> None:
    won = asyncio.run(play(tic_tac_toe(), "[0]", "[1]", "[2]"))
    assert "[Player 1] [3]" in won[0].messages[0].content
    assert (won[-1].reward, won[-1].is_done) == (1.0, True)
    lost = asyncio.run(play(tic_tac_toe(script=("[3]", "[4]", "[5]")), "[0]", "[1]", "[8]"))
    assert (lost[-1].reward, lost[-1].status) == (-1.0, None)


def test_the_policy_can_be_the_second_player() -> None:
    task = tic_tac_toe(player=1)
    assert "[Player 0] [3]" in task.messages[0].content
    replies = asyncio.run(play(task, "[0]", "[1]", "[2]"))
    assert replies[-1].reward == 1.0


def test_an_opponent_in_python_sees_the_game_and_is_seeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_opponent.py").write_text(
        "import re\n"
        "def move(observation, draw):\n"
        "    free = re.findall(r\"'(\\[\\d\\])'\", observation.rpartition('Available Moves')[2])\n"
        "    return draw.choice(free)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    tasks = [textarena(i, 0, game="TicTacToe-v0", players=2, player=1, opponent="own_opponent:move") for i in range(8)]
    again = [textarena(i, 0, game="TicTacToe-v0", players=2, player=1, opponent="own_opponent:move") for i in range(8)]
    assert tasks == again
    assert len({task.messages for task in tasks}) > 1


def test_episodes_side_by_side_draw_from_generators_of_their_own() -> None:
    task = textarena(3, 1, game="2048-v0")
    asyncio.run(
        check_isolation_of_episodes(TextArenaEnv, task, said=["[up]", "[left]"] * 3, other=["[down]", "[right]"] * 3)
    )


def test_episodes_that_shared_one_generator_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    task = textarena(3, 1, game="2048-v0")
    monkeypatch.setattr(adapter, "give_modules_their_random", lambda: None)
    for name, module in list(sys.modules.items()):
        if name.startswith("textarena") and "random" in vars(module):
            monkeypatch.setattr(module, "random", random)
    with pytest.raises(UserError, match="leaks between episodes"):
        asyncio.run(
            check_isolation_of_episodes(
                TextArenaEnv, task, said=["[up]", "[left]"] * 3, other=["[down]", "[right]"] * 3
            )
        )


def test_the_global_generator_is_neither_seeded_nor_used() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    asyncio.run(play(textarena(0, 0, game="2048-v0"), "[up]", "[left]"))
    assert random.random() == expected


def test_seeds_make_different_games() -> None:
    boards = {textarena(index, 0, game="2048-v0").messages[0].content for index in range(6)}
    assert len(boards) > 1


def test_exceptions_and_hangs_are_task_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad_opponent.py").write_text(
        "import time\n"
        "def crash(observation, draw): raise RuntimeError('the opponent left')\n"
        "def hang(observation, draw): time.sleep(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    crash = textarena(0, 0, game="TicTacToe-v0", players=2, opponent="bad_opponent:crash")
    with pytest.raises(TaskError, match="the opponent left"):
        asyncio.run(play(crash, "[0]"))
    hang = textarena(0, 0, game="TicTacToe-v0", players=2, opponent="bad_opponent:hang")

    async def go() -> Any:
        hangs = asyncio.ensure_future(play(hang, "[0]", env=TextArenaEnv(step_seconds=0.5)))
        fine = await play(tic_tac_toe(), "[0]", "[1]", "[2]")
        return await asyncio.gather(hangs, return_exceptions=True), fine

    (late,), fine = asyncio.run(go())
    assert "took longer than 0.5 s" in str(late)
    assert fine[-1].reward == 1.0


def test_an_opponent_who_never_lets_the_policy_move_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MAX_OPPONENT_MOVES", 1)
    with pytest.raises(TaskError, match="got no turn"):
        asyncio.run(play(tic_tac_toe(script=("nonsense",)), "[0]"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"game": "TicTacTo-v0"}, 'Did you mean "TicTacToe-v0"'),
        ({"game": "TicTacToe-v0"}, "refuses 'TicTacToe-v0' with players=1"),
        ({"game": "TicTacToe-v0", "players": 2}, "needs an opponent"),
        ({"game": "TicTacToe-v0", "players": 2, "player": 2, "script": ["[1]"]}, "from 0 to 1"),
        ({"game": "GuessTheNumber-v0", "max": 3}, "max"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        textarena(0, 0, **options)


def test_without_the_package_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=re.escape(install_line("textarena"))):
        number()
