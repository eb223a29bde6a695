from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable

import pytest

from temper.envs.library.game import Board, Game, Nim, TicTacToe, best_move, game, random_move, value
from temper.envs.threads import check_isolation_of_episodes
from temper.errors import TaskError, UserError
from temper.protocols import EnvReply
from temper.types import EventKind, Message, Status, Task


def play(task: Task, policy: Callable[[Board], str], env: Game | None = None, seed: int = 0) -> list[EnvReply]:
    env = env or Game()

    async def go() -> list[EnvReply]:
        await env.start(task, seed)
        replies: list[EnvReply] = []
        while not replies or not replies[-1].is_done:
            replies.append(await env.step(Message(role="assistant", content=policy(env._board))))
        await env.close()
        return replies

    return asyncio.run(go())


def paid(replies: list[EnvReply]) -> float:
    assert all(reply.reward is not None for reply in replies), "a game broken off must still be scored"
    return sum(reply.reward or 0.0 for reply in replies)


def test_the_best_policy_always_wins_fair_nim_and_a_random_one_nearly_never_does() -> None:
    draw = random.Random(0)
    tasks = [game(index, 3) for index in range(60)]
    assert all(paid(play(task, lambda board: best_move(board, draw))) == 1.0 for task in tasks)
    assert sum(paid(play(task, lambda board: random_move(board, draw))) for task in tasks) / 60 < 0.25


def test_best_play_draws_tic_tac_toe_against_best_play_and_never_loses_to_chance() -> None:
    draw = random.Random(0)
    tasks = [game(index, 3, rules="tic_tac_toe") for index in range(20)]
    worth = {task.id: value(TicTacToe.read(str(task.extra["board"]))) for task in tasks}
    for task in tasks:
        assert paid(play(task, lambda board: best_move(board, draw))) == worth[task.id]
        assert paid(play(task, lambda board: best_move(board, draw), Game(opponent="random"))) >= 0.5
    assert 0.5 in worth.values()
    assert sum(paid(play(task, lambda board: random_move(board, draw))) for task in tasks) / 20 < 0.4


def test_values_of_nim_are_those_of_the_nim_sum() -> None:
    for heaps in [(1, 2, 3), (1, 1), (5, 5), (3, 4, 5), (2, 4, 6), (1, 4, 5), (7,)]:
        nim_sum = 0
        for heap in heaps:
            nim_sum ^= heap
        assert value(Nim(heaps)) == float(nim_sum != 0), heaps


def test_tic_tac_toe_knows_wins_draws_and_whose_turn_it_is() -> None:
    assert TicTacToe("xx3oo6789").play("3").outcome() == 0.0, "the player to move has lost"
    assert TicTacToe("xoxxoooxx").outcome() == 0.5
    assert TicTacToe().play("1").play("5").cells == "x234o6789"
    assert TicTacToe("xx3oo6789").outcome() is None


def test_the_opponent_is_seeded_and_episodes_share_nothing() -> None:
    task = game(1, 0, rules="tic_tac_toe")
    first = lambda board: board.moves()[0]  # noqa: E731
    said = [[r.messages for r in play(task, first, Game(opponent="random"), seed)] for seed in (4, 4, 5, 6, 7)]
    assert said[0] == said[1]
    assert any(other != said[0] for other in said[2:])


def test_an_illegal_move_is_named_and_the_third_one_loses() -> None:
    replies = play(game(0, 0), lambda board: "take everything")
    assert [reply.events[0].kind for reply in replies] == [EventKind.BAD_CALL] * 3
    assert "Legal: 1 1" in replies[0].messages[0].content
    assert replies[-1].status is Status.BAD_FORMAT
    assert paid(replies) == 0.0


@pytest.mark.parametrize(
    "text", ["", "1 0", "1 -1", "1 99", "0 1", "9 1", "1 1 1", "1\n", "win", "<answer></answer>", "\uff11 \uff11"]
)
def test_what_is_no_move_changes_no_board(text: str) -> None:
    env = Game()

    async def go() -> EnvReply:
        await env.start(game(0, 0), 0)
        return await env.step(Message(role="assistant", content=text))

    reply = asyncio.run(go())
    assert reply.events[0].kind is EventKind.BAD_CALL
    assert env._board.code() == game(0, 0).extra["board"]


def test_a_move_may_end_a_longer_reply_or_stand_in_tags() -> None:
    for text in ("I take one.\n1 1", "<answer>1 1</answer>", "  1   1 "):
        assert not play(game(0, 0), lambda board, text=text: text if "1 1" in board.moves() else board.moves()[0])[
            0
        ].events  # type: ignore[misc]


def test_the_opponent_may_be_another_policy_and_its_illegal_move_wins_nothing() -> None:
    seen: list[str] = []

    async def other(board: Board, draw: random.Random) -> str:
        await asyncio.sleep(0)
        seen.append(board.code())
        return board.moves()[0]

    replies = play(game(2, 0), lambda board: board.moves()[0], Game(opponent=other))
    assert seen
    assert replies[-1].is_done
    with pytest.raises(TaskError, match="opponent"):
        play(game(2, 0), lambda board: board.moves()[0], Game(opponent=lambda board, draw: "resign"))


def test_an_opponent_that_hangs_costs_its_own_episode_only() -> None:
    async def asleep(board: Board, draw: random.Random) -> str:
        await asyncio.sleep(3600)
        return board.moves()[0]

    with pytest.raises(TaskError, match="opponent"):
        play(game(2, 0), lambda board: board.moves()[0], Game(opponent=asleep, opponent_seconds=0.05))


def test_games_leave_no_trace_in_each_other() -> None:
    moves = list(Nim.read(str(game(0, 0).extra["board"])).moves())
    make = lambda: Game(opponent="random")  # noqa: E731
    asyncio.run(check_isolation_of_episodes(make, game(0, 0), said=moves, other=[moves[-1], "no", *moves]))


def test_a_task_of_another_generator_is_refused() -> None:
    with pytest.raises(TaskError, match="generator"):
        asyncio.run(Game().start(Task(id="x", messages=(Message(role="user", content="?"),)), 0))


def test_mistakes_make_a_weaker_opponent() -> None:
    draw, tasks = random.Random(1), [game(index, 3) for index in range(60)]
    wins = [sum(paid(play(t, lambda b: random_move(b, draw), Game(mistakes=share))) for t in tasks) for share in (0, 1)]
    assert wins[1] > wins[0] + 10


def test_equal_seeds_give_equal_tasks_and_wrong_options_are_user_errors() -> None:
    assert game(1, 2) == game(1, 2)
    assert len({game(index, 0).messages for index in range(40)}) > 30
    assert re.search(r"Heaps: 1: \d", game(1, 2).messages[0].content)
    for wrong in (lambda: game(0, 0, rules="chess"), lambda: Game(opponent="bset"), lambda: Game(mistakes=2.0)):
        with pytest.raises(UserError):
            wrong()


def test_the_state_is_the_position_and_the_bad_moves_left() -> None:
    task = game(0, 3, rules="tic_tac_toe")
    said = iter(["nonsense"])
    bad = play(task, lambda board: next(said, board.moves()[0]))
    straight = play(task, lambda board: board.moves()[0])
    assert str(bad[0].state).endswith(", 1 bad moves left")
    assert bad[1].state == str(straight[0].state).replace("2 bad", "1 bad")
