"""The divergence taken chunk by chunk is the dense one, values and gradients; its gradient never reaches a teacher, and
each row is read by its own teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from temper.batching.pack import pack
from temper.errors import UserError
from temper.models.states import Head
from temper.objectives import Objective
from temper.objectives.losses.distillation import gkd as gkd_divergence
from temper.objectives.losses.divergences import gkd, k2, top_k_teacher
from temper.objectives.presets.distillation import GKD, PRESETS
from temper.trainer.offload import offload
from temper.trainer.passes.divergence import EVERYONE, classes, divergence
from temper.trainer.passes.forward import StepFacts, forward_backward
from temper.trainer.passes.scoring import ScoringPasses
from temper.trainer.passes.states import drawn_states
from temper.types import Microbatch, Sample

MakeModel = Callable[..., Any]
MakeRows = Callable[..., list[Sample]]
VOCABULARY = 40


def packed(rows: Sequence[Sample], budget: int = 10_000) -> list[Microbatch]:
    return pack(rows, tokens_per_microbatch=budget, dtype=torch.float64)


def dense(model: Any, teacher: Any, microbatch: Microbatch, beta: float) -> Tensor:
    """All logits of both at once, by plain autograd."""
    student_AD = drawn_states(model, microbatch).hidden_AD
    with torch.no_grad():
        logits_AV = Head.of(teacher).logits(drawn_states(teacher, microbatch).hidden_AD)
    return gkd_divergence(Head.of(model).logits(student_AD), logits_AV, beta, 0.9)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def apart(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 13, 1000])
def test_chunks_give_the_dense_values_and_gradients(
    make_model: MakeModel, make_rows: MakeRows, beta: float, chunk: int
) -> None:
    model, teacher = make_model(seed=1), make_model(seed=2)
    (microbatch,) = packed(make_rows())
    coefficients = torch.randn(int(microbatch.loss_mask.sum()), dtype=torch.float64)
    whole = dense(model, teacher, microbatch, beta)
    (whole * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    states = drawn_states(model, microbatch)
    direct_loss = gkd(beta=beta, temperature=0.9)
    teachers = {EVERYONE: teacher}
    found = divergence(model, teachers, states, microbatch, direct_loss, chunk_bytes=chunk * VOCABULARY * 8)
    (found * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(found, whole, rtol=0, atol=1e-12)
    slopes = gradients(model)
    assert apart(slopes, expected) < 1e-11
    assert expected["lm_head.weight"].abs().max() > 1e-3
    # Planted fault: a chunk too few would leave the last positions out, and this comparison sees one position.
    coefficients[-1] = 0
    (dense(model, teacher, microbatch, beta) * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    assert apart(slopes, gradients(model)) > 1e-6


@pytest.mark.parametrize("family", ["tied_llama", "gemma3"])
def test_tied_heads_and_other_families_get_the_dense_gradient(
    make_model: MakeModel, make_rows: MakeRows, family: str
) -> None:
    model, teacher = make_model(family, seed=1), make_model(family, seed=2)
    (microbatch,) = packed(make_rows())
    dense(model, teacher, microbatch, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    states = drawn_states(model, microbatch)
    found = divergence(model, {EVERYONE: teacher}, states, microbatch, gkd(), chunk_bytes=2000)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert apart(gradients(model), expected) < 1e-11


def test_a_softcap_on_the_logits_is_differentiated(
    make_model: MakeModel, make_rows: MakeRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, teacher = make_model(seed=1), make_model(seed=2)
    (microbatch,) = packed(make_rows())
    dense(model, teacher, microbatch, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    without = gradients(model)
    for one in (model, teacher):
        monkeypatch.setattr(one.config, "final_logit_softcapping", 2.0, raising=False)
    dense(model, teacher, microbatch, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    states = drawn_states(model, microbatch)
    divergence(model, {EVERYONE: teacher}, states, microbatch, gkd(), chunk_bytes=900).sum().backward()  # type: ignore[no-untyped-call]
    assert apart(gradients(model), expected) < 1e-11
    assert apart(without, expected) > 1e-4


def test_no_gradient_reaches_the_teacher_even_if_it_wants_one(make_model: MakeModel, make_rows: MakeRows) -> None:
    model, teacher = make_model(seed=1), make_model(seed=2).requires_grad_(True)
    (microbatch,) = packed(make_rows())
    divergence(model, {EVERYONE: teacher}, drawn_states(model, microbatch), microbatch, gkd()).sum().backward()  # type: ignore[no-untyped-call]
    assert gradients(teacher) == {}
    assert gradients(model)


def test_only_one_chunk_of_logits_exists_at_a_time(make_model: MakeModel, make_rows: MakeRows) -> None:
    sizes = []

    def watched(student_CV: Tensor, teacher_CV: Tensor) -> Tensor:
        sizes.append((len(student_CV), len(teacher_CV)))
        return gkd_divergence(student_CV, teacher_CV)

    model, teacher = make_model(seed=1), make_model(seed=2)
    (microbatch,) = packed(make_rows())
    direct_loss = gkd()
    direct_loss = replace(direct_loss, run=replace(direct_loss.run, divergence=watched))  # type: ignore[type-var]
    states = drawn_states(model, microbatch)
    divergence(model, {EVERYONE: teacher}, states, microbatch, direct_loss, chunk_bytes=3 * 320).sum().backward()  # type: ignore[no-untyped-call]
    drawn = int(microbatch.loss_mask.sum())
    assert max(sizes) == (3, 3)
    assert len(sizes) == 2 * -(-drawn // 3)  # forward, and once more backward


def test_a_teacher_with_a_padded_vocabulary_is_compared_on_the_common_tokens(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    model, teacher = make_model(seed=1), make_model(seed=2)
    (microbatch,) = packed(make_rows())
    expected = dense(model, teacher, microbatch, 0.5)
    wider = make_model(seed=2)
    head = nn.Linear(32, VOCABULARY + 8, bias=False, dtype=torch.float64)
    head.weight.data = torch.cat([teacher.lm_head.weight.detach(), torch.ones(8, 32, dtype=torch.float64)])
    wider.lm_head = head
    states = drawn_states(model, microbatch)
    for student, other in ((model, wider), (wider, model)):
        found = divergence(student, {EVERYONE: other}, states, microbatch, gkd())
        found.sum().backward()  # type: ignore[no-untyped-call]
        states = drawn_states(wider, microbatch)
        if student is model:
            assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert wider.lm_head.weight.grad is not None
    assert not wider.lm_head.weight.grad[VOCABULARY:].any()


def test_an_offloaded_teacher_gives_the_same_numbers(make_model: MakeModel, make_rows: MakeRows) -> None:
    model, teacher = make_model(seed=1), make_model(seed=2)
    (microbatch,) = packed(make_rows())
    results = []
    for _ in range(2):
        found = divergence(model, {EVERYONE: teacher}, drawn_states(model, microbatch), microbatch, gkd())
        found.sum().backward()  # type: ignore[no-untyped-call]
        results.append((found.detach(), gradients(model)))
        offload(teacher.requires_grad_(False), torch.device("cpu"))
    assert torch.equal(results[0][0], results[1][0])
    assert apart(results[0][1], results[1][1]) == 0


def trained(
    model: Any, teachers: dict[str, Any], rows: Sequence[Sample], objective: Objective, budget: int = 10_000
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one optimiser step."""
    passes = ScoringPasses({"policy": model}, objective, 0.9, teachers=teachers)
    facts = StepFacts(num_batch_tokens=sum(row.num_actions for row in rows), teachers=teachers)
    total = 0.0
    for microbatch in passes.with_frozen(packed(rows, budget)):
        total += forward_backward(model, microbatch, objective, temperature=0.9, facts=facts)[0].item()
    return total, gradients(model)


