"""What stands around a decode node whose requests are computed again: a prefill worker's HTTP end, a manager, SGLang's request."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from node_rig import SOURCE

from decode_node.policy import RecoveryLimits
from decode_node.receiver import OasisReceiver
from decode_node.recompute import Recomputer, Worker
from decode_node.recovery import Recovery
from transport.errors import PeerLost

ADDRESS = SOURCE.rpartition("/")[0]


class PrefillWorker:
    """``answer(body)`` -> HTTP status of each ``/generate``; it may publish first. ``bodies``, ``headers``: what was asked."""

    def __init__(self, answer=lambda body: 200):
        self.answer, self.bodies, self.headers = answer, [], []
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                worker.bodies.append(body)
                worker.headers.append(dict(self.headers))
                self.send_response(worker.answer(body) if self.path == "/generate" else 404)
                self.end_headers()

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class Workers:
    """The prefill workers that a node knows: bootstrap address -> (url, source), or the error of a look at it."""

    def __init__(self, control):
        self.control, self.at, self.looks = control, {}, []

    def look(self, address: str, room: int) -> Worker:
        self.looks.append(address)
        found = self.at[address]
        if isinstance(found, Exception):
            raise copy.copy(found)  # the traceback of one that stays would keep a whole node
        return Worker(*found, None, self.control())


def make_recovery(puller, workers: Workers, limits: RecoveryLimits | None = None, ranks: int = 1) -> Recovery:
    recomputer = Recomputer(addresses=(), look=workers.look, cancel=puller.cancel, headers={"Authorization": "Bearer key"},
                            start=lambda order, source: puller.pull(order.room, source, rid=order.rid, seconds=order.deadline - time.monotonic()))
    return Recovery(limits or RecoveryLimits(seconds=20.0), ranks, recomputer)


def make_manager(puller, recovery: Recovery | None, **bound) -> SimpleNamespace:
    """As far as receivers need ``OasisDecodeManager``; ``bound``: ``fetch``, ``release``, ``row_writer``."""
    return SimpleNamespace(**{
        "puller": puller, "recovery": recovery, "defer_decode_allocation": False, "request_status": {}, "prefill_response_tracker": {},
        "addr_to_rooms_tracker": defaultdict(set), "update_status": lambda room, status: None, "refusal": lambda address: None,
        "kv_args": SimpleNamespace(page_size=16), "row_writer": lambda index, room: lambda row: None, "release": lambda req: None, **bound})


def make_receiver(manager, req, *, again: bool = False) -> OasisReceiver:
    """Made as SGLang and our hook make it."""
    receiver = OasisReceiver(manager, ADDRESS, req.bootstrap_room)
    receiver.belongs_to(req, again)
    if not again:
        receiver.init(0)
    return receiver


def complete(req):
    """Gives a rig's request what recovery reads of SGLang's."""
    for name in ("multimodal_inputs", "input_embeds", "lora_id", "beam_group", "session", "custom_logit_processor", "pd_rebootstrap_forced_output_id"):
        setattr(req, name, None)
    req.bootstrap_room, req.return_logprob, req.pd_rebootstrap_in_progress = getattr(req.pull, "room", 1), False, False
    req.require_reasoning = req.return_sampling_mask = False
    req.time_stats = SimpleNamespace(set_retract_time=lambda: None)
    for name in ("stop_token_ids", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "sampling_seed", "watermark"):
        setattr(req.sampling_params, name, None)
    req.sampling_params.min_new_tokens = 0
    req.build_rebootstrap_payload = lambda: {"input_ids": [*req.origin_input_ids, *req.output_ids], "sampling_params": {"max_new_tokens": 1}, "rid": req.rid}
    return req


DEAD = PeerLost("the prefill node does not answer", peer=ADDRESS)
