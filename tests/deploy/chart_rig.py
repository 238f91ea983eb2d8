"""The chart as Helm renders it: objects, pods and containers for a set of values, and the sets of values that tests go through."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import helm_python as helm
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/oasis"
EXAMPLES = ROOT / "deploy/helm/examples"
RELEASE, NAMESPACE = "blue", "llm"
FULL = f"{RELEASE}-oasis"
KEY = "0123456789abcdef" * 4
DIGEST = "sha256:" + KEY

PLAIN = {"model": {"path": "/models/m"}, "security": {"allowPlaintext": True}}
"""The least that renders."""
KEYED = {"security": {"allowPlaintext": False, "keys": {"tier": "tier-keys", "decode": "decode-keys", "memoryNode": "memory-keys"}, "memoryNodeKey": KEY}}
RDMA = {"transfer": {"rdma": {"resource": "rdma/ib", "count": 2}, "ucx": {"netDevices": "mlx5_0:1"}}}
MEMORY_NODES = {"tier": {"mode": "memoryNode"}}
DAEMONSET = {"tier": {"mode": "daemonset", "daemonset": {"prepare": True}}}
SEVERAL = {"model": {"tensorParallel": 4}, "prefill": {"nodes": 2}, "decode": {"nodes": 4}}
HUGE = {"tier": {"hugepages": {"size": "2Mi", "amount": "1Gi"}, "memoryNodes": {"hugepages": {"size": "1Gi", "amount": "4Gi"}}},
        "prefill": {"hugepages": {"size": "1Gi", "amount": "2Gi"}}, "decode": {"hugepages": {"size": "2Mi", "amount": "512Mi"}}}
POOL = {"decode": {"kvPoolTokens": 200_000}, "monitoring": {"prometheusUrl": "http://prometheus:9090"}}


def scaled(kind: str) -> dict:
    return merged(POOL, {role: {"autoscaling": {"kind": kind, "minReplicas": 2, "maxReplicas": 5}} for role in ("prefill", "decode")})


EVERYTHING = {
    "imagePullSecrets": [{"name": "registry"}], "image": {"digest": DIGEST},
    "model": {"path": "org/model", "servedName": "m", "volume": {"persistentVolumeClaim": {"claimName": "models"}}, "readOnly": False,
              "tokenSecret": {"name": "hugging-face", "key": "token"}},
    "transfer": {"dataPlane": "zmq", "ucx": {"tls": "tcp,self"}},
    "tier": {"image": {"tag": "0.1.0-tier"}, "acceptGenerated": True, "zeroFreed": True, "extraArgs": ["--lease-seconds", "20"],
             "extraEnv": [{"name": "UCX_LOG_LEVEL", "value": "info"}]},
    "prefill": {"replicas": 3, "extraArgs": ["--mem-fraction-static", "0.8", "--oasis-restore-min-tokens", "128"], "podLabels": {"team": "a"},
                "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rail-0"}, "nodeSelector": {"gpu": "h200"}, "priorityClassName": "high",
                "runtimeClassName": "nvidia", "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "rack", "operator": "In", "values": ["r1"]}]}]}}},
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}]},
    "decode": {"replicas": 2, "kvPoolTokens": 300_000, "extraArgs": ["--oasis-budget-tokens", "2048", "--oasis-publish-generated", "true"],
               "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "4"}], "update": {"maxUnavailable": 0, "maxSurge": "25%"}},
    "router": {"replicas": 2, "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
               "extraArgs": ["--retry-max-retries", "2"]},
    "monitoring": {"kind": "podMonitor", "labels": {"release": "prometheus"}, "rules": {"enabled": True}},
    "serviceAccount": {"annotations": {"example.com/role": "reader"}},
}
"""Every option that is not a matter of another one."""


def merged(*parts: dict) -> dict:
    """Values laid over each other, as Helm does with several files."""
    whole: dict = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = merged(whole[name], value) if both else deepcopy(value)
    return whole


def example(path: Path) -> dict:
    return merged(yaml.safe_load(path.read_text()), {"security": {"memoryNodeKey": KEY}} if "memoryNode" in path.read_text() else {})


def matrix() -> dict[str, dict]:
    """Name -> values."""
    modes = {"sidecar": {}, "daemonset": DAEMONSET, "memory nodes": MEMORY_NODES}
    found = {}
    for mode, values in modes.items():
        found |= {mode: merged(PLAIN, values), f"{mode}, keys": merged(PLAIN, KEYED, values), f"{mode}, rdma": merged(PLAIN, KEYED, RDMA, values),
                  f"{mode}, ipc lock": merged(PLAIN, KEYED, RDMA, values, {"transfer": {"rdma": {"memlock": "capability"}}}),
                  f"{mode}, several pods": merged(PLAIN, values, SEVERAL), f"{mode}, huge pages": merged(PLAIN, values, HUGE),
                  f"{mode}, everything": merged(PLAIN, KEYED, values, EVERYTHING)}
    found |= {f"{kind}, {name}": merged(PLAIN, scaled(kind), values) for kind in ("hpa", "keda") for name, values in (("", {}), ("several pods", SEVERAL))}
    found |= {
        "service monitor": merged(PLAIN, MEMORY_NODES, {"monitoring": {"kind": "serviceMonitor", "rules": {"enabled": True}}}),
        "cpu": merged(PLAIN, {"gpuResource": ""}), "no router": merged(PLAIN, {"router": {"enabled": False}}),
        "no policies": merged(PLAIN, {"networkPolicy": {"enabled": False}, "doctor": {"enabled": False}, "rbac": {"create": False}}),
        "renamed": merged(PLAIN, {"fullnameOverride": "x" * 40, "nameOverride": "y" * 40}),
    }
    return found | {path.stem: example(path) for path in sorted(EXAMPLES.glob("*.yaml"))}


MATRIX = matrix()


@cache
def chart() -> helm.Chart:
    return helm.Chart.load(CHART)


class Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: Kubernetes would take the last one."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"twice in one mapping: {', '.join(map(str, twice))}")
        return super().construct_mapping(node, deep)


def render(values: dict) -> list[dict]:
    """All objects. Raises ``helm.HelmError``."""
    rendered = chart().render(values, name=RELEASE, namespace=NAMESPACE)
    return [document for name, text in sorted(rendered.items()) if not name.endswith("NOTES.txt")
            for document in yaml.load_all(text, Loader) if document]


@cache
def case(name: str) -> list[dict]:
    """The objects of one set of values of the matrix."""
    return render(MATRIX[name])


@cache
def values(name: str) -> dict:
    """One set of values of the matrix, with the chart's own beneath."""
    return merged(yaml.safe_load((CHART / "values.yaml").read_text()), MATRIX[name])


