"""experiments/compare: halving resumes, diverged runs lose, other data is refused, tables are correct."""

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.compare import __main__ as command
from experiments.compare import baselines, contestants, problems, search, tables
from experiments.compare.search import Contest, better_half
from experiments.lra import __main__ as arena
from experiments.lra import problems as lra
from experiments.trials import train_ready
from lintra.bench.reports import checksum
from lintra.tasks import listops, state_tracking
from lintra.tasks.datasets import cifar10

TINY = dataclasses.replace(
    problems.BY_NAME["parity"],
    steps={"small": 8, "whole": 8},
    settings=state_tracking.Config(length=6, validate_samples=20),
    batch=2,
    rates=(3e-4, 1e-3, 3e-3, 1e-2),
    network={"layers": 1, "width": 32, "heads": 1, "position": "none"},
)


@pytest.fixture
def contest(tmp_path, one_thread, monkeypatch):
    monkeypatch.setattr(search, "VALIDATION_SAMPLES", 10)
    monkeypatch.setattr(search, "TEST_SAMPLES", 10)
    linear = contestants.BY_NAME["linear"]
    return Contest(TINY, linear, study=of(tmp_path, TINY))


def of(folder, *tasks):
    return dataclasses.replace(problems.COMPARISON, folder=folder, problems=tasks)


def write(attempt, validation, **more):
    """Write an outcome as if it had been trained."""
    attempt.kept.parent.mkdir(exist_ok=True)
    found = {"diverged": validation is None, "validation": validation, "test": None, "seconds": 36.0}
    content = {"settings": attempt.settings(), **attempt.facts, **found, "parameters": 7, "state_bytes": 64}
    attempt.kept.write_text(json.dumps(content | more))


def test_the_better_half_of_rates():
    scores = {1.0: 0.5, 2.0: 0.9, 3.0: math.nan, 4.0: 0.7}
    assert better_half(scores, lower_is_better=False) == [2.0, 4.0]
    assert better_half(scores, lower_is_better=True) == [1.0, 4.0]
    assert better_half({1.0: 0.5, 2.0: math.nan}, lower_is_better=False) == [1.0]
    assert better_half({1.0: math.nan, 2.0: math.nan}, lower_is_better=False) == []
    assert better_half({2.0: 0.5, 1.0: 0.5}, lower_is_better=False) == [1.0]


def test_halving_asks_for_what_is_missing_and_nothing_else(contest):
    """From 4 rates to 2 to 1, then three seeds not used in the search; at any moment it follows the files."""
    first = contest.ready()
    assert [(one.training.lr, one.training.steps) for one in first] == [(rate, 2) for rate in TINY.rates]
    assert not any(one.final for one in first)
    for one, score in zip(first[:3], (0.2, 0.8, 0.6), strict=True):
        write(one, score)
    assert [one.name for one in contest.ready()] == [first[3].name]
    write(first[3], None)
    second = contest.ready()
    assert [(one.training.lr, one.training.steps) for one in second] == [(1e-3, 4), (3e-3, 4)]
    write(second[0], 0.5)
    write(second[1], 0.9)
    last = contest.ready()
    assert [(one.training.lr, one.training.steps) for one in last] == 3 * [(3e-3, 8)]
    assert [one.training.seed for one in last] == list(search.SEEDS)
    assert all(one.final for one in last)
    for one in last:
        write(one, 0.9, test=0.8)
    assert contest.ready() == []


def test_a_search_of_one_halving_leaves_the_best_rate(contest):
    problem = dataclasses.replace(TINY, rates=(1e-3, 3e-3, 1e-2), halvings=1)
    contest = dataclasses.replace(contest, problem=problem)
    first = contest.ready()
    assert [(one.training.lr, one.training.steps) for one in first] == [(rate, 4) for rate in problem.rates]
    for one, score in zip(first, (0.2, 0.8, 0.6), strict=True):
        write(one, score)
    assert [(one.training.lr, one.training.steps) for one in contest.ready()] == 3 * [(3e-3, 8)]


