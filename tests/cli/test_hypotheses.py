"""`lintra evaluate --hypotheses` and `--predictions`: the output for each sample, in files."""

import json
import re
import signal
from pathlib import Path

import pytest

from lintra import checkpoint, evaluate
from lintra.audio import waveform
from lintra.io import files
from lintra.speech import transcribe
from lintra.speech.scoring import character_edits, word_edits
from lintra.speech.transcription import log_probs
from lintra.tasks import digits
from tests.tasks.speech import RATE, tones, write_manifest, write_wave

TEXTS = ["AB", "B CA", "", "ABQ"]


@pytest.fixture
def data(recogniser):
    """A test set whose third utterance has no text, with a model in ./run."""
    recogniser()
    return write_manifest(Path("test"), TEXTS, "test.jsonl")


def rows(file):
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def test_hypotheses_are_what_was_scored(lintra_says, data):
    """As JSON lines with the errors of each utterance, which add up to the total."""
    args = ["evaluate", "--model", "run", "--data", str(data)]
    code, out, _ = lintra_says(*args, "--hypotheses", "out/a.jsonl", "--json", "a.json")
    assert code == 1
    assert "hypotheses saved in out/a.jsonl\n" in out
    found, model = rows("out/a.jsonl"), checkpoint.load("run")
    assert [row["id"] for row in found] == ["u0", "u1", "u3"]
    for row, said in zip(found, ("AB", "B CA", "ABQ"), strict=True):
        assert row["reference"] == said
        assert row["hypothesis"] == transcribe(model, row["audio"]).text
        for name, edits in (("character", character_edits), ("word", word_edits)):
            assert row["errors"][name] == vars(edits(said, row["hypothesis"]))
    scores = json.loads(Path("a.json").read_text())["scores"]
    for name in ("character", "word"):
        for kind in ("substitutions", "insertions", "deletions", "length"):
            assert sum(row["errors"][name][kind] for row in found) == scores[name][kind]
    lintra_says(*args, "--hypotheses", "b.jsonl", "--batch", "1")
    assert rows("b.jsonl") == found


def test_a_seed_draws_the_utterances_of_a_limit(lintra_says, data):
    write_manifest(Path("test"), ["A"] * 6, "test.jsonl")
    args = ["evaluate", "--model", "run", "--data", str(data), "--limit", "3", "--hypotheses", "a.jsonl"]
    found = []
    for seed in "001":
        assert lintra_says(*args, "--seed", seed)[0] == 0
        found.append([row["id"] for row in rows("a.jsonl")])
    assert found[0] == found[1] != found[2]


def test_files_for_other_tools(lintra_says, data):
    """trn and CTM with their references; their content is that of the JSON lines."""
    made = ["a.jsonl", "a.trn", "a.ctm"]
    code, out, _ = lintra_says("evaluate", "--model", "run", "--data", str(data), "--hypotheses", *made)
    assert code == 1
    assert "hypotheses saved in a.jsonl, a.trn, a.ref.trn, a.ctm, a.ref.stm\n" in out
    found, model = rows("a.jsonl"), checkpoint.load("run")
    for file, which in (("a.trn", "hypothesis"), ("a.ref.trn", "reference")):
        lines = [re.fullmatch(r"(.*) ?\((\S+)\)", line) for line in Path(file).read_text().splitlines()]
        assert [(x[2], x[1].strip()) for x in lines] == [(row["id"], row[which]) for row in found]
    expected = [
        (row["id"], "1", x.text, round(x.start, 3), round(x.end, 3))
        for row in found
        for x in transcribe(model, row["audio"]).words
    ]
    assert expected
    lines = [line.split() for line in Path("a.ctm").read_text().splitlines()]
    times = [(float(start), float(start) + float(length)) for _, _, start, length, _ in lines]
    assert [(x[0], x[1], x[4]) for x in lines] == [x[:3] for x in expected]
    assert [each for both in times for each in both] == pytest.approx([t for x in expected for t in x[3:]])
    for line, row in zip(Path("a.ref.stm").read_text().splitlines(), found, strict=True):
        duration = transcribe(model, row["audio"]).duration
        assert line == f"{row['id']} 1 {row['id']} 0.000 {duration:.3f} {row['reference']}"


