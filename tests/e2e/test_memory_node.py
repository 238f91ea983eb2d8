"""Two prefill, two decode and two memory nodes, each a host of its own on one bridge; NIXL over TCP. Needs root and iproute2.

    prefill0, prefill1 (worker and tier) --hop 1--> memory0, memory1 --hop 2--> decode0, decode1
"""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import matrix
import namespaces
import pytest
from namespaces import enter, serve_worker
from pd import Post, next_room, wait_for

from oasis_sglang.hosts import Host, bridged, within
from oasis_sglang.processes import Processes, Server
from oasis_sglang.stack import get_json, import_environment, probe
from prefill_node.query_tap import WINDOW

pytestmark = namespaces.marks

PREFILLS, DECODES, MEMORY = (tuple(f"{role}{index}" for index in range(2)) for role in ("prefill", "decode", "memory"))
CONTROL, HTTP, WORKER, BOOTSTRAP = 5555, 8081, 8080, 8998
"""Ports, the same on every host."""
TOKENS = 16
PAGE = 16


@dataclass
class Cluster:
    hosts: dict[str, Host]
    hold: Path
    """While this file exists no decode node starts a read."""
    servers: dict[str, Server] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://{self.hosts[name].wire.address}:{WORKER}"

    def tier(self, name: str) -> dict:
        return get_json(f"http://{self.hosts[name].wire.address}:{HTTP}/state")

    def report(self, name: str) -> dict:
        return get_json(self.url(name) + "/server_info")["internal_states"][0]["oasis"]

    def request(self, prefill: str, prompt: list[int], tokens: int = TOKENS) -> dict:
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, "custom_params": {"oasis": {"mode": "exact"}}}
        room = next_room()
        return {"input_ids": prompt, "sampling_params": sampling, "bootstrap_host": self.hosts[prefill].wire.address, "bootstrap_port": BOOTSTRAP,
                "bootstrap_room": room, "rid": f"room-{room}"}

    def ask(self, prefill: str, decode: str, prompt: list[int]) -> list[int]:
        request = self.request(prefill, prompt)
        Post(self.url(prefill), request)
        reply = Post(self.url(decode), request).result()
        assert reply.status == 200, reply.text
        return reply.output_ids

    def wire(self) -> dict[str, int]:
        """Payload of both hops by our counters, and bytes on the wires to and from the memory nodes and from prefill nodes."""
        return {"filled": sum(self.tier(name)["totals"].get("bytes_filled", 0) for name in MEMORY),
                "landed": sum(self.report(name)["plane"]["landed_bytes"] for name in DECODES),
                "to_memory": sum(self.hosts[name].wire.heard() for name in MEMORY), "from_memory": sum(self.hosts[name].wire.said() for name in MEMORY),
                **{f"from_{name}": self.hosts[name].wire.said() for name in PREFILLS}}

    def held_by_memory(self, what: str) -> int:
        return sum(self.tier(name)["inventory"][what] for name in MEMORY)

    def lose(self, prefill: str) -> None:
        """The whole host at once: worker, tier, cable."""
        for server in (self.servers[prefill], self.servers[f"{prefill}-tier"]):
            server.signal(signal.SIGKILL, group=True)
        self.hosts[prefill].wire.cut()


