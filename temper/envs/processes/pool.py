"""Environments in worker processes: code that holds the interpreter holds one of theirs.

Owns: starting, feeding, ending and replacing workers, and which episode lives where. Refuses: judging, and playing
anew: each episode of a worker that is lost hears EnvironmentLost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from temper.children import worker_command
from temper.envs.env import Allowed
from temper.envs.processes.frames import NO_CALL, Frames
from temper.errors import BackendError, EnvironmentLost, TaskError
from temper.protocols import EnvOpening, EnvReply
from temper.types import Event, Message, Scalar, Status, Task

START_SECONDS = 120.0
"""For starting Python and importing Temper, until the first sign of life."""
END_SECONDS = 2.0
"""For a worker that is no longer needed to end by itself."""
KILL_SECONDS = 10.0
"""For the system to end one that was killed."""
LOOK_SECONDS = 1.0
POLL_SECONDS = 0.01


class EnvProcesses:
    """Makes environments that live in up to `num_workers` processes, each of them the home of many episodes.

    None is started before it is needed. They end with close(), with the event loop, and with this process. seconds:
    the deadline of one call; a worker that gives no sign of life for so long is killed. max_cost: what an episode may
    cost; 0: no limit.
    """

    def __init__(
        self,
        options: Mapping[str, Scalar | list[Scalar]],
        *,
        num_workers: int,
        seconds: float,
        allowed: Allowed | None = None,
        max_cost: float = 0.0,
    ) -> None:
        self._order = pickle.dumps((dict(options), allowed, seconds, max_cost))
        self._num_workers = num_workers
        self._seconds = seconds
        self.max_cost = max_cost
        self.alone = asyncio.Semaphore(num_workers)
        """Held by episodes that have a worker for themselves, beside those that others share."""
        self._episodes = itertools.count()
        self._workers: list[EnvProcess] = []

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.is_alive and worker.process is not None]

    def __call__(self, name: str) -> InProcess:
        return InProcess(self, name, next(self._episodes))

    def take(self) -> EnvProcess:
        """The worker with the fewest episodes, or a new one while there is room and all have some."""
        shared = [worker for worker in self._workers if worker.is_alive and not worker.is_reserved]
        best = min(shared, key=lambda worker: worker.num_episodes, default=None)
        if best is None or (best.num_episodes and len(shared) < self._num_workers):
            best = self.start()
        best.num_episodes += 1
        return best

    def start(self, *, is_reserved: bool = False) -> EnvProcess:
        """A new worker; a reserved one is given to nobody else."""
        worker = EnvProcess(self._order, self._seconds, is_reserved=is_reserved)
        self._workers = [*(worker for worker in self._workers if worker.is_alive), worker]
        return worker

    async def close(self) -> None:
        """Returns when every worker is gone."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.close() for worker in workers))


class InProcess:
    """Implements Env and MayBeLost: one episode in one worker."""

    def __init__(self, workers: EnvProcesses, name: str, episode: int) -> None:
        self._workers, self._name, self._episode = workers, name, episode
        self._worker: EnvProcess | None = None
        self._spent, self._is_alone = 0.0, False
        self._held = contextlib.AsyncExitStack()

    def replay(self, *, spent: float, alone: bool) -> None:
        self._spent, self._is_alone = spent, alone

    async def start(self, task: Task, seed: int) -> EnvOpening:
        assert self._worker is None, "an environment is single-use"
        if self._is_limited and self._spent >= (most := self._workers.max_cost):
            raise TaskError(
                f"nothing is left of rollout.max_episode_cost={most:g} to play the episode anew: plays that were lost "
                f"with their processes have cost {self._spent:g}"
            )
        self._worker = await self._take_alone() if self._is_alone else self._workers.take()
        return await self._ask(self._worker, "start", self._name, self._spent, task, seed)  # type: ignore[no-any-return]

    async def step(self, message: Message) -> EnvReply:
        assert self._worker is not None, "start() comes first"
        reply: EnvReply = await self._ask(self._worker, "step", message)
        if self._is_limited and reply.status is Status.TRUNCATED_TURNS:
            # Perhaps for what lost plays had used up: what befell a process is not judged as the policy's doing.
            return dataclasses.replace(reply, status=Status.TOOL_ERROR, reward=None)
        return reply

    @property
    def _is_limited(self) -> bool:
        """Whether it may cost less than others, for what lost plays have cost."""
        return bool(self._workers.max_cost and self._spent)

    async def _take_alone(self) -> EnvProcess:
        await self._held.enter_async_context(self._workers.alone)
        worker = self._workers.start(is_reserved=True)
        self._held.push_async_callback(worker.close)
        worker.num_episodes += 1
        return worker

    async def close(self) -> tuple[Event, ...] | None:
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        try:
            return await self._ask(worker, "close") if worker.is_alive else None  # type: ignore[no-any-return]
        finally:
            worker.num_episodes -= 1
            await self._held.aclose()

    async def _ask(self, worker: EnvProcess, verb: str, *given: object) -> Any:
        try:
            asked = pickle.dumps((verb, self._episode, *given))
        except Exception as error:  # objects decide how they are pickled, and raise what they please
            raise TaskError(
                f"a task cannot be sent to the process of {self._name} ({error}). Make it of plain values, or use "
                'env.place = "here"'
            ) from error
        return await worker.ask(asked)


