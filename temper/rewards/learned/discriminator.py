"""A reward that learns to tell the student's text from the teacher's: distillation from text alone.

Owns: kind "discriminator": a classifier with one output, its training by trained groups, and its files in a checkpoint.
The student is rewarded by D(y_student). Refuses: a teacher's log-probabilities (objectives/), tasks without an answer.
Experimental: GAD, arXiv 2511.10643, is known from its project page only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import logsigmoid

from temper.errors import BackendError, TaskError, UserError
from temper.folders.pretrained import read_pretrained
from temper.protocols import Reward
from temper.rewards.learned.model import Batcher, ConversationTooLong, conversation_of, encode_chat, require_room
from temper.types import Group, Message, Scalar, Score, Task, Trajectory

WEIGHTS, MOMENTS = "discriminator.safetensors", "discriminator_moments.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW remembers of a parameter."""

Row = list[int]


@dataclass(frozen=True, slots=True)
class TextPair:
    """One example: what the teacher wrote, and what the student wrote in its place."""

    teacher: Row
    students: list[Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What one group taught."""

    loss: float
    accuracy: float
    """Share of the students' texts that were told from the teacher's before the update. At 1 the student gets no
    gradient of use: it cannot see which of its bad texts is better."""


class DiscriminatorReward(Reward):
    """D of the whole conversation, at its last token.

    All work is done one conversation at a time on one thread: a score does not depend on what else was asked, and an
    update never meets a score halfway.
    """

    name = "discriminator"
    learns = True

    def __init__(
        self,
        *,
        path: str,
        device: str = "cpu",
        learning_rate: float = 1e-5,
        warmup_groups: int = 0,
        max_grad_norm: float = 1.0,
        deadline_seconds: float = 300.0,
    ) -> None:
        """`path`: a sequence classifier with one output, or a language model that gets a head of zeros. Until
        `warmup_groups` groups have taught it, every text is worth 0 and only the discriminator learns."""
        where = f'reward "{self.name}"'
        if learning_rate <= 0 or warmup_groups < 0 or max_grad_norm <= 0:
            raise UserError(
                f"{where}: learning_rate={learning_rate:g} and max_grad_norm={max_grad_norm:g} must be above 0, "
                f"warmup_groups={warmup_groups} at least 0."
            )
        self._model, self._tokenizer = _load(path, device, where)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0, foreach=False)
        self._warmup_groups, self._max_grad_norm = warmup_groups, max_grad_norm
        self._groups_seen = 0
        self._batcher: Batcher[Row | TextPair, float | Learned] = Batcher(
            self._work, max_batch=1, deadline_seconds=deadline_seconds
        )

    async def score(self, task: Task, trajectory: Trajectory) -> Score:
        if self._groups_seen < self._warmup_groups:
            return Score.of(0.0)
        try:
            raw = cast(float, await self._batcher.call(self._encode(conversation_of(task, trajectory))))
        except ConversationTooLong as error:
            return Score.unscorable(str(error))
        except TimeoutError:
            return Score.error("the discriminator did not answer in time")
        return Score.of(raw) if math.isfinite(raw) else Score.error(f"the discriminator says {raw}")

    async def evolve(self, group: Group) -> Learned | None:
        """One optimiser step on (teacher's text, member's text) for every scored member. None: no text fits."""
        self._groups_seen += 1
        try:
            pairs = self._pairs(group)
            return cast(Learned, await self._batcher.call(pairs)) if pairs is not None else None
        except TimeoutError as error:
            raise TaskError(f"the discriminator did not learn from group {group.id} in time") from error

    def _pairs(self, group: Group) -> TextPair | None:
        """None: nothing to compare. Files are checked when they are read; a generator may still say too much."""
        students = []
        try:
            teacher = self._encode(_taught(group.task))
        except ConversationTooLong:
            return None
        for member in group.trainable:
            try:
                students.append(self._encode(conversation_of(group.task, member)))
            except (
                ConversationTooLong
            ):  # scored in warm-up, when nobody reads it; afterwards such a member is unscorable
                continue
        return TextPair(teacher, students) if students else None

    def _encode(self, messages: Sequence[Message]) -> Row:
        ids = encode_chat(self._tokenizer, messages)
        require_room(ids, self._model)
        return ids

    def _work(self, asked: list[Row | TextPair]) -> list[float | Learned]:
        return [self._learn(one) if isinstance(one, TextPair) else self._read(one) for one in asked]

    @torch.no_grad()
    def _read(self, row: Row) -> float:
        return float(score_of(self._model, row))

    def _learn(self, pairs: TextPair) -> Learned:
        """Scores first, then one row after another backward: never more than one row's activations at once."""
        rows = [pairs.teacher, *pairs.students]
        scores = torch.tensor([self._read(row) for row in rows], requires_grad=True)
        loss = discriminator_loss(scores[0], scores[1:])
        (slopes,) = torch.autograd.grad(loss, scores)
        self._optimizer.zero_grad(set_to_none=True)
        for row, slope in zip(rows, slopes.tolist(), strict=True):
            (slope * score_of(self._model, row)).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm, foreach=False)
        if not torch.isfinite(norm):
            raise BackendError(f"the discriminator's gradient is {float(norm)}. Use a lower learning_rate")
        self._optimizer.step()
        return Learned(loss=loss.item(), accuracy=(scores[0] > scores[1:]).double().mean().item())

    def check(self, task: Task) -> str | None:
        if not (task.answer or "").strip():
            return "it has no answer, which is the teacher's text"
        try:
            self._encode(_taught(task))
        except ConversationTooLong as error:
            return f"the teacher's text does not fit: {error}"
        return None

    def state(self) -> dict[str, Scalar | list[Scalar]]:
        return {"groups_seen": self._groups_seen}

    def load_state(self, state: Mapping[str, Scalar | list[Scalar]]) -> None:
        self._groups_seen = int(cast(int, state["groups_seen"]))

    def save(self, folder: Path) -> None:
        """Weights and moments."""
        folder.mkdir(parents=True, exist_ok=True)
        named = {name: p.detach().cpu().contiguous() for name, p in self._model.named_parameters()}
        save_file(named, folder / WEIGHTS)
        save_file(self._moments(), folder / MOMENTS)

    def load(self, folder: Path) -> None:
        """Goes on from save(), to the bit."""
        try:
            weights, moments = load_file(folder / WEIGHTS), load_file(folder / MOMENTS)
        except OSError as error:
            raise UserError(f"{folder} holds no discriminator to continue ({error})") from error
        parameters = dict(self._model.named_parameters())
        if shapes(weights) != shapes(parameters):
            raise UserError(f"{folder} holds a discriminator of another shape. Restore the reward's path")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
                found = {key: moments[f"{name}/{key}"] for key in _MOMENTS if f"{name}/{key}" in moments}
                # The count of steps stays on the CPU, as AdamW keeps it.
                self._optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in found.items()
                }

    def _moments(self) -> dict[str, Tensor]:
        """Empty before the first update."""
        return {
            f"{name}/{key}": self._optimizer.state[parameter][key].detach().cpu().contiguous()
            for name, parameter in self._model.named_parameters()
            for key in _MOMENTS
            if key in self._optimizer.state.get(parameter, {})
        }

    async def close(self) -> None:
        self._batcher.close()


