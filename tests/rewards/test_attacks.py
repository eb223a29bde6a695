"""Guarantee: no attack of the pack scores, on any kind of reward that can run here."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from temper.commands.judging.verify import verify
from temper.errors import UserError
from temper.rewards.form.text import TextReward
from temper.rewards.golden.golden_rows import load_attacks
from temper.rewards.judges.judge import JudgeReward
from temper.sandbox import require_sandbox
from temper.types import Scalar, ScoreKind

pytestmark = pytest.mark.heavy


def why_no_sandbox() -> str:
    try:
        require_sandbox()
    except UserError as error:
        return str(error)
    return ""


NO_SANDBOX = why_no_sandbox()


def test_no_attack_on_math_scores_and_none_breaks_the_verifier() -> None:
    pytest.importorskip("math_verify")
    result = verify("math", attack=True)
    assert result.wrong == []
    # Errors would let a policy stop the run that trains it: every attack here is plainly wrong.
    assert not result.reasons


@pytest.mark.parametrize("kind", ["format", "tags", "json_schema", "ifeval"])
def test_no_attack_on_a_form_scores_and_none_breaks_the_verifier(kind: str) -> None:
    result = verify(kind, attack=True)
    assert result.wrong == []
    assert not result.reasons


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX)
def test_no_attack_on_code_scores() -> None:
    result = verify("code", attack=True, options={"timeout_seconds": 2.0})
    assert result.wrong == []


class Gullible(ThreadingHTTPServer):
    """A judge that repeats what it was shown before its own verdict, and pays for all that left its frame."""

    daemon_threads = True


class _Verdict(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = str(body["messages"][-1]["content"])
        blocks = re.compile(r"<data-([0-9a-f]+) (\w+)>\n(.*?)\n</data-\1 \2>", re.DOTALL)
        outside = blocks.sub("", shown).strip()
        verdict = json.dumps({"score": 10 if outside else 0})
        said = "".join(block[2] for block in blocks.findall(shown) if block[1] == "response")
        text = verdict if outside else f"{said}\n{verdict}"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"model": "judge", "choices": [{"message": {"content": text}}]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_no_flattery_or_injected_instruction_scores_even_with_a_judge_that_repeats_it() -> None:
    with Gullible(("127.0.0.1", 0), _Verdict) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options: dict[str, Scalar] = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "model": "judge"}
        result = verify("judge", attack=True, options=options, rewards={"judge": JudgeReward})
        server.shutdown()
    assert result.wrong == []
    assert {kind for kind, _ in result.reasons} <= {ScoreKind.UNSCORABLE}


def test_a_verifier_that_can_be_fooled_is_caught() -> None:
    row = next(row for row in load_attacks("math") if row.category == "spam")
    fooled = asyncio.run(TextReward("contains").score(row.task(), row.trajectory()))
    assert fooled.value == 1.0
    result = verify("math", attack=True, rewards={"math": lambda **_: TextReward("contains")})
    assert result.wrong
    assert not result.is_fine


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX)
def test_the_golden_programs_are_judged_without_a_mistake() -> None:
    result = verify("code", options={"timeout_seconds": 2.0})
    assert result.wrong == []
    assert result.is_fine
