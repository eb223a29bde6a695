"""The reward for programs: what the response wrote is run against the tests of the task, behind an OS boundary. Of a
task with files it is what the episode left of them.

Owns: kind "code". Refuses: running anything in this process, and letting a solution near what it is compared with:
expected outputs stay here, assertions run in a second sandbox that holds no code of the solution (guest.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from temper.errors import TaskError
from temper.protocols import Reward
from temper.rewards.code.tests import BadTests, FunctionTest, StreamTest, read_tests
from temper.sandbox import Limits, Outcome, Program, Sandbox, SandboxFailed, require_sandbox
from temper.sandbox.repository import apply_changes, has_repository, read_repository
from temper.types import Score, ScoreKind, Task, Trajectory

PROCESS, WIRE = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("guest.py", "wire.py"))
WIRE_FILE = "temper/rewards/code/wire.py"
"""Where the process in the sandbox imports wire.py from."""
REPOSITORY = "repository"
"""The folder with a task's files, beside those that lead the exchange: whatever they are called, they replace none."""
PATIENCE = 6.0
"""Wall time per second that a program may use. That a machine has less time for it is not the program's fault."""
CHECK_LIMITS = Limits(wall_seconds=PATIENCE * 20.0, cpu_seconds=20.0, idle_seconds=20.0, output_bytes=4 << 20)
"""For the tests themselves, which are trusted to end; what they wait for has run before."""
MAX_ROUNDS = 64
"""Each round answers at least one more question; only tests that ask about answers need more than one. With more it is
the solution that keeps the tests going, e.g. `while not done(): step()`."""
MAX_REMEMBERED = 4096

Questions = list[list[Any]]
"""For each test, what it asks the solution."""


