"""The command in a process of its own: addresses, signals, and what is missing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from temper.build.policy import describe_policy
from temper.commands.serve import ServeSettings, open_sampler
from temper.errors import UserError, install_line
from temper.listening import is_public, listen
from temper.serve.records import read_records
from temper.serve.server import make_server

PROGRAM = """
import sys
from pathlib import Path
from temper.commands.serve import ServeSettings, serve
settings = ServeSettings(
    port=0, name="tiny", max_running=4, dtype="float32", device="cpu", shutdown_seconds=float(sys.argv[2]),
    record=Path(sys.argv[3]),
)
serve(Path(sys.argv[1]), settings, lambda line: print(line, flush=True))
"""


@pytest.mark.heavy
@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_the_exit_is_clean(
    tiny_folder: Path, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_folder), "30", str(tmp_path / "r.db")],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            url = line.split()[-1]
            assert line.startswith('"tiny" is served at http://127.0.0.1:')
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 300, "stream": True, "temperature": 2}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60.0) as response:
                parts = response.iter_text()
                text = next(parts)
                server.send_signal(signal.SIGTERM)
                text += "".join(parts)
            assert text.endswith("data: [DONE]\n\n")
            eventually(lambda: server.poll() is not None)
            assert server.returncode == 0
        finally:
            server.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_a_signal_loses_no_completion_and_leaves_no_traceback(
    tiny_folder: Path, tmp_path: Path, number: signal.Signals, times: int, eventually: Callable[..., None]
) -> None:
    path, body = tmp_path / "r.db", {"model": "tiny", "prompt": "abc", "max_tokens": 500, "temperature": 2, "n": 16}
    program = [sys.executable, "-c", PROGRAM, str(tiny_folder), "0.1", str(path)]
    with (
        subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ThreadPoolExecutor(8) as clients,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            asking = [clients.submit(httpx.post, f"{url}/completions", json=body, timeout=60.0) for _ in range(8)]
            metrics = f"{url.removesuffix('/v1')}/metrics"
            eventually(lambda: "temper_serve_in_flight 128" in httpx.get(metrics, timeout=30.0).text)
            for _ in range(times):
                server.send_signal(number)
            _, told = server.communicate(timeout=60.0)
        finally:
            server.kill()
        for asked in asking:
            asked.exception(timeout=60.0)
    assert server.returncode == 0
    assert "Traceback" not in told
    assert len(read_records(path)) == 8 * 16


def test_only_loopback_is_private() -> None:
    assert [is_public(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "10.1.2.3", "box")] == [
        False, False, False, True, True, True, True
    ]  # fmt: skip


def test_a_taken_port_is_the_users_to_solve() -> None:
    with listen("127.0.0.1", 0) as bound, pytest.raises(UserError, match="Choose another address or port"):
        listen("127.0.0.1", bound.getsockname()[1])


def test_without_uvicorn_the_install_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UserError, match=re.escape(install_line("serve"))):
        make_server(None, 5.0)  # type: ignore[arg-type]


def test_one_full_context_always_fits_into_the_engine(tiny_folder: Path) -> None:
    settings = ServeSettings(max_running=1, device="cpu")
    engine, max_length = open_sampler(describe_policy(tiny_folder), settings)
    assert max_length == 512
    assert engine._settings.num_blocks * engine._settings.block_size > max_length
    with pytest.raises(UserError, match="--context"):
        open_sampler(describe_policy(tiny_folder), ServeSettings(context=513, device="cpu"))
