"""``oasis tier``: the process that owns the arena, the data planes and the control plane.

It imports neither torch nor SGLang: KV must survive the workers. A NIXL peer on TCP can read and write the memory of
the process that serves it and may bring it down, so that plane runs in a child that maps only the arena; the tier
starts it again when it ends. One asyncio loop runs the control plane:

* a unix socket for the node's workers, which hands out the arena's descriptor and whose end of file says that a worker
  is dead (frames: 4-byte little-endian length, then one message);
* a ZeroMQ ROUTER for readers;
* HTTP: ``/healthz`` (this loop runs), ``/readyz`` (all sockets listen, all data planes serve), ``/metrics``.
"""

from __future__ import annotations

import asyncio
import errno
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
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from transport import messages as m
from transport.arena import Arena
from transport.dataplane import DataServer
from transport.errors import ConfigError, ProtocolError
from transport.messages import LENGTH
from transport.metrics import TierCollector
from transport.planes import make_server
from transport.planes.host import HostedServer
from transport.tier import Tier, TierLimits

log = logging.getLogger("oasis.tier")


@dataclass
class TierOptions:
    """``local``: path of the unix socket. ``listen``/``http``: host:port, port 0 = any free one (it is advertised).
    ``advertise``: the host that readers are told (default: the one listened on). ``planes``: data planes to serve,
    preferred first. ``allow_plaintext``: serve other hosts although nothing is encrypted or authenticated yet."""

    local: str
    listen: str = "127.0.0.1:0"
    http: str = "127.0.0.1:0"
    arena_bytes: int = 1 << 30
    planes: tuple[str, ...] = ("nixl", "zmq")
    advertise: str = ""
    node: str = ""
    allow_plaintext: bool = False
    limits: TierLimits = field(default_factory=TierLimits)


