"""The dashboard and the alerts ask for what the code exports, and the documentation says what to do about each alert."""

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import promql_parser as pq
import pytest
import yaml
from promql_rig import ALERTS, FOREIGN, ROOT, SCRAPED, children, exported, grouped, parse, problems, selectors

GRAFANA = ROOT / "deploy/grafana"
DASHBOARD = json.loads((GRAFANA / "oasis.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [pytest.param(target["expr"], id=f"{panel['title']}-{target['legendFormat']}".replace(" ", "_")) for panel in PANELS for target in panel["targets"]]
GROUPS = yaml.safe_load(ALERTS.read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
NAMED = {rule["alert"]: rule for rule in RULES if "alert" in rule}
OPERATIONS = (ROOT / "docs/operations.md").read_text()


# -- queries ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", TARGETS)
def test_panels_ask_for_what_is_exported(query):
    assert problems(query) == []
    assert "$__rate_interval" in query or not re.search(r"\[\d", query) or "[24h]" in query  # a range that follows the zoom
    for selector in selectors(parse(query)):
        asked = {m.name: m.value for m in selector.matchers.matchers}
        assert asked["namespace"].startswith("$namespace") and (asked.get("pod") == "$pod" or selector.name == "ALERTS"), query


@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule.get("alert") or rule["record"]) for rule in RULES])
def test_rules_ask_for_what_is_exported(rule):
    assert problems(rule["expr"]) == []


def test_variables_ask_for_what_is_exported():
    asked = {v["name"]: v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"}
    assert set(asked) == {"namespace", "role", "pod"}
    for query in asked.values():
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        assert problems(selector) == [] and label in exported()["up"][1]


def misspelt(query: str, metric: str) -> str:
    return re.sub(rf"(?<![\w:]){re.escape(metric)}(?![\w:])", metric[:-1] + "x" + metric[-1], query)


def test_what_is_not_exported_is_found():
    """Each metric of each query misspelt, each of its labels as well; then what else can be wrong."""
    checked = 0
    for query in [p.values[0] for p in TARGETS] + [rule["expr"] for rule in RULES]:
        tree = parse(query)
        for selector in selectors(tree):
            assert any("unknown metric" in p for p in problems(misspelt(query, selector.name))), query
            checked += 1
        for label in grouped(tree):
            assert problems(re.sub(rf"\b{label}\b(?=[^{{}}]*\))", label + "x", query)), query
    assert checked > 180
    for wrong, why in {
        "oasis_tier_rooms_opened": "unknown metric",  # a counter without its suffix
        "rate(oasis_tier_leases_total[5m])": "unknown metric",  # a gauge with one
        "rate(oasis_tier_leases[5m])": "gauge, rated",
        "oasis_tier_evicted_total > 0": "counter, not rated",
        'oasis_tier_records{stat="free"}': "no label stat",
        "sum by (rank) (oasis_tier_leases)": "no label rank",
        "oasis_tier_leases and on (rank) oasis_tier_rooms": "no label rank",
        "histogram_quantile(0.9, sum by (pod) (rate(oasis_decode_stalls_total[5m])))": "label le",
        "sum by (pod) (rate(oasis_tier_evicted_total[5m])": "does not parse",
        "rate(oasis_tier_evicted_total)": "does not parse",
        "median(oasis_tier_leases)": "does not parse",
    }.items():
        assert any(why in p for p in problems(wrong)), f"{wrong}: {problems(wrong)}"


def test_names_are_those_of_the_page():
    """What the code is asked for here and what docs/metrics.md lists is the same."""
    listed = set(re.findall(r"`(oasis_\w+)`", (ROOT / "docs/metrics.md").read_text()))
    assert {name for name in exported() if name.startswith("oasis_")} == listed
    kinds = dict(re.findall(r"\| `(oasis_\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text()))
    assert {name: exported()[name][0] for name in listed} == kinds


def test_the_chart_scrapes_with_these_labels():
    for name in ("podmonitor", "servicemonitor"):
        text = (ROOT / f"deploy/helm/oasis/templates/{name}.yaml").read_text()
        assert "app.kubernetes.io/component" in text and '"http" "tier-http"' in text
    assert SCRAPED >= {"namespace", "pod", "endpoint", "app_kubernetes_io_component"} and "up" in FOREIGN


# -- the dashboard ------------------------------------------------------------------------------------------------------


def test_the_file_is_what_the_description_makes():
    assert runpy.run_path(str(GRAFANA / "build.py"))["text"]() == (GRAFANA / "oasis.json").read_text(), "run: python deploy/grafana/build.py"


def test_panels_are_complete():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) and DASHBOARD["schemaVersion"] >= 36
    titles = [panel["title"] for panel in PANELS]
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Admission", "Wire bytes", "Misses and stalls", "Host memory", "Leases", "Failures"]
    assert len(titles) > 40
    for panel in PANELS:
        assert panel["title"] and len(panel["description"]) > 8 and panel["targets"], panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit"] in {"short", "reqps", "ops", "Bps", "bytes", "s", "µs", "percentunit"}
        steps = defaults["thresholds"]["steps"]
        assert steps[0]["value"] is None and [s["value"] for s in steps[1:]] == sorted(s["value"] for s in steps[1:])
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)


def test_panels_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_legends_name_labels_that_are_left():
    for panel in PANELS:
        for target in panel["targets"]:
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            if panel["type"] == "timeseries":
                assert set(labels) == set(grouped(parse(target["expr"]))) - {"le"}, (panel["title"], target["legendFormat"])


def test_shares_are_shown_as_shares():
    """A quotient of like things is a share; bytes in seconds are bytes."""
    for panel in PANELS:
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for query in (target["expr"] for target in panel["targets"]):
            names = {selector.name for selector in selectors(parse(query))}
            if unit == "Bps":
                assert all("bytes" in name for name in names), panel["title"]
            if unit == "s":
                assert "histogram_quantile" in query
            if unit == "percentunit":
                assert isinstance(parse(query), pq.BinaryExpr) or query.startswith("max(")


def thresholds(title: str) -> set[float]:
    return {step["value"] for panel in PANELS if panel["title"] == title for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]}


