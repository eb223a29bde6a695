"""One step to the edge of a trust region: gradient, Fisher products, line search (TRPO).

Owns: what the natural-gradient step needs of the model, and that a step is taken whole or not at all. Refuses: the
direction and its length (policy/constrained.py), and weights in bfloat16: a line search would step over them.
Logits of one microbatch are held at a time. Parts of microbatches and ranks add up, so it does not matter how a batch
is cut.
Shapes: _P trainable parameters laid end to end, _T packed tokens, _A drawn tokens, _D width, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from temper.errors import BackendError, UserError
from temper.models.states import Head
from temper.objectives import MetricSums, PolicyObjective, Scored, objective_loss
from temper.objectives.metrics import mean_sums
from temper.trainer.passes.forward import StepFacts
from temper.trainer.passes.states import drawn_states
from temper.trainer.ranks.sums import merge_over_ranks, sum_over_ranks
from temper.types import Microbatch

Measures = Sequence[Mapping[str, Tensor]]
"""Per microbatch of the share: its columns of Tokens.measured."""


def constrained_step(
    model: nn.Module,
    share: Sequence[Microbatch],
    objective: PolicyObjective,
    *,
    temperature: float,
    facts: StepFacts,
    measured: Measures | None = None,
) -> MetricSums:
    """Moves the parameters by objective.step, shortened until the gain grew and the measured KL is within its delta.

    Otherwise, and on any error, every parameter keeps its bits. `share` is this rank's part of the batch, possibly
    empty; all ranks take the same step and return the same metrics: those of the loss at the start, and policy/trust_*.
    """
    step = objective.step
    assert step is not None, f"objective {objective.name} has no constrained step"
    batch = _Batch(share, objective, temperature, facts, measured or [{}] * len(share))
    # The fast attention kernels have no second derivative. In every pass, so that a step of 0 has KL 0.
    with sdpa_kernel(SDPBackend.MATH):
        start = _begin(model, batch)

        def product(vector_P: Tensor) -> Tensor:
            num_tokens = facts.num_batch_tokens
            return fisher_product(model, share, vector_P, temperature=temperature, num_batch_tokens=num_tokens)

        full_P = step(product, start.gradient_P)
        shrinks = [step.argument("backtrack") ** number for number in range(step.argument("tries") + 1)]
        found = _search(model, start, full_P, delta=step.argument("delta"), shrinks=shrinks)
    found_metrics = {name: full_P.new_tensor([value], dtype=torch.float64) for name, value in found.items()}
    # All ranks found the same numbers, and their mean is that number.
    return merge_over_ranks(start.metrics.merge(mean_sums(found_metrics)))


def fisher_product(
    model: nn.Module, share: Sequence[Microbatch], vector_P: Tensor, *, temperature: float, num_batch_tokens: int
) -> Tensor:
    """F v: F is the second derivative, at the current policy, of the mean over drawn tokens of KL(pi_now || pi).

    Differentiated twice, with whole distributions: v is paired with the gradient in between, F itself never exists.
    """
    parameters = trainable(model)
    product_P = torch.zeros_like(vector_P)
    with sdpa_kernel(SDPBackend.MATH):
        for microbatch in share:
            logprobs_AV = _logprobs(Head.of(model), drawn_states(model, microbatch).hidden_AD, temperature)
            kl = _kl_sum(logprobs_AV.detach(), logprobs_AV) / num_batch_tokens
            slope_P = _flat(_gradients(kl, parameters, create_graph=True))
            product_P += _flat(_gradients(slope_P @ vector_P, parameters))
    sum_over_ranks([product_P])
    return product_P


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters in the order of _P. UserError for those a trust region cannot be measured in."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UserError(
                f'objective trpo: parameter "{name}" is {parameter.dtype}, which rounds a step within the trust region '
                f'away. Set model.dtype = "float32", or choose an objective that uses AdamW, such as ppo'
            )
    return list(parameters.values())


@dataclass(frozen=True, slots=True)
class _Batch:
    share: Sequence[Microbatch]
    objective: PolicyObjective
    temperature: float
    facts: StepFacts
    measured: Measures

    def loss(self, number: int, microbatch: Microbatch, logprobs_AV: Tensor) -> tuple[Tensor, MetricSums]:
        """Loss of one microbatch of the share, or of its copy with other columns."""
        scored = _scored(microbatch, logprobs_AV)
        if "entropy" not in self.objective.needs:
            scored = replace(scored, entropy=scored.entropy.detach())
        return objective_loss(self.objective, self.facts.tokens(microbatch, scored, self.measured[number]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """The policy that the step leaves, and what is needed to measure the distance from it.

    Distributions are kept as hidden states and a copy of the head; as logits they would not fit.
    """

    batch: _Batch
    parameters: list[nn.Parameter]
    weights: list[Tensor]
    """Copies of the parameters."""
    head: Head
    hidden: list[Tensor]
    """Hidden states [A, D] of each microbatch."""
    anchored: list[Microbatch]
    gradient_P: Tensor
    """Gradient of the gain, over all ranks."""
    loss: float
    """Loss over all ranks."""
    metrics: MetricSums
    """Metrics of this rank alone."""

    def move(self, step_P: Tensor) -> None:
        parts = torch.split(step_P, [weight.numel() for weight in self.weights])
        with torch.no_grad():
            for parameter, weight, part in zip(self.parameters, self.weights, parts, strict=True):
                parameter.copy_(weight + part.view_as(weight))

    def restore(self) -> None:
        """Not move(0): that would turn -0.0 into 0.0."""
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self.weights, strict=True):
                parameter.copy_(weight)

    def measure(self, model: nn.Module) -> tuple[float, float]:
        """How much the gain grew since the start, and mean KL(start || now) over drawn tokens; over all ranks."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.gradient_P.device)
        batch = self.batch
        with torch.no_grad():
            for number, microbatch in enumerate(self.anchored):
                now_AV = _logprobs(Head.of(model), drawn_states(model, microbatch).hidden_AD, batch.temperature)
                start_AV = _logprobs(self.head, self.hidden[number], batch.temperature)
                loss, _ = batch.loss(number, microbatch, now_AV)
                sums += torch.stack([loss.double(), _kl_sum(start_AV.double(), now_AV.double())])
        sum_over_ranks([sums])
        loss_now, kl_sum = sums.tolist()
        return self.loss - loss_now, kl_sum / batch.facts.num_batch_tokens


