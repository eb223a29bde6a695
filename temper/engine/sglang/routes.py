"""Routes of experts as an SGLang server sends them: with the end of an answer, as int32 in base64.

Owns: what is asked for, and decoding it. Refuses: checking what they say (engine/told_routes.py).
Written against SGLang 0.5.23: srt/state_capturer/routed_experts.py records experts before they are placed on ranks;
srt/managers/tokenizer_manager.py sends them.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from temper.engine.told_routes import ToldRoutes
from temper.errors import BackendError
from temper.types import Ragged

FLAG = "--enable-return-routed-experts"


def decode_routes(told: ToldRoutes, text: str, length: int) -> Ragged[Any]:
    """Those of a text of so many tokens, the drawn ones included."""
    try:
        values = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.int32)
    except (binascii.Error, TypeError, ValueError) as error:
        raise BackendError(f"SGLang's routes are not those of {length - 1} tokens: {error}") from error
    return told.read(values, length, "SGLang")
