"""`lintra train speech`, `transcribe` and `evaluate`: their output, their refusals and their exit codes."""

import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lintra import evaluate, train
from lintra.audio import features, waveform
from lintra.audio.symbols import learn
from lintra.io import files
from lintra.speech import corpus
from lintra.speech.corpus import prepare
from lintra.speech.ngram import NGram
from lintra.speech.scoring import character_edits
from lintra.speech.streaming import Transcriber
from lintra.speech.transcription import Search, log_probs, words
from lintra.tasks import digits, speech
from lintra.train.data_checks import fingerprint
from tests.tasks.speech import RATE, text_of, tones, write_kaldi, write_manifest, write_wave
from tests.train.conftest import assert_same_weights

TEXTS = [text_of(i) for i in range(24)]
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32", "--subsample", "2"]


def heard(model, file) -> torch.Tensor:
    frames = features.compute(waveform.read(file, RATE), model.config.features)
    return log_probs(model, [frames])[0]


def test_text_json_and_ctm(lintra_says, recogniser):
    """All have the same text; JSON and CTM add the times of its words on the best path."""
    model, file = recogniser(), "audio/train.jsonl-1.wav"
    found = heard(model, file)
    ids = Search()(found)
    frames = len(features.compute(waveform.read(file, RATE), model.config.features))
    text, spans = model.config.symbols.decode(ids), words(model.config, found, ids, frames=frames)
    assert spans
    assert lintra_says("transcribe", file, "--model", "run") == (0, f"{text}\n", "")
    code, out, _ = lintra_says("transcribe", "--model", "run", "--json", file, file)
    assert code == 0
    for line in out.splitlines():
        told = json.loads(line)
        assert (told["audio"], told["text"]) == (file, text)
        assert [word["word"] for word in told["words"]] == [x.text for x in spans] == text.split()
        for word, x in zip(told["words"], spans, strict=True):
            assert (word["start"], word["end"]) == pytest.approx((x.start, x.end), abs=5e-4)
            assert 0 <= x.start < x.end <= 0.01 * frames + 1e-9
    Path("a b.wav").symlink_to(file)
    code, out, _ = lintra_says("transcribe", "--model", "run", "--ctm", file, "a b.wav", file)
    assert code == 0
    expected = [
        (name, "1", x.start, x.end, x.text)
        for name in ("train.jsonl-1", "a_b", "train.jsonl-1-2")
        for x in spans
    ]
    for line, (*key, start, end, word) in zip(out.splitlines(), expected, strict=True):
        told = line.split(" ")
        assert [*told[:2], told[4]] == [*key, word]
        # Rounded to milliseconds, the end as well.
        assert [float(told[2]), float(told[2]) + float(told[3])] == pytest.approx([start, end], abs=6e-4)


def test_the_real_time_factor_counts_reading_and_hearing(lintra_says, recogniser, monkeypatch):
    """A clock that advances by a second when a piece is read, and by two when it is transcribed."""
    recogniser()
    now = [0.0]

    def slow(samples):
        for piece in np.split(samples, 4):
            now[0] += 1
            yield piece

    def heard(self, samples):
        now[0] += 2
        return ""

    monkeypatch.setattr(waveform, "blocks", lambda *_, **__: slow(np.zeros(8 * RATE, np.float32)))
    monkeypatch.setattr(Transcriber, "push", heard)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    code, _, err = lintra_says("transcribe", "--model", "run", "--stream", "--block", "2", "a.wav")
    assert code == 0
    assert "a.wav: 8.00 s of audio in 12.000 s, real-time factor 1.5000; latency 2000 ms" in err
    assert "3000.0 ms to read and hear it, at most 3000.0 ms" in err


