"""Deadlines of verifiers hold inside a Ray actor, whose main thread is not the process's own to signal."""

from __future__ import annotations

import os
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed; `make adapters` installs and runs this")


@pytest.fixture(scope="module")
def cluster() -> Any:
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # "local": a cluster of its own, whatever else of Ray runs on this machine.
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


def test_a_hanging_verifier_costs_one_worker_and_its_deadline(cluster: Any) -> None:
    @ray.remote(num_cpus=1)
    class Verifier:
        def __init__(self) -> None:
            from temper.rewards.workers.pool import WorkerPool

            self.pool = WorkerPool("time:sleep", size=1, deadline_seconds=0.5)

        def check(self, seconds: float) -> str:
            from temper.rewards.workers.pool import WorkerFailed

            try:
                return str(self.pool.submit(seconds).result(timeout=60.0))
            except WorkerFailed as error:
                return str(error)

        def close(self) -> list[int]:
            self.pool.close()
            return self.pool.process_ids

    actor = Verifier.remote()
    assert ray.get(actor.check.remote(0.01), timeout=90) == "None"
    assert "timeout after 0.5 s" in ray.get(actor.check.remote(3600.0), timeout=90)
    assert ray.get(actor.check.remote(0.01), timeout=90) == "None", "a fresh worker has taken over"
    assert ray.get(actor.close.remote(), timeout=90) == []
