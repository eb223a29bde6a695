"""A manifest notices every way in which weights can fail to arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from temper.engine.manifest import Manifest, check_received, differences, manifest_of, manifest_of_tensors
from temper.errors import BackendError
from temper.types import Publication

Fault = Callable[[dict[str, Tensor]], None]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "layer.weight": torch.randn(4, 6, generator=generator),
        "layer.bias": torch.randn(4, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(2.0),
        "empty": torch.zeros(0, 3),
    }


def manifest(tensors: dict[str, Tensor], version: int = 3, *, is_summed: bool = False) -> Manifest:
    if is_summed:
        return manifest_of_tensors(version, tensors.items(), is_summed=True)
    return manifest_of(Publication(version=version, tensors=tensors))


def scramble_one_bit(tensors: dict[str, Tensor]) -> None:
    tensors["layer.bias"].view(torch.int16)[2] ^= 1


def transpose(tensors: dict[str, Tensor]) -> None:
    tensors["layer.weight"] = tensors["layer.weight"].T


def test_the_same_weights_have_no_differences() -> None:
    assert differences(manifest(weights()), manifest(weights())) == []
    check_received(manifest(weights()), manifest(weights()))


@pytest.mark.parametrize("is_summed", [False, True])
def test_strides_order_and_device_layout_do_not_matter(is_summed: bool) -> None:
    strided = dict(reversed(weights().items()))
    strided["layer.weight"] = strided["layer.weight"].T.contiguous().T
    assert not strided["layer.weight"].is_contiguous()
    assert manifest(strided, is_summed=is_summed) == manifest(weights(), is_summed=is_summed)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda tensors: tensors.pop("scale"), "scale is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra was not published"),
        (scramble_one_bit, "layer.bias holds other numbers"),
        (transpose, r"layer.weight is \(6, 4\) float32 and should be \(4, 6\) float32"),
        (lambda tensors: tensors.update(scale=tensors["scale"].double()), r"scale is \(\) float64"),
        (lambda tensors: tensors["layer.weight"].neg_(), "layer.weight holds other numbers"),
    ],
)
@pytest.mark.parametrize("is_summed", [False, True])
def test_every_fault_of_a_delivery_is_named(fault: Fault, says: str, is_summed: bool) -> None:
    arrived = weights()
    fault(arrived)
    with pytest.raises(BackendError, match=says):
        check_received(manifest(weights(), is_summed=is_summed), manifest(arrived, is_summed=is_summed))


def test_sums_and_hashes_are_no_proof_of_each_other() -> None:
    assert manifest(weights(), is_summed=True).is_summed
    assert not manifest(weights()).is_summed
    assert len(differences(manifest(weights()), manifest(weights(), is_summed=True))) == len(weights())


def test_a_tensor_under_the_name_of_another_is_noticed() -> None:
    one, other = torch.zeros(2), torch.ones(2)
    assert len(differences(manifest({"a": one, "b": other}), manifest({"a": other, "b": one}))) == 2


def test_an_old_version_is_no_acknowledgement() -> None:
    with pytest.raises(BackendError, match="version is 2 and should be 3"):
        check_received(manifest(weights()), manifest(weights(), version=2))


def test_a_long_list_of_differences_is_cut_and_counted() -> None:
    many = {f"w{place}": torch.zeros(1) for place in range(9)}
    with pytest.raises(BackendError, match="w4 is missing and 4 more"):
        check_received(manifest(many), manifest({}))


def test_a_manifest_survives_json() -> None:
    assert Manifest.from_json(manifest(weights()).to_json()) == manifest(weights())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "sha256": "", "tensors": [1]}'])
def test_text_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(BackendError, match="no manifest"):
        Manifest.from_json(text)


def test_a_manifest_that_lost_a_tensor_on_the_way_is_refused() -> None:
    written = manifest({"a": torch.zeros(1)}).to_json()
    with pytest.raises(BackendError, match="own hash"):
        Manifest.from_json(written.replace('"a"', '"b"'))


def test_no_tensors_are_a_manifest_too() -> None:
    assert Manifest.from_json(manifest({}).to_json()).tensors == {}
