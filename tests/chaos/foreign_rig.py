"""A prefill node that is not what it says: a bootstrap server and a tier of the test's own, between decode and the real ones.

What decode says goes on to the real tier and what that answers comes back, but for what a test has changed. So one thing at a time is
false, and everything else is as sound as it gets.
"""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
from chaos_rig import next_room, request, started

from oasis_sglang.soak.asking import Asking
from oasis_sglang.stack import Stack
from transport import messages as m
from transport.peer_row import PeerRow, decode_peer_row

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))
from middle_rig import MiddleTier  # noqa: E402

Change = Callable[[m.Message], m.Message | bytes]


def peer_row(stack: Stack) -> PeerRow:
    """What the prefill worker tells of its rank 0."""
    url = f"http://127.0.0.1:{stack.bootstrap_port}/oasis/peer?dp_rank=0&tp_rank=0"
    return decode_peer_row(urllib.request.urlopen(url, timeout=10).read(), peer=url)


class Foreign:
    """The bootstrap server at ``port``, in front of that of ``stack``, and the tier that it names. ``lies``: what else is false in its row;
    ``changes``: by room, what becomes of its manifest, and by kind of message, of the tier's other answers; ``changed``: the rooms of which
    it has. A context: both servers end with it."""

    def __init__(self, stack: Stack):
        self.stack, self.lies, real = stack, {}, f"http://127.0.0.1:{stack.bootstrap_port}"
        self.changes: dict[int | type[m.Message], Change] = {}
        self.changed: list[int] = []
        self.row = peer_row(stack)
        self.tier = MiddleTier(self.row.control, self._altered)
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

    def _altered(self, reply: m.Reply) -> m.Message | bytes:
        if not isinstance(reply, m.Manifest):
            return self.changes.get(type(reply), lambda sent: sent)(reply)
        if (change := self.changes.get(reply.room)) is None:
            return reply
        self.changed.append(reply.room)
        return change(reply)

    def ask(self, prompt: list[int], output: int, change: Change | None = None, **oasis) -> Asking:
        """The prompt at the real prefill worker and, with us as its bootstrap server, at decode: decode's. ``oasis``: options of the request."""
        body = request(prompt, output, bootstrap_host="127.0.0.1", bootstrap_port=self.stack.bootstrap_port, bootstrap_room=(room := next_room()))
        body["sampling_params"]["custom_params"] = {"oasis": oasis}
        if change is not None:
            self.changes[room] = change
        started(self.stack.urls["prefill"], body, wanted=1)
        return started(self.stack.urls["decode"], {**body, "bootstrap_port": self.port}, wanted=output)
