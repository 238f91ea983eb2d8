"""deploy/helm/oasis, rendered by Helm's own engine: what comes out is sound Kubernetes, whatever the values; what cannot work is refused."""

import json
import re
import runpy
import tarfile
import tomllib
from functools import cache
from unittest import mock

import chart_rig as rig
import crd_schemas
import helm_python as helm
import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart_rig import CHART, FULL, MATRIX, NAMESPACE, PLAIN, ROOT, merged

VERSIONS = ("1.30", "1.33", "1.37")
"""Of Kubernetes: the oldest that the chart admits, one between, the newest whose schemas there are."""

TABLE = runpy.run_path(str(ROOT / "tools/chart_values.py"))


@pytest.mark.parametrize("name", ["", *MATRIX])
def test_helm_lints_it_strictly(name):
    report = helm.lint(CHART, MATRIX.get(name), strict=True, kube_version="v1.30.0")
    assert report["errors"] == []
    assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.fixture(scope="module", autouse=True)
def schemas_are_read_once():
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents)):
        yield


@cache
def validate(text: str) -> None:
    """An object as JSON: many are the same in several cases."""
    one = json.loads(text)
    if (one["apiVersion"], one["kind"]) in crd_schemas.SPECS:
        jsonschema.Draft202012Validator(crd_schemas.schema(one["apiVersion"], one["kind"])).validate(one)
        return
    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.parametrize("name", MATRIX)
def test_every_object_is_valid(name):
    for one in rig.case(name):
        validate(json.dumps(one))


@pytest.mark.parametrize("name", [name for name in MATRIX if "several" in name])
def test_pods_of_a_group_are_valid_pods(name):
    for pod in rig.pods(rig.case(name)):
        validate(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {**pod.template["metadata"], "name": "x"}, "spec": pod.spec}))


def test_a_wrong_field_would_be_found():
    objects = rig.case("sidecar")
    [decode] = [one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("decode")]
    wrong = merged(decode, {"spec": {"template": {"spec": {"terminationGraceSeconds": 3}}}})
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        validate(json.dumps(wrong))


