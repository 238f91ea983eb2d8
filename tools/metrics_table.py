"""``python tools/metrics_table.py > docs/metrics.md``: every metric that workers and tier export, from the code."""

from __future__ import annotations

from types import SimpleNamespace

from oasis_sglang.metrics import COUNTERS, GAUGES, STALLS
from transport.metrics import TierCollector
from transport.tier import Tier

HEAD = """# Metrics

Workers export on SGLang's `/metrics`, with the label `rank`; the tier on the `/metrics` of its `--http` address. What they mean together is in
[architecture.md](architecture.md), section 9. This page is made by `python tools/metrics_table.py`.
"""


def rows(kind: str, metrics: dict[str, str]) -> list[str]:
    return [f"| `{name}` | {kind} | {text} |" for name, text in metrics.items()]


def worker(role: str) -> list[str]:
    counters = {f"oasis_{role}_{name}_total": text for name, text in COUNTERS[role].items()}
    if role == "decode":
        counters |= {f"oasis_decode_{name}_total": text for name, text in STALLS.items()}
    return [*rows("counter", counters), *rows("gauge", {f"oasis_{role}_{name}": text for name, text in GAUGES[role].items()})]


def tier() -> list[str]:
    empty = Tier(epoch="", arena_size=0, control="", endpoints=())
    found = {kind: {} for kind in ("counter", "gauge")}
    for metric in TierCollector(empty, SimpleNamespace(size=0)).collect():
        found[metric.type][metric.name + ("_total" if metric.type == "counter" else "")] = metric.documentation
    return [line for kind, metrics in found.items() for line in rows(kind, metrics)]


def page() -> str:
    parts = [HEAD]
    for title, lines in (("Tier", tier()), ("Prefill workers", worker("prefill")), ("Decode workers", worker("decode"))):
        parts.append("\n".join((f"## {title}\n", "| metric | kind | meaning |", "|---|---|---|", *lines)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
