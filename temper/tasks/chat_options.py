"""Variables of a chat template that a recipe sets, such as enable_thinking.

Owns: writing them into the template itself, so that whoever opens the checkpoint later writes prompts as in training,
Temper or not. Refuses: variables that the template does not read, which would do nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from temper.errors import UserError, did_you_mean
from temper.types import Scalar

WHERE = "prompt.chat_options"
GIVEN = {
    "add_generation_prompt", "bos_token", "continue_final_message", "cycler", "dict", "documents", "eos_token",
    "joiner", "lipsum", "messages", "namespace", "pad_token", "raise_exception", "range", "strftime_now", "tools",
    "unk_token",
}  # fmt: skip
"""What a template reads that is no option of it: conversation, tools, special tokens, functions."""
# A line of its own, whose end templates drop: what follows is written as it was.
_SET = re.compile(r"\{% set (\w+) = (.*) %\}\n")


def set_chat_options(tokenizer: Any, options: Mapping[str, Scalar]) -> None:
    """Writes the options into the tokenizer's chat template, over those of earlier stages. UserError for a variable
    that it does not read."""
    if not options:
        return
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"": templates or ""}
    known = {name: option_names(template) for name, template in named.items()}
    every = sorted(set().union(*known.values()))
    for option in options:
        if option not in every:
            raise UserError(
                f"{WHERE}.{option}: the chat template of this model reads no such variable, so it would change "
                f"nothing.{did_you_mean(option, every)} It reads: {', '.join(every) or 'none'}. Leave this one out"
            )
    written = {
        name: with_options(template, {option: value for option, value in options.items() if option in known[name]})
        for name, template in named.items()
    }
    tokenizer.chat_template = written if isinstance(templates, dict) else written[""]


def with_options(template: str, options: Mapping[str, Scalar]) -> str:
    """The template that begins by setting these; what it began with before stays unless they say otherwise."""
    begun, rest = _taken_apart(template)
    said = begun | {name: json.dumps(value, ensure_ascii=False) for name, value in options.items()}
    return "".join(f"{{% set {name} = {value} %}}\n" for name, value in said.items()) + rest


def option_names(template: str) -> set[str]:
    """Variables that the template reads and that nobody else gives it."""
    # Only a recipe with options pays for these.
    from jinja2 import Environment, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables
    from jinja2.parser import Parser

    class Generation(Extension):
        """transformers' mark of what an assistant said; only its inside reads variables."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as each instance's

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    try:
        return find_undeclared_variables(environment.parse(_taken_apart(template)[1])) - GIVEN
    except TemplateSyntaxError as error:
        raise UserError(f"{WHERE}: the chat template of this model cannot be read: {error}") from error


def _taken_apart(template: str) -> tuple[dict[str, str], str]:
    """Options that were written into it, and the template behind them."""
    begun: dict[str, str] = {}
    while found := _SET.match(template):
        begun[found[1]] = found[2]
        template = template[found.end() :]
    return begun, template
