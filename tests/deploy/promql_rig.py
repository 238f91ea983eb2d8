"""Whether a PromQL query can say anything: it parses, its metrics are exported, their labels exist, counters are rated and gauges are not."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import promql_parser as pq
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/helm/oasis/files/alerts.yaml"

SCRAPED = {"namespace", "pod", "container", "endpoint", "job", "instance", "app_kubernetes_io_component", "app_kubernetes_io_instance"}
"""What the chart's monitors add to each series."""
FOREIGN = {
    "up": ("gauge", set()),
    "ALERTS": ("gauge", {"alertname", "alertstate", "severity"}),
    "kube_pod_container_status_ready": ("gauge", {"uid"}),  # kube-state-metrics, docs/metrics/workload/pod-metrics.md there
    "kube_pod_init_container_status_ready": ("gauge", {"uid"}),
    "kube_pod_container_resource_limits": ("gauge", {"uid", "node", "resource", "unit"}),
    "container_memory_working_set_bytes": ("gauge", {"id", "image", "name"}),  # the kubelet's cAdvisor
}
RATES = {"rate", "irate", "increase"}


@cache
def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """metric -> (counter or gauge, labels), of everything that a query may name."""
    done = subprocess.run([sys.executable, "-W", "ignore", Path(__file__).with_name("exported_metrics.py")], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    known = {name: (kind, set(labels)) for name, (kind, labels) in json.loads(done.stdout).items()}
    known |= FOREIGN
    known |= {rule["record"]: ("gauge", set()) for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"] if "record" in rule}
    return {name: (kind, frozenset(labels | SCRAPED)) for name, (kind, labels) in known.items()}


def parse(query: str) -> pq.Expr:
    """Grafana's variables stand for a duration or for a pattern. Raises ``ValueError``."""
    return pq.parse(re.sub(r"\$__\w+", "5m", query))


def children(node: pq.Expr) -> list[pq.Expr]:
    match node:
        case pq.BinaryExpr():
            return [node.lhs, node.rhs]
        case pq.Call():
            return list(node.args)
        case pq.AggregateExpr():
            return [node.expr, *([node.param] if node.param is not None else [])]
        case pq.ParenExpr() | pq.UnaryExpr() | pq.SubqueryExpr():
            return [node.expr]
        case pq.MatrixSelector():
            return [node.vector_selector]
    return []


def selectors(node: pq.Expr) -> list[pq.VectorSelector]:
    return [node] if isinstance(node, pq.VectorSelector) else [s for child in children(node) for s in selectors(child)]


def grouped(node: pq.Expr) -> list[str]:
    """Labels that the outermost aggregations keep: those of the result."""
    if isinstance(node, pq.AggregateExpr):
        return list(node.modifier.labels) if node.modifier is not None else []
    return [label for child in children(node) for label in grouped(child)]


def problems(query: str, known: dict | None = None) -> list[str]:
    """What is wrong with it; nothing: an empty list."""
    known = exported() if known is None else known
    try:
        tree = parse(query)
    except ValueError as error:
        return [f"does not parse: {error}"]
    said: list[str] = []

    def labels_below(node) -> set[str]:
        return set().union(*(known[s.name][1] for s in selectors(node) if s.name in known))

    def visit(node, rated: bool) -> None:
        match node:
            case pq.VectorSelector():
                if node.name not in known:
                    said.append(f"unknown metric {node.name}")
                    return
                kind, labels = known[node.name]
                said.extend(f"{node.name} has no label {m.name}" for m in node.matchers.matchers if m.name not in labels)
                if (kind == "counter") != rated:
                    said.append(f"{node.name} is a {kind}, {'rated' if rated else 'not rated'}")
            case pq.AggregateExpr() if node.modifier is not None:
                for selector in selectors(node.expr):
                    missing = set(node.modifier.labels) - known[selector.name][1] if selector.name in known else ()
                    said.extend(f"{selector.name} has no label {label} to group by" for label in missing)
            case pq.BinaryExpr() if node.modifier is not None and node.modifier.matching is not None:
                for side in (node.lhs, node.rhs):
                    said.extend(f"no label {label} to match on" for label in set(node.modifier.matching.labels) - labels_below(side))
            case pq.Call() if node.func.name == "histogram_quantile":
                if "le" not in grouped(node.args[1]):
                    said.append("a quantile needs the label le")
        rating = rated if isinstance(node, pq.MatrixSelector) else isinstance(node, pq.Call) and node.func.name in RATES
        for child in children(node):
            visit(child, rating)

    visit(tree, False)
    return said
