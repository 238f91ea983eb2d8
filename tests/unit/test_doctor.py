"""``oasis doctor``: what it makes of a host, what it reads of one, and the command itself."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from oasis_sglang import SGLANG_VERSION
from oasis_sglang.cli import app
from oasis_sglang.config import OasisConfig
from oasis_sglang.doctor import facts as fact_finding
from oasis_sglang.doctor import host_checks, host_facts, network_checks, probe, report, software_checks
from oasis_sglang.doctor.asked import Asked, planes_of
from oasis_sglang.doctor.check import Check
from oasis_sglang.doctor.checks import check_all
from oasis_sglang.doctor.facts import Accelerator, Facts, Requirement
from oasis_sglang.doctor.host_facts import HugePages, Interface, MemoryGroup, RdmaDevice, Shm
from oasis_sglang.doctor.probe import Device, Gpu, NixlFound, SglangFound
from oasis_sglang.doctor.transfer import Transferred
from transport.errors import ConfigError
from transport.server import TierOptions

GIB = 1 << 30
ETH0, ETH1, LO = Device("eth0", ("tcp",)), Device("eth1", ("tcp",)), Device("lo", ("tcp",))
MLX = Device("mlx5_0:1", ("rc_mlx5", "dc_mlx5"))


def asked(role: str = "all", **changes) -> Asked:
    about = dict(arena=4 * GIB, host_cache=2 * GIB, staging=GIB, local="/run/oasis/tier.sock", planes=planes_of(role, ""))
    return Asked(role, **(about | changes))


def nixl(*chosen: Device, devices: tuple[Device, ...] = (), **changes) -> NixlFound:
    about = dict(package="nixl_cu13", version="1.5.1", ucx="1.23.0", devices=devices or chosen, chosen=chosen)
    return NixlFound(**(about | changes))


SGLANG = SglangFound(version=SGLANG_VERSION, loaded=True, torch="2.14.1+cu130", cuda="13.0", gpus=(Gpu("H200", 139 * GIB), Gpu("H200", 139 * GIB)))
CARD = Accelerator(nodes=True, library=True, driver="580.65.06", cuda=(13, 0))
NO_CARD = Accelerator()


def healthy(**changes) -> Facts:
    """A host with two GPUs, one interface and room for all of it."""
    about = dict(
        python="3.11.7", requirements=(Requirement("oasis-sglang", "sglang", f"=={SGLANG_VERSION}", SGLANG_VERSION, True),), ours="0.1.0", cpu=False,
        accelerator=CARD, sglang=SGLANG, nixl=nixl(ETH0, LO), transfers={"nixl": Transferred(32, 4_272_384, 0.034), "zmq": Transferred(32, 4_272_384, 0.01)},
        available=100 * GIB, total=128 * GIB, groups=(MemoryGroup("/", 64 * GIB, 3 * GIB, GIB),), memlock=8 << 20, shm=Shm(8 * GIB, 8 * GIB), files=(65536, 65536),
        interfaces=(Interface("lo", ("127.0.0.1",), True, False), Interface("eth0", ("10.0.0.2",), False, False)), route="eth0", year=2026)
    return Facts(**(about | changes))


def the(name: str, facts: Facts, **question) -> Check:
    [found] = [check for check in check_all(facts, asked(**question)) if check.name == name]
    return found


# -- judging ------------------------------------------------------------------------------------------------------


def test_a_sound_host_passes_in_every_role():
    for role in ("prefill", "decode", "tier", "all"):
        checks = check_all(healthy(), asked(role, ports=(30000, 7400)))
        assert {check.status for check in checks} == {"ok", "skip"}, [check for check in checks if check.status not in ("ok", "skip")]
        assert report.exit_code(checks) == 0 and not report.remedies(checks)
    assert [check.name for check in check_all(healthy(), asked(ports=(30000, 7400)))] == [
        "python", "packages", "sglang", "cuda", "gpu", "nixl", "network", "rdma", "memlock", "shm", "hugepages", "memory", "cgroup", "files", "clock",
        "tier socket", "keys", "model", "port 30000", "port 7400", "transfer nixl", "transfer zmq"]


def test_a_sound_host_says_what_it_is():
    found = {check.name: check.found for check in check_all(healthy(rdma=(RdmaDevice("mlx5_0", (1,), True),), nixl=nixl(ETH0, MLX), may_lock=True), asked())}
    assert found["sglang"] == f"{SGLANG_VERSION}, no seam has drifted" and found["gpu"] == "2: H200, 139 GiB, H200, 139 GiB"
    assert found["cuda"] == "torch 2.14.1+cu130, driver 580.65.06 for CUDA 13.0" and found["nixl"] == "1.5.1 (nixl_cu13), UCX 1.23.0"
    assert found["network"] == "eth0 (tcp), mlx5_0:1 (rc_mlx5, dc_mlx5)" and found["rdma"] == "mlx5_0:1 of mlx5_0"
    assert found["memlock"] == "8 MiB, and CAP_IPC_LOCK" and found["shm"] == "8 GiB free of 8 GiB"
    assert found["memory"] == "100 GiB available of 128 GiB" and found["cgroup"] == "62 GiB left of the limit of 64 GiB in /"
    assert found["transfer nixl"] == "32 records, 4,272,384 bytes in 34 ms, checksums are equal"
    assert found["files"] == "65,536 open files" and found["tier socket"] == "/run/oasis/tier.sock"
    assert the("memory", healthy()).wanted == "7 GiB: arena 4 GiB, host cache 2 GiB, staging 1 GiB"
    assert the("tier socket", healthy(), role="tier").wanted == "a folder for the socket"
    assert the("tier socket", healthy(), role="prefill").wanted == "a socket that may be connected to"


SKEWED = (Requirement("oasis-sglang", "nixl", "==1.5.1", "1.4.0", False), Requirement("oasis-sglang", "xxhash", ">=3", None, False))
RDMA = (RdmaDevice("mlx5_0", (1,), True),)

WRONG = [
    ("python", "fail", dict(python="3.10.14"), {}, "3.10.14", "Python 3.11"),
    ("packages", "fail", dict(ours=None), {}, "not installed", "Install oasis-sglang"),
    ("packages", "fail", dict(requirements=SKEWED), {}, "nixl 1.4.0; xxhash is missing", "pip install 'nixl==1.5.1' 'xxhash>=3'"),
    ("packages", "warn", dict(requirements=(Requirement("sglang", "torch", "==2.14.1", "2.15.0", False),)), {}, "torch 2.15.0", "'torch==2.14.1'"),
    ("packages", "warn", dict(requirements=()), {}, "cannot be read", "Install packaging"),
    ("sglang", "fail", dict(sglang=SglangFound(error="SGLang cannot be loaded: ImportError: x")), {}, "ImportError: x", f"sglang=={SGLANG_VERSION} with all"),
    ("sglang", "fail", dict(sglang=SglangFound(version="0.5.24", loaded=True, problems=("SGLang is 0.5.24", "a takes b", "c is gone", "d is gone"))), {},
     "0.5.24: SGLang is 0.5.24; a takes b; c is gone and 1 more", f"Install sglang=={SGLANG_VERSION} unchanged"),
    ("sglang", "fail", dict(sglang=SglangFound(version=SGLANG_VERSION)), {}, "does not load our plugin", "Install oasis-sglang into the environment"),
    ("sglang", "fail", dict(sglang=SglangFound(version=SGLANG_VERSION), variables={"SGLANG_PLUGINS": "other"}), {}, "SGLANG_PLUGINS=other", "unset it"),
    ("cuda", "fail", dict(accelerator=replace(CARD, driver="570.10", cuda=(12, 8))), {}, "driver 570.10 for CUDA 12.8", "one for CUDA 13.0"),
    ("cuda", "warn", dict(sglang=SglangFound(torch="2.15", cuda="13.2"), accelerator=replace(CARD, cuda=(13, 1))), {}, "CUDA 13.1", "one for CUDA 13.2"),
    ("cuda", "fail", dict(sglang=SglangFound(torch="2.14.1+cpu")), {}, "built without CUDA, driver 580.65.06", "from the CUDA wheels"),
    ("gpu", "fail", dict(sglang=SglangFound(torch="2.14.1", cuda="13.0", gpu_error="driver initialization failed")), {}, "driver initialization failed", "nvidia-smi"),
    ("gpu", "fail", dict(cpu=True, accelerator=replace(CARD, library=False)), {}, "no libcuda.so.1", "runtimeClassName: nvidia"),
    ("gpu", "warn", dict(cpu=True, variables={"CUDA_VISIBLE_DEVICES": "-1"}), {}, "CUDA_VISIBLE_DEVICES='-1'", "Unset CUDA_VISIBLE_DEVICES"),
    ("gpu", "warn", dict(cpu=True, accelerator=NO_CARD), {}, "would run on the CPU", "SGLANG_USE_CPU_ENGINE=1"),
    ("nixl", "fail", dict(nixl=NixlFound(error="NIXL cannot be loaded: ImportError: y")), {}, "ImportError: y", "--data-plane zmq"),
    ("network", "fail", dict(nixl=nixl(ucx_error="UCX cannot start: No such device"), variables={"UCX_TLS": "rc"}), {}, "No such device (UCX_TLS=rc)", "Set UCX_TLS"),
    ("network", "fail", dict(nixl=nixl(devices=(ETH0, LO)), variables={"UCX_NET_DEVICES": "eth7"}), {}, "UCX_NET_DEVICES=eth7 leaves none of: eth0, lo", "from that list"),
    ("network", "fail", dict(nixl=nixl()), {}, "UCX_NET_DEVICES=unset leaves none of: none", "from that list"),
    ("network", "fail", dict(nixl=nixl(LO, devices=(ETH0, LO)), variables={"UCX_NET_DEVICES": "lo,eth7"}), {}, "leaves none of: eth0, lo", "from that list"),
    ("network", "warn", dict(nixl=nixl(ETH0, devices=(ETH0, LO)), variables={"UCX_NET_DEVICES": "eth7,eth0"}), {}, "no eth7, but eth0 (tcp)", "Leave eth7 out"),
    ("network", "warn", dict(nixl=nixl(LO, devices=(ETH0, LO)), variables={"UCX_NET_DEVICES": "lo"}), {}, "lo only", "name its interface"),
    ("network", "warn", dict(nixl=nixl(ETH0, Device("docker0", ("tcp",)))), {}, "docker0 joins containers", "leads to the other hosts"),
    ("network", "warn", dict(nixl=nixl(Device("br0", ("tcp",))), interfaces=(Interface("br0", ("10.9.0.1",), False, True),)), {}, "br0 joins containers", "leads to"),
    ("network", "warn", dict(nixl=nixl(ETH0, ETH1, LO)), {}, "eth0 (tcp), eth1 (tcp): UCX may take any, the default route is over eth0", "Set UCX_NET_DEVICES"),
    ("network", "warn", dict(nixl=None, interfaces=(Interface("lo", ("127.0.0.1",), True, False), Interface("docker0", ("172.17.0.1",), False, True))),
     dict(planes=("zmq",)), "loopback only", "Give this host or pod a network"),
    ("rdma", "warn", dict(rdma=(RdmaDevice("mlx5_0", (1,), False),)), {}, "mlx5_0 cannot be opened here", "rdma/ib: 1"),
    ("rdma", "warn", dict(rdma=(RdmaDevice("mlx5_0", (), True),)), {}, "no port of mlx5_0 is active", "Bring the link up"),
    ("rdma", "warn", dict(rdma=(*RDMA, RdmaDevice("mlx5_1", (), True))), {}, "UCX takes none of mlx5_0, mlx5_1", "UCX_LOG_LEVEL=info"),
    ("memlock", "fail", dict(nixl=nixl(MLX)), {}, "8 MiB", "LimitMEMLOCK=infinity"),
    ("shm", "fail", dict(shm=Shm(error="No such file or directory")), {}, "No such file", "medium: Memory"),
    ("shm", "fail", dict(shm=Shm(64 << 20, 31 << 20)), {}, "31 MiB free of 64 MiB", "--shm-size"),
    ("shm", "warn", dict(shm=Shm(64 << 20, 64 << 20)), {}, "64 MiB free of 64 MiB", "--shm-size"),
    ("hugepages", "warn", dict(huge=HugePages(32 * GIB, "never")), {}, "32 GiB reserved", "vm.nr_hugepages"),
    ("memory", "fail", dict(available=6 * GIB), {}, "6 GiB available", "lower --arena-bytes and --oasis-host-cache-bytes"),
    ("memory", "warn", dict(available=8 * GIB), {}, "8 GiB available", "take one with more"),
    ("memory", "fail", dict(available=GIB), dict(role="tier"), "1 GiB available", "or lower --arena-bytes."),
    ("cgroup", "fail", dict(groups=(MemoryGroup("/", 64 * GIB, 0, 0), MemoryGroup("/pod", 6 * GIB, 0, 0))), {}, "limit of 6 GiB in /pod", "memory request and limit"),
    ("cgroup", "fail", dict(groups=(MemoryGroup("/", 64 * GIB, 60 * GIB, 2 * GIB),)), {}, "6 GiB left of the limit of 64 GiB", "memory request and limit"),
    ("cgroup", "warn", dict(groups=(MemoryGroup("/", 8 * GIB, 0, 0),)), {}, "8 GiB left", "memory request and limit"),
    ("files", "fail", dict(files=(1000, 65536)), dict(role="tier"), "1,000 open files", "ulimit -n 65536"),
    ("files", "warn", dict(files=(1024, 1024)), dict(role="decode"), "1,024 open files", "LimitNOFILE"),
    ("clock", "fail", dict(year=1970), {}, "the year is 1970", "NTP"),
    ("clock", "warn", dict(drift=-3.5), {}, "set by -3.5 s", "slew"),
    ("tier socket", "fail", dict(tier_there="Permission denied"), dict(role="prefill"), "Permission denied", "the same user"),
    ("tier socket", "fail", dict(tier_there="yes"), {}, "another tier serves there", "--local"),
    ("tier socket", "fail", dict(tier_cannot="/run is not writable"), dict(role="tier"), "/run is not writable", "emptyDir"),
    ("keys", "fail", dict(keys="--keys x: No such file or directory"), dict(keys="x", allowed="y"), "--keys x", "oasis keys create"),
    ("keys", "fail", dict(keys="--keys and --allowed go together"), dict(keys="x"), "go together", "oasis keys allow"),
    ("keys", "fail", dict(keys="--keys and --allowed go together"), dict(allowed="y"), "go together", "oasis keys allow"),
    ("model", "fail", dict(model="Oasis does not serve model class GptOss"), dict(model="m"), "GptOss", "Serve a model of one of these classes"),
    ("port 7400", "fail", dict(busy={7400: "Address already in use"}), dict(ports=(7400,)), "Address already in use", "ss -ltnp"),
    ("transfer nixl", "fail", dict(transfers={"nixl": Transferred(error="it was ended by SIGABRT"), "zmq": Transferred(1, 1, 1)}), {}, "SIGABRT", "UCX_TLS=tcp"),
    ("transfer zmq", "fail", dict(transfers={"zmq": Transferred(error="refused")}), dict(planes=("zmq",)), "refused", "127.0.0.1"),
]


@pytest.mark.parametrize("name, status, changes, question, found, remedy", WRONG, ids=[f"{row[0]}-{row[1]}-{n}" for n, row in enumerate(WRONG)])
def test_what_is_wrong_is_told_with_its_remedy(name, status, changes, question, found, remedy):
    check = the(name, healthy(**changes), **question)
    assert (check.status, found in check.found, remedy in check.remedy) == (status, True, True), check
    assert re.fullmatch(r"[A-Z].*[^.]\.", check.remedy) and not re.search(r"\. [A-Z]", check.remedy), "a remedy is one sentence"
    assert check.wanted
    assert report.exit_code([the("python", healthy()), check]) == (status == "fail")


def test_every_failure_and_warning_that_there_is_has_its_case():
    told = set()
    for module in (software_checks, host_checks, network_checks):
        told |= set(re.findall(r"\b(fail|warn)\(\s*f?\"([a-z ]+)", open(module.__file__).read()))
    told = {(name.strip(), status) for status, name in told} | {("memory", s) for s in ("fail", "warn")} | {("cgroup", s) for s in ("fail", "warn")}
    assert len(told) > 25 and told <= {(row[0].removesuffix(" 7400"), row[1]) for row in WRONG}


@pytest.mark.parametrize("name, changes, question, status, found", [
    ("cuda", dict(cpu=True, accelerator=NO_CARD), {}, "skip", "no driver here"),
    ("cuda", dict(accelerator=replace(CARD, cuda=(13, 2))), {}, "ok", "for CUDA 13.2"),
    ("cuda", dict(accelerator=replace(CARD, cuda=(14, 0))), {}, "ok", "for CUDA 14.0"),
    ("cuda", dict(cpu=True, sglang=SglangFound(torch="2.14.1+cpu"), accelerator=NO_CARD), {}, "ok", "without CUDA"),
    ("cuda", dict(cpu=True, sglang=SglangFound(torch="2.14.1+cpu")), {}, "ok", "without CUDA"),
    ("cuda", dict(sglang=SglangFound(torch="2.14.1+rocm"), accelerator=Accelerator(others=True)), {}, "ok", "without CUDA"),
    ("cuda", dict(sglang=None), dict(role="tier"), "skip", "a tier runs no torch"),
    ("cuda", dict(sglang=SglangFound(error="x")), {}, "skip", "torch cannot be loaded"),
    ("gpu", dict(cpu=True, accelerator=NO_CARD, variables={"SGLANG_USE_CPU_ENGINE": "1"}), {}, "ok", "as SGLANG_USE_CPU_ENGINE says"),
    ("gpu", dict(sglang=SglangFound(torch="2.14"), accelerator=Accelerator(others=True)), {}, "skip", "SGLang decides"),
    ("sglang", dict(sglang=None), dict(role="tier"), "skip", "no SGLang"),
    ("packages", dict(requirements=(Requirement("oasis-sglang", "sglang", "==1", None, False), Requirement("sglang", "torch", "==1", "2", False))),
     dict(role="tier"), "ok", "0.1.0"),
    ("packages", dict(requirements=(Requirement("oasis-sglang", "sglang", "==1", "2", False),)), dict(role="tier"), "fail", "sglang 2"),
    ("packages", dict(requirements=(Requirement("oasis-sglang", "pyzmq", ">=27", None, False),)), dict(role="tier"), "fail", "pyzmq is missing"),
    ("packages", dict(requirements=(Requirement("oasis-sglang", "nixl", "==1", None, False),)), dict(role="tier", planes=("zmq",)), "ok", "0.1.0"),
    ("packages", dict(requirements=(Requirement("oasis-sglang", "nixl", "==1", None, False),)), dict(role="tier"), "fail", "nixl is missing"),
    ("packages", dict(requirements=(Requirement("nixl", "nixl-cu12", "==1.5.1", None, False),)), {}, "ok", "0.1.0"),
    ("packages", dict(requirements=(Requirement("nixl", "nixl-cu13", "==1.5.1", "1.5.0", False),)), {}, "fail", "nixl-cu13 1.5.0"),
    ("network", dict(nixl=nixl(ETH0, ETH1), variables={"UCX_NET_DEVICES": "eth0,eth1"}), {}, "ok", "eth0 (tcp), eth1 (tcp)"),
    ("network", dict(nixl=nixl(MLX, ETH0, ETH1)), {}, "ok", "mlx5_0:1"),
    ("network", dict(nixl=None), dict(planes=("zmq",)), "ok", "eth0; ZeroMQ"),
    ("network", dict(nixl=NixlFound(error="x")), {}, "skip", "cannot be asked"),
    ("rdma", dict(rdma=RDMA, variables={"UCX_TLS": "tcp"}), {}, "ok", "left out by UCX_TLS"),
    ("memlock", dict(nixl=nixl(MLX), memlock=None), {}, "ok", "no limit"),
    ("memlock", dict(nixl=nixl(MLX), memlock=4 * GIB), {}, "ok", "4 GiB"),
    ("memlock", dict(nixl=nixl(MLX), memlock=GIB), dict(role="decode"), "ok", "1 GiB"),
    ("memlock", dict(nixl=nixl(MLX), memlock=GIB - 1), dict(role="decode"), "fail", "1 GiB"),
    ("memlock", dict(), {}, "ok", "nothing is locked without RDMA"),
    ("shm", dict(shm=Shm()), dict(role="tier"), "skip", "a tier"),
    ("memory", dict(available=5 * GIB), dict(role="tier"), "ok", "5 GiB"),
    ("memory", dict(available=1), dict(role="prefill"), "ok", "1 B"),
    ("cgroup", dict(groups=()), {}, "ok", "no limit"),
    ("files", dict(files=(1024, 1 << 20)), dict(role="decode"), "ok", "1,048,576"),
    ("files", dict(files=(resource.RLIM_INFINITY, resource.RLIM_INFINITY)), {}, "ok", "no limit"),
    ("tier socket", dict(tier_there="yes"), dict(role="prefill"), "ok", "a tier serves there"),
    ("tier socket", dict(tier_cannot="x"), dict(role="prefill"), "ok", "no tier yet"),
    ("tier socket", dict(tier_cannot="x"), dict(role="decode"), "skip", "uses none"),
    ("keys", dict(allowed=3), dict(keys="/k", allowed="/a"), "ok", "3 nodes"),
    ("model", dict(), dict(model="/models/llama"), "ok", "/models/llama"),
    ("transfer", dict(transfers={}), dict(role="prefill"), "skip", "shared memory"),
    ("transfer", dict(transfers={}), dict(transfer=False), "skip", "--no-transfer"),
    ("transfer nixl", dict(transfers={"nixl": Transferred(2, 1000, 0.5)}), dict(role="decode"), "ok", "2 records, 1,000 bytes in 500 ms"),
])
def test_what_is_not_wrong_there(name, changes, question, status, found):
    check = the(name, healthy(**changes), **question)
    assert (check.status, found in check.found) == (status, True), check


@pytest.mark.parametrize("name, changes, question, status", [
    ("shm", dict(shm=Shm(GIB, 32 << 20)), {}, "warn"), ("shm", dict(shm=Shm(GIB, (32 << 20) - 1)), {}, "fail"), ("shm", dict(shm=Shm(GIB, GIB)), {}, "ok"),
    ("hugepages", dict(huge=HugePages(5, "never"), total=100), {}, "ok"), ("hugepages", dict(huge=HugePages(6, "never"), total=100), {}, "warn"),
    ("hugepages", dict(huge=HugePages(90, "never"), total=100), dict(role="prefill"), "ok"),
    ("memory", dict(available=7 * GIB), {}, "warn"), ("memory", dict(available=7 * GIB - 1), {}, "fail"), ("memory", dict(available=10 * GIB), dict(role="all"), "ok"),
    ("memory", dict(available=5 * GIB), dict(role="tier"), "ok"), ("memory", dict(available=5 * GIB - 1), dict(role="tier"), "warn"),
    ("files", dict(files=(4096, 4096)), {}, "ok"), ("files", dict(files=(4095, 65536)), {}, "warn"), ("files", dict(files=(1023, 65536)), {}, "fail"),
    ("clock", dict(year=2025), {}, "ok"), ("clock", dict(year=2024), {}, "fail"), ("clock", dict(year=2100), {}, "fail"), ("clock", dict(year=2099), {}, "ok"),
    ("clock", dict(drift=1.0), {}, "ok"), ("clock", dict(drift=1.1), {}, "warn"),
])
def test_where_the_limits_are(name, changes, question, status):
    assert the(name, healthy(**changes), **question).status == status


def test_long_lists_are_cut():
    def told(count: int) -> str:
        return the("sglang", healthy(sglang=SglangFound(version="1", problems=tuple(map(str, range(count)))))).found

    assert [told(count) for count in (1, 3, 4, 9)] == ["1: 0", "1: 0; 1; 2", "1: 0; 1; 2 and 1 more", "1: 0; 1; 2 and 6 more"]


def test_ranges_of_devices_are_names_too():
    there = ["eth0", "mlx5_2:1"]
    assert network_checks.unknown("mlx5_[0-3]:1,eth0", there) == [] and network_checks.unknown("mlx5_[0-1]:1,eth0", there) == ["mlx5_[0-1]:1"]
    assert network_checks.unknown("", there) == network_checks.unknown("all", there) == network_checks.unknown("^eth9", there) == []
    assert network_checks.unknown("mlx5_2", there) == ["mlx5_2"], "UCX wants the port too"


def test_what_roles_ask_for():
    assert [planes_of(role, "") for role in ("prefill", "decode", "tier", "all")] == [(), ("nixl",), ("nixl", "zmq"), ("nixl", "zmq")]
    assert planes_of("decode", " zmq, nixl,zmq") == ("zmq", "nixl")
    for wrong in (("router", ""), ("tier", "nixl,tcp")):
        with pytest.raises(ConfigError):
            planes_of(*wrong)
    assert (asked("tier").need, asked("decode").need, asked("prefill").need, asked().need) == (4 * GIB, 3 * GIB, 0, 7 * GIB)
    assert (asked().registered, asked("decode").registered, asked(planes=("zmq",)).registered) == (4 * GIB, GIB, 0)


def test_the_report():
    checks = [Check("a", "ok", "1"), Check("b", "warn", "2", "3", "Do c."), Check("d", "fail", "4", "5", "Do e."), Check("f", "skip", "g")]
    assert report.as_json(checks, asked("tier")) == {"version": 1, "role": "tier", "checks": [
        {"name": "a", "status": "ok", "found": "1", "wanted": "", "remedy": ""}, {"name": "b", "status": "warn", "found": "2", "wanted": "3", "remedy": "Do c."},
        {"name": "d", "status": "fail", "found": "4", "wanted": "5", "remedy": "Do e."}, {"name": "f", "status": "skip", "found": "g", "wanted": "", "remedy": ""}]}
    assert report.remedies(checks) == ["fail: d: Do e.", "warn: b: Do c."] and report.summary(checks) == "1 ok, 1 warn, 1 fail, 1 skip"
    assert report.table(checks, asked()).row_count == 4


# -- looking ------------------------------------------------------------------------------------------------------


def lay(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_memory_of_a_container_in_the_newer_interface(tmp_path):
    lay(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "memory", "sys/fs/cgroup/memory.max": "1000\n",
                   "sys/fs/cgroup/memory.current": "700\n", "sys/fs/cgroup/memory.stat": "anon 1\nactive_file 50\ninactive_file 150\nfile 999\n"})
    assert host_facts.memory_groups(tmp_path) == (MemoryGroup("/", 1000, 700, 200),)
    assert host_facts.memory_groups(tmp_path)[0].free == 500


def test_memory_of_a_service_is_limited_by_every_group_above_it(tmp_path):
    stat = {"memory.current": "10\n", "memory.stat": "active_file 4\ninactive_file 2\n"}
    lay(tmp_path, {"proc/self/cgroup": "0::/system.slice/oasis.service\n", "sys/fs/cgroup/cgroup.controllers": "memory",
                   "sys/fs/cgroup/system.slice/memory.max": "300\n", "sys/fs/cgroup/system.slice/oasis.service/memory.max": "max\n"})
    for folder in ("sys/fs/cgroup/system.slice", "sys/fs/cgroup/system.slice/oasis.service"):
        lay(tmp_path, {f"{folder}/{name}": text for name, text in stat.items()})
    assert host_facts.memory_groups(tmp_path) == (MemoryGroup("/system.slice", 300, 10, 6),)
    lay(tmp_path, {"sys/fs/cgroup/system.slice/oasis.service/memory.max": "100\n"})
    assert [(group.path, group.limit) for group in host_facts.memory_groups(tmp_path)] == [("/system.slice/oasis.service", 100), ("/system.slice", 300)]


def test_memory_in_the_older_interface(tmp_path):
    base = "sys/fs/cgroup/memory"
    lay(tmp_path, {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/pod/one\n0::/\n", f"{base}/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"})
    for folder, limit in (("", f"{(1 << 63) - 4096}"), ("/pod", "5000"), ("/pod/one", "2000")):
        lay(tmp_path, {f"{base}{folder}/memory.limit_in_bytes": limit, f"{base}{folder}/memory.usage_in_bytes": "900",
                       f"{base}{folder}/memory.stat": "active_file 1\ntotal_active_file 60\ntotal_inactive_file 40\n"})
    assert host_facts.memory_groups(tmp_path) == (MemoryGroup("/pod/one", 2000, 900, 100), MemoryGroup("/pod", 5000, 900, 100))
    # In a container the host's path is not among what is mounted; its root is the container's own group.
    lay(tmp_path, {"proc/self/cgroup": "4:memory:/kubepods/burstable/other\n", f"{base}/memory.limit_in_bytes": "3000"})
    assert host_facts.memory_groups(tmp_path) == (MemoryGroup("/", 3000, 900, 100),)


def test_no_groups_no_limits(tmp_path):
    assert host_facts.memory_groups(tmp_path) == ()
    lay(tmp_path, {"proc/self/cgroup": "0::/\n"})
    assert host_facts.memory_groups(tmp_path) == ()


def test_meminfo_huge_pages_and_capabilities(tmp_path):
    lay(tmp_path, {"proc/meminfo": "MemTotal:       16 kB\nMemAvailable:    8 kB\nHugePages_Free:       3\nHugepagesize:       2048 kB\n",
                   "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
                   "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n"})
    assert host_facts.meminfo(tmp_path)["MemAvailable"] == 8192
    assert host_facts.huge_pages(tmp_path) == HugePages(6 << 20, "advise")
    assert host_facts.may_lock(tmp_path)
    lay(tmp_path, {"proc/self/status": "CapInh:\t0000000000004000\nCapEff:\t00000000a80425fb\n"})
    assert not host_facts.may_lock(tmp_path), "a pod may have it and its process not"


def test_devices_of_a_host(tmp_path):
    lay(tmp_path, {
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "sys/class/infiniband/mlx5_0/ports/2/state": "1: DOWN\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n", "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0\n",
        "sys/class/infiniband_verbs/uverbs1/ibdev": "mlx5_1\n", "dev/infiniband/uverbs0": "",
        "proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nib0\t0000000A\t00000000\t1\t0\t0\t0\t000000FF\n"
                          "eth1\t00000000\t010200C0\t3\t0\t0\t100\t00000000\neth0\t00000000\t010200C0\t3\t0\t0\t50\t00000000\n",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\nGCC version: 12\n"})
    assert host_facts.rdma_devices(tmp_path) == (RdmaDevice("mlx5_0", (1,), True), RdmaDevice("mlx5_1", (), False))
    assert host_facts.default_route(tmp_path) == "eth0" and host_facts.driver(tmp_path) == "580.65.06"
    assert host_facts.rdma_devices(tmp_path / "none") == () and host_facts.default_route(tmp_path / "none") == host_facts.driver(tmp_path / "none") == ""


def test_shared_memory(tmp_path):
    assert host_facts.shm(tmp_path).error == "No such file or directory"
    (tmp_path / "dev/shm").mkdir(parents=True)
    found, stat = host_facts.shm(tmp_path), os.statvfs(tmp_path)
    assert not found.error and found.size == stat.f_blocks * stat.f_frsize and 0 < found.free <= found.size


def test_limits_of_this_process(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 1 << 30) if which == resource.RLIMIT_MEMLOCK else (0, 0))
    assert host_facts.memlock() == 8 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert host_facts.memlock() is None


def test_interfaces_that_are_up_and_have_an_address(tmp_path, monkeypatch):
    (tmp_path / "sys/class/net/docker0/bridge").mkdir(parents=True)

    def address(text: str, family: int = socket.AF_INET) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=text)

    linked = address("fe80::1%eth0", socket.AF_INET6)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {
        "lo": [address("127.0.0.1")], "eth0": [address("10.0.0.2"), linked, address("fd00::2", socket.AF_INET6), address("02:fc:00:00:00:05", socket.AF_PACKET)],
        "eth1": [linked, address("02:fc", socket.AF_PACKET)], "eth2": [address("10.1.0.2")], "eth3": [address("10.2.0.2")], "docker0": [address("172.17.0.1")]})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "eth2") for name in ("lo", "eth0", "eth1", "eth2", "docker0")})
    assert host_facts.interfaces(tmp_path) == (Interface("lo", ("127.0.0.1",), True, False), Interface("eth0", ("10.0.0.2", "fd00::2"), False, False),
                                               Interface("docker0", ("172.17.0.1",), False, True))


def test_interfaces_of_this_host():
    found = {one.name: one for one in host_facts.interfaces()}
    assert found["lo"].loopback and "127.0.0.1" in found["lo"].addresses and not any(one.loopback for name, one in found.items() if name != "lo")


def test_ports():
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        ports = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        assert host_facts.busy_ports(ports) == {ports[0]: "Address already in use"}


def test_the_tiers_socket(tmp_path):
    path = str(tmp_path / "tier.sock")
    assert host_facts.serves(path) == host_facts.serves(str(tmp_path / "no" / "tier.sock")) == "" and host_facts.cannot_listen(path) == ""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert host_facts.serves(path) == "yes"
    assert host_facts.serves(path) == "", "what a killed tier left"
    longest = str(tmp_path / "x").ljust(107, "x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(longest)
    os.unlink(longest)
    assert host_facts.cannot_listen(longest) == ""
    assert "the path has 108 bytes" in host_facts.cannot_listen(longest + "x") and "too long" in host_facts.serves(longest + "x")
    (tmp_path / "file").write_text("")
    assert "Not a directory" in host_facts.cannot_listen(str(tmp_path / "file" / "tier.sock"))
    assert host_facts.cannot_listen(str(tmp_path / "new" / "tier.sock")) == "" and not (tmp_path / "new").exists()
    assert sorted(os.listdir(tmp_path)) == ["file", "tier.sock"], "nothing is left behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_another_users(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in host_facts.cannot_listen(str(tmp_path / "tier.sock"))
    assert "is not writable" in host_facts.cannot_listen(str(tmp_path / "new" / "tier.sock"))


def test_requirements_are_those_of_the_installed_packages(monkeypatch):
    found = fact_finding.requirements()
    pinned = {row.name: row for row in found if row.by == "oasis-sglang"}
    assert pinned["sglang"].wanted == f"=={SGLANG_VERSION}" and pinned["sglang"].installed == metadata.version("sglang") and pinned["sglang"].fits
    assert "pytest" not in pinned, "extras are not required"
    assert {row.by for row in found} == {"oasis-sglang", "sglang", "nixl"}
    true_version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "26.0" if name == "pyzmq" else true_version(name))
    [zmq] = [row for row in fact_finding.requirements() if row.name == "pyzmq" and row.by == "oasis-sglang"]
    assert (zmq.installed, zmq.fits) == ("26.0", False)
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert fact_finding.requirements() == ()


def test_models(tmp_path):
    def problem(text: str | None) -> str:
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        return fact_finding.model_problem(str(tmp_path))

    assert "No such file" in problem(None) and "is not JSON" in problem("{") and "is not a JSON object" in problem("[]")
    assert problem('{"architectures": ["Qwen3ForCausalLM"]}') == ""
    assert "Qwen3MoeForCausalLM" in problem('{"architectures": ["Qwen3MoeForCausalLM"]}')


def test_devices_that_ucx_prints():
    printed = "# UCP context\n#            md 1  :  component 1  tcp \n#      resource 0  :  md 0  dev 0  flags -- self/memory\n" \
              "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1\n" \
              "#      resource 3  :  md 2  dev 2  flags -- dc_mlx5/mlx5_0:1\n#      resource 4  :  md 3  dev 0  flags a- cuda_copy/cuda\n" \
              "#      resource 5  :  md 3  dev 0  flags -- cma/memory\n"
    assert probe.devices(printed) == (ETH0, MLX) and [device.rdma for device in (ETH0, MLX)] == [False, True]


# -- the command --------------------------------------------------------------------------------------------------


def command(*words: str, **variables: str) -> tuple[int, dict]:
    done = subprocess.run([sys.executable, "-P", "-m", "oasis_sglang.cli", "doctor", "--json", *words], capture_output=True, text=True, timeout=200,
                          env={**os.environ, **variables})
    assert done.returncode in (0, 1), done.stderr
    said = json.loads(done.stdout)
    return done.returncode, {**said, "checks": {check["name"]: check for check in said["checks"]}}


def test_the_whole_of_it_here(tmp_path):
    """Everything that looks at a host, on this one: SGLang is loaded, records are read."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    code, said = command("--arena-bytes", "64MiB", "--host-cache-bytes", "64MiB", "--local", str(tmp_path / "tier.sock"), "--model", str(tmp_path))
    checks = said["checks"]
    assert (said["version"], said["role"]) == (1, "all") and code == any(check["status"] == "fail" for check in checks.values())
    assert {name: checks[name]["status"] for name in ("python", "packages", "sglang", "nixl", "memory", "clock", "tier socket", "keys", "model")} == {
        "python": "ok", "packages": "ok", "sglang": "ok", "nixl": "ok", "memory": "ok", "clock": "ok", "tier socket": "ok", "keys": "skip", "model": "ok"}
    assert checks["sglang"]["found"] == f"{SGLANG_VERSION}, no seam has drifted"
    assert re.fullmatch(r"1\.5\.1 \(nixl_cu1\d\), UCX \d+\.\d+\.\d+", checks["nixl"]["found"])
    assert metadata.version("torch") in checks["cuda"]["found"]
    assert checks["memory"]["wanted"] == "192 MiB: arena 64 MiB, host cache 64 MiB, staging 64 MiB"
    for plane in ("nixl", "zmq"):
        assert checks[f"transfer {plane}"]["status"] == "ok" and checks[f"transfer {plane}"]["found"].startswith("32 records, 4,272,384 bytes in ")


