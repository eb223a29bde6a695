"""Gymnasium environments that can be played in words: small action spaces in, rendered text out.

Owns: environment and generator "gymnasium", the default parser and renderer. Refuses: spaces that have no words, unless
the user gives a parser; actions outside the space, which are named to the policy and never passed on.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from temper.envs.adapters.third_party import EpisodeThread, derived_seed, episode_seed, require_package
from temper.errors import TaskError, UserError, did_you_mean
from temper.plugins import load_function
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, EventKind, Message, Scalar, Status, Task

_HIGHLIGHT = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", flags=re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class GymnasiumSettings:
    """What names one environment; a task carries it as JSON, so that tasks of several can be mixed."""

    id: str = ""
    """A registered id, e.g. "FrozenLake-v1", or "module:Name-v0"."""
    actions: list[str] = field(default_factory=list)
    """Words for the actions of a Discrete space, in their order; without them the policy writes the number."""
    parser: str = ""
    """"package.module:function" (text, action_space) -> action; raises ValueError with the reason for a bad one."""
    renderer: str = ""
    """"package.module:function" (observation, env) -> text."""
    instructions: str = ""
    """Shown before the first observation; empty: which actions there are."""
    observation_is_state: bool = False
    """Equal observations are one state (EnvReply.state). Nothing tells this of an environment, so the user does."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of gymnasium.make."""


def gymnasium(
    index: int,
    seed: int,
    *,
    id: str,
    actions: list[str] | None = None,
    parser: str = "",
    renderer: str = "",
    observation_is_state: bool = False,
    **options: Scalar | list[Scalar],
) -> Task:
    """Episode `index` of an environment; the prompt is its first observation. Other options go to gymnasium.make.

    observation_is_state: as in the environment's own options.
    """
    settings = GymnasiumSettings(
        id=id,
        actions=actions or [],
        parser=parser,
        renderer=renderer,
        observation_is_state=observation_is_state,
        options=options,
    )
    episode = derived_seed(seed, index)
    try:
        game, text = _open(settings, episode)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise UserError(f"gymnasium refuses {id!r} with options {options}: {error}") from error
    game.env.close()
    return Task(
        id=f"{id}:{seed}:{index}",
        messages=(Message(role="user", content=text),),
        env="gymnasium",
        extra={"episode_seed": episode, "gymnasium": json.dumps(_as_dict(settings))},
    )


def _as_dict(settings: GymnasiumSettings) -> dict[str, Any]:
    return {name: value for name in GymnasiumSettings.__slots__ if (value := getattr(settings, name))}


@dataclass(slots=True)
class _Game:
    env: Any
    parse: Callable[[str, Any], Any]
    render: Callable[[Any, Any], str]
    observation: Any
    """The newest."""


def _open(settings: GymnasiumSettings, seed: int) -> tuple[_Game, str]:
    """Made and reset, and what the policy sees first."""
    package = require_package(
        "gymnasium", extra="gymnasium", package="gymnasium", what=f'environment "gymnasium" {settings.id!r}'
    )
    if not settings.id:
        raise UserError('environment "gymnasium" needs an id. Set env.options.id, e.g. "FrozenLake-v1".')
    try:
        env = _make(package, settings)
    except package.error.Error as error:
        near = did_you_mean(settings.id, package.registry)
        raise UserError(f"gymnasium does not know {settings.id!r}: {error}.{near}") from error
    words = list(settings.actions)
    parse = load_function(settings.parser, where="parser") if settings.parser else _parser_of(package, env, words)
    render = load_function(settings.renderer, where="renderer") if settings.renderer else _rendered
    observation, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    instructions = settings.instructions or _instructions(package, env, words)
    return _Game(env, parse, render, observation), f"{instructions}\n\n{render(observation, env)}".strip()


