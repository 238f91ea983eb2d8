"""A process that starts the servers of one machine and never outlives its owner.

It is told what to do over a socket, one JSON object per line (see ``processes.py`` for the other end):

    {"id": 1, "op": "preload"}                                  -> {"id": 1, "seconds": 17.2, "threads": 1}
    {"id": 2, "op": "fork", "argv": [...], "env": {...}, "log": "..."}   -> {"id": 2, "pid": 4711}
    {"id": 3, "op": "exec", "argv": [...], "env": {...}, "log": "..."}   -> {"id": 3, "pid": 4712}
    {"id": 4, "op": "signal", "pid": 4711, "signal": 15, "group": false} -> {"id": 4}
    anything that fails                                         -> {"id": 5, "error": "..."}
    SIGUSR1 while it preloads: gives that up, so that commands are heard again
    whenever a server and all of its group are gone             -> {"event": "exit", "pid": 4711, "code": 0}

``fork`` runs a SGLang server from the import that ``preload`` paid for: importing SGLang takes 15 to 25 s of CPU,
a forked server is ready seconds after it was asked for. That is for machines without a GPU: CUDA does not
survive a fork. ``exec`` starts any command line.

Ownership: every server is the leader of its own session and belongs to this process, which alone signals and
reaps it. When the socket closes, however its owner ended, all servers are stopped, last started first. A server
dies with this process even when that is killed. This process has one thread, and runs no torch operation before
it forks: both would make a fork unsafe.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

STOP_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)

_PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.disaggregation.decode",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.nixl.conn",
    "sglang.srt.models.llama",
)


class _PreloadCancelled(BaseException):
    """Not an Exception, so that no module takes it for a failed optional import and goes on."""


class Zygote:
    """The command loop. ``run`` returns in the zygote with None, in a forked child with the server to run."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._input = b""
        self._servers: dict[int, None] = {}  # pids of running session leaders, in start order
        self._ending: dict[int, int] = {}  # leader's pid -> its exit code, while its group still has members
        self._preloaded = False
        self._preloading = False
        self._open = True

    def run(self) -> Callable[[], None] | None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a dead server leaves behind comes to us
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._close)
        signal.signal(signal.SIGUSR1, self._cancel_preload)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        poll = select.poll()  # the owner's descriptors keep their numbers here, and those may be too large for select()
        for source in (self._control, wake_read):
            poll.register(source, select.POLLIN)
        while self._open:
            ready = [fd for fd, _ in poll.poll(20 if self._ending else None)]
            if wake_read in ready:
                _drain(wake_read)
            self._reap()
            if self._control.fileno() in ready:
                for command in self._read_commands():
                    job = self._handle(command)
                    if job is not None:
                        os.close(wake_read)
                        os.close(wake_write)
                        return job
        self._stop_all()
        return None

    def _close(self, *_) -> None:
        self._open = False

    def _cancel_preload(self, *_) -> None:
        if self._preloading:
            raise _PreloadCancelled("cancelled")

    def _read_commands(self) -> list[dict]:
        try:
            data = self._control.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self._close()
            return []
        *lines, self._input = (self._input + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def _send(self, message: dict) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            self._close()

    def _handle(self, command: dict) -> Callable[[], None] | None:
        reply: dict = {"id": command.get("id")}
        try:
            match command["op"]:
                case "preload":
                    reply |= self._preload()
                case "fork":
                    job = self._fork(command, reply)
                    if job is not None:
                        return job
                case "exec":
                    reply["pid"] = self._exec(command)
                case "signal":
                    self._signal(command["pid"], command["signal"], command.get("group", False))
                case other:
                    raise ValueError(f"unknown op {other!r}")
        except (Exception, _PreloadCancelled) as error:  # noqa: BLE001  the caller's to judge; the loop goes on
            reply["error"] = f"{type(error).__name__}: {error}"
        self._send(reply)
        return None

    def _preload(self) -> dict:
        start = time.monotonic()
        if not self._preloaded:
            self._preloading = True
            try:
                _import_sglang()
            finally:
                self._preloading = False
            self._preloaded = True
        return {"seconds": time.monotonic() - start, "threads": len(os.listdir("/proc/self/task"))}

    def _fork(self, command: dict, reply: dict) -> Callable[[], None] | None:
        if not self._preloaded:
            raise RuntimeError("fork before preload")
        log = _open_log(command["log"])
        pid = os.fork()
        if pid:
            os.close(log)
            self._servers[pid] = None
            reply["pid"] = pid
            return None
        _become_server(log)
        self._control.close()
        _update_environment(command["env"])
        return lambda: _serve(command["argv"])

    def _exec(self, command: dict) -> int:
        environment = dict(os.environ)
        for name, value in command["env"].items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        log = _open_log(command["log"])
        try:
            process = subprocess.Popen(
                command["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_before_exec,  # noqa: PLW1509  this process has one thread
            )
        finally:
            os.close(log)
        process.returncode = 0  # reaped by _reap, not by subprocess
        self._servers[process.pid] = None
        return process.pid

    def _signal(self, pid: int, number: int, group: bool) -> None:
        # Only what has not been reaped: its pid cannot have been given to anyone else.
        if pid in self._servers:
            (os.killpg if group else os.kill)(pid, number)

    def _reap(self) -> None:
        """Collect the dead. A server's group is killed while its leader is a zombie and still holds the id."""
        while True:
            try:
                status = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                status = None
            if status is None:
                break
            pid = status.si_pid
            if pid in self._servers:
                os.killpg(pid, signal.SIGKILL)
                del self._servers[pid]
                exited = status.si_code == os.CLD_EXITED
                self._ending[pid] = status.si_status if exited else -status.si_status
            os.waitpid(pid, 0)
        for pid in [pid for pid in self._ending if not _group_exists(pid)]:
            self._send({"event": "exit", "pid": pid, "code": self._ending.pop(pid)})

    def _stop_all(self) -> None:
        for pid in reversed(list(self._servers)):
            os.kill(pid, signal.SIGTERM)
            # One after the other: whoever started last depends on the earlier ones.
            self._reap_until(lambda pid=pid: pid not in self._servers, STOP_GRACE_S)
            if pid in self._servers:
                os.killpg(pid, signal.SIGKILL)
        self._reap_until(lambda: not self._servers and not self._ending, STOP_GRACE_S)

    def _reap_until(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._reap()
        while not done() and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()


def _import_sglang() -> None:
    """Pay for the imports. Plugins are loaded after the fork, so that each server reads its own settings.

    prometheus_client chooses its multi-process mode while it is imported, from the presence of a variable that
    SGLang would set too late here. Nothing is written there: ``_serve`` gives each server a directory.
    """
    import importlib

    os.environ["PROMETHEUS_MULTIPROC_DIR"] = os.devnull
    for name in _PRELOADED:
        importlib.import_module(name)


def _serve(argv: list[str]) -> None:
    """What ``python -m sglang.launch_server`` does, with children forked instead of spawned."""
    import multiprocessing

    import setproctitle
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import engine
    from sglang.srt.managers import load_snapshot
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    setproctitle.setproctitle("oasis: sglang " + " ".join(argv))
    load_plugins()
    if os.environ["PROMETHEUS_MULTIPROC_DIR"] == os.devnull:
        metrics = tempfile.TemporaryDirectory(prefix="oasis-metrics-")
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics.name
    set_environment = engine._set_envs_and_config

    def set_environment_and_fork(server_args):
        set_environment(server_args)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = set_environment_and_fork
    # SGLang never removes these files from /dev/shm. Beside its sockets they go with the temporary directory.
    load_snapshot.shm_path_for = lambda name: f"{tempfile.gettempdir()}/loads-{name}.shm"
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _become_server(log: int) -> None:
    """In a forked child: own session, own output, no handler of the zygote's."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


def _before_exec() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _update_environment(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _open_log(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _group_exists(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 512):
            pass
    except BlockingIOError:
        pass


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fd", type=int, required=True, help="the socket commands come from")
    parser.add_argument("--scratch", required=True, help="directory of temporary files, removed at the end")
    args = parser.parse_args()
    job = Zygote(socket.socket(fileno=args.fd)).run()
    if job is not None:
        # Here the stack is that of a fresh process, so the server exits through the interpreter as usual.
        sys.argv[:] = ["sglang"]
        tempfile.tempdir = None  # chosen anew, from the server's own environment
        job()
        return
    shutil.rmtree(args.scratch, ignore_errors=True)
    os._exit(0)  # tearing SGLang's modules down takes seconds


if __name__ == "__main__":
    main()
