"""The platform entry point: when it switches CPU mode on, what it sets, what it leaves alone."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from oasis_sglang.cpu import platform


@pytest.fixture
def machine(monkeypatch):
    """``machine(nodes=..., libcuda=..., torch=...)`` pretends a machine; starts from a bare one."""
    for name in (*platform.CPU_ENVIRONMENT, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not platform.StandInFinder])
    monkeypatch.setattr(sys, "platform", "linux")

    def pretend(nodes=(), libcuda=False, torch="2.14.1"):
        monkeypatch.setattr(platform, "exists", lambda patterns: any(n in patterns for n in nodes))
        monkeypatch.setattr(platform, "loads", lambda library: libcuda)
        monkeypatch.setattr(platform, "torch_build", lambda: torch)

    # Variables that prepare() sets are removed again after the test.
    before = dict(os.environ)
    yield pretend
    os.environ.clear()
    os.environ.update(before)


def in_cpu_mode():
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1", platform.StandInFinder in sys.meta_path


KEEPS = """
import ctypes, resource
from oasis_sglang.cpu.platform import keep_heap
if {kept}:
    keep_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        several = [libc.malloc(16 << 20) for _ in range(3)]
        for one in several:
            ctypes.memset(one, 1, 16 << 20)
        for one in several:
            libc.free(one)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def test_memory_of_large_tensors_stays_with_the_process():
    kept, given_back = (int(subprocess.run([sys.executable, "-c", KEEPS.format(kept=kept)], capture_output=True, text=True, check=True).stdout)
                        for kept in (True, False))
    assert kept < 4096, "16 MB have 4,096 pages: they were mapped once"
    assert given_back >= 20 * 4096, "what glibc does by itself"


def test_machine_without_gpu_gets_cpu_mode(machine):
    machine()
    assert platform.prepare() is None
    assert in_cpu_mode() == (True, True)
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_prepare_is_idempotent(machine):
    machine()
    platform.prepare()
    finders, environment = list(sys.meta_path), dict(os.environ)
    platform.prepare()
    assert sys.meta_path == finders
    assert dict(os.environ) == environment


@pytest.mark.parametrize(
    "gpu",
    [
        {"nodes": ["/dev/nvidia*"], "libcuda": True},
        {"nodes": ["/dev/dxg"], "libcuda": True},
        {"nodes": ["/dev/kfd"]},
        {"nodes": ["/dev/davinci*"]},
        {"torch": "2.14.1+xpu"},
    ],
)
def test_inert_with_an_accelerator(machine, gpu):
    machine(**gpu)
    finders, environment = list(sys.meta_path), dict(os.environ)
    assert platform.prepare() is None
    assert sys.meta_path == finders
    assert dict(os.environ) == environment


def test_gpu_without_driver_library_is_no_gpu(machine):
    machine(nodes=["/dev/nvidia*"], libcuda=False)
    platform.prepare()
    assert in_cpu_mode() == (True, True)


@pytest.mark.parametrize("value", ["", "-1", " ", "-1,0"])
def test_hidden_gpus_are_no_gpus(machine, monkeypatch, value):
    machine(nodes=["/dev/nvidia*"], libcuda=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    platform.prepare()
    assert in_cpu_mode() == (True, True)


def test_visible_gpu_by_number(machine, monkeypatch):
    machine(nodes=["/dev/nvidia*"], libcuda=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    platform.prepare()
    assert in_cpu_mode() == (False, False)


def test_user_asks_for_cpu_on_a_gpu_machine(machine, monkeypatch):
    machine(nodes=["/dev/nvidia*"], libcuda=True)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    platform.prepare()
    assert in_cpu_mode() == (True, True)


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_user_refuses_cpu_on_a_bare_machine(machine, monkeypatch, value):
    machine()
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", value)
    platform.prepare()
    assert in_cpu_mode() == (False, False)
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == value


def test_users_own_settings_win(machine, monkeypatch):
    machine()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    platform.prepare()
    assert os.environ["OMP_NUM_THREADS"] == "4"


def test_a_cpu_build_of_the_kernels_is_preferred(machine, monkeypatch, tmp_path):
    machine()
    package = tmp_path / "sgl_kernel"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    platform.prepare()
    assert in_cpu_mode() == (True, True)

    sys.meta_path.remove(platform.StandInFinder)
    (package / "common_ops.abi3.so").touch()
    platform.prepare()
    assert in_cpu_mode() == (True, False)


def test_the_probes_run_on_this_machine():
    assert isinstance(platform.accelerator_present(), bool)
    assert platform.loads("libc.so.6") and not platform.loads("libno-such-driver.so.1")
    assert platform.torch_build() == importlib.metadata.version("torch")


def test_import_and_prepare_without_torch_or_sglang():
    script = (
        "import sys; from oasis_sglang.cpu.platform import prepare; prepare(); import importlib.util as u;"
        "assert 'torch' not in sys.modules and 'sglang' not in sys.modules;"
        "print(u.find_spec('sgl_kernel').origin)"
    )
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(platform.STAND_IN / "__init__.py")


def test_entry_point_is_declared():
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.platforms", name="oasis_cpu")
    assert entry.load() is platform.prepare