def test_a_stream_says_what_the_whole_file_says(lintra_says, recogniser):
    recogniser()
    long = write_wave(Path("long.wav"), np.concatenate([tones(text) for text in TEXTS]))
    _, whole, _ = lintra_says("transcribe", "--model", "run", str(long))
    assert len(whole) > 20
    for block in ("0.03", "0.5", "7"):
        code, out, err = lintra_says("transcribe", "--model", "run", "--stream", "--block", block, str(long))
        assert (code, out) == (0, whole)
        told = r"long.wav: [\d.]+ s of audio in [\d.]+ s, real-time factor [\d.]+; latency \d+ ms for a piece"
        assert re.match(told, err)


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_what_fails_is_said_and_the_others_go_on(lintra_says, recogniser, stream):
    recogniser()
    write_wave(Path("short.wav"), np.zeros(50))
    Path("text.wav").write_text("no audio at all")
    good = "audio/train.jsonl-1.wav"
    files = [good, "missing.wav", "short.wav", "text.wav", "audio", good]
    code, out, err = lintra_says("transcribe", "--model", "run", *stream, *files)
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith(f"{good}: ")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    failed = [line for line in err.splitlines() if line.startswith("lintra: ")]
    assert len(failed) == 5
    for line, reason in zip(
        failed,
        ("missing.wav", "short.wav: ", "text.wav", "audio", "4 of 6 files failed"),
        strict=True,
    ):
        assert reason in line


def test_a_beam_with_a_language_model(lintra_says, recogniser):
    """A text or a saved model serves as the language model; with a large weight it decides."""
    model, file = recogniser(), "audio/train.jsonl-1.wav"
    Path("lm.txt").write_text("CAB\nCAB\nQ is not known\n")
    symbols = model.config.symbols
    lm = NGram.learn([symbols.encode("CAB")] * 2, order=4, symbols=len(symbols.names))
    lm.save("lm.json")
    expected = symbols.decode(Search(beam=8, lm=lm, weight=9.0, bonus=2.0)(heard(model, file)))
    assert expected != symbols.decode(Search(beam=8)(heard(model, file)))
    use = ["--beam", "8", "--lm-weight", "9", "--bonus", "2"]
    for more in (["--lm", "lm.txt", "--lm-order", "4"], ["--lm", "lm.json"]):
        code, out, err = lintra_says("transcribe", "--model", "run", *use, *more, file)
        assert (code, out) == (0, f"{expected}\n")
        left_out = (
            "lintra: lm.txt: 1 of 3 lines left out: line 3: 'Q', character 1 of 'Q is not known', is none"
        )
        assert err.startswith(left_out) if "lm.txt" in more else not err
    NGram.learn([[1]], order=2, symbols=2).save("fewer.json")
    NGram.learn([[1]], order=2, symbols=(*"ABC", "D")).save("other.json")
    Path("none.txt").write_text("unknown\n")
    for more, reason in (
        (["fewer.json"], "fewer.json has 2 symbols, the recogniser 4"),
        (["other.json"], "other.json has other symbols than the recogniser"),
        (["none.txt"], "none.txt holds no line of symbols that the recogniser knows; the first, line 1: 'u'"),
        (["nowhere.txt"], "nowhere.txt"),
        (["lm.json", "--lm-order", "5"], "lm_order is for text: lm.json has an order of its own"),
    ):
        code, _, err = lintra_says("transcribe", "--model", "run", *use, "--lm", *more, file)
        assert code == 2
        assert reason in err
    Path("plain.txt").write_text("CAB\nAB C\n")  # presets, and how a report names them
    for more, lm, weight, bonus in (
        (["--bonus", "1.5"], None, None, 1.5),
        (["--lm", "plain.txt"], {"file": "plain.txt", "order": 5}, 0.5, 0.0),
        (["--lm", "plain.txt", "--lm-order", "2"], {"file": "plain.txt", "order": 2}, 0.5, 0.0),
    ):
        assert lintra_says("evaluate", "--model", "run", "--beam", "4", *more, "--json", "a.json")[0] == 0
        found = json.loads(Path("a.json").read_text())["search"]
        assert found == {"beam": 4, "lm": lm, "lm_weight": weight, "bonus": bonus}


