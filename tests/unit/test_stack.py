"""Supervision of a stack, with small HTTP servers in the place of SGLang's."""

import json
import os
import sys
import urllib.request
from pathlib import Path

import pytest

from oasis_sglang import stack as stack_module
from oasis_sglang.keyring import public_key
from oasis_sglang.processes import Processes
from oasis_sglang.stack import Place, Stack, StackError, StackSpec, free_port, probe, worker_argv

FAKE_SERVER = """
import http.server, json, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"argv": sys.argv[1:], "config": os.environ.get("SGLANG_OASIS_CONFIG"),
                           "tmp": os.environ["TMPDIR"], "told": os.environ.get("SGLANG_HOST_IP"), "parent": os.getppid()}).encode()
        self.send_response(503 if "--never-ready" in sys.argv else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

def ended(*_):
    with open(os.environ["ORDER"], "a") as order:
        order.write(sys.argv[1] + "\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, ended)
print("arguments", *sys.argv[1:], flush=True)
if "--fail" in sys.argv:
    raise SystemExit("cannot start: no such thing")
host, port = option("--http").split(":") if "--http" in sys.argv else (option("--host"), option("--port"))
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def make_stack(tmp_path, monkeypatch):
    """Stacks whose servers are FAKE_SERVER, each told its role as the first argument."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE_SERVER)
    monkeypatch.setattr(stack_module.platform, "wanted", lambda: False)
    real_run = Processes.run

    def run(self, argv, *, name, **rest):
        return real_run(self, [sys.executable, str(script), name, *argv], name=name, **rest)

    monkeypatch.setattr(Processes, "run", run)
    environment = {"ORDER": str(tmp_path / "order")}
    with Processes(log=tmp_path / "zygote.log", env=environment) as processes:

        def make(kind="oasis", timeout=20.0, places=None, **spec):
            spec = StackSpec(kind, Path("/model"), **spec)
            return Stack(spec, processes, run_dir=tmp_path / "run", ready_timeout=timeout, places=places)

        make.processes, make.environment = processes, environment
        yield make


def fetch(url):
    with urllib.request.urlopen(url, timeout=5) as reply:
        return json.load(reply)


def value(argv, flag):
    return argv[argv.index(flag) + 1]


