"""The pods of the chart, run for real: every rendered command, with the 4-layer model and without a GPU, found by SGLang's router as in a cluster."""

import json
import os
import signal
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import matrix
import pytest
from pd import wait_for

from oasis_sglang import keyring
from oasis_sglang.stack import free_port, get_json

sys.path.insert(0, str(Path(__file__).parents[1] / "deploy"))
import chart_rig as rig  # noqa: E402
from kubelet_rig import PodList, RunningPod, get, owner_only  # noqa: E402

DRAIN = 60
SMALL = {"baseMemory": "4Gi", "shmSize": "64Mi", "drainSeconds": DRAIN}


def chart_values(model: Path) -> dict:
    ports = {name: free_port() for name in ("worker", "bootstrap", "control", "tierHttp", "router", "routerMetrics")}
    return {
        "model": {"path": f"/models/{model.name}", "servedName": "tiny", "volume": {"persistentVolumeClaim": {"claimName": "models"}}}, "gpuResource": "",
        "security": {"keys": {"tier": "tier-keys", "decode": "decode-keys"}}, "ports": ports,
        "tier": {"arena": "256Mi", "baseMemory": "256Mi", "drainSeconds": DRAIN, "zeroFreed": True}, "prefill": SMALL,
        "decode": {**SMALL, "hostCache": "256Mi", "kvPoolTokens": 20_000, "extraArgs": ["--oasis-budget-tokens", "8192"]},
        "monitoring": {"kind": "podMonitor"}}


def secrets(folder: Path) -> dict[str, dict[str, bytes]]:
    """As deploy/helm/oasis/README.md has them made."""
    names = ("tier", "decode", "memory")
    for name in names:
        keyring.create(folder, name)
    return {f"{own}-keys": {"node.key_secret": (folder / f"{own}.key_secret").read_bytes(),
                            **{f"{other}.key": (folder / f"{other}.key").read_bytes() for other in names if other != own}} for own in names}


def post(url: str, body: dict, timeout: float = 180) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def generate(url: str, ids: list[int], tokens: int) -> dict:
    return post(f"{url}/generate", {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}})


@contextmanager
def paused(*servers):
    for server in servers:
        server.signal(signal.SIGSTOP, group=True)
    try:
        yield
    finally:
        for server in servers:
            server.signal(signal.SIGCONT, group=True)


class Cluster:
    """The pods of the release. Whatever runs is stopped at the end."""

    def __init__(self, processes, objects: list[dict], folder: Path, secrets: dict, claims: dict):
        self.objects, self.api = objects, PodList(folder)
        self.pods: dict[str, RunningPod] = {}
        self._processes, self._logs, names = processes, folder, {}
        for pod in rig.pods(objects):
            full = pod.owner["metadata"]["name"]
            name = f"{full}-0"
            self.pods[pod.role] = RunningPod(pod, name, folder=Path(tempfile.mkdtemp(prefix="pod-", dir=processes.scratch)), secrets=secrets, claims=claims,
                                             hosts=names, start=self._start)
            names |= dict.fromkeys((f"{name}.{full}.{rig.NAMESPACE}.svc", f"{full}.{rig.NAMESPACE}.svc"), self.pods[pod.role].ip)

    def _start(self, argv, env, name):
        env = {"KUBECONFIG": str(self.api.kubeconfig), "OMP_NUM_THREADS": "1", **env}
        return self._processes.run(argv, env=env, log=self._logs / f"{name}.log", name=name)

    def __getitem__(self, role: str) -> RunningPod:
        return self.pods[role]

    def url(self, role: str, port: str = "http", container: str = "") -> str:
        return self[role].url(self[role].pod[container or role], port)

    def delete(self, role: str) -> None:
        """The API says so first; the pods' SIGTERM comes preStopSeconds later."""
        self[role].deleted = True
        self.api.put(self[role], ready=True)

    def close(self) -> None:
        for role in ("router", "decode", "prefill", "memory"):
            for server in reversed(self[role].servers.values()) if role in self.pods else ():
                server.stop()
        self.api.close()