class CodeReward(Reward):
    """The weighted share of tests passed; with all_or_nothing 1 when all are, else 0. Of a task with "files" the module
    in "module" is judged, as the episode left it.

    What the response causes is a number: one without a program, or one that crashes, hangs, or answers so that the
    tests do not end, has passed nothing; a call that hangs also fails the function tests after it. What the tests, the
    sandbox or a busy machine cause is an error: tests that break before they have heard an answer, and a program that
    got too little processor time, twice. timeout_seconds is of processor time, and as much again of sleep. So many
    programs as `workers` run at a time; 0: as many as there are cores.
    """

    name = "code"

    def __init__(
        self,
        *,
        timeout_seconds: float = 10.0,
        all_or_nothing: bool = True,
        only_hidden: bool = False,
        entry_point: str = "",
        workers: int = 0,
    ) -> None:
        require_sandbox()
        self._all_or_nothing = all_or_nothing
        self._only_hidden = only_hidden
        self._entry_point = entry_point
        self._limits = Limits(
            wall_seconds=PATIENCE * timeout_seconds,
            cpu_seconds=timeout_seconds,
            idle_seconds=timeout_seconds,
            output_bytes=1 << 20,
        )
        self._sandbox = Sandbox(size=workers or os.cpu_count() or 2)
        self._first_questions: dict[tuple[FunctionTest, ...], Questions] = {}
        self._being_judged: dict[bytes, asyncio.Lock] = {}
        self._judged: dict[bytes, Score] = {}
        """Verdicts by tests and solution: the newest."""

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            tests = read_tests(task, entry_point=self._entry_point, only_hidden=self._only_hidden)
            solution = find_solution(task, trajectory)
        except BadTests as error:
            return Score.error(str(error))
        if isinstance(solution, str):
            return Score.of(0.0, solution)
        # Members of a group often write the same: it is judged once, and those that come meanwhile wait for it.
        key = hashlib.blake2b(repr((tests, solution)).encode(errors="surrogatepass")).digest()
        try:
            async with self._being_judged.setdefault(key, asyncio.Lock()):
                score = self._judged.get(key) or await self._judge(tests, solution)
                if score.kind is ScoreKind.VALUE:
                    self._judged[key] = score
        finally:
            self._being_judged.pop(key, None)
        if len(self._judged) > MAX_REMEMBERED:
            del self._judged[next(iter(self._judged))]
        return score

    async def _judge(self, tests: Sequence[StreamTest | FunctionTest], solution: Solution) -> Score:
        streams = [test for test in tests if isinstance(test, StreamTest)]
        functions = tuple(test for test in tests if isinstance(test, FunctionTest))
        try:
            faults = [*await self._run_streams(solution, streams), *await self._run_functions(solution, functions)]
        except (SandboxFailed, BadTests) as error:
            return Score.error(str(error))
        weights = [*(test.weight for test in streams), *(test.weight for test in functions)]
        share = sum(weight for weight, fault in zip(weights, faults, strict=True) if not fault) / sum(weights)
        first = next((fault for weight, fault in zip(weights, faults, strict=True) if fault and weight), None)
        return Score.of(0.0 if first and self._all_or_nothing else share, first)

    def check(self, task: Task) -> str | None:
        """Tests must be readable, assert something, and call the solution."""
        try:
            read_tests(task, entry_point=self._entry_point, only_hidden=self._only_hidden)
            find_solution(task, Trajectory.saying(task.id, "pass"))
        except BadTests as error:
            return str(error)
        return None

    async def close(self) -> None:
        self._sandbox.close()

    async def _run_streams(self, solution: Solution, tests: Sequence[StreamTest]) -> list[str]:
        """What is wrong, by test; '' where nothing is."""
        programs = (Program(source=solution.program, stdin=test.input, files=solution.files) for test in tests)
        outcomes = await asyncio.gather(*(self._run(program, self._limits) for program in programs))
        return [_stream_fault(run, test) for run, test in zip(outcomes, tests, strict=True)]

    async def _run_functions(self, solution: Solution, tests: tuple[FunctionTest, ...]) -> list[str]:
        """What is wrong, by test. Questions to the solution, its answers, then the tests on the answers; again while
        these ask new ones."""
        if not tests:
            return []
        questions = await self._first_round(tests)
        answered: dict[int, int] = {}
        for _ in range(MAX_ROUNDS):
            answers = await self._ask(solution, questions)
            outcome, nonce = await self._check(tests, questions, answers)
            if outcome.status != "ok":
                # Without answers they ended. What they have heard since is the solution's.
                return [f"with the solution's answers the tests ended with {outcome.status}"] * len(tests)
            verdicts = _read_verdicts(outcome, nonce, len(tests))
            waiting = {i: one["num_answered"] for i, one in enumerate(verdicts) if one["verdict"] == "pending"}
            # A solution that answers the same question differently each time could be asked for ever.
            if not any(count > answered.get(place, -1) for place, count in waiting.items()):
                break
            questions, answered = [verdict["questions"] for verdict in verdicts], waiting
        return ["" if one["verdict"] == "passed" else one["reason"] or "the answers never settle" for one in verdicts]

    async def _first_round(self, tests: tuple[FunctionTest, ...]) -> Questions:
        """What the tests ask before they have heard anything. Whatever breaks here is the tests' own fault."""
        if (questions := self._first_questions.get(tests)) is None:
            outcome, nonce = await self._check(tests, [], "")
            if outcome.status != "ok":
                raise BadTests(f"the tests ended with {outcome.status}: {outcome.stderr[-200:]}")
            questions = [verdict["questions"] for verdict in _read_verdicts(outcome, nonce, len(tests))]
            if len(self._first_questions) < MAX_REMEMBERED:
                self._first_questions[tests] = questions
        return questions

    async def _ask(self, solution: Solution, questions: Questions) -> str:
        """The solution's own words: forging them is answering, and no expected value is where it could be read."""
        own = {"solution.py": solution.source, "questions.json": json.dumps(questions), WIRE_FILE: WIRE}
        files: dict[str, str | bytes] = {**solution.files, **own}
        program = Program(source=PROCESS, files=files, arguments=("solve",))
        return (await self._run(program, self._limits)).stdout

    async def _check(self, tests: Sequence[FunctionTest], asked: Questions, answers: str) -> tuple[Outcome, str]:
        """How the tests ended, and the word that marks their verdicts as theirs."""
        nonce = secrets.token_hex(16)
        job = {"nonce": nonce, "tests": [test.as_job() for test in tests], "asked": asked}
        files = {"job.json": json.dumps(job), "answers.jsonl": answers, WIRE_FILE: WIRE}
        return await self._run(Program(source=PROCESS, files=files, arguments=("check",)), CHECK_LIMITS), nonce

    async def _run(self, program: Program, limits: Limits) -> Outcome:
        """The outcome; from a second try with more patience where the machine was too busy for the first."""
        for patience in (1.0, PATIENCE):
            wall_seconds = patience * limits.wall_seconds
            outcome = await self._sandbox.run(program, replace(limits, wall_seconds=wall_seconds))
            if not outcome.is_starved:
                return outcome
        raise SandboxFailed(
            f"the machine is too busy: a program got {outcome.cpu_seconds:.1f} s of the processor in {wall_seconds:g} s"
        )


