"""One request on its way through the engine, while it is not in a decode row.

Owns: what must survive waiting, parking and preemption. The arrays of running sequences are in rows.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from temper.engine.local.blocks import Blocks
from temper.engine.local.sampling import Drawn
from temper.models.experts.routes import Recorded
from temper.types import Column, Completion, Finish, Ragged, Request

Watch = Callable[[list[int], list[float]], None]
"""Called with the tokens just drawn and their log-probabilities."""

NO_ROW = -1
SPLIT_CHARACTERS = 8
"""Tokens decoded before those that can hold a stop text: the first of a window may start amid a character."""


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Texts that end a completion. Only a window of its last tokens is ever decoded."""

    texts: tuple[str, ...]
    decode: Callable[[list[int]], str]

    @property
    def window(self) -> int:
        """How many of the last tokens are decoded: a token that says anything holds at least one byte."""
        return max(len(text.encode()) for text in self.texts) + SPLIT_CHARACTERS

    def end(self, before: list[int], drawn: list[int]) -> int | None:
        """How many of the drawn tokens it takes to complete one of the texts; None: they do not."""
        ids, window = before + drawn, self.window
        for end in range(len(before) + 1, len(ids) + 1):
            tail = self.decode(ids[max(0, end - window) : end])
            if any(text in tail for text in self.texts):
                return end - len(before)
        return None


def _no_blocks() -> Blocks:
    return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Growing:
    """Lists of numbers that come one by one, in two arrays: as an object each, small ones would be mostly overhead."""

    dtype: np.dtype[Any]
    data: bytearray = field(default_factory=bytearray)
    counts: array[int] = field(default_factory=lambda: array("q"))

    def add(self, values: NDArray[Any]) -> None:
        assert values.dtype == self.dtype, f"{values.dtype} among {self.dtype}"
        self.data += values.tobytes()
        self.counts.append(len(values))

    def lists(self) -> Ragged[Any]:
        """Of what has come so far; copied, for more may come."""
        values, counts = bytes(self.data), self.counts.tobytes()
        return Ragged.of_counts(np.frombuffer(values, dtype=self.dtype), np.frombuffer(counts, dtype=np.int64))


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and claims of one request. `blocks` are references it holds while it waits."""

    request: Request
    random_key: int
    deliver: Callable[[Completion], None]
    watch: Watch | None = None
    stop_texts: StopTexts | None = None
    token_ids: NDArray[np.int64] = field(init=False)
    """Prompt and drawn tokens so far."""
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    top_ids: Growing = field(default_factory=lambda: Growing(np.dtype(np.int32)))
    """Like the next three: one entry per drawn token, kept here also while the sequence runs. Empty: not asked for."""
    top_logprobs: Growing = field(default_factory=lambda: Growing(np.dtype(np.float32)))
    entropies: Growing = field(default_factory=lambda: Growing(np.dtype(np.float32)))
    keep_ids: Growing = field(default_factory=lambda: Growing(np.dtype(np.int32)))
    routes: Recorded | None = None
    """[n, experts of all layers] of its first n tokens, as they were computed first; begins with none. None: nobody
    records them."""
    blocks: Blocks = field(default_factory=_no_blocks)
    num_computed: int = 0
    """Tokens whose keys and values are in `blocks`."""
    weights: int = -1
    """Generation of the weights that computed the first of them."""
    row: int = NO_ROW
    """Row in which the sequence runs."""
    followers: list[Sequence] = field(default_factory=list)
    """Waiting requests with the same prompt: they start from this one's prefill."""

    def __post_init__(self) -> None:
        self.token_ids = np.array(self.request.prompt_ids, dtype=np.int64)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_special(self) -> bool:
        """Whether each of its tokens needs a look of its own."""
        params = self.request.params
        records = params.top_logprobs > 0 or params.entropy or params.is_truncated
        return records or self.watch is not None or self.stop_texts is not None

    def take(self, token: int, logprob: float, version: int) -> None:
        """One more drawn token. Rows that run have their own arrays, and take many at once."""
        self.token_ids = np.append(self.token_ids, token)
        self.logprobs = np.append(self.logprobs, np.float32(logprob))
        self.versions = np.append(self.versions, version)

    def record(self, drawn: Drawn, place: int) -> None:
        """Keeps what the request asked to know about the position just drawn."""
        params = self.request.params
        if params.top_logprobs > 0:
            assert drawn.top_ids_RK is not None, "a row asked for the most likely tokens"
            assert drawn.top_logprobs_RK is not None
            self.top_ids.add(drawn.top_ids_RK[place, : params.top_logprobs])
            self.top_logprobs.add(drawn.top_logprobs_RK[place, : params.top_logprobs])
        if params.entropy:
            assert drawn.entropy_R is not None, "a row asked for the entropy"
            self.entropies.add(drawn.entropy_R[place : place + 1])
        if params.is_truncated:
            assert drawn.keep_ids is not None, "a row was truncated"
            self.keep_ids.add(drawn.keep_ids[place])

    def completion(self, finish: Finish) -> Completion:
        params = self.request.params
        has_top = params.top_logprobs > 0
        return Completion(
            prompt_ids=self.request.prompt_ids,
            token_ids=Column(self.token_ids[self.num_prompt :].astype(np.int32)),
            logprobs=Column(self.logprobs),
            versions=Column(self.versions.astype(np.int32)),
            finish=finish,
            top_ids=self.top_ids.lists() if has_top else None,
            top_logprobs=self.top_logprobs.lists() if has_top else None,
            entropies=Column(self.entropies.lists().flat) if params.entropy else None,
            keep_ids=self.keep_ids.lists() if params.is_truncated else None,
            routes=None if self.routes is None else _padded(self.routes, len(self.token_ids)),
            params=params,
        )


def _padded(routes: Recorded, length: int) -> Ragged[Any]:
    """With empty lists at tokens that were not computed: the last, or all of a request that never ran."""
    assert len(routes) < length, "the last token is drawn, and computed by nobody"
    return Ragged.of_counts(routes.reshape(-1), np.where(np.arange(length) < len(routes), routes.shape[1], 0))


def random_key(seed: int, request_id: str) -> int:
    """64 bits that depend on the run and the request alone, so neighbours never change what a request draws."""
    digest = hashlib.blake2b(f"{seed}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
