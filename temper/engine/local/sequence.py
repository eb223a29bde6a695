"""One request on its way through the engine, while it is not in a decode row.

Owns: what must survive waiting, parking and preemption. The arrays of running sequences are in rows.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from temper.engine.local.blocks import Blocks
from temper.types import Completion, Finish, Request


def _no_blocks() -> Blocks:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and claims of one request. `blocks` are references it holds while it waits."""

    request: Request
    random_key: int
    deliver: Callable[[Completion], None]
    token_ids: list[int]
    """Prompt and drawn tokens so far."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    """Most likely tokens at each drawn position; kept here also while the sequence runs. Empty: not asked for."""
    top_logprobs: list[list[float]] = field(default_factory=list)
    blocks: Blocks = field(default_factory=_no_blocks)
    num_computed: int = 0
    """Tokens whose keys and values are in `blocks`."""
    followers: list[Sequence] = field(default_factory=list)
    """Waiting requests with the same prompt: they start from this one's prefill."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    def record_top(self, ids: list[int], logprobs: list[float]) -> None:
        """Keeps as many of the most likely tokens of the position just drawn as the request asked for."""
        if (count := self.request.params.top_logprobs) > 0:
            self.top_ids.append(ids[:count])
            self.top_logprobs.append(logprobs[:count])

    def complete(self, finish: Finish) -> None:
        has_top = self.request.params.top_logprobs > 0
        self.deliver(
            Completion(
                prompt_ids=self.request.prompt_ids,
                token_ids=self.token_ids[self.num_prompt :],
                logprobs=self.logprobs,
                versions=self.versions,
                finish=finish,
                top_ids=self.top_ids if has_top else None,
                top_logprobs=self.top_logprobs if has_top else None,
            )
        )


def random_key(seed: int, request_id: str) -> int:
    """64 bits that depend on the run and the request alone, so neighbours never change what a request draws."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
