"""One episode of an agent before anything is trained: played as in training, but a stand-in answers for the policy.

Owns: what such an episode shows of an agent, and which ends of it are refused. Refuses: rewards, and services that run
already: they would play the episode as if it counted.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field

from temper.build import Environments, require_free_ports
from temper.build.agents import AgentListeners, agent_settings, make_player
from temper.build.stage import episode_setup
from temper.commands.training.trials import IN_DOUBT
from temper.config import RunConfig
from temper.engine.stand_in import StandIn, short_answer
from temper.envs.agents.agent import RESULT_PATH, AgentSettings
from temper.envs.agents.launch import ProcessEnd
from temper.envs.agents.service import AgentService
from temper.errors import UserError
from temper.objectives import Objective
from temper.rollout.episode import run_episode
from temper.stages.distill import NoReward
from temper.stages.reading.data import StageData
from temper.types import TRAINABLE_STATUSES, Status, Trajectory

TRIAL_SECONDS = 60.0
"""Longest that a dry run waits for the end of an episode."""
SHOWN = 200
"""Characters of what an agent or the endpoint said, in a line."""
UNTOLD = "It was told of no episode: it would play it as if it counted"
LEFT_OUT = "In training such an episode has no reward and is left out"


async def try_agent(config: RunConfig, objective: Objective, data: StageData) -> dict[str, str]:
    """How the agent plays the first task. Raises UserError for one that cannot be started, or that would fail in
    training whatever the policy says. Nothing where the stage plays nothing."""
    settings = agent_settings(config)
    if not data.asked:
        return {}
    if settings.addresses.service is not None:
        return await _try_service(settings)
    try:
        require_free_ports([config])
    except UserError as taken:  # a recipe may be looked at beside a run of it
        return {f"agent {IN_DOUBT}": f"not tried: it would not find the model, for Temper {taken}"}
    trial = await _play(config, objective, data, settings.function or settings.command)
    if (problem := trial.problem()) is not None:
        raise UserError(problem)
    doubt = trial.doubt()
    return {f"agent {IN_DOUBT}" if doubt else "agent": _sentences(trial.told(), doubt)}


async def _try_service(settings: AgentSettings) -> dict[str, str]:
    service = settings.addresses.service
    assert service is not None, "the caller has looked"
    try:
        await AgentService(service, settings.service_key).reach()
    except OSError as error:
        unreached = f"cannot be reached now ({type(error).__name__}: {error}): start it before the run"
        return {f"agent {IN_DOUBT}": f"{service.geturl()} {unreached}. {UNTOLD}"}
    return {"agent": f"{service.geturl()} takes connections. {UNTOLD}"}


@dataclass(slots=True, kw_only=True)
class AgentTrial:
    """What an episode has shown."""

    name: str
    """What is started."""
    answer: str
    """What the stand-in says to everything."""
    episode_seconds: float
    """That an episode of the recipe may take."""
    trajectory: Trajectory | None = None
    """None: it is not over."""
    num_answered: int = 0
    """Completions that the agent was given."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that were refused, by why."""
    has_posted: bool = False
    end: ProcessEnd | None = None
    """How the agent ended; None: there was no process of it."""

    def answered(self, path: str, status: int, body: bytes) -> None:
        """Hears of a request."""
        if status >= 400:
            self.refused[f"{status} {_message(body)}"] += 1
        elif path.endswith(RESULT_PATH):
            self.has_posted = True

    def ended(self, end: ProcessEnd) -> None:
        self.end = end

    @property
    def seconds(self) -> float:
        """That this one might take."""
        return min(TRIAL_SECONDS, self.episode_seconds)

    @property
    def status(self) -> Status:
        return self._over.status

    @property
    def _over(self) -> Trajectory:
        assert self.trajectory is not None, "it is asked about when it is over"
        return self.trajectory

    def problem(self) -> str | None:
        """Why every episode would fail, whatever the policy said; None: that is not shown."""
        if self.num_answered or self.has_posted or self.status is Status.TOO_LONG:
            return None
        refusals = self._refusals("It was refused: ")
        if self.status is Status.TIMEOUT:
            nothing = (
                f"{self.name} asked the model nothing in the {self.seconds:g} s that it has (rollout.episode_seconds; "
                "the first episode also waits for imports)"
            )
            return _sentences(nothing, self._words(), refusals) if self.seconds == self.episode_seconds else None
        if self.end is None:  # it was never started, and the error names it
            return self._over.error
        words = "" if self.end.problem else self._words()  # of a problem they are a part
        return _sentences(f"{self.name} does not play: {self._over.error}", words, refusals)

    def doubt(self) -> str:
        """What may be wrong though it plays, or ''."""
        if self.status in TRAINABLE_STATUSES:
            return ""
        if self.status is Status.TOO_LONG:
            return f"{self._over.error}. Such tasks are left out: ask less, or use a model with a longer context"
        if not self.num_answered and self.has_posted:
            return f"It asked the model nothing. {LEFT_OUT}"
        if self.status is Status.TIMEOUT:
            return f"{LEFT_OUT} after {self.episode_seconds:g} s (rollout.episode_seconds)"
        return f'{LEFT_OUT}: an answer that it cannot use should become a result, e.g. ""'

    def told(self) -> str:
        """What it did, in a line."""
        times = {0: "nothing", 1: "once"}.get(self.num_answered, f"{self.num_answered} times")
        did = [f"{self.name} played {self._over.task_id}: asked the model {times}"]
        did += [f"was answered {self.answer!r}"] if self.num_answered else []
        did += [refusals] if (refusals := self._refusals("was refused: ")) else []
        did += ["posted a result"] if self.has_posted else []
        if self.status is Status.TIMEOUT:
            did.append(f"had not ended after {self.seconds:g} s")
        elif self.end is not None:
            did.append(self.end.how)
        if self._over.result is not None:
            did.append(f"handed in {self._over.result!r:.{SHOWN}}")
        return _sentences(", ".join(did), self._words())

    def _words(self) -> str:
        lines = self.end.last_words.splitlines() if self.end is not None else []
        while sum(map(len, lines)) > SHOWN and len(lines) > 1:  # of a traceback the end says most
            lines = lines[1:]
        return f"It said: {' / '.join(line.strip() for line in lines)[-SHOWN:]}" if lines else ""

    def _refusals(self, before: str) -> str:
        each = (f"{why} ({count} times)" if count > 1 else why for why, count in self.refused.items())
        return before + "; ".join(each) if self.refused else ""


