"""Reports of made-up results: what stands in them, and what must not."""

import json
import re
import sys
import tomllib
from html.parser import HTMLParser
from importlib.resources import files
from subprocess import run as process

import matplotlib.image
import msgspec
import pytest

from oasis_sglang import charts
from oasis_sglang.bench import drawings, figures, records, report, sections, verdict, words
from oasis_sglang.bench.records import Check, Equality, Meters, Node, Profile, Quality, Request, Results, Run, System, Workload
from oasis_sglang.bench.view import Case, Figures

MIB = 1 << 20
FULL = 200 * MIB
KINDS = {"stock": ("stock", True), "full": ("oasis", False), "oasis": ("oasis", False), "oasis:256": ("oasis", False)}
SPEED = {"stock": 10.0, "full": 12.0, "oasis": 15.0, "oasis:256": 20.0}
"""Tokens per second of a request."""
FIRST = {"stock": 2.0, "full": 2.5, "oasis": 1.0, "oasis:256": 0.8}


def request(system, index, repeat, slow=1.0, tokens=11):
    first = FIRST[system] * slow * (1 + 0.1 * repeat)
    times = [first + i * slow * (1 + 0.05 * repeat) / SPEED[system] for i in range(tokens)]
    parts = {"stock": None, "full": {"manifest": MIB, "records": FULL, "on_demand": 0}, "oasis": {"manifest": MIB, "summaries": 4 * MIB, "pieces": 20 * MIB}}
    admitted = parts[system.partition(":")[0]]
    lifetime = None if admitted is None else {**admitted, "on_demand": 25 * MIB}
    return Request(f"r{index}", 6000, 0.0, 0.0, times, list(range(tokens)), full_transfer_bytes=FULL, admitted_bytes_by_phase=admitted,
                   lifetime_bytes_by_phase=lifetime, score=1.0 if system == "stock" or index else 0.5)


def node(system, requests):
    if system == "stock":
        return Node(wire_bytes=FULL * len(requests), concurrency=2, kv_pool_tokens=12000)
    held = {"full": 420 * MIB, "oasis": 168 * MIB, "oasis:256": 84 * MIB}[system]
    return Node(wire_bytes=30 * MIB * len(requests), concurrency=4, kv_pool_tokens=12000, kv_pool_tokens_peak=6000, host_reserved_bytes=1 << 30,
                host_used_bytes_mean=held * 0.8, host_used_bytes_peak=held, tier_used_bytes_peak=800 * MIB, wanted=1000, misses=30, missed_mass=0.01, stalls=3,
                stall_seconds=0.25)


def results(systems=("stock", "full", "oasis"), workloads=("needle", "chat"), repeats=3, sweep=(), requests=3):
    """``sweep``: values of each coordinate by name."""
    sweep = dict(sweep)
    points = [{name: value} for name, values in sweep.items() for value in values] or [{}]
    made = Results(
        title="A <b>benchmark</b> & more", command="oasis bench --systems 'a|b' <x>", started="2026-01-02T03:04:05+00:00", seed=7,
        model={"name": "tiny", "layers": 4}, machine={"description": "a box", "cores": 2, "gpus": 0}, versions={"sglang": "0.5.23"},
        slo={"ttft": 10.0, "itl": 0.5}, link={"hosts": True, "rate": "200mbit", "data_plane": "nixl"}, repeats=repeats, base=systems[0],
        systems=[System(name, KINDS[name][0], f"describes {name}", KINDS[name][1], flags={"all": ["--page-size", "16"]}) for name in systems],
        workloads=[Workload(name, f"about {name}", requests, [5000, 6000, 7000], [11, 11, 11], "d1ge57", name == "needle", ["prompts share a document"])
                   for name in workloads], sweeps=list(sweep))
    for repeat in range(repeats):
        for system in [*systems[repeat % len(systems):], *systems[: repeat % len(systems)]]:
            for index, point in enumerate(points):
                for number, workload in enumerate(workloads):
                    asked = [request(system, i, repeat, slow=(1 + index) * (1 + number * (system == "oasis"))) for i in range(requests)]
                    seconds = max(r.token_times[-1] for r in asked)
                    made.runs.append(Run(system, workload, repeat, dict(point), len(made.runs), seconds, asked, node(system, asked), Meters()))
    if "oasis" in systems:
        made.quality = [Quality("oasis", "needle", f"r{i}", dict(points[0]), 64, 0.01 * (i + 1), 0.3, 0.99 - i / 100) for i in range(2)]
        made.profiles = [Profile("oasis", "needle", dict(points[0]), {"whole step": 80.0 + repeat, "scores": 3.0, "plan": 1.5}) for repeat in range(repeats)]
        made.checks = [Check("payload and interface", "oasis", "needle", dict(points[0]), 1000.0, 1030.0, 1.0, 1.06, True)]
        made.serving = [{"system": "oasis", "completed": 16, "output_throughput": 12.345, "nothing": None}]
    return finished(made)