def test_a_contest_whose_trainings_all_diverge_ends(contest):
    for one in contest.ready():
        write(one, None)
    assert contest.ready() == []


def test_an_outcome_of_other_settings_is_refused(contest):
    (one, *_) = contest.ready()
    write(one, 0.5)
    other = dataclasses.replace(one, training=dataclasses.replace(one.training, warmup=7))
    with pytest.raises(SystemExit, match="is of other settings than"):
        other.scored()


def test_a_training_is_scored_and_written_once(contest):
    one, *others = contest.ready()
    tested = contest.attempt(1e-3, 2, search.SEEDS[0])
    for each in (one, tested):
        each.train()
        assert not each.folder.exists()
    report = json.loads(one.kept.read_text())
    assert report["checksum"] == checksum(report)
    assert {"commit", "machine", "versions", "command", "settings"} <= set(report)
    assert (report["test"], report["diverged"]) == (None, False)
    assert 0 <= report["validation"] <= 1
    assert report["state_bytes"] == 4 * (32 * 32 + 32)  # one head: kv and z, float32
    assert 0 <= json.loads(tested.kept.read_text())["test"] <= 1
    assert [each.name for each in contest.ready()] == [each.name for each in others]


def test_a_training_of_an_encoder_has_no_state(contest):
    tiny = dataclasses.replace(
        lra.ARENA.by_name["listops"],
        settings=listops.Config(shortest=5, longest=30, depth=3, validate_samples=10),
        batch=2,
        network={"layers": 1, "width": 32, "heads": 1},
    )
    one = dataclasses.replace(contest, problem=tiny).attempt(1e-3, 2, search.SEEDS[0])
    one.train()
    report = json.loads(one.kept.read_text())
    assert report["state_bytes"] is None
    assert 0 <= report["test"] <= 1


def test_a_killed_training_is_gone_on_with(contest):
    """A training that has begun has a folder, and the next start resumes it."""
    (one, *_) = contest.ready()
    run = search.train.Run.create(one.folder, task=one.task, model=one.model, train=one.training)
    assert run.folder.exists()
    one.train()
    assert one.scored() is not None


def test_a_training_that_diverges_is_written_as_such(contest):
    (*_, one) = contest.ready()
    wild = dataclasses.replace(
        one, training=dataclasses.replace(one.training, lr=1e29, clip=None, warmup=0, steps=20)
    )
    wild.train()
    report = json.loads(wild.kept.read_text())
    assert (report["diverged"], report["validation"]) == (True, None)
    assert "finite" in report["why"]
    assert math.isnan(wild.scored())


@pytest.mark.slow
def test_a_search_from_beginning_to_end_trains_nothing_twice(contest, capsys):
    queue = command.Queue([contest])
    train_ready(queue, workers=2, minutes=5)
    assert len(list(contest.study.outcomes.iterdir())) == 4 + 2 + 3
    files = {file: file.stat().st_mtime_ns for file in contest.study.outcomes.iterdir()}
    train_ready(command.Queue([contest]), workers=2, minutes=5)
    assert files == {file: file.stat().st_mtime_ns for file in contest.study.outcomes.iterdir()}
    command.say([contest], each=False)
    assert capsys.readouterr().out.endswith("1 of 1 searches are done\n")


def test_nothing_is_begun_when_the_time_is_up(contest):
    train_ready(command.Queue([contest]), workers=1, minutes=0)
    assert not contest.study.outcomes.exists()


def test_other_data_is_refused_by_its_hash(tmp_path):
    shakespeare = problems.BY_NAME["shakespeare"]
    with pytest.raises(SystemExit, match=r"shakespeare reads tinyshakespeare\.txt: give its folder"):
        shakespeare.check(None)
    with pytest.raises(SystemExit, match=r"tinyshakespeare\.txt is missing: README\.md says"):
        shakespeare.check(tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"other")
    found, asked = hashlib.sha256(b"other").hexdigest(), problems.SHAKESPEARE["tinyshakespeare.txt"]
    with pytest.raises(SystemExit, match=f"is other data: its SHA-256 is {found} and should be {asked}"):
        shakespeare.check(tmp_path)
    problems.BY_NAME["parity"].check(None)


