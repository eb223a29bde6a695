"""What a recipe says of answers that think before they answer.

Owns: the table. Refuses: encoding its text (build/thinking.py). The text under each field is its help.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from temper.config.section import Section


class ThinkingConfig(Section):
    """When an answer that is still thinking is made to answer."""

    budget: int = Field(ge=1)
    """Tokens of an answer after which its thinking is closed, unless it has closed it itself. What follows counts
    together with the closing text up to sampling.max_new_tokens."""
    closing: str = "\n</think>\n\n"
    """Text that is put in then. It is never trained on and does not count as drawn."""
    end: str = "</think>"
    """Text that closes thinking: an answer that holds it is not interrupted. Part of `closing`."""

    @model_validator(mode="after")
    def _closes(self) -> ThinkingConfig:
        if not self.end or self.end not in self.closing:
            raise ValueError(
                f"closing={self.closing!r} does not hold end={self.end!r}, so thinking would go on behind it. Give "
                f'both, e.g. closing = "Time is up.\\n</think>\\n", end = "</think>"'
            )
        return self