def finished(made):
    made.summary = figures.summarise(made)
    made.equality = figures.equality(made)
    return made


class Page(HTMLParser):
    """What a browser would fetch, the words, and the tables as lists of rows."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.words, self.images, self.tags, self.rows = [], [], [], [], []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.fetched += [value for key, value in attributes if key in ("src", "href")]
        if tag == "img":
            self.images.append(found["src"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside &= tag not in ("td", "th")

    def handle_data(self, data):
        self.words.append(data)
        if self._inside and data.strip():
            self.rows[-1][-1] += f"{data.strip()} "

    @property
    def text(self):
        return " ".join(self.words)

    def row(self, *beginning):
        """Of the first row that begins so."""
        return next(row for row in self.rows if [cell.strip() for cell in row[: len(beginning)]] == list(beginning))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "new"
    made = results(systems=("stock", "full", "oasis", "oasis:256"), sweep={"concurrency": (1, 4, 16)})
    return made, folder, report.write(made, folder)


def html(made):
    view = sections.view(made)
    return Page(report.html(view, {picture.name: b"" for section in view.sections for picture in section.pictures}))


# -- files --------------------------------------------------------------------------------------------------------


def test_the_folder_has_what_was_asked_for_and_comes_back_the_same(swept):
    made, folder, paths = swept
    assert {str(path.relative_to(folder)) for path in paths} == {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {"results.json", "report.html", "summary.md"} <= {path.name for path in paths}
    assert records.load(folder / "results.json") == made


def test_every_chart_is_a_picture_with_something_on_it(swept):
    _, folder, paths = swept
    plots = [path for path in paths if path.suffix == ".png"]
    names = {path.stem for path in plots}
    assert {"sweep-concurrency-needle-decode-tokens-per-second", "sweep-concurrency-chat-ttft-p50", "phases-needle-concurrency-16", "profile-needle-concurrency-1"} <= names
    assert "sweep-concurrency-chat-kl" not in names, "no KL was measured of it"
    for path in plots:
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 300 and len({tuple(pixel) for row in image[::7] for pixel in row[::7, :3]}) > 3


def test_the_page_needs_nothing_beside_it(swept):
    _, folder, paths = swept
    page = Page((folder / "report.html").read_text())
    assert page.images and all(image.startswith("data:image/png;base64,iVBOR") for image in page.images)
    assert len(page.images) == sum(path.suffix == ".png" for path in paths)
    assert all(where.startswith(("data:image/png", "#")) for where in page.fetched)
    assert not {"script", "link", "iframe"} & set(page.tags)
    ids = set(re.findall(r' id="([^"]+)"', (folder / "report.html").read_text()))
    assert {where[1:] for where in page.fetched if where.startswith("#")} <= ids


def test_charts_of_an_earlier_report_do_not_stay(tmp_path):
    plots = tmp_path / "plots"
    plots.mkdir()
    (plots / "old.png").write_bytes(b"")
    (plots / "mine.txt").write_bytes(b"")
    report.write(results(systems=("stock",), workloads=("needle",), repeats=1), tmp_path)
    assert not (plots / "old.png").exists() and (plots / "mine.txt").exists()


def test_nothing_is_drawn_with_before_something_is_drawn():
    code = "import sys, oasis_sglang.bench.report; sys.exit('matplotlib' in sys.modules)"
    assert process([sys.executable, "-c", code]).returncode == 0


# -- figures ------------------------------------------------------------------------------------------------------


def test_a_table_has_medians_spreads_and_ratios():
    page = html(results())
    ttft = page.row("TTFT, median ↓")
    assert ttft[1].split() == ["2.20", "s", "[2.00–2.40]"], "of the base: no ratio"
    assert ttft[2].split() == ["2.75", "s", "▼", "worst", "[2.50–3.00]", "1.25x"]
    assert ttft[3].split() == ["1.10", "s", "▲", "best", "[1.00–1.20]", "0.500x"]
    speed = page.row("decode throughput ↑")
    assert speed[1].startswith("28.6 tokens/s") and speed[3].endswith("1.50x ")
    assert [cell.strip() for cell in page.row("admitted / full ↓")[1:]] == ["1", "1.00 ▼ worst 1.00x", "0.125 ▲ best 0.125x"]


def test_what_was_not_measured_is_no_zero():
    page = html(results())
    missed = page.row("missed mass ↓")
    assert missed[1].strip() == "–" and missed[2].startswith("0.0100")
    assert not any(row[0].startswith(("wire, metered", "CPU")) for row in page.rows if row), "no system has it"
    kl = page.row("KL ↓")
    assert [cell.strip() for cell in kl[1:]] == ["–", "–", "0.0150 nats"]


def test_where_the_base_cannot_say_the_first_that_can_is_named():
    peak = html(results()).row("decode host, peak ↓")
    assert peak[1].strip() == "–" and "of" not in peak[2] and peak[3].endswith("0.400x of full ")


def test_the_best_is_not_marked_when_repeats_overlap():
    made = results(systems=("stock", "oasis"), workloads=("needle",))
    case = Case("needle")
    assert Figures(made).marks(case, "ttft_p50") == {"oasis": "best", "stock": "worst"}
    assert "overlap" not in verdict.verdict(made, Figures(made)).split("mean ITL")[0].split("median TTFT")[1]
    made.summary[0].figures["ttft_p50"].low = 0.5
    assert Figures(made).marks(case, "ttft_p50") == {}
    assert "median TTFT 0.500x (the repeats overlap)" in verdict.verdict(made, Figures(made))
    assert Figures(made).marks(case, "full_transfer_bytes") == {}, "neither way is better"


def test_one_run_has_no_best():
    made = results(systems=("stock", "oasis"), workloads=("needle",), repeats=1)
    assert Figures(made).marks(Case("needle"), "ttft_p50") == {}


def test_a_ratio_to_nothing_is_none():
    made = results(systems=("stock", "oasis"), workloads=("needle",))
    made.summary[0].figures["ttft_p50"].median = 0.0
    assert Figures(made).ratio(Case("needle"), "oasis", "ttft_p50") is None


def test_every_figure_has_its_group():
    grouped = [name for names in sections.GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped)) and set(grouped) <= set(figures.FIGURES)
    made = results(systems=("stock",), workloads=("needle",))
    made.summary[0].figures = {name: records.Spread(1.0, 1.0, 1.0, 1.0, 1) for name in figures.FIGURES}
    page = html(made)
    for name, figure in figures.FIGURES.items():
        assert page.row(words.title(name)) and page.row(figure.title, figure.unit or "share or count")[3].strip() == " ".join(figure.definition.split())


def test_a_sweep_is_in_the_order_of_its_values_with_ratios_and_bars():
    made = results(sweep={"link": ("1gbit", "200mbit")})
    assert drawings.positions(["1gbit", "200mbit"]) == {"1gbit": 1000.0, "200mbit": 200.0}
    assert drawings.positions(["", "200mbit"]) == {"": 0.0, "200mbit": 1.0}
    page = html(made)
    assert [cell.strip() for cell in page.row("figure", "system")[2:]] == ["link 200mbit", "link 1gbit"]
    assert page.row("TTFT, median ↓", "oasis")[2].split() == ["0.500x", "2.20", "s"]
    case = [Case("needle", (("link", value),)) for value in ("1gbit", "200mbit")]
    chart = next(p.chart for p in drawings.sweep(Figures(made), "link", case) if p.name == "sweep-link-needle-ttft-p50")
    line = chart.series["stock"]
    assert list(line.xs) == [200.0, 1000.0] and line.ys == pytest.approx([4.4, 2.2]) and line.lows == pytest.approx([4.0, 2.0]) and chart.y_label == "s"
    assert line.highs == pytest.approx([4.8, 2.4]) and chart.ticks == {1000.0: "1gbit", 200.0: "200mbit"}


def test_bytes_are_stacked_by_phase():
    made = results(workloads=("needle",))
    bars = drawings.phases(made, Figures(made), Case("needle")).chart.bars
    assert bars["oasis: admitted"] == {"manifest": 1.0, "summaries": 4.0, "pieces": 20.0}
    assert bars["oasis: lifetime"]["on demand"] == 25.0 and "on demand" not in bars["full: admitted"]
    assert bars["stock: admitted"] == bars["full transfer"] == {"not divided": 200.0}


# -- verdict, warnings, limits ----------------------------------------------------------------------------------


def test_the_verdict_has_means_and_the_worst_case_beside_them():
    made = results()
    said = verdict.verdict(made, Figures(made))
    full, ours = said.split("oasis against")
    assert "decode throughput 1.20x;" in full, "the same everywhere"
    # chat takes oasis twice as long: 1.5 and 0.75, whose geometric mean is 1.06
    assert "decode throughput 1.06x (worst 0.750x, chat)" in ours
    assert "median TTFT 0.707x (worst 1.00x, chat)" in ours
    assert "peak of decode's host memory 0.400x of full;" in ours
    assert "admitted bytes 0.125 of a full transfer, 8.00x less" in ours and "bytes until release 0.250 of a full transfer, 4.00x less" in ours
    assert "accuracy 0.833 against 1.00;" in ours
    assert "KL to dense 0.0150 nats per token (worst request 0.0200)" in ours and "KL" not in full


def test_the_verdict_claims_nothing_that_was_not_measured():
    made = results(systems=("stock", "oasis"))
    for one in made.summary:
        one.figures = {name: spread for name, spread in one.figures.items() if name in ("failed", "ttft_p50")}
    said = verdict.verdict(made, Figures(made))
    assert "median TTFT" in said and not re.search("throughput|bytes|accuracy|KL|memory", said)


def test_cases_with_failed_requests_do_not_count():
    made = results(systems=("stock", "oasis"))
    for run in made.runs:
        if run.system == "oasis" and run.workload == "chat":
            run.requests[0].error = "went <away>"
    finished(made)
    assert "on needle (without 1 in which a request failed)" in verdict.verdict(made, Figures(made))
    page = html(made)
    assert "3 of 9 requests of oasis to chat failed; the first: went <away>" in page.text
    for run in made.runs:
        run.requests[0].error = "gone"
    finished(made)
    assert "compared in none" in verdict.verdict(made, Figures(made))


def said_of(made):
    return verdict.verdict(finished(made), Figures(made))


def test_a_repeat_that_failed_is_no_whole_case_whatever_the_median_says():
    made = results(systems=("stock", "oasis"))
    for run in made.runs:
        if (run.system, run.workload, run.repeat) == ("oasis", "chat", 1):
            for request in run.requests:
                request.error = "gone"
    finished(made)
    assert Figures(made).median(Case("chat"), "oasis", "failed") == 0
    assert "oasis against stock on needle (without 1 in which a request failed)" in said_of(made)
    for run in made.runs:  # of the base
        if (run.system, run.workload, run.repeat) == ("stock", "needle", 2):
            run.requests[0].error = "gone"
    assert "oasis: no workload was answered in full by it and by stock" in said_of(made)


def test_what_was_never_run_did_not_fail():
    made = results(systems=("stock", "full", "oasis"))
    made.runs = [run for run in made.runs if run.system != "full" and (run.system, run.workload) != ("oasis", "chat")]
    full, ours = said_of(made).split("oasis against")
    assert full.strip() == ("full: no workload was answered in full by it and by stock, so that it is compared in none; full was never run.")
    assert ours.startswith(" stock on needle: ") and "oasis was never run on chat" in ours and "request failed" not in ours


def test_repeats_that_are_missing_are_counted():
    made = results(systems=("stock", "oasis"), workloads=("needle",))
    made.runs = [run for run in made.runs if (run.system, run.repeat) != ("oasis", 2)]
    assert "oasis was run in 2 of 3 repeats of needle." in said_of(made) and "stock was run" not in said_of(made)
    assert " was run in " not in said_of(results(systems=("stock", "oasis")))


@pytest.mark.parametrize("dense", [True, False])
def test_accuracy_of_what_the_model_cannot_do_is_no_comparison(dense):
    made = results(systems=("stock", "oasis"))
    made.systems[0].dense = dense
    for run in made.runs:
        for request in run.requests:
            if run.workload == "needle":  # 0.2 on average, but for the first repeat of stock's
                request.score = 0.2 * (run.system == "stock") * (run.repeat != 1) * 1.5
            else:
                request.score = 0.5 if run.system == "stock" else 0.25
    said = said_of(made)
    lost = "accuracy says nothing on needle: the model cannot do it at this length, stock itself scores 0.200"
    assert (lost in said) is dense
    assert ("accuracy 0.250 against 0.500;" in said) is dense, "of chat alone"
    assert ("accuracy 0.125 against 0.400 (worst" in said) is not dense, "a base that selects may have lost it by that"
    for run in made.runs:
        for request in run.requests:
            request.score = 0.0
    said = said_of(made)
    assert not dense or ("accuracy says nothing on needle and chat" in said and "against 0" not in said)


def test_figures_of_one_point_say_so():
    page = html(results(sweep={"budget": (128, 256)}))
    assert "Options of systems: of the first point of the sweep" in page.text
    assert "Both are of the first repeat and of the first point of the sweep alone" in page.text
    once = html(results(repeats=1))
    assert "Options of systems: of" not in once.text and "Digest: of all prompts." in once.text and " alone: the others" not in once.text
    assert "Both are of the first repeat alone" in html(results()).text


def test_rows_of_the_load_generator_are_told_apart_by_point():
    made = results(workloads=("needle",))
    made.serving = [{"system": "oasis", "point": {"pool": pool}, "completed": pool // 100} for pool in (1600, 3200)] + [{"system": "stock", "completed": 4}]
    page = html(made)
    assert [cell.strip() for cell in page.row("completed")] == ["completed", "16", "32", "4"]
    assert [cell.strip() for cell in page.row("", "oasis, pool 1,600")] == ["", "oasis, pool 1,600", "oasis, pool 3,200", "stock"]
    assert not any(row and row[0].strip() == "point" for row in page.rows)


@pytest.mark.parametrize(("one", "warned"), [
    (Equality("full", "stock", "needle", {"concurrency": 4}, 5, 9, True), "full gave other answers than stock in 4 of 9 requests of needle, concurrency 4"),
    (Equality("full", "stock", "needle", {}, 0, 0, True), "No answer of full to needle could be compared with stock's."),
    (Equality("full", "stock", "needle", {}, 9, 9, True), None), (Equality("full", "stock", "needle", {}, 5, 9, False), None)])
def test_dense_answers_that_differ_are_a_warning_at_the_top(one, warned):
    made = results()
    made.equality = [one]
    page = html(made)
    found = [word for word in page.words if warned and warned in word]
    assert bool(found) == bool(warned) and ("Warning" in page.text) == bool(warned)
    if warned:
        assert page.text.index(warned) < page.text.index("What was run") and warned in report.markdown(sections.view(made))
        assert "FAIL" in page.row("full", str(Case(one.workload, tuple(one.point.items()))))[3]
    if not one.required:
        assert "4 of 9 answers of full to needle differ from stock's" in page.text


def test_a_failed_check_is_said_twice():
    made = results()
    assert "PASS" in html(made).row("payload and interface")[7]
    made.checks[0] = msgspec.structs.replace(made.checks[0], metered=2000.0, passed=False)
    page = html(made)
    row = page.row("payload and interface")
    assert row[5].strip() == "2.00x" and "FAIL" in row[7] and "counted 1,000, metered 2,000" in page.text.split("What was run")[0]
    assert "| FAIL |" in report.markdown(sections.view(made))


def test_limits_follow_what_was_run():
    many, once = "\n".join(verdict.limits(results())), "\n".join(verdict.limits(results(systems=("stock", "full"), repeats=1)))
    assert "median of 3 repeats" in many and "run once" in once
    assert "No answers are known for chat" in many and "2 cores" in many and "no GPU" in many and "(200mbit)" in many
    assert "not measured for full." in many and "No counter was compared" in once and "No counter was compared" not in many
    alone = results()
    alone.link = {"hosts": False}
    alone.notes = ["a note"]
    assert "shared a host" in "\n".join(verdict.limits(alone)) and verdict.limits(alone)[0] == "a note"


# -- the page -----------------------------------------------------------------------------------------------------


def test_names_are_not_markup():
    made = results()
    for one in [*made.systems, *made.runs, *made.equality]:
        name = "name" if isinstance(one, System) else "system"
        if getattr(one, name) == "full":
            setattr(one, name, "<i>full|")
    finished(made)
    view = sections.view(made)
    text = report.html(view, {picture.name: b"" for section in view.sections for picture in section.pictures})
    assert "<i>" not in text and "<b>benchmark" not in text and "&lt;i&gt;full|" in text
    heads = [line for line in report.markdown(view).splitlines() if line.startswith("| figure")]
    assert heads and all(line == "| figure | stock | &lt;i>full\\| | oasis |" for line in heads)


def test_the_page_says_what_was_run_and_defines_what_it_shows():
    page = html(results())
    for said in ("oasis bench --systems 'a|b' <x>", "a box", "0.5.23", "describes oasis", "d1ge57", "prompts share a document", "TTFT at most 10.0 s",
                 "repeat 1: stock, full, oasis; repeat 2: full, oasis, stock; repeat 3: oasis, stock, full"):
        assert said in page.text
    assert page.row("whole step")[1].strip() == "81" and page.row("output_throughput")[1].strip() == "12.3"
    assert "nothing" not in {row[0].strip() for row in page.rows if row}
    assert page.row("oasis", "needle", "2", "128")[4:6] == ["0.0150 ", "0.0200 r1 "]
    titles = [section.title for section in sections.view(results()).sections if section.level == 2]
    assert titles == ["What was run", "Workloads", "Figures by workload", "Bytes by phase", "Equality of answers", "Quality", "Where the time goes",
                      "Counters against meters", "sglang.bench_serving", "Definitions", "What this does not show"]


@pytest.mark.parametrize("made", [results(systems=("stock",), workloads=("needle",), repeats=1), results(systems=("stock",), sweep={"context": (100, 200)}, repeats=1)])
def test_one_system_is_compared_with_nothing(made, tmp_path):
    report.write(made, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "nothing to compare it with" in page.text and "Warning" not in page.text and "▲ best" not in "".join(cell for row in page.rows for cell in row)
    assert not re.search(r"\d+x\b", "".join(cell for row in page.rows for cell in row))


def test_results_without_a_run_still_make_a_report(tmp_path):
    made = results(systems=("stock", "oasis"), repeats=0)
    made.quality, made.checks, made.serving = [], [], []
    report.write(finished(made), tmp_path)
    assert "Nothing was run." in (tmp_path / "report.html").read_text()


def test_the_console_fits_its_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    made = results(sweep={"concurrency": (1, 4)})
    made.equality = [Equality("full", "stock", "needle", {}, 5, 9, True)]
    report.console(made)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "Warning: full gave other answers" in shown
    lines = shown.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("needle, concurrency 1"))
    assert lines[at + 1].split()[:3] == ["stock", "2.20", "s"]
    assert next(line for line in lines[at + 1:] if line.startswith(" oasis")).split()[1:3] == ["1.10", "s"] and "0.500x" in shown


# -- words and charts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.0, "s", "0 s"), (1.234, "s", "1.23 s"), (2.0, "s", "2.00 s"), (0.0123, "s", "12.3 ms"), (4.2e-7, "s", "0.420 µs"), (0.0, "B", "0 B"), (1536.0, "B", "1.50 KiB"), (5.3e9, "B", "4.94 GiB"),
    (1234.5, "tokens", "1,234 tokens"), (0.148, "", "0.148"), (3.0, "", "3"), (0.00012, "nats", "1.20e-04 nats"), (float("inf"), "", "inf")])
def test_amounts_can_be_read(value, unit, text):
    assert words.amount(value, unit) == text


def test_points_and_records_as_words():
    assert words.place("needle", {"context": 6000, "link": "1gbit"}) == "needle, context 6,000, link 1gbit"
    assert words.plain({"a": None, "b": [1, 2], "c": True, "d": 0.5}) == "a –; b 1 2; c yes; d 0.500"


def drawn(chart, monkeypatch):
    """The axes that a chart is drawn on."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, out, **_: kept.append(figure))
    charts.png(chart)
    return kept[0].axes[0], kept[0]


