"""The documents are true: the examples run, tables match the code, links resolve."""

import hashlib
import json
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from benchmarks import journeys, predictions, scale
from experiments.compare import baselines, search, tables
from experiments.compare.problems import COMPARISON
from experiments.lra.problems import ARENA
from lintra import attention, checkpoint, evaluate, runtime
from lintra.attention import AttentionConfig
from lintra.bench import machines
from lintra.bench.reports import by_name, checksum
from lintra.checkpoint import from_json
from lintra.cli import evaluate_series, info, main
from lintra.evaluate import Estimate
from lintra.evaluate.forecasts import ForecastScores
from lintra.export import runtime as export

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "experiments").glob("*/*.md"),
]
SLOW_PAGES = ("using.md", "text.md", "series.md")  # they train models
TESTED_ELSEWHERE = ("adding.md",)  # tests/test_adding.py


RESULTS = sorted(
    file
    for pattern in (
        "benchmarks/results/*.json",
        "experiments/*/*.json",
        "experiments/*/outcomes/*.json",
        "experiments/*/changes/*.json",
        "experiments/*/softmax/evaluation.json",
        "lintra/compat/families.json",
        "weights/**/evaluation.json",
        "lintra/weights/**/evaluation.json",
        "lintra/weights/**/arrangements.json",
    )
    for file in ROOT.glob(pattern)
)
# sha256 and path, in the form of sha256sum, of results that are older than checksums. A line goes when its
# result is measured again; none is added.
OLDER = {
    path: digest
    for digest, path in (
        line.split() for line in (ROOT / "tests" / "older_results.txt").read_text().splitlines()
    )
}


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_result_is_as_its_program_wrote_it(file):
    """The checksum of the whole detects a figure changed by hand, or an added field."""
    content, name = file.read_bytes(), str(file.relative_to(ROOT))
    report = json.loads(content)
    if name in OLDER:
        assert "checksum" not in report, f"{name} was measured again: take its line out of older_results.txt"
        assert hashlib.sha256(content).hexdigest() == OLDER[name], f"{name} was changed: measure it again"
    else:
        assert report.get("checksum") == checksum(report), f"{name} is not as written: measure it again"


def test_older_results_are_there():
    assert OLDER.keys() <= {str(file.relative_to(ROOT)) for file in RESULTS}


def test_the_example_of_the_readme_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {x.name for x in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW_PAGES else ())
        for page in sorted(str(file.relative_to(ROOT / "docs")) for file in (ROOT / "docs").rglob("*.md"))
        if "```python" in (ROOT / "docs" / page).read_text() and page not in TESTED_ELSEWHERE
    ],
)
def test_the_examples_of_a_page_run(page, tmp_path):
    """One after the other, as one program; a recording is in its folder."""
    noise = np.random.default_rng(0).normal(size=4_000) / 10
    soundfile.write(tmp_path / "three.wav", noise, 8_000)
    if page == "format.md":
        if not runtime.available():
            pytest.skip(f"needs the runtime: {runtime.why_not()}")
        content = export.to_bytes(checkpoint.load("spoken-digits"), "float16")
        (tmp_path / "spoken-digits.lrt").write_bytes(content)
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S))
    assert code
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_table_of_the_readme_is_the_folder(capsys):
    main(["list", "--markdown"])
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", attention.names())
def test_every_mechanism_has_its_page(name):
    page = (ROOT / "docs" / "mechanisms" / f"{name}.md").read_text()
    assert f"lintra/attention/{name}.py" in page
    assert f"(mechanisms/{name}.md)" in (ROOT / "docs" / "README.md").read_text()


