"""SGLang's view of a decode rank: a KV manager and a receiver per request.

Sources: ``sglang/srt/disaggregation/common/conn.py`` (bases), ``decode.py`` (callers). The receiver stays Bootstrapping
until the tier handed over the room's manifest, so a request holds no KV page before prefill committed; WaitingForInput
until SGLang allocated its pages; Transferring while they fill; Success once they are verified and complete.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import msgspec
import numpy as np
import requests
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver, KVTransferError, PrefillServerInfo

from decode_node import pull as states
from decode_node import puller as p
from transport.errors import ConfigError, LayoutMismatch, OasisError, PeerLost, RoomFailed
from transport.layout import KVLayout

log = logging.getLogger("oasis.decode")

REFUSAL_SECONDS = 5.0
RESOLVE_SECONDS = 5.0

_POLLS = {states.RESOLVING: KVPoll.Bootstrapping, states.AWAITING: KVPoll.Bootstrapping, states.READY: KVPoll.WaitingForInput,
          states.PULLING: KVPoll.Transferring, states.SERVING: KVPoll.Success, states.DONE: KVPoll.Success, states.FAILED: KVPoll.Failed}


class OasisDecodeManager(CommonKVManager):
    """Owner of the puller. ``bind`` completes it once the KV pool is at hand."""

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.puller: p.Puller | None = None
        self._peers: dict[str, dict] = {}
        self._peers_lock = threading.Lock()
        # Prefill nodes that do not match this one, and until when that verdict stands.
        self._refused: dict[str, tuple[OasisError, float]] = {}

    def bind(self, puller: p.Puller, layout: KVLayout, fingerprint: str, report, fetch) -> None:
        """``report()`` -> what ``/server_info`` shows beside the puller's counters; ``fetch(req, pull, pages, write_row)``
        has a committed prompt pulled, to SGLang's ``pages`` int64 [pages of the prompt] (-1: this node has it) or wherever else
        requests live on this node."""
        self.puller, self.layout, self.fingerprint, self._report, self.fetch = puller, layout, fingerprint, report, fetch
        puller.start()
        self._start_heartbeat_checker_thread()

    # -- peers --------------------------------------------------------------------------------------------------

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """A prefill node that does not fit fails its own requests; SGLang's check would raise in the scheduler."""
        try:
            return super().try_ensure_parallel_info(bootstrap_addr)
        except RuntimeError as error:
            log.error("prefill node %s refused: %s", bootstrap_addr, error)
            self._refused[bootstrap_addr] = (LayoutMismatch(str(error), peer=bootstrap_addr), time.monotonic() + REFUSAL_SECONDS)
            self.prefill_info_table[bootstrap_addr] = PrefillServerInfo(
                attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1, page_size=None, kv_cache_dtype=None, follow_bootstrap_room=True)
            return True

    def refusal(self, bootstrap_addr: str) -> OasisError | None:
        """Why this prefill node cannot be used. A verdict older than ``REFUSAL_SECONDS`` is reached anew."""
        verdict = self._refused.get(bootstrap_addr)
        if verdict is not None and time.monotonic() >= verdict[1]:
            del self._refused[bootstrap_addr]
            self.prefill_info_table.pop(bootstrap_addr, None)
            if not self.try_ensure_parallel_info(bootstrap_addr):
                return PeerLost("the prefill node does not answer", peer=bootstrap_addr)
            verdict = self._refused.get(bootstrap_addr)
        return verdict[0] if verdict else None

    def resolve(self, source: str) -> dict:
        """Peer row of ``source`` ("host:port/dp"), cached until its tier is lost. Runs on the puller's resolver threads.
        Raises ``PeerLost``, ``LayoutMismatch``."""
        with self._peers_lock:
            row = self._peers.get(source)
        if row is not None:
            return row
        address, _, dp_rank = source.rpartition("/")
        try:
            response = requests.get(f"http://{address}/oasis/peer", params={"dp_rank": dp_rank, "tp_rank": self.attn_tp_rank}, timeout=RESOLVE_SECONDS)
        except requests.RequestException as error:
            raise PeerLost(f"cannot reach the prefill node: {error}", peer=address, limit=f"{RESOLVE_SECONDS} s") from error
        if response.status_code != 200:
            raise LayoutMismatch(f"the prefill node has no peer for this rank (tp_size {self.attn_tp_size}): {response.text}",
                                 field="tp_size", peer=address)
        try:
            row = response.json()
            theirs = msgspec.convert(row["layout"], KVLayout)
            fingerprint, _ = row["fingerprint"], row["control"]
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise LayoutMismatch(f"the prefill node's description is not understood: {error}", field="peer row", peer=address) from error
        self.layout.require_equal(theirs, peer=address)
        if fingerprint != self.fingerprint:
            raise LayoutMismatch(f"model differs: {self.fingerprint[:12]} here, {fingerprint[:12]} at the prefill node", field="fingerprint", peer=address)
        with self._peers_lock:
            self._peers[source] = row
        return row

    def forget(self, control: str) -> None:
        """The tier at ``control`` is gone or restarted: ask its prefill nodes again."""
        with self._peers_lock:
            self._peers = {s: row for s, row in self._peers.items() if row["control"] != control}

    def _handle_node_failure(self, failed_bootstrap_addr: str):
        """What a dead prefill node committed is in the tier and stays good; only rooms without a commit end."""
        super()._handle_node_failure(failed_bootstrap_addr)
        with self._peers_lock:
            sources = [s for s in self._peers if s.rpartition("/")[0] == failed_bootstrap_addr]
            for source in sources:
                del self._peers[source]
        for source in {*sources, *(pull.source for pull in list(self.puller.live))}:
            if source.rpartition("/")[0] == failed_bootstrap_addr:
                self.puller.source_lost(source)

    # -- rows and reports ---------------------------------------------------------------------------------------

    def row_writer(self, index: int):
        """Function that writes a hand-over row into metadata slot ``index``."""
        targets = [(ptr + index * n, n) for ptr, n in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens)]

        def write(row: tuple[bytes, ...]) -> None:
            if [len(part) for part in row] != [n for _, n in targets]:
                raise LayoutMismatch("the hand-over row differs in its fields", field="metadata_lens")
            for (address, n), part in zip(targets, row):
                ctypes.memmove(address, part, n)

        return write

    def report(self) -> dict:
        """Counters for ``/server_info``."""
        puller = self.puller
        return {"role": "decode", "totals": dict(puller.totals), "pulls": len(puller.live),
                "leases": sum(pull.state == states.SERVING for pull in list(puller.live)), "requests": dict(puller.reports),
                "tiers": {a: (link.epoch if link.error is None else "") for a, link in list(puller.links.items())}, **self._report()}