def test_sections_speakers_and_names(lintra_says, data):
    """For a Kaldi folder with segments: names in trn have no parentheses, and files for NIST are sorted."""
    kaldi = Path("kaldi")
    kaldi.mkdir()
    write_wave(kaldi / "a.wav", tones("ABCABCABC"))
    (kaldi / "wav.scp").write_text("rec a.wav\n")
    (kaldi / "text").write_text("z(1) ABC\ny_1 AB\nb CA\n")
    (kaldi / "segments").write_text("z(1) rec 0 0.36\ny_1 rec 0.36 0.72\nb rec 0.5 -1\n")
    (kaldi / "utt2spk").write_text("z(1) ann\ny_1 bob\nb bob\n")
    made = ["a.jsonl", "a.trn", "a.ctm"]
    code, out, err = lintra_says("evaluate", "--model", "run", "--data", "kaldi", "--hypotheses", *made)
    assert (code, err) == (0, "")
    assert "all 3 test utterances" in out
    found, model = rows("a.jsonl"), checkpoint.load("run")
    where = [{key: row.get(key) for key in ("audio", "start", "duration", "speaker")} for row in found]
    audio = "kaldi/a.wav"
    assert where[0] == {"audio": audio, "start": 0.0, "duration": 0.36, "speaker": "ann"}
    assert where[2] == {"audio": audio, "start": 0.5, "duration": None, "speaker": "bob"}
    for row in found:
        section = waveform.read(audio, RATE, start=row["start"], duration=row.get("duration"))
        assert transcribe(model, section, rate=RATE).text == row["hypothesis"]
    assert [line.split()[-1] for line in Path("a.trn").read_text().splitlines()] == ["(z_1_)", "(y_1)", "(b)"]
    stm = [line.split()[:3] for line in Path("a.ref.stm").read_text().splitlines()]
    assert stm == [["b", "1", "bob"], ["y_1", "1", "bob"], ["z(1)", "1", "ann"]]
    assert [line.split()[0] for line in Path("a.ctm").read_text().splitlines()] == sorted(
        line.split()[0] for line in Path("a.ctm").read_text().splitlines()
    )


def test_a_corpus_with_a_name_is_judged_by_own_data_too(lintra_says, data):
    """The recogniser that comes with lintra was trained on a corpus whose files are not present here."""
    spoken = Path(__file__).parents[1] / "speech" / "data"
    texts = {"0_nicolas_2.wav": "zero", "3_theo_0.wav": "three"}
    lines = [json.dumps({"audio": str(spoken / name), "text": text}) for name, text in texts.items()]
    Path("own.jsonl").write_text("\n".join(lines))
    shipped = ["evaluate", "--model", "spoken-digits", "--hypotheses", "a.jsonl"]
    code, out, err = lintra_says(*shipped, "--data", "own.jsonl")
    assert (code, err) == (0, "")
    assert "all 2 test utterances" in out
    assert [row["hypothesis"] for row in rows("a.jsonl")] == ["zero", "three"]
    code, _, err = lintra_says(*shipped, "--data", "test")
    assert code == 2
    assert "fsdd" in err


def test_what_was_heard_is_kept_when_it_is_stopped(lintra_says, data, monkeypatch):
    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return log_probs(*args)

    monkeypatch.setattr(evaluate.speech, "log_probs", interrupted)
    args = ["--data", str(data), "--batch", "2", "--hypotheses", "a.jsonl"]
    assert lintra_says("evaluate", "--model", "run", *args)[0] == 130
    assert [row["id"] for row in rows("a.jsonl")] == ["u0", "u3"]


