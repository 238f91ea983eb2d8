"""The doctor's self-test transfer, and the children that it and the probes run in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import msgspec
import numpy as np
import psutil
import pytest
from node_rig import until

from oasis_sglang.config import ACTIVE_ENV
from oasis_sglang.doctor import transfer
from oasis_sglang.doctor.children import Child
from oasis_sglang.doctor.transfer import LAYOUT, RECORDS, Transferred
from transport.errors import DeadlineExceeded, IntegrityError, PeerLost
from transport.planes import incarnation, make_plane, make_server

NBYTES = RECORDS * (LAYOUT.payload_bytes + LAYOUT.index_bytes)


@pytest.mark.parametrize("plane", ["nixl", "zmq"])
def test_records_cross_each_data_plane(plane):
    done = Child("oasis_sglang.doctor.transfer", plane).result(Transferred, 60)
    assert (done.error, done.records, done.nbytes) == ("", 32, 4_272_384) and 0 < done.seconds < 60


def test_the_records_are_real_ones():
    """Of several megabytes, scattered, each with its index; not the same bytes twice."""
    arenas = [np.zeros(transfer.ARENA_BYTES, np.uint8) for _ in range(2)]
    first, second = (transfer.write(arena, seed) for arena, seed in zip(arenas, (1, 2)))
    assert NBYTES == 4_272_384 and len(set(first.records.tolist())) == RECORDS and (np.diff(first.records) != 1).any()
    assert not np.array_equal(first.roots, second.roots) and len(set(first.roots.tolist())) == RECORDS
    assert np.count_nonzero(arenas[0]) > 0.99 * NBYTES


class Loop:
    """Both ends in this process."""

    def __init__(self):
        self.arena = np.zeros(transfer.ARENA_BYTES, np.uint8)
        self.written = transfer.write(self.arena, 7)
        self.server = make_server("loopback", incarnation("doctor"), self.arena)
        self.region = np.zeros(NBYTES, np.uint8)
        self.plane = make_plane("loopback", incarnation("reader"), self.region)

    def read(self, seconds: float = 5.0) -> int:
        return transfer.read(self.plane, self.region, self.server.endpoint, self.written, seconds)

    def close(self) -> None:
        self.plane.close()
        self.server.close()


@pytest.fixture
def loop():
    made = Loop()
    yield made
    made.close()


def test_what_arrives_is_what_was_written(loop):
    assert loop.read() == NBYTES
    payloads, _ = loop.written.geometry.rows(loop.arena)
    for place, record in enumerate(loop.written.records.tolist()):
        at = place * LAYOUT.payload_bytes
        assert np.array_equal(loop.region[at : at + LAYOUT.payload_bytes], payloads[record, : LAYOUT.payload_bytes])


@pytest.mark.parametrize("part", ["payload", "digest", "summary"])
def test_one_wrong_byte_is_found(loop, part):
    payloads, index = loop.written.geometry.rows(loop.arena)
    record = int(loop.written.records[RECORDS // 2])
    rows, at = {"payload": (payloads, LAYOUT.payload_bytes - 1), "digest": (index, 0), "summary": (index, LAYOUT.pieces * 8)}[part]
    rows[record, at] ^= 1
    with pytest.raises(IntegrityError, match=f"1 of {RECORDS} record.* first record {record}"):
        loop.read()


def test_a_read_that_does_not_end_is_given_up(loop):
    loop.server.faults.hold = True
    with pytest.raises(DeadlineExceeded, match="the read did not end"):
        loop.read(seconds=0.05)


def test_a_read_may_take_its_time(loop, monkeypatch):
    loop.server.faults.hold = True
    monkeypatch.setattr(time, "sleep", lambda _: loop.server.faults.finish())
    assert loop.read(seconds=60) == NBYTES


def test_a_server_that_is_gone(loop):
    loop.server.faults.drop_peer()
    with pytest.raises(PeerLost):
        loop.read()


def test_a_failure_becomes_its_report():
    done = Child("oasis_sglang.doctor.transfer", "carrier-pigeon").result(Transferred, 60)
    assert done.records == 0 and "unknown data plane 'carrier-pigeon'" in done.error


# -- children -----------------------------------------------------------------------------------------------------


class Said(msgspec.Struct, frozen=True):
    value: int = 0
    error: str = ""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def child(tmp_path, monkeypatch):
    """``child(program)`` starts a program; its standard imports are done."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    started = []

    def start(program: str) -> Child:
        name = f"doctors_child_{len(started)}"
        (tmp_path / f"{name}.py").write_text("import os, subprocess, sys, time\n" + textwrap.dedent(program))
        started.append(Child(name))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_child_says_what_it_found_and_its_libraries_may_print(child):
    found = child("""
        from oasis_sglang.doctor import children
        import msgspec
        class Said(msgspec.Struct):
            value: int
        pipe = children.quiet()
        print("a library says hello", flush=True)
        os.write(1, b"and its native part too")
        children.speak(Said(4), pipe)
    """).result(Said, 60)
    assert found == Said(4)


@pytest.mark.parametrize("program, error", [
    ("os.abort()", "it was ended by SIGABRT"),
    ("print('not JSON')", "it ended with status 0"),
    ("sys.stderr.write('first\\n  last words \\n\\n'); sys.exit(3)", "it ended with status 3: last words"),
    ("import no_such_module", "it ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("""print('{"value": "no number"}')""", "it ended with status 0"),
])
def test_a_child_that_fails_is_a_finding(child, program, error):
    assert child(program).result(Said, 60) == Said(error=error)


def test_a_child_that_hangs_ends_with_all_that_it_started(child, tmp_path):
    pids = tmp_path / "pids"
    hanging = child(f"""
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{other.pid}}\\n")
        time.sleep(600)
    """)
    until(lambda: pids.exists() and pids.read_text().endswith("\n"), "it hangs", 60)
    assert hanging.result(Said, 0.1) == Said(error="it did not end within 0.1 s")
    until(lambda: all(map(gone, map(int, pids.read_text().split()))), "both are gone")
    hanging.end()


def test_a_child_ends_with_a_doctor_that_is_killed(child, tmp_path):
    pid = tmp_path / "pid"
    (tmp_path / "doctors_orphan.py").write_text(
        f"import os, time\nfrom oasis_sglang.doctor import children\nchildren.quiet()\nopen({str(pid)!r}, 'w').write(f'{{os.getpid()}}\\n')\ntime.sleep(600)\n")
    doctor = subprocess.Popen([sys.executable, "-c", "import time\nfrom oasis_sglang.doctor.children import Child\nChild('doctors_orphan')\ntime.sleep(600)"])
    try:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"), "it runs", 60)
    finally:
        doctor.kill()
        doctor.wait()
    until(lambda: gone(int(pid.read_text())), "it is gone")


def test_a_deadline_counts_from_the_start(child):
    slow = child("time.sleep(600)")
    slow._began -= 3600
    began = time.monotonic()
    assert slow.result(Said, 3600).error == "it did not end within 3600 s" and time.monotonic() - began < 60


def test_a_child_is_no_process_of_a_server(child, monkeypatch):
    """There, seams that have drifted would end it before it could tell."""
    monkeypatch.setenv(ACTIVE_ENV, "1")
    assert child(f"print('{{\"value\": %d}}' % ({ACTIVE_ENV!r} in os.environ))").result(Said, 60) == Said(0)
