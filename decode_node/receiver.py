"""SGLang's receiver of one request on a decode rank.

It stays Bootstrapping until the room's manifest is there, so a request holds no KV page before prefill committed; WaitingForInput until
SGLang allocated its pages; Transferring while they fill; Success once they are verified and complete. When what it waits for is lost
and its policy is to recompute (``recovery.py``), it begins anew with another room, with the pages it has, instead of failing.
Source of the surface: ``CommonKVReceiver`` in ``sglang/srt/disaggregation/common/conn.py``, called from ``decode.py``.
"""

from __future__ import annotations

import time

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferDestination
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from decode_node import pull as states
from decode_node.lifecycle import Lifecycle
from decode_node.policy import CURABLE, on_failure
from decode_node.recompute import Order
from decode_node.recovery import put_aside, put_back
from transport.errors import ConfigError, DeadlineExceeded, OasisError, PeerLost, RoomFailed

_POLLS = {states.RESOLVING: KVPoll.Bootstrapping, states.AWAITING: KVPoll.Bootstrapping, states.READY: KVPoll.WaitingForInput,
          states.PULLING: KVPoll.Transferring, states.SERVING: KVPoll.Success, states.DONE: KVPoll.Success, states.FAILED: KVPoll.Failed}


class OasisReceiver(CommonKVReceiver):
    """Owner of its request's ``Pull``, one at a time. ``bootstrap_room`` is what SGLang registered; the request's own names the room
    that is pulled."""

    order: Order | None = None
    """The attempt to have the prompt computed again that ``pull`` comes from; None: it comes from the router's room."""
    again = False
    """Its request ran before, and has to be computed again first."""
    _given: tuple[np.ndarray, int] | None = None
    """Pages and metadata slot, once SGLang has allocated them."""
    _fetched: states.Pull | None = None
    """The pull that was told of them."""

    def __init__(self, mgr, bootstrap_addr, bootstrap_room=None):
        super().__init__(mgr, bootstrap_addr, bootstrap_room)
        # The base class keys its states by room in dictionaries, where two requests with one room would mix.
        mgr.request_status.pop(bootstrap_room, None)
        mgr.prefill_response_tracker.pop(bootstrap_room, None)
        self.bootstrap_infos = []
        self.req = None
        self.pull: states.Pull | None = None
        self.error: OasisError | None = None
        self.began = time.monotonic()

    def belongs_to(self, req, is_rebootstrap: bool) -> None:
        """Called once, with SGLang's request. ``is_rebootstrap``: it ran before, and its KV has to be computed again."""
        self.req = req
        life = getattr(req, "oasis", None)
        if life is None:
            life = req.oasis = Lifecycle(req.rid, len(req.origin_input_ids))
        recovery = self.kv_mgr.recovery
        if recovery is None:
            return
        try:
            life.on_failure = on_failure(req.sampling_params.custom_params, recovery.limits.on_failure)
        except ConfigError as error:
            self.error, self.conclude_state = error, KVPoll.Failed
            return
        self.again = is_rebootstrap

    def init(self, prefill_dp_rank: int):
        if self.conclude_state is not None or self.again:
            return
        refusal = self.kv_mgr.refusal(self.bootstrap_addr)
        if refusal is not None:
            self.error, self.conclude_state = refusal, KVPoll.Failed
            return
        self._adopt(self.kv_mgr.puller.pull(self.bootstrap_room, f"{self.bootstrap_addr}/{prefill_dp_rank}", rid=self.req.rid if self.req else ""))

    def _adopt(self, pull: states.Pull) -> None:
        self.pull = pull
        if self.req is not None:
            self.req.oasis.pulls.append(pull)

    def send_metadata(self, kv_indices, aux_index=None, state_indices=None, decode_prefix_len=None,
                      destination=KVTransferDestination.DEVICE, **_):
        here, rest = divmod(decode_prefix_len or 0, self.kv_mgr.kv_args.page_size)
        if rest or destination != KVTransferDestination.DEVICE:
            # Both come from options that are refused at start; whoever gets round that loses this request, not the server.
            self._refuse(ConfigError("Oasis pulls whole pages into the KV pool", room=self.bootstrap_room))
            return
        self._given = np.concatenate([np.full(here, -1), kv_indices]).astype(np.int64), aux_index
        if self.order is None:  # else its pull may be a new one that has nothing to offer yet
            self._fetch()
        self.init_time = time.time()

    def _fetch(self) -> None:
        pages, index = self._given
        self._fetched = self.pull
        try:
            self.kv_mgr.fetch(self.req, self.pull, pages, self.kv_mgr.row_writer(index, self.pull.room))
        except OasisError as error:  # options of this request, or more than this node can hold
            self._refuse(error)

    def _refuse(self, error: OasisError) -> None:
        self.error = error
        self._cancel(str(error))
        self.conclude_state = KVPoll.Failed

    def poll(self) -> int:
        if self.conclude_state is not None:
            return self.conclude_state
        if self.again and self.order is None:  # SGLang has dealt with the step that was under way when the request left the batch
            put_aside(self.req)
            self.order = self.kv_mgr.recovery.order(self.req, self.bootstrap_addr, {self.bootstrap_addr})
        state = self._state()
        if state == KVPoll.Failed and self._again():
            return KVPoll.Bootstrapping
        if state in (KVPoll.Success, KVPoll.Failed):
            self.conclude_state = state
            if state == KVPoll.Success and self.order is not None:
                self.kv_mgr.recovery.went_on(self.req)
        return state

    def _state(self) -> int:
        if self.order is not None and self.pull is None:
            if self.order.pull is None:
                return KVPoll.Failed if self._overdue() else KVPoll.Bootstrapping
            self._adopt(self.order.pull)
        if self.pull is None:
            return KVPoll.Bootstrapping
        state = _POLLS[self.pull.state]
        if self.order is not None and state not in (KVPoll.Success, KVPoll.Failed) and self._overdue():
            return KVPoll.Failed
        if state == KVPoll.WaitingForInput and self._given is not None:
            if self._fetched is not self.pull:
                self._fetch()
            return KVPoll.Failed if self.conclude_state == KVPoll.Failed else KVPoll.Transferring
        return state

    def _overdue(self) -> bool:
        """Whether the attempt has failed by itself, or has taken too long."""
        if self.order.error is None and time.monotonic() >= self.order.deadline:
            self.order.error = DeadlineExceeded("it was not computed again in time", room=self.order.room,
                                                limit=f"recompute_seconds={self.kv_mgr.recovery.limits.seconds:g}")
        return self.order.error is not None

    def _again(self) -> bool:
        """Begins anew what has failed, if its policy, its error and its bounds allow that."""
        if self.conclude_state is not None or self.kv_mgr.recovery is None or self.req is None:
            return False
        recovery, error = self.kv_mgr.recovery, self._failure()
        # Whoever has waited for a commit as long as it may has used up its time, and prefill has too much to do as it is.
        own = float("inf") if self._fetched is not None or self.order is not None else self.began + self.kv_mgr.puller.limits.await_seconds
        if not recovery.verdict(self.req, error, own).recompute:
            return False
        self._cancel("its prompt is computed again")
        if self._fetched is not None:
            self.kv_mgr.release(self.req)
        seen = (self.order.seen if self.order else set()) | ({self.pull.source.rpartition("/")[0]} if self.pull else set())
        self.pull = self._fetched = None
        self.order = recovery.order(self.req, self.bootstrap_addr, seen)
        return True

    def _failure(self) -> OasisError | None:
        return self.error or (self.order.error if self.order else None) or (self.pull.error if self.pull else None)

    def clear(self) -> None:
        self._cancel("the request was cleared")
        self.kv_mgr.addr_to_rooms_tracker[self.bootstrap_addr].discard(self.bootstrap_room)

    def abort(self) -> None:
        if self.conclude_state != KVPoll.Failed:
            before_its_peer = PeerLost("aborted before its prefill node answered", room=self.bootstrap_room, peer=self.bootstrap_addr)
            aborted = RoomFailed("aborted on the decode node", room=self.bootstrap_room)
            self.error = self.error or (before_its_peer if self.pull is None and self.order is None and not self.again else aborted)
        self._cancel("the request was aborted on the decode node")
        self.conclude_state = KVPoll.Failed

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Nothing to tell: after ``cancel`` no one writes to this request's pages, and the tier knows the lease."""

    def _cancel(self, reason: str) -> None:
        pulls = {self.pull, self.order.leave() if self.order is not None else None}
        for pull in pulls - {None}:
            self.kv_mgr.puller.cancel(pull, reason)

    def failure_exception(self):
        self.conclude_state = KVPoll.Failed
        self._cancel("another rank failed")
        self.error = error = self._failure() or RoomFailed("failed on another rank", room=self.bootstrap_room)
        if type(error) in CURABLE:
            error.retryable = True  # what is lost is one place, or one copy
        refused = ""
        if self.req is not None:
            life = self.req.oasis
            life.error = error
            put_back(self.req)
            refused = f" (not computed again: {life.refused})" if life.refused else ""
        raise KVTransferError(self.bootstrap_room, f"{error.code}: {error}{refused}")
