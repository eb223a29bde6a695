"""The two programs that judge a solution, each run in a sandbox of its own: "solve" calls it, "check" runs the tests.

Owns: both sides of the exchange and the plain data between them. Refuses: importing anything but the standard library.
No object of the solution ever reaches an assertion: what it returns is rebuilt here from builtin types, and whatever is
no plain data stays in its own process, as a number that names it. The tests never enter the solution's process.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import itertools
import json
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH, MAX_ITEMS = 64, 100_000
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
Wire = Any
"""What JSON holds: scalars as ["int", "0x2a"], containers as ["list", [...]], things elsewhere as ["there", number]."""


class NotPlain(Exception):
    """The value is not made of builtin types alone."""


class SolutionError(Exception):
    """The solution raised something that is no builtin exception, ended its process, or gave no answer in time."""


class Unsupported(BaseException):
    """The test hands the solution something that cannot leave the test's process, e.g. a lambda.

    No Exception: a test that catches those must not swallow it.
    """


class Elsewhere:
    """A value in the solution's process, known by the number of the operation that made it, or by a global name.

    Only instances of classes that the test itself constructs have attributes here: a function that should return text
    could otherwise return an object whose startswith() agrees to everything.
    """

    def __init__(self, exchange: Exchange, place: int | str, *, is_instance: bool = False) -> None:
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


def encode(value: Any, depth: int = 0) -> Wire:
    """Plain data for the wire. Instances of subclasses travel as what they inherit from: a Counter is a dict."""
    if value is None or value is True or value is False:
        return value
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if isinstance(value, Elsewhere):
        return ["there", value._place]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, int):
        return ["int", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            items = [encode(item, depth + 1) for item in kind.__iter__(value)]  # type: ignore[attr-defined]
            # Sets of text come in another order in each process.
            return [name, sorted(items, key=json.dumps) if name in ("set", "frozenset") else items]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in dict.items(value)]]
    if isinstance(value, type) and _is_builtin(value):
        return ["type", value.__name__]
    raise NotPlain(f"{type(value).__name__} is no plain data")


def _is_builtin(kind: type) -> bool:
    return vars(builtins).get(kind.__name__) is kind


def decode(wire: Wire, there: Callable[[Any], Any]) -> Any:
    """Rebuilds plain data; `there` resolves what is not plain."""
    if wire is None or isinstance(wire, bool):
        return wire
    tag, content = wire[0], wire[1]
    if tag in SEQUENCES:
        return SEQUENCES[tag](decode(item, there) for item in content)
    if tag == "dict":
        return {decode(key, there): decode(item, there) for key, item in content}
    if tag == "complex":
        return complex(float.fromhex(content), float.fromhex(wire[2]))
    if tag == "type":
        return _builtin_type(content)
    scalars: dict[str, Callable[[Any], Any]] = {
        "str": str, "int": lambda text: int(text, 16), "float": float.fromhex, "bytes": bytes.fromhex, "there": there
    }  # fmt: skip
    return scalars[tag](content)


def _builtin_type(name: str) -> type:
    found = vars(builtins)[name]
    if not isinstance(found, type):
        raise ValueError(f"{name} is no type")
    return found


class Exchange:
    """One test's questions to the solution, in order, and the answers so far.

    As long as the questions are those that were answered, the answers are real. From the first other question on the
    test only collects questions: answers are Unknown, assertions count nothing, and the verdict is "pending".
    """

    def __init__(self, asked: list[Wire], answers: dict[int, Wire]) -> None:
        self.asked, self.answers = asked, answers
        self.questions: list[Wire] = []
        self.is_collecting = False
        self.num_reached = 0

    def ask(self, verb: str, *operands: Any) -> Any:
        number = len(self.questions)
        if not self.is_collecting and number < len(self.asked) and self._is_same(self.asked[number], verb, operands):
            self.questions.append(self.asked[number])
            return self._answer(number, is_instance=_makes_instance(verb, operands[0]))
        self.is_collecting = True
        try:
            self.questions.append([verb, *(encode(operand) for operand in operands)])
        except NotPlain as error:
            raise Unsupported(str(error)) from error
        return Unknown(self, number, is_instance=_makes_instance(verb, operands[0]))

    def reach(self) -> None:
        self.num_reached += 1

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
        return is_earlier and self.answers.get(asked[1]) == ["value", wire]

    def _answer(self, number: int, *, is_instance: bool) -> Any:
        answer = self.answers.get(number)
        if answer is None:
            raise SolutionError("the solution gave no answer")
        try:
            if answer[0] == "value":
                return decode(answer[1], _nothing_there)
            if answer[0] == "there":
                return Elsewhere(self, number, is_instance=is_instance)
            raised = _exception(str(answer[1]), str(answer[2]))
        except Exception as error:  # the solution can write what it likes into its answers
            raise SolutionError(f"the answer is malformed: {type(error).__name__}") from error
        raise raised


def _makes_instance(verb: str, target: Any) -> bool:
    """A class called by its name, or a part of an instance."""
    return (isinstance(target._place, str) and target._place[:1].isupper()) if verb == "call" else target._is_instance


def _nothing_there(place: Any) -> Any:
    raise ValueError(f"an answer names {place}")


def _exception(name: str, message: str) -> Exception:
    """Tests may expect a ValueError; they never get a SystemExit, nor an AssertionError of the solution's making."""
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, AssertionError):
        with contextlib.suppress(TypeError):
            return kind(message)
    return SolutionError(f"{name}: {message}")


