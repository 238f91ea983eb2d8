from __future__ import annotations

import fcntl
import gc
import resource
import socket

import pytest
from hypothesis import settings
from node_rig import World, descriptors

settings.register_profile("oasis", deadline=None)  # values are asserted, not times
settings.load_profile("oasis")


KEPT = 8
"""Pieces of shared memory that the fixtures of a module's last test still refer to at its end."""


@pytest.fixture(autouse=True, scope="module")
def nothing_stays_open():
    """No module leaves descriptors behind: there are more tests than a process may have of them."""
    before = descriptors()
    yield
    if descriptors() - before:
        gc.collect()  # tiers and nodes are cycles, and the views of an arena keep it
    left = descriptors() - before
    shared = sum(left.pop(kind) for kind in list(left) if kind.startswith("/memfd:"))
    assert not left and shared <= KEPT, f"left open: {dict(left)} and {shared} pieces of shared memory"


@pytest.fixture
def many_descriptors(monkeypatch):
    """Pairs of sockets get numbers that select() does not take, as in a process that has many open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this process may have {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    make = socket.socketpair

    def high(*args, **kwargs):
        pair = make(*args, **kwargs)
        moved = [socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD_CLOEXEC, 2048)) for one in pair]
        for one in pair:
            one.close()
        return tuple(moved)

    monkeypatch.setattr(socket, "socketpair", high)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def worlds(tmp_path):
    """``worlds(tier={}, prefill={}, decode={})`` makes a ``World``; all are closed at the end."""
    made = []

    def make(**parts) -> World:
        made.append(World(tmp_path, **parts))
        return made[-1]

    yield make
    for world in reversed(made):
        world.close()


@pytest.fixture
def nodes(tmp_path):
    """``nodes(**sizes)`` makes a decode ``Node`` with a tier and a prefill rank; all are closed at the end."""
    from sparse_rig import Node  # imports SGLang

    made = []
    yield lambda **sizes: made.append(Node(tmp_path, **sizes)) or made[-1]
    for node in made:
        node.close()
