"""One step of GKD by the trainer's own pass, chunk by chunk, and by TRL's loss on all logits: the same number and the
same gradient of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from temper.batching.pack import pack
from temper.models.load import prepare
from temper.objectives.losses.divergences import gkd
from temper.objectives.presets.distillation import GKD
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.types import Sample

pytest.importorskip("trl")
from trl.experimental.gkd import GKDTrainer


def model(seed: int, *, is_plain: bool) -> LlamaForCausalLM:
    config = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = LlamaForCausalLM(config)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    made = made.double().eval()
    return made if is_plain else prepare(made)  # type: ignore[return-value]


def rows() -> list[Sample]:
    draw = torch.Generator().manual_seed(0)
    made = []
    for place, (prompt, answer) in enumerate(((3, 5), (2, 1), (6, 4))):
        ids = torch.randint(24, (prompt + answer,), generator=draw).tolist()
        mask = [0] * prompt + [1] * answer
        zeros = [0.0] * len(ids)
        made.append(
            Sample(group_id=f"g{place}", index=0, token_ids=ids, loss_mask=mask, behavior_logprobs=zeros,
                   versions=[m - 1 for m in mask], advantages=zeros, weights=[m / 10 for m in mask])
        )  # fmt: skip
    return made


def of_trl(samples: Sequence[Sample], beta: float) -> tuple[float, dict[str, torch.Tensor]]:
    student, teacher = model(1, is_plain=True), model(2, is_plain=True)
    logits, labels = [], []
    for row in samples:
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            taught = teacher(ids).logits[:, :-1]
        logits.append((student(ids).logits[:, :-1], taught))
        labels.append(torch.tensor([[t if m else -100 for t, m in zip(row.token_ids, row.loss_mask, strict=True)][1:]]))
    loss = GKDTrainer.generalized_jsd_loss(
        torch.cat([s for s, _ in logits], 1), torch.cat([t for _, t in logits], 1), torch.cat(labels, 1), beta, 0.9
    )
    loss.backward()
    return loss.item(), {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("budget", [1, 1000])
def test_a_step_has_trls_loss_and_gradient(beta: float, budget: int) -> None:
    expected, slopes = of_trl(rows(), beta)
    student, teacher = model(1, is_plain=False), model(2, is_plain=False)
    objective = replace(GKD, loss=gkd(beta=beta, temperature=0.9))
    facts = StepFacts(num_batch_tokens=10, teachers={"": teacher})
    loss = 0.0
    for microbatch in pack(rows(), budget, dtype=torch.float64):
        loss += forward_backward(student, microbatch, objective, temperature=1.0, facts=facts)[0].item()
    assert loss == pytest.approx(expected, abs=1e-12)
    found = {name: p.grad for name, p in student.named_parameters() if p.grad is not None}
    assert found.keys() == slopes.keys()
    for name, slope in slopes.items():
        assert torch.allclose(found[name], slope, rtol=0, atol=1e-11), name
    assert slopes["lm_head.weight"].abs().max() > 1e-3
