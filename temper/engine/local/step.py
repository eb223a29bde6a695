"""One step of everything that runs: schedule, run, sample, postprocess; and what the steps amount to.

Owns: taking drawn tokens apart (who stops, who wants to know more), counting. Refuses: asyncio, weights (engine.py).
Shapes: _R rows, _S tokens drawn in one burst, _D hidden.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from temper.engine.local.rows import Rows_R
from temper.engine.local.runner import Runner
from temper.engine.local.sampling import Drawn, Draws, Table
from temper.engine.local.scheduler import Schedule, Scheduler
from temper.engine.local.sequence import Sequence
from temper.errors import BackendError
from temper.types import Finish

Followers = list[tuple[int, Sequence]]
"""(place of the leader among the rows just prefilled, request that shares its prompt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """What the device was asked for and has not answered yet."""

    schedule: Schedule
    version: int
    tables: list[Table]
    done_R: Rows_R
    """Rows that are prefilled with this step."""
    followers: Followers
    arrival_R: Rows_R
    """Arrival number of the sequence in each decode row. A sequence that takes the row later has a higher one."""
    seconds: float
    """Seconds that the host spent on asking."""


class Stepper:
    """Brings scheduler and runner together. Python works per sequence only for those that start, end or are special."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self.meter = Meter(scheduler)

    def begin(self, version: int) -> Flight | None:
        """Begins a step by weights of this version. A burst is returned for end(); any other step is ended here."""
        started = time.perf_counter()
        scheduler, runner = self._scheduler, self._runner
        schedule = scheduler.schedule()
        if scheduler.copies:
            runner.copy_blocks(scheduler.copies)
            scheduler.copies.clear()
        if schedule.is_empty:
            return None
        rows, tables, followers = scheduler.rows, [], []
        if len(schedule.decode_R):
            tables.append(runner.decode(schedule.decode_R, rows, schedule.steps))
        if len(schedule.prefill_R):
            hidden_RD = runner.prefill(schedule, rows)
        done_R = scheduler.advance(schedule)
        if len(done_R):
            followers = scheduler.followers_of(done_R)
            tables.append(self._first_draw(hidden_RD, done_R, followers))
        self.meter.look()
        flight = Flight(
            schedule=schedule,
            version=version,
            tables=tables,
            done_R=done_R,
            followers=followers,
            arrival_R=rows.arrival[schedule.decode_R],
            seconds=time.perf_counter() - started,
        )
        if schedule.steps > 1 and not len(schedule.prefill_R):
            return flight
        self.end(flight)
        return None

    def end(self, flight: Flight) -> None:
        """Waits for the answer and hands it out. Call it before the next begin()."""
        started, num_decoded = time.perf_counter(), 0
        drawn = self._runner.fetch(flight.tables)
        self._require_numbers(flight, drawn)
        if len(flight.done_R):
            self._start_followers(flight.done_R, flight.followers, drawn[-1], flight.version)
            self._take(flight.done_R, drawn[-1], flight.version)
        if len(flight.schedule.decode_R):
            num_decoded = self._take(*self._still_there(flight, drawn[0]), flight.version)
        seconds = flight.seconds + time.perf_counter() - started
        self.meter.count(num_decoded, int(flight.schedule.count_R.sum()), seconds)

    def _require_numbers(self, flight: Flight, drawn: list[Drawn]) -> None:
        """A token with log-probability NaN was drawn from nothing: BackendError. Looked at here, where the host has the
        log-probabilities anyway: a look at the device for each token would halt it."""
        decoded, prefilled = flight.schedule.decode_R, flight.done_R
        followed = prefilled[[leader for leader, _ in flight.followers]]
        parts = [rows_R for rows_R in (decoded, np.concatenate((prefilled, followed))) if len(rows_R)]
        for rows_R, table in zip(parts, drawn, strict=True):
            is_nan_R = np.isnan(table.logprobs_RS).any(1)
            if not is_nan_R.any():
                continue
            row = int(rows_R[is_nan_R.argmax()])
            known = self._scheduler.rows.tokens[row, : self._scheduler.rows.length[row]].tolist()
            why = self._runner.explain_nan(known) or "but a pass over the same tokens alone has none"
            raise BackendError(
                f"{int(is_nan_R.sum())} of {len(rows_R)} rows have log-probability NaN at version {flight.version} of "
                f"the weights: {why}. Go back to a checkpoint before that, with a lower learning rate or in float32"
            )

    def _still_there(self, flight: Flight, drawn: Drawn) -> tuple[Rows_R, Drawn]:
        """Without rows that were stopped or preempted meanwhile: what they drew, they draw again if they go on."""
        rows, decode_R = self._scheduler.rows, flight.schedule.decode_R
        is_there_R = rows.is_active[decode_R] & (rows.arrival[decode_R] == flight.arrival_R)
        if is_there_R.all():
            return decode_R, drawn
        kept = Drawn(tokens_RS=drawn.tokens_RS[is_there_R], logprobs_RS=drawn.logprobs_RS[is_there_R])
        return decode_R[is_there_R], kept

    def _first_draw(self, hidden_RD: torch.Tensor, done_R: Rows_R, followers: Followers) -> Table:
        """A token for each row just prefilled, and one for each request that shares its prompt."""
        draws = self._scheduler.rows.draws(done_R)
        if not followers:
            return self._runner.draw(hidden_RD, draws)
        places = np.concatenate((np.arange(len(done_R)), [place for place, _ in followers])).astype(np.int64)
        asked = [follower.request.params for _, follower in followers]
        keys = np.asarray([follower.random_key for _, follower in followers], dtype=np.uint64)
        draws = Draws(
            temperature_R=_joined(draws.temperature_R, [params.temperature for params in asked]),
            random_key_R=np.concatenate((draws.random_key_R, keys)),
            position_R=draws.position_R[places],
            top_k_R=_joined(draws.top_k_R, [params.top_k for params in asked]),
            top_p_R=_joined(draws.top_p_R, [params.top_p for params in asked]),
            min_p_R=_joined(draws.min_p_R, [params.min_p for params in asked]),
            num_top=max(draws.num_top, *(params.top_logprobs for params in asked)),
            entropy=draws.entropy or any(params.entropy for params in asked),
        )
        return self._runner.draw(hidden_RD[torch.from_numpy(places).to(hidden_RD.device, non_blocking=True)], draws)

    def _start_followers(self, done_R: Rows_R, followers: Followers, drawn: Drawn, version: int) -> None:
        """Before the leaders take their tokens: one that ends with its first token gives its blocks back."""
        parked = []
        for place, (leader, follower) in enumerate(followers, start=len(done_R)):
            token, logprob = int(drawn.tokens_RS[place, 0]), float(drawn.logprobs_RS[place, 0])
            is_stop = token in follower.request.params.stop_ids
            if follower.is_special:
                follower.record(drawn, place)
                is_stop |= follower.stop_texts is not None and follower.stop_texts.end([], [token]) is not None
            self._scheduler.routes.lend(int(done_R[leader]), follower)
            follower.take(token, logprob, version)
            if follower.watch is not None:
                follower.watch([token], [logprob])
            if is_stop or len(follower.token_ids) >= self._scheduler.limit_of(follower):
                self._scheduler.end(follower, Finish.STOP if is_stop else Finish.LENGTH)
            else:
                self._scheduler.fork(int(done_R[leader]), follower)
                parked.append(follower)
        self._scheduler.park(parked)

    def _take(self, rows_R: Rows_R, drawn: Drawn, version: int) -> int:
        """Hands the rows what they drew, each up to its end; returns how many tokens that were."""
        rows = self._scheduler.rows
        tokens_RS, logprobs_RS = drawn.tokens_RS[: len(rows_R)], drawn.logprobs_RS[: len(rows_R)]
        kept_R, is_stop_R = rows.cut(rows_R, tokens_RS)
        places = np.flatnonzero(rows.is_special[rows_R]).tolist()
        special = [(place, rows.sequence(int(rows_R[place]))) for place in places]
        for place, sequence in special:
            sequence.record(drawn, place)
            if (texts := sequence.stop_texts) is not None:
                before = rows.drawn_tail(int(rows_R[place]), texts.window)
                if (end := texts.end(before, tokens_RS[place, : kept_R[place]].tolist())) is not None:
                    kept_R[place], is_stop_R[place] = end, True
        rows.append(rows_R, tokens_RS, logprobs_RS, kept_R, version)
        for place, sequence in special:
            if sequence.watch is not None:
                kept = int(kept_R[place])
                sequence.watch(tokens_RS[place, :kept].tolist(), logprobs_RS[place, :kept].tolist())
        is_cut_R = rows.length[rows_R] >= rows.limit[rows_R]
        for place in np.flatnonzero(is_stop_R | is_cut_R).tolist():
            self._scheduler.finish(int(rows_R[place]), Finish.STOP if is_stop_R[place] else Finish.LENGTH)
        return int(kept_R.sum())


class Meter:
    """Totals since the start, and the difference since they were last read."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = dict.fromkeys(
            ("steps", "prefill_tokens", "decode_tokens", "step_seconds", "running", "waiting"), 0.0
        )
        self._last = self.totals()
        self._peak_use = 0.0

    def look(self) -> None:
        """Counts what runs and waits. Called in the middle of a step, when everything that runs has its blocks."""
        self._steps["running"] += self._scheduler.num_running
        self._steps["waiting"] += self._scheduler.num_waiting
        self._peak_use = max(self._peak_use, self._scheduler.pool.use)

    def count(self, decode: int, prefill: int, seconds: float) -> None:
        self._steps["steps"] += 1
        self._steps["decode_tokens"] += decode
        self._steps["prefill_tokens"] += prefill
        self._steps["step_seconds"] += seconds

    def totals(self) -> dict[str, float]:
        """`running` and `waiting` are sums over steps."""
        counters = self._scheduler.counters
        return self._steps | {
            "preemptions": float(counters.preemptions),
            "shared_prefills": float(counters.shared_prefills),
            "prompt_tokens": float(counters.prompt_tokens),
            "found_tokens": float(counters.found_tokens),
            "finished": float(counters.ends[Finish.STOP] + counters.ends[Finish.LENGTH]),
            "aborted": float(counters.ends[Finish.ABORT]),
            "interrupted": float(counters.ends[Finish.INTERRUPT]),
        }

    def since_last(self) -> dict[str, float]:
        totals = self.totals()
        new = {name: value - self._last[name] for name, value in totals.items()}
        self._last = totals
        asked, found = new.pop("prompt_tokens"), new.pop("found_tokens")
        steps, seconds = max(new["steps"], 1.0), new.pop("step_seconds")
        peak, self._peak_use = self._peak_use, 0.0
        running = new["running"] / steps
        return new | {
            "kv_use": peak,
            "running": running,
            "waiting": new["waiting"] / steps,
            "occupancy": running / len(self._scheduler.rows.is_active),
            "prefix_hit_rate": found / asked if asked else 0.0,
            "prefill_tok_s": new["prefill_tokens"] / seconds if seconds else 0.0,
            "decode_tok_s": new["decode_tokens"] / seconds if seconds else 0.0,
        }

    def utilisation(self) -> Mapping[str, float]:
        """Gauges of now and totals since the start, by the names a scraper of metrics expects."""
        scheduler, totals = self._scheduler, self.totals()
        del totals["running"], totals["waiting"]
        gauges = {
            "temper_engine_kv_use": scheduler.pool.use,
            "temper_engine_running": float(scheduler.num_running),
            "temper_engine_waiting": float(scheduler.num_waiting),
            "temper_engine_occupancy": scheduler.num_running / len(scheduler.rows.is_active),
        }
        return gauges | {f"temper_engine_{name}_total": value for name, value in totals.items()}


def _joined(array: Any, more: list[Any]) -> Any:
    return np.concatenate((array, np.asarray(more, dtype=array.dtype)))
