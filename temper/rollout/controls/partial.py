"""Partial rollouts: what is not finished when a step is full is interrupted, and goes on in the next.

Owns: when requests are interrupted and when they go on. While the trainer works, nothing is drawn and nothing holds the
sampler's cache; the next weights compute the tokens so far anew and draw on from there. Every token keeps the version
and the log-probability that it was drawn with. Refuses: joining the pieces (joined.py). APRIL, arXiv 2509.18521.
"""

from __future__ import annotations

from temper.protocols import Sampler
from temper.rollout.buffer import StepGroups
from temper.rollout.controls.control import Control, Setting
from temper.rollout.controls.joined import JoinedSampler, Pauses


class Partial(Control):
    name = "partial"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        if setting.max_staleness == 0:
            raise self.refuse(
                "goes on with tokens that older weights drew, which rollout.max_staleness=0 does not train. Use "
                "max_staleness = 1 or more"
            )
        self._pauses = Pauses()
        self._num_trained = 0

    def begin(self, version: int) -> None:
        self._pauses.end()

    def wrap(self, draw: int, sampler: Sampler) -> Sampler:
        return JoinedSampler(sampler, self._pauses, self.setting.decode)

    async def filled(self, taken: StepGroups, num_queued: int) -> None:
        self._num_trained = sum(t.num_tokens for group in taken.groups for t in group.trajectories)
        await self._pauses.start()

    def metrics(self) -> dict[str, float]:
        interrupted, again = self._pauses.counts()
        return {
            "flow/interrupted": float(interrupted),
            "flow/prefilled_again": again / max(self._num_trained, 1),
        }
