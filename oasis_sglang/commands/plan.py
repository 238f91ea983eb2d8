"""``oasis plan``: what working sets would do for a model, a machine and a link, before anything is bought."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.calibrate import valued
from oasis_sglang.commands.running import say, told_in_one_line


def plan(
    model: Annotated[str, typer.Option(help="Model name, or a folder with config.json.")] = "meta-llama/Llama-3.1-8B",
    context: Annotated[str, typer.Option(help="Prompt tokens, comma separated.")] = "16384,32768,131072",
    output: Annotated[int, typer.Option(min=1, help="Output tokens of a request.")] = 512,
    budget: Annotated[int, typer.Option(help="budget_tokens.")] = 2048,
    tail: Annotated[int, typer.Option(help="tail_tokens.")] = 256,
    page: Annotated[int, typer.Option(help="Tokens of a block: --page-size.")] = 16,
    summary: Annotated[str, typer.Option(help="summary.")] = "mean_var_int8",
    fetch_blocks: Annotated[float, typer.Option(min=0, help="fetch_blocks_per_step, 0 = no limit.")] = 2.0,
    hysteresis: Annotated[float | None, typer.Option(min=0, help="hysteresis.", show_default="as decode nodes")] = None,
    profile_heads: Annotated[float, typer.Option(min=0, max=1, help="Share of heads that a profile serves from all blocks; SmolLM2's: 0.056.")] = 0.0,
    kv_dtype: Annotated[str, typer.Option(help="Of the KV cache: bfloat16, float16, float8, float32.")] = "bfloat16",
    tp: Annotated[int, typer.Option(min=1, help="GPUs of a decode node, tensor parallel.")] = 1,
    weights: Annotated[str, typer.Option(help="Size of the weights.", show_default="of the files, or two bytes per parameter")] = "",
    hbm: Annotated[str, typer.Option(help="Memory of a GPU.")] = "80GiB",
    hbm_share: Annotated[float, typer.Option(min=0.01, max=1, help="Of it for weights and KV.")] = 0.9,
    hbm_bandwidth: Annotated[str, typer.Option(help="Of a GPU.")] = "3.35TB/s",
    bus: Annotated[str, typer.Option(help="From host memory to a GPU.")] = "55GB/s",
    dram: Annotated[str, typer.Option(help="Host memory of the decode node for KV.")] = "1TiB",
    link: Annotated[str, typer.Option(help="From the tiers to the decode node.")] = "100gbit",
    requests: Annotated[int | None, typer.Option(min=1, help="Requests at once.", show_default="as many as fit")] = None,
    rank_seconds: Annotated[float, typer.Option(min=0, help="What ranking blocks adds to prefill, seconds per 1,000 prompt tokens. Measure it.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure as JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    check: Annotated[Path | None, typer.Option(help="results.json of `oasis bench`: compare the model with what was measured, and nothing else.")] = None,
) -> None:
    """Predict wire bytes, memory, concurrency and break-even of working sets against full KV transfer. Arithmetic; docs/plan.md says how."""
    with told_in_one_line(), valued():
        if check is not None:
            _check(check, as_json, as_markdown)
            return
        from decode_node.budget import make_budget
        from oasis_sglang.config import OasisConfig, parse_size
        from oasis_sglang.plan import shapes, show, sizes, units
        from oasis_sglang.plan.capacity import Ask, Machine, Served

        shape = shapes.find(model)
        if weights:
            shape = shapes.weighing(shape, parse_size(weights))
        layout = sizes.layout_of_shape(shape, kv_dtype, page=page, tp=tp, summary=summary)
        defaults = OasisConfig()
        served = Served(layout, make_budget(page, budget, defaults.sink_tokens, defaults.recent_tokens, tail, wait=False),
                        critical=round(profile_heads * layout.pieces), cap=fetch_blocks,
                        hysteresis=defaults.hysteresis if hysteresis is None else hysteresis)
        machine = Machine(parse_size(hbm), parse_size(dram), units.parse_rate(link), units.parse_rate(hbm_bandwidth), units.parse_rate(bus), hbm_share,
                          defaults.staging_bytes)
        notes = show.notes(shape, kv_dtype, served, machine)
        found = [show.forecast(shape, served, Ask(prompt, output), machine, offered=requests, rank_seconds=rank_seconds)
                 for prompt in units.parse_tokens(context)]
        if as_json:
            typer.echo(json.dumps({"model": shape.name, "notes": notes, "forecasts": found}, indent=1))
            return
        heads = f", {served.critical * tp} of {layout.pieces * tp} heads from all blocks" if served.critical else ""
        title = f"{shape.name}: {budget:,} tokens of budget{heads}, hysteresis {served.hysteresis:g}, {output:,} tokens of output, {tp} x {hbm}, link {link}"
        _print(title, show.rows(found), notes, as_markdown)


def _print(title: str, table: list, notes: list[str], as_markdown: bool) -> None:
    from oasis_sglang.plan import show

    if as_markdown:
        typer.echo("\n".join([show.markdown(title, table), *(f"\n{note}." for note in notes)]))
        return
    from rich.console import Console

    Console().print(show.rich_table(title, table))
    for note in notes:
        say(note)


def _check(path: Path, as_json: bool, as_markdown: bool) -> None:
    from oasis_sglang.bench.records import load
    from oasis_sglang.plan import show
    from oasis_sglang.plan.check import compare, worst

    rows = compare(load(path))
    if not rows:
        raise ValueError(f"{path} has no run of Oasis or stock with figures to compare")
    if as_json:
        typer.echo(json.dumps({"runs": [{**row._asdict(), "ratio": row.ratio} for row in rows],
                               "worst": {figure: row.ratio for figure, row in worst(rows).items()}}, indent=1))
        return
    _print(f"{path.name}: predicted / measured", show.compared(rows, worst(rows)), [show.SHARED], as_markdown)


def register(app: typer.Typer) -> None:
    app.command()(plan)