def _make(package: Any, settings: GymnasiumSettings) -> Any:
    """With text rendering where the environment has it."""
    options = dict(settings.options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gymnasium warns of every older version of an id
        modes = package.spec(settings.id).entry_point
        if "render_mode" not in options and not settings.renderer:
            target = package.envs.registration.load_env_creator(modes) if isinstance(modes, str) else modes
            if "ansi" in (getattr(target, "metadata", None) or {}).get("render_modes", ()):
                options["render_mode"] = "ansi"
        return package.make(settings.id, **options)


def _instructions(package: Any, env: Any, words: list[str]) -> str:
    space = env.action_space
    if not isinstance(space, package.spaces.Discrete):
        return ""
    if words:
        return f"Answer with one of these actions: {', '.join(words)}."
    return f"Answer with the number of an action, from {space.start} to {space.start + space.n - 1}."


def _parser_of(package: Any, env: Any, words: list[str]) -> Callable[[str, Any], Any]:
    space = env.action_space
    if isinstance(space, package.spaces.Text):
        return _text_action
    if not isinstance(space, package.spaces.Discrete):
        raise UserError(
            f"{space} has no words of its own. Set options.parser to a function (text, action_space) -> action."
        )
    if words and len(words) != space.n:
        raise UserError(f"options.actions has {len(words)} words, but the environment has {space.n} actions.")
    return (lambda text, space: _named_action(text, words) + int(space.start)) if words else _numbered_action


def _named_action(text: str, words: list[str]) -> int:
    """The last action named: what stands before it is thinking."""
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", text, flags=re.IGNORECASE)
    if not found:
        raise ValueError(f"No action was named. Choose one of: {', '.join(words)}.")
    return [word.lower() for word in words].index(found[-1].lower())


def _numbered_action(text: str, space: Any) -> int:
    found = re.findall(r"(?<![\w.])-?\d{1,9}(?![\w.]*\d)", text)
    low, high = int(space.start), int(space.start + space.n - 1)
    if not found or not low <= int(found[-1]) <= high:
        raise ValueError(f"No action was named. Write a number from {low} to {high}.")
    return int(found[-1])


def _text_action(text: str, space: Any) -> str:
    action = text.strip()
    if not space.contains(action):
        raise ValueError(f"This text is not allowed here: {space}.")
    return action


def _rendered(observation: Any, env: Any) -> str:
    """The environment's own text where it draws one, else the observation as Python prints it."""
    if env.render_mode != "ansi":
        return str(observation)
    # Toy texts mark where the player stands by a background colour alone; without it the position would be lost.
    return _COLOUR.sub("", _HIGHLIGHT.sub(r"[\1]", env.render())).strip("\n")


class GymnasiumEnv:
    """One episode. Options that are not its own go to gymnasium.make; a task's own settings come first.

    max_bad_actions: in a row; then the episode is over, BAD_FORMAT, and pays bad_reward. Where every step costs
    something, set bad_reward below what the longest episode costs, or talking nonsense becomes the cheapest way out.
    observation_is_state: true where an observation tells all that decides what can still be reached, as the cell of a
    lake does: equal ones then name one state. Where it tells less, as in a corridor that looks alike from end to end,
    a name would compare turns that have nothing in common; without one they are told apart by what the model saw.
    """

    def __init__(
        self,
        *,
        id: str = "",
        actions: list[str] | None = None,
        parser: str = "",
        renderer: str = "",
        step_seconds: float = 30.0,
        max_bad_actions: int = 3,
        bad_reward: float = 0.0,
        observation_is_state: bool = False,
        **options: Scalar | list[Scalar],
    ) -> None:
        self._settings = GymnasiumSettings(
            id=id, actions=actions or [], parser=parser, renderer=renderer, options=options
        )
        self._thread = EpisodeThread(f"gymnasium {id}".strip(), seconds=step_seconds)
        self._bad_allowed = max_bad_actions
        self._bad_reward = bad_reward
        self._observation_is_state = observation_is_state
        self._num_bad = 0
        self._game: _Game | None = None

    async def start(self, task: Task, seed: int) -> EnvOpening:
        own = task.extra.get("gymnasium")
        settings = GymnasiumSettings(**json.loads(own)) if isinstance(own, str) else self._settings
        game, text = await self._thread.call(_open, settings, episode_seed(task, seed))
        self._game = game
        self._observation_is_state |= settings.observation_is_state
        opening = (Message(role="user", content=text),)
        shown = opening if task.messages == opening else (*task.messages, *opening)
        return EnvOpening(messages=shown, state=self._state(game))

    async def step(self, message: Message) -> EnvReply:
        assert self._game is not None, "step() before start()"
        return await self._thread.call(self._step, self._game, message.content)

    def _step(self, game: _Game, text: str) -> EnvReply:
        try:
            action = game.parse(text, game.env.action_space)
        except ValueError as error:
            return self._refused(game, str(error))
        if not game.env.action_space.contains(action):
            return self._refused(game, f"{action!r} is not an action here.")
        self._num_bad = 0
        game.observation, reward, terminated, truncated, _ = game.env.step(action)
        text = game.render(game.observation, game.env)
        if reward is None:
            raise TaskError(f"{game.env.spec.id} gave no reward")
        return EnvReply(
            messages=(Message(role="user", content=text),),
            reward=float(reward),
            is_done=bool(terminated or truncated),
            status=Status.TRUNCATED_TURNS if truncated and not terminated else None,
            state=self._state(game),
        )

    def _state(self, game: _Game) -> str | None:
        if not self._observation_is_state:
            return None
        # By its values: print leaves out the middle of large arrays, and shows one number in two ways.
        seen = json.dumps(game.env.observation_space.to_jsonable([game.observation]))
        return f"{hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()}, {self._num_bad} bad actions"

    def _refused(self, game: _Game, reason: str) -> EnvReply:
        self._num_bad += 1
        is_over = self._num_bad >= self._bad_allowed
        return EnvReply(
            messages=(Message(role="user", content=reason),),
            reward=self._bad_reward if is_over else None,
            is_done=is_over,
            events=(Event(kind=EventKind.BAD_CALL, name=self._settings.id or "action", detail=reason),),
            status=Status.BAD_FORMAT if is_over else None,
            state=self._state(game),
        )

    async def close(self) -> None:
        game, self._game = self._game, None
        await self._thread.close(None if game is None else game.env.close)
