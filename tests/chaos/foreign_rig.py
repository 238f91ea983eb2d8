"""A prefill node that is not what it says: a bootstrap server and a tier of the test's own, between decode and the real ones.

What decode says goes on to the real tier and what that answers comes back, but for what a test has changed. So one thing at a time is
false, and everything else is as sound as it gets.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import zmq
from chaos_rig import next_room, request, started

from oasis_sglang.soak.asking import Asking
from oasis_sglang.stack import Stack
from transport import messages as m
from transport.peer_row import PeerRow, decode_peer_row

Change = Callable[[m.Message], m.Message]


def peer_row(stack: Stack) -> PeerRow:
    """What the prefill worker tells of its rank 0."""
    url = f"http://127.0.0.1:{stack.bootstrap_port}/oasis/peer?dp_rank=0&tp_rank=0"
    return decode_peer_row(urllib.request.urlopen(url, timeout=10).read(), peer=url)


class MiddleTier:
    """Passes on what the tier at ``real`` and its readers say. ``changes``: by room, what becomes of its manifest, and by kind of message, of
    the tier's other answers; ``changed``: the rooms of which it has. One thread, which alone touches the sockets."""

    def __init__(self, real: str):
        self.real = real
        self.changes: dict[int | type[m.Message], Change] = {}
        self.changed: list[int] = []
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.control = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._behind: dict[bytes, zmq.Socket] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="middle-tier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As if it had died: nobody is told anything. Idempotent."""
        self._ending.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._front.poll(20)
            while self._front.poll(0):
                reader, raw = self._front.recv_multipart()
                self._to(reader).send(raw)
            for reader, socket in self._behind.items():
                while socket.poll(0):
                    self._front.send_multipart([reader, m.encode(self._changed(m.decode_reply(socket.recv())))])

    def _to(self, reader: bytes) -> zmq.Socket:
        if reader not in self._behind:
            self._behind[reader] = self._context.socket(zmq.DEALER)
            self._behind[reader].connect(self.real)
        return self._behind[reader]

    def _changed(self, reply: m.Reply) -> m.Message:
        if not isinstance(reply, m.Manifest):
            return self.changes.get(type(reply), lambda sent: sent)(reply)
        if (change := self.changes.get(reply.room)) is None:
            return reply
        self.changed.append(reply.room)
        return change(reply)


class Foreign:
    """The bootstrap server at ``port``, in front of that of ``stack``, and the tier that it names. ``lies``: what else is false in its row.
    A context: both end with it."""

    def __init__(self, stack: Stack):
        self.stack, self.lies, real = stack, {}, f"http://127.0.0.1:{stack.bootstrap_port}"
        self.row = peer_row(stack)
        self.tier = MiddleTier(self.row.control)
        foreign = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path.startswith("/oasis/peer"):
                    body = msgspec.json.encode(msgspec.structs.replace(foreign.row, control=foreign.tier.control, **foreign.lies))
                else:
                    body = urllib.request.urlopen(real + self.path, timeout=10).read()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Foreign:
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.tier.close()

    def ask(self, prompt: list[int], output: int, change: Change | None = None, **oasis) -> Asking:
        """The prompt at the real prefill worker and, with us as its bootstrap server, at decode: decode's. ``oasis``: options of the request."""
        body = request(prompt, output, bootstrap_host="127.0.0.1", bootstrap_port=self.stack.bootstrap_port, bootstrap_room=(room := next_room()))
        body["sampling_params"]["custom_params"] = {"oasis": oasis}
        if change is not None:
            self.tier.changes[room] = change
        started(self.stack.urls["prefill"], body, wanted=1)
        return started(self.stack.urls["decode"], {**body, "bootstrap_port": self.port}, wanted=output)