def test_a_tier_that_cannot_start_is_told_why():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = command("--role", "tier", "--arena-bytes", "1000TiB", "--data-plane", "nixl", "--no-transfer", "--port", port, "--keys", "/none",
                             "--allowed", "/none", UCX_NET_DEVICES="nosuch0")
    failed = {name: check["found"] for name, check in said["checks"].items() if check["status"] == "fail"}
    assert code == 1 and set(failed) - {"cgroup"} == {"memory", "network", "keys", f"port {port}"}
    assert "UCX_NET_DEVICES=nosuch0 leaves none of: " in failed["network"] and "lo" in failed["network"] and failed["keys"].startswith("--keys /none:")
    assert all(said["checks"][name]["remedy"] for name in failed)


def test_seams_that_drifted_are_those_that_would_end_a_server():
    script = ("import msgspec, sys\nfrom oasis_sglang import seams\n"
              "seams.SURFACE += (seams.Seam('sglang.srt.server_args.ServerArgs.no_such', ()),)\n"
              "from oasis_sglang.doctor.probe import ask_sglang\nprint(msgspec.json.encode(ask_sglang()).decode())")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=200)
    found = json.loads(done.stdout.splitlines()[-1])
    [problem] = found["problems"]
    assert problem.startswith("sglang.srt.server_args.ServerArgs.no_such is gone") and found["loaded"] and found["version"] == SGLANG_VERSION


