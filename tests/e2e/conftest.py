"""Real SGLang servers for the whole session, forked from one import.

``stock_pd()``, ``oasis_stack()`` and ``monolith()`` give a running stack with the 4-layer model; the same
arguments give the same stack, so tests share it and must leave it as they found it. A test that breaks
something uses ``fresh_stack(kind, ...)``, a context of its own. All take StackSpec's fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import matrix
import pytest
from goldens import Goldens

from oasis_sglang import models as model_store
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker, library_text
from oasis_sglang.stack import Kind, Stack, StackSpec, import_environment

# Servers that are idle cost memory and 3 % of a core each; the machine this has to run on has two cores.
SHARED_STACKS = 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@dataclass(frozen=True)
class Models:
    """``s30`` is SmolLM2-135M-Instruct, ``s4`` its 4-layer cut."""

    s30: Path
    s4: Path


class Stacks:
    """Running stacks by specification; the one unused for longest goes when there are too many."""

    def __init__(self, processes: Processes, run_dir: Path):
        self._processes = processes
        self._run_dir = run_dir
        self._shared: dict[str, Stack] = {}  # in order of last use
        self._count = 0

    def shared(self, spec: StackSpec) -> Stack:
        key = repr(spec)
        stack = self._shared.pop(key, None)
        if stack is None:
            while len(self._shared) >= SHARED_STACKS:
                self._shared.pop(next(iter(self._shared))).stop()
            stack = self._new(spec)
            stack.start()
        self._shared[key] = stack
        stack.check()
        return stack

    @contextmanager
    def fresh(self, spec: StackSpec) -> Iterator[Stack]:
        with self._new(spec) as stack:
            yield stack

    def stop(self) -> None:
        while self._shared:
            self._shared.popitem()[1].stop()

    def _new(self, spec: StackSpec) -> Stack:
        self._count += 1
        return Stack(
            spec, self._processes, run_dir=self._run_dir / f"{self._count:02}-{spec.kind}", progress=print
        )


@pytest.fixture(scope="session")
def models() -> Models:
    return Models(model_store.prepare(), model_store.prepare(model_store.CUT_LAYERS))


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    log = tmp_path_factory.mktemp("zygote") / "zygote.log"
    with Processes(log=log, env=import_environment()) as started:
        yield started


@pytest.fixture(scope="session")
def stacks(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    running = Stacks(processes, tmp_path_factory.mktemp("stacks"))
    yield running
    running.stop()


FULL_BUDGET = {"budget_tokens": 8192}
"""What Oasis stacks run with unless a test says otherwise: working sets that hold any prompt whole."""


def _spec(kind: Kind, model: Path, config: dict | None = None, **spec) -> StackSpec:
    return StackSpec(kind, model, config={**FULL_BUDGET, **(config or {})} if kind == "oasis" else {}, **spec)


@pytest.fixture(scope="session")
def fresh_stack(stacks: Stacks, models: Models):
    def make(kind: Kind, *, model: Path | None = None, **spec):
        return stacks.fresh(_spec(kind, model or models.s4, **spec))

    return make


@pytest.fixture(scope="session")
def stock_pd(stacks: Stacks, models: Models):
    return _shared(stacks, "stock", models)


@pytest.fixture(scope="session")
def oasis_stack(stacks: Stacks, models: Models):
    return _shared(stacks, "oasis", models)


@pytest.fixture(scope="session")
def monolith(stacks: Stacks, models: Models):
    return _shared(stacks, "monolith", models)


def _shared(stacks: Stacks, kind: Kind, models: Models):
    def get(*, model: Path | None = None, **spec) -> Stack:
        return stacks.shared(_spec(kind, model or models.s4, **spec))

    return get


@pytest.fixture(scope="session")
def goldens(stacks: Stacks) -> Goldens:
    """``goldens.get(model, prompts, max_new_tokens)``; needs a monolith only for answers not yet on disk, and leaves it running: the
    turns of a conversation are asked for one after the other."""
    return Goldens(lambda model: nullcontext(stacks.shared(StackSpec("monolith", model))))


@pytest.fixture(scope="session")
def prompt_maker(models: Models) -> PromptMaker:
    return PromptMaker(models.s4)


@pytest.fixture(scope="session")
def text() -> str:
    """Real text, the same wherever this Python is installed."""
    return library_text()


@pytest.fixture(scope="session")
def prompts(prompt_maker: PromptMaker, text: str) -> list[list[int]]:
    """Those of the exactness matrix, 20 to 7,500 tokens."""
    return matrix.prompts(prompt_maker, text)


@pytest.fixture(scope="session")
def expected(goldens: Goldens, models: Models, prompts: list[list[int]]) -> list[list[int]]:
    """The 4-layer model's greedy answers to them, one plain server's."""
    return goldens.get(models.s4, prompts, matrix.OUTPUT_TOKENS)
