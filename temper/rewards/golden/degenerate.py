"""Texts that stall parsers: made by a rule, for the guard that no reward and no tool call costs the event loop seconds.

Owns: the rule. Refuses: judging; such a text has no right score, only a time in which it must get one.
"""

from __future__ import annotations

from collections.abc import Iterator

LENGTH = 32_000
UNITS = (
    " ", "\n", "\t \n", "a", "a ", "a. ", "A", "1", "1,", "1.", ".", "...!", "!?", ",", ";", "-", "- ", "* ",
    "*", "**a", "_", "#", "## a\n", "`", "```\n", "```python\n", "```json\n", "[", "[a", "[ ", "]", "(", ")",
    "()", "a(", "{", "{ ", "{}", '{"', '{"a":', '{"a":[', '{"name":', '[{"name": ', '"', '\\"', "\\", "'", "<",
    ">", "</", "<a", "<<", "<think>", "</think>", "<answer>", "<tool_call>", "<tool_call>{", "</tool_call>",
    "<tool_call></tool_call>", "[TOOL_CALLS]", "[ARGS]", "a{} ", "<|python_tag|>", "$", "$$", "\\boxed{",
    "\\frac{1}{", "\\(", "\\text{", "^", "9^", "=", "1=", "1+", "the answer is ", "p. s ", "SECTION 1 ",
    "My answer is yes.", "\u200b", "\u200d", "\u0301", "\u3002", "\u4e2d", "\ufb03", "\U0001f600", "\ud800",
)  # fmt: skip
"""What a model in a loop repeats, and what parsers look for."""
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('{"a":', "}"), ("\\boxed{", "}"), ("<think>", "</think>"), ("<", ">"))
EDGES = (" ", "\n", "a", "1", ".", "*", "[", "{", "(", "\\", "9", "\u200b", "\u200d")
"""Runs of these between two other characters: where a pattern gives back what it took, one at a time."""


def degenerate_texts(length: int = LENGTH) -> Iterator[tuple[str, str]]:
    """Each with a name: units repeated, brackets nested, runs with something at one end, the other, or both."""
    for unit in UNITS:
        yield f"{unit!r} again and again", (unit * length)[:length]
    for opening, closing in BRACKETS:
        count = length // (len(opening) + len(closing))
        yield f"{opening!r} nested", opening * count + closing * count
    for edge in EDGES:
        for before, after in (
            ("x", ""),
            ("", "x"),
            ("x", "{"),
            ("[", "]"),
            ("<answer>", "</answer>"),
            ('{"a": "', '"}'),
        ):
            yield f"{edge!r} between {before!r} and {after!r}", before + edge * (length - 10) + after