class _Guard(ast.NodeTransformer):
    """Counts each assertion as it is reached, and lets it pass while questions are only collected."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        handler = ast.parse(
            "try:\n    __exchange__.reach()\nexcept Exception:\n    if not __exchange__.is_collecting:\n        raise"
        ).body[0]
        assert isinstance(handler, ast.Try)
        handler.body.append(node)
        return ast.copy_location(handler, node)


def run_test(test: dict[str, Any], asked: list[Wire], answers: dict[int, Wire]) -> dict[str, Any]:
    """The verdict of one test ("passed", "failed", "pending", "unsupported") and the questions it asked."""
    exchange = Exchange(asked, answers)
    random.seed(0)  # the same questions each time
    space: dict[str, Any] = {"__name__": "tests", "__exchange__": exchange}
    for name in test["modules"]:
        space[name] = importlib.import_module(name)
    verdict, reason = "passed", ""
    try:
        space.update({name: Elsewhere(exchange, name) for name in test["names"]})
        exec(compile(test["setup"], "setup", "exec"), space)
        space.update({name: Elsewhere(exchange, name) for name in test["names"]})  # a stub in the setup gives way
        tree = ast.fix_missing_locations(_Guard().visit(ast.parse(test["source"])))
        exec(compile(tree, "tests", "exec"), space)
        if test["entry_point"] and callable(space.get("check")):
            space["check"](space[test["entry_point"]])
    except Unsupported as error:
        verdict, reason = "unsupported", str(error)
    except BaseException as error:  # SystemExit too: a test that ends early has not passed
        verdict, reason = "failed", f"{type(error).__name__}: {error}"[:200]
    if exchange.is_collecting and verdict != "unsupported":
        verdict = "pending"
    elif verdict == "passed" and not (exchange.num_reached and exchange.questions):
        verdict, reason = "unsupported", "no assertion was reached, or the solution was never called"
    return {"verdict": verdict, "reason": reason, "questions": exchange.questions}


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
            try:
                made[number] = value = _perform(question, module, made)
                try:
                    answer = ["value", encode(value)]
                except (NotPlain, RecursionError):
                    answer = ["there"]
            except BaseException as error:
                answer = ["raised", type(error).__name__, str(error)[:1000]]
            give([place, number, answer])


def _perform(question: Wire, module: types.ModuleType, made: dict[int, Any]) -> Any:
    def there(place: Any) -> Any:
        return made[place] if isinstance(place, int) else getattr(module, place)

    verb, target, *operands = (question[0], *(decode(wire, there) for wire in question[1:]))
    if verb == "call":
        return target(*operands[:-1], **operands[-1])
    if verb == "attribute":
        return getattr(target, operands[0])
    if verb == "assign":
        return setattr(target, *operands)  # type: ignore[func-returns-value]
    if verb == "item":
        return target[operands[0]]
    if verb == "iterate":
        return list(itertools.islice(target, MAX_ITEMS))
    return len(target) if verb == "length" else bool(target)


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
