"""Stock SGLang and Oasis on two hosts of one machine, as `oasis bench` runs them: the interface of decode's host against their own
counters. Needs root and iproute2."""

from __future__ import annotations

import re
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import namespaces
import pytest
from namespaces import enter
from pd import wait_for, worker

from oasis_sglang.bench import meters
from oasis_sglang.client import generate, generate_on_pair
from oasis_sglang.hosts import hosted
from oasis_sglang.launch import NO_REUSE
from oasis_sglang.processes import Processes
from oasis_sglang.stack import Stack, StackSpec

pytestmark = [*namespaces.marks, namespaces.needs_tc]

LONG = (8, 6)
TOKENS = 16
RATE = "200mbit"


@dataclass
class Measured:
    """Of long prompts: answers, payload by the system's own counter, bytes at decode's interface, seconds."""

    answers: list[list[int]]
    payload: float
    heard: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.heard / self.payload


def links() -> str:
    """All namespaces and interfaces of this machine."""
    return "".join(subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout for words in (("netns", "list"), ("-br", "link")))


def transferred(stack: Stack, requests: int) -> float:
    """Bytes by stock prefill's own counter, once it has counted this many requests."""

    def read(what: str) -> float:
        page = urllib.request.urlopen(stack.urls["prefill"] + "/metrics").read().decode()
        return sum(float(v) for v in re.findall(rf"^sglang:kv_transfer_total_mb_{what}\{{.*?\}} (\S+)$", page, re.MULTILINE))

    wait_for(lambda: read("count") >= requests, f"{requests} transfers are counted")
    return read("sum") * 2**20


@pytest.fixture(scope="module")
def run(models, prompts, tmp_path_factory):
    """By name: what was measured; ``front``: bytes on the data network while only the service network was used; ``memory``, ``cpu``;
    ``before`` and ``after``: ``links()``."""
    folder = tmp_path_factory.mktemp("hosts")
    found = {"before": links()}
    common = dict(model=models.s4, decode_flags=NO_REUSE)
    with ExitStack() as undo:
        there = enter(undo, hosted(folder))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Processes.preload, {place.processes for place in there.places.values()}))

        def start(kind: str, **spec) -> Stack:
            return Stack(StackSpec(kind, **{**common, **spec}), there.processes, run_dir=folder / kind, places=there.places, progress=print)

        def measure(ask, counted, indices=LONG) -> Measured:
            payload, (heard, _), began = counted(0), meters.wire(there.hosts), time.perf_counter()
            answers = [ask(prompts[index]) for index in indices]
            seconds = time.perf_counter() - began
            return Measured(answers, counted(len(answers)) - payload, meters.wire(there.hosts)[0] - heard, seconds)

        with start("stock", flags=("--enable-metrics",), decode_flags=()) as stack:

            def stock(prompt):
                return generate(stack.url, prompt, max_new_tokens=TOKENS).output_ids

            stock(prompts[1])  # connections are made
            found["stock"] = measure(stock, lambda more: transferred(stack, 1 + more))
            there.hosts.limit(RATE)
            found["stock, limited"] = measure(stock, lambda more: transferred(stack, 1 + len(LONG) + more), LONG[:1])
            there.hosts.limit(None)

        with start("oasis", config={"admission": "selected", "budget_tokens": 1024}, arena_bytes=256 << 20) as stack:

            def landed(_):
                return worker(stack, "decode")["plane"]["landed_bytes"]

            def exact(prompt):
                return generate_on_pair(stack.urls["prefill"], stack.urls["decode"], stack.bootstrap_port, prompt, bootstrap_host=stack.bootstrap_host,
                                        max_new_tokens=TOKENS, sampling={"custom_params": {"oasis": {"mode": "exact"}}}).output_ids

            def selected(prompt):
                return generate(stack.url, prompt, max_new_tokens=TOKENS).output_ids

            selected(prompts[1])
            exact(prompts[1])
            with meters.Memory({name: [stack.servers[name].pid] for name in ("decode", "tier")}, period=0.2) as memory:
                found["exact"] = measure(exact, landed)
            found["memory"], found["cpu"] = memory, stack.cpu_seconds()
            found["selected"] = measure(selected, landed)
            there.hosts.limit(RATE)
            found["exact, limited"] = measure(exact, landed, LONG[:1])
            there.hosts.limit(None)
            before = meters.wire(there.hosts)
            for name in ("prefill", "decode"):
                stack.server_info(name)
            found["front"] = sum(meters.wire(there.hosts)) - sum(before)
    found["after"] = links()
    for name, what in found.items():
        if isinstance(what, Measured):
            print(f"{name}: {what.payload:.0f} bytes of payload, on the wire {what.ratio:.4f} of it; {what.seconds:.2f} s")
    print(f"decode's memory {memory.start} at the start, at most {memory.peak}, {memory.samples} samples; CPU {found['cpu']:.1f} s; front: {found['front']}")
    return found


def test_both_answer_alike(run):
    assert run["exact"].answers == run["stock"].answers
    assert run["exact, limited"].answers == run["stock, limited"].answers == run["stock"].answers[:1]
    assert len({token for answer in run["stock"].answers for token in answer}) > 10


def test_what_they_count_is_what_their_interface_heard(run):
    assert run["stock"].payload > 60_000_000 and run["exact"].payload == pytest.approx(run["stock"].payload, rel=0.01)
    assert 1.0 <= run["stock"].ratio <= 1.03
    assert 1.0 <= run["exact"].ratio <= 1.03
    assert run["selected"].payload < 0.6 * run["exact"].payload
    assert 1.0 <= run["selected"].ratio <= 1.06, "with manifests, rankings and a descriptor per piece"


def test_http_takes_the_other_network(run):
    """The reports that were fetched have tens of thousands of bytes; decode's heartbeats and polls are all that is left."""
    assert run["front"] < 4000


@pytest.mark.parametrize("system", ["stock", "exact"])
def test_a_limit_holds_in_the_way_of_what_is_moved(run, system):
    limited = run[f"{system}, limited"]
    least = (limited.payload - 2**16) * 8 / 200e6
    assert limited.seconds > least > 1


def test_meters_of_servers_on_hosts(run):
    memory = run["memory"]
    assert memory.start["decode"] > 100 << 20 and memory.above_start("decode") > 10 << 20
    assert memory.start["tier"] > 10 << 20
    assert run["cpu"] > 1


def test_nothing_is_left_behind(run):
    assert run["after"] == run["before"]
