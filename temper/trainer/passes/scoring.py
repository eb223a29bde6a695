"""Forward passes without gradient that a batch needs before it is trained.

Owns: which policy or teacher fills which column, and statistics of the whole batch over microbatches and ranks.
Refuses: the gradient (forward.py), deciding which columns are needed (the objective declares it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from temper.errors import UserError
from temper.models.states import Head
from temper.objectives import Objective, PolicyObjective, Scored, Tokens, join, measure_batch, measures_batch
from temper.trainer.offload import on_device
from temper.trainer.passes.divergence import classes, narrow
from temper.trainer.passes.forward import StepFacts, keep_sets, moved_share, score_drawn
from temper.trainer.passes.logprobs import drawn_logprobs, top_tokens
from temper.trainer.passes.routers import chosen_routes
from temper.trainer.passes.scores import read_scores
from temper.trainer.passes.states import drawn_states
from temper.trainer.passes.work import FlopCounter
from temper.trainer.ranks.parts import within
from temper.trainer.ranks.sums import gather_over_ranks
from temper.types import Microbatch

Who = Literal["policy", "reference", "teacher", "routers"]


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's microbatches of one optimiser step, each with its number among those of all ranks."""

    microbatches: list[Microbatch]
    numbers: list[int]
    padding: list[Microbatch] = field(default_factory=list)
    """Of a rank with fewer microbatches than others, where all must make as many passes: what those go over. Nothing
    of it counts."""