@pytest.mark.parametrize("name", MATRIX)
def test_names_labels_and_references_hold_together(name):
    objects = rig.case(name)
    ids = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(ids)) == len(ids)
    templates = list(rig.pods(objects))
    for one in objects:
        assert one["metadata"]["namespace"] == NAMESPACE
        assert len(one["metadata"]["name"]) <= 63 - len("-1234567890"), "revisions of it are labels"
        assert one["metadata"]["labels"].items() >= {"app.kubernetes.io/instance": rig.RELEASE, "app.kubernetes.io/managed-by": "Helm"}.items()
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())
    for pod in templates:
        if pod.owner["kind"] != "LeaderWorkerSet":
            assert pod.owner["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()
        mounted, volumes = set(), {one["name"] for one in pod.spec["volumes"]}
        for container in pod.containers:
            names = [mount["name"] for mount in container["volumeMounts"]]
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(set(paths)) == len(paths)
            mounted |= set(names)
            names = [one["name"] for one in container.get("env", ())]
            assert len(set(names)) == len(names)
        assert mounted == volumes and len(pod.spec["volumes"]) == len(volumes)
        assert ("ServiceAccount", pod.spec["serviceAccountName"]) in ids
        ports = [port["containerPort"] for container in pod.containers for port in container.get("ports", ())]
        assert len(set(ports)) == len(ports)
    for service in rig.kinds(objects, "Service"):
        [pod] = [pod for pod in templates if service["spec"]["selector"].items() <= pod.labels.items()]
        named = {port["name"]: port["containerPort"] for container in pod.containers for port in container.get("ports", ())}
        assert {port["name"]: port["targetPort"] for port in service["spec"]["ports"]} == named, "by number: older Kubernetes finds no sidecar's port by name"
        assert all(port["port"] == port["targetPort"] for port in service["spec"]["ports"])
    for one in rig.kinds(objects, "StatefulSet"):
        assert ("Service", one["spec"]["serviceName"]) in ids


def test_without_values_it_says_what_is_missing():
    with pytest.raises(helm.HelmRenderError, match=r"model\.path is missing"):
        rig.render({})
    with pytest.raises(helm.HelmRenderError, match=r"security\.keys\.decode is missing.*allowPlaintext"):
        rig.render({"model": {"path": "/m"}})


REFUSED = [
    ({"tier": {"mode": "both"}}, r"'/tier/mode': value must be one of 'sidecar', 'daemonset', 'memoryNode'"),
    ({"prefill": {"replica": 2}}, r"'/prefill': additional properties 'replica' not allowed"),
    ({"Decode": {}}, r"additional properties 'Decode' not allowed"),
    ({"decode": {"hostCache": "32GB"}}, r"'/decode/hostCache': '32GB' does not match pattern"),
    ({"tier": {"arena": 64}}, r"'/tier/arena': got number, want string"),
    ({"image": {"digest": "sha256:abc"}}, r"'/image/digest': 'sha256:abc' does not match"),
    ({"ports": {"worker": 70000}}, r"'/ports/worker': maximum: got 70,000, want 65,535"),
    ({"decode": {"autoscaling": {"tokenUsage": 80}}}, r"'/decode/autoscaling/tokenUsage': maximum"),
    ({"security": {"runAsUser": 0}}, r"'/security/runAsUser': minimum: got 0, want 1"),
    ({"security": {"memoryNodeKey": "Zz"}}, r"'/security/memoryNodeKey'"),
    ({"transfer": {"rdma": {"resource": "ib"}}}, r"'/transfer/rdma/resource': 'ib' does not match"),
    ({"transfer": {"dataPlane": "tcp"}}, r"'/transfer/dataPlane': value must be one of 'nixl', 'zmq'"),
    ({"prefill": {"update": {"maxUnavailable": 0}}}, r"'/prefill/update/maxUnavailable'"),
    ({"prefill": {"preStopSeconds": 0}}, r"'/prefill/preStopSeconds': minimum"),
    ({"decode": {"hugepages": {"size": "2Mi"}}}, r"'/decode/hugepages': properties 'amount' required, if 'size' exists"),
    ({"networkPolicy": {"clients": [{}]}}, r"'/networkPolicy/clients/0': minProperties"),
    ({"prefill": {"extraEnv": [{"value": "x"}]}}, r"'/prefill/extraEnv/0': missing property 'name'"),
    ({"security": {"allowPlaintext": False}}, r"security\.keys\.decode is missing"),
    ({"security": {"allowPlaintext": False, "keys": {"decode": "d"}}}, r"security\.keys\.tier is missing"),
    ({"security": {"keys": {"decode": "d"}}}, r"security\.keys\.decode contradicts security\.allowPlaintext"),
    (merged(rig.KEYED, rig.MEMORY_NODES, {"security": {"keys": {"memoryNode": ""}}}), r"security\.keys\.memoryNode is missing"),
    (merged(rig.KEYED, rig.MEMORY_NODES, {"security": {"memoryNodeKey": ""}}), r"security\.memoryNodeKey is missing"),
    ({"prefill": {"resources": {"limits": {"memory": "39Gi"}}}}, r"prefill\.resources\.limits\.memory: 39Gi is below 32Gi \+ 8Gi = 40960Mi"),
    ({"tier": {"resources": {"requests": {"memory": "64Gi"}}}}, r"tier\.resources\.requests\.memory: 64Gi is below 2Gi \+ 64Gi = 67584Mi"),
    ({"decode": {"hostCache": "1Ti", "resources": {"limits": {"memory": "1Ti"}}}}, r"decode\.resources\.limits\.memory: 1Ti is below 32Gi \+ 8Gi \+ 1Ti"),
    (merged(rig.MEMORY_NODES, {"tier": {"memoryNodes": {"resources": {"limits": {"memory": "256Gi"}}}}}), r"tier\.memoryNodes\.resources\.limits\.memory"),
    ({"decode": {"resources": {"limits": {"hugepages-2Mi": "1Gi"}}}}, r"hugepages-2Mi belongs into decode\.hugepages"),
    ({"model": {"tensorParallel": 3}, "decode": {"nodes": 2}}, r"model\.tensorParallel 3 cannot be divided by decode\.nodes 2"),
    (merged(rig.scaled("keda"), {"monitoring": {"prometheusUrl": ""}}), r"autoscaling\.kind keda needs monitoring\.prometheusUrl"),
    (merged(rig.scaled("hpa"), {"decode": {"kvPoolTokens": 0}}), r"decode\.autoscaling needs decode\.kvPoolTokens"),
    (merged(rig.scaled("hpa"), {"prefill": {"autoscaling": {"minReplicas": 9}}}), r"prefill\.autoscaling: minReplicas is above maxReplicas"),
    (merged(rig.SEVERAL, {"monitoring": {"kind": "serviceMonitor"}}), r"with prefill\.nodes above 1 only podMonitor"),
    ({"decode": {"update": {"maxUnavailable": 0}}}, r"decode\.update: with maxUnavailable 0 and maxSurge 0 nothing could ever be updated"),
    ({"ports": {"control": 8998}}, r"ports\.bootstrap and ports\.control are both 8998"),
    ({"ports": {"control": 40000}}, r"ports\.control 40000 lies within transfer\.dataPorts"),
    ({"transfer": {"dataPorts": {"from": 50000, "to": 40000}}}, r"transfer\.dataPorts: from is not below to"),
    ({"ports": {"router": 29000}}, r"ports\.router and ports\.routerMetrics are both 29000"),
    (merged(rig.SEVERAL, {"ports": {"tierHttp": 20000}}), r"ports\.tierHttp 20000 is where the pods of one worker find each other"),
    ({"router": {"resources": {"requests": {"memory": "4Gi"}}}}, r"router\.resources: limits\.memory 1Gi is below requests\.memory 4Gi"),
    ({"prefill": {"resources": {"limits": {"nvidia.com/gpu": "4"}}}}, r"prefill\.resources\.limits: nvidia\.com/gpu is counted by the chart"),
    ({"decode": {"podLabels": {"app.kubernetes.io/component": "x"}}}, r"invalid propertyName 'app\.kubernetes\.io/component'"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_work_is_refused_by_name(values, message):
    with pytest.raises(helm.HelmError, match=message):
        rig.render(merged(PLAIN, values))


def leaves(values: dict, prefix: str = "") -> set[str]:
    return {leaf for name, value in values.items() for leaf in (leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name})}


def open_properties(schema: dict, node: dict, prefix: str = "") -> tuple[set[str], list[str]]:
    """Paths that a schema admits, and the objects in it that admit anything."""
    node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    if "properties" not in node:
        return {prefix.rstrip(".")}, []
    paths, loose = set(), [] if node.get("additionalProperties") is not True and "additionalProperties" in node else [prefix]
    for name, child in node["properties"].items():
        found = open_properties(schema, child, f"{prefix}{name}.")
        paths, loose = paths | found[0], loose + found[1]
    return paths, loose


def test_schema_and_values_have_the_same_options():
    schema, values = json.loads((CHART / "values.schema.json").read_text()), yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    admitted, loose = open_properties(schema, schema)
    assert loose == []
    given = leaves(values)

    def related(path: str, others: set[str]) -> bool:
        """An object that is open, or empty by default, is one leaf here and several there."""
        return any(path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.") for other in others)

    assert {path for path in given if not related(path, admitted)} == set()
    # Any resource may be named there.
    assert {path for path in admitted if not related(path, given) and ".resources." not in path} == {"global"}


def test_every_value_is_used():
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    for path in (key for row in TABLE["rows"]((CHART / "values.yaml").read_text()) for key in row.keys):
        assert re.search(rf'[."]{path.rpartition(".")[2]}\b', templates), path


def test_the_readme_has_the_table_of_values():
    assert (CHART / "README.md").read_text() == TABLE["page"](), "run: python tools/chart_values.py"
    assert {key for row in TABLE["rows"]((CHART / "values.yaml").read_text()) for key in row.keys} >= {"tier.mode", "decode.hostCache", "model.path"}
    with pytest.raises(ValueError, match="a.b has no description"):
        TABLE["rows"]("# -- One.\nc: 1\na:\n  b: 2\n")


def test_versions_agree_and_the_package_is_complete(tmp_path):
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with tarfile.open(helm.package(CHART, destination=tmp_path)) as archive:
        packed = {name.removeprefix("oasis/") for name in archive.getnames()}
    assert packed - {".helmignore"} == {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()} - {".helmignore"}


def test_notes_name_what_was_installed():
    notes = rig.chart().render(merged(PLAIN, {"prefill": {"replicas": 3}}), name=rig.RELEASE, namespace=NAMESPACE)["oasis/templates/NOTES.txt"]
    assert "3 prefill and 1 decode workers of /models/m, tier sidecar" in notes and f"svc/{FULL}-router 30000" in notes and "plaintext" in notes
