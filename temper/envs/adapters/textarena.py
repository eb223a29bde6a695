"""TextArena games, alone or against opponents that are scripted or written in Python.

Owns: environment and generator "textarena": observations as messages, invalid moves as events, the player's own reward.
Refuses: TextArena's observation wrappers; they repeat the whole history in every message, and Temper keeps it already.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from temper.envs.adapters.textarena_random import give_modules_their_random, use_random
from temper.envs.adapters.third_party import EpisodeThread, derived_seed, episode_seed, require_package
from temper.errors import TaskError, UserError, did_you_mean
from temper.plugins import load_function
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, EventKind, Message, Scalar, Status, Task

MAX_OPPONENT_MOVES = 1000
"""Between two moves of the policy. A game in which it never gets its turn is an error, not a wait."""

Opponent = Callable[[str, random.Random], str]
"""(what this player sees, a seeded generator) -> its move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArenaSettings:
    """What names one game; a task carries it as JSON, so that tasks of several can be mixed."""

    game: str = ""
    """A registered id, e.g. "TicTacToe-v0"."""
    players: int = 1
    player: int = 0
    """Which one the policy is."""
    opponent: str = ""
    """"package.module:function" (observation, random) -> move."""
    script: list[str] = field(default_factory=list)
    """Moves of the opponents in their order, from the start again when they run out."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of textarena.make."""


def textarena(
    index: int,
    seed: int,
    *,
    game: str,
    players: int = 1,
    player: int = 0,
    opponent: str = "",
    script: list[str] | None = None,
    **options: Scalar | list[Scalar],
) -> Task:
    """Game `index`; the prompt is what the policy sees first. Options that are not named here go to textarena.make."""
    settings = TextArenaSettings(
        game=game, players=players, player=player, opponent=opponent, script=script or [], options=options
    )
    episode = derived_seed(seed, index)
    try:
        text = _in_own_context(_Match, settings, episode).opening
    except (AssertionError, TypeError, ValueError, ImportError, LookupError) as error:
        raise UserError(f"textarena refuses {game!r} with players={players} and options {options}: {error}") from error
    return Task(
        id=f"{game}:{seed}:{index}",
        messages=(Message(role="user", content=text),),
        env="textarena",
        extra={"episode_seed": episode, "textarena": json.dumps(asdict(settings))},
    )


def _in_own_context(make: Callable[..., Any], *arguments: Any) -> Any:
    """The caller's context must not keep the generator of a game that was only looked at."""
    return contextvars.copy_context().run(make, *arguments)


def _make(settings: TextArenaSettings) -> Any:
    package = require_package(
        "textarena", extra="textarena", package="textarena", what=f'environment "textarena" {settings.game!r}'
    )
    known = package.envs.registration.ENV_REGISTRY
    if settings.game not in known:
        raise UserError(f"textarena has no game {settings.game!r}.{did_you_mean(settings.game, known)}")
    if not 0 <= settings.player < settings.players:
        raise UserError(
            f"player={settings.player} must be from 0 to {settings.players - 1}, as players={settings.players}"
        )
    if settings.players > 1 and not (settings.opponent or settings.script):
        raise UserError(
            f"{settings.game} with {settings.players} players needs an opponent. Set options.script to a list of "
            f'moves, or options.opponent to "package.module:function".'
        )
    raw = f"{settings.game}-raw"
    return package.make(raw if raw in known else settings.game, **settings.options)