def kinds(objects: list[dict], *wanted: str) -> list[dict]:
    return [one for one in objects if one["kind"] in wanted]


def component(labels: dict) -> str:
    return labels["app.kubernetes.io/component"]


def quantity(text: object) -> int:
    number, unit = re.fullmatch(r"(\d+)(|Ki|Mi|Gi|Ti)", str(text)).groups()
    return int(number) << {"": 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]


@dataclass
class Pod:
    """A pod template and the object that makes pods of it. ``containers``: all, in the order in which they start."""

    owner: dict
    template: dict
    containers: list[dict] = field(init=False)

    def __post_init__(self):
        self.spec, self.labels, self.role = self.template["spec"], self.template["metadata"]["labels"], component(self.template["metadata"]["labels"])
        self.containers = [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def __getitem__(self, name: str) -> dict:
        [found] = [one for one in self.containers if one["name"] == name]
        return found

    def __contains__(self, name: str) -> bool:
        return any(one["name"] == name for one in self.containers)

    @property
    def servers(self) -> list[dict]:
        """Those that stay: the last ones, and sidecars among the first ones."""
        return [one for one in self.containers if one in self.spec["containers"] or one.get("restartPolicy") == "Always"]

    def volume(self, name: str) -> dict:
        [found] = [one for one in self.spec["volumes"] if one["name"] == name]
        return found


def pods(objects: list[dict]) -> Iterator[Pod]:
    for one in kinds(objects, "Deployment", "StatefulSet", "DaemonSet"):
        yield Pod(one, one["spec"]["template"])
    for one in kinds(objects, "LeaderWorkerSet"):
        yield Pod(one, one["spec"]["leaderWorkerTemplate"]["workerTemplate"])


def by_role(objects: list[dict]) -> dict[str, Pod]:
    return {pod.role: pod for pod in pods(objects)}


def arguments(container: dict) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def option(container: dict, flag: str) -> str | None:
    """What follows ``flag``; None: it is not there."""
    words = arguments(container)
    return words[words.index(flag) + 1] if flag in words else None


def variables(container: dict) -> dict[str, dict]:
    """Environment variables by name; the last one of a name counts."""
    return {one["name"]: one for one in container.get("env", ())}
