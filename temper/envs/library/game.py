"""Two-player games against a scripted opponent, a weaker one, or another policy.

Owns: environment and generator "game", the rules of Nim and tic-tac-toe. Refuses: illegal moves; they are named, and
too many of them lose the game.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from temper.envs.adapters.reasoning_gym import final_answer
from temper.envs.threads import run_with_deadline
from temper.errors import TaskError, UserError, did_you_mean
from temper.plugins import load_function
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, EventKind, Message, Status, Task

WIN, DRAW, LOSS = 1.0, 0.5, 0.0


class Board(Protocol):
    """A position, seen by the player to move. Never changed."""

    def __hash__(self) -> int: ...

    def moves(self) -> tuple[str, ...]: ...

    def play(self, move: str) -> Board: ...

    def outcome(self) -> float | None:
        """What the game is worth to the player to move; None: it goes on."""
        ...

    def text(self) -> str:
        """For people and policies."""
        ...

    def code(self) -> str:
        """What read() of the same game makes the position from."""
        ...


@dataclass(frozen=True, slots=True)
class Nim:
    """Heaps of sticks; a move takes any number from one heap, and whoever takes the last stick wins."""

    heaps: tuple[int, ...]

    rules = (
        "Nim: take any number of sticks from one heap. Whoever takes the last stick wins. "
        'A move is the heap and how many to take, e.g. "2 3".'
    )

    @classmethod
    def new(cls, draw: random.Random) -> Nim:
        return cls(tuple(draw.randint(1, 7) for _ in range(3)))

    @classmethod
    def read(cls, code: str) -> Nim:
        return cls(tuple(map(int, code.split())))

    def code(self) -> str:
        return " ".join(map(str, self.heaps))

    def moves(self) -> tuple[str, ...]:
        return tuple(f"{heap} {take}" for heap, size in enumerate(self.heaps, 1) for take in range(1, size + 1))

    def play(self, move: str) -> Nim:
        heap, take = map(int, move.split())
        return Nim(tuple(size - take * (place == heap) for place, size in enumerate(self.heaps, 1)))

    def outcome(self) -> float | None:
        return None if any(self.heaps) else LOSS

    def text(self) -> str:
        return "Heaps: " + ", ".join(f"{place}: {size}" for place, size in enumerate(self.heaps, 1))


LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


@dataclass(frozen=True, slots=True)
class TicTacToe:
    """Three in a row on nine cells; cells hold x, o or their own number."""

    cells: str = "123456789"

    rules = 'Tic-tac-toe: three marks in a row win. A move is the number of a free cell, e.g. "5".'

    @classmethod
    def new(cls, draw: random.Random) -> TicTacToe:
        board = cls()
        for _ in range(draw.choice((0, 2))):  # so that games differ; after two marks it is the first player's turn
            board = board.play(draw.choice(board.moves()))
        return board

    @classmethod
    def read(cls, code: str) -> TicTacToe:
        return cls(code)

    def code(self) -> str:
        return self.cells

    def moves(self) -> tuple[str, ...]:
        return tuple(cell for cell in self.cells if cell.isdigit())

    def play(self, move: str) -> TicTacToe:
        return TicTacToe(self.cells.replace(move, "x" if len(self.moves()) % 2 else "o"))

    def outcome(self) -> float | None:
        if any(self.cells[a] == self.cells[b] == self.cells[c] for a, b, c in LINES):
            return LOSS  # the player before has just made it
        return None if self.moves() else DRAW

    def text(self) -> str:
        return "\n".join(" ".join(self.cells[row : row + 3]) for row in (0, 3, 6))


GAMES: dict[str, type[Nim] | type[TicTacToe]] = {"nim": Nim, "tic_tac_toe": TicTacToe}


@functools.lru_cache(maxsize=1 << 16)
def value(board: Board) -> float:
    """What the position is worth to the player to move when both play best."""
    ended = board.outcome()
    return max(WIN - value(board.play(move)) for move in board.moves()) if ended is None else ended


def best_move(board: Board, draw: random.Random) -> str:
    return draw.choice([move for move in board.moves() if WIN - value(board.play(move)) == value(board)])


def random_move(board: Board, draw: random.Random) -> str:
    return draw.choice(board.moves())


Opponent = Callable[[Board, random.Random], str | Awaitable[str]]
"""Names a legal move. May be asynchronous: another policy, for self-play."""
OPPONENTS: dict[str, Opponent] = {"best": best_move, "random": random_move}


def game(index: int, seed: int, *, rules: str = "nim", is_fair: bool = True) -> Task:
    """An opening position. is_fair: best play does not lose it, whoever answers."""
    if rules not in GAMES:
        raise UserError(f'rules "{rules}" are unknown.{did_you_mean(rules, GAMES)} Known: {", ".join(GAMES)}.')
    draw = random.Random(f"game/{rules}/{seed}/{index}")
    board: Board = GAMES[rules].new(draw)
    while is_fair and value(board) == LOSS:
        board = GAMES[rules].new(draw)
    prompt = f"{GAMES[rules].rules} End your reply with your move alone on the last line.\n{board.text()}\nYour move."
    return Task(
        id=f"game:{rules}:{seed}:{index}",
        messages=(Message(role="user", content=prompt),),
        env="game",
        extra={"rules": rules, "board": board.code()},
    )


class Game:
    """One game; the policy moves first. At the end it is paid 1, 0.5 for a draw or 0. Turns before pay 0, so that
    a game broken off is one not won.

    opponent: "best", "random", "package.module:function", or a callable. mistakes: share of its moves that are random.
    An illegal move may be mended max_bad_moves times; the next one loses.
    """

    def __init__(
        self,
        *,
        opponent: str | Opponent = "best",
        mistakes: float = 0.0,
        max_bad_moves: int = 2,
        opponent_seconds: float = 60.0,
    ) -> None:
        if not 0 <= mistakes <= 1 or max_bad_moves < 0:
            raise UserError(
                f'env "game": mistakes={mistakes} must lie in 0 to 1, max_bad_moves={max_bad_moves} not below 0.'
            )
        self._opponent = _find_opponent(opponent) if isinstance(opponent, str) else opponent
        self._mistakes = mistakes
        self._bad_moves_left = max_bad_moves
        self._opponent_seconds = opponent_seconds
        self._board: Board = Nim(())
        self._draw: random.Random | None = None

    async def start(self, task: Task, seed: int) -> EnvOpening:
        assert self._draw is None, "an environment is single-use"
        try:
            self._board = GAMES[str(task.extra["rules"])].read(str(task.extra["board"]))
        except (KeyError, ValueError) as error:
            raise TaskError(f'task {task.id} does not come from the generator "game": {error}') from error
        self._draw = random.Random(f"game/{seed}/{task.id}")
        return EnvOpening(messages=task.messages, state=self._state)

    async def step(self, message: Message) -> EnvReply:
        move = " ".join(final_answer(message.content, "", strict=False).split())
        if move not in self._board.moves():
            return self._refuse(move)
        self._board = self._board.play(move)
        if (worth := self._board.outcome()) is not None:
            return EnvReply(reward=WIN - worth, is_done=True)
        answer = await self._answer()
        self._board = self._board.play(answer)
        said = f"Opponent: {answer}\n{self._board.text()}"
        if (worth := self._board.outcome()) is not None:
            return EnvReply(messages=(Message(role="user", content=said),), reward=worth, is_done=True)
        asked = Message(role="user", content=f"{said}\nYour move.")
        return EnvReply(messages=(asked,), reward=0.0, state=self._state)

    async def close(self) -> None:
        pass

    @property
    def _state(self) -> str:
        return f"{self._board.code()}, {self._bad_moves_left} bad moves left"

    async def _answer(self) -> str:
        assert self._draw is not None, "start() comes first"
        is_mistake = self._draw.random() < self._mistakes
        if is_mistake or self._opponent in OPPONENTS.values():
            return (random_move if is_mistake else self._opponent)(self._board, self._draw)  # type: ignore[return-value]
        asked = functools.partial(self._opponent, self._board, self._draw)
        move: str = await run_with_deadline(asked, self._opponent_seconds, "the opponent")
        if move not in self._board.moves():
            # Not a win: the policy did nothing for it, and a broken opponent would teach it to wait for one.
            raise TaskError(f"the opponent's move {move!r:.60} is not legal in {self._board.text()!r}")
        return move

    def _refuse(self, move: str) -> EnvReply:
        event = Event(kind=EventKind.BAD_CALL, name="move", detail=move[:200])
        if self._bad_moves_left == 0:
            return EnvReply(reward=LOSS, is_done=True, events=(event,), status=Status.BAD_FORMAT)
        self._bad_moves_left -= 1
        said = f"That is no legal move. Legal: {', '.join(self._board.moves())}."
        return EnvReply(messages=(Message(role="user", content=said),), reward=0.0, events=(event,), state=self._state)


def _find_opponent(name: str) -> Opponent:
    if ":" in name:
        return load_function(name, where='env "game", opponent')
    if name not in OPPONENTS:
        known = ", ".join(OPPONENTS)
        raise UserError(
            f'opponent "{name}" is unknown.{did_you_mean(name, OPPONENTS)} Known: {known}, or "module:function".'
        )
    return OPPONENTS[name]
