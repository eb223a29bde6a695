"""A publication holds every weight once, and shares storage with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from temper.trainer.weights import publish


def test_every_parameter_is_published_under_its_name_and_shares_storage(make_model: Callable[..., Any]) -> None:
    model = make_model()
    publication = publish(model, version=7)
    assert publication.version == 7
    assert set(publication.tensors) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert publication.tensors[name].data_ptr() == parameter.data_ptr()
        assert not publication.tensors[name].requires_grad


def test_tied_weights_appear_once(make_model: Callable[..., Any]) -> None:
    tensors = publish(make_model("tied_llama"), version=0).tensors
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors


def test_buffers_are_published_only_when_a_checkpoint_holds_them(make_model: Callable[..., Any]) -> None:
    model = make_model()
    model.register_buffer("scale", torch.ones(2))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    tensors = publish(model, version=0).tensors
    assert "scale" in tensors
    assert "scratch" not in tensors
