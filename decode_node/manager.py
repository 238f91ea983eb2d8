"""SGLang's view of a decode rank: a KV manager. Its receivers, one per request: ``receiver.py``.

Sources: ``sglang/srt/disaggregation/common/conn.py`` (base), ``decode.py`` (callers).
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time

import requests
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.utils.network import NetworkAddress
from urllib3.exceptions import HTTPError

from decode_node import pull as states
from decode_node import puller as p
from decode_node.recompute import Worker
from decode_node.recovery import Recovery
from transport.errors import LayoutMismatch, OasisError, PeerLost, ProtocolError
from transport.layout import KVLayout
from transport.peer_row import MAX_ROW_BYTES, decode_peer_row

log = logging.getLogger("oasis.decode")

REFUSAL_SECONDS = 5.0
RESOLVE_SECONDS = 5.0


class OasisDecodeManager(CommonKVManager):
    """Owner of the puller. ``bind`` completes it once the KV pool is at hand."""

    def __init__(self, args, disaggregation_mode, server_args, is_mla_backend=False):
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.server_socket.close(linger=0)  # of SGLang's own back ends: nobody reads it here, and whoever reaches it could fill the memory behind it
        self.puller: p.Puller | None = None
        self._peers: dict[str, dict] = {}
        self._peers_lock = threading.Lock()
        # Prefill nodes that do not match this one, and until when that verdict stands.
        self._refused: dict[str, tuple[OasisError, float]] = {}
        self.recovery: Recovery | None = None

    def bind(self, puller: p.Puller, layout: KVLayout, fingerprint: str, report, fetch, release=lambda req: None, recovery: Recovery | None = None) -> None:
        """``report()`` -> what ``/server_info`` shows beside the puller's counters; ``fetch(req, pull, pages, write_row)``
        has a committed prompt pulled, to SGLang's ``pages`` int64 [pages of the prompt] (-1: this node has it) or wherever else
        requests live on this node; ``release(req)`` takes back what that has granted; ``recovery``: of failed requests, None: they end."""
        self.puller, self.layout, self.fingerprint, self._report, self.fetch = puller, layout, fingerprint, report, fetch
        self.release, self.recovery = release, recovery
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
        return self._ask(source) if row is None else row

    def _ask(self, source: str) -> dict:
        """As ``resolve``, of the node itself."""
        address, _, dp_rank = source.rpartition("/")
        try:
            with requests.get(f"http://{address}/oasis/peer", params={"dp_rank": dp_rank, "tp_rank": self.attn_tp_rank}, timeout=RESOLVE_SECONDS,
                              stream=True) as response:
                body = response.raw.read(MAX_ROW_BYTES + 1, decode_content=True)
        except (requests.RequestException, HTTPError, OSError) as error:
            raise PeerLost(f"cannot reach the prefill node: {error}", peer=address, limit=f"{RESOLVE_SECONDS} s") from error
        if response.status_code != 200:
            raise LayoutMismatch(f"the prefill node has no peer for this rank (tp_size {self.attn_tp_size}): {body[:200].decode(errors='replace')}",
                                 field="tp_size", peer=address)
        try:
            found = decode_peer_row(body, peer=address)
        except ProtocolError as error:
            raise LayoutMismatch(f"the prefill node's description is not understood: {error.message}", field="peer row", peer=address) from error
        self.layout.require_equal(found.layout, peer=address)
        if found.fingerprint != self.fingerprint:
            raise LayoutMismatch(f"model differs: {self.fingerprint[:12]} here, {found.fingerprint[:12]} at the prefill node",
                                 field="fingerprint", peer=address)
        row = {"control": found.control}
        with self._peers_lock:
            self._peers[source] = row
        return row

    def look(self, address: str, room: int) -> Worker:
        """The prefill worker at bootstrap address ``address``, for a request in ``room``. On any thread, blocking. Raises ``PeerLost``,
        ``LayoutMismatch``."""
        if not self.try_ensure_parallel_info(address):
            raise PeerLost("the prefill node does not answer", room=room, peer=address)
        info = self.prefill_info_table.get(address)
        if info is None or info.prefill_http_port is None:
            raise PeerLost("the prefill node does not say where it takes requests", room=room, peer=address)
        rank = None if info.dp_size == 1 else room % info.dp_size
        source = f"{address}/{rank or 0}"
        url = NetworkAddress(NetworkAddress.parse(address).host, info.prefill_http_port).to_url()
        return Worker(url, source, rank, self._ask(source)["control"])

    def submit_prefill_recompute(self, kv_receiver, payload: dict) -> None:
        """Nothing to do: our receiver has asked when it was made, since SGLang admits a request here only after its commit."""

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

    def row_writer(self, index: int, room: int):
        """Function that writes the hand-over row of ``room`` into metadata slot ``index``. It raises ``LayoutMismatch``, and ``ProtocolError`` for
        another room's."""
        targets = [(ptr + index * n, n) for ptr, n in zip(self.kv_args.aux_data_ptrs, self.kv_args.aux_item_lens)]

        def write(row: tuple[bytes, ...]) -> None:
            if [len(part) for part in row] != [n for _, n in targets]:
                raise LayoutMismatch("the hand-over row differs in its fields", field="metadata_lens")
            # SGLang's last field (``MetadataBuffers.get_buf_infos``). While it is 0 SGLang takes the row for one that is still to come.
            if (said := int.from_bytes(row[-1][:8], "little")) != room:
                raise ProtocolError(f"the hand-over row of another room ({said})", room=room)
            for (address, n), part in zip(targets, row):
                ctypes.memmove(address, part, n)

        return write

    def report(self) -> dict:
        """Counters for ``/server_info``."""
        puller = self.puller
        return {"role": "decode", "totals": {**puller.totals, **(self.recovery.totals if self.recovery else {})}, "pulls": len(puller.live),
                "leases": sum(pull.state == states.SERVING for pull in list(puller.live)), "requests": dict(puller.reports),
                "tiers": {a: (link.epoch if link.error is None else "") for a, link in list(puller.links.items())}, **self._report()}