def test_a_model_of_given_features_hears_arrays(lintra_says, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    write_kaldi(Path("kaldi"), TEXTS)
    code, out, err = lintra_says("train", "speech", "--kaldi", "kaldi", *TINY, "--steps", "3", "--dir", "run")
    assert (code, err) == (0, "")
    assert "symbol errors" in out
    assert lintra_says("transcribe", "--model", "run", "kaldi/0.npy")[0] == 0
    causal = ["--streaming", "--steps", "1", "--dir", "s"]
    assert lintra_says("train", "speech", "--kaldi", "kaldi", *TINY, *causal)[0] == 0
    code, _, err = lintra_says("transcribe", "--model", "s", "--stream", "kaldi/0.npy")
    assert code == 2
    assert "s cannot stream: it hears features that are given, and what comes in pieces is audio" in err
    np.save("wide.npy", np.zeros((9, 6), np.float32))
    np.save("nan.npy", np.full((9, 5), np.nan, np.float32))
    np.save("none.npy", np.zeros((0, 5), np.float32))
    Path("text.npy").write_text("no array")
    write_wave(Path("a.wav"), tones("AB"))
    files = ["a.wav", "wide.npy", "nan.npy", "none.npy", "text.npy", "nowhere.npy"]
    code, out, err = lintra_says("transcribe", "--model", "run", *files)
    assert (code, out) == (1, "")
    reasons = (
        "a.wav: this model was trained on features of 5 numbers a frame, not on audio",
        r"wide.npy: features must be floats \[t 5\], got float32 \[9, 6\]",
        "nan.npy: features have numbers that are not finite",
        "none.npy: features have no frames",
        "text.npy cannot be read as an array",
        "nowhere.npy does not exist",
        "6 of 6 files failed",
    )
    for line, reason in zip(err.splitlines(), reasons, strict=True):
        assert re.search(reason, line)


def test_error_rates(lintra_says, recogniser, tmp_path):
    """For the utterances that can be used: their number, a confidence interval, and what is left out."""
    model = recogniser()
    test = write_manifest(tmp_path / "test", ["AB", "B CA", "", "ABQ"], "test.jsonl")
    code, out, err = lintra_says("evaluate", "--model", "run", "--data", str(test), "--json", "a.json")
    assert (code, err) == (1, "")
    assert "3 of 4 test utterances" in out
    assert "1 skipped: u2: it has no transcript; all of them in a.json" in out
    report = json.loads(Path("a.json").read_text())
    found = [
        model.config.symbols.decode(Search()(heard(model, tmp_path / "test" / f"test.jsonl-{i}.wav")))
        for i in (0, 1, 3)
    ]
    edits = [character_edits(said, text) for said, text in zip(("AB", "B CA", "ABQ"), found, strict=True)]
    expected = evaluate.ErrorRate.of(edits)
    assert report["scores"]["character"] == dataclasses.asdict(expected)
    assert expected.low <= expected.rate <= expected.high
    assert expected.length == 9
    assert f"{expected.rate:.2%} (95 %: {expected.low:.2%} to {expected.high:.2%})" in out
    assert report["scores"]["word"]["length"] == 4
    assert report["skipped"] == [{"id": "u2", "reason": "it has no transcript"}]
    for batch in ("1", "3"):
        lintra_says("evaluate", "--model", "run", "--data", str(test), "--json", "b.json", "--batch", batch)
        assert json.loads(Path("b.json").read_text())["scores"] == report["scores"]
    code, again, err = lintra_says("evaluate", "--model", "run", "--data", str(test))
    assert (code, err) == (1, "lintra: u2: it has no transcript\n")
    assert f"{expected.rate:.2%}" in again
    code, out, _ = lintra_says("evaluate", "--model", "run", "--limit", "1", "--beam", "4")
    assert code == 0
    assert "all 1 validation utterances" in out


def test_evaluate_keeps_features_where_training_did(lintra_says, recogniser, monkeypatch):
    """Each whole test set has a file of its own; without such a folder, or write access, it works too."""
    recogniser(cache="kept")
    tests = [write_manifest(Path(name), texts) for name, texts in (("one", ["AB", "B CA"]), ("other", ["C"]))]

    def score(test, *more):
        data = ["--data", str(test)] if test else []
        assert lintra_says("evaluate", "--model", "run", *data, "--json", "a.json", *more)[0] == 0
        return json.loads(Path("a.json").read_text())["scores"]

    once = score(tests[0], "--limit", "2")
    assert not list(Path("kept").glob("test*"))
    scores = [score(test) for test in (*tests, None)]
    assert scores[0] == once != scores[1]
    kept = sorted(Path("kept").glob("test*"))
    assert len(kept) == 2

    def refused(*_):
        raise files.Error("kept cannot be written: Permission denied")

    monkeypatch.setattr(corpus, "write_atomically", refused)
    Path("kept").chmod(0o500)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "arrays", None)  # nothing may be computed
        assert [score(test) for test in (*tests, None)] == scores
    Path("kept").chmod(0o700)
    for file in kept:
        file.unlink()
    assert [score(test) for test in (*tests, None)] == scores
    shutil.rmtree("kept")
    assert [score(test) for test in (*tests, None)] == scores
    assert not Path("kept").exists()


