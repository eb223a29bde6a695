"""Checkpoints and data sets that a recipe names: folders and files that are here, or names on Hugging Face's hub.

Owns: what a hub name is ("Qwen/Qwen2.5-0.5B", "openai/gsm8k:main/test"), what of a repository is fetched, and what is
said where it cannot be. Refuses: code that comes with a repository (only weights, tokenizers and rows are asked for),
and every other connection: models are read from folders.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from temper.errors import UserError, did_you_mean, nearest_file
from temper.folders.integrity import verify
from temper.terminal import SafeConsole

DESCRIPTION_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""What says what a checkpoint is, and its tokenizer: megabytes, where weights may be a terabyte."""
MODEL_FILES = (*DESCRIPTION_FILES, "*.safetensors")
"""What a checkpoint is made of. Python files of a repository are left where they are."""
ROW_FILES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
OWN_FOLDERS = ("models", "runs", "data", "checkpoints", "recipes")
"""First parts of paths that are meant to be here, also where they are not yet."""
USUAL_CONFIGURATIONS = ("", "default", "main")
"""Of a data set with several: what is taken where none is named, in this order."""
_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_MODEL = re.compile(_NAME)
_ROWS = re.compile(rf"(?P<name>{_NAME})(?::(?:(?P<configuration>[^/:]+)/)?(?P<split>[^/:]+))?")
_SHARD = re.compile(r"(-\d+-of-\d+)?(-[0-9a-f]{16})?$")
REQUEST_SECONDS = 10.0
"""How long the hub may take to say what a repository holds."""


def find_checkpoint(path: str, key: str = "model.path", *, has_weights: bool = True) -> Path:
    """The directory of a checkpoint, fetched if its name is one of the hub's. UserError says what is missing.

    has_weights: False for who reads only what the model is made of: no weights are fetched then.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and is_model_name(path):
        folder = fetch_model(path, key, has_weights=has_weights)
    if not folder.is_dir():
        raise UserError(
            f'{key} "{path}" is not a directory.{nearest_file(folder)} Give a Hugging Face checkpoint directory, its '
            f'name on the hub, or make one with "temper model fetch smollm2-135m --out {path}"'
        )
    if not (folder / "config.json").is_file():
        instead = _say_checkpoints(path) if (folder / "run.db").is_file() else "so it is not a Hugging Face checkpoint"
        raise UserError(f'{key} "{path}" has no config.json, {instead}')
    verify(folder)
    return folder


def _say_checkpoints(run: str) -> str:
    """What to give in place of a run, which is no checkpoint: what is its newest changes while it trains, and whoever
    begins with it must find the same when it is resumed."""
    newest = dict[str, tuple[int, str]]()
    for file in Path(run).expanduser().glob("checkpoints/*-*/step-*/config.json"):
        step, stage = file.parent.name, file.parent.parent.name
        newest[stage] = max(newest.get(stage, (-1, "")), (int(step.partition("-")[2]), step))
    stages = sorted(newest, key=lambda stage: int(stage.partition("-")[0]))
    found = ", ".join(f'"{run.rstrip("/")}/checkpoints/{stage}/{newest[stage][1]}"' for stage in stages)
    return f"for it is a run. Give one of its checkpoints: {found or 'it has none yet'}"


def is_model_name(text: str) -> bool:
    """Whether a text that is no folder here can be the name of a model on the hub: "owner/name"."""
    return bool(_MODEL.fullmatch(text)) and not _is_meant_here(text)


def _is_meant_here(text: str) -> bool:
    """A misspelt folder is none of the hub's business."""
    folders = {*OWN_FOLDERS, *(path.name for path in Path().iterdir() if path.is_dir())}
    is_near = difflib.get_close_matches(text.partition("/")[0], folders, n=1, cutoff=0.8)
    return bool(is_near) or text.endswith(ROW_FILES)


def fetch_model(name: str, key: str = "model.path", *, has_weights: bool = True) -> Path:
    """The folder of a model of the hub, in the hub's own cache.

    What was fetched once is used again, unasked: a run that is resumed must not find that its model has changed.
    """
    target = f"models/{name.partition('/')[2]}"
    advice = f"hf download {name} --local-dir {target} and then give {target}"
    hub = _import_hub(f'{key} "{name}"', advice)
    cached = _cached(hub, name)
    if cached is not None and (_is_whole(cached) if has_weights else (cached / "config.json").is_file()):
        return cached
    _say(f"fetching {name}{'' if has_weights else ', without its weights,'} from the hub")
    wanted = list(MODEL_FILES if has_weights else DESCRIPTION_FILES)
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=wanted, etag_timeout=REQUEST_SECONDS))
    except Exception as error:  # each version of the package has exceptions of its own
        _refuse(f'{key} "{name}"', error, advice)
    _say(f"{name} is in {folder}")
    return folder


def _cached(hub: Any, name: str, repo_type: str = "model") -> Path | None:
    """What was fetched before, perhaps in part."""
    try:
        return Path(hub.snapshot_download(name, repo_type=repo_type, local_files_only=True))
    except Exception:  # each version of the package has an exception of its own for "nothing"
        return None