def test_files_are_written_whole_or_not_at_all(lintra_says, data, monkeypatch):
    Path("a.jsonl").write_text("of before")

    def full(self, *_, **__):
        raise OSError(28, "No space left on device")

    args = ["evaluate", "--model", "run", "--data", str(data), "--hypotheses", "a.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        code, _, err = lintra_says(*args)
    assert code == 2
    assert "a.jsonl cannot be written" in err
    assert Path("a.jsonl").read_text() == "of before"
    with pytest.raises(files.Error, match="cannot be written"):
        files.write_lines(Path("a.jsonl") / "b", ["c"])
    files.write_lines(Path("a.jsonl"), ["\u00e9", ""])
    assert Path("a.jsonl").read_bytes() == b"\xc3\xa9\n\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hypotheses", "a.txt"], "hypotheses must be files named *.jsonl, *.trn, *.ctm, got a.txt"),
        (["--hypotheses", "test"], "hypotheses must be files named *.jsonl, *.trn, *.ctm, got test"),
        (["--hypotheses", "f.trn"], "hypotheses must be a file, got the folder f.trn"),
        (
            ["--hypotheses", "test/test.jsonl"],
            "data, json, hypotheses and predictions must be different files",
        ),
        (
            ["--hypotheses", "a.trn", "a.ref.trn"],
            "data, json, hypotheses and predictions must be different files",
        ),
        (
            ["--hypotheses", "a.jsonl", "--json", "./a.jsonl"],
            "data, json, hypotheses and predictions must be diff",
        ),
        (["--hypotheses", "test/test.jsonl/a.trn"], "above it is a file, not a folder"),
        (["--predictions", "a.jsonl"], "predictions are for texts: hypotheses are those of speech"),
    ],
)
def test_what_is_refused(lintra_says, data, args, message):
    """It is refused before anything is transcribed, and before a file of the user is overwritten."""
    Path("f.trn").mkdir()
    before = data.read_bytes()
    code, out, err = lintra_says("evaluate", "--model", "run", "--data", str(data), *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert data.read_bytes() == before


def test_predictions_of_texts(lintra_says, classifier):
    """Each text with its label and the scores that `lintra predict` gives; the accuracy follows from them."""
    texts = [("aaa", "aa"), ("bbb", "b"), ("bbb", "bbbbbb"), ("aaa", "b")]
    Path("test.tsv").write_text(
        "".join(f"{label}\t{text * (1 + i)}\n" for i in range(5) for label, text in texts)
    )
    args = ["evaluate", "--model", "run", "--data", "test.tsv"]
    code, out, err = lintra_says(*args, "--predictions", "out/a.jsonl", "--json", "a.json", "--batch", "3")
    assert (code, err) == (0, "")
    assert "predictions saved in out/a.jsonl" in out
    found = rows("out/a.jsonl")
    accuracy = json.loads(Path("a.json").read_text())["scores"]["accuracy"]
    assert len(found) == accuracy["samples"] > 1
    assert sum(row["label"] == row["reference"] for row in found) / len(found) == accuracy["mean"]
    Path("texts.txt").write_text("\n".join(row["text"] for row in found))
    _, out, _ = lintra_says("predict", "--model", "run", "--lines", "texts.txt")
    for row, line in zip(found, out.splitlines(), strict=True):
        said = json.loads(line)
        assert row["label"] == said["label"]
        assert row["scores"] == pytest.approx(said["scores"], abs=2e-6)
    code, _, err = lintra_says(*args, "--hypotheses", "b.jsonl")
    assert (code, err) == (2, "lintra: hypotheses is for speech, run is of the task text_classification\n")


def test_predictions_of_what_has_none(lintra_says, folder):
    folder("digits", digits.Config())
    code, _, err = lintra_says("evaluate", "--model", "digits", "--predictions", "a.jsonl")
    assert (code, err) == (2, "lintra: predictions are for texts, digits is of the task digits\n")