def test_training_reads_its_data_once(lintra_says, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)
    write_kaldi(Path("kaldi"), [*TEXTS, ""])
    heard, arrays = [], corpus.arrays

    def counted(utterance, *rest):
        heard.append(utterance.id)
        return arrays(utterance, *rest)

    monkeypatch.setattr(corpus, "arrays", counted)
    code, out, _ = lintra_says("train", "speech", "--kaldi", "kaldi", *TINY, "--steps", "2", "--dir", "run")
    assert code == 0
    assert sorted(heard) == sorted(f"u{i}" for i in range(25))
    (file,) = Path("run").glob("skipped-*.jsonl")
    assert f"1 skipped: u24: it has no transcript; all of them in {file}" in out
    assert json.loads(file.read_text()) == {"id": "u24", "reason": "it has no transcript"}


def test_what_evaluate_refuses(lintra_says, recogniser, folder):
    recogniser()
    kaldi = write_kaldi(Path("kaldi"), TEXTS)
    test = write_manifest(Path("test"), [""], "test.jsonl")
    for args, message in (
        (["--limit", "2"], "limit must be at most the 1 samples there are, got 2"),
        (["--pictures", "x"], "pictures is for models of images, run is of the task speech"),
        (["--lm", "x"], "lm and bonus are for a beam: add --beam 20"),
        (["--data", str(test)], "none of 1 utterances can be scored: 1 skipped: u0: it has no transcript"),
    ):
        code, _, err = lintra_says("evaluate", "--model", "run", *args)
        assert (code, err) == (2, f"lintra: {message}\n")
    task = train.Run.read("run").task
    other = dataclasses.replace(task, manifest=None, kaldi=str(kaldi))
    dataclasses.replace(train.Run.read("run"), task=other).write()
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert code == 2
    assert re.search(r"none of 2 utterances can be used; the first, u\d+: there is no audio", err)
    folder("digits", digits.Config())
    for flag in ("beam", "bonus", "lm_order", "lm_weight"):
        code, _, err = lintra_says("evaluate", "--model", "digits", f"--{flag.replace('_', '-')}", "2")
        assert (code, err) == (2, f"lintra: {flag} is for speech, digits is of the task digits\n")


def test_what_was_heard_before_it_was_stopped(lintra_says, recogniser, monkeypatch):
    """The shortest utterances come first; the error rates are those of the finished ones."""
    recogniser()
    write_manifest(Path("test"), ["A", "B A", "B"], "test.jsonl")

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return log_probs(*args)

    monkeypatch.setattr(evaluate.speech, "log_probs", interrupted)
    args = ["--data", "test/test.jsonl", "--batch", "2", "--json", "a.json"]
    code, out, err = lintra_says("evaluate", "--model", "run", *args)
    assert (code, err) == (130, "")
    assert json.loads(Path("a.json").read_text())["partial"]
    assert "2 of 3 test utterances" in out
    assert "Stopped: these are scores of the 2 shortest of 3 utterances" in out


