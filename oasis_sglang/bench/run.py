"""Runs a benchmark: system after system, in turned order with every repeat, each on a stack of its own.

Every system gets the same prompts; every repeat and every point of a sweep gets prompts of its own, so that nothing that a server
keeps of one run is found by the next. Decode is emptied before every run.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from zlib import crc32

from decode_node import host_cache
from oasis_sglang.bench import BenchError, counters, figures, load, meters, quality, records, replay, serving, systems, workloads
from oasis_sglang.bench.about import machine, shape_of, versions
from oasis_sglang.bench.jobs import Wanted, Work, score
from oasis_sglang.bench.records import Point, Results, Run
from oasis_sglang.bench.settings import Settings
from oasis_sglang.client import GenerateError, forget, generate
from oasis_sglang.hosts import hosted
from oasis_sglang.processes import Processes
from oasis_sglang.prompts import PromptMaker
from oasis_sglang.stack import Stack, StackError, import_environment
from transport.errors import ConfigError

ANSWER_S = 3600.0
WIRE_BOUNDS = (1.0, 1.06)
"""Of interface bytes over payload: headers, and with a descriptor per run of pieces a little more."""
WIRE_SILENT = 16 << 10
"""Interface bytes of a run in which no payload was counted: requests and their answers, no more."""
HOST_BOUNDS = (0.99, 1.1)
"""Of memory over the most that was counted: whole pages, and slots that were free for a while."""
DETERMINISTIC = {"on_miss": "wait", "wait_seconds": 30.0}
"""Of quality: a step waits for its blocks, so that what is measured does not depend on how fast they come."""
FAILURES = (StackError, BenchError, GenerateError, OSError, HTTPException, ValueError)
"""Of the servers of one system, among them answers that are not JSON; the others can be measured."""
_WARM = "Say in one sentence what a cache is."
_WARM_TOKENS = 8

Progress = Callable[[str], None]


class Bench:
    """One benchmark: ``run`` fills ``results``. ``save`` is called with them after every stack."""

    def __init__(self, settings: Settings, *, folder: Path, command: str, progress: Progress, save: Callable[[Results], None]):
        self.settings, self.folder, self.progress, self.save = settings, folder, progress, save
        self.points = settings.points()
        self.maker = PromptMaker(settings.model)
        self.shape = shape_of(settings.model)
        self.works: dict[tuple, Work] = {}
        chosen = self.chosen(self.points[0])
        self.results = Results(
            title=f"Oasis benchmark: {', '.join(settings.workloads)}", command=command, started=datetime.now(UTC).isoformat(timespec="seconds"),
            seed=settings.seed, model=self.shape, machine=machine(), versions=versions(), slo=dict(settings.slo),
            link={"hosts": settings.hosts, "rate": settings.link, "data_plane": settings.data_plane}, repeats=settings.repeats,
            base=chosen[0].system.name, systems=[one.system for one in chosen], workloads=[], sweeps=list(settings.sweeps))
        for name in settings.workloads:
            self.results.workloads.append(workloads.describe(self.work(name, self.points[0], 0)))

    def chosen(self, point: Point) -> list[systems.Chosen]:
        """Systems and endpoints at a point. Raises ``ConfigError``, for two of one name too."""
        at = self.settings.at(point)
        serving_ = at.serving_of(self.shape["context"], self.settings.longest, self.settings.most_at_once)
        found = [*(systems.named(name, serving_) for name in at.systems), *map(systems.endpoint, at.endpoints)]
        names = [one.system.name for one in found]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"systems and endpoints need names of their own, at least one: {', '.join(names)}")
        return found

    def work(self, name: str, point: Point, repeat: int) -> Work:
        """Made once: every system gets the same. ``repeat`` -1: not measured."""
        at = self.settings.at(point)
        place = self.points.index(point)
        key = (name, place, repeat)
        if key not in self.works:
            seed = crc32(json.dumps([at.seed, name, place, repeat]).encode())
            self.works[key] = self._trace(at, seed) if name == "trace" else workloads.make(name, self.maker, Wanted(
                tokens=at.tokens, requests=at.requests, output_tokens=at.output, long_output=at.long_output, turns=at.turns, seed=seed,
                share_document=at.share_document, rate=at.rate or None, context=self.shape["context"]))
        return self.works[key]

    def _trace(self, at: Settings, seed: int) -> Work:
        return replay.load(at.trace, self.maker, scale=at.trace_scale, speed=at.trace_speed, limit=at.requests, context=self.shape["context"], seed=seed)

    def run(self) -> Results:
        """A system whose servers fail is noted and left out. Raises ``ConfigError``, and ``HostsError`` or ``OSError`` when there is no place for
        servers; what was measured until then has been saved."""
        with self._place() as (processes, places, hosts):
            for repeat in range(self.settings.repeats):
                for points in self._groups():
                    chosen = self.chosen(points[0])
                    turn = repeat % len(chosen)
                    for one in [*chosen[turn:], *chosen[:turn]]:
                        try:
                            self._system(one, points, repeat, processes, places, hosts)
                        except FAILURES as error:
                            self._note_failure(f"{one.system.name}, repeat {repeat + 1}, was not measured to its end", error)
                        finally:
                            self._finish()
            if self.settings.quality:
                self._qualities(processes, places)
        return self._finish()

    def _note(self, text: str) -> None:
        if text not in self.results.notes:
            self.results.notes.append(text)

    def _note_failure(self, what: str, error: Exception) -> None:
        said = str(error) or type(error).__name__
        self._note(f"{what}: {said.splitlines()[0]}")
        self.progress(said)

    @contextmanager
    def _place(self) -> Iterator[tuple]:
        """Processes, where to put servers, and the hosts if there are two."""
        with ExitStack() as stack:
            if self.settings.hosts:
                there = stack.enter_context(hosted(self.folder / "logs"))
                yield there.processes, there.places, there.hosts
            else:
                processes = stack.enter_context(Processes(log=self.folder / "logs" / "zygote.log", env=import_environment()))
                yield processes, None, None

    def _groups(self) -> list[list[Point]]:
        """Points that one stack can serve, together."""
        groups: dict[tuple, list[Point]] = {}
        for point in self.points:
            groups.setdefault(self.settings.server_key(point), []).append(point)
        return list(groups.values())

    def _finish(self) -> Results:
        self.results.summary = figures.summarise(self.results)
        self.results.equality = figures.equality(self.results)
        self.save(self.results)
        return self.results

    def _system(self, chosen: systems.Chosen, points: Sequence[Point], repeat: int, processes, places, hosts) -> None:
        name = chosen.system.name
        if chosen.spec is None:
            there = chosen.endpoint
            where = counters.Places(there.prefill, there.decode, tuple(filter(None, [there.tier])))
            self._served(chosen, there.url, where, None, None, points, repeat, hosts)
            return
        self.progress(f"--- {name}, repeat {repeat + 1} of {self.settings.repeats}")
        logs = self.folder / "logs" / _folder(f"{len(self.results.runs):03d}-{name}", points[0])
        with Stack(chosen.spec, processes, run_dir=logs, places=places) as stack, meters.Memory(_metered(stack)) as memory:
            kind = chosen.spec.kind
            tiers = tuple(url for server, url in stack.urls.items() if server.rstrip("0123456789") in ("tier", "memory"))
            where = counters.Places(stack.urls.get("prefill", stack.url), stack.urls.get("decode", stack.url), tiers,
                                    logs / ("monolith.log" if kind == "monolith" else "decode.log"))
            self._served(chosen, stack.url, where, stack, memory, points, repeat, hosts)

    def _served(self, chosen: systems.Chosen, url: str, where: counters.Places, stack: Stack | None, memory: meters.Memory | None, points: Sequence[Point],
                repeat: int, hosts) -> None:
        self._warm(url, points)
        if stack is not None and stack.spec.decodes > 1:
            self._note(f"{chosen.system.name}: counters are of the first decode node only")
        turn = repeat % len(points)  # none is always first on its servers
        for point in [*points[turn:], *points[:turn]]:
            if hosts is not None:
                hosts.limit(str(point.get("link", self.settings.link)) or None)
            for workload in self.settings.workloads:
                run = self._run(chosen, url, where, stack, memory, workload, point, repeat, hosts)
                self.results.runs.append(run)
                shown = figures.of_run(run, self.settings.slo)
                self.progress(f"{run.system} {workload} {point or ''}: {_brief(shown)}")
        if self.settings.serving and repeat == 0:
            if hosts is not None:
                hosts.limit(self.settings.link or None)
            self._serving(chosen.system.name, url, points[0] if len(self._groups()) > 1 else {})

    def _warm(self, url: str, points: Sequence[Point]) -> None:
        """Connections are made, and what is done once is done: two short requests, and one as long as the longest, of a repeat of its own."""
        longest = max(points, key=lambda point: self.settings.at(point).tokens)
        jobs = [job for name in self.settings.workloads for job in self.work(name, longest, -1).jobs if job.after is None]
        short = self.maker.chat(_WARM)
        long = max(jobs, key=lambda job: len(job.prompt))
        for index, (prompt, tokens) in enumerate([(short, _WARM_TOKENS), (short, _WARM_TOKENS), (long.prompt, min(_WARM_TOKENS, long.output_tokens))]):
            generate(url, prompt, max_new_tokens=tokens, rid=f"warm-{index}-{time.monotonic_ns()}", timeout=ANSWER_S)

    def _run(self, chosen, url: str, where: counters.Places, stack: Stack | None, memory: meters.Memory | None, workload: str, point: Point, repeat: int,
             hosts) -> Run:
        work, at, spec = self.work(workload, point, repeat), self.settings.at(point), chosen.spec
        for index, prompt in enumerate(work.shared):
            generate(url, prompt, max_new_tokens=1, rid=f"shared-{index}-{time.monotonic_ns()}", timeout=ANSWER_S)
        if stack is not None and stack.spec.kind != "monolith":  # what one server keeps, prompts may share; what others keep is theirs
            forget(where.decode)
        before = counters.settled(where)
        if counters.several(before):
            self._note(f"{chosen.system.name}: counters are of the first decode node only")
        wire = meters.wire(hosts) if hosts is not None and stack is not None else None
        cpu = stack.cpu_seconds() if stack is not None else None
        prefix = f"{workload}-{len(self.results.runs)}-"
        most = len(work.jobs) if at.rate or workload == "trace" else at.concurrency
        with counters.Sampler(where) as sampler:
            requests, seconds = load.drive(work.jobs, load.asker(url, ANSWER_S), concurrency=most, prefix=prefix)
        after = counters.settled(where)
        token_bytes = self.shape["token_bytes"] if spec is not None or self.settings.model_given else None
        counters.account(requests, [prefix + job.name for job in work.jobs], after, token_bytes)
        for job, request in zip(work.jobs, requests):
            if job.answers and request.error is None:
                request.score = score(self.maker.decode(request.output_ids), job.answers)
        arena = spec.arena_bytes * spec.prefills if spec is not None and spec.kind == "oasis" else None
        node = counters.node(before, after, sampler, where, arena_bytes=arena)
        spans = [(r.sent + r.token_times[0], r.sent + r.token_times[-1]) for r in requests if r.token_times]
        grown = {role: memory.above_start(role) for role in memory.start} if memory is not None else {}
        metered = records.Meters(decode_memory_bytes=grown.get("decode", grown.get("monolith")), tier_memory_bytes=grown.get("tier"),
                                 client_concurrency=meters.client_concurrency(spans), cpu_seconds=stack.cpu_seconds() - cpu if stack is not None else None)
        run = Run(chosen.system.name, workload, repeat, dict(point), len(self.results.runs), seconds, requests, node, metered)
        if after.oasis and stack is not None:
            self._check_host(run, after, stack)
        if wire is not None:
            self._check_wire(run, [now - then for then, now in zip(wire, meters.wire(hosts))])
        gap = figures.of_run(run, self.settings.slo).get("itl_mean")
        if parts := counters.stages(before, after, None if gap is None else gap * 1e3 * (node.tokens_per_step or 1.0)):
            self.results.profiles.append(records.Profile(run.system, workload, dict(point), parts))
        return run

    def _serving(self, system: str, url: str, point: Point) -> None:
        try:
            rows = serving.run(url, model=str(self.settings.model), arguments=self.settings.serving, folder=self.folder / "serving", progress=self.progress,
                               name=_folder(system, point))
        except serving.ServingError as error:  # the runs stand without it
            self.results.notes.append(f"sglang.bench_serving failed on {system}: {error}")
            return
        self.results.serving += [{**row, "system": system, "point": dict(point)} for row in rows]

    def _check_host(self, run: Run, after: counters.Look, stack: Stack) -> None:
        """The most that the host cache held since the start against what the kernel has of it in memory: pages stay once they are used."""
        cache = (after.oasis.get("working_sets") or {}).get("host_cache")
        if cache and cache["peak_bytes"] and not after.info.get("device", "cpu").startswith("cuda"):  # pinned memory has no name
            mapped = sum(meters.mapped_bytes(pid, host_cache.NAME) for pid in meters.tree([stack.servers["decode"].pid]))
            low, high = HOST_BOUNDS
            self.results.checks.append(records.Check("host cache, most since the start: counted, by the kernel", run.system, run.workload, run.point,
                                                     cache["peak_bytes"], mapped, low, high, low <= mapped / cache["peak_bytes"] <= high))

    def _check_wire(self, run: Run, moved: Sequence[int]) -> None:
        """Without a counter there is nothing to check; one that says 0 is wrong if the interface saw more than requests."""
        run.meters.wire_in_bytes, run.meters.wire_out_bytes = moved
        counted = run.node.wire_bytes
        if counted is None or (not counted and moved[0] <= WIRE_SILENT):
            return
        low, high = WIRE_BOUNDS
        self.results.checks.append(records.Check("payload counted, interface bytes", run.system, run.workload, run.point, counted, moved[0], low, high,
                                                 counted > 0 and low <= moved[0] / counted <= high, "" if counted else "no payload was counted"))

    def _qualities(self, processes: Processes, places) -> None:
        """Forced tokens, on stacks of their own: they need other flags. One workload after the other, at each budget's first point; others
        of that budget have no rows."""
        wanted: dict[tuple, tuple[Point, systems.Chosen]] = {}
        for point in self.points:
            for one in self.chosen(point):
                if one.spec is not None and one.spec.kind == "oasis" and not one.system.dense:
                    wanted.setdefault((point.get("budget"), one.system.name), (point, one))
        for point, one in wanted.values():
            self.progress(f"--- quality of {one.system.name} {point or ''}")
            try:
                self._quality(point, one, processes, places)
            except FAILURES as error:
                self._note_failure(f"quality of {one.system.name} {point or ''} was not measured to its end", error)
            finally:
                self._finish()

    def _quality(self, point: Point, one: systems.Chosen, processes: Processes, places) -> None:
        spec = replace(one.spec, flags=(*one.spec.flags, *quality.FLAGS), config={**one.spec.config, **DETERMINISTIC})
        with (tempfile.TemporaryDirectory(prefix="oasis-quality-") as scratch,
              Stack(spec, processes, run_dir=self.folder / "logs" / _folder(f"quality-{one.system.name}", point), places=places) as stack):
            for workload in self.settings.workloads:
                self.results.quality += quality.measure(stack, self.work(workload, point, 0), system=one.system.name, point=point, options={},
                                                        scratch=Path(scratch), steps=self.settings.quality, progress=self.progress)


def _metered(stack: Stack) -> dict[str, list[int]]:
    """Processes whose memory is metered, by role."""
    return {role: [server.pid] for role, server in stack.servers.items() if role in ("decode", "tier", "monolith")}


def _folder(name: str, point: Point) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join([name, *(f"{key}-{value}" for key, value in point.items())]))


def _brief(found: dict[str, float]) -> str:
    parts = [("TTFT {:.2f} s", "ttft_mean"), ("ITL {:.3f} s", "itl_mean"), ("{:.1f} tokens/s", "decode_tokens_per_second"), ("admitted {:.3f}",
                                                                                                                             "admitted_share"),
             ("lifetime {:.3f}", "lifetime_share"), ("accuracy {:.2f}", "accuracy"), ("{:.0f} failed", "failed")]
    return ", ".join(text.format(found[name]) for text, name in parts if name in found)