@dataclass(frozen=True, slots=True)
class Solution:
    """What is judged."""

    source: str
    """Defines the functions that tests ask for."""
    program: str
    """What is run on the input of a stream test."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """What both find beside them."""


def find_solution(task: Task, trajectory: Trajectory) -> Solution | str:
    """What the episode wrote, or why there is nothing to judge. Raises BadTests when the task itself is broken."""
    if not has_repository(task):
        source = find_program(trajectory.text)
        return "there is no program" if source is None else Solution(source, source)
    modules = [name.strip() for name in str(task.extra.get("module", "")).split(",") if name.strip()]
    if not modules:
        raise BadTests('it has files, so "module" must name the one that the tests are about, e.g. "ledger"')
    try:
        files = apply_changes(read_repository(task), trajectory.result or "{}")
    except TaskError as error:
        raise BadTests(str(error)) from error
    except (ValueError, RecursionError) as error:
        return f"its changes cannot be read: {error}"
    shown = {f"{REPOSITORY}/{path}": content for path, content in files.items()}
    start = f"import os, sys\nos.chdir({REPOSITORY!r})\nsys.path.insert(0, os.getcwd())\n"
    names = "globals().update({n: v for n, v in vars(importlib.import_module(m)).items() if n[:2] != '__'})"
    source = f"{start}import importlib\nfor m in {modules!r}:\n    {names}\n"
    return Solution(source, f"{start}import runpy\nrunpy.run_module({modules[0]!r}, run_name='__main__')\n", shown)


def _stream_fault(run: Outcome, test: StreamTest) -> str:
    if run.status != "ok":
        return f"the program ended with {run.status}"
    return "" if test.accepts(run.stdout) else "it printed something else"


def _read_verdicts(outcome: Outcome, nonce: str, num_tests: int) -> list[dict[str, Any]]:
    result = json.loads(outcome.stdout)
    if result["nonce"] != nonce or len(result["verdicts"]) != num_tests:
        raise BadTests("the tests gave no verdict")
    for verdict in result["verdicts"]:
        if verdict["verdict"] == "unsupported":
            raise BadTests(f"a test cannot be run: {verdict['reason']}")
    return list(result["verdicts"])


def find_program(text: str) -> str | None:
    """The last closed ```python block, else the last closed block without a language, else all of the text.

    None when there is nothing to run. Whether it is Python shows in the sandbox: a parser can be attacked, too.
    """
    found: dict[str, str] = {}
    language = ""
    block: list[str] | None = None
    for line in text.splitlines():
        mark = line.strip()
        if block is None and mark.startswith("```"):
            language, block = mark[3:].strip().lower(), []
        elif block is not None and mark == "```":
            found["python" if language in ("py", "python3") else language] = "\n".join(block) + "\n"
            block = None
        elif block is not None:
            block.append(line)
    source = found.get("python", found.get("", text))
    return source if source.strip() and _is_unicode(source) else None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair: no file can hold it
        return False
    return True
