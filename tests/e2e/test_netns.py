"""Wire bytes by an independent meter: the interface counters between two network namespaces.

Tier and prefill are one host, decode another; between them a wire. NIXL runs over TCP, nothing can take a short cut
through shared memory. Needs root and iproute2.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import matrix
import namespaces
import numpy as np
import pytest
from namespaces import enter, serve_worker
from pd import Post, next_room, wait_for

from decode_node.pull import PHASES
from oasis_sglang.hosts import HostsError, bridged, within
from oasis_sglang.processes import Processes
from oasis_sglang.stack import free_port, get_json, import_environment, probe

pytestmark = namespaces.marks


@pytest.fixture(scope="module")
def wire():
    """(this end of a wire, the far end's host)"""
    with ExitStack() as undo:
        hosts, near = enter(undo, bridged(["far"]))
        yield near, hosts["far"]


@contextmanager
def two_hosts(processes, far_processes, wire, models, tmp_path, data_plane, *options):
    """(prefill's URL, decode's URL, bootstrap address and port, decode's report) of a running pair on two hosts. ``options``: decode's."""
    servers = []
    near, far = wire[0], wire[1].wire
    tier_http, bootstrap = free_port(), free_port()
    sock = str(Path(processes.scratch) / f"netns-{data_plane}.sock")

    def start(where, role, there, *flags):
        port = free_port()
        servers.append(serve_worker(where, role, models.s4, there, port, bootstrap, tmp_path / f"{role}-{data_plane}", *flags))
        return f"http://{there.address}:{port}"

    try:
        servers.append(processes.run(
            [sys.executable, "-P", "-m", "oasis_sglang.cli", "tier", "--local", sock, "--listen", f"{near.address}:0", "--http", f"127.0.0.1:{tier_http}",
             "--arena-bytes", "256MiB", "--data-plane", data_plane, "--allow-plaintext"], log=tmp_path / f"tier-{data_plane}.log", env=near.env, name="tier"))
        wait_for(lambda: probe(f"http://127.0.0.1:{tier_http}/readyz"), "the tier is ready")
        prefill = start(processes, "prefill", near, "--oasis-tier", sock)
        decode = start(far_processes, "decode", far, "--oasis-data-plane", data_plane, "--oasis-allow-plaintext", "true", *options)
        for server, url in zip(servers[1:], (prefill, decode)):
            wait_for(lambda s=server, u=url: s.poll() is not None or probe(u + "/health"), f"{server.name} serves", 180)
            assert server.poll() is None, server.tail()
        yield prefill, decode, (near.address, bootstrap), lambda: get_json(decode + "/server_info")["internal_states"][0]["oasis"]
    finally:
        for server in reversed(servers):
            server.stop()


@pytest.fixture(scope="module")
def far_processes(wire, tmp_path_factory):
    log = tmp_path_factory.mktemp("far") / "zygote.log"
    with within(wire[1].namespace, lambda: Processes(log=log, env=import_environment())) as far:
        far.preload()
        yield far


def answer(prefill, decode, bootstrap, prompt, oasis, tokens=16):
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"oasis": oasis}}
    request = {"input_ids": prompt, "sampling_params": sampling, "bootstrap_host": bootstrap[0], "bootstrap_port": bootstrap[1],
               "bootstrap_room": next_room(), "rid": f"wire-{time.monotonic_ns()}"}
    Post(prefill, request)
    reply = Post(decode, request).result()
    assert reply.status == 200, reply.text
    return reply.output_ids


LONG = (8, 7, 6)


@pytest.mark.parametrize("data_plane", ["nixl", "zmq"])
def test_counted_bytes_are_the_bytes_on_the_wire(processes, far_processes, wire, models, goldens, prompt_maker, text, tmp_path, data_plane):
    prompts = matrix.prompts(prompt_maker, text)
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
    processes.preload()
    with two_hosts(processes, far_processes, wire, models, tmp_path, data_plane) as (prefill, decode, bootstrap, report):

        def ask(index, oasis):
            return answer(prefill, decode, bootstrap, prompts[index], oasis)

        def measured(oasis):
            """Answers to three long prompts; payload by the data plane's own meter, by the counters, and bytes on the wire."""
            before, meter = report(), wire[1].wire.heard()
            answers = [ask(index, oasis) for index in LONG]
            on_the_wire = wire[1].wire.heard() - meter
            after = report()
            counted = sum(after["totals"].get(f"bytes_{phase}", 0) - before["totals"].get(f"bytes_{phase}", 0) for phase in PHASES if phase != "manifest")
            return answers, after["plane"]["landed_bytes"] - before["plane"]["landed_bytes"], counted, on_the_wire

        ask(1, {})  # connections are made
        answers, payload, counted, on_the_wire = measured({"mode": "exact"})
        assert answers == [expected[index][:16] for index in LONG]
        _, selected, selected_counted, selected_on_the_wire = measured({})
        layout = report()["layout"]
    record = 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"] * layout["block_tokens"]
    assert counted == payload == record * sum(-(-len(prompts[i]) // 16) for i in LONG) > 90_000_000
    assert selected_counted == selected < 0.6 * payload
    ratios = on_the_wire / payload, selected_on_the_wire / selected
    print(f"{data_plane}: {payload} bytes of payload, on the wire {ratios[0]:.4f} of it; selected {selected}, {ratios[1]:.4f}")
    assert 1.0 <= ratios[0] <= 1.03
    assert 1.0 <= ratios[1] <= 1.06, "with manifests, rankings and a descriptor per piece"


RATE = "20mbit"


@namespaces.needs_tc
def test_reads_are_in_flight_while_forwards_run(processes, far_processes, wire, models, prompt_maker, text, tmp_path):
    """Over a wire of 20 Mbit/s what a step asks for takes longer than a forward: the steps go on meanwhile, and take it when it is there.
    The host cache holds little more than one working set, so that blocks which come back are pulled again."""
    prompts = matrix.prompts(prompt_maker, text)
    processes.preload()
    traces = tmp_path / "traces"
    try:
        wire[1].wire.limit(RATE)
    except HostsError as error:
        pytest.skip(f"NOT RUN: {error}")
    options = ("--oasis-budget-tokens", "512", "--oasis-fetch-blocks-per-step", "0", "--oasis-host-cache-bytes", "4MiB",
               "--oasis-trace-dir", str(traces))
    try:
        with two_hosts(processes, far_processes, wire, models, tmp_path, "nixl", *options) as (prefill, decode, bootstrap, report):
            assert len(answer(prefill, decode, bootstrap, prompts[8], {}, tokens=40)) == 40
            steps = report()["working_sets"]["steps"]
    finally:
        wire[1].wire.limit(None)
    forwards = [(float(f["began"]), float(f["ended"])) for f in map(np.load, sorted(traces.glob("*-forward.npz")))]
    reads = [(float(f["posted"]), float(f["landed"]), int(f["bytes"])) for f in map(np.load, sorted(traces.glob("*-read.npz"))) if f["phase"] == "on_demand"]
    assert len(forwards) == 39 and sum(size for *_, size in reads) > 2_000_000
    inside = sum(posted < ended and landed > began for posted, landed, _ in reads for began, ended in forwards)
    longest = max(sum(posted < began and landed > ended for began, ended in forwards) for posted, landed, _ in reads)
    print(f"{len(reads)} reads on demand; {inside} times one was in flight during a forward; one outlived {longest} whole forwards; {steps}")
    assert inside >= 10 and longest >= 1
    assert steps["swaps_late"] > 0 and steps["swaps_committed"] > 0
