"""A reader process to be killed: reads from the endpoint given (msgpack, hex), many short ranges and some long ones,
several reads in flight, for ever. Prints ``READING`` after the first."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
from owner import security
from rig import batch, wait

from transport.dataplane import Endpoint
from transport.planes import incarnation, make_plane


def main(endpoint_hex: str) -> None:
    endpoint = msgspec.msgpack.decode(bytes.fromhex(endpoint_hex), type=Endpoint)
    plane = make_plane(endpoint.kind, incarnation("reader"), np.zeros(16 << 20, dtype=np.uint8), security=security())
    plane.connect(endpoint)
    wait(plane.read(endpoint.name, batch([0], [0], [64])))
    print("READING", flush=True)
    at = np.arange(1000, dtype=np.uint64) * np.uint64(1024)
    while True:
        short = [
            plane.read(endpoint.name, batch(at * np.uint64(4), at + np.uint64(k << 20), [900] * 1000))
            for k in range(8)
        ]
        long = plane.read(endpoint.name, batch([0], [8 << 20], [8 << 20]))
        for transfer in (*short, long):
            wait(transfer)
            transfer.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
