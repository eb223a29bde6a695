"""What reward tests share: a trajectory that says one thing, verifiers that misbehave, endpoints that judge."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from temper.types import Completion, Finish, Message, Score, Status, Trajectory, Turn

MISBEHAVING = """
import os, re, time

def reward(prompt, response, answer):
    if response == "raise": raise ValueError("verifier bug")
    if response == "sleep": time.sleep(3600)
    if response == "spin":
        while True: pass
    if response == "bomb": re.fullmatch(r"(a+)+b", "a" * 64)
    if response == "tower": 9 ** 9 ** 9 ** 9
    if response == "crash": os._exit(3)
    if response == "abort": os.abort()
    if response == "exit": raise SystemExit(0)
    if response == "child":
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        open(prompt, "w").write(str(child.pid))
        time.sleep(3600)
    if response == "print": print("noise on stdout"); os.write(1, b"more noise")
    if response == "memory": return float(len(bytearray(2**40)))
    if response == "recursion": return reward(prompt, response, answer)
    if response in ("note", "crash once"):
        is_first = response == "crash once" and not os.path.exists(prompt + ".crashed")
        name = "note" if response == "note" else "first" if is_first else "again"
        log = os.open(prompt, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{name}+ ".encode())
        time.sleep(0.05)
        if is_first:
            open(prompt + ".crashed", "w").close()
            os._exit(3)
        os.write(log, f"{name}- ".encode())
        os.close(log)
    if response in ("sleep once", "die"):
        with open(prompt, "a") as log: log.write(f"{os.getpid()}\\n")
        if response == "die": os.kill(os.getpid(), 9)
        if len(open(prompt).readlines()) == 1: time.sleep(3600)
    if response == "none": return None
    if response == "text": return "good"
    if response == "nan": return float("nan")
    if response == "modules":
        import sys
        return float("torch" in sys.modules)
    return float(response == answer)

def two_arguments(prompt, response):
    return 1.0
"""


@pytest.fixture
def say() -> Callable[[str], Trajectory]:
    """A finished one-turn trajectory with that text."""

    def make(text: str) -> Trajectory:
        completion = Completion(prompt_ids=(1,), token_ids=[2], logprobs=[-1.0], versions=[0], finish=Finish.STOP)
        turn = Turn(completion=completion, message=Message(role="assistant", content=text))
        return Trajectory(
            task_id="t:1",
            group_id="g",
            index=0,
            turns=(turn,),
            status=Status.COMPLETED,
            score=Score.unscorable("not scored yet"),
        )

    return make


@pytest.fixture
def misbehaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module, importable here and in workers, whose `reward` does what the response asks for."""
    name = f"misbehaving_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MISBEHAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


class JudgeServer(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint that answers what `answer(system, user)` says; None is a status 500."""

    daemon_threads = True
    model = "judge-1"
    finish = "stop"

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str]] = []
        self.answer: Callable[[str, str], str | None] = lambda system, user: '{"score": 7}'

    def options(self, **more: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.server_port}/v1"
        return {"base_url": url, "model": "judge", "retries": 0, "deadline_seconds": 10.0, **more}

    def reply(self, system: str, user: str) -> str | None:
        return self.answer(system, user)


class FramedJudgeServer(JudgeServer):
    """Answers what `answer(texts)` says of the framed texts by name, as JSON; None is a status 500."""

    def __init__(self) -> None:
        super().__init__()
        self.answer: Callable[[dict[str, str]], object] = lambda texts: {"score": 10}  # type: ignore[assignment]

    def reply(self, system: str, user: str) -> str | None:
        texts = dict(re.findall(r"<data-\w+ (\w+)>\n(.*?)\n</data-\w+ \1>", user, re.DOTALL))
        answer = self.answer(texts)  # type: ignore[call-arg, arg-type]
        return None if answer is None else json.dumps(answer)


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        system, user = (message["content"] for message in body["messages"])
        self.server.asked.append((system, user))
        text = self.server.reply(system, user)
        self.send_response(500 if text is None else 200)
        self.end_headers()
        answer = {
            "model": self.server.model,
            "choices": [{"message": {"content": text}, "finish_reason": self.server.finish}],
        }
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


def _serving(server: JudgeServer) -> Iterator[JudgeServer]:
    with server as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(timeout=5)


@pytest.fixture
def judge_server() -> Iterator[JudgeServer]:
    yield from _serving(JudgeServer())


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    """The one whose answers depend on the framed texts."""
    yield from _serving(FramedJudgeServer())


def _save_letter_model(
    folder: Path, *, kind: Any, num_labels: int, tokens: Sequence[str], template: str, special: Sequence[str] = ()
) -> Path:
    """A tiny random classifier over letters whose padding is its end of turn, as in many real tokenizers."""
    # Here: most tests of rewards need neither.
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<end>", eos_token="<end>", unk_token=" ")
    if special:
        wrapped.add_special_tokens({"additional_special_tokens": list(special)})
    wrapped.chat_template = template
    config = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, num_labels=num_labels, pad_token_id=0, eos_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        kind(config).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture
def save_letter_model() -> Callable[..., Path]:
    return _save_letter_model
