"""``oasis tier``: the process that owns the arena, the data planes and the control plane.

It imports neither torch nor SGLang: KV must survive the workers. A NIXL peer on TCP can read and write the memory of
the process that serves it and may bring it down, so that plane runs in a child that maps only the arena; the tier
starts it again when it ends, and so does what reads records of other tiers into this arena. One asyncio loop runs the control plane:

* a unix socket for the node's workers, which hands out the arena's descriptor (``worker_sockets``);
* a ZeroMQ ROUTER for readers, and for other tiers unless this one itself has memory nodes;
* with memory nodes, a ZeroMQ DEALER to each (``upstream``);
* HTTP: ``/healthz``, ``/readyz`` (all sockets listen, all data planes serve), ``/metrics``, ``/state`` (``status``).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from transport import messages as m
from transport.arena import Arena
from transport.dataplane import DataServer
from transport.donation import Donations, refuse
from transport.drain import Drain
from transport.errors import AccessDenied, ConfigError, OasisError, ProtocolError
from transport.fill import MemoryTier
from transport.memory_nodes import MemoryNodes
from transport.metrics import TierCollector
from transport.mover import Mover
from transport.moving import Ended
from transport.planes import make_server
from transport.planes.host import HostedServer
from transport.relay import RelayTier
from transport.rooms import TierLimits
from transport.security import Security, is_loopback
from transport.status import serve_http
from transport.tier import Tier
from transport.upstream import Links
from transport.wiping import Wiper
from transport.worker_sockets import WorkerSockets, listen

log = logging.getLogger("oasis.tier")

LAST_WORDS_MS = 200
"""For what readers are told at the end to leave."""


@dataclass
class TierOptions:
    """``local``: path of the unix socket. ``listen``/``http``: host:port, port 0 = any free one (it is advertised).
    ``advertise``: the host that readers are told (default: the one listened on). ``planes``: data planes to serve,
    preferred first. ``memory_nodes``: where what is committed here is moved to (see ``MemoryNodes``); empty: nowhere.
    ``accept_generated``: decode nodes may donate what they generate. ``keys``, ``allowed``: this node's secret key file, and the folder of
    the public keys of those that may connect and be connected to (see ``Security``); without them other hosts are served only with
    ``allow_plaintext``. ``drain_seconds``: how long what is held may take to end after a SIGTERM; 0: no time. ``zero_freed``: what freed
    records hold is zeroed before they are written again (see ``Wiper``)."""

    local: str
    listen: str = "127.0.0.1:0"
    http: str = "127.0.0.1:0"
    arena_bytes: int = 1 << 30
    planes: tuple[str, ...] = ("nixl", "zmq")
    memory_nodes: str = ""
    accept_generated: bool = False
    advertise: str = ""
    node: str = ""
    keys: str = ""
    allowed: str = ""
    allow_plaintext: bool = False
    drain_seconds: float = 30.0
    zero_freed: bool = False
    limits: TierLimits = field(default_factory=TierLimits)


def split_address(address: str, option: str) -> tuple[str, int]:
    """("host", port). Raises ``ConfigError`` naming the option."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{option} must be host:port, not {address!r}")
    return host.strip("[]"), int(port)


