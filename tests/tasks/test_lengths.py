"""Every text above a limit is found, and few texts are encoded for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from temper.tasks import lengths
from temper.tasks.lengths import Lengths, measure_texts


@pytest.fixture
def tokenizer() -> Any:
    """A token per word or space, cut off at three as some tokenizer.json files ask for."""
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, " ": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|\S+"), "isolated")
    inner.enable_truncation(3)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


def some_texts(seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(["a", "abcdefgh", "é" * 5]) for _ in range(draw.randint(1, 40))) for _ in range(700)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [0, 5, 30, 77, 1000])
def test_the_longest_and_all_above_the_limit_are_those_of_counting_everything(
    tokenizer: Any, seed: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "BATCH", 8)
    texts = some_texts(seed)
    true = [2 * text.count(" ") + 1 for text in texts]
    expected = tuple((place, count) for place, count in enumerate(true) if count > limit)
    assert measure_texts(tokenizer, texts, limit) == Lengths(max(true), expected)


def test_texts_that_cannot_be_too_long_are_not_encoded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    count = lengths._count
    monkeypatch.setattr(lengths, "_count", lambda tokenizer, texts: seen.extend(texts) or count(tokenizer, texts))
    short = ["a a"] * 100_000
    assert measure_texts(tokenizer, [*short, "a " * 60], 100) == Lengths(120, ((100_000, 120),))
    assert len(seen) < 10_000


def test_what_took_long_is_remembered_until_anything_changes(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(lengths, "SLOW_SECONDS", -1.0)
    first = measure_texts(tokenizer, ["a a", "a"], 1)
    monkeypatch.setattr(lengths, "_count", lambda tokenizer, texts: [9 for _ in texts])
    assert measure_texts(tokenizer, ["a a", "a"], 1) == first, "recalled, not counted"
    assert measure_texts(tokenizer, ["a a", "b"], 1).longest == 9, "another text"
    assert measure_texts(tokenizer, ["a a", "a"], 2).longest == 9, "another limit"
    for file in (tmp_path / "temper" / "lengths").iterdir():
        file.write_text("{")
    assert measure_texts(tokenizer, ["a a", "a"], 1).longest == 9, "a spoilt file is no answer"