def split_address(address: str, option: str) -> tuple[str, int]:
    """("host", port). Raises ``ConfigError`` naming the option."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(f"{option} must be host:port, not {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


class TierServer:
    """Owns the arena, the data servers and every socket; ``run`` serves until stopped and then closes them all."""

    def __init__(self, options: TierOptions):
        self.options = options
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
        if not (is_loopback(self.host) or options.allow_plaintext):
            raise ConfigError(f"--listen {self.host} serves other hosts without encryption or authentication; "
                              "on a trusted network add --allow-plaintext")
        if self.host in ("0.0.0.0", "::") and not options.advertise:
            raise ConfigError("--listen on every interface needs --advertise HOST: readers must be told one address")
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    async def run(self) -> None:
        options = self.options
        self.arena = Arena.create(options.arena_bytes)
        self.servers: list[DataServer] = []
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        local = None
        runner = None
        try:
            for kind in options.planes:
                self.servers.append(self._serve(kind))
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            router.setsockopt(zmq.MAXMSGSIZE, m.MAX_READER_MESSAGE)
            router.setsockopt(zmq.HEARTBEAT_IVL, 5000)
            try:
                router.bind(f"tcp://{self.host}:{self.port or '*'}")
            except zmq.ZMQError as error:
                raise ConfigError(f"--listen {self.host}:{self.port}: {error.strerror}") from error
            port = router.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2]
            self.control = f"tcp://{self.advertise}:{port}"
            self.tier = Tier(epoch=self.epoch, arena_size=options.arena_bytes, control=self.control,
                             endpoints=tuple(s.endpoint for s in self.servers if s.endpoint), planes=options.planes,
                             limits=options.limits)
            self.router = router
            self.connections: dict[object, socket.socket] = {}
            local = self._listen_local(options.local)
            runner = await self._serve_http()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stopping.set)
            for work in (self._accept(local), self._readers(), self._clock()):
                self._spawn(work)
            self.ready.set()
            log.info("tier %s ready: %s", self.epoch[:8], json.dumps(
                {"local": options.local, "control": self.control, "http": f"{self.http_host}:{self.http_port}",
                 "arena_bytes": options.arena_bytes, "planes": list(options.planes)}))
            await self.stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if runner is not None:
                await runner.cleanup()
            for connection in list(getattr(self, "connections", {}).values()):
                connection.close()
            if local is not None:
                local.close()
                with suppress(FileNotFoundError):
                    os.unlink(options.local)
            router.close(linger=0)
            context.term()
            for server in self.servers:
                server.close()
            log.info("tier %s stopped", self.epoch[:8])

    # -- data planes --------------------------------------------------------------------------------------------

    def _serve(self, kind: str) -> DataServer:
        if kind != "nixl":
            return make_server(kind, f"{self.node}:{self.epoch}", self.arena.bytes, host=self.advertise)
        loop = asyncio.get_running_loop()

        def changed() -> None:  # on the server's thread
            with suppress(RuntimeError):  # the loop may be closed already
                loop.call_soon_threadsafe(self._planes_changed)

        return HostedServer(kind, self.node, self.arena.fd, self.arena.size, on_change=changed)

    def _planes_changed(self) -> None:
        """Readers ask for the endpoints once their reads fail; nobody's rooms, leases or records are touched."""
        self.tier.endpoints = tuple(s.endpoint for s in self.servers if s.endpoint)
        self.tier.totals["data_plane_restarts"] = sum(s.restarts for s in self.servers)

    # -- workers: unix socket -----------------------------------------------------------------------------------

    def _listen_local(self, path: str) -> socket.socket:
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                sock.close()
                raise ConfigError(f"--local {path}: {error.strerror}") from error
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) == 0:
                    sock.close()
                    raise ConfigError(f"--local {path}: another tier serves there") from error
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(64)
        return sock

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors: those who are attached must not suffer
                log.warning("cannot accept a worker: %s", error)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            self._spawn(self._worker(connection))

    async def _worker(self, connection: socket.socket) -> None:
        session = object()
        self.connections[session] = connection
        try:
            while True:
                (length,) = LENGTH.unpack(await self._read(connection, LENGTH.size))
                if not 0 < length <= m.MAX_MESSAGE:
                    raise ProtocolError("frame length out of bounds", limit=f"{m.MAX_MESSAGE} bytes")
                request = m.decode_request(await self._read(connection, length))
                await self._answer(session, self.tier.handle(session, request))
                await self._flush()
        except (EOFError, ConnectionError):
            pass
        except (ProtocolError, OSError) as error:  # OSError: it sends Hello without end and reads no answer
            log.warning("worker connection dropped: %s", error)
        finally:
            self.connections.pop(session, None)
            connection.close()
            self.tier.disconnect(session)
            with suppress(asyncio.CancelledError):
                await self._flush()

    @staticmethod
    async def _read(connection: socket.socket, n: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < n:
            part = await loop.sock_recv(connection, min(n - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _answer(self, session: object, reply: m.Reply | None) -> None:
        if reply is None:
            return
        if isinstance(session, bytes):
            with suppress(zmq.ZMQError):  # a reader that left is told nothing
                await self.router.send_multipart([session, m.encode(reply)])
            return
        connection = self.connections.get(session)
        if connection is None:
            return
        raw = m.encode(reply)
        frame = LENGTH.pack(len(raw)) + raw
        if isinstance(reply, m.Welcome):
            sent = socket.send_fds(connection, [frame], [self.arena.fd])
            frame = frame[sent:]
        if frame:
            await asyncio.get_running_loop().sock_sendall(connection, frame)

    # -- readers: ZeroMQ ----------------------------------------------------------------------------------------

    async def _readers(self) -> None:
        while True:
            identity, *frames = await self.router.recv_multipart()
            if len(frames) != 1:
                continue
            try:
                request = m.decode_request(frames[0], peer="reader")
                if isinstance(request, (m.Open, m.Commit, m.Abort)) or getattr(request, "role", "reader") != "reader":
                    raise ProtocolError("only a local worker may publish", peer="reader")
            except ProtocolError as error:
                self.tier.totals["refused"] += 1
                await self._answer(identity, m.failure(error, 0))
                continue
            await self._answer(identity, self.tier.handle(identity, request))
            await self._flush()

    async def _clock(self) -> None:
        while True:
            pause = self.tier.tick()
            await self._flush()
            await asyncio.sleep(pause)

    async def _flush(self) -> None:
        while self.tier.outbox:
            session, reply = self.tier.outbox.pop(0)
            await self._answer(session, reply)

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def _serve_http(self) -> web.AppRunner:
        registry = CollectorRegistry()
        registry.register(TierCollector(self.tier, self.arena))

        async def healthz(_):
            return web.Response(text="ok")

        async def readyz(_):
            if not self.ready.is_set():
                return web.Response(status=503, text="starting")
            served = [e.kind for e in self.tier.endpoints]
            if down := [kind for kind in self.options.planes if kind not in served]:
                return web.Response(status=503, text=f"data plane {', '.join(down)} is being restarted")
            return web.Response(text="ready")

        async def metrics(_):
            return web.Response(body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

        async def state(_):
            return web.json_response({"epoch": self.epoch, "control": self.control, "node": self.node,
                                      "inventory": self.tier.inventory(), "totals": dict(self.tier.totals)})

        app = web.Application()
        app.router.add_get("/healthz", healthz)
        app.router.add_get("/readyz", readyz)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/state", state)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.http_host, self.http_port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(f"--http {self.http_host}:{self.http_port}: {error.strerror}") from error
        self.http_port = site._server.sockets[0].getsockname()[1]
        return runner

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
    """Runs a tier until SIGTERM or SIGINT. Raises ``ConfigError`` or ``CapacityError`` at start."""
    asyncio.run(TierServer(options).run())
