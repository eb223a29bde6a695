"""A learned scalar reward: a sequence classifier with one output, in a Hugging Face directory.

Owns: kind "reward_model", batching across episodes, the scale of the scores. Refuses: downloads; training it; a head
that was never trained. The model has a thread of its own, so that episodes go on while it computes.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from temper.errors import UserError
from temper.folders.integrity import verify
from temper.folders.pretrained import read_pretrained
from temper.markers import markers_of
from temper.protocols import Reward
from temper.types import Message, Score, Task, Trajectory

SCALE_FILE = "temper_scale.json"
GATHER_SECONDS = 0.002
"""How long a batch that is not full waits for more."""
POLL_SECONDS = 1.0

In = TypeVar("In")
Out = TypeVar("Out")


class ConversationTooLong(Exception):
    """The conversation does not fit the model. A score of a part of it would be a score of another text."""


class Batcher(Generic[In, Out]):
    """Lays concurrent requests together, on one thread that computes `forward` of a list."""

    def __init__(self, forward: Callable[[list[In]], list[Out]], *, max_batch: int, deadline_seconds: float) -> None:
        if max_batch < 1 or deadline_seconds <= 0:
            raise UserError(f"max_batch={max_batch} must be at least 1, deadline_seconds={deadline_seconds:g} above 0.")
        self._forward = forward
        self._max_batch = max_batch
        self._deadline_seconds = deadline_seconds
        self._waiting: queue.SimpleQueue[tuple[Future[Out], In]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    async def call(self, request: In) -> Out:
        """TimeoutError past the deadline; what `forward` raised, otherwise."""
        with self._lock:
            if self._is_closed.is_set():
                raise RuntimeError("the model is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="reward model", daemon=True)
                self._thread.start()
        future: Future[Out] = Future()
        self._waiting.put((future, request))
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout=self._deadline_seconds)

    def close(self) -> None:
        self._is_closed.set()

    def _serve(self) -> None:
        while not self._is_closed.is_set():
            if batch := self._gather():
                self._answer(batch)

    def _gather(self) -> list[tuple[Future[Out], In]]:
        batch: list[tuple[Future[Out], In]] = []
        patience = POLL_SECONDS
        while len(batch) < self._max_batch:
            try:
                future, request = self._waiting.get(timeout=patience)
            except queue.Empty:
                break
            if future.set_running_or_notify_cancel():  # else its deadline has passed
                batch.append((future, request))
            patience = GATHER_SECONDS
        return batch

    def _answer(self, batch: list[tuple[Future[Out], In]]) -> None:
        try:
            answers = self._forward([request for _, request in batch])
            assert len(answers) == len(batch), "a model must answer every request"
        except Exception as error:  # the rim: a thread that dies would leave its futures waiting
            for future, _ in batch:
                future.set_exception(error)
            return
        for (future, _), answer in zip(batch, answers, strict=True):
            future.set_result(answer)


def load_classifier(path: str, device: str, *, where: str) -> tuple[Any, Any, bool]:
    """Model and tokenizer of a local directory, and whether it classifies each token."""
    import transformers  # here: it takes seconds, and most recipes have no learned reward

    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f'{where}: path="{path}" has no config.json. Give a Hugging Face directory on this machine.')
    verify(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        is_per_token = (config.architectures or [""])[0].endswith("ForTokenClassification")
        kind = "AutoModelForTokenClassification" if is_per_token else "AutoModelForSequenceClassification"
        model, info = read_pretrained(getattr(transformers, kind), folder, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last: torch without CUDA
        raise UserError(f'{where}: path="{path}" cannot be loaded ({error}).') from error
    if missing := sorted(info["missing_keys"]):
        # transformers would fill them with random numbers and only warn: a reward of noise.
        raise UserError(f'{where}: path="{path}" lacks weights {", ".join(missing[:3])}. Train its head first.')
    return model.requires_grad_(False), tokenizer, is_per_token


def run_padded(model: Any, rows: Sequence[Sequence[int]], pad_id: int) -> Tensor:
    """The model's logits. Padded on the right with an id that none of the rows contains.

    Sequence classifiers look for the last token that is not padding: where the padding is also the end of a turn, as
    in many tokenizers, they would read the score one token too early.
    """
    used = {token for row in rows for token in row}
    if pad_id in used:
        pad_id = next(token for token in range(model.config.get_text_config().vocab_size) if token not in used)
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad_id] * (width - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    model.config.get_text_config().pad_token_id = pad_id
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=mask).logits.float().cpu()  # type: ignore[no-any-return]


def conversation_of(task: Task, trajectory: Trajectory) -> list[Message]:
    said = [message for turn in trajectory.turns for message in (turn.message, *turn.replies)]
    return [*task.messages, *said]


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    for_generation: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Ids of the conversation in the tokenizer's own chat template, with the tools that were there, if it shows any."""
    conversation = [
        {name: spell_out(tokenizer, text) for name, text in message.as_dict().items()} for message in messages
    ]
    shown = {"tools": json.loads(spell_out(tokenizer, json.dumps(list(tools), ensure_ascii=False)))} if tools else {}
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=for_generation, **shown)
    return encode(tokenizer, str(text))


def encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def spell_out(tokenizer: Any, text: str) -> str:
    """Control tokens in the text taken apart: a response must not end its own turn and begin a better one."""
    return markers_of(tokenizer).take_apart(text)


def require_room(ids: Sequence[int], model: Any) -> None:
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and len(ids) > room:
        raise ConversationTooLong(f"the conversation has {len(ids)} tokens and the reward model takes {room}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Constants of a calibration set: the reward is (score - mean) / std."""

    mean: float = 0.0
    std: float = 1.0

    def apply(self, score: float) -> float:
        return (score - self.mean) / self.std


def read_scale(folder: Path, mean: float, std: float, *, where: str) -> Scale:
    """From the options when std is given, else from the file beside the weights, else the scores as they are."""
    found: Mapping[str, float] = {"mean": mean, "std": std}
    if not std:
        path = folder / SCALE_FILE
        if not path.is_file():
            if mean:
                raise UserError(f"{where}: mean={mean} without std. Give both, or neither.")
            return Scale()
        try:
            row = json.loads(path.read_text())
            found = {"mean": float(row["mean"]), "std": float(row["std"])}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f'{path}: must be {{"mean": ..., "std": ...}} ({error!r}).') from error
    if not all(map(math.isfinite, found.values())) or found["std"] <= 0:
        raise UserError(f"{where}: mean={found['mean']} and std={found['std']} must be finite and std above 0.")
    return Scale(mean=found["mean"], std=found["std"])


class RewardModelReward(Reward):
    """The classifier's one output for the whole conversation, standardised."""

    name = "reward_model"

    def __init__(
        self,
        *,
        path: str,
        device: str = "cpu",
        max_batch: int = 1,
        deadline_seconds: float = 120.0,
        mean: float = 0.0,
        std: float = 0.0,
    ) -> None:
        """`max_batch`: conversations of one pass. With more than one a score depends in its last digits on who else
        asked just then, and no run repeats to the bit."""
        where = f'reward "{self.name}"'
        self._model, self._tokenizer, is_per_token = load_classifier(path, device, where=where)
        if is_per_token or self._model.config.num_labels != 1:
            outputs = f"{self._model.config.num_labels} outputs{' per token' if is_per_token else ''}"
            raise UserError(f'{where}: path="{path}" has {outputs}; a reward is one number.')
        if not self._tokenizer.chat_template:
            raise UserError(f'{where}: path="{path}" has no chat template. Put a chat_template.jinja into it.')
        self.scale = read_scale(Path(path).expanduser(), mean, std, where=where)
        self._batcher: Batcher[list[int], float] = Batcher(
            self._forward, max_batch=max_batch, deadline_seconds=deadline_seconds
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        try:
            ids = encode_chat(self._tokenizer, conversation_of(task, trajectory), tools=trajectory.tools)
            require_room(ids, self._model)
            raw = await self._batcher.call(ids)
        except ConversationTooLong as error:
            return Score.unscorable(str(error))
        except TimeoutError:
            return Score.error("the reward model did not answer in time")
        if not math.isfinite(raw):
            return Score.error(f"the reward model says {raw}")
        return Score.of(self.scale.apply(raw))

    async def close(self) -> None:
        self._batcher.close()

    def _forward(self, rows: list[list[int]]) -> list[float]:
        pad_id = self._tokenizer.pad_token_id or 0
        return [float(score) for score in run_padded(self._model, rows, pad_id)[:, 0]]