def _is_whole(folder: Path) -> bool:
    """Whether all weights are there: a download that was interrupted leaves some of them."""
    index = folder / "model.safetensors.index.json"
    weights = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return all((folder / file).is_file() for file in ("config.json", *weights))


@dataclass(frozen=True, slots=True)
class RowsName:
    """A data set of the hub: "owner/name", "owner/name:split" or "owner/name:configuration/split"."""

    name: str
    configuration: str
    """Empty: the data set's only one, "default" or "main"."""
    split: str
    """Empty: train."""


def rows_name(text: str) -> RowsName | None:
    """What a text names on the hub; None: a file or folder that is here, or is meant to be."""
    found = _ROWS.fullmatch(text)
    if found is None or Path(text).expanduser().exists() or _is_meant_here(text):
        return None
    return RowsName(found["name"], found["configuration"] or "", found["split"] or "")


def fetch_rows(wanted: RowsName) -> list[Path]:
    """The files of one split, in order. Those that were fetched once are used again, unasked."""
    target = f"data/{wanted.name.partition('/')[2]}"
    advice = f"hf download {wanted.name} --repo-type dataset --local-dir {target} and then give a file of {target}"
    hub = _import_hub(f'data set "{wanted.name}"', advice)
    if files := _cached_rows(_cached(hub, wanted.name, "dataset"), wanted):
        return files
    _say(f"fetching {wanted.name} from the hub")
    try:
        listed = hub.dataset_info(wanted.name, timeout=REQUEST_SECONDS).siblings
        chosen = choose_files(wanted, [file.rfilename for file in listed])
        folder = Path(hub.snapshot_download(wanted.name, repo_type="dataset", allow_patterns=chosen))
    except UserError:
        raise
    except Exception as error:
        _refuse(f'data set "{wanted.name}"', error, advice)
    _say(f"{wanted.name} is in {folder}")
    return [folder / file for file in chosen]


def _cached_rows(folder: Path | None, wanted: RowsName) -> list[Path]:
    """The split's files in an earlier copy; none, if it is not there or not all of it is."""
    if folder is None:
        return []
    try:
        files = choose_files(wanted, [path.relative_to(folder).as_posix() for path in folder.rglob("*")])
    except UserError:
        return []
    shards = re.search(r"-of-(\d+)", files[0])
    return [folder / file for file in files] if len(files) == (int(shards[1]) if shards else len(files)) else []


def choose_files(wanted: RowsName, files: Iterable[str]) -> list[str]:
    """Files of the split that is wanted. UserError lists what there is."""
    table: dict[str, dict[str, list[str]]] = {}
    for file in sorted(file for file in files if file.endswith(ROW_FILES)):
        configuration, split = _place_of(file)
        table.setdefault(configuration, {}).setdefault(split, []).append(file)
    if not table:
        raise UserError(
            f'data set "{wanted.name}" has no {", ".join(ROW_FILES)} files. Bring its rows into one and give its path'
        )
    usual = [name for name in USUAL_CONFIGURATIONS if name in table] or (list(table) if len(table) == 1 else [])
    configuration = wanted.configuration or (usual[0] if usual else "")
    if configuration not in table:
        _list_names(wanted, "configuration", configuration, table)
    splits = table[configuration]
    if (split := wanted.split or "train") not in splits:
        _list_names(wanted, "split", split, splits, before=f"{configuration}/" if configuration else "")
    return splits[split]


def _place_of(file: str) -> tuple[str, str]:
    """Configuration and split of a file: "main/train-00000-of-00002.parquet", "data/test.jsonl", "all/train/0.json"."""
    *folders, name = file.split("/")
    split = _SHARD.sub("", name[: -len(next(ending for ending in ROW_FILES if name.endswith(ending)))])
    if split.isdecimal() and folders:
        split = folders.pop()
    return "/".join(folder for folder in folders if folder != "data"), split


def _list_names(wanted: RowsName, what: str, name: str, known: Iterable[str], before: str = "") -> NoReturn:
    names = sorted(known)
    first = f"{names[0]}/train" if what == "configuration" else f"{before}{names[0]}"
    has = f'has no {what} "{name}"' if name else f"has several {what}s"
    raise UserError(
        f'data set "{wanted.name}" {has}.{did_you_mean(name, names) if name else ""} There are: {", ".join(names)}. '
        f'Write e.g. path = "{wanted.name}:{first}"'
    )


def _import_hub(what: str, advice: str) -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{what} is not here, and without the package huggingface_hub it cannot be fetched. Where that is "
            f"installed: {advice}"
        ) from error
    return huggingface_hub


def _refuse(what: str, error: Exception, advice: str) -> NoReturn:
    first = str(error).strip().partition("\n")[0]
    raise UserError(
        f"{what} is not here, and could not be fetched from the hub ({type(error).__name__}: {first:.160}). Where "
        f"the hub can be reached: {advice}"
    ) from error


def _say(line: str) -> None:
    SafeConsole(stderr=True, soft_wrap=True).print(line, highlight=False)