def test_a_tier_is_examined_without_torch():
    """Nor with anything else that an image for tiers leaves out."""
    script = ("import sys\nfor name in ('torch', 'sglang', 'transformers', 'matplotlib', 'jinja2', 'pandas', 'scipy'):\n    sys.modules[name] = None\n"
              "from typer.testing import CliRunner\nfrom oasis_sglang.cli import app\n"
              "done = CliRunner().invoke(app, ['doctor', '--role', 'tier', '--data-plane', 'zmq', '--no-transfer', '--arena-bytes', '1MiB'])\n"
              "assert done.exception is None or isinstance(done.exception, SystemExit), done.exception\n"
              "assert '0 fail' not in done.output and 'a tier runs no SGLang' in done.output.replace(chr(10), ' '), done.output\n"
              "print('nixl' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_a_question_that_makes_no_sense():
    for words in (["--role", "router"], ["--data-plane", "tcp"]):
        done = CliRunner().invoke(app, ["doctor", *words])
        assert done.exit_code == 2 and words[0] in done.output


def test_sizes_are_those_that_the_servers_have_unless_told():
    [doctor] = [one for one in app.registered_commands if one.callback.__name__ == "doctor"]
    given = dict(zip(("role", "arena", "host_cache", "staging"), doctor.callback.__defaults__))
    from oasis_sglang.config import parse_size

    assert (parse_size(given["arena"]), parse_size(given["host_cache"]), parse_size(given["staging"])) == (
        TierOptions("").arena_bytes, OasisConfig().host_cache_bytes, OasisConfig().staging_bytes)
