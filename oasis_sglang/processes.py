"""The owner's end of the process that starts servers (``zygote.py``).

    with Processes(log=run_dir / "zygote.log") as processes:
        processes.preload()
        server = processes.serve(["--model-path", ...], env={...}, log=run_dir / "prefill.log")
        router = processes.run([sys.executable, "-m", "oasis_sglang.router", ...], log=run_dir / "router.log")
        server.stop()

``Processes`` owns the zygote and through it every server: closing it, or dying, ends them all.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

STOP_GRACE_S = 10.0
PRELOAD_TIMEOUT_S = 300.0
_REPLY_TIMEOUT_S = 30.0
_DEATH_TIMEOUT_S = 10.0
_SEGMENT = re.compile(r" /dev/shm/((?:sglang_|sgl_shm)\S+)$", re.MULTILINE)

Environment = Mapping[str, str | None]
"""Changes to the environment; None unsets a variable."""


class ProcessesError(Exception):
    """The zygote refused a command, or is gone."""


class Server:
    """One server: the leader of its own process group. Made by Processes, which reaps it."""

    __slots__ = ("_owner", "code", "log", "name", "pid")

    def __init__(self, owner: Processes, name: str, pid: int, log: Path):
        self._owner = owner
        self.name = name
        self.pid = pid
        self.log = log
        self.code: int | None = None

    def __repr__(self) -> str:
        state = "running" if self.code is None else f"exit {self.code}"
        return f"<Server {self.name} pid={self.pid} {state}>"

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the server or any process of its group is there."""
        self._owner._pump()
        return self.code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{self.name} (pid {self.pid}) still runs after {timeout:.0f} s")
            self._owner._pump(0.1)
        return self.code

    def signal(self, number: int, *, group: bool = False) -> None:
        """Signal the leader, or the whole group; nothing happens once it has exited."""
        if self.poll() is None:
            self._owner._request("signal", pid=self.pid, signal=int(number), group=group)

    def stop(self, grace: float = STOP_GRACE_S) -> int:
        """SIGTERM, then SIGKILL to the group after ``grace`` seconds. Idempotent; returns the exit code."""
        self.signal(signal.SIGTERM)
        try:
            return self.wait(grace)
        except TimeoutError:
            self.signal(signal.SIGKILL, group=True)
            return self.wait(_DEATH_TIMEOUT_S)

    def shared_segments(self) -> set[Path]:
        """SGLang's files under /dev/shm that a process of this server's group has mapped."""
        found = set()
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and os.getpgid(int(process.name)) == self.pid:
                    maps = (process / "maps").read_text()
                    found |= {Path("/dev/shm") / name for name in _SEGMENT.findall(maps)}
            except OSError:  # it ended meanwhile
                continue
        return found

    def tail(self, lines: int = 40) -> str:
        """Last lines of the log, empty when there is none."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


class Processes:
    """Starts servers through a zygote of its own. Safe to use from several threads.

    ``env`` is the environment the zygote imports SGLang in: what SGLang, torch or OpenMP read while being
    imported has to be in it; the rest can be given to each server.
    """

    def __init__(self, *, log: Path, env: Environment | None = None):
        self.log = log
        self.preloaded = False
        # For sockets and temporary files. In the system's own place, because a socket's path must be short;
        # the zygote removes it, so that it goes even when the owner is killed.
        self.scratch = Path(tempfile.mkdtemp(prefix="oasis-"))
        self._lock = threading.RLock()
        self._servers: dict[int, Server] = {}
        self._early_exits: dict[int, int] = {}  # of servers that ended before their handle was made
        self._ids = 0
        self._input = b""
        self._control, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(log, "ab") as output:
            self._zygote = subprocess.Popen(
                # -P: the directory the caller happens to be in must not become an import path.
                [
                    *(sys.executable, "-P", "-m", "oasis_sglang.zygote"),
                    *("--fd", str(theirs.fileno()), "--scratch", str(self.scratch)),
                ],
                env=_changed(os.environ, {"TMPDIR": str(self.scratch), **(env or {})}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the owner, which then stops things in order
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def preload(self, timeout: float = PRELOAD_TIMEOUT_S) -> float:
        """Import SGLang in the zygote; returns the seconds it took (about 0 when it has been done)."""
        try:
            reply = self._request("preload", timeout=timeout)
        except KeyboardInterrupt:
            self._zygote.send_signal(signal.SIGUSR1)  # else it would hear of nothing until the import is done
            raise
        if reply["threads"] != 1:
            raise ProcessesError(
                f"importing SGLang started {reply['threads'] - 1} threads: forking is unsafe"
            )
        self.preloaded = True
        return reply["seconds"]

    def serve(
        self, argv: Sequence[str], *, log: Path, env: Environment | None = None, name: str = "sglang"
    ) -> Server:
        """A SGLang server with these flags, forked from the preloaded import."""
        return self._start("fork", argv, log, env, name)

    def run(
        self, argv: Sequence[str], *, log: Path, env: Environment | None = None, name: str = ""
    ) -> Server:
        """Any command line."""
        return self._start("exec", argv, log, env, name or Path(argv[0]).name)

    def close(self) -> None:
        """Stop every server and the zygote. Idempotent."""
        with self._lock:
            self._control.close()
        try:
            self._zygote.wait((len(self._servers) + 2) * STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()  # its servers die with it
            self._zygote.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _start(self, op: str, argv: Sequence[str], log: Path, env: Environment | None, name: str) -> Server:
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            reply = self._request(op, argv=list(argv), env=dict(env or {}), log=str(log))
            server = Server(self, name, reply["pid"], log)
            if server.pid in self._early_exits:
                server.code = self._early_exits.pop(server.pid)
            else:
                self._servers[server.pid] = server
        return server

    def _request(self, op: str, timeout: float = _REPLY_TIMEOUT_S, **fields) -> dict:
        with self._lock:
            self._ids += 1
            number = self._ids
            try:
                self._control.sendall(json.dumps({"id": number, "op": op, **fields}).encode() + b"\n")
            except OSError as error:
                raise self._gone() from error
            deadline = time.monotonic() + timeout
            while True:
                for message in self._receive(deadline - time.monotonic()):
                    # One request at a time and replies come in order: whatever is not an event is the answer,
                    # or belongs to a request that an interrupt cut short.
                    if message.get("id") == number:
                        if "error" in message:
                            raise ProcessesError(f"{op}: {message['error']}")
                        return message
                if time.monotonic() >= deadline:
                    raise ProcessesError(f"no answer to {op} within {timeout:.0f} s (log: {self.log})")

    def _pump(self, timeout: float = 0.0) -> None:
        """Take in exits reported since the last call, waiting at most ``timeout`` for one."""
        with self._lock:
            self._receive(timeout)

    def _receive(self, timeout: float) -> list[dict]:
        """Replies that arrived; exits among the messages are noted with their servers."""
        try:
            poll = select.poll()  # an owner of many descriptors is too much for select()
            poll.register(self._control, select.POLLIN)
            if not poll.poll(max(0.0, timeout) * 1000):
                return []
            data = self._control.recv(65536)
        except (OSError, ValueError) as error:  # ValueError: closed by close()
            raise self._gone() from error
        if not data:
            raise self._gone()
        *lines, self._input = (self._input + data).split(b"\n")
        replies = []
        for message in map(json.loads, lines):
            if message.get("event") == "exit":
                if server := self._servers.pop(message["pid"], None):
                    server.code = message["code"]
                else:
                    self._early_exits[message["pid"]] = message["code"]
            else:
                replies.append(message)
        return replies

    def _gone(self) -> ProcessesError:
        return ProcessesError(f"the process that starts servers is gone (log: {self.log})")


def stop_together(servers: Sequence[Server]) -> None:
    """Each takes seconds to drain, so they do it at the same time. Errors surface after all were tried."""
    errors: list[BaseException] = []

    def stop(server: Server) -> None:
        try:
            server.stop()
        except (ProcessesError, TimeoutError) as error:
            errors.append(error)

    with ExitStack() as joins:
        for server in servers:
            thread = threading.Thread(target=stop, args=(server,))
            thread.start()
            joins.callback(thread.join)
    if errors:
        raise errors[0]


def _changed(base: Mapping[str, str], changes: Environment) -> dict[str, str]:
    merged = {**base, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in merged.items() if changes.get(name, value) is not None}
