"""The real client against the real engine on a tiny model: what it draws is exact, batched and recorded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from temper.models.load import load_model
from temper.models.states import Head, hidden_states
from temper.serve.records import read_records
from temper.trainer.passes.packed_attention import PackedAttention

openai = pytest.importorskip("openai", reason="the openai client is not installed")
HELLO = [{"role": "user", "content": "hello"}]


def chat(served: Any, **asked: Any) -> Any:
    return served.client().chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 12, **asked})


def forward_logprobs(folder: Path, prompt: list[int], drawn: list[int], temperature: float) -> torch.Tensor:
    model = load_model(folder, torch.float32, torch.device("cpu"))
    ids = torch.tensor([*prompt, *drawn])
    with torch.no_grad():
        attend = PackedAttention((len(ids),), ids.device)
        logits = Head.of(model).logits(hidden_states(model, ids, torch.arange(len(ids)), attend))
    table = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    return table.gather(1, torch.tensor(drawn).unsqueeze(1)).squeeze(1)


def test_a_chat_is_answered_and_counted(served: Any, tokenizer: Any) -> None:
    answer = chat(served, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    prompt = tokenizer.encode("<|user|>hello<|assistant|>", add_special_tokens=False)
    assert choice.prompt_token_ids == prompt
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(choice.token_ids))
    assert choice.finish_reason == ("stop" if choice.token_ids[-1] == tokenizer.eos_token_id else "length")


def test_models_are_listed_and_found_by_name(served: Any) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_says_the_same_as_the_whole_answer(served: Any, seed: int) -> None:
    asked = {"seed": seed, "n": 3, "logprobs": True, "extra_body": {"return_token_ids": True}, "max_tokens": 30}
    whole = chat(served, **asked)
    text, ids, logprobs, ends, last = ["", "", ""], [[], [], []], [[], [], []], {}, None
    for part in chat(served, **asked, stream=True, stream_options={"include_usage": True}):
        last = part
        for choice in part.choices:
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            logprobs[choice.index] += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
            ends[choice.index] = choice.finish_reason
    assert last.usage == whole.usage
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert ids[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-5)
        assert ends[choice.index] == choice.finish_reason


def test_most_likely_tokens_come_with_the_end_of_a_stream(served: Any) -> None:
    asked = {"seed": 1, "logprobs": True, "top_logprobs": 3, "temperature": 0}
    whole = chat(served, **asked).choices[0].logprobs.content
    streamed = [e for part in chat(served, **asked, stream=True) for c in part.choices if c.logprobs
                for e in c.logprobs.content]  # fmt: skip
    assert [e.token for e in streamed] == [e.token for e in whole]
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token for e in streamed)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_those_of_a_full_forward_pass(served: Any, tiny_folder: Path, temperature: float) -> None:
    answer = chat(served, temperature=temperature, logprobs=True, extra_body={"return_token_ids": True}, max_tokens=40)
    choice = answer.choices[0]
    told = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    true = forward_logprobs(tiny_folder, choice.prompt_token_ids, choice.token_ids, temperature)
    wrong = forward_logprobs(tiny_folder, choice.prompt_token_ids, choice.token_ids, temperature + 0.5)
    assert torch.allclose(told, true, atol=1e-4)
    assert float(told.sum()) == pytest.approx(float(true.sum()), abs=1e-3)
    assert not torch.allclose(told, wrong, atol=1e-4), "another temperature must not pass as this one"


def test_a_prompt_of_token_ids_is_taken_as_it_is(served: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("abc", add_special_tokens=False)
    asked = {"model": "tiny", "max_tokens": 5, "logprobs": 2, "extra_body": {"return_token_ids": True}, "seed": 4}
    by_ids = served.client().completions.create(prompt=ids, **asked).choices[0]
    by_text = served.client().completions.create(prompt="abc", **asked).choices[0]
    assert by_ids.prompt_token_ids == ids
    assert (by_ids.text, by_ids.token_ids) == (by_text.text, by_text.token_ids)
    assert len(by_ids.logprobs.token_logprobs) == len(by_ids.logprobs.tokens) == len(by_ids.token_ids)
    several = served.client().completions.create(prompt=["a", "b"], n=2, **asked)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[2].prompt_token_ids == several.choices[3].prompt_token_ids != ids


def test_a_seed_draws_the_same_again_even_at_the_same_time(served: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        same = {a.choices[0].message.content for a in pool.map(lambda _: chat(served, seed=9), range(4))}
    assert len(same) == 1
    others = {chat(served, seed=seed).choices[0].message.content for seed in range(20, 24)}
    assert len(others) > 1


def test_choices_share_one_prefill(served: Any) -> None:
    before = served.metrics()
    asked = [{"role": "user", "content": "x" * 100}]
    answer = chat(served, messages=asked, n=8, max_tokens=2)
    after = served.metrics()
    prompt = answer.usage.prompt_tokens
    assert len(answer.choices) == 8
    assert after["temper_engine_prefill_tokens_total"] - before["temper_engine_prefill_tokens_total"] < 2 * prompt


def test_a_stop_text_is_cut_off_while_token_ids_stay_exact(served: Any, tokenizer: Any) -> None:
    asked = {"seed": 2, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    free = chat(served, **asked).choices[0]
    stop = free.message.content[3:5]
    choice = chat(served, **asked, stop=[stop]).choices[0]
    # Another parameter is another seeded request: only the rules hold, not the text.
    drawn = tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert stop not in choice.message.content
    assert drawn.startswith(choice.message.content)
    assert drawn == choice.message.content or drawn == choice.message.content + stop


def test_a_stop_text_ends_the_drawing(served: Any, tokenizer: Any) -> None:
    greedy = {"temperature": 0, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    free = chat(served, **greedy).choices[0]
    stop = free.message.content[4:6]
    place = free.message.content.find(stop)
    choice = chat(served, **greedy, stop=stop).choices[0]
    streamed = "".join(part.choices[0].delta.content or "" for part in chat(served, **greedy, stop=stop, stream=True))
    assert choice.message.content == streamed == free.message.content[:place]
    assert choice.finish_reason == "stop"
    assert tokenizer.decode(choice.token_ids, skip_special_tokens=True).endswith(stop)
    assert len(choice.token_ids) < len(free.token_ids)


def test_sixteen_clients_are_batched(served: Any) -> None:
    num_clients, num_tokens = 16, 60
    before = served.metrics()
    start = threading.Barrier(num_clients, timeout=30)

    def ask(number: int) -> int:
        client = served.client()
        start.wait(30)
        answer = client.completions.create(model="tiny", prompt=f"{number:03d}", max_tokens=num_tokens, temperature=2)
        return answer.usage.completion_tokens

    with ThreadPoolExecutor(num_clients) as pool:
        drawn = sum(pool.map(ask, range(num_clients)))
    steps = served.metrics()["temper_engine_steps_total"] - before["temper_engine_steps_total"]
    assert drawn > num_clients * num_tokens / 4
    assert steps < drawn / 3, f"{steps} steps for {drawn} tokens: the clients were not batched"


def test_a_vanished_client_gives_its_room_back(served: Any, eventually: Callable[..., None]) -> None:
    eventually(lambda: served.metrics()["temper_engine_running"] == 0)
    before = served.metrics()
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 480, "n": 4, "stream": True, "temperature": 0,
            "logit_bias": {}}  # fmt: skip
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=30.0) as response:
        assert response.status_code == 200
        next(response.iter_bytes())
    eventually(lambda: served.metrics()["temper_serve_in_flight"] == 0)
    after = served.metrics()
    assert after["temper_engine_running"] == after["temper_engine_waiting"] == 0
    assert after["temper_serve_completions_total"] == before["temper_serve_completions_total"] + 4
    assert chat(served).choices[0].finish_reason in ("stop", "length")


def test_what_is_recorded_is_what_was_drawn(served: Any, record_path: Path) -> None:
    answer = chat(served, n=2, logprobs=True, extra_headers={"X-Temper-Session": "exact"},
                  extra_body={"return_token_ids": True})  # fmt: skip
    recorded = {row.choice: row for row in read_records(record_path, "exact") if row.request_id == answer.id}
    assert sorted(recorded) == [0, 1]
    for choice in answer.choices:
        completion = recorded[choice.index].turn.completion
        assert list(completion.prompt_ids) == choice.prompt_token_ids
        assert completion.token_ids == choice.token_ids
        assert completion.logprobs == [entry.logprob for entry in choice.logprobs.content]
        assert completion.versions == [0] * len(completion.token_ids)
        assert recorded[choice.index].turn.message.content == choice.message.content


def test_a_conversation_goes_on_from_the_very_tokens_that_were_drawn(served: Any, record_path: Path) -> None:
    messages: list[dict[str, Any]] = list(HELLO)
    session = {"X-Temper-Session": "talk"}
    previous: list[int] = []
    for turn in range(4):
        choice = chat(served, messages=messages, max_tokens=10, extra_headers=session,
                      extra_body={"return_token_ids": True}).choices[0]  # fmt: skip
        assert choice.prompt_token_ids[: len(previous)] == previous
        previous = choice.prompt_token_ids + choice.token_ids
        messages += [
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": f"and {turn}"},
        ]
    rows = read_records(record_path, "talk")
    assert [row.history for row in rows] == ["new", "extends", "extends", "extends"]
    assert [row.parent for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert rows[0].turn.replies[0].content == "and 0"


def test_asynchronous_clients_work_too(served: Any) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, stream=True)
            return [part.choices[0].delta.content or "" async for part in stream]

    assert isinstance("".join(asyncio.run(ask())), str)


def test_asking_for_log_probabilities_does_not_change_what_is_drawn(served: Any) -> None:
    asked = {"seed": 11, "max_tokens": 40, "temperature": 1.0}
    plain = chat(served, **asked).choices[0].message.content
    assert chat(served, **asked, logprobs=True).choices[0].message.content == plain
    assert chat(served, **asked, logprobs=True, top_logprobs=4).choices[0].message.content == plain