def test_other_images_are_refused_by_their_hash(tmp_path, monkeypatch):
    image = lra.ARENA.by_name["image"]
    with pytest.raises(SystemExit, match=r"image reads CIFAR-10: give its folder"):
        image.check(None)
    with pytest.raises(SystemExit, match=r"holds no cifar10 files"):
        image.check(tmp_path)
    draw = np.random.default_rng(0)
    monkeypatch.setattr(cifar10, "_SHARD", 10)
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        records = np.column_stack([draw.integers(10, size=10), draw.integers(256, size=(10, 3_072))])
        (tmp_path / name).write_bytes(records.astype(np.uint8).tobytes())
    with pytest.raises(
        SystemExit, match=r"CIFAR-10 in .* is other data: its SHA-256 is [0-9a-f]{64}"
    ) as refused:
        image.check(tmp_path)
    found = re.search("is ([0-9a-f]{64}) and", str(refused.value))[1]
    monkeypatch.setattr(lra, "CIFAR_10", found)
    image.check(tmp_path)


def test_the_text_that_is_tested_on_is_no_part_of_what_is_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "HERE", tmp_path)
    whole = torch.randint(256, (40_000,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "tinyshakespeare.txt").write_bytes(whole)
    shakespeare = problems.BY_NAME["shakespeare"]
    trained = Path(shakespeare.task(tmp_path).data).read_bytes()
    tested = shakespeare.judge(tmp_path).test.__getitems__(range(15))["tokens"].byte().numpy().tobytes()
    assert trained + tested == whole[: 36_000 + 15 * 256]


@pytest.mark.parametrize(
    "problem",
    [*(problems.BY_NAME[name] for name in ("parity", "mqar-64-16-64", "shakespeare")), *lra.ARENA.problems],
    ids=lambda problem: problem.name,
)
def test_every_contestant_fits_the_problem(problem):
    for contestant in contestants.CONTESTANTS:
        if contestant.obstacle(problem) is None:
            assert contestant.model(problem).width == problem.width


@pytest.mark.parametrize("name", ["delta-convolved", "softmax-convolved", "linear-convolved"])
def test_no_network_is_convolved_twice(name):
    convolved = contestants.BY_NAME[name]
    assert convolved.obstacle(problems.BY_NAME["parity"]) is None
    assert "convolution" in convolved.obstacle(problems.BY_NAME["mqar-64-16-64"])


def test_a_convolution_of_the_network_makes_it_causal():
    config = contestants.BY_NAME["linear-convolved"].model(lra.ARENA.by_name["listops"])
    assert (config.conv, config.build().causal) == (4, True)
    assert contestants.BY_NAME["linear-convolved"].model(problems.BY_NAME["parity"]).conv == 4


def test_a_contestant_without_a_recurrent_form_has_no_state():
    problem = problems.BY_NAME["mqar-64-16-64"]
    assert search.state_bytes(contestants.BY_NAME["aft"].model(problem).build(), 64) is None


@pytest.mark.parametrize("width", [64, 128, 256])
def test_states_of_feature_maps_are_about_equal(width):
    """That of the second-order expansion is only within a tenth, since its number of heads is whole."""
    problem = problems.BY_NAME[f"mqar-64-16-{width}"]
    sizes = []
    for name in contestants.MAPS:
        config = dataclasses.replace(contestants.BY_NAME[name].model(problem), layers=1)
        state = config.build().start(1).layers[0].attention
        sizes.append(max(x.numel() for x in search.attention.leaves([state])))
    assert sizes[0] == 32 * width
    assert all(abs(size - sizes[0]) <= 0.1 * sizes[0] for size in sizes)


def outcomes(contest, tests=(0.7, 0.8, 0.9), **more):
    while ready := contest.ready():
        for one, test in zip(ready, (*tests, None), strict=False):
            write(one, one.training.lr * 10, test=test if one.final else None, **more)
    return search.read_outcomes(contest.study)


def test_tables_are_of_outcomes(contest):
    found = outcomes(contest)
    table = tables.problem_table(found, "parity", contest.study)
    # Mean 0.8, deviation 0.1: 4.303 x 0.1 / sqrt 3.
    assert (
        table.splitlines()[2]
        == "| linear | 80.0 ± 24.8 | 70.0, 80.0, 90.0 | 0.01 (highest) | 8 | 64 | 7 | 0.60 |"
    )
    assert tables.points_table(found, "parity", contest.study).splitlines()[2:] == [
        "| linear | 2 | 0.3 | 1.0 | 3.0 | 10.0 |",
        "| linear | 4 |  |  | 3.0 | 10.0 |",
    ]
    assert "9 runs, of which 0 diverged, in 0.09 core hours" in tables.sections(found)
    assert tables.maps_table(found) == ""


def test_a_contest_that_is_not_done_has_no_row(contest):
    found = outcomes(contest)
    unfinished = [x for x in found if x["seed"] != 3]
    assert tables.problem_table(unfinished, "parity", contest.study) == ""
    assert tables.points_table(unfinished, "parity", contest.study) == tables.points_table(
        found, "parity", contest.study
    )


@pytest.mark.slow
def test_pictures_are_drawn_of_what_there_is(contest, tmp_path):
    tables.draw(outcomes(contest), tmp_path, contest.study)
    assert [file.name for file in tmp_path.glob("*.png")] == ["rates-parity.png"]


@pytest.fixture
def recalls(tmp_path):
    """Recall at two budgets: two contestants with the short one, one with the long one."""
    problem = dataclasses.replace(TINY, name="mqar-6-2-32", title="recall", steps={"small": 8, "whole": 16})
    study = of(tmp_path, problem)
    trained = (("linear", "small", 0.5, 64), ("gated", "small", 0.6, 128), ("linear", "whole", 0.9, 64))
    for name, preset, score, state in trained:
        contest = Contest(problem, contestants.BY_NAME[name], preset, study=study)
        outcomes(contest, [score] * 3, state_bytes=state)
    return study


def test_budgets_are_not_mixed(recalls):
    rows = tables.problem_table(search.read_outcomes(recalls), "mqar-6-2-32", recalls).splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:6]] for row in rows]
    assert [(who, score, steps) for who, score, _, _, steps in cells] == [
        ("gated", "60.0 ± 0.0", "8"),
        ("linear", "50.0 ± 0.0", "8"),
        ("linear", "90.0 ± 0.0", "16"),
    ]


