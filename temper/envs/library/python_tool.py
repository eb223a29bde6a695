"""Questions with a Python tool: programs of the policy run in the sandbox, each in a fresh one.

Owns: env "python", and how an outcome reads. Refuses: state between calls; running anything outside the sandbox.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from functools import lru_cache

from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import ToolError, ToolTimeout, make_tool
from temper.errors import TaskError, UserError
from temper.sandbox import Limits, Outcome, Program, Sandbox

QUEUE_SECONDS = 300.0
"""How long a program may wait for a free sandbox. Not the policy's fault, so more than that is a failed episode."""


class Python(ToolEnv):
    """A question, programs, an answer. Time-outs, crashes and too much output are observations."""

    def __init__(
        self,
        *,
        seconds: float = 5.0,
        memory_mib: int = 256,
        output_characters: int = 2000,
        max_calls: int = 8,
        call_format: str = "auto",
        show_tools: str = "auto",
        sandbox: Sandbox | None = None,
    ) -> None:
        if seconds <= 0 or memory_mib < 16 or output_characters < 16 or max_calls < 1:
            raise UserError(
                f'env "python": seconds={seconds} must be above 0, memory_mib={memory_mib} and '
                f"output_characters={output_characters} at least 16, max_calls={max_calls} at least 1."
            )
        self._sandbox = sandbox or _shared_sandbox()
        self._program_limits = Limits(wall_seconds=seconds, cpu_seconds=seconds, memory_bytes=memory_mib << 20)
        self._characters = output_characters
        longest = QUEUE_SECONDS + seconds + 30  # only a net: the sandbox keeps the real deadline
        super().__init__(
            [make_tool(self.python, seconds=longest)],
            limits=ToolLimits(
                calls_per_turn=max_calls,
                calls_per_episode=max_calls,
                observation_characters=output_characters + 200,
                total_seconds=longest * max_calls,
            ),
            presentation=Presentation(call_format=call_format, show_tools=show_tools),
        )

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints. Nothing is kept from one call to the next.

        code: the whole program; use print to see a value
        """
        try:
            async with asyncio.timeout(QUEUE_SECONDS + self._program_limits.wall_seconds):
                outcome = await self._sandbox.run(Program(code), self._program_limits)
        except TimeoutError as error:
            raise TaskError(
                f"no sandbox was free for {QUEUE_SECONDS:g} s. Raise its size, or run fewer groups"
            ) from error
        return describe(outcome, self._program_limits, self._characters)


def describe(outcome: Outcome, limits: Limits, characters: int) -> str:
    """What the policy reads. Raises ToolError or ToolTimeout, with the output so far, when the program failed."""
    output = _shortened(outcome.stdout.rstrip("\n"), characters // 2 if outcome.stderr else characters)
    if outcome.status == "ok":
        return output or "(no output, use print)"
    failures = {
        "timeout": f"the program ran longer than {limits.wall_seconds:g} s",
        "memory": f"the program used more than {limits.memory_bytes >> 20} MiB",
        "output": f"the program wrote more than {limits.output_bytes >> 10} KiB",
        "killed": f"the program was killed, exit code {outcome.exit_code}",
    }
    # The end of a traceback names the error.
    reason = failures.get(outcome.status) or outcome.stderr.strip()[-(characters // 2) :] or "the program failed"
    text = f"{reason}\noutput before that:\n{output}" if output else reason
    raise ToolTimeout(text) if outcome.status == "timeout" else ToolError(text)


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}... ({len(text) - characters} characters cut)"


@lru_cache(maxsize=1)
def _shared_sandbox() -> Sandbox:
    """One pool for the process: environments come and go by the thousand, and share nothing in it but the queue."""
    sandbox = Sandbox(size=os.cpu_count() or 2)
    atexit.register(sandbox.close)
    return sandbox
