"""Loss scaling: in float16 gradients below 6e-8 are zero and above 65504 infinite, so the loss is multiplied before the
backward pass and its gradients divided afterwards.

Owns: the factor and how it moves, a function of which updates overflowed and nothing else. Refuses: gradients.
Powers of two alone: multiplying by one is exact, so a gradient that neither vanishes nor overflows is the same without.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**14
LARGEST = 2.0**24
GROW_AFTER = 50
"""Updates without overflow before the factor doubles. A skipped update costs a whole batch of rollouts, so it is sought
less often than a GradScaler of torch does by what it starts with, and found sooner in short runs."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """Immutable: an update that failed half way has changed nothing."""

    factor: float = FIRST
    good_updates: int = 0
    """Since the factor last moved."""

    @property
    def is_at_its_end(self) -> bool:
        """Whether a smaller factor would help nobody: what overflows at 1 overflows by itself."""
        return self.factor <= 1.0

    def after_overflow(self) -> LossScale:
        return LossScale(factor=max(1.0, self.factor / 2))

    def after_update(self) -> LossScale:
        if self.good_updates + 1 < GROW_AFTER:
            return LossScale(self.factor, self.good_updates + 1)
        return LossScale(min(LARGEST, 2 * self.factor))
