"""What the chart measures and scales by: every query parses and asks for what the code exports (``promql_rig``)."""

import re

import chart_rig as rig
import pytest
import yaml
from chart_rig import CHART, FULL, MATRIX, NAMESPACE, values
from promql_rig import ALERTS, parse, problems, selectors

SCALED = [name for name in MATRIX if any(values(name)[role]["autoscaling"]["kind"] != "none" for role in ("prefill", "decode"))]
ADAPTER = yaml.safe_load((CHART / "files/prometheus-adapter.yaml").read_text())["rules"]


@pytest.mark.parametrize("name", ["keda, ", "keda, several pods", "qwen3-8b-2p2d"])
def test_keda_scales_by_queries_that_can_say_something(name):
    section = values(name)
    triggers = {one["metadata"]["name"]: {t["name"]: t for t in one["spec"]["triggers"]} for one in rig.kinds(rig.case(name), "ScaledObject")}
    assert {key: set(value) for key, value in triggers.items()} == {f"{FULL}-prefill": {"queue", "ttft"}, f"{FULL}-decode": {"token-usage", "stall"}}
    asked = set()
    for scaled, found in triggers.items():
        for trigger in found.values():
            query = trigger["metadata"]["query"]
            assert problems(query) == []
            for selector in selectors(parse(query)):
                matchers = {m.name: m.value for m in selector.matchers.matchers}
                role = "decode" if trigger["name"] == "ttft" else scaled.rpartition("-")[2]
                assert matchers == {"namespace": NAMESPACE, "pod": f"{FULL}-{role}-.+"}, "of this release's pods of that role"
                asked.add(selector.name)
            assert trigger["metadata"]["serverAddress"] == section["monitoring"]["prometheusUrl"]
            assert trigger["metadata"]["ignoreNullValues"] == "false", "figures that are missing are not 0"
    assert asked == {"sglang:num_queue_reqs", "sglang:num_prefill_bootstrap_queue_reqs", "sglang:time_to_first_token_seconds_bucket",
                     "oasis_decode_kv_pool_tokens", "oasis_decode_stall_seconds_total"}
    usage = triggers[f"{FULL}-decode"]["token-usage"]
    assert usage["metadata"]["query"].endswith(f"/ {section['decode']['kvPoolTokens']}") and usage["metadata"]["threshold"] == "0.8"
    pool = [option for pod in rig.pods(rig.case(name)) if pod.role == "decode" for option in [rig.option(pod["decode"], "--max-total-tokens")]]
    assert pool == [str(section["decode"]["kvPoolTokens"])], "a share of the pool that the worker has"


@pytest.mark.parametrize("name", ["hpa, ", "hpa, several pods"])
def test_hpa_scales_by_what_the_adapter_serves(name):
    served = {kind: {rule["name"]["as"]: rule for rule in ADAPTER[kind]} for kind in ("custom", "external")}
    targets = {}
    for one in rig.kinds(rig.case(name), "HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            kind, of = {"Pods": ("custom", "pods"), "External": ("external", "external")}[metric["type"]]
            rule = served[kind][metric[of]["metric"]["name"]]
            targets[one["metadata"]["name"].rpartition("-")[2], rule["name"]["as"]] = metric[of]["target"]
            if kind == "external":
                assert metric[of]["metric"]["selector"] == {"matchLabels": {"app_kubernetes_io_instance": rig.RELEASE}}, "the monitors add it"
    assert targets == {("prefill", "oasis_prefill_queued_requests"): {"type": "AverageValue", "averageValue": "4"},
                       ("prefill", "oasis_ttft_p90_seconds"): {"type": "Value", "value": "5"},
                       ("decode", "oasis_decode_kv_pool_tokens"): {"type": "AverageValue", "averageValue": "160000"},
                       ("decode", "oasis_decode_stalled_requests"): {"type": "AverageValue", "averageValue": "1"}}


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["name"]["as"]) for kind in ADAPTER.values() for rule in kind])
def test_the_adapters_rules_ask_for_what_is_exported(rule):
    """Its placeholders filled in as the adapter does."""
    series, resources = rule["seriesQuery"], rule["resources"]["overrides"]
    assert parse(series)
    query = rule["metricsQuery"].replace("<<.Series>>", series.partition("{")[0]).replace("<<.LabelMatchers>>", 'namespace="llm",pod=~"a|b"')
    assert problems(query.replace("<<.GroupBy>>", "pod")) == [] and "<<" not in query.replace("<<.GroupBy>>", "")
    assert series.partition("{")[0] in {selector.name for selector in selectors(parse(query.replace("<<.GroupBy>>", "pod")))}
    assert all(re.search(rf'\b{label}!=""', series) for label in resources)


