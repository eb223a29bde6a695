"""Publications on disk: written once, and there for as long as a server needs them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from temper.engine.sglang.checkpoints import Checkpoints
from temper.types import Publication


def play(world: Any, use: Callable[[Checkpoints], Awaitable[None]]) -> None:
    checkpoints = Checkpoints(like=world.checkpoint, folder=world.weights_folder)
    asyncio.run(use(checkpoints))
    checkpoints.close()
    assert not world.weights_folder.exists()


def published(world: Any, version: int) -> Publication:
    return Publication(version=version, tensors=world.tensors(version))


def folders(world: Any) -> list[str]:
    return sorted(folder.name.rsplit("-", 1)[0] for folder in world.weights_folder.iterdir())


def test_all_who_take_a_publication_at_once_get_one_folder_that_is_whole(sglang: Any) -> None:
    async def use(checkpoints: Checkpoints) -> None:
        publication = published(sglang, 1)
        taken = await asyncio.gather(*(checkpoints.take(publication) for _ in range(3)))
        (folder,) = {each.folder for each in taken}
        held = load_file(folder / "model.safetensors")
        assert all(torch.equal(held[name], tensor) for name, tensor in publication.tensors.items())
        assert json.loads((folder / "manifest.json").read_text())["sha256"] == taken[0].manifest.sha256

    play(sglang, use)


def test_a_folder_goes_when_the_last_of_its_readers_has_another_and_the_newest_stays_for_who_comes_back(
    sglang: Any,
) -> None:
    async def use(checkpoints: Checkpoints) -> None:
        one, two = published(sglang, 1), published(sglang, 2)
        first, second = [await checkpoints.take(one) for _ in range(2)]
        await checkpoints.take(two)
        await checkpoints.give_back(first)
        assert folders(sglang) == ["version-1", "version-2"], "one still reads the old one"
        newest = await checkpoints.take(two)
        await checkpoints.give_back(second)
        assert folders(sglang) == ["version-2"]
        for _ in range(2):
            await checkpoints.give_back(newest)
        assert folders(sglang) == ["version-2"]
        await checkpoints.take(published(sglang, 3))
        assert folders(sglang) == ["version-3"]

    play(sglang, use)


def test_the_same_weights_published_again_do_not_disturb_who_reads_them(sglang: Any) -> None:
    async def use(checkpoints: Checkpoints) -> None:
        first = await checkpoints.take(published(sglang, 1))
        file = first.folder / "model.safetensors"
        before = file.stat()
        again = await checkpoints.take(published(sglang, 1))
        await checkpoints.give_back(first)
        assert (again.folder, file.stat().st_ino) == (first.folder, before.st_ino)

    play(sglang, use)


def test_what_fails_to_be_written_leaves_the_last_one_and_nothing_half_written(sglang: Any, tmp_path: Path) -> None:
    async def use(checkpoints: Checkpoints) -> None:
        await checkpoints.take(published(sglang, 1))
        (sglang.checkpoint / "config.json").rename(tmp_path / "elsewhere.json")
        try:
            await checkpoints.take(published(sglang, 2))
        except OSError:
            pass
        else:
            raise AssertionError("there is no configuration to copy")
        (tmp_path / "elsewhere.json").rename(sglang.checkpoint / "config.json")
        assert folders(sglang) == ["version-1"]
        await checkpoints.take(published(sglang, 2))
        assert folders(sglang) == ["version-1", "version-2"]

    play(sglang, use)


def test_first_rows_stay_as_they_were_published_when_the_trainer_goes_on(sglang: Any) -> None:
    async def use(checkpoints: Checkpoints) -> None:
        publication = published(sglang, 1)
        taken = await checkpoints.take(publication)
        for tensor in publication.tensors.values():
            tensor += 1
        assert all(torch.equal(rows, sglang.tensors(1)[name][:1]) for name, rows in taken.rows.items())

    play(sglang, use)
