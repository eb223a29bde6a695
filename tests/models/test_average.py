"""Guarantee: every parameter of an average is the exact mean, rounded once, and unlike models have none.

Planted fault: sums in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from temper.errors import UserError
from temper.models import average
from temper.models.average import PROVENANCE, average_checkpoints
from temper.models.load import load_model, load_tokenizer
from temper.models.save import save_model
from temper.models.tiny import make_tiny_model


def tiny(folder: Path, seed: int, *, alphabet: str = "abcdefghij", layers: int = 1, width: int = 16) -> Path:
    return make_tiny_model(
        folder, layers=layers, width=width, heads=2, kv_heads=1, mlp_width=32, context=32, alphabet=alphabet, seed=seed
    )


def in_bfloat16(folder: Path, out: Path, **how: Any) -> Path:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    out.mkdir()
    model.save_pretrained(out, **how)
    load_tokenizer(folder).save_pretrained(out)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def exact_mean(folders: list[Path]) -> dict[str, torch.Tensor]:
    own = [weights(folder) for folder in folders]
    return {n: (sum(w[n].double() for w in own) / len(own)).to(own[0][n].dtype) for n in own[0]}  # type: ignore[union-attr]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [tiny(tmp_path / f"m{seed}", seed) for seed in range(3)]


def test_the_average_is_the_mean_of_every_parameter_and_loads_as_any_model(three: list[Path], tmp_path: Path) -> None:
    out = average_checkpoints(three, tmp_path / "out", facts={"chosen_by": "pass@8"})
    found, wanted = weights(out), exact_mean(three)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model = load_model(out, torch.float32, torch.device("cpu"))
    loaded = dict(model.named_parameters())
    assert torch.equal(loaded["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"])
    assert load_tokenizer(out).chat_template == load_tokenizer(three[0]).chat_template
    record = json.loads((out / PROVENANCE).read_text())
    assert record["chosen_by"] == "pass@8"
    assert [source["path"] for source in record["sources"]] == [str(folder) for folder in three]
    assert sum(source["share"] for source in record["sources"]) == pytest.approx(1.0)
    assert all(len(sha) == 64 for source in record["sources"] for sha in source["sha256"].values())


def test_a_checkpoint_given_twice_counts_twice(three: list[Path], tmp_path: Path) -> None:
    out = average_checkpoints([three[0], three[1], three[0]], tmp_path / "out")
    wanted = exact_mean([three[0], three[0], three[1]])
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(out).items())
    shares = {Path(s["path"]).name: s["share"] for s in json.loads((out / PROVENANCE).read_text())["sources"]}
    assert shares == {"m0": 2 / 3, "m1": 1 / 3}


def test_the_average_of_one_checkpoint_is_itself_to_the_bit(three: list[Path], tmp_path: Path) -> None:
    found = weights(average_checkpoints(three[:1], tmp_path / "out"))
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(three[0]).items())


def test_bfloat16_checkpoints_are_rounded_once(three: list[Path], tmp_path: Path) -> None:
    narrow = [in_bfloat16(folder, tmp_path / f"b{place}") for place, folder in enumerate(three)]
    out = average_checkpoints(narrow, tmp_path / "out")
    found, wanted = weights(out), exact_mean(narrow)
    assert all(tensor.dtype is torch.bfloat16 for tensor in found.values())
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_sums_in_bfloat16_would_be_seen(three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(name: str, readers: dict[Path, average.Reader], counts: dict[Path, int]) -> torch.Tensor:
        total = sum(read(name) * counts[source] for source, read in readers.items())
        assert isinstance(total, torch.Tensor)
        return total / sum(counts.values())

    monkeypatch.setattr(average, "_mean", careless)
    with pytest.raises(AssertionError):
        test_bfloat16_checkpoints_are_rounded_once(three, tmp_path)


def test_checkpoints_of_two_precisions_become_float32(three: list[Path], tmp_path: Path) -> None:
    narrow = in_bfloat16(three[1], tmp_path / "narrow")
    out = average_checkpoints([narrow, three[0]], tmp_path / "out")
    wide, own = weights(narrow), weights(three[0])
    for name, tensor in weights(out).items():
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, ((wide[name].double() + own[name].double()) / 2).float())
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"


def test_files_split_in_another_way_hold_the_same_model(three: list[Path], tmp_path: Path) -> None:
    split = in_bfloat16(three[1], tmp_path / "split", max_shard_size="2KB")
    assert len(list(split.glob("*.safetensors"))) > 1
    plain = in_bfloat16(three[0], tmp_path / "plain")
    wanted = exact_mean([plain, split])
    for place, order in enumerate(([plain, split], [split, plain])):
        out = average_checkpoints(order, tmp_path / f"out{place}")
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(out).items())
        assert len(weights(out)) == len(wanted)
        load_model(out, torch.float32, torch.device("cpu"))


def test_unlike_models_have_no_average(three: list[Path], tmp_path: Path) -> None:
    other_letters = tiny(tmp_path / "letters", 0, alphabet="klmnopqrst")
    wider = tiny(tmp_path / "wider", 0, width=32)
    for other, message in ((other_letters, "different tokenizers"), (wider, "hidden_size 16 and 32")):
        with pytest.raises(UserError, match=message):
            average_checkpoints([three[0], other], tmp_path / "out")
    changed = load_tokenizer(three[1])
    changed.chat_template += " "
    save_model(load_model(three[1], torch.float32, torch.device("cpu")), changed, tmp_path / "template")
    with pytest.raises(UserError, match="chat templates"):
        average_checkpoints([three[0], tmp_path / "template"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp*"))


def rewritten(folder: Path, change: Any) -> None:
    own = weights(folder)
    change(own)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own["lm_head.weight"].__setitem__((0, 0), float("nan")), "not finite"),
        (lambda own: own.pop("lm_head.weight"), "different tensors: 1 differ, e.g. lm_head.weight"),
        (lambda own: own.update({"lm_head.weight": own["lm_head.weight"][:3].clone()}), "has shape"),
    ],
)
def test_damaged_weights_are_named(three: list[Path], tmp_path: Path, change: Any, message: str) -> None:
    rewritten(three[1], change)
    with pytest.raises(UserError, match=message):
        average_checkpoints(three, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp*")), "a failure leaves nothing"


def test_what_cannot_be_averaged_is_refused_before_anything_is_written(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        average_checkpoints([], tmp_path / "out")
    with pytest.raises(UserError, match="not empty"):
        average_checkpoints(three, three[0])
    (three[2] / "model.safetensors").unlink()
    (three[2] / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter: merge it first"):
        average_checkpoints(three, tmp_path / "out")
