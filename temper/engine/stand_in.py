"""No model: one short text answers everything. For a look at whoever asks, before there are weights to answer.

Owns: the Sampler protocol where only the tokenizer is known. Refuses: pretending to be trained; log-probabilities mean
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from temper.types import Completion, Finish, Publication, Request

TEXT = "ok"


def short_answer(tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> tuple[int, ...]:
    """Ids of TEXT, or of the first token that is read as text: tokenizers of small models know a few characters."""
    ids = tuple(tokenizer.encode(TEXT, add_special_tokens=False))
    if decode(ids) == TEXT:
        return ids
    return next(((token,) for token in range(len(tokenizer)) if decode((token,)).strip()), (0,))


class StandIn:
    """Implements protocols.Sampler for greedy requests. Everybody is told the same, at once, up to a stop token."""

    def __init__(self, answer_ids: Sequence[int]) -> None:
        self._answer_ids = tuple(answer_ids)
        self.version = 0
        self.num_answered = 0

    async def generate(self, request: Request) -> Completion:
        self.num_answered += 1
        tokens = (*self._answer_ids, *request.params.stop_ids[:1])
        is_whole = len(tokens) <= request.params.max_new_tokens
        tokens = tokens[: request.params.max_new_tokens]
        return Completion(
            prompt_ids=request.prompt_ids,
            token_ids=tokens,
            logprobs=[0.0] * len(tokens),
            versions=[self.version] * len(tokens),
            finish=Finish.STOP if is_whole else Finish.LENGTH,
            params=request.params,
        )

    async def abort(self, request_id: str) -> None:
        """Nothing is ever under way."""

    async def interrupt(self, request_id: str) -> None:
        """Nothing is ever under way."""

    async def load(self, publication: Publication) -> None:
        self.version = publication.version

    def stats(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        """Nothing to close."""