class _Match:
    """A game and those who play against the policy. Synchronous; its caller sees to threads and deadlines."""

    def __init__(self, settings: TextArenaSettings, seed: int) -> None:
        self._settings = settings
        self._draw = random.Random(seed)
        self._others_draw = random.Random(f"opponent/{seed}")
        use_random(self._draw)
        self._env = _make(settings)
        give_modules_their_random()
        self._opponent = self._find_opponent()
        self._env.reset(num_players=settings.players, seed=seed)
        self._is_done = False
        self._let_others_move()
        self.opening = self._news()

    def move(self, text: str) -> EnvReply:
        self._is_done, _ = self._env.step(action=text)
        refused = self._refusal()
        if not self._is_done and refused is None:
            self._let_others_move()
        events = () if refused is None else (Event(kind=EventKind.BAD_CALL, name=self._settings.game, detail=refused),)
        if not self._is_done:
            return EnvReply(messages=(Message(role="user", content=self._news()),), events=events)
        return EnvReply(
            messages=(Message(role="user", content=self._ending()),),
            reward=self._reward(),
            is_done=True,
            events=events,
            status=None if refused is None else Status.BAD_FORMAT,
        )

    def _find_opponent(self) -> Opponent:
        if self._settings.opponent:
            return load_function(self._settings.opponent, where="textarena opponent")
        script = itertools.cycle(self._settings.script)
        return lambda observation, draw: next(script)

    def _let_others_move(self) -> None:
        state, me = self._env.state, self._settings.player
        for _ in range(MAX_OPPONENT_MOVES):
            if self._is_done or state.current_player_id == me:
                return
            other, observation = self._env.get_observation()
            move = self._opponent(self._text(observation, other), self._others_draw)
            self._is_done, _ = self._env.step(action=str(move))
        raise TaskError(f"{self._settings.game}: {MAX_OPPONENT_MOVES} moves of others, and the policy got no turn")

    def _refusal(self) -> str | None:
        """Why the game did not take the policy's last move, or None."""
        state, me = self._env.state, self._settings.player
        if self._is_done:
            info = state.game_info[me]
            return str(info.get("reason") or "invalid move") if info.get("invalid_move") else None
        # After a valid move the count is back at 0.
        is_refused = getattr(state, "error_count", 0) > 0 and state.current_player_id == me
        if not is_refused:
            return None
        said = [text for _, text, kind in state.observations[me] if kind.name == "GAME_ADMIN"]
        return str(said[-1]) if said else "invalid move"

    def _news(self) -> str:
        _, observation = self._env.get_observation()
        return self._text(observation, self._settings.player) or "It is your move."

    def _ending(self) -> str:
        """Observations after the last move stay with the state: nobody's turn comes to fetch them."""
        state, me = self._env.state, self._settings.player
        reason = state.game_info[me].get("reason")
        parts = [self._text(state.observations[me], me), str(reason) if reason else ""]
        return "\n".join(part for part in parts if part) or "The game is over."

    def _text(self, observation: list[tuple[int, str, Any]], reader: int) -> str:
        """Without the reader's own words, which it has in its conversation already."""
        roles = self._env.state.role_mapping
        lines = []
        for sender, text, kind in observation:
            if sender == reader and kind.name == "PLAYER_ACTION":
                continue
            lines.append(str(text) if sender < 0 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
        return "\n".join(lines).strip()

    def _reward(self) -> float:
        rewards, _ = self._env.close()
        if not rewards or self._settings.player not in rewards:
            raise TaskError(f"{self._settings.game} ended without a reward for player {self._settings.player}")
        return float(rewards[self._settings.player])


class TextArenaEnv:
    """One game. A task's own settings come before the options given here."""

    def __init__(
        self,
        *,
        game: str = "",
        players: int = 1,
        player: int = 0,
        opponent: str = "",
        script: list[str] | None = None,
        step_seconds: float = 30.0,
        **options: Scalar | list[Scalar],
    ) -> None:
        self._settings = TextArenaSettings(
            game=game, players=players, player=player, opponent=opponent, script=script or [], options=options
        )
        self._thread = EpisodeThread(f"textarena {game}".strip(), seconds=step_seconds)
        self._match: _Match | None = None

    async def start(self, task: Task, seed: int) -> EnvOpening:
        own = task.extra.get("textarena")
        settings = TextArenaSettings(**json.loads(own)) if isinstance(own, str) else self._settings
        self._match = await self._thread.call(_Match, settings, episode_seed(task, seed))
        opening = (Message(role="user", content=self._match.opening),)
        return EnvOpening(messages=opening if task.messages == opening else (*task.messages, *opening))

    async def step(self, message: Message) -> EnvReply:
        assert self._match is not None, "step() before start()"
        return await self._thread.call(self._match.move, message.content)

    async def close(self) -> None:
        self._match = None  # games hold nothing but memory
        await self._thread.close()
