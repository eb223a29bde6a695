"""Arithmetic with a calculator: the smallest task that needs a tool, for the smallest models.

Owns: env "calculator", generators "arithmetic" and "arithmetic_demo", the evaluation of + - * / and parentheses.
Refuses: eval, names, powers. Everything it says is lower-case letters, digits and simple signs.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from fractions import Fraction

from temper.envs.tool_calls import Calls, write_call
from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import ToolError, tool
from temper.errors import UserError
from temper.types import Message, Task

MAX_CHARACTERS = 200
"""Longest expression: few enough that no nesting exhausts the stack."""
MAX_DIGITS = 30
"""Most digits of a result."""
DECIMALS = 6
PARSE_ATTEMPTS = 5
_SIGNS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises ToolError in words that any model's alphabet can hold."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has more than {MAX_CHARACTERS} characters")
    try:
        value = _value(_parsed(expression.strip()))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all that ast.parse throws at odd text
        raise ToolError("not an expression of numbers, + - * / and ( )") from None
    if abs(value) >= 10**MAX_DIGITS:
        raise ToolError(f"the result has more than {MAX_DIGITS} digits")
    return value


def _parsed(expression: str) -> ast.expr:
    for _ in range(PARSE_ATTEMPTS - 1):
        try:
            return ast.parse(expression, mode="eval").body
        except SystemError:
            pass  # Python 3.11 counts the depth of trees for all threads together, and may find another's among its own
    return ast.parse(expression, mode="eval").body


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.Constant(value=number) if type(number) in (int, float):
            return Fraction(str(number))  # through text: 0.1 means a tenth
    raise ValueError(f"{type(node).__name__} is not allowed")


def show(value: Fraction) -> str:
    """A whole number, or a decimal rounded to six places: "3901", "-0.5", "0.333333"."""
    scaled = round(value * 10**DECIMALS)
    whole, part = divmod(abs(scaled), 10**DECIMALS)
    decimals = f".{part:0{DECIMALS}d}".rstrip("0").rstrip(".")
    return f"{'-' if scaled < 0 else ''}{whole}{decimals}"


@tool(seconds=2.0)
def calc(expression: str) -> str:
    """Evaluates arithmetic.

    expression: numbers with + - * / and parentheses, e.g. (12+7)*3
    """
    return show(evaluate(expression))


class Calculator(ToolEnv):
    """A question, calls of calc, an answer. In the plain protocol: "47*83", "calc(47*83)", "3901", "3901"."""

    def __init__(self, *, call_format: str = "plain", max_calls: int = 4, show_tools: str = "auto") -> None:
        # A character model knows neither schemas nor brackets, and arithmetic carries no instructions to beware of.
        is_untold = call_format == "plain" and show_tools == "auto"
        super().__init__(
            [calc],
            limits=ToolLimits(calls_per_turn=max_calls, calls_per_episode=max_calls, observation_characters=200),
            presentation=Presentation(
                call_format=call_format, show_tools="no" if is_untold else show_tools, mark_untrusted=False
            ),
        )

    def solution(self, task: Task) -> Calls:
        question = task.messages[-1].content
        try:
            is_known = show(evaluate(question)) == task.answer
        except ToolError:  # a question in words
            is_known = False
        return [("calc", {"expression": question})] if is_known else []


def arithmetic(index: int, seed: int, *, digits: int = 2, operations: str = "+-*", terms: int = 2) -> Task:
    """Numbers of exactly `digits` digits: "47*83"; the answer as the calculator shows it."""
    question = _question(index, seed, digits, operations, terms)
    return _task(f"arithmetic:{seed}:{index}", (Message(role="user", content=question),), show(evaluate(question)))


def arithmetic_demo(
    index: int,
    seed: int,
    *,
    digits: int = 2,
    operations: str = "+-*",
    terms: int = 2,
    call_format: str = "plain",
) -> Task:
    """Both turns of an episode as single-turn examples: even, the call to make; odd, the answer after its output."""
    question = _question(index // 2, seed, digits, operations, terms)
    call = write_call(call_format, "calc", {"expression": question})
    asked, result = Message(role="user", content=question), show(evaluate(question))
    name = f"arithmetic_demo:{seed}:{index}"
    if index % 2 == 0:
        return _task(name, (asked,), call)
    said = Message(role="assistant", content=call)
    return _task(name, (asked, said, Message(role="tool", content=result, name="calc")), result)


def _task(name: str, messages: tuple[Message, ...], answer: str) -> Task:
    return Task(id=name, messages=messages, env="calculator", answer=answer)


def _question(index: int, seed: int, digits: int, operations: str, terms: int) -> str:
    if digits < 1 or terms < 2 or (digits + 1) * terms > MAX_DIGITS:
        raise UserError(f"digits={digits} and terms={terms} must be at least 1 and 2, and give at most {MAX_DIGITS}.")
    if not operations or set(operations) - set("+-*/"):
        raise UserError(f'operations={operations!r} must be some of "+-*/", e.g. operations = "+-".')
    draw = random.Random(f"arithmetic/{seed}/{index}")
    low = 10 ** (digits - 1)  # from 1 even for one digit: nothing is divided by zero
    numbers = [str(draw.randint(low, 10**digits - 1)) for _ in range(terms)]
    return numbers[0] + "".join(draw.choice(operations) + number for number in numbers[1:])
