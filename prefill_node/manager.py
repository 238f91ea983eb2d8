"""SGLang's view of a prefill rank: a KV manager, a sender per request and the bootstrap server.

Unlike SGLang's own back ends nothing here waits for a decode node: the sender reports Bootstrapping until the local
tier has reserved the prompt's records, WaitingForInput while prefill computes, and Success once the tier acknowledged
the commit. Sources: ``sglang/srt/disaggregation/common/conn.py`` (bases), ``prefill.py`` (callers).
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import os
import secrets
import uuid

import msgspec
import numpy as np
import psutil
import requests
from aiohttp import web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager, CommonKVSender, KVTransferError
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils.network import NetworkAddress

from prefill_node import publisher as p
from prefill_node.query_tap import QueryTap
from prefill_node.restore import Restorer
from transport.errors import ConfigError, ProtocolError, RoomFailed
from transport.peer_row import TOKEN_ENV, TOKEN_HEADER, PeerRow, decode_peer_row
from transport.security import is_loopback

log = logging.getLogger("oasis.prefill")

REGISTRATIONS = ("/route", "/register_dp_rank")
"""SGLang's own, which have no token."""


class OasisPrefillManager(CommonKVManager):
    """Owner of the publisher. ``bind`` completes it once the KV pool is at hand."""

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # of SGLang's own back ends: nobody reads it here, and whoever reaches it could fill the memory behind it
        self.publisher: p.Publisher | None = None
        self.tap: QueryTap | None = None
        self.restorer: Restorer | None = None
        self.identify = None
        self.wish = None
        self.cache_epoch = ""
        """Part of every hash chain. Changes with the weights: what the tier holds of before is not found any more."""

    def bind(self, publisher: p.Publisher, peer_row: dict, identify, tap: QueryTap | None = None, restorer: Restorer | None = None,
             wish=lambda req: None) -> None:
        """``peer_row``: what decode ranks are told, less the tier's address; ``identify(req)`` -> chain seed or None;
        ``tap``: on this rank's attention, None: prompts are published without a ranking; ``restorer``: of the radix tree, for
        reports; ``wish(req)`` -> what its tier may fetch for it, as in ``Open``."""
        self.publisher, self.peer_row, self.identify, self.tap, self.restorer, self.wish = publisher, peer_row, identify, tap, restorer, wish
        publisher.on_attach = self._announce
        self._announce(publisher.client.welcome)
        publisher.start()

    def forget_prefixes(self) -> None:
        self.cache_epoch = uuid.uuid4().hex

    def _announce(self, welcome) -> None:
        # Rank and address as ``register_to_bootstrap`` has them: decode asks for the same ones.
        dp_rank = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        row = {**self.peer_row, "control": welcome.control, "epoch": welcome.epoch, "dp_rank": dp_rank, "tp_rank": self.attn_tp_rank}
        if self.dist_init_addr:
            host = NetworkAddress.parse(self.dist_init_addr).resolved().host
        else:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bootstrap_host, self.bootstrap_host)
        url = f"{NetworkAddress(host, self.bootstrap_port).to_url()}/oasis/peer"
        response = requests.put(url, json=row, headers={TOKEN_HEADER: os.environ.get(TOKEN_ENV, "")}, timeout=5)
        if response.status_code != 200:
            raise ConfigError(f"the bootstrap server refused this rank: {response.text}", peer=url)

    def metadata_row(self, index: int) -> tuple[bytes, ...]:
        """The whole hand-over row: first token, logprobs, speculative seed, room."""
        args = self.kv_args
        return tuple(ctypes.string_at(ptr + index * n, n) for ptr, n in zip(args.aux_data_ptrs, args.aux_item_lens))

    def report(self) -> dict:
        """Counters for ``/server_info``."""
        totals = dict(self.publisher.totals)
        welcome = self.publisher.client.welcome
        return {"role": "prefill", "tier": self.publisher.client.path, "epoch": welcome.epoch if welcome else "",
                "totals": totals, "publications": len(self.publisher.live),
                "restore": self.restorer.report() if self.restorer is not None else {}}


