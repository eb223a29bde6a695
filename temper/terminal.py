"""Everything that is printed: text of a run, a model or a file is shown by the terminal, never obeyed.

Owns: the one console, and what becomes of control characters. Refuses: markup in text; colours are rich's own objects.
An escape sequence in a transcript could rewrite what stands above it, the title of the window, or the clipboard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and those that turn the direction of writing around."""


def printable(text: str) -> str:
    """The text with every control character as a sign that stands for it."""
    return _CONTROL.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)  # e.g. ␛
    return "␡" if code == 0x7F else "�"


class SafeConsole(Console):
    """A rich console in which no text is markup and no control character gets through, whatever it stands in.

    What rich itself sends to move the cursor are segments of their own kind, and pass.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or _CONTROL.search(segment.text) is None:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def print_line(what: object) -> None:
    """On standard output, for whoever was told of no better place."""
    SafeConsole(soft_wrap=True).print(what, highlight=False)