def test_a_seed_that_diverged_is_in_the_table(contest):
    found = [x | {"diverged": x["seed"] == 2} for x in outcomes(contest)]
    row = tables.problem_table(found, "parity", contest.study).splitlines()[2]
    assert row == "| linear | diverged | 70.0, diverged, 90.0 | 0.01 (highest) | 8 | 64 | 7 | 0.60 |"


def test_a_contestant_that_diverged_at_every_rate_is_in_the_table(contest):
    for one in contest.ready():
        write(one, None)
    found = search.read_outcomes(contest.study)
    row = tables.problem_table(found, "parity", contest.study).splitlines()[2]
    assert row == "| linear | diverged at every rate |  |  |  |  |  |"  # no state is known
    assert tables.problem_table(found[1:], "parity", contest.study) == ""  # one rate has not been tried


def test_baselines_are_in_the_table_and_nowhere_else(contest):
    study = dataclasses.replace(contest.study, baselines=("guesses.json", "missing.json"))
    baselines.publish(study.folder / "guesses.json", {"parity": {"a guess": 0.5}, "s5": {}}, command="guess")
    *_, row = tables.problem_table(outcomes(contest), "parity", study).splitlines()
    assert row == "| *a guess* | 50.0 |  |  |  |  |  |  |"
    assert tables.problem_table([], "parity", study) == ""


