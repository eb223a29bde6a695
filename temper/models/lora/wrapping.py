"""LoRA adapters through peft: little to train and to store, on a model that never changes.

Owns: adding an adapter, the merged weights, the same model without it, adapter directories in peft's format and the
record of the model they belong to. Refuses: dropout (sampler and trainer would disagree), training, the arithmetic of a
layer (low_rank.py).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from temper.errors import BackendError, UserError, install_line
from temper.folders.integrity import verify
from temper.models.lora.low_rank import ADAPTER, base_weight, is_adapted, merged_weight
from temper.models.lora.targets import EXPERT_WEIGHTS, EXPERTS, adapted_weights, plain_name, weights_to_adapt
from temper.models.nf4.holding import hold_in_four_bits, hold_in_full, whole_linear
from temper.models.nf4.layers import FourBitLinear, holds_four_bits
from temper.models.save import save_description, saved_tensors

WEIGHTS, CONFIG, ORIGIN = "adapter_model.safetensors", "adapter_config.json", "origin.json"
PREFIX = "base_model.model."
"""In front of every name in peft's files."""

LoadModel = Callable[[Path, torch.dtype, torch.device], nn.Module]
Base = Literal["full", "4bit"]
"""How the frozen model under an adapter is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    rank: int = 16
    alpha: float = 32.0
    """The product of both factors counts alpha / rank times; with rslora alpha / sqrt(rank) times."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, e.g. ("q_proj", "v_proj"), and "experts" for factors of this rank on every expert. Empty:
    every linear layer of attention and feed-forward, which experts are not."""
    rslora: bool = False
    seed: int = 0
    """Seed of the first factor; the second starts at zero, so that training starts at the model itself."""

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise UserError(f"model.lora: rank={self.rank} and alpha={self.alpha} must be positive, e.g. 16 and 32")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOrigin:
    """The model that an adapter belongs to, so that it is never put on another one."""

    path: str
    dtype: str
    """That of the trained policy, whose merged weights are rounded to it."""
    sha256: Mapping[str, str]
    """Digests of its configuration and of every file of weights, by name of the file."""
    relative: str = ""
    """The same path as seen from the adapter's directory: a run that is moved as a whole stays usable."""
    base: Base = "full"
    """How the model was held while the adapter was trained: in 4 bits it is another one."""

    @staticmethod
    def of(folder: Path, dtype: torch.dtype, base: Base) -> AdapterOrigin:
        return AdapterOrigin(
            path=str(folder.resolve()), dtype=str(dtype).removeprefix("torch."), sha256=_digests(folder), base=base
        )

    def require(self, found: Mapping[str, str], where: str, checkpoint: Path) -> None:
        """UserError unless these are the digests of the same model. Where it lies does not matter."""
        for name in sorted({*self.sha256, *found}):
            if self.sha256.get(name) != found.get(name):
                raise UserError(
                    f"the adapter {checkpoint} was trained on {self.path}, and {where} is not that model: {name} "
                    f"differs. Put the original back, or train a new adapter"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What a model carries along when it has an adapter."""

    config: Mapping[str, Any]
    """As in adapter_config.json."""
    origin: AdapterOrigin


def has_adapter(model: Any) -> bool:
    return getattr(model, "temper_adapter", None) is not None


def load_base(folder: Path, dtype: torch.dtype, device: torch.device, *, load: LoadModel, base: Base) -> nn.Module:
    """The model to put an adapter on. In 4 bits it is read by the host and quantised on the device layer by layer."""
    if base == "full":
        return load(folder, dtype, device)
    return hold_in_four_bits(load(folder, dtype, torch.device("cpu")), device)


def is_adapter_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def add_adapter(model: Any, settings: AdapterSettings, folder: Path, *, whole: tuple[str, ...] = ()) -> nn.Module:
    """Puts an adapter into a model that was loaded from `folder`, and freezes everything else. Changes it in place.

    `whole`: submodules that are trained and stored as they are, such as the new head of a reward model. Embeddings and
    the language-model head stay what they are. Factors are float32: an update of bfloat16 ones would round away.
    """
    assert not has_adapter(model), "a model has one adapter"
    peft = _peft()
    wanted = weights_to_adapt(model, settings.targets)
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted({name.split(".")[-2] for name in wanted if name.endswith(".weight")}),
        target_parameters=list(EXPERT_WEIGHTS) if EXPERTS in settings.targets else None,
        use_rslora=settings.rslora,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(folder.resolve()),
    )
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):  # peft draws numbers, which are replaced below
        peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    adapted = adapted_weights(model)
    if adapted.keys() != wanted:
        raise BackendError(f"peft adapted other layers than asked for: {sorted(adapted.keys() ^ wanted)[:3]}")
    for name, module in adapted.items():
        _initialize(module, f"{settings.seed}/{name.removesuffix('.weight')}")
    for name in whole:
        model.get_submodule(name).requires_grad_(True)
    base: Base = "4bit" if holds_four_bits(model) else "full"
    model.temper_adapter = Adapter(config=_written(config, whole), origin=AdapterOrigin.of(folder, dtype, base))
    return model.eval()


def _initialize(module: Any, key: str) -> None:
    """Draws by the layer's name: the same numbers on every device, and whatever else is adapted."""
    down, up, weight = module.lora_A[ADAPTER], module.lora_B[ADAPTER], base_weight(module)
    if down.weight.shape[1] != weight.shape[-1]:
        raise BackendError("this version of peft lays factors of experts out the other way round. Install a newer one")
    dtype, device = torch.promote_types(weight.dtype, torch.float32), weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # numbers of a model that is read later
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big"))
    drawn = nn.init.kaiming_uniform_(torch.empty(down.weight.shape), a=math.sqrt(5), generator=generator)
    down.weight = nn.Parameter(drawn.to(device=device, dtype=dtype))
    up.weight = nn.Parameter(torch.zeros(up.weight.shape, dtype=dtype, device=device))


def _written(config: Any, whole: tuple[str, ...]) -> dict[str, Any]:
    """The configuration as peft reads it, the same bytes each time: peft keeps names in sets, and where a family was
    stored otherwise once makes an empty one of none."""
    made = config.to_dict() | {"modules_to_save": list(whole) or None, "inference_mode": True}
    made["target_parameters"] = made["target_parameters"] or None
    return json.loads(json.dumps({k: sorted(v) if isinstance(v, set) else v for k, v in made.items()}))  # type: ignore[no-any-return]


class MergedTensors(Mapping[str, Tensor]):
    """The weights of the adapted model under the names of the plain one. A merged weight is made when it is asked for
    and belongs to who asked: never more than one of them is held here, and the model keeps its own."""

    def __init__(self, model: nn.Module, read: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """read: a whole tensor, where the model holds a part."""
        assert not holds_four_bits(model), "a model in 4 bits is made whole first (fold)"
        self._read = read
        self._layers = adapted_weights(model)
        factors = {id(p) for m in self._layers.values() for p in (*m.lora_A.parameters(), *m.lora_B.parameters())}
        self._own = {
            plain_name(name): tensor for name, tensor in saved_tensors(model).items() if id(tensor) not in factors
        }

    @property
    def unmerged(self) -> dict[str, Tensor]:
        """The model's own tensors under the same names."""
        return {name: tensor.detach() for name, tensor in self._own.items()}

    def __getitem__(self, name: str) -> Tensor:
        with torch.no_grad():
            if name in self._layers:
                return merged_weight(self._layers[name], self._read)
            return self._read(self._own[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def without_adapter(model: nn.Module) -> nn.Module:
    """The model as it was before add_adapter, over the same tensors: a reference that costs no memory."""
    return _stripped(model, own=set())


def with_own_weights(model: nn.Module) -> nn.Module:
    """The same, with its own storage for the weights that the adapter changes: for an engine that is given merged
    weights, or a reference that moves. Everything else is shared."""
    layers: list[Any] = [module for module in model.modules() if is_adapted(module)]
    return _stripped(model, own={id(parameter) for layer in layers for parameter in layer.base_layer.parameters()})


def with_own_factors(model: nn.Module) -> nn.Module:
    """The same adapted model with its own storage for the factors alone: for an engine that draws over a base in 4 bits
    while the factors are trained."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers()) if not t.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)  # type: ignore[arg-type]


def _stripped(model: Any, own: set[int]) -> nn.Module:
    """A copy of the tree of modules without adapter layers. It shares all tensors but those of `own`, by id."""
    assert not model.temper_adapter.config["modules_to_save"], "what is trained whole has no state without adapter"
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in own}
    plain: Any = copy.deepcopy(model, shared)
    _unwrap(plain)
    return plain.requires_grad_(False)


def _unwrap(model: Any) -> None:
    """Puts the layers inside into the place of their adapters."""
    outermost = [(n, m) for n, m in model.named_modules() if is_adapted(m) and not n.endswith(".base_layer")]
    for name, module in outermost:
        model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    model.temper_adapter = None


@torch.no_grad()
def fold(model: Any) -> nn.Module:
    """The adapted model as an ordinary one, in place: merged weights, no adapter."""
    for module in [m for m in model.modules() if is_adapted(m)]:
        if isinstance(module.base_layer, FourBitLinear):
            module.base_layer = whole_linear(merged_weight(module), module.base_layer.bias)
        else:
            base_weight(module).data = merged_weight(module)
    _unwrap(model)
    return hold_in_full(model)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by name; these share the model's storage."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def save_adapter(model: Any, tokenizer: Any, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Writes a directory that peft and transformers read: factors, their configuration, tokenizer; no weights of the
    model itself, but what it is called and the digests it must have. tensors: what is trained, where the model does not
    hold it whole."""
    adapter: Adapter = model.temper_adapter
    trained = adapter_tensors(model) if tensors is None else tensors
    names = {_stored_name(name): tensor for name, tensor in trained.items()}
    save_file({name: names[name].contiguous() for name in sorted(names)}, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(adapter.config, indent=2, sort_keys=True))
    origin = replace(adapter.origin, relative=os.path.relpath(adapter.origin.path, folder.resolve()))
    (folder / ORIGIN).write_text(json.dumps(asdict(origin), indent=2, sort_keys=True))
    save_description(model, tokenizer, folder)


def read_adapter(folder: Path, model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names of this model. UserError unless it is an adapter made like this
    model's, on the same model."""
    config, origin = _read(folder)
    adapter: Adapter = model.temper_adapter
    origin.require(adapter.origin.sha256, adapter.origin.path, folder)
    for key in ("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "modules_to_save"):
        if config.get(key) != adapter.config[key]:
            raise UserError(
                f"the adapter {folder} has {key}={config.get(key)}, and this run's has {adapter.config[key]}. Set "
                f"model.lora to what it was, or start a new run from that checkpoint with model.path"
            )
    if origin.base != adapter.origin.base:
        raise UserError(
            f'the adapter {folder} was trained with model.lora.base="{origin.base}", and this run has '
            f'"{adapter.origin.base}": its model would be another one. Set it to what it was'
        )
    stored = load_file(folder / WEIGHTS)
    return {n: stored[_stored_name(n)] for n in adapter_tensors(model) if _stored_name(n) in stored}


def load_adapted(
    folder: Path, dtype: torch.dtype, device: torch.device, *, load: LoadModel, origin: Path | None = None
) -> nn.Module:
    """The model of an adapter directory with its adapter on. `origin`: where that model lies now, when it was moved."""
    config, record = _read(folder)
    places = [origin] if origin else [Path(record.path), folder / record.relative]
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise UserError(
            f"the adapter {folder} was trained on the model {places[0]}, which is not there. Put it back where it was, "
            f"or move the adapter along with it"
        )
    record.require(_digests(found), str(found), folder)
    settings = AdapterSettings(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=(*config["target_modules"], *([EXPERTS] if config.get("target_parameters") else [])),
        rslora=config["use_rslora"],
    )
    plain = load_base(found, dtype, device, load=load, base=record.base)
    model = add_adapter(plain, settings, found, whole=tuple(config["modules_to_save"] or ()))
    stored = read_adapter(folder, model)
    with torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            tensor.copy_(stored[name])
    return model


def load_merged(
    folder: Path, dtype: torch.dtype, device: torch.device, *, load: LoadModel, origin: Path | None = None
) -> nn.Module:
    """The model of an adapter directory as an ordinary one. Merged in the precision of training: what was trained."""
    model = fold(load_adapted(folder, trained_dtype(folder), device, load=load, origin=origin))
    for parameter in model.parameters():  # not model.to(dtype): that would round the frequencies of rotations
        parameter.data = parameter.data.to(dtype)
    return model


def trained_dtype(folder: Path) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, _read(folder)[1].dtype)
    return dtype


def _read(folder: Path) -> tuple[dict[str, Any], AdapterOrigin]:
    for name in (CONFIG, WEIGHTS, ORIGIN):
        if not (folder / name).is_file():
            raise UserError(f"{folder} has no {name}: it is not an adapter that Temper wrote")
    verify(folder)
    config = json.loads((folder / CONFIG).read_text())
    return config, AdapterOrigin(**json.loads((folder / ORIGIN).read_text()))


def _digests(folder: Path) -> dict[str, str]:
    """Digests of all files that make the model what it is; if it is an adapter, also of the record of its model."""
    paths = sorted(p for pattern in ("*.safetensors", "*.bin", "config.json", ORIGIN) for p in folder.glob(pattern))
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def content_digest(folder: Path) -> str:
    """A short digest of an adapter directory and of the model that it belongs to."""
    return hashlib.sha256(json.dumps(_digests(folder), sort_keys=True).encode()).hexdigest()[:12]


def _stored_name(name: str) -> str:
    return PREFIX + name.replace(f".{ADAPTER}.weight", ".weight")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora needs the package peft. Run: {install_line('lora')}") from error
    return peft