def bound(alert: str) -> float:
    """What an alert compares with."""
    tree = parse(NAMED[alert]["expr"])
    assert isinstance(tree, pq.BinaryExpr) and isinstance(tree.rhs, pq.NumberLiteral)
    return tree.rhs.val


@pytest.mark.parametrize(("title", "alert"), [("Arena in use", "OasisArenaFull"), ("Fullest arena", "OasisArenaFull"), ("Missed mass", "OasisMissesHigh"),
                                              ("Time aside", "OasisDecodeStalls"), ("First token", "OasisFirstTokenLate"),
                                              ("Not admitted", "OasisRequestsFail"), ("Refused", "OasisRefusals")])
def test_red_begins_where_the_alert_does(title, alert):
    assert bound(alert) in thresholds(title)


# -- alerts -------------------------------------------------------------------------------------------------------------


def test_alerts_are_complete():
    assert set(NAMED) >= {
        "OasisTierDown", "OasisTierUnready", "OasisArenaFull", "OasisBackPressure", "OasisLeasesExpire", "OasisDecodeStalls", "OasisMissesHigh",
        "OasisDamagedReads", "OasisRecordsDoubted", "OasisRecomputeFails", "OasisInternalErrors", "OasisLinksLost", "OasisWireAbovePlan"}
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)
    assert len(NAMED) == len([rule for rule in RULES if "alert" in rule])
    for name, rule in NAMED.items():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and re.fullmatch(r"Oasis[A-Z]\w+", name)
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        assert "for" in rule or "increase(" in rule["expr"], f"{name}: holds at once, by what a moment shows"
        left = {*grouped(parse(rule["expr"]))} or SCRAPED | {"container"}
        for label in re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())):
            assert label in left, f"{name} names {label}, which it sums over"


def test_each_alert_has_its_place_in_the_documentation():
    anchors = re.findall(r'<a id="(\w+)"></a>`(\w+)`, (\w+) \| (\S+) \|', OPERATIONS)
    assert [name for _, name, _, _ in anchors] != [] and len(anchors) == len({a for a, *_ in anchors})
    assert {name for _, name, _, _ in anchors} == set(NAMED)
    for anchor, name, severity, held in anchors:
        rule = NAMED[name]
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{anchor}"
        assert (severity, held) == (rule["labels"]["severity"], rule.get("for", "-"))
    assert "\n## Alerts\n" in OPERATIONS


def test_each_alert_has_a_case():
    cases = yaml.safe_load((Path(__file__).parent / "alert_cases.yaml").read_text())
    fired = {case["alertname"] for test in cases["tests"] for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == set(NAMED) - {"OasisWireAbovePlan"}  # that one below


PLANNED = """
rule_files: [alerts.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'oasis_decode_bytes_records_total{{namespace="n", rank="0"}}', values: "0+1000x90"}}
      - {{series: 'oasis_decode_bytes_partial_page_total{{namespace="n", rank="0"}}', values: "0+2000x90"}}
      - {{series: 'oasis_decode_bytes_manifest_total{{namespace="n", rank="0"}}', values: "0+3000x90"}}
      - {{series: 'oasis_decode_bytes_summaries_total{{namespace="n", rank="0"}}', values: "0+4000x90"}}
      - {{series: 'oasis_decode_bytes_pieces_total{{namespace="n", rank="0"}}', values: "0+90000x90"}}
      - {{series: 'sglang:prompt_tokens_total{{engine_type="decode", namespace="n"}}', values: "0+10x90"}}
    promql_expr_test:
      - expr: count(ALERTS{{alertname="OasisWireAbovePlan", alertstate="firing"}})
        eval_time: 80m
        exp_samples: {expected}
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus), so the alerts were NOT evaluated")
def test_alerts_fire_and_stay_silent(tmp_path):
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    cases = subprocess.run(["promtool", "test", "rules", Path(__file__).parent / "alert_cases.yaml"], capture_output=True, text=True, timeout=120)
    assert cases.returncode == 0, cases.stdout + cases.stderr
    for plan, expected in ((7_000, "[{labels: '{}', value: 1}]"), (9_000, "[]"), (0, "[]")):  # 10,000 bytes a token
        (tmp_path / "alerts.yaml").write_text(ALERTS.read_text().replace("vector(0)", f"vector({plan})"))
        (tmp_path / "case.yaml").write_text(PLANNED.format(expected=expected))
        done = subprocess.run(["promtool", "test", "rules", tmp_path / "case.yaml"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"plan {plan}: {done.stdout}{done.stderr}"


def test_children_are_all_that_a_query_has():
    """The walk over a query reaches each of its metrics, whatever they stand in."""
    query = "-(topk(3, a) + max_over_time(rate(b[5m])[1h:1m])) / ignoring (x) clamp_min(c, 1) and on () (d offset 5m)"
    assert [s.name for s in selectors(parse(query))] == ["a", "b", "c", "d"] and children(parse("1")) == []
