"""The tool that the agents of this folder share: two numbers and a sign."""

import re

SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def calc(expression: str) -> str:
    """Evaluates arithmetic, e.g. 47*83."""
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    return str(SIGNS[found[2]](int(found[1]), int(found[3]))) if found else "error"
