"""A whole stack on one machine: start it, wait until it serves, stop it and leave nothing behind.

    with Processes(log=run_dir / "zygote.log", env=import_environment()) as processes:
        with Stack(StackSpec(kind="oasis", model=model), processes, run_dir=run_dir) as stack:
            requests.post(stack.url + "/generate", ...)

Kinds: ``oasis`` (memory nodes, if any, tier, prefill, decode, router), ``stock`` (SGLang's own PD over NIXL with a router, under the
same CPU runtime), ``monolith`` (one SGLang server). On a machine without a GPU the SGLang servers are forked from
one import, otherwise each is a process started in the usual way.

A Stack owns its servers, ports and scratch directory (sockets and SGLang's temporary files) from ``start`` to
``stop``. The logs in ``run_dir`` outlive it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from oasis_sglang import config, launch
from oasis_sglang.cpu import platform
from oasis_sglang.keyring import Ring
from oasis_sglang.probes import HOST, free_port, get_json, probe
from oasis_sglang.processes import Environment, Processes, Server, stop_together

DEFAULT_ARENA_BYTES = 1 << 30
READY_TIMEOUT_S = 300.0
_PROGRESS_EVERY_S = 15.0
_READY = {"tier": "/readyz", "memory": "/readyz", "prefill": "/health", "decode": "/health", "monolith": "/health", "router": "/readiness"}

Progress = Callable[[str], None]
Kind = Literal["oasis", "stock", "monolith"]
Role = Literal["prefill", "decode", "monolith"]


class StackError(Exception):
    """A server of the stack failed or did not become ready; the message ends with the tail of its log."""


@dataclass(frozen=True)
class StackSpec:
    """What to run. The flag tuples are SGLang server flags and win over our defaults, being parsed last."""

    kind: Kind
    model: Path | str
    served_model_name: str | None = None
    host: str = HOST
    port: int = 0
    """Of the endpoint (the router, or the monolith); 0 takes a free one."""
    flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    config: Mapping[str, object] = field(default_factory=dict)
    """Oasis options of both workers, beside the tier's address."""
    arena_bytes: int = DEFAULT_ARENA_BYTES
    tier_flags: tuple[str, ...] = ()
    """More flags of every `oasis tier`, memory nodes included."""
    data_plane: str = "nixl,zmq"
    """Data planes the tier serves; decode's option ``data_plane`` chooses one."""
    env: Environment = field(default_factory=dict)
    """Extra environment of every process of the stack."""
    prefills: int = 1
    """Prefill workers, as if on hosts of their own: ``prefill`` with ``tier``, ``prefill1`` with ``tier1``, and so on."""
    decodes: int = 1
    """Decode workers: ``decode``, ``decode1``, and so on."""
    memory_nodes: int = 0
    """Tiers to which those of the prefill workers move what is committed: ``memory0``, ``memory1``, and so on."""
    keyed: bool = False
    """Whether tiers and decode workers are given keys, and talk to one another over nothing else."""
    max_running_requests: int = 4
    max_total_tokens: int = 20_000


@dataclass(frozen=True)
class Place:
    """Where servers run: what starts them there, the address that serves HTTP there, and the one that other nodes are told."""

    processes: Processes
    front: str = HOST
    wire: str = HOST
    env: Environment = field(default_factory=dict)


def import_environment() -> dict[str, str]:
    """Environment for ``Processes`` on this machine: OpenMP and Hugging Face read theirs while being imported."""
    environment = {"HF_HUB_OFFLINE": "1"}
    if platform.wanted():
        environment |= platform.CPU_ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""}
    return environment


