"""Proof, on a loaded model, that Temper's pass through it says what its own forward pass says.

A family may keep state outside of keys and values, write attention by itself or look at a mask that is never made: its
text would be wrong without an error. So a model of a family that was not tried (families.py) is compared with itself:
rows alone by its own pass; the same rows packed, in chunks, behind a prefix of another row and token by token.
Owns: that comparison. Refuses: knowing families; the engine's and the trainer's own attention, which their tests prove.
Shapes: _T packed tokens, H heads, K kv-heads, D head size, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from temper.errors import UserError
from temper.models.families import is_tried, steady_context
from temper.models.states import Head, hidden_states

ALLOWED_GAP = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Mean difference of log-probabilities that rounding explains, by dtype. What is wrong moves them by about 1."""

SHORT = 40
"""Tokens of the longest row where no window asks for more."""
LONGEST = 8192
"""Tokens of a window that is worth trying: a pass of so many takes minutes on a CPU."""
PREFIX = 16
"""Tokens that the last row has in common with the first."""

Chunk = tuple[int, int, int]
"""(row, first token, number of tokens)."""


def require_proven(model: Any, where: object) -> None:
    """UserError unless the model's family was tried, or the model agrees with itself. `where`: for the message."""
    if is_tried(model.config):
        return
    name, allowed = model.config.model_type, ALLOWED_GAP[next(model.parameters()).dtype]
    advice = "Use a model of a family that was tried (docs/engine.md)"
    try:
        gap = gap_to_own_pass(model, longest=_long_enough(model.config))
    except Exception as error:  # whatever code of the family cannot do, it is not supported
        raise UserError(
            f"{where} is a {name}, a family that was not tried, and Temper's pass through it fails: {error!r}. {advice}"
        ) from error
    if not gap <= allowed:
        raise UserError(
            f"{where} is a {name}, a family that was not tried, and Temper's pass through it differs from its own: "
            f"log-probabilities by {gap:.3g} on average, allowed is {allowed:g}. {advice}"
        )


def _long_enough(config: Any) -> int:
    """Length of a row, in tokens, that is longer than every window of the model."""
    text, context = config.get_text_config(), steady_context(config)
    windows = [getattr(text, key, None) or 0 for key in ("sliding_window", "attention_chunk_size")]
    ending = [window for window in windows if 0 < window < context]
    if max(ending, default=0) > LONGEST:
        raise ValueError(f"its window of {max(ending)} tokens is too long to be tried; at most {LONGEST} are")
    return min(context, max(SHORT, *(window + PREFIX for window in ending), 0))


def gap_to_own_pass(model: Any, *, longest: int = SHORT, seed: int = 0) -> float:
    """Mean difference of the rows' log-probabilities between both passes."""
    rows = _rows(model, longest, seed)
    with torch.inference_mode():
        with own_attention(model):
            wanted = [_logprobs(_own_logits(model, row), row) for row in rows]
        found = [_logprobs(logits, row) for logits, row in zip(_packed_logits(model, rows), rows, strict=True)]
    return torch.cat([(a - b).abs() for a, b in zip(wanted, found, strict=True)]).mean().item()


def silent_layers(model: Any) -> list[int]:
    """Layers that never ask for attention: they keep what they know of earlier tokens where Temper does not see it."""
    (row, *_), kept = _rows(model, SHORT, 0), KeptRows()
    with torch.inference_mode():
        hidden_states(model, row, torch.arange(len(row), device=row.device), kept.chunk([(0, 0, len(row))]))
    return sorted(set(range(model.config.get_text_config().num_hidden_layers)) - kept.layers)


