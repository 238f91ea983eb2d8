from __future__ import annotations

import pytest
from node_rig import World


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
