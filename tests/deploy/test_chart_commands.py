"""The chart cannot drift from the commands: every container's arguments go through the parser of the program that they are for."""

import argparse
import ast
import inspect
import re

import chart_rig as rig
import pytest
import typer
from chart_rig import MATRIX, NAMESPACE, ROOT, arguments, values, variables
from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import network
from sglang_router.router_args import RouterArgs

from oasis_sglang import cli, keyring, launch, plugin
from transport.memory_nodes import MemoryNodes
from transport.server import TierOptions, TierServer

POD = {"POD_IP": "10.1.2.3", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "blue-oasis-prefill-0.blue-oasis-prefill.llm"}
"""What the kubelet and LeaderWorkerSet's controller put in."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder as a pod of the chart has it."""
    folder = tmp_path_factory.mktemp("keys")
    public, secret = keyring.create(folder, "node")
    keyring.allow(folder, [public])
    return folder


def filled(container: dict, keys) -> list[str]:
    """The words that the process gets, keys where this machine has them."""
    words = [re.sub(r"\$\((\w+)\)", lambda match: POD[match[1]], word) for word in arguments(container)]
    places = {"/run/oasis-key/node.key_secret": str(keys / "node.key_secret"), "/etc/oasis/keys": str(keys / "allowed")}
    return [places.get(word, word).replace(rig.KEY, keyring.public_key(keys / "node.key")) for word in words]


def parsed(words: list[str]) -> tuple[str, dict]:
    """(command of `oasis`, its parameters). Raises a usage error for what it does not know."""
    command = typer.main.get_command(cli.app).commands[words[0]]
    return words[0], command.make_context(words[0], words[1:]).params


@pytest.fixture(scope="module")
def sglang_parser() -> argparse.ArgumentParser:
    add_disagg_transfer_backend_choices([plugin.BACKEND])  # as our plugin does before SGLang parses
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture(scope="module")
def router_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return parser


def containers(name: str) -> list[tuple[rig.Pod, dict]]:
    return [(pod, container) for pod in rig.pods(rig.case(name)) for container in pod.containers]


@pytest.mark.parametrize("name", MATRIX)
def test_tiers_take_their_arguments(name, keys):
    for pod, container in containers(name):
        if container["name"] != "tier":
            continue
        command, given = parsed(filled(container, keys))
        assert command == "tier"
        section = values(name)["tier"]["memoryNodes"] if pod.role == "memory" else values(name)["tier"]
        assert given["arena_bytes"] == rig.quantity(section["arena"]) and given["listen"] == "10.1.2.3:7400" and given["drain_seconds"] == section["drainSeconds"]
        assert given["zero_freed"] is values(name)["tier"]["zeroFreed"] and given["accept_generated"] is values(name)["tier"]["acceptGenerated"]
        options = {field: given[field] for field in inspect.signature(TierOptions).parameters if field in given}
        server = TierServer(TierOptions(**{**options, "planes": (given["data_plane"],)}))  # refuses what does not go together
        assert server.advertise == "10.1.2.3" and (server.security.keys is None) is values(name)["security"]["allowPlaintext"]
        if given["memory_nodes"]:
            assert MemoryNodes(given["memory_nodes"]).name == (f"{pod.owner['metadata']['name'].replace('prefill', 'memory')}.{NAMESPACE}.svc", 7400)


@pytest.mark.parametrize("name", MATRIX)
def test_workers_take_their_arguments(name, keys, sglang_parser):
    for pod, container in containers(name):
        if container["name"] not in ("prefill", "decode"):
            continue
        role, *words = filled(container, keys)
        assert role == pod.role == container["name"]
        argv, _ = launch.worker_argv(role, words)  # our options, validated
        given = sglang_parser.parse_args(argv)
        section = values(name)
        assert given.model_path == section["model"]["path"] and given.disaggregation_mode == role and given.disaggregation_transfer_backend == "oasis"
        assert given.port == 30000 and given.tp_size == section["model"]["tensorParallel"] and given.nnodes == section[role]["nodes"]
        if pool := section[role].get("kvPoolTokens"):
            assert given.max_total_tokens == pool
        ours, _ = launch.split_flags(words)
        assert ours["drain_seconds"] == section[role]["drainSeconds"]
        if role == "decode":
            assert ours["host_cache_bytes"] == rig.quantity(section["decode"]["hostCache"]) and ours["data_plane"] == section["transfer"]["dataPlane"]
            assert ours.get("allow_plaintext", False) is section["security"]["allowPlaintext"]