def small(preset: Objective) -> Objective:
    return replace(preset, loss=top_k_teacher(k=5)) if preset.needs == {"teacher_top_k"} else preset


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_no_packing_changes_loss_or_gradient(make_model: MakeModel, make_rows: MakeRows, preset: Objective) -> None:
    model = make_model(seed=1)
    teachers = {"g0": make_model(seed=2), "g1": make_model(seed=3), EVERYONE: make_model(seed=4)}
    rows = [replace(row, teacher=row.group_id) for row in make_rows()]
    loss, expected = trained(model, teachers, rows, small(preset))
    for budget in (1, 30, 64):
        other, slopes = trained(model, teachers, rows, small(preset), budget)
        assert other == pytest.approx(loss, abs=1e-11)
        assert apart(slopes, expected) < 1e-10


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_row_is_read_by_the_teacher_of_its_domain(
    make_model: MakeModel, make_rows: MakeRows, preset: Objective
) -> None:
    objective, model = small(preset), make_model(seed=1)
    teachers = {"a": make_model(seed=2), "b": make_model(seed=3)}
    rows = [replace(row, teacher="ab"[place % 2]) for place, row in enumerate(make_rows())]
    loss, slopes = trained(model, teachers, rows, objective)
    alone = [
        trained(model, {EVERYONE: teachers[name]}, [row for row in rows if row.teacher == name], objective)
        for name in "ab"
    ]
    assert loss == pytest.approx(sum(part for part, _ in alone), abs=1e-11)
    together = {name: alone[0][1][name] + alone[1][1][name] for name in slopes}
    assert apart(slopes, together) < 1e-10
    # Planted fault: with the names exchanged the loss is another.
    swapped, _ = trained(model, {"a": teachers["b"], "b": teachers["a"]}, rows, objective)
    assert abs(swapped - loss) > 1e-4


