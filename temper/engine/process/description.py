"""What makes two model directories the same model, but for the values of its weights.

Owns: which settings count, and that the directory of an order is there. Refuses: comparing weights; whoever holds a
copy of a trained model is sent them.
"""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

from temper.errors import UserError
from temper.models.load import load_tokenizer

NO_MATTER = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "name_or_path"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "return_dict", "chunk_size_feed_forward"}
)
"""Settings that change nothing in a pass over token ids."""
TOKENS = "tokens"


def describe_model(config: Any, folder: Path) -> dict[str, Any]:
    """A model's configuration, as JSON has it, and a digest of the tokens that its ids stand for."""
    told = json.loads(config.to_json_string(use_diff=False))
    found = {name: value for name, value in told.items() if name not in NO_MATTER and not name.startswith("_")}
    vocabulary = json.dumps(sorted(load_tokenizer(folder).get_vocab().items()))
    return {**found, TOKENS: hashlib.sha256(vocabulary.encode()).hexdigest()[:12]}


def model_found_here(folder: str) -> Path:
    """UserError says what to do where a sampler does not see the files that it is told to open."""
    if not Path(folder).is_dir():
        raise UserError(
            f"{folder} is not there on {socket.gethostname()}. Start the sampler with its own copy of the model: "
            f"temper sampler MODEL"
        )
    return Path(folder)


def require_same_model(expected: dict[str, Any], found: dict[str, Any], folder: Path) -> None:
    """UserError names the settings in which they differ."""
    names = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if names:
        told = ", ".join(f"{name} is {found.get(name)} and not {expected.get(name)}" for name in names[:3])
        raise UserError(
            f"{folder} is another model than the one that is trained: {told}. Start the sampler with a copy of that, "
            f"or without MODEL where it sees the trainer's files"
        )
