"""The hand-over row: what SGLang's slot gets of it, and what it never gets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from decode_node.manager import OasisDecodeManager
from transport.errors import LayoutMismatch, ProtocolError

ROOM = 2**62 + 5


@pytest.fixture
def slots():
    """Three slots of two fields: first token and room."""
    return np.full((3, 4), -1, np.int32), np.full((3, 8), -1, np.int64)


def writer(slots, index: int, room: int):
    manager = OasisDecodeManager.__new__(OasisDecodeManager)
    manager.kv_args = SimpleNamespace(aux_data_ptrs=[field.ctypes.data for field in slots], aux_item_lens=[field[0].nbytes for field in slots])
    return manager.row_writer(index, room)


def row_of(room: int) -> tuple[bytes, bytes]:
    return np.array([9, 8, 7, 6], np.int32).tobytes(), np.array([room, *range(7)], np.int64).tobytes()


def test_a_row_goes_to_its_slot(slots):
    writer(slots, 1, ROOM)(row_of(ROOM))
    assert slots[0][1].tolist() == [9, 8, 7, 6] and slots[1][1, 0] == ROOM
    assert all((field[[0, 2]] == -1).all() for field in slots)


@pytest.mark.parametrize("room", [0, 1, ROOM + 1, -1])
def test_another_rooms_row_is_refused(slots, room):
    """SGLang waits for ever for a row of room 0: to it that is one still to come."""
    with pytest.raises(ProtocolError, match="another room") as error:
        writer(slots, 1, ROOM)(row_of(room))
    assert error.value.room == ROOM and all((field == -1).all() for field in slots)


@pytest.mark.parametrize("row", [(), row_of(ROOM)[:1], (bytes(12), row_of(ROOM)[1]), (row_of(ROOM)[0], b""), (*row_of(ROOM), b"")])
def test_a_row_of_other_fields_is_refused(slots, row):
    with pytest.raises(LayoutMismatch, match="hand-over row") as error:
        writer(slots, 1, ROOM)(row)
    assert error.value.field == "metadata_lens" and all((field == -1).all() for field in slots)
