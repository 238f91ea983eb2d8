"""``oasis bench``: the same requests through several systems, and a report of what differed."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.nodes import parse_bytes
from oasis_sglang.commands.running import interrupt_once, say, told_in_one_line

_WORKLOADS = "What is asked, comma separated; `oasis bench --list` names them."
_SWEEP = "NAME=VALUE,VALUE,...: concurrency, context, budget, link or pool; repeat for more, one after the other."


def bench(
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, report.html, plots and logs.", show_default="bench-TIME")] = None,
    model: Annotated[str, typer.Option(help="Model directory, or 4 for the 4-layer cut of SmolLM2.", show_default="SmolLM2-135M-Instruct")] = "",
    systems: Annotated[str, typer.Option(help="What to compare, the first is what ratios are to: stock, stock-radix, monolith, full, oasis, exact; "
                                              "full:BUDGET, oasis:BUDGET, with +reuse, -reuse or +OPTION=VALUE.")] = "stock,full,oasis",
    endpoint: Annotated[list[str] | None, typer.Option(help="NAME=URL[,prefill=URL][,decode=URL][,tier=URL]: servers that run already; repeat.")] = None,
    workloads: Annotated[str, typer.Option(help=_WORKLOADS)] = "needle",
    trace: Annotated[Path | None, typer.Option(help="Trace file in Mooncake's layout, for the workload `trace`.")] = None,
    trace_scale: Annotated[float, typer.Option(help="Shrinks the lengths of a trace.")] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="Plays a trace so many times faster.")] = 1.0,
    tokens: Annotated[int, typer.Option(min=64, help="Prompt tokens.")] = 6000,
    output: Annotated[int, typer.Option(min=2, help="Output tokens.")] = 64,
    long_output: Annotated[int, typer.Option(min=2, help="Output tokens of the workload `reasoning`.")] = 2000,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation.")] = 13,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    rate: Annotated[float, typer.Option(min=0, help="Requests per second, at random times; 0: as fast as --concurrency allows.")] = 0.0,
    share_document: Annotated[bool, typer.Option(help="Prompts begin with one document, so that prefill computes it once; decode then keeps nothing.")] = False,
    reuse: Annotated[bool | None, typer.Option(help="Decode and prefill of Oasis keep blocks.", show_default="unless --share-document")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Each with prompts of its own; the order of systems turns.")] = 3,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    sweep: Annotated[list[str] | None, typer.Option(help=_SWEEP)] = None,
    pool: Annotated[int, typer.Option(min=0, help="Tokens of decode's KV pool.", show_default="two requests")] = 0,
    budget: Annotated[int | None, typer.Option(min=64, help="budget_tokens of Oasis.", show_default="1024")] = None,
    option: Annotated[list[str] | None, typer.Option("--set", help="OPTION=VALUE of Oasis, for all its systems; repeat.")] = None,
    flag: Annotated[list[str] | None, typer.Option(help="Flag of SGLang, for all workers; repeat, one word each.")] = None,
    host_cache_bytes: Annotated[int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="Of Oasis' decode node.")] = None,
    arena_bytes: Annotated[int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Of Oasis' tier.")] = "4GiB",
    hosts: Annotated[bool, typer.Option(help="Prefill and decode in network namespaces of their own (root): bytes are metered at the wire.")] = False,
    link: Annotated[str, typer.Option(help="Limit of the wire between them, such as 200mbit.")] = "",
    data_plane: Annotated[str, typer.Option(help="Of Oasis: nixl or zmq.")] = "nixl",
    slo_ttft: Annotated[float, typer.Option(help="Seconds, of goodput.")] = 10.0,
    slo_itl: Annotated[float, typer.Option(help="Seconds, of goodput.")] = 0.5,
    quality: Annotated[int, typer.Option(min=0, help="Forced decode steps per request for KL and top-1; 0: none.")] = 0,
    serving: Annotated[str, typer.Option(help="Arguments of sglang.bench_serving, which is run on each system too.")] = "",
    overwrite: Annotated[bool, typer.Option(help="Write to --out also where results are already.")] = False,
    note: Annotated[list[str] | None, typer.Option(help="A sentence for the report; repeat.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the report of this results.json again; nothing is run.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of results.json.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Print workloads and figures.")] = False,
) -> None:
    """Serve the same requests by stock SGLang PD, by Oasis with everything pulled to decode, and by Oasis as configured.

    Each system runs on this machine, one after the other, or is an endpoint that is there already. The folder gets results.json,
    report.html, summary.md, plots and the servers' logs.
    """
    from oasis_sglang.bench import BenchError, records

    if schema:
        typer.echo(json.dumps(records.schema(), indent=1))
        return
    if list_:
        _list()
        return
    with told_in_one_line():
        from oasis_sglang.bench import report as reporting
        from transport.errors import ConfigError

        if report is not None:
            try:
                results = records.load(report)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--report {report}: {error}") from error
            try:
                reporting.write(results, report.parent)
            except OSError as error:
                raise BenchError(f"--report {report}: {error}") from error
            reporting.console(results)
            return
        again = out is not None and (out / "results.json").exists()
        if again and not overwrite:
            raise ConfigError(f"--out {out} has results.json already: name another folder, or --overwrite it")
        from oasis_sglang.bench import settings as made
        from oasis_sglang.bench import workloads as known
        from oasis_sglang.bench.about import shape_of
        from oasis_sglang.bench.run import Bench

        names = _words(workloads)
        if unknown := [name for name in names if name not in (*known.NAMES, "trace")]:
            raise ConfigError(f"--workloads {', '.join(unknown)}: known are {', '.join(known.NAMES)} and trace")
        if ("trace" in names) != (trace is not None):
            raise ConfigError("the workload `trace` and --trace FILE go together")
        try:
            sweeps = made.merged(sweep or ())
            options = dict(_pair(text) for text in option or ())
            serving_arguments = tuple(_split(serving))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        path = _model(model)
        context = shape_of(path)["context"]
        settings = made.Settings(
            path, model_given=bool(model or _words(systems)), systems=_words(systems), endpoints=tuple(endpoint or ()), workloads=names, trace=trace,
            repeats=repeats, seed=seed, tokens=tokens, output=output, long_output=long_output, requests=requests, turns=turns, concurrency=concurrency,
            rate=rate, share_document=share_document,
            reuse=not share_document if reuse is None else reuse, pool=pool, budget=budget, link=link, hosts=hosts, data_plane=data_plane,
            slo={"ttft": slo_ttft, "itl": slo_itl}, sweeps=sweeps, quality=quality, serving=serving_arguments, options=options,
            flags=tuple(flag or ()),
            host_cache_bytes=host_cache_bytes, arena_bytes=arena_bytes, trace_scale=trace_scale, trace_speed=trace_speed)
        settings.check(context)
        if again:
            shutil.rmtree(out / "logs", ignore_errors=True)  # servers would append to those of the earlier benchmark
        folder = out or Path(f"bench-{time.strftime('%Y%m%d-%H%M%S')}")
        one = Bench(settings, folder=folder, command=shlex.join(["oasis", *sys.argv[1:]]), progress=say,
                    save=lambda results: records.save(results, folder / "results.json"))
        one.results.notes += note or []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"--out {folder}: {error.strerror}") from error
        say(f"results and logs: {folder}")
        interrupt_once()
        try:
            one.run()
        except OSError as error:
            raise BenchError(f"the benchmark ended early: {error}") from error
        finally:
            if one.results.runs:
                reporting.write(one.results, folder)
        reporting.console(one.results)
        say(f"wrote {folder}/report.html and results.json")


def _model(text: str) -> Path:
    """The folder, with a tokenizer that can be read. Raises ``ConfigError``, ``ModelError``."""
    from oasis_sglang import models
    from oasis_sglang.prompts import PromptMaker
    from transport.errors import ConfigError

    if text in ("", "4"):
        return models.prepare(models.CUT_LAYERS if text else None, progress=say)
    try:
        PromptMaker(Path(text))
    except Exception as error:  # the class itself is what the library raises
        raise ConfigError(f"--model {text}: no tokenizer.json that can be read: {error}") from error
    return Path(text)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"--serving {text}: {error}") from None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: give OPTION=VALUE")
    return name, value


def _list() -> None:
    from oasis_sglang.bench.figures import FIGURES
    from oasis_sglang.bench.workloads import NAMES

    typer.echo("Workloads\n" + "\n".join(f"  {name}: {text}" for name, text in NAMES.items()))
    typer.echo("  trace: the file given with --trace\n\nFigures\n" + "\n".join(f"  {name}: {figure.definition}" for name, figure in FIGURES.items()))


def register(app: typer.Typer) -> None:
    app.command()(bench)
