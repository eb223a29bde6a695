"""A process that has a sampler process, asks it for something that takes long, and is to be killed meanwhile."""

from __future__ import annotations

import asyncio
import sys

from temper.cluster.samplers import start_sampler
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.types import Publication, Request, SamplingParams


def tell_version(self: SharedWeights, publication: Publication) -> dict[str, int]:
    """In place of write(): importing torch takes seconds."""
    return {"version": publication.version}


async def main(prompt: int) -> None:
    SharedWeights.write = tell_version  # type: ignore[assignment, method-assign]
    sampler = start_sampler("", SharedWeights(anonymous_file()), main="tests.cluster.fake_main")
    await sampler.load(Publication(version=1, tensors={}))
    asking = asyncio.create_task(sampler.generate(Request(id="a", prompt_ids=(prompt,), params=SamplingParams())))
    await asyncio.sleep(0.2)
    print(sampler._process.pid, flush=True)  # type: ignore[attr-defined]
    await asking


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