def test_lines_stand_where_they_are_and_keep_their_colours(monkeypatch):
    chart = charts.Lines("a < b", "x", "y", {"none": charts.Line((), ()), "one": charts.Line([1, 100], [2.0, 4.0], [1.5, 3.0], [2.5, 6.0])}, ticks={1: "few", 100: "many"},
                         log_x=True)
    axes, figure = drawn(chart, monkeypatch)
    (bars,) = axes.containers
    assert bars.lines[0].get_xydata().tolist() == [[1, 2], [100, 4]] and bars.lines[0].get_color() == charts.COLOURS[1]
    (ends,) = bars.lines[2]
    assert [segment.tolist() for segment in ends.get_segments()] == [[[1, 1.5], [1, 2.5]], [[100, 3], [100, 6]]]
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] == 0 and axes.get_title(loc="left") == "a < b"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["few", "many"]


def test_bars_stand_beside_one_another_and_none_is_not_zero(monkeypatch):
    axes, _ = drawn(charts.Bars("t", "y", ["a", "b"], {"one": [(1.0, 0.5, 2.0), None], "two": [(3.0, 3.0, 3.0), (4.0, 4.0, 4.0)]}), monkeypatch)
    assert [round(patch.get_height(), 3) for patch in axes.patches] == [1, 3, 4]
    assert axes.patches[0].get_x() + axes.patches[0].get_width() <= axes.patches[1].get_x()
    assert {text.get_text() for text in axes.texts} >= {"1.00", "3.00", "4.00"}


