"""Agents that only know HTTP, and environments that ask a model by themselves: their endpoint in the run itself.

Owns: what they are wired to, and which stages cannot have them. Refuses: running them (rollout/agents.py, judged.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from temper.asking.endpoint import Endpoint, EndpointOptions
from temper.build.policy import Room, describe_policy, open_engine
from temper.config import RunConfig
from temper.envs.adapters.verifiers import VerifiersEnv
from temper.envs.adapters.verifiers_models import is_address
from temper.envs.agents.agent import NAME, AgentEnv, AgentSettings
from temper.envs.agents.launch import Nursery, ProcessEnd
from temper.envs.agents.service import AgentService
from temper.envs.env import find_env
from temper.errors import UserError
from temper.listening import listen
from temper.protocols import Env
from temper.rollout.agents import AgentPlayer, AgentRunner
from temper.rollout.episode import TURN_LOOP, Player
from temper.rollout.judged import JudgedPlayer, JudgeModel
from temper.runs.store.run_store import DATABASE, RUNS
from temper.serve.agents import AgentEndpoint, Heard
from temper.serve.conversation import Conversations
from temper.serve.text import Words
from temper.stages.kinds import kind_of
from temper.stages.reading.data import StageData

HERE = ("127.0.0.1", 0)
"""Where environments of this process ask."""
JUDGED_TOGETHER = 16
"""Answers that a judge of the run's own draws at one time: its cache has room for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentListeners:
    """Who hears of agents what their episodes do not tell."""

    answered: Heard | None = None
    """Of each request that an agent sent."""
    ended: Callable[[ProcessEnd], object] = lambda end: None
    """How each that Temper started ended."""


def check_agent(config: RunConfig) -> None:
    """Raises UserError for what an agent cannot do."""
    if config.env.name != NAME:
        return
    affordable_tokens(config, agent_settings(config))
    if config.rollout.max_turns == 1:
        raise UserError(
            'env "agent": rollout.max_turns is the number of calls that an agent may make in an episode, and it is 1. '
            "Say how many, e.g. rollout.max_turns = 8"
        )
    if kind_of(config).leaves == "rows":
        raise UserError(
            f'env "agent" cannot play in a stage of kind {config.stage}: an agent leads conversations of its own, and '
            "rows of text hold one. Use a stage that trains on what was drawn, e.g. rl"
        )


def require_free_ports(stages: Iterable[RunConfig]) -> None:
    """Raises UserError for a port that agents would find the model at and that is taken: a stage of agents binds it
    with its first episode, and that may come after hours of other stages."""
    played = (agent_settings(config).addresses for config in stages if config.env.name == NAME)
    for host, port in dict.fromkeys((one.host, one.port) for one in played):
        listen(host, port).close()


async def require_functions(stages: Iterable[RunConfig]) -> None:
    """Raises UserError for a function that the process which starts agents cannot import: a stage of agents imports it
    with its first episode, and that may come after hours of other stages. Nothing is imported into this process."""
    played = (agent_settings(config) for config in stages if config.env.name == NAME)
    for settings in {(one.function, one.python, one.passed): one for one in played if one.function}.values():
        nursery = Nursery(settings)
        try:
            await nursery.start()
        finally:
            await nursery.close()


def check_judge(config: RunConfig) -> None:
    """Raises UserError for what a recipe says wrongly of a model that its environment asks."""
    if config.env.name == "verifiers":
        find_env(config.env.name, config.env.options)()
    if config.env.place == "process" and answers_env(config):
        raise UserError(
            'env.place = "process": what this run answers is asked in its own process. Give env.options.judge an '
            'address, or use env.place = "here"'
        )


def answers_env(config: RunConfig) -> bool:
    """Whether environments ask a model by themselves, and the run answers: by the policy or by a model of its own."""
    judge = str(config.env.options.get("judge", ""))
    return config.env.name in ("", "verifiers") and bool(judge) and not is_address(judge)


def may_stop_at_text(config: RunConfig) -> bool:
    """Whether requests may have stop texts: the recipe's, or those of an agent or an environment that asks."""
    return bool(config.sampling.stop) or config.env.name == NAME or answers_env(config)


