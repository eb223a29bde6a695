"""Rows that nobody drew, for passes whose result is thrown away.

Owns: that they have every column a policy gradient may read before the trainer adds its own. Refuses: randomness, and
being trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from temper.types import Sample

LOGPROB = -1.0
"""Of every token under the sampler: any number that is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    prompt_tokens: int
    """At least one: the first token of a row is scored by nothing."""
    completion_tokens: int
    vocabulary: int
    version: int = 0
    """Of the weights that seem to have drawn them."""
    num_top: int = 0
    """Most likely tokens of the sampler at each position; 0: none were asked for."""
    has_keep_sets: bool = False
    """Whether each token seems to have been drawn among a few."""
    teacher: str = ""
    """Name of the teacher that reads them."""


def made_up_rows(shape: RowShape, *, num_rows: int, group_size: int) -> list[Sample]:
    """Rows in groups with a common prompt, each with credit, which half of them have against them."""
    return [_row(shape, *divmod(number, group_size), weight=1 / num_rows) for number in range(num_rows)]


def _row(shape: RowShape, group: int, index: int, *, weight: float) -> Sample:
    prompt, drawn = max(1, shape.prompt_tokens), shape.completion_tokens
    prompt_ids = [(7 * group + place) % shape.vocabulary for place in range(prompt)]
    completion_ids = [(group + 3 * index + 11 * place) % shape.vocabulary for place in range(drawn)]
    nothing: list[list[int]] = [[]] * prompt
    tops = list(range(min(shape.num_top, shape.vocabulary)))
    return Sample(
        group_id=f"made up {group}",
        index=index,
        token_ids=[*prompt_ids, *completion_ids],
        loss_mask=[0] * prompt + [1] * drawn,
        behavior_logprobs=[0.0] * prompt + [LOGPROB] * drawn,
        versions=[-1] * prompt + [shape.version] * drawn,
        advantages=[0.0] * prompt + [1.0 if index % 2 else -1.0] * drawn,
        weights=[0.0] * prompt + [weight / drawn] * drawn,
        top_ids=[*nothing, *[tops] * drawn] if tops else None,
        top_logprobs=[*nothing, *[[LOGPROB] * len(tops)] * drawn] if tops else None,
        keep_ids=[*nothing, *_keep_sets(completion_ids, shape.vocabulary)] if shape.has_keep_sets else None,
        reward=float(index % 2),
        teacher=shape.teacher,
    )


def _keep_sets(token_ids: list[int], vocabulary: int) -> list[list[int]]:
    return [sorted({token, (token + 1) % vocabulary}) for token in token_ids]