@pytest.fixture(scope="module")
def cluster(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory-node")
    with ExitStack() as stack:
        hosts, _ = enter(stack, bridged([*PREFILLS, *DECODES, *MEMORY]))
        processes = {name: stack.enter_context(within(host.namespace, lambda name=name: Processes(log=folder / f"{name}-zygote.log", env=import_environment())))
                     for name, host in hosts.items()}
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: processes[name].preload(), [*PREFILLS, *DECODES]))
        made = Cluster(hosts, folder / "hold")
        stack.callback(lambda: [server.stop() for server in reversed(made.servers.values())])

        def serve_tier(name: str, host: Host, *flags: str) -> str:
            """Its socket for workers."""
            socket = str(processes[host.name].scratch / "tier.sock")
            made.servers[name] = processes[host.name].run(
                [sys.executable, "-P", "-m", "oasis_sglang.cli", "tier", "--local", socket, "--listen", f"{host.wire.address}:{CONTROL}",
                 "--http", f"{host.wire.address}:{HTTP}", "--node", host.name, "--arena-bytes", "256MiB", "--data-plane", "nixl", "--allow-plaintext", *flags],
                log=folder / f"{name}.log", env=host.wire.env, name=name)
            return socket

        def ready(names: dict[str, str]) -> None:
            for name, url in names.items():
                wait_for(lambda: made.servers[name].poll() is not None or probe(url), f"{name} serves", 240)
                assert made.servers[name].poll() is None, made.servers[name].tail()

        for name in MEMORY:
            serve_tier(name, hosts[name])
        ready({name: f"http://{hosts[name].wire.address}:{HTTP}/readyz" for name in MEMORY})
        nodes = ",".join(f"tcp://{hosts[name].wire.address}:{CONTROL}" for name in MEMORY)
        sockets = {name: serve_tier(f"{name}-tier", hosts[name], "--memory-nodes", nodes) for name in PREFILLS}
        ready({f"{name}-tier": f"http://{hosts[name].wire.address}:{HTTP}/readyz" for name in PREFILLS})
        for name in (*PREFILLS, *DECODES):
            role = name.rstrip("01")
            options = ("--oasis-tier", sockets[name]) if role == "prefill" else (
                "--oasis-hold-reads-file", str(made.hold), "--oasis-silence-seconds", "5", "--oasis-await-seconds", "120",
                "--oasis-allow-plaintext", "true")
            made.servers[name] = serve_worker(processes[name], role, models.s4, hosts[name].wire, WORKER, BOOTSTRAP, folder / name, *options)
        ready({name: made.url(name) + "/health" for name in (*PREFILLS, *DECODES)})
        yield made


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


