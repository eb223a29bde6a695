"""The trainer's side of vLLM's weight transfer: a publication is written once and offered to all ranks of vLLM.

Owns: the memory that both sides have mapped, and which verbs of vLLM's interface make a transaction. Refuses: pausing
and resuming requests (engine.py). The ranks' side: transfer.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from temper.engine.manifest import HashedTensors, Manifest, check_received
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.engine.vllm.transfer import init_request, update_request
from temper.errors import BackendError
from temper.types import Publication

Ask = Callable[[Awaitable[Any]], Awaitable[Any]]
"""Awaits an answer of vLLM under a deadline; raises BackendError."""


class WeightSender:
    def __init__(self, vllm: Any, ask: Ask, *, num_ranks: int, answer_seconds: float) -> None:
        self._vllm, self._ask = vllm, ask
        self._num_ranks, self._answer_seconds = num_ranks, answer_seconds
        self._memory = SharedWeights(anonymous_file())
        self._is_updating = False
        """Whether vLLM was told of a weight update and not of its end."""
        self._taken_over: Manifest | None = None
        """Of the last publication that all ranks have shown to hold."""

    async def open(self) -> None:
        # The memory has no name that others could find or that could be left behind; vLLM's ranks are this process's
        # descendants, and may open what it has open.
        memory = f"/proc/{os.getpid()}/fd/{self._memory.descriptor}"
        await self._ask(self._vllm.init_weight_transfer_engine(init_request(memory)))
        await self._check_ranks("opening the memory of publications")

    async def send(self, publication: Publication) -> Manifest:
        """Afterwards every rank has received and checked all of it, and taken over nothing."""
        told, manifest = await asyncio.to_thread(self._write, publication)
        await self.drop()  # of a publication that was cut short
        self._is_updating = True
        await self._ask(self._vllm.start_weight_update())
        await self._ask(self._vllm.update_weights(update_request(told, manifest.to_json())))
        await self._check_ranks("receiving weights")
        return manifest

    async def commit(self, manifest: Manifest) -> None:
        """Every rank takes over what it received; what all hold then is read back and compared."""
        await self._ask(self._vllm.finish_weight_update())
        self._is_updating = False
        await self._check_ranks("taking over weights")
        check_received(manifest, await self.held(manifest))
        self._taken_over = manifest

    async def drop(self) -> None:
        """Ranks forget what they received, if they did not take it over."""
        if self._is_updating:
            await self._ask(self._vllm.update_weights(update_request(None)))
            await self._ask(self._vllm.finish_weight_update())
            self._is_updating = False

    async def held(self, manifest: Manifest) -> Manifest:
        """What the ranks' models hold together, under the names of `manifest`."""
        return Manifest.from_json(await self._agreed("temper_manifest", manifest))

    async def digests(self) -> Mapping[str, str]:
        """The same, in sums (engine/digests.py), under the names of the last publication."""
        if self._taken_over is None:
            raise BackendError("vLLM holds what it was started with: publish weights before asking for sums of them")
        told: Mapping[str, str] = await self._agreed("temper_digests", self._taken_over)
        return told

    def close(self) -> None:
        self._memory.close()

    def _write(self, publication: Publication) -> tuple[dict[str, Any], Manifest]:
        """Where the tensors lie; and what should arrive, by the tensors themselves and not by what was written."""
        # Of tensors on a GPU their sums: to hash them all would take seconds of every step.
        is_summed = next(iter((publication.alike or publication.tensors).values())).is_cuda
        tensors = HashedTensors(publication.tensors, is_summed=is_summed)
        like = publication.alike or publication.tensors
        told = self._memory.write(Publication(version=publication.version, tensors=tensors, alike=like))
        return told, tensors.hashing.manifest(publication.version)

    async def _check_ranks(self, what: str) -> None:
        if problems := [*filter(None, await self._ranks("temper_problem"))]:
            raise BackendError(f"vLLM failed in {what}: {problems[0]}")

    async def _agreed(self, question: str, manifest: Manifest) -> Any:
        """What every rank answers about the tensors of a manifest."""
        answers = await self._ranks(question, manifest.to_json())
        for held, problem in answers:
            if problem or held != answers[0][0]:
                raise BackendError(problem or "ranks of vLLM do not agree on what they hold")
        return answers[0][0]

    async def _ranks(self, question: str, *arguments: str) -> list[Any]:
        """The answer of each."""
        asked = self._vllm.collective_rpc(question, timeout=self._answer_seconds, args=arguments)
        answers: list[Any] = await self._ask(asked)
        if len(answers) != self._num_ranks:
            raise BackendError(f"{len(answers)} of vLLM's {self._num_ranks} ranks answered")
        return answers
