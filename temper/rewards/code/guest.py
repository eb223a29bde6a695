"""The two programs that judge a solution, each run in a sandbox of its own: "solve" calls it, "check" runs the tests.

Owns: both sides of the exchange. Refuses: the form of the data between them (wire.py); importing anything else but
the standard library.
No object of the solution ever reaches an assertion: what it returns is rebuilt here from builtin types, and whatever is
not plain data stays in its own process, as a number that names it. The tests never enter the solution's process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from temper.rewards.code.wire import (
    NotPlain,
    Remote,
    SolutionError,
    TooDeep,
    Wire,
    decode,
    decode_answer,
    decode_exception,
    encode,
    encode_exception,
    update,
)

MAX_ITEMS = 100_000
MAX_NEW_QUESTIONS = 10_000
"""Most of them in one round: `while True: next(x)` asks for ever as long as the answers are not known."""


class Unsupported(BaseException):
    """The test hands the solution something that cannot leave the test's process, e.g. a lambda.

    Not an Exception: a test that catches those must not swallow it.
    """


class EnoughAsked(BaseException):
    """So many questions wait for an answer that more would be guesses."""


class Elsewhere(Remote):
    """A value in the solution's process.

    Only instances of classes that the test itself constructs have attributes here: a function that should return text
    could otherwise return an object whose startswith() agrees to everything.
    """

    def __init__(self, exchange: TestExchange, place: int | str, *, is_instance: bool = False) -> None:
        object.__setattr__(self, "_exchange", exchange)
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_is_instance", is_instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._exchange.ask("call", self, *arguments, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self._is_instance:
            raise AttributeError(name)
        return self._exchange.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._exchange.ask("assign", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._exchange.ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        items = self._exchange.ask("iterate", self)
        return iter(items if isinstance(items, list) else _refuse())

    def __next__(self) -> Any:
        return self._exchange.ask("next", self)

    def __len__(self) -> int:
        return int(self._exchange.ask("length", self))

    def __bool__(self) -> bool:
        truth = self._exchange.ask("truth", self)  # an answer like any other: re.match() returns no plain data
        return truth if isinstance(truth, bool) else _refuse()

    def __eq__(self, other: object) -> bool:
        return _refuse()

    __hash__ = None  # type: ignore[assignment]


def _refuse() -> Any:
    raise AssertionError("the solution returned something that is no plain data")


class Unknown(Elsewhere):
    """Stands for an answer that was not asked for yet, while the questions are being collected."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return True

    def __int__(self) -> int:
        return 0

    __index__ = __int__

    def __float__(self) -> float:
        return 0.0

    def __lt__(self, other: object) -> bool:
        return True

    __gt__ = __le__ = __ge__ = __lt__
    __hash__ = None  # type: ignore[assignment]

    def _itself(self, *others: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __mod__ = __rmod__ = __floordiv__ = __pow__ = __neg__ = __abs__ = __round__ = _itself


class TestExchange:
    """One test's questions to the solution, in order, and the answers so far.

    As long as the questions are those that were answered, the answers are real. From the first other question on the
    test only collects questions: answers are Unknown, assertions count nothing, and the verdict is "pending".
    """

    def __init__(self, test: dict[str, Any], asked: list[Wire], answers: dict[int, Wire]) -> None:
        self.asked, self.answers = asked, answers
        self.questions: list[Wire] = []
        self.num_answered = 0
        self.num_reached = 0
        self.is_collecting = False
        self.has_failed = False
        self._is_alone = False
        self.exceptions: dict[str, type[Exception]] = {
            name: type(name, (Exception,), {}) for name in test["exceptions"]
        }
        """Classes of the solution that the test catches, by name; and StopIteration, where the test catches that."""
        self._catches_stop, self._looks_at_arguments = test["catches_stop"], test["looks_at_arguments"]

    def ask(self, verb: str, *operands: Any) -> Any:
        number = len(self.questions)
        is_instance = _makes_instance(verb, operands[0])
        if not self.is_collecting and number < len(self.asked) and self._is_same(self.asked[number], verb, operands):
            self.questions.append(self.asked[number])
            self.num_answered += 1
            return self._answer(number, verb, operands, is_instance=is_instance)
        self.is_collecting = True
        if number >= len(self.asked) + MAX_NEW_QUESTIONS:
            raise EnoughAsked
        try:
            self.questions.append([verb, *(encode(operand) for operand in operands)])
        except TooDeep as error:  # only the solution makes such values
            raise SolutionError(str(error)) from error
        except NotPlain as error:
            raise Unsupported(str(error)) from error
        return Unknown(self, number, is_instance=is_instance)

    def reach(self) -> None:
        """An assertion holds, or the exception that a test waits for has come."""
        self.num_reached += 1

    def miss(self, error: Exception) -> None:
        """An assertion failed. That holds even if a handler of the test swallows it; unless answers are guesses."""
        if not self.is_collecting:
            self.has_failed = self.has_failed or isinstance(error, AssertionError)
            raise error

    def alone(self, called: Any) -> Any:
        """For a statement that is a call and nothing else: the test makes it for what it changes."""

        def call(*arguments: Any, **named: Any) -> Any:
            self._is_alone = True
            try:
                return called(*arguments, **named)
            finally:
                self._is_alone = False

        return call if isinstance(called, Elsewhere) else called

    def _is_same(self, asked: Wire, verb: str, operands: tuple[Any, ...]) -> bool:
        return asked[0] == verb and len(asked) == len(operands) + 1 and all(map(self._fits, asked[1:], operands))

    def _fits(self, asked: Wire, operand: Any) -> bool:
        try:
            wire = encode(operand)
        except NotPlain:
            return False
        if asked == wire:
            return True
        # An earlier answer handed on: it was asked for by its number, before its value was known.
        is_earlier = isinstance(asked, list) and asked[0] == "there" and isinstance(asked[1], int)
        return is_earlier and self.answers.get(asked[1], [])[:2] == ["value", wire]

    def _answer(self, number: int, verb: str, operands: tuple[Any, ...], *, is_instance: bool) -> Any:
        answer, raised = self.answers.get(number), None
        if answer is None:
            raise SolutionError("the solution gave no answer")
        try:
            if answer[0] == "raised":
                stops = {"StopIteration": StopIteration} if verb == "next" or self._catches_stop else {}
                raised = decode_exception(answer, {**self.exceptions, **stops})
            value = decode_answer(answer[1]) if answer[0] == "value" else None
            # Where a value comes back it is the answer, and the argument may be what it is compared with: emptied, it
            # would make `sorted(x)` what the solution likes. Else the change is what was asked for.
            if value is None or self._is_alone or self._looks_at_arguments:
                for place, wire in answer[4 if raised else 2]:
                    update(operands[place], decode_answer(wire))
        except Exception as error:  # the solution can write what it likes into its answers
            raise SolutionError(f"the answer is malformed: {type(error).__name__}") from error
        if raised:
            raise raised
        return value if answer[0] == "value" else Elsewhere(self, number, is_instance=is_instance)


def _makes_instance(verb: str, target: Any) -> bool:
    """A class called by its name, or a part of an instance."""
    return (isinstance(target._place, str) and target._place[:1].isupper()) if verb == "call" else target._is_instance


class _Guard(ast.NodeTransformer):
    """Counts each assertion that holds, lets it pass while questions are only collected, and marks calls that
    stand alone. A handler of named exceptions is reached by what the test waits for."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        guarded = ast.parse(
            "try:\n    __exchange__.reach()\nexcept Exception as __error__:\n    __exchange__.miss(__error__)"
        ).body[0]
        assert isinstance(guarded, ast.Try)
        guarded.body.insert(0, node)
        return ast.copy_location(guarded, node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Call):
            alone = ast.parse("__exchange__.alone", mode="eval").body
            node.value.func = ast.Call(func=alone, args=[node.value.func], keywords=[])
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        self.generic_visit(node)
        caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"Exception"}
        if not caught & {"Exception", "BaseException", "AssertionError"}:
            node.body[:0] = ast.parse("__exchange__.reach()").body
        return node


def run_test(test: dict[str, Any], asked: list[Wire], answers: dict[int, Wire]) -> dict[str, Any]:
    """The verdict of one test ("passed", "failed", "pending", "unsupported"), the questions it asked, and how many of
    them were answered."""
    exchange = TestExchange(test, asked, answers)
    random.seed(0)  # the same questions each time
    space: dict[str, Any] = {"__name__": "tests", "__exchange__": exchange}
    for name in test["modules"]:
        space[name] = importlib.import_module(name)
    theirs = {**{name: Elsewhere(exchange, name) for name in test["names"]}, **exchange.exceptions}
    verdict, reason = "passed", ""
    try:
        space.update(theirs)
        exec(compile(test["setup"], "setup", "exec"), space)
        space.update(theirs)  # a stub in the setup gives way
        tree = ast.fix_missing_locations(_Guard().visit(ast.parse(test["source"])))
        exec(compile(tree, "tests", "exec"), space)
        if test["defines_check"]:
            space["check"](Elsewhere(exchange, test["entry_point"]))
    except Unsupported as error:
        verdict, reason = "unsupported", str(error)
    except BaseException as error:  # SystemExit too: a test that ends early has not passed
        verdict, reason = "failed", f"{type(error).__name__}: {error}"[:200]
    if exchange.is_collecting and verdict != "unsupported":
        verdict = "pending"
    elif verdict == "passed" and not exchange.questions:
        verdict, reason = "unsupported", "the solution was never called, and no assertion was reached"
    elif verdict == "passed" and (exchange.has_failed or (test["compares"] and not exchange.num_reached)):
        verdict, reason = "failed", "an assertion failed, or none was reached"
    return {
        "verdict": verdict, "reason": reason, "questions": exchange.questions, "num_answered": exchange.num_answered
    }  # fmt: skip


def check(give: Callable[[Wire], None]) -> None:
    """Reads job.json (tests, nonce, questions asked so far) and answers.jsonl, the solution's own words."""
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    answers: dict[int, dict[int, Wire]] = {}
    with open("answers.jsonl", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(Exception):  # no line of the solution's may keep the tests from being run
                test, number, answer = json.loads(line)
                answers.setdefault(int(test), {})[int(number)] = list(answer)
    verdicts = [
        run_test(test, job["asked"][place] if job["asked"] else [], answers.get(place, {}))
        for place, test in enumerate(job["tests"])
    ]
    give({"nonce": job["nonce"], "verdicts": verdicts})


def solve(give: Callable[[Wire], None]) -> None:
    """Reads solution.py and questions.json; gives one line [test, number, answer] per question."""
    with open("questions.json", encoding="utf-8") as file:
        tests = json.load(file)
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module  # dataclasses look their module up
    with contextlib.suppress(BaseException):  # what was defined before it broke may still be right
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    for place, questions in enumerate(tests):
        made: dict[int, Any] = {}
        for number, question in enumerate(questions):
            operands: list[Any] = []
            try:
                operands = [decode(wire, functools.partial(_find, module, made)) for wire in question[1:]]
                made[number] = value = _perform(question[0], operands)
                try:
                    answer = ["value", encode(value)]
                except (NotPlain, RecursionError):
                    answer = ["there", None]
            except BaseException as error:
                answer = encode_exception(error)
            give([place, number, [*answer, _changes(question, operands)]])


def _changes(question: Wire, operands: list[Any]) -> list[Wire]:
    """Operands that the call left other than it found them, each with its number; those of plain data only."""
    changes = []
    for place, operand in enumerate(operands):
        with contextlib.suppress(NotPlain, RecursionError):
            if question[0] == "call" and place and (wire := encode(operand)) != question[place + 1]:
                changes.append([place, wire])
    return changes


def _perform(verb: str, operands: list[Any]) -> Any:
    target, *operands = operands
    if verb == "call":
        return target(*operands[:-1], **operands[-1])
    if verb == "attribute":
        return getattr(target, operands[0])
    if verb == "assign":
        return setattr(target, *operands)  # type: ignore[func-returns-value]
    if verb == "item":
        return target[operands[0]]
    if verb == "next":
        return next(target)
    if verb == "iterate":
        return list(itertools.islice(target, MAX_ITEMS))
    return len(target) if verb == "length" else bool(target)


def _find(module: types.ModuleType, made: dict[int, Any], place: Any) -> Any:
    return made[place] if isinstance(place, int) else getattr(module, place)


def main() -> None:
    # What the solution or a test prints must not mix with the answers.
    out, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.set_int_max_str_digits(0)

    def give(value: Wire) -> None:
        line = memoryview(json.dumps(value).encode() + b"\n")
        while line:
            line = line[os.write(out, line) :]

    {"check": check, "solve": solve}[sys.argv[1]](give)
    os._exit(0)  # no exit handlers, no waiting for threads


if __name__ == "__main__":
    main()
