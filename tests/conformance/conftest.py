"""Fixtures of the conformance suite: every test that takes ``rig`` runs once per data plane."""

from __future__ import annotations

import pytest
from rig import ARENA, PLANES, SMALL, Rig


@pytest.fixture(scope="module", params=PLANES)
def rig(request):
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def shared(rig):
    """An owner and a reader for the cases that leave both as they were: (owner, plane, region)."""
    owner = rig.owner(seed=7, size=ARENA)
    plane, region = rig.reader(owner, size=ARENA)
    return owner, plane, region


@pytest.fixture
def fresh(rig, shared):
    """The rig for a case that breaks its owner; what the case opens is closed after it, the shared pair is not."""
    kept = rig.opened
    yield rig
    rig.close_all(keep=kept)


@pytest.fixture(scope="module")
def small(rig, shared):
    """The same over arenas that a plain Python oracle can handle."""
    owner = rig.owner(seed=41, size=SMALL)
    return owner, *rig.reader(owner, size=SMALL)
