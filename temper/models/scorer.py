"""A causal language model with a scalar head in place of its own: what reward models are trained from.

Owns: turning a checkpoint of either kind into a scorer with Temper's attention, and where its head is. Refuses: reading
the head (trainer/passes/scores.py), the scale of the scores, families that transformers has no such head for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from temper.errors import UserError
from temper.folders.pretrained import read_pretrained
from temper.models.decoder import lay_end_to_end, set_numerics
from temper.models.load import prepare, read_config, read_shape
from temper.models.proof import require_proven

ScorerKind = Literal["conversation", "steps"]
"""One score for a whole conversation, or one logit at the end of every step."""

CLASSES: dict[ScorerKind, Any] = {
    "conversation": AutoModelForSequenceClassification,
    "steps": AutoModelForTokenClassification,
}
ARCHITECTURES: dict[str, ScorerKind] = {
    "ForSequenceClassification": "conversation",
    "ForTokenClassification": "steps",
}
"""How the names of transformers' classes end."""
HEAD = "score"
"""Name of the head in transformers' classifiers of decoders."""


def load_scorer(folder: Path, dtype: torch.dtype, device: torch.device, kind: ScorerKind = "conversation") -> nn.Module:
    """The scorer in evaluation mode, dropout off for good. From a language model: its decoder under a head of zeros.

    Zeros and not small random numbers: every score starts at 0, the loss at ln 2, and nothing depends on a seed. The
    head has a gradient at once, the decoder from the second step on. A scorer's own head is kept.
    """
    read_shape(folder)  # first: what is refused by its description needs no weights
    model, info = _load(folder, dtype, kind)
    score_head(model)
    if lost := sorted(name for name in info["missing_keys"] if not name.startswith(f"{HEAD}.")):
        raise UserError(f"{folder} lacks weights {', '.join(lost[:3])}. Give a complete checkpoint")
    if other := sorted(name for name in info["unexpected_keys"] if name.startswith(f"{HEAD}.")):
        raise UserError(f'{folder} is another kind of reward model than "{kind}": it has weights {", ".join(other)}')
    for name in info["missing_keys"]:
        nn.init.zeros_(model.get_parameter(name))
    model = prepare(model).to(device)
    lay_end_to_end(model)
    set_numerics(model, "fast")
    require_proven(model, folder)
    return model


def scorer_kind(folder: Path) -> ScorerKind | None:
    """What the description of a directory says; None: it is not a scorer."""
    names = read_config(folder).architectures or [""]
    return next((kind for end, kind in ARCHITECTURES.items() if names[0].endswith(end)), None)


def _load(folder: Path, dtype: torch.dtype, kind: ScorerKind) -> tuple[Any, dict[str, Any]]:
    try:
        with torch.random.fork_rng(devices=[]):  # it draws a head; the run's randomness is not its business
            return read_pretrained(CLASSES[kind], folder, is_quiet=True, num_labels=1, dtype=dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: no scalar head can be put on this model: {error}") from error


def score_head(model: Any) -> nn.Module:
    """The layer from the last hidden state to the one number."""
    head = getattr(model, HEAD, None)
    if not isinstance(head, nn.Module) or getattr(head, "out_features", 1) != 1:
        raise UserError(f'{type(model).__name__} has no layer "{HEAD}" with one output, so it cannot be a reward model')
    return head
