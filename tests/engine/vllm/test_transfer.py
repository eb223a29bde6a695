"""What a rank of vLLM does with a publication, on a model of our own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

from temper.engine.digests import differing, digested
from temper.engine.manifest import Manifest, differences, manifest_of
from temper.engine.process.weights import SharedWeights, anonymous_file
from temper.engine.vllm.transfer import WeightUpdate
from temper.types import Publication


class Model(torch.nn.Module):
    """Takes weights over as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def made(version: int) -> Publication:
    torch.manual_seed(version)
    return Publication(version=version, tensors={"a.weight": torch.randn(2, 3), "b.weight": torch.randn(2, 2)})


@pytest.fixture
def memory() -> Iterator[SharedWeights]:
    memory = SharedWeights(anonymous_file())
    yield memory
    memory.close()


def opened(model: Model, memory: SharedWeights) -> WeightUpdate:
    update = WeightUpdate(model)
    update.open(f"/proc/{os.getpid()}/fd/{memory.descriptor}")
    assert update.problem == ""
    return update


def holds(update: WeightUpdate, publication: Publication) -> bool:
    manifest = manifest_of(publication)
    return not differences(manifest, Manifest.from_json(update.held(manifest.to_json(), lambda own: [own])))


def test_nothing_is_seen_before_the_commit_and_everything_after(memory: SharedWeights) -> None:
    update, new = opened(Model(), memory), made(1)
    update.receive(memory.write(new), manifest_of(new).to_json())
    assert update.problem == ""
    assert not holds(update, new)
    update.commit()
    assert update.problem == ""
    assert holds(update, new)


def test_what_is_dropped_is_not_taken_over(memory: SharedWeights) -> None:
    update, new = opened(Model(), memory), made(1)
    update.receive(memory.write(new), manifest_of(new).to_json())
    update.receive(None, "")
    update.commit()
    assert not holds(update, new)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda told, tensors: tensors["a.weight"].neg_(), "a.weight holds other numbers"),
        (lambda told, tensors: told["tensors"].pop(), "b.weight is missing"),
        (lambda told, tensors: told.update(size=1 << 30), "bytes, and"),
    ],
)
def test_a_publication_that_was_spoiled_is_a_problem_and_changes_nothing(
    memory: SharedWeights, fault: object, says: str
) -> None:
    update, old, new = opened(Model(), memory), made(1), made(2)
    update.receive(memory.write(old), manifest_of(old).to_json())
    update.commit()
    told = memory.write(new)
    fault(told, memory.read(told).tensors)  # type: ignore[operator]
    update.receive(told, manifest_of(new).to_json())
    assert says in update.problem
    update.commit()
    assert holds(update, old)


def test_a_warning_of_vllm_while_it_loads_is_a_problem(memory: SharedWeights) -> None:
    class Silent(Model):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            logging.getLogger("vllm.loader").warning("b.weight was skipped")

    update, new = opened(Silent(), memory), made(1)
    update.receive(memory.write(new), manifest_of(new).to_json())
    update.commit()
    assert "b.weight was skipped" in update.problem


def test_before_the_memory_is_open_nothing_can_be_received(memory: SharedWeights) -> None:
    update = WeightUpdate(Model())
    update.open("/proc/self/fd/9999")
    assert "FileNotFoundError" in update.problem
    update.receive(memory.write(made(1)), manifest_of(made(1)).to_json())
    assert "not open" in update.problem


def test_the_sums_of_what_the_model_holds_are_those_of_what_was_published(memory: SharedWeights) -> None:
    model = Model()
    update, told = opened(model, memory), manifest_of(made(1)).to_json()
    publication, published = digested(made(1))
    update.receive(memory.write(publication), told)
    update.commit()
    assert differing(published.read(), update.digests(told, lambda own: [own])) == []
    model.b.weight.data[1, 0] += 1e-6
    assert differing(published.read(), update.digests(told, lambda own: [own])) == ["b.weight"]
    assert update.digests(manifest_of(Publication(version=1, tensors={})).to_json(), lambda own: [own]) == {}
    assert "nothing was published" in update.problem
