"""What the chart promises of its objects, asserted object by object over all sets of values."""

import re

import chart_rig as rig
import pytest
from chart_rig import CHART, FULL, MATRIX, NAMESPACE, PLAIN, ROOT, Pod, merged, option, quantity, values, variables

CASES = pytest.mark.parametrize("name", MATRIX)
WORKERS = ("prefill", "decode")
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""What the restricted standard admits."""


def pods(name: str) -> list[Pod]:
    return list(rig.pods(rig.case(name)))


def pins(name: str) -> bool:
    rdma = values(name)["transfer"]["rdma"]
    return bool(rdma["resource"]) and rdma["memlock"] == "capability"


# -- who a process is ---------------------------------------------------------------------------------------------------


@CASES
def test_pods_are_restricted_but_for_what_the_readme_lists(name):
    """Kubernetes' restricted pod security standard, and read-only roots on top."""
    exceptions = set()
    for pod in pods(name):
        security = pod.spec["securityContext"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"} and security["fsGroup"] == 10001
        if security["runAsUser"] == 0:
            exceptions.add("user 0")
        else:
            assert security["runAsNonRoot"] and security["runAsUser"] == security["runAsGroup"] == 10001
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.spec.keys()
        assert {one["name"] for one in security.get("sysctls", ())} <= {"net.ipv4.ip_local_port_range"}, "a sysctl that is safe"
        for volume in pod.spec["volumes"]:
            [kind] = volume.keys() - {"name"}
            exceptions |= {kind} - VOLUMES
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["readOnlyRootFilesystem"] is True and own["capabilities"]["drop"] == ["ALL"]
            assert not own.keys() & {"privileged", "procMount"}
            exceptions |= set(own["capabilities"].get("add", ()))
            if container["name"] == "host-path":
                assert own["runAsUser"] == 0 and own["capabilities"]["add"] == ["CHOWN"] and container["command"] == [
                    "chown", f"{security['runAsUser']}:{security['runAsUser']}", "/run/oasis"]
            else:
                assert not own.keys() & {"runAsUser", "runAsNonRoot"}
    daemonset = values(name)["tier"]["mode"] == "daemonset"
    assert exceptions == ({"user 0", "IPC_LOCK"} if pins(name) else set()) | ({"hostPath", "CHOWN"} if daemonset else set())


@CASES
def test_only_processes_that_register_memory_may_lock_it(name):
    several = {role for role in WORKERS if values(name)[role]["nodes"] > 1}
    for pod in pods(name):
        users = {container["name"].removeprefix("doctor-") for container in pod.containers if "IPC_LOCK" in container["securityContext"]["capabilities"].get("add", ())}
        assert users == ({one for one in ("tier", "decode", *several) if one in pod} if pins(name) else set())
        assert (pod.spec["securityContext"]["runAsUser"] == 0) == (pins(name) and pod.role != "router")


@CASES
def test_only_the_router_has_a_token_and_it_may_read_pods(name):
    objects = rig.case(name)
    assert all(one["automountServiceAccountToken"] is False for one in rig.kinds(objects, "ServiceAccount"))
    for pod in rig.pods(objects):
        assert pod.spec["automountServiceAccountToken"] is (pod.role == "router") and pod.spec["enableServiceLinks"] is False
        assert pod.spec["serviceAccountName"] == (f"{FULL}-router" if pod.role == "router" else FULL) or name == "renamed"
    roles, bindings = rig.kinds(objects, "Role"), rig.kinds(objects, "RoleBinding")
    assert not rig.kinds(objects, "ClusterRole", "ClusterRoleBinding")
    assert len(roles) == len(bindings) == (values(name)["router"]["enabled"] and values(name)["rbac"]["create"])
    for role, binding in zip(roles, bindings):
        assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        [router] = [pod for pod in rig.pods(objects) if pod.role == "router"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": router.spec["serviceAccountName"], "namespace": NAMESPACE}]


def test_users_are_those_of_the_images():
    for path in (ROOT / "deploy/docker").glob("Dockerfile*"):
        text = path.read_text()
        assert set(re.findall(r"^USER (.+)$", text, re.M)) == {"10001:10001"}
        assert set(re.findall(r"^ENTRYPOINT (.+)$", text, re.M)) == {'["/usr/bin/tini", "--", "oasis"]'}, "containers have arguments only"


@CASES
def test_sigterm_reaches_oasis(name):
    """No shell between the kubelet and what drains: the image's entry point passes it on."""
    for pod in pods(name):
        for container in pod.servers:
            command = container.get("command", [])
            assert command == (["python", "-m", "oasis_sglang.router"] if pod.role == "router" else [])
            assert pod.role == "router" or container["args"][0] == container["name"]


@CASES
def test_keys_are_their_owners_alone(name):
    """Mounted where the list is read; the own key is copied for its owner, before anything needs it."""
    secrets = values(name)["security"]["keys"]
    for pod in pods(name):
        expected = {"prefill": "tier" if "tier" in pod else "", "tier": "tier", "decode": "decode", "memory": "memoryNode", "router": ""}[pod.role]
        mounted = [volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume]
        if values(name)["security"]["allowPlaintext"] or not expected:
            assert mounted == [] and "keys" not in pod
            assert not any("/etc/oasis/keys" in rig.arguments(container) for container in pod.containers)
            continue
        assert mounted == [{"secretName": secrets[expected], "defaultMode": 0o400}]
        assert pod["keys"]["command"] == ["install", "-m", "0400", "/etc/oasis/keys/node.key_secret", "/run/oasis-key/node.key_secret"]
        assert pod.volume("own-key")["emptyDir"]["medium"] == "Memory"
        order = [container["name"] for container in pod.containers]
        for container in pod.containers:
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            users = ("keys", "tier", "doctor-tier") if expected != "decode" else ("keys", "decode", "doctor-decode")
            assert ("/run/oasis-key" in mounts) == ("/etc/oasis/keys" in mounts) == (container["name"] in users)
            if container["name"] in users[1:]:
                assert mounts["/run/oasis-key"]["readOnly"] and order.index("keys") < order.index(container["name"])
                prefix = "--oasis-" if container["name"] == "decode" else "--"
                assert option(container, f"{prefix}keys") == "/run/oasis-key/node.key_secret" and option(container, f"{prefix}allowed") == "/etc/oasis/keys"
        assert mounts["/etc/oasis/keys"]["readOnly"] if "/etc/oasis/keys" in mounts else pod.role == "prefill"


@CASES
def test_nothing_goes_in_plaintext_unless_it_was_allowed(name):
    flags = {word for pod in pods(name) for container in pod.servers for word in rig.arguments(container) if "plaintext" in word}
    assert flags == ({"--allow-plaintext", "--oasis-allow-plaintext=true"} if values(name)["security"]["allowPlaintext"] else set())


# -- how it lives and ends -----------------------------------------------------------------------------------------------


@CASES
def test_probes_ask_nobody_but_the_process_itself(name):
    """/health_generate computes one token here; /health, with the variable below, and /healthz say that their own loop runs."""
    paths = {"prefill": ("/health_generate", "/health", "/health"), "tier": ("/healthz", "/readyz", "/healthz"), "router": ("/liveness",) * 3}
    paths["decode"] = paths["prefill"]
    for pod in pods(name):
        for container in pod.servers:
            probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
            assert tuple(probe["httpGet"]["path"] for probe in probes) == paths[container["name"]]
            assert {probe["httpGet"]["port"] for probe in probes} <= {port["name"] for port in container["ports"]}
            if container["name"] in WORKERS:
                assert variables(container)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"]["value"] == "false"
                assert probes[0]["timeoutSeconds"] > 20, "SGLang's own limit for that token"
                seconds = values(name)[container["name"]]["startupSeconds"]
                assert probes[0]["periodSeconds"] * probes[0]["failureThreshold"] >= seconds
            assert probes[2]["periodSeconds"] * probes[2]["failureThreshold"] >= 30, "a busy moment kills nobody"


@CASES
def test_a_pods_grace_holds_its_drain(name):
    """docs/operations.md: drain_seconds and 30 more; a sidecar's come after its worker's."""
    for pod in pods(name):
        needed = 0
        for container in pod.servers:
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            drain = next(option(container, flag) for flag in ("--drain-seconds", "--oasis-drain-seconds", "--shutdown-grace-period-secs") if option(container, flag))
            assert (sleep >= 1) == (container["name"] != "tier"), "the router has to be told before the worker refuses"
            needed += sleep + int(drain) + 30
        assert pod.spec["terminationGracePeriodSeconds"] == needed


@CASES
def test_each_role_has_a_disruption_budget_of_its_own(name):
    objects = rig.case(name)
    budgets = rig.kinds(objects, "PodDisruptionBudget")
    assert all(one["spec"]["maxUnavailable"] == 1 and one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for one in budgets)
    for pod in rig.pods(objects):
        matching = [one for one in budgets if one["spec"]["selector"]["matchLabels"].items() <= pod.labels.items()]
        assert len(matching) == (pod.owner["kind"] != "DaemonSet"), "draining a host leaves its daemons alone"


@CASES
def test_updates_roll(name):
    for pod in pods(name):
        spec, kind = pod.owner["spec"], pod.owner["kind"]
        section = {"memory": values(name)["tier"]["memoryNodes"], "tier": values(name)["tier"]["daemonset"]}.get(pod.role) or values(name)[pod.role]
        strategy = {"Deployment": "strategy", "StatefulSet": "updateStrategy", "DaemonSet": "updateStrategy", "LeaderWorkerSet": "rolloutStrategy"}[kind]
        assert spec[strategy]["type"] == "RollingUpdate"
        rolling = spec[strategy].get("rollingUpdate") or spec[strategy]["rollingUpdateConfiguration"]
        assert rolling == {**section["update"], **({"maxSurge": section["update"].get("maxSurge", 0)} if kind == "LeaderWorkerSet" else {})}
        assert rolling["maxUnavailable"] or rolling["maxSurge"]
        if kind == "StatefulSet":
            assert spec["podManagementPolicy"] == "Parallel", "nobody waits for another one's model to load"
        assert "helm.sh/chart" not in pod.labels, "a new chart restarts nobody by its name"


def test_roles_can_be_updated_one_after_the_other():
    """Prefill, then tiers, then decode, as the README says."""
    new, both = {"image": {"tag": "new"}}, []
    for changed in ({}, {"prefill": new}, {"prefill": new, "tier": new}, {"prefill": new, "tier": new, "decode": new}, new):
        roles = rig.by_role(rig.render(merged(PLAIN, rig.MEMORY_NODES, {"image": {"digest": rig.DIGEST}}, changed if changed is not new else {
            "image": {"tag": "new", "digest": ""}})))
        both.append([role for role, container in (("prefill", "prefill"), ("prefill", "tier"), ("memory", "tier"), ("decode", "decode"), ("router", "router"))
                     if roles[role][container]["image"].endswith(":new")])
    assert both == [[], ["prefill", "prefill"], ["prefill", "prefill", "memory"], ["prefill", "prefill", "memory", "decode"],
                    ["prefill", "prefill", "memory", "decode", "router"]]
    text = (CHART / "README.md").read_text()
    assert "Update **prefill, then tiers, then decode**" in text


@CASES
def test_a_sidecar_starts_before_its_worker_and_ends_after_it(name):
    for pod in pods(name):
        if pod.role != "prefill":
            assert not any("restartPolicy" in container for container in pod.containers)
        elif values(name)["tier"]["mode"] == "daemonset":
            assert "tier" not in pod
        else:
            assert pod["tier"]["restartPolicy"] == "Always" and pod["tier"] is pod.spec["initContainers"][-1]


@CASES
def test_the_doctor_comes_first(name):
    """Each server is preceded by a check with its image, environment, mounts and resources: what it finds is what the server will find."""
    for pod in pods(name):
        order = [container["name"] for container in pod.containers]
        for container in pod.servers:
            if container["name"] == "router" or not values(name)["doctor"]["enabled"]:
                assert f"doctor-{container['name']}" not in pod
                continue
            doctor = pod[f"doctor-{container['name']}"]
            assert order.index(doctor["name"]) < order.index(container["name"]) and "restartPolicy" not in doctor
            for field in ("image", "env", "volumeMounts", "resources", "securityContext"):
                assert doctor.get(field) == container.get(field)
            assert doctor["args"][:3] == ["doctor", "--role", container["name"]]
            for flag, of in (("--arena-bytes", "--arena-bytes"), ("--host-cache-bytes", "--oasis-host-cache-bytes"), ("--local", "--local"), ("--local", "--oasis-tier")):
                if option(container, of):
                    assert option(doctor, flag) == option(container, of)


# -- what it is given ----------------------------------------------------------------------------------------------------


@CASES
def test_memory_requests_hold_what_is_pinned(name):
    section = values(name)
    for pod in pods(name):
        for container in pod.servers:
            of = section["tier"]["memoryNodes"] if pod.role == "memory" else section[container["name"]]
            parts = [of[part] for part in ("baseMemory", "shmSize", "hostCache", "arena") if part in of]
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            needed = sum(map(quantity, parts))
            assert quantity(limits["memory"]) >= quantity(requests["memory"]) >= needed
            assert container["name"] == "router" or quantity(requests["memory"]) - needed < 1 << 20
            for flag, part in (("--arena-bytes", "arena"), ("--oasis-host-cache-bytes", "hostCache")):
                assert option(container, flag) == (str(quantity(of[part])) if part in of else None)
            assert float(str(requests["cpu"]).removesuffix("m")) > 0


def test_more_memory_may_be_given():
    roles = rig.by_role(rig.render(merged(PLAIN, {"decode": {"resources": {"requests": {"memory": "100Gi"}, "limits": {"memory": "128Gi"}}},
                                                  "prefill": {"resources": {"requests": {"memory": "50Gi"}}}})))
    assert roles["decode"]["decode"]["resources"] == {"requests": {"cpu": "8", "memory": "100Gi", "nvidia.com/gpu": 1}, "limits": {"memory": "128Gi", "nvidia.com/gpu": 1}}
    assert roles["prefill"]["prefill"]["resources"]["limits"]["memory"] == "50Gi"


@CASES
def test_devices(name):
    section = values(name)
    rdma, gpu = section["transfer"]["rdma"], section["gpuResource"]
    for pod in pods(name):
        for container in pod.servers:
            of = section["tier"]["memoryNodes"] if pod.role == "memory" else section[container["name"]]
            expected = {}
            if container["name"] in WORKERS and gpu:
                expected[gpu] = section["model"]["tensorParallel"] // of["nodes"]
            if rdma["resource"] and (container["name"] in ("tier", "decode") or of.get("nodes", 1) > 1):
                expected[rdma["resource"]] = rdma["count"]
            if of.get("hugepages"):
                expected[f"hugepages-{of['hugepages']['size']}"] = of["hugepages"]["amount"]
                [mount] = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/hugepages"]
                assert pod.volume(mount)["emptyDir"] == {"medium": f"HugePages-{of['hugepages']['size']}"}
            for side in ("requests", "limits"):
                found = {key: value for key, value in container["resources"][side].items() if key not in ("cpu", "memory")}
                assert found == expected, "Kubernetes wants both to be equal for these"


@CASES
def test_workers_have_shared_memory(name):
    for pod in pods(name):
        for container in pod.servers:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert ("/dev/shm" in mounts) == (container["name"] in WORKERS), "a tier's memory has no name"
            if "/dev/shm" in mounts:
                assert pod.volume(mounts["/dev/shm"])["emptyDir"] == {"medium": "Memory", "sizeLimit": values(name)[pod.role]["shmSize"]}
            assert variables(container)["HOME"]["value"] == "/cache" and {"/tmp", "/cache"} <= mounts.keys(), "the root is read only"


@CASES
def test_ucx_is_told_where_to_go(name):
    """Without RDMA: TCP, and no transport that only looks as if it reached the other pod."""
    transfer = values(name)["transfer"]
    tls = transfer["ucx"]["tls"] or ("" if transfer["rdma"]["resource"] else "tcp")
    for pod in pods(name):
        for container in pod.servers:
            found = {key: one["value"] for key, one in variables(container).items() if key in ("UCX_TLS", "UCX_NET_DEVICES")}
            transfers = container["name"] in ("tier", "decode") or (container["name"] in WORKERS and values(name)[pod.role]["nodes"] > 1)
            expected = {"UCX_TLS": tls, "UCX_NET_DEVICES": transfer["ucx"]["netDevices"]} if transfers else {}
            assert found == {key: value for key, value in expected.items() if value}


@CASES
def test_socket_is_shared_by_prefill_and_tier_alone(name):
    mode = values(name)["tier"]["mode"]
    for pod in pods(name):
        volumes = [volume for volume in pod.spec["volumes"] if volume["name"] == "socket"]
        assert len(volumes) == (pod.role in ("prefill", "tier", "memory"))
        for container in pod.servers:
            flag = {"tier": "--local", "prefill": "--oasis-tier"}.get(container["name"])
            mounted = "/run/oasis" in {mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounted == bool(flag) and (not flag or option(container, flag) == "/run/oasis/tier.sock")
        if volumes and mode == "daemonset":
            assert volumes[0]["hostPath"] == {"path": "/run/oasis", "type": "DirectoryOrCreate"}
    assert len({pod.spec["securityContext"]["runAsUser"] for pod in pods(name) if pod.role in ("prefill", "tier")}) == 1, "its mode is 0600"


def test_a_folder_of_the_host_has_to_be_there_unless_it_is_prepared():
    for pod in rig.pods(rig.render(merged(PLAIN, {"tier": {"mode": "daemonset", "daemonset": {"hostPath": "/var/lib/oasis"}}}))):
        assert "host-path" not in pod
        if pod.role in ("prefill", "tier"):
            assert pod.volume("socket")["hostPath"] == {"path": "/var/lib/oasis", "type": "Directory"}


@CASES
def test_replicas_spread_over_hosts(name):
    for pod in pods(name):
        if pod.owner["kind"] == "DaemonSet":
            continue
        [rule] = pod.spec["topologySpreadConstraints"]
        if rule["topologyKey"] == "kubernetes.io/hostname":
            assert rule["whenUnsatisfiable"] == "ScheduleAnyway" and rule["labelSelector"]["matchLabels"].items() <= pod.labels.items()
        else:
            assert rule == MATRIX[name][pod.role]["topologySpreadConstraints"][0]


def test_placement_reaches_its_role():
    roles = rig.by_role(rig.case("sidecar, everything"))
    prefill, given = roles["prefill"], rig.EVERYTHING["prefill"]
    for field in ("nodeSelector", "tolerations", "affinity", "priorityClassName", "runtimeClassName"):
        assert prefill.spec[field] == given[field] and field not in roles["decode"].spec
    assert prefill.labels["team"] == "a" and prefill.template["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rail-0"
    assert prefill.spec["imagePullSecrets"] == [{"name": "registry"}]
    assert variables(roles["decode"]["decode"])["OMP_NUM_THREADS"]["value"] == "4"
    assert variables(prefill["prefill"])["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hugging-face", "key": "token"}
    assert prefill.volume("model")["persistentVolumeClaim"] == {"claimName": "models"} and variables(prefill["prefill"])["HF_HOME"]["value"] == "/models/huggingface"


@pytest.mark.parametrize("role", ["prefill", "decode", "tier", "router"])
def test_the_users_environment_replaces_the_charts(role):
    """A name that is there twice is refused when it is applied on the server, as Helm 4 does."""
    own = [{"name": "HOME", "value": "/tmp"}, {"name": "UCX_TLS", "value": "tcp,self"}, {"name": "MINE", "value": "$(POD_IP)"}]
    roles = rig.by_role(rig.render(merged(PLAIN, {role: {"extraEnv": own}})))
    pod = roles["prefill" if role == "tier" else role]
    for container in (pod[name] for name in (role, f"doctor-{role}") if name in pod):
        names = [one["name"] for one in container["env"]]
        assert len(set(names)) == len(names) and "POD_IP" in names[:names.index("MINE")]
        assert {name: variables(container)[name] for name in ("HOME", "UCX_TLS", "MINE")} == {one["name"]: one for one in own}


def test_images_by_digest():
    roles = rig.by_role(rig.case("sidecar, everything"))
    images = {container["name"]: container["image"] for pod in roles.values() for container in pod.containers}
    assert images.pop("tier") == images.pop("doctor-tier") == "oasis:0.1.0-tier", "a role's own tag wins over a digest that is not its own"
    assert set(images.values()) == {"oasis:0.1.0-tier", f"oasis@{rig.DIGEST}"} and images["prefill"] == images["router"] == f"oasis@{rig.DIGEST}"
    both = rig.by_role(rig.render(merged(PLAIN, {"image": {"tag": "x", "digest": rig.DIGEST, "repository": "registry.example/oasis"}})))
    assert both["decode"]["decode"]["image"] == f"registry.example/oasis@{rig.DIGEST}", "a digest wins over the tag beside it"