@pytest.fixture
def clusters(processes, models, tmp_path):
    """``clusters(values)``: the release with these values on top, nothing of it started."""
    made = []

    def make(values: dict | None = None) -> Cluster:
        given = rig.merged(chart_values(models.s4), values or {})
        keys = secrets(tmp_path / "keys")
        given["security"]["memoryNodeKey"] = keyring.public_key(tmp_path / "keys/memory.key")
        made.append(Cluster(processes, rig.render(given), tmp_path, keys, {"models": models.s4.parent}))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


def test_pods_start_find_each_other_answer_and_drain(clusters, goldens, models, prompt_maker, text):
    cluster = clusters()
    prompts = matrix.prompts(prompt_maker, text)
    expected = goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)

    # The router comes up with nobody there, and asks for this namespace's pods only.
    router = cluster["router"]
    router.start()
    router.wait(router.pod["router"], "startup", 60)
    assert [router.probe(router.pod["router"], kind) for kind in ("readiness", "liveness")] == [200, 200]
    wait_for(lambda: any("watch=true" in path for path in cluster.api.asked), "it watches")
    assert all(path.startswith(f"/api/v1/namespaces/{rig.NAMESPACE}/pods?") for path in cluster.api.asked)

    # Doctors, keys, the sidecar before its worker.
    workers = [cluster[role] for role in ("prefill", "decode")]
    for pod in workers:
        pod.start()
        cluster.api.put(pod, ready=False)
    for pod in workers:
        own = pod.path(pod.pod["tier" if "tier" in pod.pod else "decode"], "/run/oasis-key/node.key_secret")
        assert owner_only(own), "where the mounted one is its group's as well"
        mounted = pod.path(pod.pod["keys"], "/etc/oasis/keys/node.key_secret")
        assert not owner_only(mounted) and mounted.read_bytes() == own.read_bytes()
        pod.wait(pod.pod[pod.pod.role], "startup", 240)
        wait_for(lambda pod=pod: pod.ready, f"{pod.name} is ready")
        assert get_json(cluster.url("router", "api") + "/workers")["workers"] == [], "not before the API says that they are Ready"
    for pod in workers:
        cluster.api.put(pod, ready=True)
    wait_for(lambda: len(get_json(cluster.url("router", "api") + "/workers")["workers"]) == 2, "the router has found them")
    found = {one["url"]: one["worker_type"] for one in get_json(cluster.url("router", "api") + "/workers")["workers"]}
    assert found == {cluster.url("prefill"): "prefill", cluster.url("decode"): "decode"}

    # A request crosses: router, prefill, tier, decode.
    answer = generate(cluster.url("router", "api"), prompts[3], 16)
    assert answer["output_ids"] == expected[3][:16]
    decode = get_json(cluster.url("decode") + "/server_info")["internal_states"][0]["oasis"]
    assert decode["plane"]["landed_bytes"] > 0 and decode["requests"]
    chat = post(cluster.url("router", "api") + "/v1/chat/completions", {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]})
    assert chat["choices"][0]["message"]["content"]

    # What monitors scrape is there.
    names = {("prefill", "http", "prefill"): "oasis_prefill_rooms_committed_total", ("prefill", "tier-http", "tier"): "oasis_tier_rooms_committed_total",
             ("decode", "http", "decode"): "oasis_decode_kv_pool_tokens", ("router", "metrics", "router"): "smg_discovery_registrations_total"}
    for (role, port, container), metric in names.items():
        wait_for(lambda role=role, port=port, container=container, metric=metric: metric in get(cluster.url(role, port, container) + "/metrics")[1], metric)
    assert "sglang:num_queue_reqs" in get(cluster.url("prefill") + "/metrics")[1]

    # Probes ask nobody else: with all others stopped, each still says that it is well.
    prefill, decode, tier = cluster["prefill"], cluster["decode"], cluster["prefill"].servers["tier"]
    for pod, name, others in ((decode, "decode", (prefill.servers["prefill"], tier, router.servers["router"])),
                              (prefill, "prefill", (decode.servers["decode"], tier, router.servers["router"])),
                              (prefill, "tier", (decode.servers["decode"], prefill.servers["prefill"], router.servers["router"])),
                              (router, "router", (decode.servers["decode"], prefill.servers["prefill"], tier))):
        with paused(*others):
            kinds = ("readiness", "liveness") if name in ("tier", "router") else ("startup", "readiness", "liveness")
            assert [pod.probe(pod.pod[name], kind) for kind in kinds] == [200] * len(kinds), name

    # A decode pod is deleted while it answers: the router leaves it at once, SIGTERM lets the answer end.
    wait_for(lambda: len([one for one in get_json(cluster.url("router", "api") + "/workers")["workers"] if one["is_healthy"]]) == 2, "all are well again")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(generate, cluster.url("router", "api"), prompts[3], 300)
        wait_for(lambda: get_json(cluster.url("decode") + "/server_info")["internal_states"][0]["oasis"]["kv_pool_tokens"] > 0, "it runs")
        cluster.delete("decode")
        wait_for(lambda: len(get_json(cluster.url("router", "api") + "/workers")["workers"]) == 1, "the router has left it")
        decode.terminate("decode")
        wait_for(lambda: decode.probe(decode.pod["decode"], "readiness") == 503, "it is not ready any more")
        assert not long.done()
        assert decode.probe(decode.pod["decode"], "liveness") == 503, "which nobody asks of a pod that is being deleted"
        answer = long.result(DRAIN)
    assert len(answer["output_ids"]) == 300 and answer["output_ids"][:16] == expected[3][:16]
    assert decode.servers["decode"].wait(DRAIN) == 0

    # Prefill, then its tier, which nobody reads from any more.
    cluster.delete("prefill")
    prefill.terminate("prefill")
    assert prefill.servers["prefill"].wait(DRAIN + 30) == 0 and tier.poll() is None
    assert get(cluster.url("prefill", "tier-http", "tier") + "/readyz")[0] == 200
    assert get_json(cluster.url("prefill", "tier-http", "tier") + "/state")["inventory"]["leases"] == 0
    prefill.terminate("tier")
    assert tier.wait(20) == 0
    assert not os.path.exists(prefill.path(prefill.pod["tier"], "/run/oasis/tier.sock"))
    router.terminate("router")
    assert router.servers["router"].wait(30) == 0


def test_a_staging_tier_knows_its_memory_nodes(clusters):
    """By their name, at their port, with their key. Workers are left out; the tier connects when one of them has a prompt."""
    values = {"tier": {"mode": "memoryNode", "memoryNodes": {"replicas": 1, "arena": "256Mi", "baseMemory": "256Mi"}}, "security": {"keys": {"memoryNode": "memory-keys"}}}
    cluster = clusters(values)
    memory, staging = cluster["memory"], cluster["prefill"]
    memory.start()
    memory.wait(memory.pod["tier"], "startup", 60)
    staging.start(without=("doctor-prefill", "prefill"))
    for pod in (memory, staging):
        wait_for(lambda pod=pod: pod.probe(pod.pod["tier"], "readiness") == 200, f"{pod.name} is ready")

    def state(role: str) -> dict:
        return get_json(cluster.url(role, "tier-http", "tier") + "/state")

    [node] = state("prefill")["memory_nodes"]
    assert node["address"] == state("memory")["control"] and node["address"].startswith(f"tcp://{memory.ip}:") and not node["down"]
    for pod in (staging, memory):
        pod.terminate("tier")
        assert pod.servers["tier"].wait(30) == 0
