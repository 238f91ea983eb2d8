"""The process that starts servers: what it promises about pids, groups, logs, exits and its own end.

``fork`` needs SGLang and is exercised by the end-to-end tests; everything else is here, with small commands.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from oasis_sglang.processes import Processes, ProcessesError


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.02)


@pytest.fixture
def processes(tmp_path):
    with Processes(log=tmp_path / "zygote.log") as started:
        yield started


def python(code):
    return [sys.executable, "-c", code]


def test_runs_a_command_with_its_environment_log_and_session(processes, tmp_path, monkeypatch):
    code = "import os; print(os.environ.get('A'), os.environ.get('HOME'), os.getsid(0) == os.getpid())"
    server = processes.run(python(code), log=tmp_path / "a.log", env={"A": "1", "HOME": None})
    assert server.wait(10) == 0
    assert server.tail() == "1 None True"


def test_an_owner_with_many_descriptors(many_descriptors, tmp_path):
    with Processes(log=tmp_path / "zygote.log") as processes:
        assert processes._control.fileno() > 1024
        server = processes.run(python("print('ran')"), log=tmp_path / "a.log")
        assert server.wait(10) == 0 and server.tail() == "ran"


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_reports_how_a_command_ended(processes, tmp_path, code, expected):
    assert processes.run(python(code), log=tmp_path / "a.log").wait(10) == expected


def test_many_quick_ends_are_all_reported(processes, tmp_path):
    servers = [processes.run(["/bin/true"], log=tmp_path / "a.log") for _ in range(50)]
    assert [server.wait(10) for server in servers] == [0] * 50


def test_a_command_that_cannot_start_is_an_error_and_does_no_harm(processes, tmp_path):
    with pytest.raises(ProcessesError, match="FileNotFoundError"):
        processes.run([str(tmp_path / "absent")], log=tmp_path / "a.log")
    assert processes.run(["/bin/true"], log=tmp_path / "a.log").wait(10) == 0


def test_fork_before_preload_is_refused(processes, tmp_path):
    with pytest.raises(ProcessesError, match="before preload"):
        processes.serve([], log=tmp_path / "a.log")


def test_stop_escalates_to_sigkill(processes, tmp_path):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    server = processes.run(python(code), log=tmp_path / "a.log")
    until(lambda: server.tail() == "up")
    assert server.stop(grace=0.3) == -signal.SIGKILL
    assert server.stop() == -signal.SIGKILL


def test_children_of_a_dead_server_are_killed_before_its_exit_is_reported(processes, tmp_path):
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    server = processes.run(python(code), log=tmp_path / "a.log")
    until(lambda: server.tail())
    child = int(server.tail())
    assert alive(child)
    server.signal(signal.SIGKILL)
    assert server.wait(10) == -signal.SIGKILL
    assert not alive(child)


def test_closing_stops_everything_and_removes_the_scratch_directory(tmp_path):
    with Processes(log=tmp_path / "zygote.log") as processes:
        servers = [processes.run(["sleep", "60"], log=tmp_path / "a.log") for _ in range(3)]
        (processes.scratch / "file").write_text("x")
        pids = [server.pid for server in servers]
    assert not any(map(alive, pids))
    assert not processes.scratch.exists()
    with pytest.raises(ProcessesError, match="gone"):
        processes.run(["/bin/true"], log=tmp_path / "a.log")
    processes.close()


OWNER = """
import sys, time
from pathlib import Path
from oasis_sglang.processes import Processes
processes = Processes(log=Path(sys.argv[1]) / "zygote.log")
server = processes.run(["sleep", "60"], log=Path(sys.argv[1]) / "a.log")
print(server.pid, processes._zygote.pid, processes.scratch, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["owner", "zygote"])
def test_nothing_outlives_a_killed_owner_or_zygote(tmp_path, victim):
    owner = subprocess.Popen([*python(OWNER), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        server, zygote, scratch = owner.stdout.readline().split()
        os.kill(owner.pid if victim == "owner" else int(zygote), signal.SIGKILL)
        until(lambda: not alive(int(server)), 15)
        if victim == "owner":
            until(lambda: not os.path.exists(scratch) and not alive(int(zygote)), 15)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        shutil.rmtree(scratch, ignore_errors=True)  # with both killed, nobody is left to do it
