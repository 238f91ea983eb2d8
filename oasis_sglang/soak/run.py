"""Drives a soak: keeps as many requests under way as the phase says, strikes, mends, and counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from oasis_sglang.client import generate
from oasis_sglang.soak import baseline, results
from oasis_sglang.soak.asking import ANSWERED, LEFT, STUCK, Asking, Outcome, since
from oasis_sglang.soak.faults import FAULTS, SILENCE_SECONDS, Fault, signs
from oasis_sglang.soak.schedule import OUTPUTS, RUSH, Ask, Phase, Prompt, Strike, concurrency
from oasis_sglang.stack import Stack, StackError, StackSpec

TICK_S = 0.02
REQUEST_S = 150.0
"""Within which a request must have ended: the sum of all deadlines that it can run into, and its turn in a rush."""
AFTERMATH_S = 4.0
"""Load goes on after a fault is mended: what is broken by then shows."""
BASELINE_S = 120.0
LOOK_S = 0.2

CONFIG = {"budget_tokens": 1024, "silence_seconds": SILENCE_SECONDS, "read_seconds": SILENCE_SECONDS, "await_seconds": 60.0, "begin_seconds": 15.0,
          "reserve_seconds": 20.0, "recompute_seconds": 30.0, "host_cache_bytes": 128 << 20, "staging_bytes": 32 << 20}
"""Oasis options. Short deadlines, so that all of them are met within a soak."""
TIER_FLAGS = ("--lease-seconds", "10", "--grace-seconds", "2", "--room-seconds", "30", "--drain-seconds", "10")
CAPACITY, CONTEXT = 4, 8192

Progress = Callable[[str], None]


def spec(model, *, arena_bytes: int = 96 << 20) -> StackSpec:
    """The stack of a soak: ``CAPACITY`` requests run at once, and an arena that a rush fills."""
    return StackSpec("oasis", model, config=dict(CONFIG), tier_flags=TIER_FLAGS, arena_bytes=arena_bytes, max_running_requests=CAPACITY,
                     max_total_tokens=12_000)


class Soak:
    """One run over a stack that is up and idle. ``asks``, ``phases`` and ``strikes`` are the schedule, ``prompts`` what it numbers."""

    def __init__(self, stack: Stack, *, prompts: Sequence[Prompt], asks: Iterator[Ask], phases: Sequence[Phase], strikes: Sequence[Strike],
                 seconds: float, progress: Progress = lambda line: None):
        self.stack, self.prompts, self.asks, self.phases, self.strikes = stack, prompts, asks, phases, list(strikes)
        self.seconds, self.progress = seconds, progress
        self.clock = since(time.monotonic())
        self.outcomes: dict[str, Outcome] = {}
        self.under_way: dict[str, tuple[Ask, Asking]] = {}
        self.expected: dict[int, list[int]] = {}
        self.rows: list[tuple[results.Row, list[str]]] = []
        self.quiet = threading.Event()
        """Set by whoever strikes: nothing new is sent, so that it can be seen whether all comes back."""
        self.over = threading.Event()
        self.before: dict[str, baseline.Uses] = {}
        self.most_at_once = 0

    def run(self, *, model: str, seed: int) -> results.Report:
        """Raises StackError when a server ends that nobody has struck, GenerateError when a reference cannot be had."""
        self._learn()
        left = baseline.settle(lambda: baseline.held(self.stack), BASELINE_S)
        if left:
            raise StackError(f"not at rest before the soak: {left}")
        self.before = baseline.uses(self.stack)
        self.clock = since(time.monotonic())
        striker = threading.Thread(target=self._strike_all, name="oasis-striker", daemon=True)
        with ThreadPoolExecutor(RUSH * CAPACITY + 2, thread_name_prefix="oasis-client") as pool:
            striker.start()
            try:
                while self.clock() < self.seconds or striker.is_alive() or self.under_way:
                    self._tick(pool, sending=self.clock() < self.seconds or striker.is_alive())
                    time.sleep(TICK_S)
            finally:  # when interrupted, nobody waits for answers and nothing more is struck
                self.over.set()
                for _, asking in self.under_way.values():
                    asking.drop(LEFT)
        return self._report(model, seed)

    # -- requests -----------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Reference answers, of these servers before anything befell them."""
        for index, prompt in enumerate(self.prompts):
            if prompt.compared:
                self.expected[index] = generate(self.stack.url, prompt.ids, max_new_tokens=max(OUTPUTS)).output_ids
        self.progress(f"{len(self.expected)} reference answers")

    def _tick(self, pool: ThreadPoolExecutor, *, sending: bool) -> None:
        now = self.clock()
        for ask, asking in list(self.under_way.values()):
            age = now - asking.outcome.sent
            if asking.done.is_set():
                self._ended(ask, asking)
            elif age > REQUEST_S:
                asking.drop(STUCK)
            elif ask.leaves is not None and age > ask.leaves:
                asking.drop(LEFT)
        while sending and not self.quiet.is_set() and len(self.under_way) < concurrency(self.phases, now):
            self._send(pool, next(self.asks))
        self.most_at_once = max(self.most_at_once, len(self.under_way))

    def _send(self, pool: ThreadPoolExecutor, ask: Ask) -> None:
        prompt = self.prompts[ask.prompt]
        outcome = Outcome(id=ask.rid, prompt=prompt.name, prompt_tokens=len(prompt.ids), wanted=ask.output, stream=ask.stream, sent=round(self.clock(), 3))
        body = {"input_ids": list(prompt.ids), "rid": ask.rid, "stream": ask.stream,
                "sampling_params": {"temperature": 0, "max_new_tokens": ask.output, "ignore_eos": True}}
        asking = Asking(self.stack.url, body, outcome, self.clock, timeout=REQUEST_S)
        self.outcomes[ask.rid], self.under_way[ask.rid] = outcome, (ask, asking)
        pool.submit(asking.run)

    def _ended(self, ask: Ask, asking: Asking) -> None:
        del self.under_way[ask.rid]
        if asking.outcome.status == ANSWERED and ask.prompt in self.expected:
            asking.outcome.equal = asking.ids == self.expected[ask.prompt][: ask.output]

    # -- faults, on a thread of their own -----------------------------------------------------------------------

    def _strike_all(self) -> None:
        for strike in self.strikes:
            if self.over.wait(max(0.0, strike.at - self.clock())):
                return
            fault = FAULTS[strike.name]
            row = results.Row(fault=fault.name, what=fault.what, began=round(self.clock(), 3), must_notice=fault.noticed is not None and fault.must)
            try:
                self._strike(fault, row)
            except Exception as error:  # noqa: BLE001  a server that does not come back: the row says so, the run ends
                row.still_held = {f"{type(error).__name__}: {str(error)[:300]}": 1}
            finally:
                row.ended = round(self.clock(), 3)
                self.quiet.clear()
            self.progress(f"{fault.name}: noticed after {row.detected} s, at the baseline after {row.restored} s")

    def _strike(self, fault: Fault, row: results.Row) -> None:
        self.progress(f"{fault.name}: {fault.what}")
        before, pid = signs(self.stack), self.stack.servers[fault.victim].pid
        row.began = round(self.clock(), 3)
        self.rows.append((row, list(self.under_way)))
        fault.strike(self.stack)
        struck = self.clock()
        self._watch(fault, row, before, until=struck + fault.away)
        fault.mend(self.stack)
        self._watch(fault, row, before, until=self.clock() + AFTERMATH_S)
        self.quiet.set()
        end = self.clock() + BASELINE_S
        while self.clock() < end and not self.over.is_set():
            self._watch(fault, row, before, until=self.clock() + LOOK_S)
            row.still_held = {} if self.under_way else baseline.settle(lambda: baseline.held(self.stack), 0.0)
            if not self.under_way and not row.still_held:
                row.restored = round(self.clock() - row.began, 1)
                break
        if self.stack.servers[fault.victim].pid != pid:
            self.before[fault.victim] = baseline.uses(self.stack)[fault.victim]

    def _watch(self, fault: Fault, row: results.Row, before: dict, *, until: float) -> None:
        """Until then, and whether somebody notices meanwhile."""
        while True:
            if row.detected is None and fault.noticed is not None:
                try:
                    if fault.noticed(self.stack, before):
                        row.detected = round(self.clock() - row.began, 1)
                except (OSError, ValueError, KeyError):  # the one that is asked is the one that was struck
                    pass
            rest = until - self.clock()
            if rest <= 0:
                return
            time.sleep(min(LOOK_S, rest))

    # -- the end ------------------------------------------------------------------------------------------------

    def _report(self, model: str, seed: int) -> results.Report:
        left = baseline.settle(lambda: baseline.held(self.stack), BASELINE_S)
        self.stack.check()
        report = results.Report(
            model=model, seed=seed, seconds=round(self.clock(), 1), capacity=CAPACITY, most_at_once=self.most_at_once, outcomes=list(self.outcomes.values()),
            faults=[results.judged(row, ids, self.outcomes) for row, ids in self.rows], still_held=left,
            internal_errors=baseline.faults_of_ours(self.stack), grown=baseline.grown(self.before, baseline.uses(self.stack)))
        report.problems = results.problems(report)
        return report
