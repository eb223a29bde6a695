"""Publications as checkpoints on disk, from which SGLang servers read them.

Owns: their folders, each written once for all servers that read it, and when one goes. Refuses: telling servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from temper.engine.manifest import Manifest, manifest_of
from temper.errors import UserError
from temper.models.experts.stored import as_stored
from temper.types import Publication

WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
ROWS_READ_BACK = 1
"""Rows of each tensor that are read back. A tensor that was not loaded differs in its first row already."""


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A publication as it was written: the trainer may have changed its tensors since."""

    version: int
    folder: Path
    """Its name is that of the weights: of the version and of their hash."""
    manifest: Manifest
    rows: Mapping[str, Tensor]
    """The first rows of each tensor."""


class Checkpoints:
    """Of one run. Every server takes a publication and gives the one before back when it does not need it any more:
    should an update fail, the server may read what it had once more."""

    def __init__(self, *, like: Path, folder: Path) -> None:
        """like: the Hugging Face directory that the servers were started from: published ones get its configuration and
        tokenizer. folder: the servers must see it under the same path; nobody else writes to it."""
        self.like, self._folder = like, folder
        self._writing = asyncio.Lock()
        self._last: tuple[Publication, PublishedCheckpoint] | None = None
        """Stays until another is written: a server that comes back reads it."""
        self._readers: Counter[Path] = Counter()
        """By folder: the same weights may be published again under their version."""

    async def take(self, publication: Publication) -> PublishedCheckpoint:
        """Its checkpoint, which is written if nobody took it before and then stays until it is given back."""
        async with self._writing:
            if self._last is None or self._last[0] is not publication:
                written = await asyncio.to_thread(write_checkpoint, publication, like=self.like, folder=self._folder)
                before, self._last = self._last, (publication, written)
                if before is not None:
                    await self._remove_unread(before[1].folder)
            taken = self._last[1]
            self._readers[taken.folder] += 1
            return taken

    async def give_back(self, taken: PublishedCheckpoint) -> None:
        self._readers[taken.folder] -= 1
        await self._remove_unread(taken.folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _remove_unread(self, folder: Path) -> None:
        is_last = self._last is not None and self._last[1].folder == folder
        if not (self._readers[folder] or is_last):
            del self._readers[folder]
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def weight_names(checkpoint: Path) -> set[str]:
    """Names of the tensors in a checkpoint's safetensors files; empty when it has none."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def write_checkpoint(publication: Publication, *, like: Path, folder: Path) -> PublishedCheckpoint:
    """A Hugging Face directory with the published weights and everything else as in `like`. Appears at once or not; one
    that is there holds these weights already, and may be being read."""
    config = json.loads((like / "config.json").read_text())
    # As files hold them: servers look for experts one by one.
    stored = dict(as_stored(publication.tensors, str(config.get("model_type"))))
    publication = Publication(version=publication.version, tensors=stored)
    _require_known_names(publication, like, is_tied=bool(config.get("tie_word_embeddings")))
    manifest = manifest_of(publication)
    final = folder / f"version-{publication.version}-{manifest.sha256[:12]}"
    if not final.exists():
        _write(publication, manifest, like=like, aside=folder / f".writing-{final.name}")
        os.replace(folder / f".writing-{final.name}", final)
    rows = {name: tensor.detach()[:ROWS_READ_BACK].to("cpu", copy=True) for name, tensor in publication.tensors.items()}
    return PublishedCheckpoint(publication.version, final, manifest, rows)


def _write(publication: Publication, manifest: Manifest, *, like: Path, aside: Path) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in like.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_ENDINGS):
            shutil.copy2(file, aside / file.name)
    # Copies: tensors of a model may share storage, which the format does not allow.
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in publication.tensors.items()}
    save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
    (aside / "manifest.json").write_text(manifest.to_json())


def _require_known_names(publication: Publication, like: Path, *, is_tied: bool) -> None:
    known, ours = weight_names(like), set(publication.tensors)
    if is_tied:
        known, ours = known - {"lm_head.weight"}, ours - {"lm_head.weight"}
    if known and (differing := sorted(known ^ ours)):
        raise UserError(
            f"the model's tensors have other names than those in {like} ({', '.join(differing[:3])}), and SGLang reads "
            'by name: this model family cannot be published to SGLang. Use engine.kind = "local"'
        )