class EnvProcess:
    """A worker from its start to its end, whichever way it ends."""

    def __init__(self, order: bytes, seconds: float, *, is_reserved: bool) -> None:
        self.is_reserved = is_reserved
        self.num_episodes = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._seconds = seconds
        self._numbers = itertools.count(NO_CALL + 1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._has_spoken = False
        self._silent_seconds = 0.0
        self._lost = ""
        """Why it is over; "": it is not, or not yet known."""
        self._is_broken = False
        """It never began, so that another would not either."""
        self._frames = Frames(self._hear, self._hang_up)
        self._frames.send(NO_CALL, order)
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # When the event loop ends it cancels this, and so ends the worker.
        self._life = asyncio.create_task(self._live())

    @property
    def is_alive(self) -> bool:
        return not self._over.done() and not self._life.done()

    async def ask(self, asked: bytes) -> Any:
        """What the worker answers; raises what it raised, or that it is lost."""
        if self._lost:
            raise self._loss(is_suspect=False)
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._answers:
            self._silent_seconds = 0.0
        self._answers[number] = answer
        self._frames.send(number, asked)
        try:
            body = await answer
        finally:
            del self._answers[number]
            if answer.cancelled():  # whoever asked was
                self._frames.send(next(self._numbers), pickle.dumps(("cancel", number)))
        try:
            value, error = pickle.loads(body)
        except Exception as why:
            raise TaskError(f'an answer from another process cannot be read ({why}). Use env.place = "here"') from why
        if error is not None:
            raise error
        return value

    async def close(self) -> None:
        self._life.cancel()
        await asyncio.wait({self._life}, timeout=END_SECONDS + KILL_SECONDS)

    def _hear(self, number: int, body: bytes) -> None:
        self._has_spoken, self._silent_seconds = True, 0.0
        if (answer := self._answers.get(number)) is not None and not answer.done():
            answer.set_result(body)

    def _hang_up(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    async def _live(self) -> None:
        why = ""
        try:
            why = await self._watch()
        except OSError as error:
            why = f"it could not be started: {error}"
        finally:
            self._hang_up()
            suspects = frozenset(self._answers)
            self._frames.close()
            how = await _end(self.process, 0.0 if why else END_SECONDS)
            self._lose(why or how, suspects)

    async def _watch(self) -> str:
        """Starts it and returns when it has hung up, or why it must be ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            # Sets have the same order in every worker, or equal seeds might not give equal episodes.
            environment = {"PYTHONHASHSEED": "0", **os.environ}
            # A new session: a signal typed at the terminal is for the run, which then ends its workers.
            self.process = subprocess.Popen(
                worker_command("temper.envs.processes.program"),
                stdin=theirs.fileno(),
                start_new_session=True,
                env=environment,
            )
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=ours)
        look = min(LOOK_SECONDS, self._seconds / 4)
        # Looks are counted, not the clock: after something held the event loop, what was said meanwhile is heard first.
        while not self._over.done():
            await asyncio.wait({self._over}, timeout=look)
            self._silent_seconds += look if self._answers else 0.0
            if self._silent_seconds > (limit := self._seconds if self._has_spoken else START_SECONDS):
                return (
                    f"no sign of life for {limit:g} s, so it was killed: code in it holds the interpreter, or it was "
                    "stopped. env.call_seconds is that limit"
                )
        return ""

    def _lose(self, how: str, suspects: frozenset[int]) -> None:
        """suspects: numbers of the calls that were under way when it ended."""
        self._is_broken = not self._has_spoken and how.startswith("exit code")
        self._lost = (
            f'env.place = "process": a worker did not start ({how}); what it wrote is above'
            if self._is_broken
            else f"the process of its environment is lost ({how}), and every episode that it played with it: "
            f"{self.num_episodes}. A new one takes its place"
        )
        for number, answer in self._answers.items():
            if not answer.done():
                answer.set_exception(self._loss(is_suspect=number in suspects))

    def _loss(self, *, is_suspect: bool) -> EnvironmentLost | BackendError:
        return BackendError(self._lost) if self._is_broken else EnvironmentLost(self._lost, is_suspect=is_suspect)


async def _end(process: subprocess.Popen[bytes] | None, seconds: float) -> str:
    """How it ended by itself within `seconds`; after that it is killed, with whatever it started in its session."""
    if process is None:
        return "it was never started"
    try:
        await _gone(process, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    await _gone(process, KILL_SECONDS)
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


async def _gone(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Returns when it is, or after `seconds`."""
    for _ in range(int(seconds / POLL_SECONDS)):
        if process.poll() is not None:
            return
        await asyncio.sleep(POLL_SECONDS)