def _begin(model: nn.Module, batch: _Batch) -> _Start:
    """Raises BackendError when there is no finite gradient to follow."""
    parameters = trainable(model)
    weights = [parameter.detach().clone() for parameter in parameters]
    head = Head.of(model)
    gradient_P = torch.zeros_like(_flat(weights))
    loss_sum = gradient_P.new_zeros((), dtype=torch.float64)
    hidden, anchored, metrics = [], [], MetricSums()
    for number, microbatch in enumerate(batch.share):
        hidden_AD = drawn_states(model, microbatch).hidden_AD
        logprobs_AV = _logprobs(head, hidden_AD, batch.temperature)
        loss, sums = batch.loss(number, microbatch, logprobs_AV)
        gradient_P -= _flat(_gradients(loss, parameters))
        loss_sum += loss.detach()
        metrics = metrics.merge(sums)
        hidden.append(hidden_AD.detach())
        anchored.append(_anchored(microbatch, logprobs_AV.detach()))
    metrics = metrics.merge(MetricSums(totals={"loss/total": loss_sum.clone()}))
    sum_over_ranks([gradient_P, loss_sum])
    norm = gradient_P.norm()
    if not torch.isfinite(norm):
        raise BackendError(
            f"trpo: loss {float(loss_sum)}, gradient norm {float(norm)}. No step was taken. Resume from the last "
            f"checkpoint, and look at the rewards and log-probabilities of this step's groups"
        )
    return _Start(
        batch=batch,
        parameters=parameters,
        weights=weights,
        head=Head(
            head.weight.detach().clone(), None if head.bias is None else head.bias.detach().clone(), head.softcap
        ),
        hidden=hidden,
        anchored=anchored,
        gradient_P=gradient_P,
        loss=float(loss_sum),
        metrics=metrics.merge(mean_sums({"policy/grad_norm": norm.reshape(1)})),
    )


def _search(model: nn.Module, start: _Start, full_P: Tensor, *, delta: float, shrinks: list[float]) -> dict[str, float]:
    """Leaves the model at the first step of full_P x shrinks that is good, or where it was."""
    rejected = {"kl": 0.0, "improvement": 0.0, "backtracks": float(len(shrinks) - 1), "accepted": 0.0}
    found = rejected
    try:
        for backtracks, shrink in enumerate(shrinks):
            start.move(shrink * full_P)
            improvement, kl = start.measure(model)
            if improvement > 0 and kl <= delta:  # neither holds for a NaN
                found = {"kl": kl, "improvement": improvement, "backtracks": float(backtracks), "accepted": 1.0}
                break
    finally:
        if found is rejected:
            start.restore()
    return {f"policy/trust_{name}": value for name, value in found.items()}


def _anchored(microbatch: Microbatch, logprobs_AV: Tensor) -> Microbatch:
    """With the starting policy as the proximal one, where none is set: "the policy, detached" would move along."""
    if microbatch.proximal_logprobs is not None:
        return microbatch
    logprobs_A = _scored(microbatch, logprobs_AV).logprobs.cpu()
    proximal_T = logprobs_A.new_zeros(len(microbatch.token_ids))
    proximal_T[microbatch.loss_mask.cpu().bool()] = logprobs_A
    return replace(microbatch, proximal_logprobs=proximal_T)


def _scored(microbatch: Microbatch, logprobs_AV: Tensor) -> Scored:
    device = logprobs_AV.device
    drawn_A = microbatch.loss_mask.nonzero()[:, 0]
    token_ids_A1 = microbatch.token_ids[drawn_A, None].to(device)
    top_ids = microbatch.top_ids
    return Scored(
        logprobs=logprobs_AV.gather(1, token_ids_A1)[:, 0],
        entropy=-(logprobs_AV.exp() * logprobs_AV).sum(-1),
        top_logprobs=None if top_ids is None else logprobs_AV.gather(1, top_ids[drawn_A].to(device).long()),
    )


def _copied(head: Head) -> Head:
    bias = None if head.bias is None else head.bias.detach().clone()
    return Head(head.weight.detach().clone(), bias, head.softcap)


def _logprobs(head: Head, hidden_AD: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(head.logits(hidden_AD) / temperature, dim=-1)


def _kl_sum(from_AV: Tensor, to_AV: Tensor) -> Tensor:
    return (from_AV.exp() * (from_AV - to_AV)).sum()


def _gradients(value: Tensor, parameters: list[nn.Parameter], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients of the value; zeros for parameters that it does not depend on."""
    return torch.autograd.grad(value, parameters, create_graph=create_graph, materialize_grads=True)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
