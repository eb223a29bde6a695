"""Whether training tasks repeat held-out ones: words in a row that both share.

Owns: n-gram overlap in linear time, and telling a template from a leak. Refuses: equal prompts, which the stream of
training tasks leaves out anyway, and prompts of fewer than MIN_WORDS words, which say too little to judge by.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from temper.types import Task

NGRAM_WORDS = 13
MIN_WORDS = 8
"""13 words, down to 8 for shorter texts, as in Brown et al. 2020, appendix C."""
MAX_SHARE = 0.01
MIN_TEMPLATE_HELDOUT, MAX_TEMPLATE_HELDOUT = 3, 10
MIN_TEMPLATE_TRAIN = 10
"""N-grams in more texts than this share, within these bounds, are part of a template and prove nothing."""
EXAMPLES = 3

# Scripts that are written without spaces are compared character by character.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")

Named = tuple[str, str]
"""(id, text)."""
Words = tuple[str, list[str]]
"""(id, words)."""
Gram = tuple[str, ...]


class Overlap(NamedTuple):
    """A training text and a held-out text, and words in a row that both contain."""

    train_id: str
    heldout_id: str
    shared: str


def find(train: Iterable[Named], heldout: Iterable[Named], n: int = NGRAM_WORDS) -> list[Overlap]:
    """Pairs of a training and a held-out text that share n words in a row, each pair once.

    Case, punctuation and spacing do not count, nor do words of a template: a run of MIN_WORDS that many different texts
    of one side contain. What is left of a text, if it is shorter than n, is looked for as a whole in the other.
    """
    assert n >= MIN_WORDS, f"n={n} words in a row are shared by chance; use at least {MIN_WORDS}"
    trained, held = _read(train), _read(heldout)
    templates = _templates(trained, held)
    runs = [(number, run) for number, (_, words) in enumerate(trained) for run in _own_runs(words, templates)]
    held_runs = [(number, run) for number, (_, words) in enumerate(held) for run in _own_runs(words, templates)]
    sizes = sorted({min(n, len(run)) for _, run in (*runs, *held_runs)})
    index = _index(held_runs, sizes)
    pairs: dict[tuple[int, int], str] = {}
    for number, run in runs:
        own = min(n, len(run))
        for size in (size for size in sizes if size <= own):
            for gram in _grams(run, size):
                for owner, other in index.get(hash(gram), ()):
                    if min(own, other) == size:  # fewer than n only where one of both has no more
                        pairs.setdefault((number, owner), " ".join(gram))
    return [Overlap(trained[a][0], held[b][0], shared) for (a, b), shared in pairs.items()]


def check(train: Sequence[Task], heldout: Sequence[Task]) -> str:
    """A warning about tasks that repeat each other's prompts; '' when there are none."""
    return describe(find(prompts_of(train), prompts_of(heldout)), len(train), len(heldout))


def prompts_of(tasks: Iterable[Task]) -> Iterator[Named]:
    """What find() reads of tasks: everything they show the policy."""
    for task in tasks:
        if "episode_seed" not in task.extra:  # there the words are the same and what is asked is in the environment
            yield task.id, "\n".join(message.content for message in task.messages)


def describe(overlaps: Sequence[Overlap], num_train: int, num_heldout: int) -> str:
    """A warning for people; '' when there is nothing to warn of."""
    if not overlaps:
        return ""
    trained, held = ({pair[side] for pair in overlaps} for side in (0, 1))
    lines = [
        f"contamination: {len(held)} of {num_heldout} held-out prompts share {NGRAM_WORDS} words in a row (if one is "
        f"shorter, all of it) with {len(trained)} of {num_train} training prompts; their scores may be memory. Remove "
        "them from one side, or see that the words are harmless:"
    ]
    lines += [f'  {pair.train_id} and {pair.heldout_id}: "{pair.shared}"' for pair in overlaps[:EXAMPLES]]
    left = len(overlaps) - EXAMPLES
    return "\n".join([*lines, f"  and {left} more"] if left > 0 else lines)


def _read(texts: Iterable[Named]) -> list[Words]:
    found = []
    for name, text in texts:
        words = [sys.intern(word) for word in _WORD.findall(unicodedata.normalize("NFKC", text).casefold())]
        if len(words) >= MIN_WORDS:
            found.append((name, words))
    return found


def _grams(words: Sequence[str], size: int) -> Iterator[Gram]:
    return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def _templates(trained: Sequence[Words], held: Sequence[Words]) -> set[int]:
    """Hashes of runs of MIN_WORDS that are in too many different texts of one side to come from one of them."""
    asked = _spread({tuple(words) for _, words in held}, None)
    texts = {tuple(words) for _, words in trained}  # copies of one text make no template
    limit = max(MIN_TEMPLATE_HELDOUT, min(MAX_TEMPLATE_HELDOUT, MAX_SHARE * len(held)))
    train_limit = max(MIN_TEMPLATE_TRAIN, MAX_SHARE * len(texts))
    return {key for key, count in asked.items() if count > limit} | {
        key for key, count in _spread(texts, asked).items() if count > train_limit
    }


def _spread(texts: Iterable[Gram], wanted: Container[int] | None) -> Counter[int]:
    """In how many texts each run of MIN_WORDS is; wanted: which ones are counted, None: all."""
    counts: Counter[int] = Counter()
    for text in texts:
        keys = {hash(gram) for gram in _grams(text, MIN_WORDS)}
        counts.update(keys if wanted is None else (key for key in keys if key in wanted))
    return counts


def _own_runs(words: Sequence[str], templates: Container[int]) -> Iterator[Sequence[str]]:
    """What is left of a text without its templates, in runs that are long enough to compare."""
    start = 0
    for i, gram in enumerate(_grams(words, MIN_WORDS)):
        if hash(gram) in templates:
            if i - start >= MIN_WORDS:
                yield words[start:i]
            start = i + MIN_WORDS
    if len(words) - start >= MIN_WORDS:
        yield words[start:]


def _index(runs: Iterable[tuple[int, Sequence[str]]], sizes: Sequence[int]) -> dict[int, tuple[tuple[int, int], ...]]:
    """By hash of each n-gram: the texts that contain it, and in a run of how many words."""
    index: dict[int, tuple[tuple[int, int], ...]] = {}
    for number, run in runs:
        alone = ((number, len(run)),)  # one for all n-grams of the run: most have no other owner
        for size in sizes:
            for key in {hash(gram) for gram in _grams(run, size)}:
                index[key] = index[key] + alone if key in index else alone
    return index
