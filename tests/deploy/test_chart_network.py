"""Who finds whom in the chart, and who may talk to whom."""

import chart_rig as rig
import pytest
from chart_rig import MATRIX, NAMESPACE, PLAIN, merged, option, values, variables

CASES = pytest.mark.parametrize("name", MATRIX)
WORKERS = ("prefill", "decode")

# -- who finds whom ------------------------------------------------------------------------------------------------------


@CASES
def test_the_router_finds_the_workers(name):
    roles = rig.by_role(rig.case(name))
    if "router" not in roles:
        return
    words = roles["router"]["router"]["args"]
    assert option(roles["router"]["router"], "--service-discovery-namespace") == NAMESPACE
    port = int(option(roles["router"]["router"], "--service-discovery-port"))
    for role in WORKERS:
        start = words.index(f"--{role}-selector") + 1
        labels = dict(word.split("=", 1) for word in words[start:next(i for i in range(start, len(words)) if words[i].startswith("--"))])
        first = {"leaderworkerset.sigs.k8s.io/worker-index": "0"} if roles[role].owner["kind"] == "LeaderWorkerSet" else {}
        assert labels.items() <= {**roles[role].labels, **first}.items() and first.items() <= labels.items(), "of a group, the pod that serves"
        assert all(not labels.items() <= {**other.labels, **first}.items() for key, other in roles.items() if key != role)
        [named] = [one for one in roles[role][role]["ports"] if one["name"] == "http"]
        assert port == named["containerPort"] == int(option(roles[role][role], "--port"))
    bootstrap = option(roles["prefill"]["prefill"], "--disaggregation-bootstrap-port")
    assert roles["prefill"].template["metadata"]["annotations"]["sglang.ai/bootstrap-port"] == bootstrap