def make_player(
    config: RunConfig, data: StageData, run: Path | None = None, listeners: AgentListeners = AgentListeners()
) -> Player:
    """Who leads the episodes of a stage. run: where its run is written down, and no agent behind a wall may look."""
    if answers_env(config):
        return _make_judged(config, data)
    if config.env.name != NAME:
        return TURN_LOOP
    settings = agent_settings(config)
    return AgentPlayer(
        _open_endpoint(data, settings, listeners.answered),
        _make_runner(settings, run, listeners),
        max_running=settings.max_running,
        affordable_tokens=affordable_tokens(config, settings),
    )


def _make_runner(settings: AgentSettings, run: Path | None, listeners: AgentListeners) -> AgentRunner:
    if (service := settings.addresses.service) is not None:
        return AgentService(service, settings.service_key)
    return Nursery(settings, run_folders(run), listeners.ended)


def run_folders(run: Path | None) -> tuple[str, ...]:
    """Folders with gold answers, rewards and weights: those of all runs here, of this run and of those beside it."""
    beside = [] if run is None else [path.parent for path in run.absolute().parent.glob(f"*/{DATABASE}")]
    own = [] if run is None else [run.absolute()]
    return tuple(map(str, (RUNS.absolute(), *own, *sorted(beside))))


def agent_settings(config: RunConfig) -> AgentSettings:
    env = find_env(NAME, config.env.options)()
    assert isinstance(env, AgentEnv), "a recipe cannot replace it"
    return env.settings


def affordable_tokens(config: RunConfig, settings: AgentSettings) -> int:
    """Most tokens that an episode may draw for its cost; 0: cost is not limited."""
    most, price = config.rollout.max_episode_cost, settings.price_per_token
    if bool(most) != bool(price):
        given, missing = ("rollout.max_episode_cost", "env.options.price_per_token")[:: 1 if most else -1]
        raise UserError(f'env "{NAME}": {given} does nothing without {missing}. Give both, or leave it out')
    tokens = math.floor(most / price * (1 + 1e-9)) if most else 0
    if most and not tokens:
        raise UserError(
            f'env "{NAME}": rollout.max_episode_cost={most:g} is less than one token costs (price_per_token={price:g})'
        )
    return tokens


def _open_endpoint(data: StageData, settings: AgentSettings | None = None, heard: Heard | None = None) -> AgentEndpoint:
    """settings: of agents; None: environments ask, from this process."""
    if settings is None:
        return AgentEndpoint(
            lambda records: Conversations(data.tokenizer, data.renderer, records),
            HERE,
            model="",
            max_length=data.shape.max_context,
        )
    return AgentEndpoint(
        lambda records: Conversations(data.tokenizer, data.renderer, records, settings.untold_format),
        (settings.addresses.host, settings.addresses.port),
        model=settings.model,
        max_length=data.shape.max_context,
        address=settings.addresses.told,
        has_socket=settings.is_sandboxed,
        heard=heard,
    )


def _make_judged(config: RunConfig, data: StageData) -> Player:
    env = find_env("verifiers", config.env.options)()
    assert isinstance(env, VerifiersEnv), "a recipe cannot replace it"
    judging = env.judging
    assert judging is not None, "answers_env() has looked"
    serve = partial(_serve, config.rollout.episode_seconds)
    if not judging.folder:
        return JudgedPlayer(_open_endpoint(data), judging.limits, serve)
    policy = describe_policy(Path(judging.folder).expanduser())
    renderer = policy.make_renderer()
    door = AgentEndpoint(
        lambda records: Conversations(policy.tokenizer, renderer, records),
        HERE,
        model=policy.folder.resolve().name,
        max_length=policy.shape.max_context,
    )
    room = Room(seed=config.seed, max_running=JUDGED_TOGETHER)
    engine = open_engine(policy, room, numerics=config.engine.numerics, decode=Words(policy.tokenizer).decode)
    return JudgedPlayer(door, judging.limits, serve, JudgeModel(sampler=engine, stop_ids=renderer.stop_ids))


def _serve(seconds: float, env: Env, variables: Mapping[str, str]) -> Env:
    """The environment, told where it is answered. seconds: for an answer; those of its steps come before."""
    assert isinstance(env, VerifiersEnv), "no other environment has the option"
    address, model = variables["OPENAI_BASE_URL"], variables["OPENAI_MODEL"]
    options = EndpointOptions(base_url=address, model=model, deadline_seconds=seconds, retries=0)
    env.serve(Endpoint(options, key=variables["OPENAI_API_KEY"]))
    return env
