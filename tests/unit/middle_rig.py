"""A tier in the middle: what readers say goes on to a real one, what that answers comes back as a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq

from transport import messages as m


class MiddleTier:
    """At ``control``, in front of the tier at ``real``. ``alter(reply)`` -> what its reader gets instead, a message or bytes. One thread,
    which alone touches the sockets and calls ``alter``."""

    def __init__(self, real: str, alter: Callable[[m.Reply], m.Message | bytes]):
        self.real, self.alter = real, alter
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self.control = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._behind: dict[bytes, zmq.Socket] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="middle-tier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As if it had died: nobody is told anything. Idempotent."""
        self._ending.set()
        self._thread.join(10)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        while not self._ending.is_set():
            ready = dict(poller.poll(20))
            if self._front in ready:
                reader, raw = self._front.recv_multipart()
                if reader not in self._behind:
                    self._behind[reader] = self._context.socket(zmq.DEALER)
                    self._behind[reader].connect(self.real)
                    poller.register(self._behind[reader], zmq.POLLIN)
                self._behind[reader].send(raw)
            for reader in [reader for reader, socket in self._behind.items() if socket in ready]:
                answer = self.alter(m.decode_reply(self._behind[reader].recv()))
                self._front.send_multipart([reader, answer if isinstance(answer, bytes) else m.encode(answer)])
