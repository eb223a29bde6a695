"""The reward for programs: what the response wrote is run against the tests of the task, behind an OS boundary.

Owns: kind "code". Refuses: running anything in this process, and letting a solution near what it is compared with:
expected outputs stay here, assertions run in a second sandbox that holds no code of the solution (code_process.py).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from temper.rewards.code_tests import BadTests, FunctionTest, StreamTest, read_tests
from temper.sandbox import Limits, Outcome, Program, Sandbox, SandboxFailed, require_sandbox
from temper.types import Score, Task, Trajectory

PROCESS = Path(__file__).with_name("code_process.py").read_text(encoding="utf-8")
CHECK_LIMITS = Limits(wall_seconds=30.0, cpu_seconds=20.0, output_bytes=4 << 20)
"""For the tests themselves, which are trusted to end; what they wait for has run before."""
MAX_ROUNDS = 8
"""Each round answers at least one more question; only tests that ask about answers need more than one."""
MAX_REMEMBERED = 4096

Questions = list[list[Any]]
"""For each test, what it asks the solution."""


class CodeReward:
    """The weighted share of tests passed; with all_or_nothing 1 when all are, else 0.

    A response without a program, or one that crashes or hangs, has passed nothing; a call that hangs also fails the
    function tests after it. Broken tests and a broken sandbox are errors, never numbers.
    """

    name = "code"

    def __init__(
        self,
        *,
        timeout_seconds: float = 5.0,
        all_or_nothing: bool = True,
        only_hidden: bool = False,
        entry_point: str = "",
        workers: int = 2,
    ) -> None:
        require_sandbox()
        self._all_or_nothing = all_or_nothing
        self._only_hidden = only_hidden
        self._entry_point = entry_point
        self._limits = Limits(wall_seconds=timeout_seconds, cpu_seconds=timeout_seconds, output_bytes=1 << 20)
        self._sandbox = Sandbox(size=workers)
        self._first_questions: dict[tuple[FunctionTest, ...], Questions] = {}

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            tests = read_tests(task, entry_point=self._entry_point, only_hidden=self._only_hidden)
        except BadTests as error:
            return Score.error(str(error))
        source = find_program(trajectory.text)
        if source is None:
            return Score.of(0.0)
        streams = [test for test in tests if isinstance(test, StreamTest)]
        functions = tuple(test for test in tests if isinstance(test, FunctionTest))
        try:
            passed = [*await self._run_streams(source, streams), *await self._run_functions(source, functions)]
        except (SandboxFailed, BadTests) as error:
            return Score.error(str(error))
        weights = [*(test.weight for test in streams), *(test.weight for test in functions)]
        if self._all_or_nothing:
            return Score.of(float(all(ok for ok, weight in zip(passed, weights, strict=True) if weight)))
        return Score.of(sum(weight * ok for weight, ok in zip(weights, passed, strict=True)) / sum(weights))

    def check(self, task: Task) -> str | None:
        """Tests must be readable, assert something, and call the solution."""
        try:
            read_tests(task, entry_point=self._entry_point, only_hidden=self._only_hidden)
        except BadTests as error:
            return str(error)
        return None

    async def close(self) -> None:
        self._sandbox.close()

    async def _run_streams(self, source: str, tests: Sequence[StreamTest]) -> list[bool]:
        programs = (Program(source=source, stdin=test.input) for test in tests)
        outcomes = await asyncio.gather(*(self._sandbox.run(program, self._limits) for program in programs))
        return [run.status == "ok" and test.accepts(run.stdout) for run, test in zip(outcomes, tests, strict=True)]

    async def _run_functions(self, source: str, tests: tuple[FunctionTest, ...]) -> list[bool]:
        """Questions to the solution, its answers, then the tests on the answers; again while these ask new ones."""
        if not tests:
            return []
        if (questions := self._first_questions.get(tests)) is None:
            questions = [verdict["questions"] for verdict in await self._check(tests, [], "")]
            if len(self._first_questions) < MAX_REMEMBERED:
                self._first_questions[tests] = questions
        for _ in range(MAX_ROUNDS):
            answers = await self._ask(source, questions)
            verdicts = await self._check(tests, questions, answers)
            if all(verdict["verdict"] != "pending" for verdict in verdicts):
                return [verdict["verdict"] == "passed" for verdict in verdicts]
            questions = [verdict["questions"] for verdict in verdicts]
        raise BadTests(f"the tests still ask the solution new questions after {MAX_ROUNDS} rounds")

    async def _ask(self, source: str, questions: Questions) -> str:
        """The solution's own words: forging them is answering, and no expected value is where it could be read."""
        files = {"solution.py": source, "questions.json": json.dumps(questions)}
        program = Program(source=PROCESS, files=files, arguments=("solve",))
        return (await self._sandbox.run(program, self._limits)).stdout

    async def _check(self, tests: Sequence[FunctionTest], asked: Questions, answers: str) -> list[dict[str, Any]]:
        nonce = secrets.token_hex(16)
        job = {"nonce": nonce, "tests": [test.as_job() for test in tests], "asked": asked}
        files = {"job.json": json.dumps(job), "answers.jsonl": answers}
        outcome = await self._sandbox.run(Program(source=PROCESS, files=files, arguments=("check",)), CHECK_LIMITS)
        verdicts = _read_verdicts(outcome, nonce, len(tests))
        for verdict in verdicts:
            if verdict["verdict"] == "unsupported":
                raise BadTests(f"a test cannot be run: {verdict['reason']}")
        return verdicts


def _read_verdicts(outcome: Outcome, nonce: str, num_tests: int) -> list[dict[str, Any]]:
    if outcome.status != "ok":
        raise BadTests(f"the tests ended with {outcome.status}: {outcome.stderr[-200:]}")
    result = json.loads(outcome.stdout)
    if result["nonce"] != nonce or len(result["verdicts"]) != num_tests:
        raise BadTests("the tests gave no verdict")
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