def test_phonemes_are_scored_as_they_are_written(recogniser):
    """A word with unknown phonemes cannot be scored."""
    Path("lexicon.txt").write_text("A ah\nB b iy\n")
    symbols = learn((), "phoneme", {"A": ("ah",), "B": ("b", "iy")})
    model = recogniser()
    config = dataclasses.replace(model.config, symbols=symbols)
    manifest = write_manifest(Path("said"), ["A B", "A Q"])
    corpus, _ = prepare(
        speech.Config(manifest=str(manifest), rate=RATE, bins=20, test=str(manifest)).build().tested,
        config.features,
        cache=None,
    )
    done = []
    model = config.build().eval()
    found, skipped = evaluate.transcripts(model, corpus, range(2), Search(), batch=2, report=done.append)
    assert done[-1] == 2  # progress reaches the end, skipped utterances included
    assert [each.reference for each in found] == ["ah b iy"]
    assert [(each.id, "'Q'" in each.reason) for each in skipped] == [("u1", True)]
    (rate,) = evaluate.error_rates(found, "phoneme").values()
    assert rate.length == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "files must name at least one file to transcribe, or - for standard input, got none"),
        (["a.wav", "--json", "--ctm"], "json, ctm and srt are alternatives: choose one"),
        (["a.wav", "--stream", "--srt", "--json"], "json, ctm and srt are alternatives: choose one"),
        (["a.wav", "b.wav", "--srt"], "srt has the times of one recording: name one file, got 2"),
        (["a.wav", "--stream", "--beam", "4"], "stream and live write the best path: leave out beam"),
        (["--live", "--beam", "4"], "stream and live write the best path: leave out beam"),
        (["--live", "a.wav"], "live hears a microphone: leave the files out"),
        (["a.wav", "--microphone", "usb"], "microphone is for live: add --live"),
        (["a.wav", "--rate", "8000"], "rate is for raw samples on standard input, which is named -"),
        (["-", "a.wav", "-"], "files can name standard input, -, only once"),
        (["a.wav", "--stream", "--block", "0"], "block must be between 0.01 and 60 seconds, got 0.0"),
        (["a.wav", "--block", "1"], "block is for stream, got 1.0 without it"),
        (["a.wav", "--beam", "4", "--lm-weight", "0.5"], "lm_weight is for a language model"),
        (["a.wav", "--beam", "4", "--lm-order", "5"], "lm_order is for a language model"),
        (["a.wav", "--beam", "4", "--lm-order", "3"], "lm_order is for a language model: name one with --lm"),
        (["a.wav", "--lm", "x"], "lm and bonus are for a beam: add --beam 20"),
        (["a.wav", "--beam", "0"], "beam must be at least 1, got 0"),
        (
            ["a.wav", "--beam", "4", "--lm-weight", "2"],
            "lm_weight is for a language model: name one with --lm",
        ),
    ],
)
def test_what_transcribe_refuses(lintra_says, recogniser, args, message):
    recogniser()
    code, out, err = lintra_says("transcribe", "--model", "run", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_beam_without_measure_is_refused(lintra_says, recogniser):
    recogniser()
    code, out, err = lintra_says("transcribe", "--model", "run", "--beam", "1000000", "x.wav")
    assert (code, out) == (2, "")
    assert re.match("lintra: beam must be at most 10,000 texts, got 1,000,000: .*\n$", err)


def test_models_that_do_not_hear_or_stream(lintra_says, recogniser, folder):
    recogniser(streaming=False)
    code, _, err = lintra_says("transcribe", "--model", "run", "--stream", "a.wav")
    assert code == 2
    assert "run cannot stream: its encoder looks at what comes later" in err
    folder("digits", digits.Config())
    code, _, err = lintra_says("transcribe", "--model", "digits", "a.wav")
    assert (code, err) == (2, "lintra: digits holds no recogniser of speech, but a Decoder\n")


@pytest.mark.parametrize("more", [["--streaming"], ["--encoder", "bilstm"], ["--attention", "softmax"]])
def test_training_is_resumed_exactly(lintra_says, tmp_path, monkeypatch, one_thread, more):
    """With SpecAugment, dropout, batches by frames, a plateau, and statistics that are not learned."""
    monkeypatch.chdir(tmp_path)
    write_kaldi(Path("kaldi"), TEXTS)
    shape = ["--width", "16", "--layers", "1", "--precision", "32", "--subsample", "2"]
    task = ["train", "speech", "--kaldi", "kaldi", "--batch-frames", "150", *shape, *more]
    plateau = ["--schedule", "plateau", "--patience", "1", "--validate-every", "2", "--save-every", "3"]
    assert lintra_says(*task, *plateau, "--steps", "7", "--dir", "whole")[0] == 0
    assert lintra_says(*task, *plateau, "--steps", "4", "--dir", "parts")[0] == 0
    assert lintra_says("train", "--resume", "parts", "--steps", "7")[0] == 0
    assert_same_weights(train.Run.read("whole"), train.Run.read("parts"))
    encoder = train.Run.read("whole").model.encoder
    assert (encoder.layers, encoder.width, encoder.inputs) == (1, 16, 16)


def test_data_that_changed_are_noticed(lintra_says, tmp_path, monkeypatch, one_thread):
    """Otherwise the numbers of symbols would stand for other symbols than at the start."""
    monkeypatch.chdir(tmp_path)
    write_kaldi(Path("kaldi"), TEXTS)
    task = ["train", "speech", "--kaldi", "kaldi", "--steps", "2", "--dir", "begun", *TINY]
    assert lintra_says(*task)[0] == 0
    write_kaldi(Path("kaldi"), [text.replace("A", "D") for text in TEXTS])
    code, _, err = lintra_says("train", "--resume", "begun", "--steps", "4")
    assert code == 2
    assert "the data have other symbols than those the run began with" in err
    code, _, err = lintra_says(*task[: -len(TINY) - 1], "next", *TINY, "--start-from", "begun")
    assert code == 2
    assert "start_from=begun has other symbols" in err


def test_utterances_that_were_learned_from_are_not_scored(lintra_says, recogniser, tmp_path):
    """With more of them, others are held out; a test set of one's own is scored as it is."""
    recogniser()
    run = train.Run.read("run")
    run = run.changed(data=fingerprint(run.task.build()))
    assert lintra_says("evaluate", "--model", "run")[0] == 0
    manifest = Path(run.task.manifest)
    lines = manifest.read_text().splitlines()
    more = [lines[0].replace('"id": "', f'"id": "more-{i}-') for i in range(20)]
    manifest.write_text("\n".join([*lines, *more]) + "\n")
    code, _, err = lintra_says("evaluate", "--model", "run")
    assert code == 2
    assert "was begun with other data or another length: held out " in err
    (tmp_path / "other.jsonl").write_bytes(manifest.read_bytes())
    shutil.copytree(manifest.parent, tmp_path, dirs_exist_ok=True)
    assert lintra_says("evaluate", "--model", "run", "--data", "other.jsonl")[0] == 0
    content = json.loads((run.folder / "run.json").read_text())
    del content["data"]["held_out"]  # a run of an earlier version
    (run.folder / "run.json").write_text(json.dumps(content))
    assert lintra_says("evaluate", "--model", "run")[0] == 0


def test_a_file_too_long_for_a_mechanism_does_not_end_the_others(lintra_says, recogniser, monkeypatch):
    model = recogniser()

    def too_long(self, *_, **__):
        raise ValueError("a made-up mechanism reaches 60 tokens")

    good = "audio/train.jsonl-1.wav"
    monkeypatch.setattr(type(model), "forward", too_long)
    code, _, err = lintra_says("transcribe", "--model", "run", good, good)
    assert code == 1
    assert err.count(f"lintra: {good}: a made-up mechanism reaches 60 tokens\n") == 2


def test_an_utterance_too_long_for_a_mechanism_does_not_end_an_evaluation(
    lintra_says, recogniser, monkeypatch
):
    """Nor does it take down the others of its batch."""
    model = recogniser()
    forward, reason = type(model).forward, "a made-up mechanism reaches 60 frames"

    def bounded(self, x, mask):
        if x.shape[1] > 60:
            raise ValueError(reason)
        return forward(self, x, mask=mask)

    monkeypatch.setattr(type(model), "forward", bounded)
    scores = []
    for texts in (["AB", "B", "C"], ["AB", "ABCABCABCA", "B", "ABCABCABCAB", "C"]):
        data = str(write_manifest(Path("test"), texts))
        code, out, err = lintra_says("evaluate", "--model", "run", "--data", data, "--json", "a.json")
        assert (code, err) == (int(len(texts) > 3), "")
        assert f"{'all' if len(texts) == 3 else '3 of'} {len(texts)} test utterances" in out
        report = json.loads(Path("a.json").read_text())
        scores.append({name: x["rate"] for name, x in report["scores"].items()})
    assert scores[0] == scores[1]
    assert report["skipped"] == [{"id": id, "reason": reason} for id in ("u1", "u3")]
    assert not report["partial"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "which speech? Name a corpus with --data an4 or fsdd"),
        (["--kaldi", "kaldi", "--encoder", "bilstm", "--heads", "2"], "this model has no heads"),
        (["--kaldi", "kaldi", "--encoder", "bilstm", "--attention", "lsh"], "attention is for encoder="),
        (["--kaldi", "kaldi", "--bins", "80"], "bins is for audio, and these are features"),
        (["--kaldi", "kaldi", "--rate", "8000"], "rate is for audio, and these are features"),
        (["--kaldi", "kaldi", "--batch", "4"], "batch is in frames here: use --batch-frames instead"),
        (["--manifest", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        (["--kaldi", "nowhere"], "nowhere is not a Kaldi folder"),
    ],
)
def test_what_training_refuses(lintra_says, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_kaldi(Path("kaldi"), TEXTS)
    Path("bad.jsonl").write_text('{"audio": "a.wav", "text": "A"}\n{"audio"\n')
    code, out, err = lintra_says("train", "speech", *args)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()
