"""Tasks made in code: a generator is a pure function (index, seed, **options) -> Task.

Owns: the generators that need nothing but Python, loading users' own, the check of options. Refuses: generators that
live elsewhere (catalogue.py lists them all).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from temper.calls import describe_error
from temper.errors import TemperError, UserError, did_you_mean
from temper.plugins import load_function, require_options
from temper.types import Message, Scalar, Task

Generator = Callable[..., Task]
"""(index, seed, **options). Equal arguments give equal tasks in any process: use random.Random(f"{seed}/{index}")."""
Option = Scalar | list[Scalar]


def spell_backward(index: int, seed: int, *, min_letters: int = 6, max_letters: int = 10) -> Task:
    """A random word; the answer is its letters in reverse order."""
    if not 1 <= min_letters <= max_letters:
        raise UserError(f"min_letters={min_letters} and max_letters={max_letters} must satisfy 1 <= min <= max.")
    draw = random.Random(f"spell_backward/{seed}/{index}")
    word = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(min_letters, max_letters)))
    return Task(id=f"spell_backward:{seed}:{index}", messages=(Message(role="user", content=word),), answer=word[::-1])


def chain_sum(index: int, seed: int, *, terms: int = 2, digits: int = 2, working: int = 0) -> Task:
    """Numbers of exactly `digits` digits, added and subtracted: "37+12-45=".

    working: how often every step is written before the result, a line each ("37+12=49", "49-45=4", "4"), for answers
    to imitate.
    """
    if terms < 1 or digits < 1 or working < 0:
        raise UserError(f"terms={terms} and digits={digits} must be at least 1, working={working} at least 0.")
    draw = random.Random(f"chain_sum/{seed}/{index}")
    low = 10 ** (digits - 1) if digits > 1 else 0
    numbers = [draw.randint(low, 10**digits - 1) for _ in range(terms)]
    signs = [1, *(draw.choice((1, -1)) for _ in range(terms - 1))]
    text = "".join(f"{'+' if sign > 0 else '-'}{number}" for sign, number in zip(signs, numbers, strict=True))[1:]
    total, steps = numbers[0], list[str]()
    for sign, number in zip(signs[1:], numbers[1:], strict=True):
        step = f"{total}{'+' if sign > 0 else '-'}{number}"
        total += sign * number
        steps.append(f"{step}={total}")
    answer = "\n".join([*steps * working, str(total)])
    return Task(id=f"chain_sum:{seed}:{index}", messages=(Message(role="user", content=f"{text}="),), answer=answer)


def rearrange(index: int, seed: int, *, min_letters: int = 5, max_letters: int = 8) -> Task:
    """A word of different letters to rearrange. Any order of them is right; the one given is drawn at random."""
    if not 2 <= min_letters <= max_letters <= 26:
        raise UserError(f"min_letters={min_letters} and max_letters={max_letters} must satisfy 2 <= min <= max <= 26.")
    draw = random.Random(f"rearrange/{seed}/{index}")
    word = "".join(draw.sample(string.ascii_lowercase, draw.randint(min_letters, max_letters)))
    answer = word
    while answer == word:
        answer = "".join(draw.sample(word, len(word)))
    return Task(id=f"rearrange:{seed}:{index}", messages=(Message(role="user", content=word),), answer=answer)


def rearrange_pairs(index: int, seed: int, *, min_letters: int = 5, max_letters: int = 8, errors: int = 1) -> Task:
    """The same words with two answers to compare: a right order, and one with `errors` letters replaced by others."""
    if not 1 <= errors <= min_letters:
        raise UserError(f"errors={errors} must satisfy 1 <= errors <= min_letters={min_letters}.")
    task = rearrange(index, seed, min_letters=min_letters, max_letters=max_letters)
    chosen = str(task.answer)
    draw = random.Random(f"rearrange_pairs/{seed}/{index}")
    rejected = chosen
    while sorted(rejected) == sorted(chosen):
        letters = list(chosen)
        for place in draw.sample(range(len(letters)), errors):
            letters[place] = draw.choice(string.ascii_lowercase.replace(letters[place], ""))
        rejected = "".join(letters)
    return replace(task, id=f"rearrange_pairs:{seed}:{index}", extra={**task.extra, "rejected": rejected})


GENERATORS: dict[str, Generator] = {
    "chain_sum": chain_sum,
    "rearrange": rearrange,
    "rearrange_pairs": rearrange_pairs,
    "spell_backward": spell_backward,
}


@dataclass(frozen=True, slots=True)
class GeneratorSource:
    """A generator with its seed and options. size None: unbounded."""

    name: str
    generator: Generator
    seed: int
    size: int | None
    options: Mapping[str, Option]

    def task(self, index: int) -> Task:
        try:
            return self.generator(index, self.seed, **self.options)
        except (TemperError, KeyboardInterrupt):
            raise
        except BaseException as error:  # sys.exit() and CancelledError too: no task may end a run without a word
            failed = f"{self.name}: failed to make task {index} with options {dict(self.options)}"
            raise UserError(f"{failed}: {describe_error(error)}") from error


def make_source(
    name: str, options: Mapping[str, Option], *, seed: int, size: int, generators: Mapping[str, Generator] = GENERATORS
) -> GeneratorSource:
    """The source of that name; "package.module:function" is a generator of the user's own. size 0: unbounded.

    One task is made at once, so that a bad option is an error now and not at the first step.
    """
    where = f'generator "{name}"'
    generator = load_function(name, where=where) if ":" in name else generators.get(name)
    if generator is None:
        known = ", ".join(sorted(generators))
        raise UserError(
            f'{where} is unknown.{did_you_mean(name, generators)} Known: {known}, or "package.module:function".'
        )
    require_options(generator, options, where=where, skip=2)
    source = GeneratorSource(f"{name}, seed {seed}", generator, seed, size or None, dict(options))
    try:
        first = source.task(0)
    except TemperError as error:
        raise UserError(f"{where}: {error}") from error
    if not isinstance(first, Task):
        raise UserError(f"{where} returned {first!r:.60}; it must return a temper.types.Task.")
    return source