@pytest.mark.parametrize("name", MATRIX)
def test_the_router_takes_its_arguments(name, router_parser):
    for _, container in containers(name):
        if container["name"] != "router":
            continue
        given = RouterArgs.from_cli_args(router_parser.parse_args(container["args"]), use_router_prefix=False)
        roles = rig.by_role(rig.case(name))
        for role, selector in (("prefill", given.prefill_selector), ("decode", given.decode_selector)):
            assert selector["app.kubernetes.io/component"] == role and selector["app.kubernetes.io/instance"] == rig.RELEASE
            assert given.bootstrap_port_annotation in roles["prefill"].template["metadata"]["annotations"]
        assert given.service_discovery and given.pd_disaggregation and given.service_discovery_namespace == NAMESPACE
        assert given.prefill_policy == given.decode_policy == "manual" and given.assignment_mode == "min_load"
        assert (ROOT / "oasis_sglang/router.py").is_file() and container["command"] == ["python", "-m", "oasis_sglang.router"]


@pytest.mark.parametrize("name", MATRIX)
def test_doctors_take_their_arguments(name, keys):
    for _, container in containers(name):
        if container["name"].startswith("doctor-"):
            command, given = parsed(filled(container, keys))
            assert command == "doctor" and given["role"] == container["name"].removeprefix("doctor-") and given["as_json"]


def test_an_unknown_flag_would_be_found(keys, sglang_parser, router_parser):
    with pytest.raises(Exception, match="No such option: --arena-byte"):
        parsed(["tier", "--arena-byte", "1"])
    with pytest.raises(SystemExit):
        sglang_parser.parse_args(["--model-path", "m", "--disaggregation-bootstrap-ports", "8998"])
    with pytest.raises(SystemExit):
        router_parser.parse_args(["--prefill-selectors", "a=b"])


def routes(path: str) -> dict[str, ast.AST]:
    """URL -> handler, of the functions that are decorated with @app.get in a file of SGLang."""
    found = {}
    for node in ast.walk(ast.parse(open(inspect.getfile(ServerArgs).replace("server_args.py", path)).read())):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "app.get" and isinstance(call.args[0], ast.Constant):
                found[call.args[0].value] = node
    return found


def test_sglangs_health_says_what_the_probes_take_it_to_say():
    """With the variable that pods set, /health answers before anything is computed; /health_generate does not; first of all it says that the
    server drains. Followers of a group have both."""
    found = routes("entrypoints/http_server.py")
    assert found["/health"] is found["/health_generate"]
    steps = [ast.unparse(step) for step in found["/health"].body]
    [drains] = [i for i, step in enumerate(steps) if "gracefully_exit" in step and "503" in step]
    [quick] = [i for i, step in enumerate(steps) if step.startswith("if not envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.get() and request.url.path == '/health'")]
    computes = next(i for i, step in enumerate(steps) if "generate_request" in step)
    assert drains < quick < computes and "200" in steps[quick]
    assert {"/health", "/health_generate"} <= routes("utils/common.py").keys()


@pytest.mark.parametrize("name", ["sidecar", "sidecar, everything"])
def test_variables_are_sglangs(name):
    decode = rig.by_role(rig.case(name))["decode"]["decode"]
    known = [*type(envs).__dict__, *re.findall(r'getenv\("(\w+)"', inspect.getsource(network))]
    assert {variable for variable in variables(decode) if variable.startswith("SGLANG_")} <= {*known} and "SGLANG_HOST_IP" in known
    with envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.override(False):
        assert envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.get() is False


@pytest.mark.parametrize("name", MATRIX)
def test_no_flag_is_given_twice(name):
    for _, container in containers(name):
        flags = [word for word in container.get("args", ()) if word.startswith("--")]
        assert len(set(flags)) == len(flags)
