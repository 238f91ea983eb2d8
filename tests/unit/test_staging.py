"""Windows: every one is free, leased or in quarantine, and none is written into by two."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport.dataplane import ReadBatch, Transfer
from transport.errors import CapacityError, ConfigError
from transport.planes import incarnation, make_plane, make_server
from transport.staging import Staging


class FakeTransfer(Transfer):
    """Drains when told to; counts releases."""

    def __init__(self, drained: bool = False):
        self.nbytes, self.is_drained, self.releases = 1, drained, 0

    def poll(self) -> bool:
        return self.is_drained

    @property
    def drained(self) -> bool:
        return self.is_drained

    def release(self) -> None:
        self.releases += 1


def counts(staging: Staging) -> tuple[int, int, int]:
    return staging.free, staging.leased, staging.quarantined


def test_windows_are_disjoint_page_aligned_and_writable():
    staging = Staging(5000, 3)
    windows = [staging.acquire() for _ in range(3)]
    assert staging.acquire() is None
    for k, window in enumerate(windows):
        assert window.nbytes == 5000 and window.offset % mmap.PAGESIZE == 0
        assert window.view.ctypes.data % mmap.PAGESIZE == 0
        assert window.view.ctypes.data == staging.region.ctypes.data + window.offset
        window.view[:] = k + 1
    assert [(window.view == k + 1).all() for k, window in enumerate(windows)] == [True] * 3
    assert np.count_nonzero(staging.region) == 15000


def test_release_is_idempotent_and_a_stale_lease_frees_nothing():
    staging = Staging(4096, 1)
    first = staging.acquire()
    staging.release(first)
    staging.release(first)
    assert counts(staging) == (1, 0, 0)
    second = staging.acquire()
    staging.release(first)
    assert counts(staging) == (0, 1, 0) and second.number == first.number
    with pytest.raises(ValueError):
        staging.quarantine(first, FakeTransfer())
    assert counts(staging) == (0, 1, 0)


def test_quarantine_until_every_transfer_drained():
    staging = Staging(4096, 2)
    window, transfers = staging.acquire(), [FakeTransfer(), FakeTransfer()]
    for transfer in transfers:
        staging.quarantine(window, transfer)
    assert [transfer.releases for transfer in transfers] == [1, 1]
    staging.release(window)
    assert counts(staging) == (1, 0, 1)
    transfers[0].is_drained = True
    assert staging.sweep() == 0 and counts(staging) == (1, 0, 1)
    transfers[1].is_drained = True
    assert staging.sweep() == 1 and counts(staging) == (2, 0, 0)
    assert staging.sweep() == 0


def test_the_cap_names_itself_and_keeps_the_window_out_of_use():
    staging = Staging(4096, 4, max_quarantined=1)
    held = FakeTransfer()
    staging.quarantine(staging.acquire(), held)
    with pytest.raises(CapacityError) as error:
        staging.quarantine(staging.acquire(), FakeTransfer())
    assert error.value.limit == "1 windows"
    assert counts(staging) == (2, 0, 2)
    # One that drained meanwhile makes room for another.
    held.is_drained = True
    staging.quarantine(staging.acquire(), FakeTransfer(drained=True))
    assert counts(staging) == (3, 0, 1)


def test_close_is_idempotent_and_leases_nothing_more():
    staging = Staging(4096, 2)
    window = staging.acquire()
    staging.close()
    staging.close()
    staging.release(window)
    assert staging.acquire() is None and counts(staging) == (0, 0, 0)
    window.view[:] = 1  # whoever still holds a view holds the memory


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-1, 1)])
def test_impossible_sizes(sizes):
    with pytest.raises(ConfigError):
        Staging(*sizes)


def test_memory_that_is_not_to_be_had():
    with pytest.raises(CapacityError):
        Staging(1 << 50, 1 << 10)


def test_a_late_write_hits_the_quarantined_window_only():
    arena = np.full(8192, 7, dtype=np.uint8)
    server = make_server("loopback", incarnation("owner"), arena)
    staging = Staging(4096, 2)
    plane = make_plane("loopback", incarnation("reader"), staging.region)
    plane.connect(server.endpoint)
    server.faults.hold = True
    window = staging.acquire()
    sides = [np.array([value], dtype=np.uint64) for value in (0, window.offset, window.nbytes)]
    staging.quarantine(window, plane.read(server.endpoint.name, ReadBatch(*sides)))
    other = staging.acquire()
    assert other.number != window.number and staging.acquire() is None and staging.sweep() == 0
    server.faults.finish()
    assert (window.view == 7).all() and not other.view.any()
    assert staging.sweep() == 1 and staging.acquire().number == window.number
    plane.close()
    server.close()


class WindowStates(RuleBasedStateMachine):
    """Any order of calls, stale windows included, against a dictionary of what each window should be."""

    windows = Bundle("windows")

    @initialize(count=st.integers(1, 5), cap=st.integers(0, 5))
    def make(self, count, cap):
        self.count, self.cap = count, cap
        self.staging = Staging(100, count, max_quarantined=cap)
        self.leased: dict[int, object] = {}
        self.held: dict[int, tuple[object, list[FakeTransfer]]] = {}

    @rule(target=windows)
    def acquire(self):
        window = self.staging.acquire()
        if len(self.leased) + len(self.held) == self.count:
            assert window is None
        else:
            assert window.number not in self.leased and window.number not in self.held
            self.leased[window.number] = window
        return window

    @rule(window=windows)
    def release(self, window):
        if window is not None:
            self.staging.release(window)
            if self.leased.get(window.number) is window:
                del self.leased[window.number]

    @rule(window=windows, drained=st.booleans())
    def quarantine(self, window, drained):
        if window is None:
            return
        transfer = FakeTransfer(drained)
        if self.leased.get(window.number) is window:
            del self.leased[window.number]
            self.held[window.number] = (window, [transfer])
        elif self.held.get(window.number, (None,))[0] is window:
            self.held[window.number][1].append(transfer)
        else:
            with pytest.raises(ValueError):
                self.staging.quarantine(window, transfer)
            return
        if len(self.held) > self.cap:
            self.forget_drained()
        if len(self.held) > self.cap:
            with pytest.raises(CapacityError):
                self.staging.quarantine(window, transfer)
        else:
            self.staging.quarantine(window, transfer)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drain_one(self, data):
        _, transfers = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        data.draw(st.sampled_from(transfers)).is_drained = True

    @rule()
    def sweep(self):
        before = len(self.held)
        self.forget_drained()
        assert self.staging.sweep() == before - len(self.held)

    def forget_drained(self):
        self.held = {n: held for n, held in self.held.items() if not all(t.is_drained for t in held[1])}

    @invariant()
    def accounts_agree(self):
        assert counts(self.staging) == (
            self.count - len(self.leased) - len(self.held),
            len(self.leased),
            len(self.held),
        )


WindowStates.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWindowStates = WindowStates.TestCase
