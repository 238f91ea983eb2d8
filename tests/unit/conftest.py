from __future__ import annotations

import pytest
from hypothesis import settings
from node_rig import World

settings.register_profile("oasis", deadline=None)  # values are asserted, not times
settings.load_profile("oasis")


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
