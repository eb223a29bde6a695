"""Knights and knaves: who is what, as a response states it.

Owns: the verifier of the suite "knights". Refuses: solving puzzles; the data holds the solution.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL | re.IGNORECASE)
_ROLE = re.compile(r"\b([A-Z][\w'-]*) is (not )?an? (knight|knave)\b")


def stated_roles(text: str) -> str | None:
    """Who is what, in order of names: "Ann=knight Bob=knave". None: nothing is stated, or two things about one person.

    Only the one <answer></answer> counts when there is one; thoughts before </think> never do.
    """
    text = text.rpartition("</think>")[2]
    tagged = [inner for inner, end in _TAG.findall(text) if end]
    if len(tagged) > 1:
        return None
    roles: dict[str, str] = {}
    for name, denied, role in _ROLE.findall(tagged[0] if tagged else text):
        meant = role if not denied else {"knight": "knave", "knave": "knight"}[role]
        if roles.setdefault(name, meant) != meant:
            return None
    return " ".join(f"{name}={roles[name]}" for name in sorted(roles)) or None


def same_roles(prompt: str, response: str, answer: str | None) -> float:
    """1 when the response states exactly the roles of the solution, else 0."""
    gold = stated_roles(answer or "")
    if gold is None:
        raise ValueError(f"the solution {answer!r} names nobody")
    return float(stated_roles(response) == gold)
