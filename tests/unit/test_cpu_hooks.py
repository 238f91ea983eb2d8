"""The hook table, the idle pause, and NIXL agents on host memory."""

import ast
import importlib.util
import inspect
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from oasis_sglang.cpu import idle, nixl
from oasis_sglang.cpu.hooks import CPU_HOOKS


@pytest.mark.parametrize(
    "hook", CPU_HOOKS, ids=lambda hook: hook.target.rpartition(".")[0].rpartition(".")[2]
)
def test_target_exists_in_the_installed_sglang(hook):
    """Read from the source: importing these modules costs seconds."""
    module, cls, method = hook.target.rsplit(".", 2)
    root = Path(importlib.util.find_spec("sglang").origin).parent  # finding does not import it
    source = root.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()
    (node,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls]
    assert method in [n.name for n in node.body if isinstance(n, ast.FunctionDef)]


@pytest.mark.parametrize("hook", CPU_HOOKS, ids=lambda hook: hook.function.__name__)
def test_every_hook_is_an_explained_around_hook(hook):
    assert hook.kind == "around"
    assert list(inspect.signature(hook.function).parameters)[:2] == ["original", "self"]
    assert hook.function.__doc__.startswith("Around ")


class Scheduler:
    def __init__(self, idle, sleeper=None):
        self.idle, self.idle_sleeper, self.calls = idle, sleeper, 0

    def is_fully_idle(self):
        return self.idle

    def stock_on_idle(self):
        self.calls += 1


def seconds(scheduler):
    started = time.monotonic()
    idle.on_idle(Scheduler.stock_on_idle, scheduler)
    assert scheduler.calls == 1
    return time.monotonic() - started


def test_pending_scheduler_pauses(monkeypatch):
    monkeypatch.setattr(idle, "PAUSE_MS", 30)
    assert seconds(Scheduler(idle=False)) >= 0.03


def test_idle_scheduler_is_left_to_sglang(monkeypatch):
    monkeypatch.setattr(idle, "PAUSE_MS", 10_000)
    assert seconds(Scheduler(idle=True)) < 1


def test_request_ends_the_pause(monkeypatch):
    zmq = pytest.importorskip("zmq")
    monkeypatch.setattr(idle, "PAUSE_MS", 10_000)
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.connect(f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}")
        poller = zmq.Poller()
        poller.register(pull, zmq.POLLIN)
        push.send(b"request")
        assert seconds(Scheduler(idle=False, sleeper=SimpleNamespace(poller=poller))) < 5


def fake_nixl():
    """The part of ``nixl._api`` that the adaptation touches."""

    class Config:
        def __init__(self):
            self._delay = None

        pthrDelay = property(lambda self: self._delay, lambda self, us: setattr(self, "_delay", us))

    bindings = SimpleNamespace(nixlAgentConfig=Config, DRAM_SEG="dram", VRAM_SEG="vram")

    class Agent:
        def __init__(self, name):
            self.config = bindings.nixlAgentConfig()
            self.config.pthrDelay = 0
            self.nixl_mems = {"DRAM": "dram", "VRAM": "vram", "FILE": "file", "cuda": "vram"}
            if name == "bad":
                raise RuntimeError(name)

    return SimpleNamespace(nixlBind=bindings, nixl_agent=Agent)


def test_host_memory_agent():
    api = fake_nixl()
    config = api.nixlBind.nixlAgentConfig
    agent = nixl.host_memory_agent.__wrapped__(api)("a")
    assert agent.config.pthrDelay == nixl.PROGRESS_DELAY_US
    assert agent.nixl_mems == {"DRAM": "dram", "VRAM": "dram", "FILE": "file", "cuda": "dram"}
    assert api.nixlBind.nixlAgentConfig is config
    plain = api.nixl_agent("b")
    assert plain.config.pthrDelay == 0 and plain.nixl_mems["VRAM"] == "vram"


def test_failed_agent_restores_the_config_class():
    api = fake_nixl()
    config = api.nixlBind.nixlAgentConfig
    with pytest.raises(RuntimeError):
        nixl.host_memory_agent.__wrapped__(api)("bad")
    assert api.nixlBind.nixlAgentConfig is config


def test_manager_gets_the_host_memory_agent_and_others_do_not():
    api = pytest.importorskip("nixl._api")
    plain = api.nixl_agent
    seen = []
    nixl.manager_init(lambda self, *args: seen.append((api.nixl_agent, args)), object(), 1, 2)
    assert seen == [(nixl.host_memory_agent(api), (1, 2))]
    assert api.nixl_agent is plain


def test_real_agent_registers_device_memory_as_host_memory_and_does_not_spin():
    api = pytest.importorskip("nixl._api")
    import numpy as np

    agent = nixl.host_memory_agent(api)("oasis-test", api.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(4096, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "VRAM")
    started = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - started < 0.25  # 0.5 with SGLang's stock agent
    agent.deregister_memory(registered)