@pytest.mark.parametrize("name", SCALED)
def test_scalers_scale_what_is_there(name):
    objects = rig.case(name)
    scalers = rig.kinds(objects, "HorizontalPodAutoscaler", "ScaledObject")
    assert len(scalers) == 2
    for one in scalers:
        target = one["spec"]["scaleTargetRef"]
        [owner] = [pod.owner for pod in rig.pods(objects) if pod.owner["metadata"]["name"] == target["name"]]
        assert (owner["apiVersion"], owner["kind"]) == (target["apiVersion"], target["kind"])
        assert "replicas" not in owner["spec"], "an upgrade does not take the scaler's decision back"
        behavior = one["spec"].get("behavior") or one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"] == {"stabilizationWindowSeconds": 600, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}]}


@pytest.mark.parametrize("name", [name for name in MATRIX if values(name)["monitoring"]["kind"] != "none"])
def test_monitors_reach_every_server(name):
    objects = rig.case(name)
    [monitor] = rig.kinds(objects, "PodMonitor", "ServiceMonitor")
    endpoints = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    assert all(one["path"] == "/metrics" for one in endpoints)
    assert (monitor["spec"].get("podTargetLabels") or monitor["spec"]["targetLabels"]) == ["app.kubernetes.io/instance", "app.kubernetes.io/component"]
    scraped = {one["port"] for one in endpoints}
    expected = {"prefill": "http", "decode": "http", "tier": "tier-http", "router": "metrics"}
    for pod in rig.pods(objects):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        for container in pod.servers:
            assert [port["name"] for port in container["ports"] if port["name"] in scraped] == [expected[container["name"]]]
        if monitor["kind"] == "ServiceMonitor":
            [service] = [one for one in rig.kinds(objects, "Service") if one["spec"]["selector"].items() <= pod.labels.items()]
            assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert {port["name"] for port in service["spec"]["ports"]} & scraped == {expected[container["name"]] for container in pod.servers}
    assert monitor["metadata"]["labels"].items() >= MATRIX[name]["monitoring"].get("labels", {}).items()


def test_alerts_are_the_file_that_the_chart_carries():
    """What is in it: ``test_dashboards``."""
    [rule] = rig.kinds(rig.case("service monitor"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text()), "nothing of Prometheus' own templates is lost on the way"


def test_alerts_take_the_plan_and_the_address_of_the_documents():
    rules = {"enabled": True, "plannedBytesPerToken": 1500, "runbookPrefix": "https://git.example/oasis/blob/main/"}
    [rule] = rig.kinds(rig.render(rig.merged(rig.PLAIN, {"monitoring": {"rules": rules}})), "PrometheusRule")
    found = [one for group in rule["spec"]["groups"] for one in group["rules"]]
    assert [one["expr"] for one in found if one.get("record") == "oasis:planned_bytes_per_prompt_token"] == ["vector(1500)"]
    urls = {one["annotations"]["runbook_url"] for one in found if "alert" in one}
    assert len(urls) > 20 and all(url.startswith("https://git.example/oasis/blob/main/docs/operations.md#oasis") for url in urls)