def worker_argv(role: Role, spec: StackSpec, tier: str, addresses: Sequence[str], index: int = 0) -> tuple[list[str], dict[str, str | None]]:
    """Flags and environment of one SGLang server, the ``index``-th in its role. ``tier``: the tier's socket, used by kind
    ``oasis`` only.

    Raises ConfigError for an unknown or impossible Oasis option.
    """
    ours = ["--model-path", str(spec.model), "--skip-server-warmup"]
    ours += ["--max-running-requests", str(spec.max_running_requests)]
    if platform.wanted():
        ours += ["--max-total-tokens", str(spec.max_total_tokens)]
        # The pool's size is the line above. SGLang also compares free memory before and after it loads weights, and
        # whatever else allocates meanwhile, such as the other worker, counts against this fraction.
        ours += ["--mem-fraction-static", "0.8"]
        if role == "decode":
            ours += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    elif role != "monolith":
        place = index + (spec.prefills if role == "decode" else 0)
        ours += gpu_share(place, spec.prefills + spec.decodes, len(list(Path("/dev").glob("nvidia[0-9]*"))))
    if spec.served_model_name:
        ours += ["--served-model-name", spec.served_model_name]
    users = {"prefill": spec.prefill_flags, "decode": spec.decode_flags}.get(role, ())
    flags = [*ours, *addresses, *spec.flags, *users]
    if spec.kind == "oasis":
        options = {"tier": tier, **spec.config}
        return launch.worker_argv(role, [*(f"{launch.PREFIX}{name}={value}" for name, value in options.items()), *flags])
    stock = list(launch.CPU_FLAGS) if platform.wanted() else []
    stock += ["--page-size", "16"]  # as Oasis has it: the two are compared
    if role != "monolith":
        stock += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "nixl"]
    return [*stock, *flags], {config.ENV: None}