def test_a_table_of_encoders_has_no_column_for_states(contest):
    found = [x | {"state_bytes": None} for x in outcomes(contest)]
    head, _, row = tables.problem_table(found, "parity", contest.study).splitlines()
    assert "state" not in head
    assert row == "| linear | 80.0 ± 24.8 | 70.0, 80.0, 90.0 | 0.01 (highest) | 8 | 7 | 0.60 |"


def test_seeds_of_two_rates_are_not_mixed(contest):
    found = outcomes(contest)
    moved = [x | {"rate": 0.003} for x in found if x["final"]]
    with pytest.raises(ValueError, match=r"^parity, linear, 8 steps: tested at several rates"):
        tables.problem_table([*found, *moved], "parity", contest.study)


def test_maps_are_compared_where_all_have_the_same_steps(recalls, monkeypatch):
    monkeypatch.setattr(contestants, "MAPS", ("linear", "gated"))
    found = search.read_outcomes(recalls)
    assert tables.maps_table(found, recalls).splitlines() == [
        "| feature map | mqar-6-2-32, 8 steps, % |",
        "| --- | --- |",
        "| linear | 50.0 ± 0.0 |",
        "| gated | 60.0 ± 0.0 |",
    ]


@pytest.mark.slow
def test_a_frontier_is_drawn_where_memory_differs(recalls, tmp_path):
    tables.draw(search.read_outcomes(recalls), tmp_path, recalls)
    drawn = {file.name for file in tmp_path.glob("*.png")}
    assert drawn == {"frontier-6-2-8.png", "rates-mqar-6-2-32.png"}


def test_a_preset_has_problems_of_its_own(capsys):
    """--task NAME uses the problem of the preset; the small preset trains in minutes."""
    small, paper = (lra.ARENA.of_preset(preset, ["listops"]) for preset in ("small", "paper"))
    assert [x.name for x in (*small, *paper)] == ["listops", "listops-paper"]
    assert [x.name for x in lra.ARENA.of_preset("paper", None)] == [f"{name}-paper" for name in lra.TASKS]
    arena.main(["--task", "listops", "--attention", "linear", "softmax", "--preset", "paper", "--list"])
    assert capsys.readouterr().out.startswith(
        "to do listops-paper, linear\nto do listops-paper, softmax\n0 of 2 searches"
    )


def test_a_problem_of_another_preset_is_refused():
    with pytest.raises(SystemExit, match="listops-paper is of the preset paper, not small"):
        arena.main(["--task", "listops-paper", "--list"])


def test_the_command_refuses(capsys):
    for words, message in (
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--workers", "0"], "--workers: must be at least 1, got 0"),
        (["--problem", "sing"], "invalid choice: 'sing'"),
    ):
        with pytest.raises(SystemExit):
            command.main(words)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="linformer takes no part in parity: it has no causal form"):
        command.main(["--problem", "parity", "--attention", "linear", "linformer", "--list"])
    command.main(["--problem", "parity", "--list"])  # those that can
    assert "linformer" not in capsys.readouterr().out


@pytest.mark.parametrize("study", [problems.COMPARISON, lra.ARENA], ids=["compare", "lra"])
def test_searches_with_a_row_are_complete_and_chose_its_rate(study):
    """According to the current grid and settings, except for rows of a budget that no longer exists."""
    found = search.read_outcomes(study)
    rows = tables.finals(found, study)
    assert rows
    for (name, who, steps), runs in rows.items():
        problem = study.by_name[name]
        presets = [preset for preset, budget in problem.steps.items() if budget == steps]
        for preset in presets:
            contest = Contest(problem, contestants.BY_NAME[who], preset, study=study)
            assert contest.ready() == [], (name, who, steps)
            assert contest.attempt(runs[0]["rate"], steps, search.SEEDS[0]).scored() is not None