class ScoringPasses:
    """All models that score tokens, by name; only "policy" is trained."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        objective: Objective,
        temperature: float,
        *,
        teachers: Mapping[str, nn.Module] | None = None,
        counter: FlopCounter | None = None,
    ) -> None:
        """`teachers` read the rows of their domain; that of "" reads all others. `counter`: of what the proximal policy
        costs; None: nobody asks."""
        self._models, self._objective, self._temperature = models, objective, temperature
        self._teachers = teachers or {}
        self._counter = counter

    @torch.no_grad()
    def score(self, microbatch: Microbatch, who: Who) -> Tensor:
        """Log-probabilities [T] on the CPU, by the same pass as training; 0 where nothing was drawn. Of "routers" the
        share of recorded experts that those of the policy would not choose."""
        plain = replace(microbatch, top_ids=None, router_ids=None)
        if who == "reference":  # compared with the policy as a whole, whatever the sampler drew among
            plain = replace(plain, keep_ids=None, keep_counts=None)
        if who == "teacher":
            (logprobs_A,) = self._ask_teachers(plain, self._logprobs)
        elif who == "routers":
            model = self._model("policy")
            return spread(within(model, lambda: moved_share(model, plain)), microbatch)
        else:
            with on_device(self._model(who)) as model:
                (logprobs_A,) = self._logprobs(model, plain)
        return spread(logprobs_A, microbatch)

    def _logprobs(self, model: nn.Module, microbatch: Microbatch) -> tuple[Tensor]:
        """Log-probabilities [A], or scores where the policy is a model that scores."""
        if "scores" in self._objective.needs:
            return (within(model, lambda: read_scores(model, microbatch)).logprobs,)
        return (within(model, lambda: score_drawn(model, microbatch, self._temperature)).logprobs,)

    def _ask_teachers(
        self, microbatch: Microbatch, ask: Callable[[nn.Module, Microbatch], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """Columns [A, ...] at the drawn tokens of a microbatch, as each row's own teacher answers."""
        answers, places = [], []
        for part in classes(self._teachers, microbatch):
            with on_device(part.teacher) as teacher:
                answers.append(ask(teacher, part.microbatch))
            places.append(part.places_A)
        order_A = torch.cat(places).argsort()
        return tuple(torch.cat(column).cpu()[order_A] for column in zip(*answers, strict=True))

    def with_frozen(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """The columns of the reference and the teacher, where the loss needs them and credit did not."""
        filled = list(microbatches)
        frozen: tuple[Who, ...] = ("reference", "teacher")
        for who in frozen:
            column = f"{who}_logprobs"
            if who in self._objective.needs and any(getattr(m, column) is None for m in filled):
                with self._held(who):
                    filled = [m if getattr(m, column) is not None else self._with(m, column, who) for m in filled]
        if "teacher_top_k" in self._objective.needs:
            with self._held("teacher"):
                filled = [self._with_teacher_top(m) for m in filled]
        return filled

    def _held(self, who: Who) -> AbstractContextManager[object]:
        """A model that waits elsewhere is brought once for many passes; of several teachers each in its turn."""
        models = list(self._teachers.values()) if who == "teacher" else [self._model(who)]
        return on_device(models[0]) if len(models) == 1 else nullcontext()

    @torch.no_grad()
    def _with_teacher_top(self, microbatch: Microbatch) -> Microbatch:
        """The teacher's most likely tokens among those that the student knows, and its log-probabilities of them."""
        k, size = self._objective.top_k("teacher_top_k"), len(Head.of(self._model("policy")).weight)

        def ask(teacher: nn.Module, part: Microbatch) -> tuple[Tensor, Tensor]:
            def compute() -> tuple[Tensor, Tensor]:
                head = narrow(Head.of(teacher), size)
                hidden_AD = drawn_states(teacher, part).hidden_AD
                return top_tokens(head, hidden_AD, min(k, len(head.weight)), temperature=self._temperature)

            return within(teacher, compute)

        ids_AK, logprobs_AK = self._ask_teachers(microbatch, ask)
        return replace(microbatch, top_ids=spread(ids_AK, microbatch), top_logprobs=spread(logprobs_AK, microbatch))

    def _with(self, microbatch: Microbatch, column: str, who: Who) -> Microbatch:
        change: dict[str, Any] = {column: self.score(microbatch, who)}
        return replace(microbatch, **change)

    @torch.no_grad()
    def with_proximal(self, microbatch: Microbatch, *, is_only: bool) -> Microbatch:
        """What the policy of now says, before the first update moves it.

        `is_only`: the batch has one update. Then the policy of the gradient pass itself, detached, is the proximal one:
        the ratio is exactly 1, to the bit.
        """
        needs = self._objective.needs
        if not isinstance(self._objective, PolicyObjective):
            return microbatch  # a direct loss compares with no earlier policy
        wants_logprobs = self._objective.proximal.name == "trainer" and not is_only
        if is_only:
            microbatch = replace(microbatch, proximal_logprobs=None)
        if "policy_top_k" not in needs and "router" not in needs:
            if not wants_logprobs or microbatch.proximal_logprobs is not None:
                return microbatch
            microbatch = replace(microbatch, proximal_logprobs=self.score(microbatch, "policy"))
        else:
            captured = microbatch
            microbatch = within(
                self._model("policy"), lambda: self._with_captured(captured, wants_logprobs=wants_logprobs)
            )
        if self._counter is not None:
            self._counter.count(microbatch, has_backward=False)
        return microbatch

    def _with_captured(self, microbatch: Microbatch, *, wants_logprobs: bool) -> Microbatch:
        """Log-probabilities, most likely tokens and chosen experts of one pass."""
        needs, model = self._objective.needs, self._model("policy")
        states = drawn_states(model, microbatch, routers="router" in needs)
        if wants_logprobs:
            logprobs_A = drawn_logprobs(
                Head.of(model),
                states.hidden_AD,
                states.token_ids_A,
                temperature=self._temperature,
                keep=keep_sets(microbatch, states.drawn_A.device),
            )[0]
            microbatch = replace(microbatch, proximal_logprobs=spread(logprobs_A, microbatch))
        if "policy_top_k" in needs:
            k = self._objective.top_k("policy_top_k")
            ids_AK, top_AK = top_tokens(Head.of(model), states.hidden_AD, k, temperature=self._temperature)
            microbatch = replace(
                microbatch, top_ids=spread(ids_AK, microbatch), top_logprobs=spread(top_AK, microbatch)
            )
        if "router" in needs:
            ids, logprobs = chosen_routes(model, states.router_logits)
            microbatch = replace(microbatch, router_ids=ids.cpu(), router_logprobs=logprobs.cpu())
        return microbatch

    @torch.no_grad()
    def measure(self, share: Share, facts: StepFacts) -> list[dict[str, Tensor]]:
        """By microbatch of the share: what the objective takes from the whole batch. One more pass where it needs one.

        Numbered by microbatch, not by rank: packing orders rows by what they are, so tokens come in the same order
        for every number of ranks and every size of microbatch.
        """
        if not measures_batch(self._objective):
            return [{} for _ in share.microbatches]
        own = {
            number: facts.tokens(microbatch, self._scored(microbatch))
            for number, microbatch in zip(share.numbers, share.microbatches, strict=True)
        }
        for spare in share.padding:
            self._scored(spare)
        everyone = gather_over_ranks(own)
        whole = join([everyone[number] for number in sorted(everyone)])
        columns = measure_batch(self._objective, whole)
        starts = _starts(everyone)
        return [
            {name: column[starts[number] :][: len(own[number])] for name, column in columns.items()}
            for number in share.numbers
        ]

    def _scored(self, microbatch: Microbatch) -> Scored:
        if "batch" in self._objective.needs:
            policy = self._model("policy")
            return within(policy, lambda: score_drawn(policy, microbatch, self._temperature))
        # Nothing needs the policy: a factor that reads it without saying so finds out at once.
        unknown_A = torch.full((int(microbatch.loss_mask.sum()),), float("nan"))
        return Scored(logprobs=unknown_A, entropy=unknown_A)

    def _model(self, who: Who) -> nn.Module:
        if who not in self._models:
            raise UserError(f"objective {self._objective.name} needs a {who} model and the trainer was given none")
        return self._models[who]


def spread(values_A: Tensor, microbatch: Microbatch) -> Tensor:
    """Values of the drawn tokens at their places among all tokens [T, ...], 0 elsewhere, on the microbatch's device."""
    values_T = torch.zeros(len(microbatch.token_ids), *values_A.shape[1:], dtype=values_A.dtype)
    values_T[microbatch.loss_mask.bool()] = values_A.cpu()
    return values_T


def _starts(parts: Mapping[int, Tokens]) -> dict[int, int]:
    starts, end = {}, 0
    for number in sorted(parts):
        starts[number] = end
        end += len(parts[number])
    return starts
