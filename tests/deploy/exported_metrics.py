"""``python exported_metrics.py``: what tier, workers and SGLang export, from their own collectors, as one JSON object on stdout:
{metric: [kind, [label, ...]]}. A process of its own, since collectors register themselves once in each.

Metrics are those of the page that Prometheus reads: counters end in _total, histograms are _bucket, _count and _sum.
"""

import json
import os
import sys
from types import SimpleNamespace
from unittest import mock

import prometheus_client

found: dict[str, list] = {}


def note(name: str, kind: str, labels) -> None:
    known = found.setdefault(name, [kind, []])
    assert known[0] == kind, f"{name} is a {known[0]} and a {kind}"
    known[1] = sorted({*known[1], *map(str, labels)})


def recorder(kind: str):
    """Stands for a class of the client: writes down what is created."""

    def create(name, documentation="", labelnames=(), *, multiprocess_mode="all", **_):
        labels = list(labelnames)
        if kind == "counter":
            note(name.removesuffix("_total") + "_total", kind, labels)
        elif kind == "gauge":  # SGLang's servers write a file per process; one series for each unless they say otherwise
            note(name, kind, labels + (["pid"] if multiprocess_mode in ("all", "liveall") else []))
        else:
            note(name + "_count", "counter", labels)
            note(name + "_sum", "counter", labels)
            if kind == "histogram":
                note(name + "_bucket", "counter", [*labels, "le"])
        return mock.MagicMock()

    return create


def tier() -> None:
    from transport.metrics import TierCollector
    from transport.tier import Tier

    for metric in TierCollector(Tier(epoch="", arena_size=0, control="", endpoints=()), SimpleNamespace(size=0)).collect():
        for sample in metric.samples:
            note(sample.name, metric.type, sample.labels)


def workers() -> None:
    from oasis_sglang.metrics import Exporter

    Exporter("prefill", 0)({}, {})
    Exporter("decode", 0)({}, {}, {"bounds_ms": [1], "counts": [0, 0], "sum_ms": 0, "count": 0})


def sglang() -> None:
    from sglang.srt.observability import http_request_metrics, metrics_collector

    settings = SimpleNamespace(
        enable_metrics=True, enable_metrics_for_all_schedulers=False, kv_events_config=None, extra_metric_labels=None, stat_loggers=None,
        tokenizer_metrics_allowed_custom_labels=None, prompt_tokens_buckets=None, generation_tokens_buckets=None,
        attn_tp_rank=0, attn_cp_rank=0, tp_rank=0, pp_rank=0, moe_ep_rank=0, dp_rank=None,
        enable_pd_role_switch=False, disaggregation_mode="decode", served_model_name="model", enable_streaming_session=False,
        enable_priority_scheduling=False,
        prefill_delayer_max_delay_passes=30, prefill_delayer_forward_passes_buckets=None, prefill_delayer_wait_seconds_buckets=None)
    names = ("get_observability", "get_parallel", "get_disagg", "get_serving", "get_schedule")
    with mock.patch.multiple(metrics_collector, exports_expert_balancedness_to_prometheus=lambda: False, **{name: lambda: settings for name in names}):
        metrics_collector.SchedulerMetricsCollector.init_new(
            server_args=mock.MagicMock(), enable_priority_scheduling=False, enable_lora=False, enable_hierarchical_cache=False)
        metrics_collector.TokenizerMetricsCollector(server_args=mock.MagicMock(), labels=metrics_collector.tokenizer_metric_labels())
    http_request_metrics.init_http_request_metrics()


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    tier()
    kinds = {name: recorder(name.lower()) for name in ("Counter", "Gauge", "Histogram", "Summary")}
    with mock.patch.multiple(prometheus_client, **kinds):
        workers()
        sglang()
    json.dump(found, sys.stdout)