class TierServer:
    """Owns the arena, the data servers and every socket; ``run`` serves until stopped and then closes them all."""

    def __init__(self, options: TierOptions):
        self.options = options
        if not 0 <= options.drain_seconds < float("inf"):
            raise ConfigError(f"--drain-seconds must not be negative, not {options.drain_seconds}")
        self.epoch = uuid.uuid4().hex
        self.node = options.node or socket.gethostname()
        self.host, self.port = split_address(options.listen, "--listen")
        self.http_host, self.http_port = split_address(options.http, "--http")
        self.advertise = options.advertise or self.host
        for name, seconds in vars(options.limits).items():
            if not 0 < seconds < float("inf"):
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, not {seconds}")
        if not options.planes:
            raise ConfigError("--data-plane needs at least one of nixl, zmq")
        self.security = Security.load(options.keys, options.allowed, options.allow_plaintext)
        # The control plane listens at the one, the data plane at the other.
        for option, host in (("--listen", self.host), ("--advertise", self.advertise)):
            if self.security.keys is None and not (is_loopback(host) or options.allow_plaintext):
                raise ConfigError(f"{option} {host} serves other hosts without encryption or authentication: give it --keys and --allowed "
                                  "(`oasis keys`), or on a trusted network --allow-plaintext")
        if self.host in ("0.0.0.0", "::") and not options.advertise:
            raise ConfigError("--listen on every interface needs --advertise HOST: readers must be told one address")
        self.nodes = MemoryNodes(options.memory_nodes) if options.memory_nodes else None
        for address in self.nodes.named if self.nodes else ():
            try:
                self.security.require(address, f"memory node {address}")
            except OasisError as error:
                raise ConfigError(f"--memory-nodes: {error}") from error
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self.drain: Drain | None = None
        self._tasks: set[asyncio.Task] = set()

    async def run(self) -> None:
        options = self.options
        self.arena = Arena.create(options.arena_bytes)
        self.servers: list[DataServer] = []
        context = zmq.asyncio.Context()
        self.router = context.socket(zmq.ROUTER)
        self.links: Links | None = None
        # Whoever reads over NIXL can be read by its peers: a process that may do so gets no keys.
        exposed = self.security.keys is not None and "nixl" in options.planes
        self.mover = Mover(self.arena.fd, self.arena.size, self.node, self._ended, Security() if exposed else self.security)
        self.workers: WorkerSockets | None = None
        local = runner = guard = None
        try:
            guard = self.security.guard(context)
            for kind in options.planes:
                self.servers.append(self._serve(kind))
            self.control = self._bind()
            self.tier = self._make_tier(context)
            if options.zero_freed:
                self.tier.wiper = Wiper(self.arena.bytes, self.tier.totals)
            self.tier.serve(m.Donate, Donations(self.tier, self.arena.bytes).take if options.accept_generated else refuse)
            self.workers = WorkerSockets(self.tier, self.arena.fd, spawn=self._spawn, settled=self._flush)
            local = listen(options.local)
            registry = CollectorRegistry()
            registry.register(TierCollector(self.tier, self.arena))
            runner, self.http_port = await serve_http(self.http_host, self.http_port, registry=registry, missing=self._missing, state=self._state)
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self.stop)
            loop.add_signal_handler(signal.SIGINT, self.stopping.set)
            work = [self.workers.accept(local), self._remote(), self._clock(), self.mover.run()]
            if self.nodes is not None:
                await self.nodes.refresh()
                work += [self.links.run(), self.nodes.watch()]
            for one in work:
                self._spawn(one)
            self.ready.set()
            log.info("tier %s ready: %s", self.epoch[:8], json.dumps(
                {"local": options.local, "control": self.control, "http": f"{self.http_host}:{self.http_port}", "arena_bytes": options.arena_bytes,
                 "planes": list(options.planes), "memory_nodes": list(self.nodes.addresses) if self.nodes else []}))
            if self.security.allow_plaintext:
                log.warning("other hosts are served, and talked to, without encryption or authentication (--allow-plaintext)")
            await self.stopping.wait()
            if self.drain is not None:
                self.drain.end()
                self._flush()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if runner is not None:
                await runner.cleanup()
            if self.links is not None:
                self.links.close()
            if self.workers is not None:
                self.workers.close()
            if local is not None:
                local.close()
                with suppress(FileNotFoundError):
                    os.unlink(options.local)
            self.router.close(linger=LAST_WORDS_MS)
            if guard is not None:
                guard.stop()
            context.term()
            for server in self.servers:
                server.close()
            self.arena.close()
            log.info("tier %s stopped", self.epoch[:8])

    def stop(self) -> None:
        """What SIGTERM does: takes nothing new and ends when nothing is held any more, ``drain_seconds`` later at the latest. The second
        one ends at once. On the loop."""
        if self.drain is not None:
            self.stopping.set()
            return
        self.drain = Drain(self.tier, self.options.drain_seconds)
        self._spawn(self._drained())

    async def _drained(self) -> None:
        await self.drain.run()
        self.stopping.set()

    @property
    def connections(self) -> dict:
        """Of workers."""
        return self.workers.connections

    def _make_tier(self, context: zmq.asyncio.Context) -> Tier:
        about = dict(epoch=self.epoch, arena_size=self.options.arena_bytes, control=self.control, planes=self.options.planes,
                     endpoints=tuple(s.endpoint for s in self.servers if s.endpoint), limits=self.options.limits)
        if self.nodes is None:
            return MemoryTier(**about)

        def hello() -> dict:
            return dict(node=self.node, rank=0, layout=tier.layout, fingerprint=tier.fingerprint, control=self.control)

        self.links = Links(context, hello, lost=lambda address, error: tier.node_lost(address, error), settled=self._flush, security=self.security)
        tier = RelayTier(nodes=self.nodes, upstream=self.links, **about)
        return tier

    # -- data planes --------------------------------------------------------------------------------------------

    def _serve(self, kind: str) -> DataServer:
        if kind != "nixl":
            return make_server(kind, f"{self.node}:{self.epoch}", self.arena.bytes, host=self.advertise, security=self.security)
        loop = asyncio.get_running_loop()

        def changed() -> None:  # on the server's thread
            with suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(self._planes_changed)

        return HostedServer(kind, self.node, self.arena.fd, self.arena.size, on_change=changed)

    def _planes_changed(self) -> None:
        """Readers ask for the endpoints once their reads fail; nobody's rooms, leases or records are touched."""
        self.tier.endpoints = tuple(s.endpoint for s in self.servers if s.endpoint)
        self.tier.totals["data_plane_restarts"] = sum(s.restarts for s in self.servers)

    # -- control ------------------------------------------------------------------------------------------------

    def _bind(self) -> str:
        """Binds the ROUTER; returns the address that readers are told. Raises ``ConfigError``."""
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.MAXMSGSIZE, m.MAX_READER_MESSAGE if self.nodes is not None else m.MAX_MESSAGE)
        self.router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.security.serve(self.router)
        try:
            self.router.bind(f"tcp://{self.host}:{self.port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError(f"--listen {self.host}:{self.port}: {error.strerror}") from error
        port = self.router.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2]
        return self.security.told(f"tcp://{self.advertise}:{port}")

    async def _remote(self) -> None:
        """Readers and other tiers."""
        while True:
            head, *rest = await self.router.recv_multipart(copy=False)
            identity, frames = head.bytes, [frame.bytes for frame in rest]
            if len(frames) != 1:
                self.tier.totals["refused"] += 1
                continue
            seq = 0
            try:
                about = self.tier.sessions.get(identity)
                is_tier = about is not None and about.role == "tier"
                if len(frames[0]) > m.MAX_READER_MESSAGE and not (is_tier or self.options.accept_generated):
                    raise ProtocolError("message too large", peer="reader", limit=f"{m.MAX_READER_MESSAGE} bytes")
                request = m.decode_request(frames[0], peer=about.node if is_tier else "reader")
                seq = request.seq
                if isinstance(request, m.Commit if is_tier else (m.Open, m.Commit, m.Fill, m.Abort)) or getattr(request, "role", "") == "worker":
                    raise ProtocolError("only a local worker may publish", peer="reader")
                if not self.security.hears(head):
                    raise AccessDenied("your key is not on the allow list any more", peer=self.node)
                if isinstance(request, m.Hello) and request.role == "tier" and not self.security.sent_by(head, request.control):
                    raise AccessDenied("this is another tier's address", peer=self.node, limit=request.control)
            except (ProtocolError, AccessDenied) as error:
                self.tier.totals["refused"] += 1
                self._answer(identity, m.failure(error, seq))
                continue
            reply = self.tier.handle(identity, request)
            if reply is not None:
                self._answer(identity, reply)
            self._flush()

    async def _clock(self) -> None:
        while True:
            pause = self.tier.tick()
            self._flush()
            await asyncio.sleep(pause)

    def _flush(self) -> None:
        """Passes on what the tier has decided."""
        outbox, self.tier.outbox = self.tier.outbox, []
        for session, reply in outbox:
            self._answer(session, reply)
        orders, self.tier.orders = self.tier.orders, []
        for order in orders:
            self.mover.post(order)

    def _answer(self, session: object, reply: m.Reply) -> None:
        if not isinstance(session, bytes):
            self.workers.send(session, reply)
            return
        sent = self.router.send_multipart([session, m.encode(reply)])  # at once: a ROUTER waits for nobody
        if sent.done():
            sent.exception()  # a reader that left is told nothing

    def _ended(self, ended: Ended) -> None:
        self.tier.moved(ended)
        self.tier.totals["mover_restarts"] = self.mover.restarts
        self._flush()

    # -- HTTP ---------------------------------------------------------------------------------------------------

    def _missing(self) -> str:
        if not self.ready.is_set():
            return "starting"
        if self.drain is not None:
            return "draining"
        served = [e.kind for e in self.tier.endpoints]
        if down := [kind for kind in self.options.planes if kind not in served]:
            return f"data plane {', '.join(down)} is being restarted"
        if self.nodes is not None and not self.nodes.addresses:
            return f"{self.nodes.spec} names no memory node"
        return ""

    def _state(self) -> dict:
        nodes = [{"address": a, "control": self.links.control(a), "connected": self.links.connected(a), "down": self.nodes.is_down(a)}
                 for a in (self.nodes.addresses if self.nodes else ())]
        geometry = self.tier.geometry
        return {"epoch": self.epoch, "draining": self.drain is not None, "control": self.control, "node": self.node, "memory_nodes": nodes,
                "inventory": self.tier.inventory(), "record_bytes": geometry.payload_stride + geometry.index_stride if geometry else 0,
                "totals": dict(self.tier.totals)}

    def _spawn(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("tier task failed", exc_info=task.exception())
            self.stopping.set()


def serve(options: TierOptions) -> None:
    """Runs a tier until SIGTERM (see ``TierServer.stop``) or SIGINT (at once). Raises ``ConfigError`` or ``CapacityError`` at start."""
    asyncio.run(TierServer(options).run())