def test_stacked_parts_follow_one_another(monkeypatch):
    axes, _ = drawn(charts.Stacked("t", "MiB", ["a", "none", "b"], {"one": {"a": 1.0, "b": 2.0}, "two": {"b": 4.0}}), monkeypatch)
    _, b = axes.containers
    assert b.patches[0].get_facecolor()[:3] == tuple(int(charts.COLOURS[2][i:i + 2], 16) / 255 for i in (1, 3, 5)), "what is missing keeps its colour"
    assert [(patch.get_x(), patch.get_width()) for patch in b] == [(1, 2), (0, 4)] and [text.get_text() for text in axes.texts] == ["3.00", "4.00"]


@pytest.mark.parametrize("chart", [charts.Lines("empty", "x", "y", {"none": charts.Line((), ())}), charts.Bars("empty", "y", ["a"], {"one": [None]}),
                                   charts.Stacked("empty", "x", ["a"], {})])
def test_a_chart_without_a_point_is_refused(chart):
    with pytest.raises(ValueError, match="nothing to draw in empty"):
        charts.png(chart)


def test_the_same_chart_is_the_same_file():
    chart = charts.Lines("t", "x", "y", {f"line {i}": charts.Line([0, 1], [i, i + 1]) for i in range(9)})
    assert charts.png(chart) == charts.png(chart) and charts.inline(b"\x89PNG") == "data:image/png;base64,iVBORw=="


def test_the_installed_package_has_the_page():
    assert (files("oasis_sglang.bench") / "templates" / "report.html.j2").is_file()
    project = tomllib.loads((files("oasis_sglang") / ".." / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["oasis_sglang.bench"] == ["templates/*.j2"]


def test_a_summary_can_be_parsed_as_tables():
    text = report.markdown(sections.view(results()))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows and "What this does not show" in text and json.dumps(text)
    for head, rule in zip(rows, rows[1:]):
        if set(rule) <= set("| -"):
            assert head.count("|") - head.count("\\|") == rule.count("|")
