"""One stack of the 4-layer model for all chaos tests: each starts from a stack that is up and holds nothing."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from chaos_rig import BUDGET, DRAIN, GRACE, LEASE, OUTPUT, RESERVE, SILENCE, TAIL, answered, at_rest, inventory, pair

from oasis_sglang import models
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.stack import Stack, StackSpec, import_environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


_ends = ExitStack()
"""Ends the stack: two cores do not carry it beside those of the tests that follow."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        _ends.close()


@dataclass(frozen=True)
class Prompts:
    """``fits`` holds all its blocks under the stack's budget; ``selects`` has a working set and needs its tier; ``slow`` keeps prefill
    busy for seconds; ``half``, ``third`` and ``more`` are about 45, 35 and 30 % of the arena."""

    fits: list[int]
    selects: list[int]
    slow: list[int]
    half: list[int]
    third: list[int]
    more: list[int]


@pytest.fixture(scope="session")
def model() -> Path:
    return models.prepare(models.CUT_LAYERS)


@pytest.fixture(scope="session")
def hold(tmp_path_factory) -> Path:
    """While this file exists decode starts no read."""
    return tmp_path_factory.mktemp("hold") / "reads"


@pytest.fixture(scope="session")
def wall_clock(tmp_path_factory) -> Path:
    """By how much the wall clock of all servers is off: a float64, in seconds."""
    file = tmp_path_factory.mktemp("clock") / "offset"
    file.write_bytes(struct.pack("d", 0.0))
    return file


@pytest.fixture(scope="session")
def running_stack(model, hold, wall_clock, tmp_path_factory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("chaos")
    spec = StackSpec(
        "oasis", model, arena_bytes=40 << 20, max_total_tokens=12_000, prefill_flags=("--chunked-prefill-size", "1024"),
        config={"budget_tokens": BUDGET, "tail_tokens": TAIL, "silence_seconds": SILENCE, "read_seconds": SILENCE, "await_seconds": 30.0, "begin_seconds": 5.0,
                "reserve_seconds": RESERVE, "recompute_seconds": 20.0, "drain_seconds": DRAIN, "host_cache_bytes": 256 << 20, "hold_reads_file": str(hold)},
        tier_flags=("--lease-seconds", str(LEASE), "--grace-seconds", str(GRACE), "--room-seconds", "12", "--drain-seconds", "20"))
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "clock"), os.environ.get("PYTHONPATH"))))
    environment = import_environment() | {"PYTHONPATH": path, "OASIS_TEST_CLOCK": str(wall_clock)}
    with _ends:
        processes = _ends.enter_context(Processes(log=folder / "zygote.log", env=environment))
        yield _ends.enter_context(Stack(spec, processes, run_dir=folder, progress=print))


@pytest.fixture(scope="session")
def maker(model) -> PromptMaker:
    return PromptMaker(model)


@pytest.fixture(scope="session")
def prompts(running_stack, maker) -> Prompts:
    text, records = library_text(), inventory(running_stack)["records"]
    assert 300 < records < 600, "the lengths below are meant for about 400 records"

    def share(of: float, skip: int) -> list[int]:
        return maker.cut(text, int(of * records) * 16, skip=skip)

    return Prompts(fits=maker.cut(text, 400, skip=100), selects=maker.cut(text, 1500, skip=3000), slow=maker.cut(text, 3600, skip=20_000),
                   half=share(0.45, 6000), third=share(0.35, 10_000), more=share(0.30, 14_000))


@pytest.fixture(scope="session")
def expected(running_stack, prompts) -> dict[str, list[int]]:
    """Answers over all blocks, of these servers before anything befell them."""
    found = {}
    for name in ("fits", "half", "third"):
        _, decode = pair(running_stack, getattr(prompts, name), OUTPUT, exact=True)
        answered(decode)
        found[name] = decode.ids
    return found


@pytest.fixture
def stack(running_stack, hold, expected) -> Iterator[Stack]:
    """Whatever the test before has left: everything runs, nothing is held, decode has nothing of earlier prompts."""
    yield restored(running_stack, hold)
    restored(running_stack, hold)


def restored(stack: Stack, hold: Path) -> Stack:
    hold.unlink(missing_ok=True)
    for server in stack.servers.values():
        server.signal(signal.SIGCONT, group=True)
    stack.restart(*(name for name, server in stack.servers.items() if server.poll() is not None))
    at_rest(stack)
    return stack
