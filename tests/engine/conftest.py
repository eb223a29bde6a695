"""A server of our own that speaks SGLang's native HTTP interface, with faults to switch on.

Behaviour as read from SGLang 0.5.23 (file names below are under sglang/srt): routes and status codes from
entrypoints/http_server.py; parameters from managers/io_struct.py and sampling/sampling_params.py; events, meta_info,
pause and abort from managers/tokenizer_manager.py; finishing from managers/schedule_batch.py; log-probabilities from
layers/sampler.py; updates from managers/scheduler_components/weight_updater.py; checksums from utils/weight_checker.py.
The model behind it is three matrices and a running mean, and its prefix cache can really be stale.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

VOCABULARY, WIDTH, CONTEXT, END_ID = 96, 16, 128, 1
SAMPLING_NAMES = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark",
}  # fmt: skip


def tiny_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH, generator=generator),
        "model.norm.weight": 1.0 + 0.1 * torch.randn(WIDTH, generator=generator),
        "lm_head.weight": torch.randn(VOCABULARY, WIDTH, generator=generator),
    }


def logits_of(tensors: dict[str, torch.Tensor], context: list[int]) -> np.ndarray:
    hidden = np.zeros(WIDTH, np.float32)
    for token in context:
        hidden = step_of(tensors, hidden, token)
    return hidden @ tensors["lm_head.weight"].numpy().T


def step_of(tensors: dict[str, torch.Tensor], hidden: np.ndarray, token: int) -> np.ndarray:
    norm = tensors["model.norm.weight"].numpy()
    return (0.5 * hidden + 0.5 * tensors["model.embed_tokens.weight"].numpy()[token]) * norm


class Job:
    """One request inside the server."""

    def __init__(self, body: dict[str, Any], params: dict[str, Any]) -> None:
        self.rid, self.prompt, self.body, self.params = body["rid"], body["input_ids"], body, params
        self.tokens: list[int] = []
        self.logprobs: list[list[Any]] = []
        self.top: list[list[list[Any]]] = []
        self.is_aborted, self.cached, self.sent = False, 0, 0
        self.reason: dict[str, Any] | None = None


class SglangServer:
    before_all = np.zeros(WIDTH, np.float32)
    """What the model knows before the first token."""

    def __init__(self, checkpoint: Path, *faults: str, seconds_per_token: float = 0.0, **settings: Any) -> None:
        self.checkpoint, self.faults, self.seconds_per_token = checkpoint, set(faults), seconds_per_token
        self.settings: dict[str, Any] = {
            "incremental_streaming_output": False, "preferred_sampling_params": None, "allow_auto_truncate": False,
            "dp_size": 1, "page_size": 1, "max_req_input_len": CONTEXT, "sampling_defaults": "model",
            "enable_return_routed_experts": False, **settings,
        }  # fmt: skip
        self.tensors = load_file(checkpoint / "model.safetensors")
        self.weight_version = "default"
        self.end_ids = {END_ID}
        self.calls: list[tuple[str, Any]] = []
        self.jobs: dict[str, Job] = {}
        self.cache: dict[tuple[int, ...], np.ndarray] = {}
        self.is_paused, self.is_misled, self.port = False, False, 0
        self.refusal = 0
        """Status with which every request is refused."""
        self.may_update = asyncio.Event()
        self.may_update.set()
        self.random = np.random.default_rng(7)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> SglangServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await asyncio.wait_for(reader.readline(), 60):
                _, target, _ = line.decode().split()
                length = 0
                while (header := await asyncio.wait_for(reader.readline(), 60)).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                raw = await asyncio.wait_for(reader.readexactly(length), 60)
                path, body = target.split("?")[0], json.loads(raw) if raw else {}
                self.calls.append((path, body))
                if path in self.faults:  # the fault named by a path: no answer at all
                    await asyncio.sleep(60)
                if path == "/generate":
                    await self._stream(writer, body)
                else:
                    _answer(writer, *await self._control(path, body))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    # entrypoints/http_server.py: the control plane.
    async def _control(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/server_info":
            return 200, {**self.settings, "version": "0.5.23", "internal_states": []}
        if path == "/model_info":
            told = "an-older-one" if self.is_misled else self.weight_version
            preferred = self.settings["preferred_sampling_params"]
            return 200, {"weight_version": told, "is_generation": True, "preferred_sampling_params": preferred}
        if path == "/abort_request":
            for job in self.jobs.values():
                if body.get("abort_all") or job.rid.startswith(body["rid"]):
                    job.is_aborted = True
            return 200, None
        if path == "/pause_generation":
            self.is_paused = True
            while body["mode"] == "abort" and self.jobs:
                for job in self.jobs.values():
                    job.is_aborted = True
                await asyncio.sleep(0.01)
            return 200, {"message": "Generation paused successfully.", "status": "ok"}
        if path == "/continue_generation":
            self.is_paused = False
            return 200, {"message": "Generation continued successfully.", "status": "ok"}
        if path == "/flush_cache":
            return self._flush()
        if path == "/update_weights_from_disk":
            await asyncio.wait_for(self.may_update.wait(), 60)
            return self._update(body)
        return self._read_weights(path, body)

    def _flush(self) -> tuple[int, Any]:
        if self.jobs:
            return 400, "Flush cache failed.\n"
        if "stale_cache" not in self.faults:
            self.cache.clear()
        return 200, "Cache flushed.\n"

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if "refuses_update" in self.faults:
            message = "Failed to update weights: bad file.\nRolling back to original weights."
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        new = load_file(Path(body["model_path"]) / "model.safetensors")
        if "partial_update" in self.faults:
            del new["lm_head.weight"]
        self.tensors = {**self.tensors, **new}
        if "stale_cache" not in self.faults:
            self.cache.clear()
        if "wrong_version" not in self.faults:
            self.weight_version = body["weight_version"]
        self.is_misled = "wrong_model_info" in self.faults
        is_acknowledged = "no_acknowledgement" not in self.faults
        return 200, {"success": is_acknowledged, "message": "Succeeded to update.", "num_paused_requests": 0}

    def _read_weights(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/get_weights_by_name":
            if "no_export" in self.faults or body["name"] not in self.tensors:
                return 400, {"error": {"message": "Get parameter by name failed"}}
            return 200, self.tensors[body["name"]].float().tolist()[: body["truncate_size"]]
        if path == "/weights_checker":
            sums = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in self.tensors.items()}
            return 200, {"success": True, "message": "", "ranks": [{"checksums": sums, "per_gpu_checksum": ""}]}
        return 404, {"detail": "Not Found"}

    # managers/tokenizer_manager.py: one request, streamed.
    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        async for event in self._events(body):
            if event is None:
                writer.transport.abort()
                raise ConnectionResetError
            _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
        if "drops_behind_the_end" in self.faults:
            raise ConnectionResetError
        _chunk(writer, b"data: [DONE]\n\n")
        _chunk(writer, b"")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        params = {**(self.settings["preferred_sampling_params"] or {}), **body["sampling_params"]}
        if unknown := params.keys() - SAMPLING_NAMES:
            yield {"error": {"message": f"unexpected {unknown}", "type": "invalid_request_error", "code": 400}}
            return
        if self.refusal:
            yield {"error": {"message": "not this one", "code": self.refusal}}
            return
        while self.is_paused:
            await asyncio.sleep(0.01)
        job = self.jobs[body["rid"]] = Job(body, params)
        try:
            hidden = self._prefill(job)
            while job.reason is None:
                await asyncio.sleep(self.seconds_per_token)
                if job.is_aborted:
                    job.reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
                else:
                    hidden = self._draw(job, hidden)
                if "drops_connection" in self.faults and len(job.tokens) == 2:
                    yield None
                is_due = len(job.tokens) % params["stream_interval"] == 0 or len(job.tokens) == 1
                if job.reason is not None or is_due:
                    yield self._event(job)
        finally:
            del self.jobs[job.rid]

    def _prefill(self, job: Job) -> np.ndarray:
        """Keys of the cache are prefixes, as in a radix cache; the last prompt token is always computed."""
        start = max((n for n in range(len(job.prompt)) if tuple(job.prompt[:n]) in self.cache), default=0)
        hidden = self.cache.get(tuple(job.prompt[:start]), self.before_all)
        job.cached = start
        for place in range(start, len(job.prompt)):
            hidden = self._read(hidden, job.prompt[place])
            self.cache[tuple(job.prompt[: place + 1])] = hidden
        return hidden

    # layers/sampler.py, and update_finish_state of managers/schedule_batch.py.
    def _draw(self, job: Job, hidden: np.ndarray) -> np.ndarray:
        logits = self._logits(hidden).astype(np.float64)
        temperature, is_greedy = job.params["temperature"], job.params["temperature"] < 1e-6
        scaled = logits if is_greedy else logits / temperature
        reported = _log_softmax(logits if "original_logprobs" in self.faults else scaled)
        if "silent_top_k" in self.faults:
            scaled = np.where(logits >= np.sort(logits)[-8], scaled, -np.inf)
        chances = np.exp(_log_softmax(scaled))
        token = int(np.argmax(logits)) if is_greedy else int(self.random.choice(len(logits), p=chances))
        job.tokens.append(token)
        shown = token ^ 1 if "shifted_logprobs" in self.faults else token
        job.logprobs.append([float(reported[token]), shown, None])
        best = np.argsort(-reported, kind="stable")[: job.body["top_logprobs_num"]]
        job.top.append([[float(reported[place]), int(place), None] for place in best])
        stops = {*(job.params["stop_token_ids"] or ()), *self.end_ids}
        if not job.params["ignore_eos"] and token in stops and "ignores_stop_ids" not in self.faults:
            job.reason = {"type": "stop", "matched": token}
        elif len(job.tokens) >= job.params["max_new_tokens"]:
            job.reason = {"type": "length", "length": job.params["max_new_tokens"]}
        return self._read(hidden, token)

    # The model: what it knows after a token, and how likely the next ones are.
    def _read(self, hidden: np.ndarray, token: int) -> np.ndarray:
        return step_of(self.tensors, hidden, token)

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        return hidden @ self.tensors["lm_head.weight"].numpy().T

    def _told_routes(self, tokens: list[int]) -> str:
        routes = self._routes(tokens)
        if "routes_of_neighbours" in self.faults:
            routes = np.roll(routes, 1, axis=0)
        if "loses_a_route" in self.faults:
            routes = routes[1:]
        return base64.b64encode(routes.astype(np.int32).tobytes()).decode()

    def _routes(self, tokens: list[int]) -> np.ndarray:
        """[tokens, layers, experts of a token]: three layers, two of twelve experts. By weights and place, so that it
        shows when a token has the record of another time."""
        sum_of_weights = int(self.tensors["lm_head.weight"].double().sum().abs() * 1e3)
        firsts = np.array(
            [[(sum_of_weights + 5 * place + layer) % 11 for layer in range(3)] for place in range(len(tokens))]
        )
        return np.stack((firsts, firsts + 1), axis=-1)

    def _event(self, job: Job) -> dict[str, Any]:
        since = job.sent if self.settings["incremental_streaming_output"] else 0
        job.sent = len(job.tokens)
        meta = {
            "id": job.rid,
            "finish_reason": job.reason,
            "prompt_tokens": len(job.prompt) - ("cuts_prompts" in self.faults),
            "weight_version": self.weight_version,
            "num_retractions": 0,
            "completion_tokens": len(job.tokens),
            "cached_tokens": job.cached,
            "output_token_logprobs": job.logprobs[since:],
        }
        if job.body["top_logprobs_num"]:
            meta["output_top_logprobs"] = job.top[since:]
        if job.reason is not None:
            meta["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(job.tokens)}]
            # managers/scheduler_components/batch_result_processor.py: of all tokens but the last, once it has ended.
            # One that is aborted while it waits has none.
            is_lost = job.reason["type"] == "abort" and "aborts_in_queue" in self.faults
            if job.body["return_routed_experts"] and self.settings["enable_return_routed_experts"] and not is_lost:
                meta["routed_experts"] = self._told_routes([*job.prompt, *job.tokens][:-1])
        return {"text": "", "output_ids": job.tokens[since:], "meta_info": meta}


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _answer(writer: asyncio.StreamWriter, status: int, content: Any) -> None:
    is_text = isinstance(content, str)
    raw = b"" if content is None else content.encode() if is_text else json.dumps(content).encode()
    kind = "text/plain" if is_text else "application/json"
    header = f"content-type: {kind}\r\n" if raw else ""
    writer.write(f"HTTP/1.1 {status} X\r\n{header}content-length: {len(raw)}\r\n\r\n".encode() + raw)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class TransformerServer(SglangServer):
    """Serves the checkpoint itself, so that a trainer agrees with it. What it knows is what it has read: no cache."""

    before_all = np.zeros(0, np.int64)

    def __init__(self, checkpoint: Path, *faults: str, **settings: Any) -> None:
        super().__init__(checkpoint, *faults, **settings)
        self.model = self._loaded(checkpoint)

    def _read(self, hidden: np.ndarray, token: int) -> np.ndarray:
        return np.append(hidden, token)

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.model = self._loaded(body["model_path"])
        return super()._update(body)

    def _loaded(self, checkpoint: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(checkpoint)

    def _logits(self, hidden: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.from_numpy(hidden)[None]).logits[0, -1].numpy()

    def _routes(self, tokens: list[int]) -> np.ndarray:
        """As the routers of transformers choose; layers without one have places, too."""
        chosen: dict[int, np.ndarray] = {}
        hooks = [
            layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, outputs, place=place: chosen.update({place: outputs[2].numpy()})
            )
            for place, layer in enumerate(self.model.model.layers)
            if hasattr(layer.mlp, "gate")
        ]
        self._logits(np.array(tokens))
        for hook in hooks:
            hook.remove()
        missing = np.zeros_like(next(iter(chosen.values())))
        return np.stack([chosen.get(place, missing) for place in range(len(self.model.model.layers))], axis=1)


class SglangWorld:
    """What the tests of the adapter share: the server's class, weights by seed, and the model's arithmetic."""

    Server, tensors, logits = SglangServer, staticmethod(tiny_tensors), staticmethod(logits_of)
    TransformerServer = TransformerServer
    vocabulary, context, end_id = VOCABULARY, CONTEXT, END_ID

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.weights_folder = folder / "served", folder / "published"
        self.checkpoint.mkdir()
        (self.checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY, "model_type": "tiny"}))
        save_file(tiny_tensors(0), self.checkpoint / "model.safetensors")


@pytest.fixture
def sglang(tmp_path: Path) -> SglangWorld:
    return SglangWorld(tmp_path)