def gpu_share(place: int, workers: int, gpus: int) -> list[str]:
    """Flags that let ``workers`` live on one machine: a GPU each, or equal parts of the memory of those there are."""
    base = place % max(1, gpus)
    sharing = -(-workers // max(1, gpus))
    flags = ["--base-gpu-id", str(base)] if base else []
    return flags if sharing == 1 else [*flags, "--mem-fraction-static", f"{0.84 / sharing:.2f}"]


class Stack:
    """The running stack. ``start`` either returns with everything ready or raises with everything stopped."""

    def __init__(
        self,
        spec: StackSpec,
        processes: Processes,
        *,
        run_dir: Path,
        places: Mapping[str, Place] | None = None,
        progress: Progress = lambda line: None,
        ready_timeout: float = READY_TIMEOUT_S,
    ):
        """``places``: by role (tier, memory, prefill, decode) where its servers run; the others run here, started by ``processes``."""
        self.spec = spec
        self.servers: dict[str, Server] = {}
        self.urls: dict[str, str] = {}
        self.bootstrap_ports: dict[str, int] = {}
        """Of each prefill worker; what a client that does without the router names as ``bootstrap_port``."""
        self._processes = processes
        self._places = dict(places or {})
        self._run_dir = run_dir
        self._progress = progress
        self._ready_timeout = ready_timeout
        self._scratch: Path | None = None
        self._ring: Ring | None = None
        self._segments: set[Path] = set()
        self._starts: dict[str, Callable[[], Server]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where clients go."""
        return self.urls["monolith" if self.spec.kind == "monolith" else "router"]

    @property
    def bootstrap_host(self) -> str:
        """Of the prefill workers."""
        return self._place_of("prefill").front

    @property
    def bootstrap_port(self) -> int:
        """Of the first prefill worker."""
        return self.bootstrap_ports["prefill"]

    def start(self) -> None:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._scratch = Path(tempfile.mkdtemp(prefix=f"{self.spec.kind}-", dir=self._processes.scratch))
        self._ring = Ring(self._scratch / "keys") if self.spec.keyed else None
        try:
            if self.spec.kind == "oasis":
                self._start_tiers()
            self._preload()
            if self.spec.kind == "monolith":
                self._start_worker("monolith", "monolith", port=self.spec.port, host=self.spec.host)
                self._wait_ready({"monolith": "/health"})
            else:
                self._start_workers()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything, what was started last first. Idempotent; bounded by SIGKILL for each server."""
        servers = list(self.servers.values())
        try:
            self._note_segments()
            for roles in (("router",), ("prefill", "decode", "monolith"), ("tier",), ("memory",)):
                stop_together([server for server in servers if _role(server.name) in roles])
        finally:
            self.servers.clear()
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)
                self._scratch = None
            for segment in self._segments:
                segment.unlink(missing_ok=True)
            self._segments.clear()

    def restart(self, *names: str) -> None:
        """Start servers that have ended once more, with the arguments and at the addresses that they had, and wait until they are ready. Raises
        StackError when one still runs, or does not get ready, or one that was not named has ended."""
        for name in names:
            if self.servers[name].poll() is None:
                raise StackError(f"{name} still runs")
        for name in names:
            self._progress(f"starting {name} again")
            self._start(name, self._starts[name])
        self._wait_ready({name: _READY[_role(name)] for name in names})

    def check(self) -> None:
        """Raise StackError when a server has exited."""
        for server in self.servers.values():
            if server.poll() is not None:
                raise StackError(f"{server.name} ended with exit code {server.code}\n{_excerpt(server)}")

    def server_info(self, name: str) -> dict:
        return get_json(self.urls[name] + "/server_info")

    def cpu_seconds(self) -> float:
        """User and system time of every process of the stack, so far."""
        import psutil

        total = 0.0
        for server in self.servers.values():
            leader = psutil.Process(server.pid)
            for process in (leader, *leader.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _note_segments(self) -> None:
        """Remember the shared memory that SGLang never unlinks, whichever way it ends (load snapshots). Forked servers keep it in
        their scratch directory; this is for those started in the usual way."""
        for server in self.servers.values():
            self._segments |= server.shared_segments()

    def _preload(self) -> None:
        workers = ("monolith",) if self.spec.kind == "monolith" else ("prefill", "decode")
        for processes in dict.fromkeys(self._place_of(role).processes for role in workers):
            if platform.wanted() and not processes.preloaded:
                self._progress("importing SGLang (10 to 40 s, once)")
                processes.preload()

    def _place_of(self, name: str) -> Place:
        return self._places.get(_role(name)) or Place(self._processes)

    def _start_tiers(self) -> None:
        """Each waits for those that it will talk to; workers attach to a tier while they start, so it has to be there first."""
        memory = {f"memory{index}": f"{self._place_of('memory').wire}:{free_port()}" for index in range(self.spec.memory_nodes)}
        for name, listen in memory.items():
            self._start_tier(name, listen)
        self._wait_ready(dict.fromkeys(memory, "/readyz"))
        more = ["--memory-nodes", ",".join(f"tcp://{listen}{self._ring.mark(name) if self._ring else ''}" for name, listen in memory.items())] if memory else []
        tiers = _numbered("tier", self.spec.prefills)
        for name in tiers:
            self._start_tier(name, f"{self._place_of(name).wire}:{free_port()}", *more)
        self._wait_ready(dict.fromkeys(tiers, "/readyz"))

    def _start_tier(self, name: str, listen: str, *flags: str) -> None:
        http = f"{self._place_of(name).front}:{free_port()}"
        argv = [sys.executable, "-P", "-m", "oasis_sglang.cli", "tier", "--local", self._socket(name)]
        argv += ["--listen", listen, "--http", http, "--node", name]
        if self._ring is not None:
            argv += self._ring.flags(name)
        elif not listen.startswith(HOST):
            argv += ["--allow-plaintext"]  # between hosts of one machine
        argv += ["--drain-seconds", "0"]  # a stack is stopped as a whole: nobody will hand anything back
        argv += ["--arena-bytes", str(self.spec.arena_bytes), "--data-plane", self.spec.data_plane, *flags, *self.spec.tier_flags]
        self._progress(f"starting {name}")
        self.urls[name] = f"http://{http}"
        self._run(name, argv)

    def _socket(self, tier: str) -> str:
        return str(self._scratch / f"{tier}.sock")

    def _start_workers(self) -> None:
        prefills, decodes = _numbered("prefill", self.spec.prefills), _numbered("decode", self.spec.decodes)
        self.bootstrap_ports = {name: free_port() for name in prefills}
        for index, (name, tier) in enumerate(zip(prefills, _numbered("tier", self.spec.prefills))):
            flags = ["--disaggregation-bootstrap-port", str(self.bootstrap_ports[name])]
            self._start_worker("prefill", name, index=index, tier=tier, flags=flags)
        for index, name in enumerate(decodes):
            self._start_worker("decode", name, index=index)
        self._wait_ready(dict.fromkeys([*prefills, *decodes], "/health"))
        port = self.spec.port or free_port()
        argv = [sys.executable, "-P", "-m", "oasis_sglang.router", "--pd-disaggregation"]
        for name in prefills:
            argv += ["--prefill", self.urls[name], str(self.bootstrap_ports[name])]
        for name in decodes:
            argv += ["--decode", self.urls[name]]
        argv += ["--host", self.spec.host, "--port", str(port), "--prometheus-port", str(free_port())]
        argv += ["--policy", "round_robin", "--worker-startup-check-interval", "1", "--disable-health-check"]
        # With one pair of workers a retry would run the same request on the same workers again.
        argv += ["--disable-retries", "--disable-circuit-breaker"]
        self.urls["router"] = f"http://{_reachable(self.spec.host)}:{port}"
        self._progress("starting the router")
        self._run("router", argv)
        self._wait_ready({"router": "/readiness"})

    def _start_worker(
        self, role: Role, name: str, *, index: int = 0, tier: str = "tier", flags: Sequence[str] = (), port: int = 0, host: str | None = None
    ) -> None:
        port, host = port or free_port(), self._place_of(name).front if host is None else host
        addresses = ["--host", host, "--port", str(port), *flags]
        if role == "decode" and self._ring is not None:
            addresses += self._ring.flags(name, launch.PREFIX)
        elif role == "decode" and self.spec.kind == "oasis" and self._place_of("tier").wire != HOST:
            addresses += [f"{launch.PREFIX}allow-plaintext=true"]
        argv, env = worker_argv(role, self.spec, self._socket(tier), addresses, index)
        self.urls[name] = f"http://{_reachable(host)}:{port}"
        self._progress(f"starting {self.spec.kind if role == 'monolith' else name}")
        if platform.wanted():
            self._serve(name, argv, env)
        else:
            self._run(name, [sys.executable, "-P", "-m", "sglang.launch_server", *argv], env)

    def _serve(self, name: str, argv: Sequence[str], env: Environment) -> None:
        self._start(name, lambda: self._place_of(name).processes.serve(argv, **self._surroundings(name, env), name=name))

    def _run(self, name: str, argv: Sequence[str], env: Environment | None = None) -> None:
        self._start(name, lambda: self._place_of(name).processes.run(argv, **self._surroundings(name, env or {}), name=name))

    def _start(self, name: str, start: Callable[[], Server]) -> None:
        self._starts[name], self.servers[name] = start, start()

    def _surroundings(self, name: str, env: Environment) -> dict[str, object]:
        """Log file, and environment with a temporary directory of the server's own: SGLang leaves five socket files behind in it at
        every exit, and its metrics in one of their own after a SIGKILL."""
        temporary = self._scratch / name
        metrics = temporary / "metrics"
        shutil.rmtree(temporary, ignore_errors=True)  # of a life before this one
        metrics.mkdir(parents=True)
        own = {"TMPDIR": str(temporary), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
        return {"log": self._run_dir / f"{name}.log", "env": {**own, **self._place_of(name).env, **env, **self.spec.env}}

    def _wait_ready(self, paths: Mapping[str, str]) -> None:
        start = time.monotonic()
        waiting = dict(paths)
        next_line = start + _PROGRESS_EVERY_S
        while waiting:
            self.check()
            for name, path in list(waiting.items()):
                if probe(self.urls[name] + path):
                    del waiting[name]
                    self._note_segments()  # now, in case the server is killed later
                    self._progress(f"{name} is ready after {time.monotonic() - start:.0f} s")
            now = time.monotonic()
            if waiting and now - start > self._ready_timeout:
                name = next(iter(waiting))
                raise StackError(f"{name} was not ready within {self._ready_timeout:.0f} s\n{_excerpt(self.servers[name])}")
            if waiting and now > next_line:
                next_line += _PROGRESS_EVERY_S
                self._progress(f"waiting for {' and '.join(waiting)} ({now - start:.0f} s)")
            if waiting:
                time.sleep(0.1)


def _reachable(host: str) -> str:
    return HOST if host in ("0.0.0.0", "::", "") else host


def _role(name: str) -> str:
    return name.rstrip("0123456789")


def _numbered(name: str, count: int) -> list[str]:
    """name, name1, name2, ..."""
    return [name, *(f"{name}{index}" for index in range(1, count))]


def _excerpt(server: Server, lines: int = 30) -> str:
    return f"--- last lines of {server.log}\n{server.tail(lines)}\n---"