def discriminator_loss(teacher_score: Tensor, student_scores: Tensor) -> Tensor:
    """Mean of -logsig(D(y_teacher) - D(y_student))."""
    return -logsigmoid(teacher_score - student_scores).mean()


def score_of(model: Any, row: Row) -> Tensor:
    """The one output at the last token, with gradient unless switched off."""
    used = set(row)
    # Sequence classifiers look for the last token that is not padding, and the end of a turn often is.
    model.config.get_text_config().pad_token_id = next(token for token in range(len(used) + 1) if token not in used)
    ids = torch.tensor([row], device=model.device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, 0]  # type: ignore[no-any-return]


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _taught(task: Task) -> list[Message]:
    """The conversation as the teacher ended it."""
    return [*task.messages, Message(role="assistant", content=str(task.answer))]


def _load(path: str, device: str, where: str) -> tuple[Any, Any]:
    """Model and tokenizer. A head that is not in the files is set to zero: equal runs must start from equal numbers."""
    import transformers  # here: it takes seconds, and most recipes have no learned reward

    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError(f'{where}: path="{path}" has no config.json. Give a Hugging Face directory on this machine.')
    try:
        model, info = read_pretrained(
            transformers.AutoModelForSequenceClassification, folder, is_quiet=True, dtype=torch.float32, num_labels=1
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = model.to(device).eval()  # no dropout: a score must be a function of the text
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # the last: torch without CUDA
        raise UserError(f'{where}: path="{path}" cannot be loaded ({error}).') from error
    if not tokenizer.chat_template:
        raise UserError(f'{where}: path="{path}" has no chat template. Put a chat_template.jinja into it.')
    head = {name: p for name, p in model.named_parameters() if p.shape[0] == 1 and not name.startswith("model.")}
    if missing := sorted(set(info["missing_keys"]) - head.keys()):
        raise UserError(f'{where}: path="{path}" lacks weights {", ".join(missing[:3])}. Give a complete model.')
    with torch.no_grad():
        for name in info["missing_keys"]:
            head[name].zero_()
    return model, tokenizer