class OasisSender(CommonKVSender):
    """One request on one prefill rank; owner of its ``Publication``."""

    def __init__(self, mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank=False):
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        # The base class keys its states by room in a dictionary, where two requests with one room would mix.
        mgr.request_status.pop(bootstrap_room, None)
        self.publication: p.Publication | None = None
        self.rid = ""

    def open(self, req) -> None:
        """Called once the sender belongs to ``req``: starts the reservation."""
        self.rid = req.rid
        tokens = np.asarray(req.origin_input_ids, dtype=np.int64)
        self.publication = self.kv_mgr.publisher.publish(self.bootstrap_room, tokens, self.kv_mgr.identify(req), self.kv_mgr.wish(req), req.rid)

    def send(self, kv_indices, state_indices=None, num_kv_tokens=None, indices_event=None):
        first = self.curr_idx
        self.curr_idx += len(kv_indices)
        pub, event = self.publication, self._early_send_wait_event
        self._early_send_wait_event = None
        if pub.state == p.FAILED:
            return
        if len(kv_indices):
            self.kv_mgr.publisher.send(pub, np.array(kv_indices, dtype=np.int64), first, num_kv_tokens, event)
            self._record_transfer_indices(kv_indices, None)
        if self.curr_idx == self.num_kv_indices:
            tap = self.kv_mgr.tap
            queries, scale = (None, 1.0) if tap is None else (tap.take(self.rid, len(pub.tokens)), tap.scale)
            self.kv_mgr.publisher.commit(pub, self.kv_mgr.metadata_row(self.aux_index), queries, scale)

    def poll(self) -> int:
        if self.conclude_state is None:
            state = self.publication.state
            if state == p.COMMITTED:
                self.conclude_state = KVPoll.Success
            elif state == p.FAILED:
                self.conclude_state = KVPoll.Failed
            else:
                return KVPoll.Bootstrapping if state == p.OPENING else KVPoll.WaitingForInput
        return self.conclude_state

    def clear(self) -> None:
        self.abort_publication("the request was cleared")

    def abort(self) -> None:
        self.abort_publication("the request was aborted on the prefill node")
        self.conclude_state = KVPoll.Failed

    def abort_publication(self, reason: str) -> None:
        if self.kv_mgr.tap is not None:
            self.kv_mgr.tap.drop(self.rid)
        if self.publication is not None:
            self.kv_mgr.publisher.cancel(self.publication, reason)

    def failure_exception(self):
        self.conclude_state = KVPoll.Failed
        error = self.publication.error or RoomFailed("aborted", room=self.bootstrap_room)
        self.abort_publication(str(error))
        raise KVTransferError(self.bootstrap_room, f"{error.code}: {error}")


class OasisBootstrapServer(CommonKVBootstrapServer):
    """SGLang's bootstrap server plus one row per prefill rank: where its tier is and how its KV looks.

    Only this worker's own processes register, unless it spans several hosts: whoever else is on this one could send decode nodes elsewhere.
    A row that names another tier is no way to it where there are keys: decode nodes then connect to those on their own list alone
    (``transport.security``)."""

    def _setup_routes(self):
        super()._setup_routes()
        self.several_hosts = get_server_args().nnodes > 1
        self.token = os.environ.setdefault(TOKEN_ENV, secrets.token_hex(16)).encode()
        self.peers: dict[tuple[int, int], PeerRow] = {}
        self.app.middlewares.append(self._ranks_of_this_host)
        self.app.router.add_put("/oasis/peer", self._put_peer)
        self.app.router.add_get("/oasis/peer", self._get_peer)

    @web.middleware
    async def _ranks_of_this_host(self, request: web.Request, handler) -> web.StreamResponse:
        """SGLang takes registrations with it from anywhere, and the first one says where prompts that are computed again are sent."""
        if request.method != "GET" and request.path in REGISTRATIONS and not (self.several_hosts or _is_this_host(request.remote)):
            log.warning("a registration from %s was refused: no rank of this worker is there", request.remote)
            return web.Response(status=403, text="ranks of this worker register from its own host")
        return await handler(request)

    async def _put_peer(self, request: web.Request) -> web.Response:
        shown = request.headers.get(TOKEN_HEADER, "").encode(errors="replace")
        if not (self.several_hosts or (_is_this_host(request.remote) and hmac.compare_digest(shown, self.token))):
            log.warning("a registration from %s was refused: that is no rank of this worker", request.remote)
            return web.Response(status=403, text="only ranks of this worker, on its own host, register here")
        try:
            row = decode_peer_row(await request.read(), peer=str(request.remote))
        except ProtocolError as error:
            return web.Response(status=400, text=error.message)
        self.peers[row.dp_rank, row.tp_rank] = row
        return web.json_response({})

    async def _get_peer(self, request: web.Request) -> web.Response:
        try:
            key = (int(request.query["dp_rank"]), int(request.query["tp_rank"]))
        except (KeyError, ValueError):
            return web.Response(status=400, text="dp_rank and tp_rank are needed")
        row = self.peers.get(key)
        if row is None:
            tp = sorted({k[1] for k in self.peers})
            return web.Response(status=404, text=f"no prefill rank dp={key[0]} tp={key[1]}; registered tp ranks: {tp}")
        return web.Response(body=msgspec.json.encode(row), content_type="application/json")


def _is_this_host(address: str) -> bool:
    """Whether an address that a connection came from is one of ours, whichever. Not by binding it: a kernel may allow that of any address."""
    address = address.removeprefix("::ffff:")
    return is_loopback(address) or any(address == one.address for found in psutil.net_if_addrs().values() for one in found)