@CASES
def test_decode_knows_every_prefill_worker_by_name(name):
    objects = rig.case(name)
    roles, section = rig.by_role(objects), values(name)["prefill"]
    count = section["replicas"] if section["autoscaling"]["kind"] == "none" else section["autoscaling"]["maxReplicas"]
    full = roles["prefill"].owner["metadata"]["name"]
    assert option(roles["decode"]["decode"], "--oasis-prefill-addresses") == ",".join(f"{full}-{n}.{full}.{NAMESPACE}.svc:8998" for n in range(count))
    if roles["prefill"].owner["kind"] == "StatefulSet":
        [service] = [one for one in rig.kinds(objects, "Service") if one["metadata"]["name"] == full]
        assert service["spec"]["clusterIP"] == "None" and not service["spec"].get("publishNotReadyAddresses")
    else:
        assert roles["prefill"].owner["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}, "the controller makes the Service of that name"
        assert not any(one["metadata"]["name"] == full for one in rig.kinds(objects, "Service"))


@CASES
def test_tiers_say_where_they_are(name):
    """At their pod's own address, which is what they tell readers; memory nodes behind one name."""
    objects = rig.case(name)
    roles, security = rig.by_role(objects), values(name)["security"]
    for pod in roles.values():
        if "tier" in pod:
            assert option(pod["tier"], "--listen") == "$(POD_IP):7400"
            assert variables(pod["tier"])["POD_IP"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    where = option(roles["prefill"]["tier"], "--memory-nodes") if "tier" in roles["prefill"] else None
    if values(name)["tier"]["mode"] != "memoryNode":
        assert where is None and "memory" not in roles
        return
    full = roles["memory"].owner["metadata"]["name"]
    assert where == f"dns://{full}.{NAMESPACE}.svc:7400" + ("" if security["allowPlaintext"] else f"#{rig.KEY}")
    [service] = [one for one in rig.kinds(objects, "Service") if one["metadata"]["name"] == full]
    assert service["spec"]["clusterIP"] == "None" and option(roles["memory"]["tier"], "--memory-nodes") is None


@CASES
def test_several_pods_of_a_worker_find_each_other(name):
    for pod in rig.pods(rig.case(name)):
        if pod.role not in WORKERS:
            continue
        nodes, container = values(name)[pod.role]["nodes"], pod[pod.role]
        if nodes == 1:
            assert pod.owner["kind"] == ("StatefulSet" if pod.role == "prefill" else "Deployment") and option(container, "--nnodes") is None
            continue
        assert pod.owner["kind"] == "LeaderWorkerSet" and pod.owner["spec"]["leaderWorkerTemplate"]["size"] == nodes == int(option(container, "--nnodes"))
        assert option(container, "--node-rank") == "$(LWS_WORKER_INDEX)" and option(container, "--dist-init-addr") == "$(LWS_LEADER_ADDRESS):20000"
        assert int(option(container, "--tp-size")) == values(name)["model"]["tensorParallel"]


# -- who may talk to whom ------------------------------------------------------------------------------------------------

DATA = (32768, 60999)


def flows(name: str) -> tuple[set, set]:
    """Admitted going in, and going out: (from, to, first port, last port); roles, or "dns", "clients", "metrics", "api", "downloads", by what is
    selected."""
    section = values(name)["networkPolicy"]
    known = {"clients": section["clients"], "metrics": section["monitoring"]}
    found = set(), set()
    for policy in rig.kinds(rig.case(name), "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"], "what is not named is denied"
        me = rig.component(policy["spec"]["podSelector"]["matchLabels"])
        for side, at in (("ingress", "from"), ("egress", "to")):
            for rule in policy["spec"][side]:
                peers = rule.get(at)
                if peers is None:
                    assert side == "egress", "nobody is not everybody"
                    if [(one["protocol"], one["port"]) for one in rule["ports"]] == [("UDP", 53), ("TCP", 53)]:
                        continue
                others = [key for key, value in known.items() if value == peers]
                if peers is None:
                    others = ["downloads" if me in WORKERS else "api"]
                if not others:
                    [peer] = peers
                    others = [rig.component(peer["podSelector"]["matchLabels"])]
                for port in rule["ports"]:
                    assert port["protocol"] == "TCP"
                    pair = (others[0], me) if side == "ingress" else (me, others[0])
                    found[side == "egress"].add((*pair, port["port"], port.get("endPort", port["port"])))
    return found


@CASES
def test_the_network_admits_what_roles_need_and_nothing_else(name):
    section, objects = values(name), rig.case(name)
    policies = rig.kinds(objects, "NetworkPolicy")
    if not section["networkPolicy"]["enabled"]:
        assert policies == []
        return
    roles = rig.by_role(objects)
    for pod in roles.values():
        assert sum(one["spec"]["podSelector"]["matchLabels"].items() <= pod.labels.items() for one in policies) == 1
    tiers, router = ("tier" if section["tier"]["mode"] == "daemonset" else "prefill"), "router" in roles
    between = {("decode", "prefill", 30000, 30000), ("decode", "prefill", 8998, 8998), ("decode", tiers, 7400, 7400), ("decode", tiers, *DATA)}
    between |= {("router", role, 30000, 30000) for role in WORKERS} if router else set()
    if "memory" in roles:
        between |= {("prefill", "memory", 7400, 7400), ("prefill", "memory", *DATA), ("memory", "prefill", *DATA), ("decode", "memory", 7400, 7400), ("decode", "memory", *DATA)}
    between |= {(role, role, 1, 65535) for role in WORKERS if section[role]["nodes"] > 1}
    scraped = {("metrics", role, 30000, 30000) for role in WORKERS} | {("metrics", tiers, 7401, 7401)}
    scraped |= {("metrics", "memory", 7401, 7401)} if "memory" in roles else set()
    scraped |= {("metrics", "router", 29000, 29000), ("clients", "router", 30000, 30000)} if router else set()
    outside = {("router", "api", 443, 443), ("router", "api", 6443, 6443)} if router else set()
    outside |= set() if section["model"]["path"].startswith("/") else {(role, "downloads", 443, 443) for role in WORKERS}
    assert flows(name) == (between | scraped, between | outside)


@CASES
def test_data_planes_take_ports_from_the_range_that_is_admitted(name):
    for pod in rig.pods(rig.case(name)):
        sysctls = {one["name"]: one["value"] for one in pod.spec["securityContext"].get("sysctls", ())}
        serves = any(container["name"] in ("tier", "decode") for container in pod.servers)
        assert sysctls == ({"net.ipv4.ip_local_port_range": "32768 60999"} if serves else {})


def test_what_is_outside_can_be_narrowed():
    """By default nobody is named: plugins that know nodes by other means than their addresses find no API server in any block."""
    narrow = {"kubernetesApi": {"cidr": "10.0.0.1/32"}, "downloads": {"cidr": "192.0.2.0/24", "ports": [8443]}}
    for given, expected in (({}, {443: None}), (narrow, {443: [{"ipBlock": {"cidr": "10.0.0.1/32"}}], 8443: [{"ipBlock": {"cidr": "192.0.2.0/24"}}]})):
        objects = rig.render(merged(PLAIN, {"model": {"path": "org/model"}, "networkPolicy": given}))
        rules = [rule for policy in rig.kinds(objects, "NetworkPolicy") for rule in policy["spec"]["egress"] if rule["ports"][0]["port"] in (443, 8443)]
        assert len(rules) == 3 and {rule["ports"][0]["port"]: rule.get("to") for rule in rules} == expected


def test_nobody_is_not_everybody():
    """An empty list of peers would admit all."""
    for policy in rig.kinds(rig.render(merged(PLAIN, {"networkPolicy": {"clients": [], "monitoring": []}})), "NetworkPolicy"):
        assert all(rule["from"] for rule in policy["spec"]["ingress"])
        assert rig.component(policy["spec"]["podSelector"]["matchLabels"]) != "router" or policy["spec"]["ingress"] == []