async def _play(config: RunConfig, objective: Objective, data: StageData, name: str) -> AgentTrial:
    answer_ids = short_answer(data.tokenizer, data.renderer.decode)
    answer, sampler = data.renderer.decode(answer_ids), StandIn(answer_ids)
    trial = AgentTrial(name=name, answer=answer, episode_seconds=config.rollout.episode_seconds)
    listeners = AgentListeners(answered=trial.answered, ended=trial.ended)
    player = make_player(config, data, listeners=listeners)
    setup = episode_setup(config, objective, data, sampler, Environments(config.env), player)
    params = setup.params.greedy()  # nothing is trained on: no probabilities of other tokens are needed
    setup = dataclasses.replace(setup, scorer=NoReward(), params=params, episode_seconds=trial.seconds)
    try:
        trial.trajectory = await run_episode(setup, data.asked[0], group_id="trial", index=0, request_id="trial")
    finally:
        await player.close()
    trial.num_answered = sampler.num_answered
    return trial


def _sentences(*texts: str) -> str:
    """One behind the other; those that are '' are left out."""
    *before, last = (text for text in texts if text)
    return " ".join([*(text if text[-1] in ".?!" else f"{text}." for text in before), last])


def _message(body: bytes) -> str:
    """What a refusal says."""
    try:
        return str(json.loads(body)["error"]["message"])[:SHOWN]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:SHOWN]
