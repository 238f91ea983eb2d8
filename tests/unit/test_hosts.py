"""What two hosts are made of, without servers. Most of it needs root and iproute2."""

import os
import shutil
import socket
import subprocess

import pytest

from oasis_sglang import hosts
from oasis_sglang.bench import meters
from oasis_sglang.hosts import HostsError, bits_per_second, bridged, two_hosts, within


def _missing(*programs):
    try:
        hosts.require(*programs)
    except HostsError as error:
        return str(error)
    return ""


REFUSAL = _missing("tc") or ""
needs_root = [pytest.mark.netns, pytest.mark.skipif(bool(REFUSAL), reason=f"NOT RUN: {REFUSAL}")]


def namespaced(function):
    for mark in needs_root:
        function = mark(function)
    return function


def made(what):
    """Skips the test where this machine refuses."""
    try:
        return what.__enter__()
    except HostsError as error:
        pytest.skip(f"NOT RUN: {error}")


def links():
    return [subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout for words in (("netns", "list"), ("-br", "link"))]


@pytest.fixture
def pair():
    context = two_hosts()
    yield made(context)
    context.__exit__(None, None, None)


def test_rates():
    assert bits_per_second("200mbit") == 200_000_000
    assert bits_per_second("1Gbit") == 1_000_000_000
    assert bits_per_second("1.5gbit") == 1_500_000_000
    for wrong in ("", "fast", "200", "0mbit", "-1mbit", "1mbit; true"):
        with pytest.raises(HostsError, match="not a rate"):
            bits_per_second(wrong)


def test_refusals_say_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    with pytest.raises(HostsError, match="need root"), two_hosts():
        pass
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    with pytest.raises(HostsError, match="no `tc`"), two_hosts("1gbit"):
        pass


@namespaced
def test_a_command_that_fails_is_told_with_its_words():
    with pytest.raises(HostsError, match=r"`ip link show dev no-such-device` failed: .*does not exist"):
        hosts.ip("link", "show", "dev", "no-such-device")


def listener(host, address):
    return within(host.namespace, lambda: socket.create_server((address, 0)))


def send(size, to):
    """Bytes from where this is called to a listener, all read there."""
    with socket.create_connection(to.getsockname(), timeout=5) as sender:
        receiver, _ = to.accept()
        with receiver:
            for _ in range(0, size, 1 << 15):  # fits a socket's buffers
                sender.sendall(b"x" * (1 << 15))
                left = 1 << 15
                while left:
                    left -= len(receiver.recv(left))


@namespaced
def test_the_data_network_counts_its_own_bytes_only_and_each_way(pair):
    size = 1 << 20
    before = meters.wire(pair)
    with listener(pair.far, pair.far.front.address) as to:
        send(size, to)
    assert meters.wire(pair) == before, "the service network is another one"
    with listener(pair.far, pair.far.wire.address) as to:
        within(pair.near.namespace, lambda: send(size, to))
    heard, said = (after - start for after, start in zip(meters.wire(pair), before))
    assert size < heard < 1.05 * size and 0 < said < 0.05 * size
    middle = meters.wire(pair)
    with listener(pair.near, pair.near.wire.address) as to:
        within(pair.far.namespace, lambda: send(size, to))
    heard, said = (after - start for after, start in zip(meters.wire(pair), middle))
    assert size < said < 1.05 * size and 0 < heard < 0.05 * size


@namespaced
def test_this_process_is_not_on_the_data_network(pair):
    with listener(pair.far, pair.far.wire.address) as to, pytest.raises(OSError):
        socket.create_connection(to.getsockname(), timeout=0.3)


@namespaced
def test_a_limit_is_put_on_both_ways_and_taken_off(pair):
    def queues():
        return [subprocess.run(["tc", "qdisc", "show", "dev", host.wire.outside], check=True, capture_output=True, text=True).stdout for host in (pair.near, pair.far)]

    try:
        pair.limit("200mbit")
    except HostsError as error:
        pytest.skip(f"NOT RUN: {error}")
    assert all("tbf" in queue and "rate 200Mbit" in queue for queue in queues())
    pair.limit("1gbit")
    assert all("rate 1Gbit" in queue and "burst 500000b" in queue for queue in queues())
    pair.limit(None)
    assert all("tbf" not in queue for queue in queues())


@namespaced
def test_a_cable_that_is_cut(pair):
    with listener(pair.far, pair.far.wire.address) as to:
        pair.far.wire.cut()
        with pytest.raises(OSError):
            within(pair.near.namespace, lambda: socket.create_connection(to.getsockname(), timeout=0.3))


@namespaced
def test_nothing_is_left_after_an_error_or_a_refusal():
    before = links()
    context = two_hosts()
    pair = made(context)
    assert links() != before
    with pytest.raises(ZeroDivisionError):
        try:
            within(pair.near.namespace, lambda: 1 / 0)
        except ZeroDivisionError as error:
            context.__exit__(type(error), error, error.__traceback__)
            raise
    assert links() == before
    with pytest.raises(HostsError, match="not a rate"), two_hosts("fast"):
        pass
    with pytest.raises(HostsError, match="failed"), bridged(["a", "a"]):  # the second cannot be made
        pass
    assert links() == before


@namespaced
def test_two_at_a_time_are_apart(pair):
    with two_hosts() as other:
        names = [host for both in (pair, other) for one in (both.near, both.far) for host in (one.namespace, one.wire.address, one.front.address)]
        assert len(set(names)) == len(names)
        with listener(other.far, other.far.front.address) as to:
            send(1 << 15, to)


@namespaced
def test_what_works_within_a_namespace_sees_its_devices():
    context = bridged(["a", "b"])
    both, own = made(context)
    try:
        assert within(both["a"].namespace, lambda: sorted(os.listdir("/sys/class/net"))) == ["lo", "wire0"]
        assert "wire0" not in os.listdir("/sys/class/net") and own.device in os.listdir("/sys/class/net")
        assert both["b"].front is both["b"].wire
        with listener(both["b"], both["b"].wire.address) as to:
            send(1 << 15, to)
            assert own.said() >= 1 << 15 > own.heard()
            assert own.address.rpartition(".")[0] == to.getsockname()[0].rpartition(".")[0]
    finally:
        context.__exit__(None, None, None)