def test_an_oasis_stack_is_wired_and_stopped_in_reverse(make_stack, tmp_path):
    with make_stack(config={"admission": "full"}, flags=("--tp-size", "1")) as stack:
        assert list(stack.servers) == ["tier", "prefill", "decode", "router"]
        told = {name: fetch(url) for name, url in stack.urls.items()}
        prefill, decode, router = (told[name]["argv"] for name in ("prefill", "decode", "router"))
        socket_path = value(told["tier"]["argv"], "--local")
        for role, argv in (("prefill", prefill), ("decode", decode)):
            assert value(argv, "--disaggregation-mode") == role
            assert value(argv, "--disaggregation-transfer-backend") == "oasis"
            assert value(argv, "--tp-size") == "1"
            assert json.loads(told[role]["config"]) == {"tier": socket_path, "admission": "full"}
        bootstrap = value(prefill, "--disaggregation-bootstrap-port")
        at = router.index("--prefill")
        assert router[at : at + 3] == ["--prefill", stack.urls["prefill"], bootstrap]
        assert value(router, "--decode") == stack.urls["decode"]
        assert len({entry["tmp"] for entry in told.values()}) == 4
        assert len(socket_path) < 108
        pids = [server.pid for server in stack.servers.values()]
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "router" and order[-1] == "tier" and sorted(order[1:3]) == ["decode", "prefill"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(probe(url) for url in stack.urls.values())
    assert list(make_stack.processes.scratch.iterdir()) == []
    stack.stop()


def values(argv, flag, count=1):
    """What follows each occurrence of ``flag``."""
    return [argv[at + 1 : at + 1 + count] for at, word in enumerate(argv) if word == flag]


def test_several_workers_and_memory_nodes(make_stack, tmp_path):
    """Each prefill worker has a tier of its own, all tiers know all memory nodes, the router knows all workers."""
    with make_stack(prefills=2, decodes=2, memory_nodes=2) as stack:
        assert list(stack.servers) == ["memory0", "memory1", "tier", "tier1", "prefill", "prefill1", "decode", "decode1", "router"]
        told = {name: fetch(url) for name, url in stack.urls.items()}
        argv = {name: entry["argv"] for name, entry in told.items()}
        nodes = ",".join(f"tcp://{value(argv[name], '--listen')}" for name in ("memory0", "memory1"))
        assert ":0" not in nodes
        for prefill, tier in (("prefill", "tier"), ("prefill1", "tier1")):
            assert value(argv[tier], "--memory-nodes") == nodes
            assert json.loads(told[prefill]["config"])["tier"] == value(argv[tier], "--local")
            assert value(argv[prefill], "--disaggregation-bootstrap-port") == str(stack.bootstrap_ports[prefill])
        assert "--memory-nodes" not in argv["memory0"]
        assert len({value(argv[name], "--local") for name in ("memory0", "memory1", "tier", "tier1")}) == 4
        assert len({value(argv[name], "--node") for name in ("memory0", "memory1", "tier", "tier1")}) == 4
        assert values(argv["router"], "--prefill", 2) == [[stack.urls[name], str(stack.bootstrap_ports[name])] for name in ("prefill", "prefill1")]
        assert values(argv["router"], "--decode") == [[stack.urls[name]] for name in ("decode", "decode1")]
        assert stack.bootstrap_port == stack.bootstrap_ports["prefill"] != stack.bootstrap_ports["prefill1"]
    order = (tmp_path / "order").read_text().split()
    assert order[0] == "router" and sorted(order[1:5]) == ["decode", "decode1", "prefill", "prefill1"]
    assert sorted(order[5:7]) == ["tier", "tier1"] and sorted(order[7:]) == ["memory0", "memory1"]


def test_servers_are_put_where_their_role_is(make_stack, tmp_path):
    """Started by whom their place says, on the address of its front; peers are told the other one."""
    with Processes(log=tmp_path / "far.log", env=make_stack.environment) as far:
        near = Place(make_stack.processes, "127.0.0.2", "127.0.1.2", {"SGLANG_HOST_IP": "127.0.1.2"})
        away = Place(far, "127.0.0.3", "127.0.1.3", {"SGLANG_HOST_IP": "127.0.1.3"})
        with make_stack(places={"tier": near, "memory": near, "prefill": near, "decode": away}, prefills=2, memory_nodes=1) as stack:
            told = {name: fetch(url) for name, url in stack.urls.items()}
            argv = {name: entry["argv"] for name, entry in told.items()}
            assert {name: entry["told"] for name, entry in told.items()} == {
                **dict.fromkeys(("memory0", "tier", "tier1", "prefill", "prefill1"), "127.0.1.2"), "decode": "127.0.1.3", "router": None}
            assert len({told[name]["parent"] for name in told if name != "decode"}) == 1 and told["decode"]["parent"] != told["router"]["parent"]
            assert all(stack.urls[name].startswith("http://127.0.0.2:") for name in ("memory0", "tier", "tier1", "prefill", "prefill1"))
            assert stack.urls["decode"].startswith("http://127.0.0.3:") and value(argv["decode"], "--host") == "127.0.0.3"
            assert stack.urls["router"].startswith("http://127.0.0.1:") and stack.bootstrap_host == "127.0.0.2"
            assert value(argv["tier"], "--listen").rpartition(":")[0] == "127.0.1.2" and "--allow-plaintext" in argv["tier"]
            assert value(argv["tier"], "--memory-nodes") == f"tcp://{value(argv['memory0'], '--listen')}"
            assert value(argv["memory0"], "--listen").startswith("127.0.1.2:")
            assert values(argv["router"], "--prefill")[0] == [stack.urls["prefill"]]
            assert stack.cpu_seconds() > 0
        assert not any(probe(url) for url in stack.urls.values())


def test_without_places_everything_stays_on_this_host(make_stack):
    with make_stack() as stack:
        tier = fetch(stack.urls["tier"])["argv"]
        assert value(tier, "--listen").rpartition(":")[0] == "127.0.0.1" and "--allow-plaintext" not in tier
        assert stack.bootstrap_host == "127.0.0.1"


def test_a_stock_stack_has_no_tier_and_no_oasis_setting(make_stack):
    with make_stack("stock") as stack:
        assert list(stack.servers) == ["prefill", "decode", "router"]
        decode = fetch(stack.urls["decode"])
        assert value(decode["argv"], "--disaggregation-transfer-backend") == "nixl"
        assert decode["config"] is None


def test_a_monolith_takes_the_port_asked_for(make_stack):
    port = free_port()
    with make_stack("monolith", port=port) as stack:
        assert stack.url == f"http://127.0.0.1:{port}"
        assert "--disaggregation-mode" not in fetch(stack.url)["argv"]


def test_a_server_that_ends_is_reported_with_its_log_and_the_rest_is_stopped(make_stack):
    stack = make_stack(decode_flags=("--fail",))
    with pytest.raises(StackError, match=r"decode ended with exit code 1[\s\S]*cannot start: no such thing"):
        stack.start()
    assert stack.servers == {}
    assert not any(probe(url) for url in stack.urls.values())


def test_a_server_that_never_gets_ready_is_a_bounded_error(make_stack):
    stack = make_stack("monolith", flags=("--never-ready",), timeout=1.0)
    with pytest.raises(StackError, match="monolith was not ready within 1 s"):
        stack.start()


def test_check_notices_a_death_after_the_start(make_stack):
    with make_stack("monolith") as stack:
        stack.check()
        stack.servers["monolith"].signal(9)
        stack.servers["monolith"].wait(5)
        with pytest.raises(StackError, match="monolith ended with exit code -9"):
            stack.check()


def test_the_users_flags_come_after_ours():
    argv, _ = worker_argv("decode", StackSpec("oasis", "m", flags=("--page-size", "1")), "/tier", [])
    positions = [index for index, flag in enumerate(argv) if flag == "--page-size"]
    assert [argv[index + 1] for index in positions] == ["16", "1"]


def test_segments_of_a_killed_server_are_removed(make_stack):
    segment = Path("/dev/shm") / f"sglang_loads_test_{os.getpid()}.shm"
    stack = make_stack("monolith")
    try:
        segment.write_bytes(b"x")
        with stack:
            stack._segments.add(segment)
            stack.servers["monolith"].signal(9)
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_workers_share_the_gpus_there_are():
    share = stack_module.gpu_share
    assert [share(place, 2, gpus=1) for place in range(2)] == [["--mem-fraction-static", "0.42"]] * 2
    assert [share(place, 2, gpus=8) for place in range(2)] == [[], ["--base-gpu-id", "1"]]
    half = ["--mem-fraction-static", "0.42"]
    assert [share(place, 4, gpus=2) for place in range(4)] == [half, ["--base-gpu-id", "1", *half]] * 2


def test_a_server_that_has_ended_is_started_again_as_it_was(make_stack):
    with make_stack() as stack:
        before = {name: fetch(stack.urls[name]) for name in ("tier", "prefill")}
        urls = dict(stack.urls)
        with pytest.raises(StackError, match="tier still runs"):
            stack.restart("tier")
        for name in ("tier", "prefill"):
            old = stack.servers[name]
            leftover = Path(before[name]["tmp"]) / "metrics" / "of_a_life_before.db"
            leftover.touch()
            old.signal(9, group=True)
            old.wait(10)
            stack.restart(name)
            assert stack.servers[name].pid != old.pid and not leftover.exists()
            after = fetch(stack.urls[name])
            assert (after["argv"], after["config"], after["tmp"]) == tuple(before[name][k] for k in ("argv", "config", "tmp"))
        assert stack.urls == urls
        assert ":0" not in value(before["tier"]["argv"], "--listen"), "readers find it where it was"
        stack.check()


def test_a_keyed_stack_gives_tiers_and_decode_workers_keys_that_the_others_allow(make_stack):
    with make_stack(keyed=True, memory_nodes=1, decodes=2) as stack:
        told = {name: fetch(stack.urls[name]) for name in ("memory0", "tier", "prefill", "decode", "decode1")}
        argv = {name: entry["argv"] for name, entry in told.items()}
        config = {name: json.loads(told[name]["config"]) for name in ("prefill", "decode", "decode1")}
        keys = {**{name: value(argv[name], "--keys") for name in ("memory0", "tier")}, **{name: config[name]["keys"] for name in ("decode", "decode1")}}
        assert {name: Path(file).stem for name, file in keys.items()} == {name: name for name in keys} and "keys" not in config["prefill"]
        folders = {value(argv["tier"], "--allowed"), value(argv["memory0"], "--allowed"), config["decode"]["allowed"], config["decode1"]["allowed"]}
        assert sorted(path.stem for path in Path(*folders).iterdir()) == sorted(keys)
        address, mark, key = value(argv["tier"], "--memory-nodes").partition("#")
        assert address == f"tcp://{value(argv['memory0'], '--listen')}" and key == public_key(Path(keys["memory0"]))
        scratch = Path(*folders)
    assert not scratch.exists()
