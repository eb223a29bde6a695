"""What a recipe sets in the chat template reaches every prompt: of training, evaluations, and whoever opens the
checkpoint later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import temper
from temper.build.policy import describe_policy
from temper.commands.judging.evaluate import SuiteRequest, evaluate_suite
from temper.commands.training.preflight import dry_run
from temper.commands.training.train import train
from temper.config import resolve, to_toml
from temper.engine.local.engine import LocalEngine
from temper.errors import UserError
from temper.evals.suites import load_suite, prompts_sha256, read_tasks
from temper.models.lora import materialize
from temper.models.tiny import make_tiny_model
from temper.serve.asked import ChatMessage, ChatRequest
from temper.serve.conversation import Conversations
from temper.types import Request, SamplingParams

NEW = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "mlp_width": 64, "context": 48}
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
WANTED = "<|user|>ab<|assistant|><think></think>"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_tiny_model(tmp_path / "model", **NEW, alphabet="abcdefghijklmnopqrstuvwxyz<>/", seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Prompts of everything that is drawn, but for what parity probes inside of rows."""
    found: list[tuple[int, ...]] = []
    generate: Callable[..., Any] = LocalEngine.generate

    async def watched(self: LocalEngine, request: Request) -> Any:
        found.extend([tuple(request.prompt_ids)] if "/probe/" not in request.id else [])
        return await generate(self, request)

    monkeypatch.setattr(LocalEngine, "generate", watched)
    return found


def write(recipe: dict[str, Any], model: Path, folder: Path, options: dict[str, Any], **more: Any) -> Path:
    for stage in recipe["stage"]:
        stage["steps"] = 2
    recipe |= {"model": {"path": str(model), **more}, "prompt": {"chat_options": options}}
    path = folder / "recipe.toml"
    path.write_text(to_toml(resolve(recipe, [], where="tiny")))
    return path


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["all weights", "an adapter"])
def test_a_checkpoint_is_asked_as_it_was_trained(
    lora: dict[str, Any] | None,
    model: Path,
    tiny_recipe: dict[str, Any],
    tmp_path: Path,
    drawn: list[tuple[int, ...]],
    suite: str,
) -> None:
    tokenizer = describe_policy(model).tokenizer
    recipe = write(tiny_recipe, model, tmp_path, {"enable_thinking": False}, **({"lora": lora} if lora else {}))
    run = train(recipe, run=tmp_path / "run")
    assert len(drawn) > 4 * 4 * 2, "training and evaluations draw"
    assert {tokenizer.decode(ids).partition("<|assistant|>")[2] for ids in drawn} == {"<think></think>"}
    last = run / "checkpoints" / "1-rl" / "step-2"

    drawn.clear()
    with temper.load(last) as policy:
        policy.chat("ab", max_new_tokens=1)
    assert [tokenizer.decode(ids) for ids in drawn] == [WANTED]

    drawn.clear()
    evaluate_suite(last, SuiteRequest(suite=suite, out=tmp_path / "trained.json"), note=lambda line: None)
    trained = list(drawn)
    assert all(tokenizer.decode(ids).endswith("<think></think>") for ids in trained)
    drawn.clear()
    said = SuiteRequest(
        suite=suite, out=tmp_path / "base.json", overrides=("prompt.chat_options.enable_thinking=false",)
    )
    evaluate_suite(model, said, note=lambda line: None)
    assert drawn == trained, "the untrained model, asked in the same way"

    served = describe_policy(last)
    door = Conversations(served.tokenizer, served.make_renderer(), None)
    chat = ChatMessage(role="user", content="ab")
    (prompt,) = door.prompts(ChatRequest(model="m", params=SamplingParams(), num_choices=1, messages=(chat,)))
    assert tokenizer.decode(prompt.ids) == WANTED

    if lora:
        merged = describe_policy(materialize.materialize(last, tmp_path / "merged"))
        assert merged.tokenizer.chat_template == served.tokenizer.chat_template


def test_a_dry_run_shows_the_prompt_and_refuses_what_the_template_does_not_read(
    model: Path, tiny_recipe: dict[str, Any], tmp_path: Path
) -> None:
    shown = dry_run(write(tiny_recipe, model, tmp_path, {"enable_thinking": False}))
    assert shown.count("<|assistant|><think></think>") == 2
    assert "<think>" not in dry_run(write(tiny_recipe, model, tmp_path, {}))
    with pytest.raises(UserError, match=r"prompt\.chat_options\.think: the chat template .* It reads: enable_thinking"):
        dry_run(write(tiny_recipe, model, tmp_path, {"think": False}))


def test_results_of_suites_without_options_stay_comparable_and_others_do_not(suite: str) -> None:
    plain = load_suite(suite)
    tasks = read_tasks(plain)
    before = "06acc0f0399179e60bfa323b358bbbc9f91b3da50e59efc038ad4efa75c74017"
    options = load_suite(suite, overrides=["prompt.chat_options.enable_thinking=false"])
    assert prompts_sha256(plain, tasks) == before
    assert prompts_sha256(options, tasks) != before