def pages(prompt: list[int]) -> int:
    return -(-len(prompt) // PAGE)


def page_bytes(cluster: Cluster) -> int:
    layout = cluster.report("decode0")["layout"]
    return 2 * layout["num_layers"] * layout["kv_heads"] * layout["head_dim"] * layout["itemsize"] * PAGE


def test_a_prefix_crosses_the_first_hop_once_and_both_hops_are_counted_apart(cluster, prompts, expected):
    for prefill, decode in zip(PREFILLS, DECODES):  # connections are made
        cluster.ask(prefill, decode, prompts[1])
    cluster.ask("prefill1", "decode0", prompts[2])
    long = (8, 6, 5)
    before = cluster.wire()
    answers = [cluster.ask("prefill0", "decode0", prompts[index]) for index in long]
    cold = grown(before, cluster.wire())
    assert answers == [expected[index][:TOKENS] for index in long]
    record, rest = divmod(cold["filled"], sum(pages(prompts[index]) for index in long))
    ratios = cold["to_memory"] / cold["filled"], cold["from_memory"] / cold["landed"]
    print(f"hop 1: {cold['filled']} bytes of payload, {ratios[0]:.4f} of it on the wire; hop 2: {cold['landed']}, {ratios[1]:.4f}")
    payload = page_bytes(cluster)
    assert rest == 0 and payload <= record < 1.05 * payload, "every page once, with its index"
    assert cold["landed"] == payload * sum(pages(prompts[index]) for index in long)
    assert all(1.0 <= ratio <= 1.03 for ratio in ratios)

    prompt, prefix = prompts[7], 200 * PAGE  # of 5,000 tokens
    cluster.ask("prefill0", "decode0", prompt[:prefix])
    before = cluster.wire()
    assert cluster.ask("prefill1", "decode1", prompt) == expected[7][:TOKENS]
    warm = grown(before, cluster.wire())
    fresh = pages(prompt) - prefix // PAGE
    print(f"through the other prefill node: {fresh} of {pages(prompt)} pages over hop 1, {warm['from_prefill1']} bytes on its wire; {warm['landed']} over hop 2")
    assert warm["filled"] == fresh * record and warm["landed"] == payload * pages(prompt)
    assert 1.0 <= warm["from_prefill1"] / warm["filled"] <= 1.06, "with the commit and its ranking"


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("prefill", PREFILLS)
def test_every_pair_answers_every_prompt_as_one_server_would(cluster, prompts, expected, prefill, decode):
    before, asked = cluster.report(decode), cluster.wire()["landed"]
    answers = [cluster.ask(prefill, decode, prompt) for prompt in prompts]
    assert answers == [tokens[:TOKENS] for tokens in expected]
    assert cluster.tier(prefill)["totals"].get("rooms_claimed", 0) == 0, "no decode node reads a prefill host"
    assert cluster.report(decode)["totals"]["moved"] - before["totals"]["moved"] == len(prompts)
    assert cluster.wire()["landed"] - asked == page_bytes(cluster) * sum(map(pages, prompts))


def test_the_next_turn_through_the_other_prefill_host_is_fetched_back_and_not_computed(cluster, goldens, models, prompt_maker, text):
    first = prompt_maker.cut(text, 3000, skip=40_000)
    [said] = goldens.get(models.s4, [first], TOKENS)
    second = [*first, *said, *prompt_maker.chat("And then?")]
    [said_again] = goldens.get(models.s4, [second], TOKENS)

    def counted() -> dict[str, int]:
        restore, tier = cluster.report("prefill1")["restore"], cluster.tier("prefill1")["totals"]
        return {**{name: int(restore.get(name, 0)) for name in ("restored_tokens", "computed_tokens", "restore_failures")},
                **{name: tier.get(name, 0) for name in ("pages_fetched_back", "bytes_fetched_back", "fetch_seconds", "fetches_failed", "pages_moved")}}

    assert cluster.ask("prefill0", "decode0", first) == said
    before, wires = counted(), cluster.wire()
    assert cluster.ask("prefill1", "decode1", second) == said_again
    after, warm = grown(before, counted()), grown(wires, cluster.wire())
    known = min(len(first), len(second) - WINDOW) // PAGE  # the queries of the last tokens rank the prompt's blocks: those are computed
    print(f"{after}; from the memory nodes {warm['from_memory']} bytes, {warm['landed']} of them landed at decode")
    assert after["restored_tokens"] == after["pages_fetched_back"] * PAGE == known * PAGE
    assert after["computed_tokens"] == len(second) - known * PAGE and after["restore_failures"] == after["fetches_failed"] == 0
    assert after["pages_moved"] == pages(second) - len(first) // PAGE, "what came from there does not go back"
    assert 1.0 <= warm["from_memory"] / (warm["landed"] + after["bytes_fetched_back"]) <= 1.03
    wait_for(lambda: not any(cluster.tier("prefill1")["inventory"][k] for k in ("writing", "leased", "holders", "rooms", "fetches")), "at its baseline")


def test_both_memory_nodes_were_used_and_hold_nothing_for_anybody(cluster):
    for name in MEMORY:
        assert cluster.tier(name)["totals"]["rooms_claimed"] > 0
        wait_for(lambda: not any(cluster.tier(name)["inventory"][k] for k in ("writing", "leased", "holders", "rooms", "leases", "waiters")), f"{name} at its baseline")
    for name in DECODES:
        wait_for(lambda: cluster.report(name)["pulls"] == 0, f"{name} at its baseline")


def test_a_prefill_host_is_lost_after_the_commit(cluster, prompts, expected):
    """Its last two rooms were committed: one that decode was about to read, and one that decode had not asked for yet."""

    def reads() -> int:
        return cluster.report("decode0")["plane"]["reads"]

    before = reads()
    cluster.hold.touch()
    try:
        claimed, unclaimed = (cluster.request("prefill1", prompts[index], matrix.OUTPUT_TOKENS) for index in (4, 3))
        prefill, soon = Post(cluster.url("prefill1"), claimed), Post(cluster.url("decode0"), claimed)
        assert prefill.result().status == 200
        wait_for(lambda: cluster.held_by_memory("leases") == 1, "one is claimed")
        assert Post(cluster.url("prefill1"), unclaimed).result().status == 200
        assert cluster.held_by_memory("rooms") == 1, "the other one is committed"
        cluster.lose("prefill1")
        late = Post(cluster.url("decode0"), unclaimed)
        wait_for(lambda: cluster.held_by_memory("leases") == 2, "a memory node was found to have it")
        time.sleep(12)  # longer than decode's heartbeats need to declare the prefill node dead
        assert reads() == before
    finally:
        cluster.hold.unlink()
    assert soon.result().output_ids == expected[4]
    assert late.result().output_ids == expected[3]
    assert cluster.report("decode0")["totals"]["searches"] >= 1
    assert cluster.ask("prefill0", "decode0", prompts[2]) == expected[2][:TOKENS], "the others go on"