def anchors(document: Path) -> set[str]:
    """Return the addresses of a page's headings, as GitHub and MkDocs make them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    headings = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", each) for each in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        page = document.parent / name if name else document
        assert page.exists(), target
        if heading and page.suffix == ".md":
            assert heading in anchors(page), target


def test_every_picture_is_shown():
    shown = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for target in re.findall(r"!\[[^\]]+\]\(([^)#]+)\)", document.read_text())
    }
    folders = ("docs/pictures", "benchmarks/results", "experiments/*")
    assert {picture for folder in folders for picture in ROOT.glob(f"{folder}/*.png")} <= shown


def test_what_users_expect_has_a_state_and_a_place():
    page = (ROOT / "docs" / "expectations.md").read_text()
    page = page[page.index("## From PyTorch") :]  # the text before it states the minutes of journeys
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("expected", "---")]
    assert len(rows) > 40
    for expected, state, where in rows:
        assert state in ("has", "partly", "lacks"), expected
        assert where, expected


def test_every_page_is_in_the_menu_of_the_site():
    def pages(menu):
        if isinstance(menu, str):
            return {ROOT / "docs" / menu}
        return set().union(*(pages(x) for x in (menu.values() if isinstance(menu, dict) else menu)))

    config = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["on_config"](SimpleNamespace())
    assert set((ROOT / "docs").rglob("*.md")) <= pages(config.nav)


@dataclass
class Base:
    one: int  # beside it
    two: str = "# no comment"
    # above it,
    # in two lines
    three: int = 3
    four: dict = field(  # in its
        default_factory=lambda: {"#": 1}  # lines
    )


@dataclass
class Derived(Base):
    two: str = "2"  # told here | there
    three: int = 4
    # belongs to nothing

    five: float | None = None


def test_comments_of_fields_reach_the_reference():
    table = runpy.run_path(str(ROOT / "docs" / "fields.py"))["table"]
    assert table(Derived).splitlines()[2:] == [
        "| `one` | int |  | beside it |",
        r"| `two` | str | `'2'` | told here \| there |",
        "| `three` | int | `4` | above it, in two lines |",
        "| `four` | dict | `{'#': 1}` | in its lines |",
        "| `five` | float or None | `None` |  |",
    ]


BENCH = ROOT / "benchmarks" / "results"
CPU = BENCH / "attention-intel-xeon.json"
ALL = BENCH / "mechanisms-intel-xeon.json"


def rounded(x: float) -> str:
    """A number to three digits, without an exponent; whole ones from 1,000 on as they are."""
    if x >= 1_000:
        return f"{x if float(x).is_integer() else float(f'{x:.3g}'):,.0f}"  # counts are exact
    return f"{x:.3g}"


def figures(*reports: dict) -> str:
    """The rows of a benchmark as the documents show them; several machines have a column each."""
    machines = [re.sub(r"\(R\)| Processor", "", report["machine"]["cpu"]) for report in reports]
    heads = ["measured"] if len(reports) == 1 else machines
    lines = [f"| work | {' | '.join(heads)} | target |", "| --- " * (len(heads) + 2) + "|"]
    of_machines = [{row["what"]: row for row in report["rows"]} for report in reports]
    newest_first = sorted(reports, key=lambda report: report["date"], reverse=True)
    for what in dict.fromkeys(row["what"] for report in newest_first for row in report["rows"]):
        found = [rows.get(what) for rows in of_machines]
        cells = ["" if x is None else f"{rounded(x['figure'])} {x['unit']}" for x in found]
        cells.append(next((x["target"] for x in found if x and x["target"]), ""))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_all_machines(files: str) -> list[Path]:
    """The reports of one benchmark, in the order of the columns."""
    found = sorted(ROOT.glob(files), reverse=True)
    assert found, files
    return found


def by_machine() -> str:
    """A row for each run of the linear sum, relative to the rate of a matrix product and to softmax."""
    heads = [
        "run",
        "matmul, GFLOP/s",
        "forward, % of it",
        "forward + backward, % of it",
        "SDPA / native, both",
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    both = "forward + backward"
    for name in ("attention", "roofline"):
        for file in sorted(BENCH.glob(f"{name}-*.json")):
            report = json.loads(file.read_text())
            rows = by_name(report)
            if name == "attention":
                cells = [rows["matmul 2048^3 float32"], rows["forward, native"]]
                cells += [rows[f"{both}, native"], rows[f"{both}: SDPA softmax / native"]]
            else:
                times = [report["timings_in_seconds"][x]["median"] for x in (f"softmax, {both}", both)]
                rates = [100 * rows[f"{x}: rate"] / rows["matmul"] for x in ("forward", both)]
                cells = [rows["matmul"], *rates, times[0] / times[1]]
            figures = " | ".join(map(rounded, cells))
            lines.append(f"| [{file.stem}](../../benchmarks/results/{file.name}) | {figures} |")
    return "\n".join(lines)


def test_the_runs_of_several_machines_stand_side_by_side():
    assert by_machine() in (ROOT / "docs" / "performance" / "kernels.md").read_text()


IN_SHORT = (  # what a reader of the first page wants to know, the benchmark and its row
    (
        "training linear attention on 4,096 tokens, against PyTorch's softmax",
        "attention",
        "forward + backward: SDPA softmax / native",
    ),
    (
        "the same, the gated delta rule",
        "recurrence",
        "gated delta, forward + backward: SDPA softmax / lintra",
    ),
    ("the same, KDA", "recurrence", "KDA, forward + backward: SDPA softmax / lintra"),
    (
        "the same, softmax over 256 keys to each side",
        "softmax",
        "band 256 + 256, forward + backward: SDPA softmax / it",
    ),
    (
        "reading 2,048 tokens with a whole Mamba-2 model, against transformers",
        "drop_in",
        "Mamba-2, prefill of 2,048 tokens, 2 threads",
    ),
    (
        "a training step of a whole model with the gated delta rule, against transformers",
        "drop_in",
        "GDN, training step of 2,048 tokens, 2 threads",
    ),
    (
        "drawing 64 images at once with the paper's MNIST model, against softmax with cached keys",
        "generation",
        "64 at once, float32 / softmax, cached keys and values",
    ),
    ("the paper's MNIST model in C, one thread", "runtime", "paper: native, float32"),
)


def in_short() -> str:
    lines = ["| what | Intel Xeon | AMD EPYC |", "| --- | --- | --- |"]
    for what, name, row in IN_SHORT:
        cells = [what]
        for machine in ("intel-xeon", "amd-epyc"):
            file = BENCH / f"{name}-{machine}.json"
            rows = {x["what"]: x for x in json.loads(file.read_text())["rows"]} if file.exists() else {}
            cells.append(f"{rounded(rows[row]['figure'])} {rows[row]['unit']}" if rows else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_figures_in_short_are_those_of_the_files():
    assert in_short() in (ROOT / "docs" / "performance.md").read_text()


def test_what_info_says_of_chunked_pytorch_is_measured():
    name = "forward + backward: chunked PyTorch / native"
    rows = by_name(json.loads(CPU.read_text()))
    assert round(rows[name]) == info.CHUNKED_IS_SLOWER


MODES = ("causal", "bidirectional")


def comparison(report: dict) -> str:
    """A row for each mechanism: milliseconds and the ratio to softmax for both forms, and the growth."""
    rows = by_name(report)
    tokens = f"{report['sizes']['tokens']} tokens"
    form = "{0}, ms | {0} against softmax"
    forms = " | ".join(form.format(mode) for mode in MODES)
    head = f"| mechanism | {forms} | quartiles of the first, ms | twice the length | at most |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for name in sorted({what.split(",")[0] for what in rows if what.endswith(f", {tokens}")}):
        cells = [name]
        for mode in MODES:
            time = rows.get(f"{name}, {mode}, {tokens}")
            ratio = rows.get(f"{name}, {mode}: SDPA softmax / it")
            cells += ["" if time is None else f"{time:,.0f}", "" if ratio is None else f"{ratio:.1f} x"]
        timings = (report["timings_in_seconds"].get(f"{name} {mode} {tokens.split()[0]}") for mode in MODES)
        low, high = (1e3 * x for x in next(each for each in timings if each)["quartiles"])
        cells.append(f"{low:,.0f} to {high:,.0f}")
        for kind in ("mean", "most"):
            growth = [rows.get(f"{name}, {mode}: twice the length, {kind}") for mode in MODES]
            cells.append(next((f"{x:.2f} x" for x in growth if x is not None), ""))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_figures_of_choosing_are_those_of_the_file():
    report = json.loads(ALL.read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    assert comparison(report) in (ROOT / "docs" / "choosing.md").read_text()


SCALING = ROOT / "experiments" / "scaling"


def against_length(report: dict) -> str:
    """A row for each contestant: one sequence at two lengths, and the growth."""
    rows = by_name(report)
    ends = (4096, max(report["sizes"]["lengths"]))
    columns = [f"{n:,} tokens: {what}" for n in ends for what in ("time", "memory")]
    heads = [f"{n:,}, {unit}" for n in ends for unit in ("ms", "MB")]
    lines = [
        f"| contestant | {' | '.join(heads)} | time ~ N^ | memory ~ N^ | faster than SDPA from |",
        "| --- " * (len(heads) + 4) + "|",
    ]
    for name in dict.fromkeys(
        what.split(":")[0].rpartition(", ")[0] for what in rows if " tokens: time" in what
    ):
        # At the greatest length, softmax is measured by a single call.
        found = [
            rows.get(f"{name}, {column}", rows.get(f"{name}, {column.replace(':', ', one call:')}"))
            for column in columns
        ]
        cells = ["" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in found]
        for what in ("time", "memory"):
            found = rows.get(f"{name}: {what} grows with the length to the power of")
            cells.append("" if found is None else f"{found:.2f}")
        first = rows.get(f"{name}: faster than softmax, SDPA from")
        lines.append(f"| {' | '.join([name, *cells, '' if first is None else f'{first:,.0f}'])} |")
    return "\n".join(lines)


def whole_model(report: dict) -> str:
    """Training by length, then the next token by position."""
    rows = by_name(report)
    ways = ("linear", "softmax", "softmax / linear")
    written = ("linear, as an RNN", "softmax, cached keys and values")
    head = "| training, tokens | linear, tokens/s | softmax, tokens/s | ratio |"
    lines = [head, "| --- | --- | --- | --- |"]
    for n in report["sizes"]["lengths"]:
        linear, softmax, ratio = (rows[f"{way}, training step of {n:,} tokens"] for way in ways)
        lines.append(f"| {n:,} | {linear:,.0f} | {softmax:,.0f} | {ratio:.1f} x |")
    head = f"| next token, position | {written[0]}, ms | {written[1]}, ms |"
    lines += ["", head, "| --- | --- | --- |"]
    for n in report["sizes"]["next"]["positions"]:
        rnn, cached = (rows[f"{way} at {n}"] for way in written)
        lines.append(f"| {n:,} | {rnn:.2f} | {cached:.2f} |")
    return "\n".join(lines)


def asked(report: dict) -> str:
    """The rows that have a target, and whether it is met."""
    return figures(report | {"rows": [row for row in report["rows"] if row["target"]]})


@pytest.mark.parametrize(
    ("file", "table"),
    [("attention.json", against_length), ("attention.json", asked), ("model.json", whole_model)],
)
def test_the_figures_of_scaling_are_those_of_the_files(file, table):
    report = json.loads((SCALING / file).read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    assert table(report) in (SCALING / "README.md").read_text()


@pytest.mark.parametrize(
    ("files", "page"),
    [
        ("benchmarks/results/attention-*.json", "README.md"),
        ("benchmarks/results/recurrence-*.json", "docs/performance/kernels.md"),
        ("benchmarks/results/roofline-*.json", "docs/performance/kernels.md"),
        ("benchmarks/results/softmax-*.json", "docs/performance/kernels.md"),
        ("benchmarks/results/busy-*.json", "docs/performance/kernels.md"),
        ("benchmarks/results/runtime-*.json", "docs/performance/generation.md"),
        ("benchmarks/results/context-*.json", "docs/scale.md"),
        ("benchmarks/results/stream-*.json", "docs/data.md"),
        ("benchmarks/results/onnx-*.json", "docs/performance/generation.md"),
        ("benchmarks/results/original-*.json", "docs/migrating.md"),
        ("benchmarks/results/drop_in-*.json", "docs/huggingface.md"),
        ("experiments/speech/streaming.json", "experiments/speech/README.md"),
    ],
)
def test_the_figures_of_a_benchmark_are_those_of_the_file(files, page):
    reports = [json.loads(file.read_text()) for file in of_all_machines(files)]
    assert all({"machine", "versions", "command", "date"} <= set(report) for report in reports)
    assert figures(*reports) in (ROOT / page).read_text()


def losses(report: dict) -> str:
    """A row for each mechanism: its error with a bfloat16 state; at the last position, with others too."""
    rows = by_name(report)
    positions = [f"{n:,}" for n in report["sizes"]["positions"]]
    columns = [("bfloat16", at) for at in positions]
    columns += [(way, positions[-1]) for way in ("bfloat16, at random", "float32")]
    heads = [*positions, *(f"{at}, {way.split(', ')[-1]}" for way, at in columns[len(positions) :])]
    lines = [f"| mechanism, token | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for name in dict.fromkeys(what.rpartition(", float32, ")[0] for what in rows if ", float32, " in what):
        cells = [f"{rows[f'{name}, {way}, {at} tokens']:.2g} %" for way, at in columns]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def test_the_figures_of_a_state_in_bfloat16_are_those_of_the_file():
    report = json.loads((ROOT / "benchmarks" / "results" / "drift-amd-epyc.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    assert losses(report) in (ROOT / "docs" / "performance" / "generation.md").read_text()


MEASURED = ROOT / "benchmarks" / "results"


def beside(report: dict) -> str:
    """A row for each figure of `overhead`: in the older checkout, now, and the target."""
    rows = {row["what"]: row for row in report["rows"]}
    lines = ["| figure | 0.1 | now | target |", "| --- | --- | --- | --- |"]
    for what, row in rows.items():
        if f"{what}, before" in rows:
            before, now = (
                f"{figure:,.0f}" if float(figure).is_integer() else f"{figure:.3g}"
                for figure in (rows[f"{what}, before"]["figure"], row["figure"])
            )
            unit = f" {row['unit']}" if row["unit"] else ""
            lines.append(f"| {what} | {before}{unit} | {now}{unit} | {row['target'].strip()} |")
    ratio = rows["eager decode step / before"]
    lines.append(f"| eager decode step, ratio | | {ratio['figure']:.3g} x | {ratio['target']} |")
    return "\n".join(lines)


def sped_up(report: dict) -> str:
    """The slowest and the fastest rows of `regression`, and the mean of all."""
    rows = sorted((row for row in report["rows"] if row["unit"] == "x"), key=lambda row: row["figure"])
    mean = next(row for row in rows if row["what"].startswith("geometric mean"))
    rows.remove(mean)
    shown = [*rows[:8], *rows[-8:], mean]
    lines = ["| work | 0.1 / now |", "| --- | --- |"]
    lines += [f"| {row['what'].removesuffix(': before / now')} | {row['figure']:.3f} x |" for row in shown]
    return "\n".join(lines)


@pytest.mark.parametrize(("file", "table"), [("overhead", beside), ("regression", sped_up)])
def test_the_figures_beside_the_older_version_are_those_of_the_file(file, table):
    report = json.loads((MEASURED / f"{file}-intel-xeon.json").read_text())
    assert table(report) in (ROOT / "docs" / "performance" / "targets.md").read_text()


def test_the_table_of_families_is_that_of_the_file():
    report = json.loads((ROOT / "lintra" / "compat" / "families.json").read_text())
    table = runpy.run_path(str(ROOT / "benchmarks" / "families.py"))["table"]
    assert table(report) in (ROOT / "docs" / "huggingface.md").read_text()


def test_the_table_of_conformance_is_that_of_the_file():
    report = json.loads((ROOT / "benchmarks" / "results" / "conformance.json").read_text())
    assert {"machine", "versions", "command", "commit", "date"} <= set(report)
    table = runpy.run_path(str(ROOT / "benchmarks" / "conformance.py"))["table"]
    assert table(report) in (ROOT / "docs" / "conformance.md").read_text()


@pytest.mark.parametrize("file", sorted(MEASURED.glob("journeys-*.json")), ids=lambda file: file.name)
def test_the_minutes_of_journeys_are_those_of_the_file(file):
    assert journeys.table(json.loads(file.read_text())) in (ROOT / "docs" / "expectations.md").read_text()


@pytest.mark.slow
def test_the_predictions_of_scale_are_those_of_the_program():
    """Nothing is measured there: the predictions are the same on every machine."""
    report = json.loads((MEASURED / "predictions.json").read_text())
    assert report["predicted"]
    rows, _ = predictions.run(predictions.Sizes(), lambda done: None)
    assert {row.what: row.figure for row in rows} == pytest.approx(by_name(report))
    page = (ROOT / "docs" / "scale.md").read_text()
    assert all(table in page for table in predictions.tables(report))
    for name, value in report["constants"].items():
        assert f"`{name}`" in page
        assert value == getattr(machines, name)


@pytest.mark.parametrize("file", sorted(MEASURED.glob("scale-*.json")), ids=lambda file: file.name)
def test_measured_steps_stand_beside_predicted_ones(file):
    assert scale.table(json.loads(file.read_text())) in (ROOT / "docs" / "scale.md").read_text()


COPYING = ROOT / "experiments" / "copy"
SPEECH = ROOT / "experiments" / "speech"
IMAGES = ROOT / "experiments" / "images"


@pytest.mark.parametrize("study", [COMPARISON, ARENA], ids=["compare", "lra"])
def test_the_tables_of_a_comparison_are_of_its_outcomes(study):
    outcomes = search.read_outcomes(study)
    assert outcomes
    assert tables.sections(outcomes, study) in (study.folder / "README.md").read_text()
    assert tables.searches(outcomes, study) == (study.folder / "searches.md").read_text()
    assert json.loads((study.folder / "points.json").read_text())["points"] == tables.points(outcomes)
    for outcome in outcomes:
        assert {"machine", "versions", "command", "date"} <= set(outcome)
        assert re.fullmatch("[0-9a-f]{40}", outcome["commit"]), "trained with changes that no commit has"


def test_what_is_said_of_byte_frequencies_is_measured():
    report = json.loads((ARENA.folder / "frequencies.json").read_text())
    page = " ".join((ARENA.folder / "README.md").read_text().split())
    single, paired = (report["scores"][name]["test"] for name in ("bytes", "pairs of bytes"))
    assert f"is right on {100 * single:.1f} % of the 25,000 test reviews" in page
    assert f"each pair of neighbouring bytes occurs, on {100 * paired:.1f} %" in page
    assert report["scores"]["bytes"]["reviews"]["test"] == 25_000
    tested = " and ".join(
        f"{100 * report['scores'][name]['tested']:.1f}" for name in ("bytes", "pairs of bytes")
    )
    assert f"on {tested} % of the 2,000 that mechanisms are tested on" in page


def test_what_is_said_of_first_operators_is_measured():
    scores = json.loads((ARENA.folder / "operators.json").read_text())["scores"]
    page = " ".join((ARENA.folder / "README.md").read_text().split())
    own, arena = scores["ListOps of 51 to 199 tokens"], scores["ListOps of 501 to 1,999 tokens"]
    assert f"is right on {100 * own['test']:.1f} % of the test expressions" in page
    assert f"{100 * own['validation']:.1f} % of those to validate on" in page
    assert f"on {100 * arena['validation']:.1f} % of expressions as long as the arena's" in page


def test_what_is_said_of_guesses_is_measured():
    scores = baselines.read(COMPARISON)
    shown = {name: [f"{100 * x:.1f}" for x in rules.values()] for name, rules in scores.items()}
    (often, rest), (often_of_64, rest_of_64) = shown["mqar-64-16-64"], shown["mqar-256-64-128"]
    _, copied = shown["copying"]
    page = " ".join((COMPARISON.folder / "README.md").read_text().split())
    blind, three, four = shown["s5"]
    assert f"guesses from there is right after {three} %, and after {four} % with four" in page
    assert f"a guess at every place is right after {blind} %" in page
    assert f"is right on {rest} % of 16 pairs and on {rest_of_64} % of 64" in page
    assert f"of the commonest value alone on {often} and {often_of_64} %" in page
    assert f"A guess of the commonest symbol not yet copied is right on {copied} %" in page


def test_the_tables_of_copying_are_those_of_its_outcomes():
    run = runpy.run_path(str(COPYING / "run.py"))
    page = (COPYING / "README.md").read_text()
    assert run["search_table"]() in page
    assert run["table"]() in page
    assert run["hours"]() in page


@pytest.mark.parametrize("folder", [COPYING, SPEECH], ids=lambda folder: folder.name)
def test_outcomes_are_of_the_mechanisms_that_their_experiment_names(folder):
    """Also of those written before a mechanism had all of its current fields."""
    models = runpy.run_path(str(folder / "run.py"))["MODELS"]
    for file in (folder / "outcomes").iterdir():
        (config,) = (config for name, config in models.items() if name in file.stem)
        settings = json.loads(file.read_text())["settings"]["model"]
        settings = settings.get("encoder", settings)
        if "attention" in settings:  # a Bi-LSTM has none
            assert from_json(AttentionConfig, settings["attention"], file.stem) == config, file


def test_the_scores_of_shipped_models_are_those_of_their_files():
    shipped = ROOT / "lintra" / "weights"
    page = (IMAGES / "README.md").read_text()
    for folder, seen in ((shipped / "mnist-small", "384,000"), (ROOT / "weights" / "mnist", "216,256")):
        scores = _scores(folder)
        assert f"({scores['bits_per_dim']['mean']:.3f} bits/dim)" in (ROOT / "README.md").read_text()
        assert f"| {seen} | {scores['bits_per_dim_without_the_first']['mean']:.3f} |" in page


def test_softmax_beside_the_large_model_is_scored_as_it_is():
    page = " ".join((IMAGES / "README.md").read_text().split())
    linear, softmax = (_scores(folder) for folder in (ROOT / "weights" / "mnist", IMAGES / "softmax"))
    name = "bits_per_dim_without_the_first"
    assert f"| 265,472 | {softmax[name]['mean']:.3f} |" in page
    ahead = linear[name]["mean"] - softmax[name]["mean"]
    assert f"is {ahead:.3f} bits/dim ahead" in page


def test_what_is_said_of_reading_drawn_digits_is_measured():
    report = json.loads((IMAGES / "readability.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    readability = runpy.run_path(str(IMAGES / "readability.py"))
    assert readability["table"](report) in (IMAGES / "README.md").read_text()
    for name in readability["MODELS"]:
        folder = ROOT / ("lintra/weights/mnist-small" if name == "mnist-small" else name)
        assert readability["sentence"](report, name) in " ".join((folder / "README.md").read_text().split())


def test_the_large_model_is_scored_on_all_test_images():
    page = " ".join((IMAGES / "README.md").read_text().split())
    score = _scores(ROOT / "weights" / "mnist")["bits_per_dim"]
    assert score["samples"] == 10_000
    assert f"{score['mean']:.3f} bits/dim of all values of the 10,000 test images" in page


def test_the_figures_of_a_gpu_are_those_of_the_file():
    report = json.loads((ROOT / "benchmarks" / "results" / "gpu-nvidia-h200.json").read_text())
    assert figures(report) in (ROOT / "docs" / "performance" / "gpu.md").read_text()


def _scores(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text())["scores"]


def test_the_arrangements_of_the_digits_are_those_of_the_file():
    report = json.loads((ROOT / "lintra" / "weights" / "spoken-digits" / "arrangements.json").read_text())
    run = runpy.run_path(str(SPEECH / "arrangements.py"))
    page = (SPEECH / "README.md").read_text()
    assert run["table"](report) in page
    rows = by_name(report)
    assert rows == {row.what: row.figure for row in run["rows"](report["arrangements"])}
    mean, deviation = (
        rows[f"strings of 1 to 7 digits, word errors, {what}"] for what in ("mean", "standard deviation")
    )
    told = f"{mean:.2f} % of the words, with a standard deviation of {deviation:.2f} %"
    assert told in " ".join(page.split())
    assert told in " ".join((ROOT / "docs" / "speech.md").read_text().split())


def test_linear_attention_is_said_to_be_the_slower_one_for_short_utterances():
    rows = by_name(json.loads((SPEECH / "times.json").read_text()))
    linear, softmax = (rows[f"AN4: {model}, an epoch"] for model in ("linear", "softmax"))
    assert linear > softmax
    for page in (SPEECH / "README.md", ROOT / "docs" / "speech.md"):
        assert f"{linear:.1f} s against {softmax:.1f} s" in " ".join(page.read_text().split())


def test_the_error_rates_of_speech_are_those_of_its_outcomes():
    """The output of each trained model is in the repository, and its errors are counted again. So are the
    validation errors of the learning rates tried, of which the one with the fewest is chosen."""
    run = runpy.run_path(str(SPEECH / "run.py"))
    report = json.loads((SPEECH / "results.json").read_text())["scores"]
    for corpus, label in run["CORPORA"].items():
        for model, found in report[corpus].items():
            of = f"{label}-{model}-*seed-*.json".replace(" ", "-")
            outcomes = [json.loads(x.read_text()) for x in sorted((SPEECH / "outcomes").glob(of))]
            rate = [told["settings"]["train"]["lr"] for told in outcomes]
            seed = [told["settings"]["train"]["seed"] for told in outcomes]
            if (corpus, model) in run["RATES"] and found["searched"]:
                last = {
                    f"{lr:g}": list(told["curve"].values())[-1]
                    for lr, of, told in zip(rate, seed, outcomes, strict=True)
                    if of == run["SEEDS"][0]
                }
                assert found["searched"] == last
                assert f"{found['lr']:g}" == min(last, key=last.__getitem__)
            taken = [told for lr, told in zip(rate, outcomes, strict=True) if lr == found["lr"]]
            unit = run["UNIT"][corpus]
            counted = [evaluate.error_rates(run["heard"](x, run["BEST"]), unit)[unit].rate for x in taken]
            assert counted == [each[unit]["rate"] for each in found["seeds"]]
            for kind in (run["BEST"], run["WITH_NGRAMS"]):  # of all seeds together, with intervals
                if kind in found:
                    assert run["_of_all"]([run["heard"](x, kind) for x in taken], unit) == found[kind]


def test_the_table_of_changes_is_that_of_their_files():
    """Each change was trained equally long, and none was judged by the test set."""
    run = runpy.run_path(str(SPEECH / "changes.py"))
    files = [run["kept"](name) for name in run["CHANGES"]]
    assert sorted(files) == sorted((SPEECH / "changes").glob("*.json"))
    assert run["table"]() in (SPEECH / "README.md").read_text()
    for file in files:
        outcome = json.loads(file.read_text())
        assert max(map(int, outcome["curve"])) == outcome["settings"]["train"]["steps"] == run["STEPS"]
        assert "found" not in outcome


def steps(report: dict) -> list[str]:
    """The time of a step, for one sequence and for many, and the resulting images per second."""
    rows = by_name(report)
    ways = ("eager", "float32", "bfloat16", "int8", "softmax, cached keys and values")
    lines = []
    for batch, name in ((1, "1 sequence"), (64, "64 sequences")):
        taken = [rows[f"a step of {batch}, {way}"] for way in (*ways, "drawing")]
        lines.append(f"| {name}, ms | {' | '.join(f'{x:.3g}' for x in taken)} |")
    rates = [f"{rows[f'64 at once, {way}']:.3g}" for way in ways]
    lines.append(f"| 64 sequences, images/s, drawing included | {' | '.join(rates)} | |")
    step, drawing = of_256(report)
    lines.append(f"| 256 sequences, ms | | {step:.3g} | | | | {drawing:.3g} |")
    rate = rows["256 at once, float32"]
    return [*lines, f"| 256 sequences, images/s, drawing included | | {rate:.3g} | | | | |"]


def of_256(report: dict) -> list[float]:
    """Milliseconds of a step and of drawing."""
    return [1e3 * report["timings_in_seconds"][f"256: {way}"]["median"] for way in ("float32", "drawing")]


def where_the_time_goes(report: dict) -> str:
    """The rate of the products of 256 sequences relative to a large one, from the measured share at 64."""
    rows = by_name(report)
    share, taken = rows["a step of 64, float32: of the matmul's rate"], rows["a step of 64, float32"]
    step, drawing = of_256(report)
    many, drawn = share * taken * 256 / 64 / step, 100 * drawing / (step + drawing)
    return f"At 256 it is {many:.1f} % of that rate, and drawing takes {drawn:.1f} % of the whole time."


def test_the_figures_of_a_fused_step_are_those_of_the_file():
    report = json.loads((ROOT / "benchmarks" / "results" / "generation-intel-xeon.json").read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    page = (ROOT / "docs" / "performance" / "generation.md").read_text()
    assert "\n".join(steps(report)) in page
    rows = by_name(report)
    assert where_the_time_goes(report) in " ".join(page.split())
    reading = rows["reading the weights at the rate of a copy, float32"]
    assert f"Reading the float32 weights at the rate of a copy would take {reading:.3g} ms." in page
    one, many, ratio = (
        rows[what]
        for what in (
            "a step of 1, float32",
            "64 at once, float32",
            "64 at once, float32 / softmax, cached keys and values",
        )
    )
    assert f"takes {one:.2f} ms a\nvalue" in (ROOT / "README.md").read_text()
    assert f"{many:.1f} images a second for 64, {ratio:.1f} times" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("folder", "file", "tables"),
    [
        (IMAGES, "ablation.json", "ablation_tables"),
        (IMAGES, "hours.json", "hours_tables"),
        (IMAGES, "speed.json", "speed_tables"),
        (SPEECH, "results.json", "tables"),
    ],
)
def test_the_tables_of_an_experiment_are_those_of_the_files(folder, file, tables):
    report = json.loads((folder / file).read_text())
    assert {"machine", "versions", "command", "date"} <= set(report)
    page = (folder / "README.md").read_text()
    for table in runpy.run_path(str(folder / "run.py"))[tables](report):
        assert table in page


def test_the_scores_of_forecasts_are_those_of_the_files():
    """The scores of one training as `lintra evaluate` prints them, then a line for each head."""
    page, folder = (ROOT / "docs" / "series.md").read_text(), ROOT / "experiments" / "series"
    for head in ("student-t", "gaussian", "quantile"):
        report = json.loads((folder / f"{head}.json").read_text())
        assert (report["task"]["head"], report["partial"]) == (head, False)
        scores = {name: _forecast_scores(each) for name, each in report["scores"].items()}
        assert f"| `{head}` | {' | '.join(evaluate_series.figures(scores['model']))} |" in page
        if head == "student-t":
            assert f"\n{evaluate_series.table(scores)}\n\n{evaluate_series.verdict(scores)}\n" in page


def _forecast_scores(report: dict) -> ForecastScores:
    return ForecastScores(**{name: Estimate(**each) for name, each in report.items()})


def test_the_table_of_texts_is_of_the_outcomes():
    columns = {"reviews, %": (ARENA, "text"), "Shakespeare, bits per byte": (COMPARISON, "shakespeare")}
    assert tables.across(columns) in (ROOT / "docs" / "choosing.md").read_text()