class KeptRows:
    """Attention over all tokens of a row so far, as an engine keeps them; slow and plain."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.layers: set[int] = set()
        """Layers that asked for attention."""

    def chunk(self, chunks: Sequence[Chunk]) -> Callable[..., Tensor]:
        """`attend` for these parts of rows, laid end to end. What a row had from the start of its part is dropped."""

        def attend(
            layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
        ) -> Tensor:
            self.layers.add(layer)
            outputs, start = [], 0
            for row, first, count in chunks:
                part = slice(start, start + count)
                keys, values = self._extend(layer, row, first, key[part], value[part])
                outputs.append(_attend(query[part], keys, values, first, scaling, sliding_window))
                start += count
            return torch.cat(outputs)

        return attend

    def fork(self, source: int, target: int, length: int) -> None:
        """Row `target` starts behind the first tokens of row `source`."""
        for (layer, row), (keys, values) in list(self._kept.items()):
            if row == source:
                self._kept[layer, target] = keys[:length], values[:length]

    def _extend(self, layer: int, row: int, first: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if first:
            keys, values = self._kept[layer, row]
            key, value = torch.cat((keys[:first], key)), torch.cat((values[:first], value))
        self._kept[layer, row] = key, value
        return key, value


def _attend(
    query: Tensor, key: Tensor, value: Tensor, first: int, scaling: float, sliding_window: int | None
) -> Tensor:
    behind = first + torch.arange(len(query), device=query.device)[:, None] - torch.arange(len(key), device=key.device)
    seen = behind >= 0 if sliding_window is None else (behind >= 0) & (behind < sliding_window)
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)[0].transpose(0, 1)


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """Inside, the model computes as transformers alone would."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def _rows(model: Any, longest: int, seed: int) -> list[Tensor]:
    """Three rows, and a fourth that begins like the first."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = model.config.get_text_config().vocab_size
    lengths = (longest, longest * 2 // 3, longest // 4, longest - 3)
    rows = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    rows[-1][:PREFIX] = rows[0][:PREFIX]
    return [row.to(next(model.parameters()).device) for row in rows]


def _schedule(lengths: Sequence[int]) -> Iterator[list[Chunk]]:
    """Passes that together compute every token once: chunks of several rows, then single tokens of all."""
    cuts = [0, PREFIX // 2 + 1, PREFIX, *(length - 3 for length in lengths if length - 3 > PREFIX), *_last(lengths)]
    for start, stop in zip(sorted(set(cuts)), sorted(set(cuts))[1:], strict=False):
        yield [
            (row, start, min(stop, length) - start)
            for row, length in enumerate(lengths)
            if start < length and not (row == len(lengths) - 1 and stop <= PREFIX)
        ]


def _last(lengths: Sequence[int]) -> list[int]:
    return [length - k for length in lengths for k in range(3) if length - k > PREFIX] + [min(lengths)]


def _packed_logits(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    kept, head, device = KeptRows(), _head(model), rows[0].device
    found: list[list[Tensor]] = [[] for _ in rows]
    for chunks in _schedule([len(row) for row in rows]):
        if chunks[0][1] == PREFIX:
            kept.fork(0, len(rows) - 1, PREFIX)
            found[-1] = list(found[0])
        tokens_T = torch.cat([rows[row][first : first + count] for row, first, count in chunks])
        positions_T = torch.cat([torch.arange(first, first + count, device=device) for _, first, count in chunks])
        states = hidden_states(model, tokens_T, positions_T, kept.chunk(chunks))
        parts = torch.split(states, [count for _, _, count in chunks])
        for (row, _, _), part in zip(chunks, parts, strict=True):
            found[row].append(head(part))
    return [torch.cat(parts) for parts in found]


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits of states. A scorer has none, and its score may be 0 for everything: there the states themselves serve."""
    return (lambda states: states) if model.get_output_embeddings() is None else Head.of(model).logits


def _own_logits(model: Any, row: Tensor) -> Tensor:
    asked = {"input_ids": row.unsqueeze(0), "use_cache": False}
    if model.get_output_embeddings() is None:
        return model.get_decoder()(**asked).last_hidden_state[0]  # type: ignore[no-any-return]
    return model(**asked).logits[0]  # type: ignore[no-any-return]


def _logprobs(logits_TV: Tensor, row: Tensor) -> Tensor:
    """Log-probability of each token but the first."""
    logprobs_TV = logits_TV[:-1].float().log_softmax(-1)
    return logprobs_TV.gather(1, row[1:, None] % logits_TV.shape[-1])[:, 0]