class OasisReceiver(CommonKVReceiver):
    """One request on one decode rank; owner of its ``Pull``."""

    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        # The base class keys its states by room in dictionaries, where two requests with one room would mix.
        mgr.request_status.pop(bootstrap_room, None)
        mgr.prefill_response_tracker.pop(bootstrap_room, None)
        self.bootstrap_infos = []
        self.req = None
        self.pull: states.Pull | None = None
        self.error: OasisError | None = None

    def init(self, prefill_dp_rank: int):
        if self.conclude_state is not None:
            return
        refusal = self.kv_mgr.refusal(self.bootstrap_addr)
        if refusal is not None:
            self.error, self.conclude_state = refusal, KVPoll.Failed
            return
        self.pull = self.kv_mgr.puller.pull(self.bootstrap_room, f"{self.bootstrap_addr}/{prefill_dp_rank}", rid=self.req.rid if self.req else "")

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None,
                      destination=KVTransferDestination.DEVICE, **_):
        here, rest = divmod(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size)
        if rest or destination != KVTransferDestination.DEVICE:
            # Both come from options that are refused at start; whoever gets round that loses this request, not the server.
            self.error = ConfigError("Oasis pulls whole pages into the KV pool", room=self.bootstrap_room)
            self._cancel(str(self.error))
            self.conclude_state = KVPoll.Failed
            return
        try:
            pages = np.concatenate([np.full(here, -1), kv_indices]).astype(np.int64)
            self.kv_mgr.fetch(self.req, self.pull, pages, self.kv_mgr.row_writer(aux_index))
        except OasisError as error:  # options of this request, or more than this node can hold
            self.error = error
            self._cancel(str(error))
            self.conclude_state = KVPoll.Failed
        self.init_time = time.time()

    def poll(self) -> int:
        if self.conclude_state is None:
            state = KVPoll.Bootstrapping if self.pull is None else _POLLS[self.pull.state]
            if state not in (KVPoll.Success, KVPoll.Failed):
                return state
            self.conclude_state = state
        return self.conclude_state

    def clear(self) -> None:
        self._cancel("the request was cleared")
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            before_its_peer = PeerLost("aborted before its prefill node answered", room=self.bootstrap_room, peer=self.bootstrap_addr)
            aborted = RoomFailed("aborted on the decode node", room=self.bootstrap_room)
            self.error = self.error or (before_its_peer if self.pull is None else aborted)
        self._cancel("the request was aborted on the decode node")
        self.conclude_state = KVPoll.Failed

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing to tell: after ``cancel`` no one writes to this request's pages, and the tier knows the lease."""

    def _cancel(self, reason: str) -> None:
        if self.pull is not None:
            self.kv_mgr.puller.cancel(self.pull, reason)

    def failure_exception(self):
        self.conclude_state = KVPoll.Failed
        self._cancel("another rank failed")
        error = self.error or (self.pull.error if self.pull else None) or RoomFailed("failed on another rank", room=self.bootstrap_room)
        raise KVTransferError(self.bootstrap_room, f"{error.code}: {error}")