def test_log_probabilities_come_back_in_place_from_each_rows_teacher(
    make_model: MakeModel, make_rows: MakeRows
) -> None:
    teachers = {"a": make_model(seed=2), "b": make_model(seed=3)}
    rows = [replace(row, teacher="ab"[place % 2]) for place, row in enumerate(make_rows())]
    objective = replace(GKD, loss=k2())
    (microbatch,) = packed(rows)
    found = ScoringPasses({}, objective, 0.9, teachers=teachers).score(microbatch, "teacher")
    assert set(microbatch.teachers) == {"a", "b"}
    by_row = zip(torch.split(found, list(microbatch.lengths)), microbatch.teachers, range(len(rows)), strict=True)
    for values, name, place in by_row:
        own = ScoringPasses({}, objective, 0.9, teachers={"": teachers[name]}).score(microbatch, "teacher")
        assert torch.allclose(values, torch.split(own, list(microbatch.lengths))[place], atol=1e-12)
        other = ScoringPasses({}, objective, 0.9, teachers={"": teachers["ab".replace(name, "")]}).score(
            microbatch, "teacher"
        )
        assert not torch.allclose(values, torch.split(other, list(microbatch.lengths))[place], atol=1e-3)


def test_the_top_tokens_are_the_teachers_own(make_model: MakeModel, make_rows: MakeRows) -> None:
    """With as many as the vocabulary has, the direct_loss is the whole KL(Q || S)."""
    model, teacher = make_model(seed=1), make_model(seed=2)
    objective = replace(GKD, loss=top_k_teacher(k=64))  # more than there are
    (microbatch,) = packed(make_rows())
    (filled,) = ScoringPasses({"policy": model}, objective, 0.9, teachers={EVERYONE: teacher}).with_frozen([microbatch])
    logits_AV = Head.of(teacher).logits(drawn_states(teacher, microbatch).hidden_AD)
    expected = (logits_AV / 0.9).log_softmax(-1).sort(descending=True)
    assert filled.top_ids is not None
    assert filled.top_logprobs is not None
    drawn = microbatch.loss_mask.bool()
    assert torch.equal(filled.top_ids[drawn], expected.indices)
    assert torch.allclose(filled.top_logprobs[drawn], expected.values, rtol=0, atol=1e-12)
    loss, slopes = trained(model, {EVERYONE: teacher}, make_rows(), objective)
    whole, dense_slopes = trained(model, {EVERYONE: teacher}, make_rows(), replace(GKD, loss=gkd(0.0, 0.9)))
    assert loss == pytest.approx(whole, abs=1e-9)
    assert apart(slopes, dense_slopes) < 1e-8


def test_keep_sets_go_with_their_rows_to_the_teacher(make_model: MakeModel, make_rows: MakeRows) -> None:
    teachers = {"a": make_model(seed=2), "b": make_model(seed=3)}
    rows = [
        replace(
            row,
            teacher="ab"[place % 2],
            keep_ids=[
                sorted({token, (token + 1) % 40, place}) if m else []
                for token, m in zip(row.token_ids, row.loss_mask, strict=True)
            ],
        )
        for place, row in enumerate(make_rows())
    ]
    (microbatch,) = packed(rows)
    found = ScoringPasses({}, GKD, 1.0, teachers=teachers).score(microbatch, "teacher")
    for name in "ab":
        own = ScoringPasses({}, GKD, 1.0, teachers={"": teachers[name]}).score(microbatch, "teacher")
        for place, (first, second) in enumerate(
            zip(torch.split(found, list(microbatch.lengths)), torch.split(own, list(microbatch.lengths)), strict=True)
        ):
            if microbatch.teachers[place] == name:
                assert torch.allclose(first, second, atol=1e-12)


def test_a_domain_without_a_teacher_is_refused_by_name(make_model: MakeModel, make_rows: MakeRows) -> None:
    rows = [replace(row, teacher="poetry") for row in make_rows()]
    (microbatch,) = packed(rows)
    with pytest.raises(UserError, match=r'"poetry" have no teacher; there are teachers for code, math.*poetry = "DIR'):
        list(classes({"math": make_model(), "code": make_model()}, microbatch))
    with pytest.raises(UserError, match="needs a teacher"):
        list(classes({}, microbatch))
    assert len(list(classes({"math": make_model(), EVERYONE: make_model()}, microbatch))) == 1


def test_f4_through_a_real_model(make_model: MakeModel, make_rows: MakeRows) -> None:
    """Heads that answer (.5, .3, .2) and (.2, .5, .3) whatever the text: the worked numbers, exactly."""
    models = []
    for probabilities in ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3)):
        model = make_model(seed=1)
        model.lm_head = nn.Linear(32, VOCABULARY, dtype=torch.float64)
        nn.init.zeros_(model.lm_head.weight)
        nn.init.constant_(model.lm_head.bias, -1e4)
        model.lm_head.bias.data[:3] = torch.tensor(probabilities, dtype=torch.float64).log()
        models.append(model)
    (microbatch,) = packed(make_rows())
    states = drawn_states(models[0], microbatch)
    for beta, expected in ((0.0, 0.193794), (1.0, 0.223805), (0.5, 0.050875), (0.1, 0.017563)):
        direct_loss = gkd(beta=beta, temperature=1.0)
        found = divergence(models[0], {EVERYONE: models[1]}, states, microbatch, direct_loss)
        assert torch.allclose(found, torch.full_like(found, expected), rtol=0, atol=1e-6)
