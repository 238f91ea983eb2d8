"""Meters of a run, on processes of their own."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from oasis_sglang.bench.meters import Memory, client_concurrency, in_memory, mapped_bytes, resident, tree

HOLDS = """
import sys, time, pathlib
parts = []
for line in sys.stdin:
    parts.append(b"x" * int(line))
    print("held", flush=True)
"""
MIB = 1 << 20


@pytest.fixture
def holder():
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def hold(process, size):
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"


def test_a_memory_file_is_found_by_its_name_and_counted_as_it_is_touched():
    fd, other = os.memfd_create("oasis-test-cache"), os.memfd_create("oasis-test-cache-2")
    try:
        for one in (fd, other):
            os.ftruncate(one, 1 << 22)
        with mmap.mmap(fd, 1 << 22) as memory, mmap.mmap(other, 1 << 22) as more:
            more[:] = bytes(1 << 22)
            assert mapped_bytes(os.getpid(), "oasis-test-cache") == 0
            memory[: 3 << 20] = b"x" * (3 << 20)
            assert mapped_bytes(os.getpid(), "oasis-test-cache") == 3 << 20
        assert mapped_bytes(os.getpid(), "oasis-test-cache") == 0
    finally:
        os.close(fd)
        os.close(other)
    assert mapped_bytes(1 << 22, "oasis-test-cache") == 0, "no such process"


def test_the_peak_above_the_start_is_what_was_allocated(holder):
    hold(holder, 1)
    with Memory({"decode": [holder.pid], "tier": []}, period=0.02) as memory:
        hold(holder, 64 * MIB)
    assert 64 * MIB <= memory.above_start("decode") < 70 * MIB
    assert memory.start["decode"] > MIB
    assert memory.peak["tier"] == 0


def test_a_peak_that_has_passed_is_kept():
    code = "import sys; sys.stdin.readline(); parts = b'x' * (64 << 20); print(flush=True); sys.stdin.readline(); del parts; print(flush=True); sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        def next_step():
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        with Memory({"decode": [process.pid]}, period=0.01) as memory:
            next_step()
            taken = memory.samples
            while memory.samples < taken + 2:
                time.sleep(0.01)
            next_step()
            assert resident(process.pid).private < memory.start["decode"] + 32 * MIB
        process.kill()
    assert memory.above_start("decode") >= 64 * MIB


FORKS = f"""
import mmap, os, sys
fd = os.memfd_create("oasis-test-shared")
os.ftruncate(fd, {64 * MIB})
memory = mmap.mmap(fd, {64 * MIB})
memory.write(b"x" * {64 * MIB})
child = os.fork()
if child == 0:
    assert memory[{48 * MIB}:] == b"x" * {16 * MIB}
    own = b"y" * {32 * MIB}
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
os.waitpid(child, 0)
"""


def test_what_processes_share_counts_once_and_what_each_has_counts():
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert tree([parent.pid]) == {parent.pid, child}
        assert resident(parent.pid).shared == 64 * MIB
        assert 16 * MIB <= resident(child).shared < 64 * MIB
        assert 32 * MIB <= resident(child).private < 96 * MIB
        both, alone = in_memory([parent.pid, child]), in_memory([parent.pid])
        parent.stdin.close()
    assert alone >= 64 * MIB
    assert 32 * MIB <= both - alone < 96 * MIB, "the file is not counted again"


def test_a_process_that_vanishes_counts_nothing(holder):
    hold(holder, 32 * MIB)
    with Memory({"decode": [holder.pid]}, period=0.01) as memory:
        holder.kill()
        holder.wait()
        taken = memory.samples
        while memory.samples < taken + 3:
            time.sleep(0.01)
    assert resident(holder.pid) == (0, 0)
    assert tree([holder.pid]) == set()
    assert memory.peak == memory.start


def test_a_zombie_counts_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert resident(process.pid) == (0, 0)
    process.wait()


@pytest.mark.parametrize(("intervals", "most"), [
    ([], 0),
    ([(1.0, 1.0)], 1),
    ([(0.0, 1.0), (2.0, 3.0)], 1),
    ([(0.0, 1.0), (1.0, 2.0)], 2),
    ([(0.0, 10.0), (1.0, 2.0), (3.0, 9.0), (4.0, 5.0), (6.0, 7.0)], 3),
    ([(5.0, 6.0), (0.0, 9.0), (5.5, 5.5)], 3),
])
def test_client_concurrency(intervals, most):
    assert client_concurrency(intervals) == most
