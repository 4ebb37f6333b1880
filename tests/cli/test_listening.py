"""`lintra transcribe` for pipes, microphones and streamed files: the same as for the whole recording."""

import array
import fcntl
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lintra import checkpoint
from lintra.audio import waveform
from lintra.cli import listening
from lintra.cli.stopping import StopRequested, stopping
from lintra.speech import transcribe
from lintra.speech.subtitles import Subtitles, srt
from tests.audio.ffmpeg import stand_in
from tests.audio.microphones import Room
from tests.tasks.speech import RATE, text_of, write_kaldi, write_wave

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "speech" / "data"
SPOKEN = [DATA / name for name in ("0_nicolas_2.wav", "3_theo_0.wav", "7_jackson_1.wav")]


@pytest.fixture
def long(tmp_path, monkeypatch, one_thread):
    """Spoken digits with pauses between them, and two without a pause."""
    monkeypatch.chdir(tmp_path)
    zero, three, seven = (waveform.read(file, RATE) for file in SPOKEN)
    pause = np.zeros(RATE * 3 // 2)
    return write_wave(Path("long.wav"), np.concatenate([zero, pause, three, seven, pause, zero]))


@pytest.fixture
def stdin(monkeypatch):
    """Give the program these bytes as its standard input."""

    def give(content: bytes, *, terminal=False):
        given = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)), isatty=lambda: terminal)
        monkeypatch.setattr(sys, "stdin", given)

    return give


def raw(path: Path) -> bytes:
    """The raw samples of a wave file."""
    content = path.read_bytes()
    return content[content.index(b"data") + 8 :]


def events(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("block", ["0.1", "0.5", "7"])
def test_words_in_a_stream_are_those_of_the_whole(lintra_says, long, block):
    """CTM and the final words in JSON are equal; earlier words are a prefix of these."""
    stream = ["transcribe", "--stream", "--block", block, str(long)]
    _, whole, _ = lintra_says("transcribe", "--ctm", str(long))
    code, out, err = lintra_says(*stream, "--ctm")
    assert (code, out) == (0, whole)
    assert "real-time factor" in err
    _, whole, _ = lintra_says("transcribe", "--json", str(long))
    code, out, _ = lintra_says(*stream, "--json")
    assert code == 0
    assert json.loads(whole)["text"] == "zero three seven zero"
    said = [{key: x[key] for key in ("word", "start", "end")} for x in events(out) if x["final"]]
    assert said == json.loads(whole)["words"]
    assert {x["audio"] for x in events(out)} == {str(long)}
    for before, after in itertools.pairwise(events(out)):
        if not before["final"]:
            assert after["start"] == before["start"]
            assert after["word"].startswith(before["word"])
            assert after["end"] >= before["end"]
    assert (block == "7") or any(not x["final"] for x in events(out))


def test_subtitles_are_the_same_in_a_stream(lintra_says, long):
    code, whole, err = lintra_says("transcribe", "--srt", str(long))
    assert (code, err) == (0, "")
    for block in ("0.05", "3"):
        stream = ["--stream", "--block", block, "--srt"]
        code, out, _ = lintra_says("transcribe", *stream, str(long))
        assert (code, out) == (0, whole)
    found, subtitles = transcribe(checkpoint.load("spoken-digits"), long), Subtitles()
    cues = subtitles.push(found.words) + subtitles.finish(found.duration)
    assert whole == "".join(srt(number, cue) for number, cue in enumerate(cues, 1))
    code, out, _ = lintra_says("transcribe", "--srt", "--beam", "4", str(long))
    assert (code, out[:17]) == (0, whole[:17])


@pytest.mark.parametrize("form", [[], ["--json"], ["--ctm"], ["--srt"], ["--beam", "3"], ["--stream"]])
def test_standard_input_is_the_file_that_is_piped(lintra_says, long, stdin, form):
    """WAV with its header, raw samples with their rate."""
    _, whole, _ = lintra_says("transcribe", *form, str(long))
    for content, more in ((long.read_bytes(), []), (raw(long), ["--rate", str(RATE)])):
        stdin(content)
        code, out, err = lintra_says("transcribe", "-", *more, *form)
        assert code == 0
        assert out == whole.replace(str(long), "stdin").replace("long", "stdin")
        assert ("stdin: " in err) == ("--stream" in form)


def test_a_second_recording_in_a_pipe_is_refused(lintra_says, long, stdin):
    _, whole, _ = lintra_says("transcribe", str(long))
    for form, written in ((["--stream"], whole), ([], "")):
        stdin(long.read_bytes() * 2)
        code, out, err = lintra_says("transcribe", "-", *form)
        assert (code, out) == (1, written)
        assert "lintra: standard input holds another recording behind the first" in err


def test_another_rate_is_brought_to_the_model_s(lintra_says, long, stdin):
    write_wave(Path("fast.wav"), waveform.read(long, 16_000), 16_000)
    _, whole, _ = lintra_says("transcribe", "fast.wav")
    for form in ([], ["--stream"]):
        stdin(raw(Path("fast.wav")))
        code, out, _ = lintra_says("transcribe", "-", "--rate", "16000", *form)
        assert (code, out) == (0, whole)


def test_a_file_beside_standard_input(lintra_says, long, stdin):
    stdin(long.read_bytes())
    code, out, _ = lintra_says("transcribe", str(long), "-")
    first, second = out.splitlines()
    assert code == 0
    assert first.removeprefix(f"{long}: ") == second.removeprefix("stdin: ")
    stdin(b"")
    code, out, err = lintra_says("transcribe", "-", str(long), "--stream")
    assert (code, out) == (1, f"{first}\n")
    assert err.startswith("lintra: standard input is empty\n")


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_what_is_piped_in_and_cannot_be_heard(lintra_says, long, stdin, stream):
    content = long.read_bytes()
    for given, more, reason in (
        (b"", [], "standard input is empty"),
        (b"no audio" * 100, [], "standard input is not WAV: say the rate of raw samples"),
        (content[:-99], [], "standard input is cut short"),
        (content[:60], [], "standard input is cut short"),
        (
            bytes(50),
            ["--rate", "8000"],
            "standard input: 25 samples at 8,000 Hz are too short|too short for a frame",
        ),
        (content, ["--rate", "9000"], "standard input is WAV of 8,000 Hz, not 9,000: leave the rate out"),
    ):
        stdin(given)
        code, out, err = lintra_says("transcribe", "-", *more, *stream)
        assert code == 1
        assert err.count("\n") == 1
        assert out == "" or "cut short" in err, "what cannot be heard is no transcript"
        assert any(each in err for each in reason.split("|"))


def test_standard_input_that_is_none(lintra_says, long, stdin, monkeypatch):
    stdin(b"", terminal=True)
    code, _, err = lintra_says("transcribe", "-")
    assert (code, err) == (1, "lintra: standard input is a terminal: pipe audio into it\n")
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdin", None)
        assert lintra_says("transcribe", "-")[0] == 1
        sys.stdin.close()  # the command has opened a stream in its place
    write_kaldi(Path("kaldi"), [text_of(i) for i in range(24)])
    tiny = ["--layers", "1", "--heads", "2", "--width", "16", "--precision", "32", "--steps", "1"]
    assert lintra_says("train", "speech", "--kaldi", "kaldi", *tiny, "--dir", "given")[0] == 0
    code, _, err = lintra_says("transcribe", "--model", "given", "-")
    assert (code, err) == (
        2,
        "lintra: given reads features made elsewhere, and standard input is read as audio\n",
    )


@pytest.mark.slow
def test_what_ffmpeg_decodes(lintra_says, long, monkeypatch):
    """A file is recognised by its name, whole and streamed, and transcribed by its content."""
    samples = waveform.read(long, RATE)
    Path("a.m4a").write_bytes(samples.astype("<f4").tobytes())
    _, whole, _ = lintra_says("transcribe", str(long))
    stand_in(monkeypatch, Path("bin").absolute(), f"out.write(header({RATE}, 1)); out.write(content)")
    for form in ([], ["--stream"]):
        code, out, _ = lintra_says("transcribe", *form, "a.m4a")
        assert (code, out) == (0, whole)


def when(happened: Callable[[], object], signum: int) -> threading.Thread:
    """Send the main thread a signal once something has happened."""

    def wait():
        while not happened():
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signum)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("form", [["--stream"], ["--stream", "--srt"], []])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_pipe_that_stays_open_is_heard_until_a_signal(lintra_says, long, monkeypatch, form, signum):
    """All audio until then, down to the last words; the program is waiting for more when it is stopped."""
    _, whole, _ = lintra_says("transcribe", *form, str(long))
    reads, writes = os.pipe()
    left = array.array("i", [0])

    def read() -> bool:  # once all of it has been read
        fcntl.ioctl(reads, termios.FIONREAD, left)
        return left[0] == 0

    with open(reads, "rb") as end, open(writes, "wb") as begin:
        content = raw(long)
        feeding = threading.Thread(target=lambda: (begin.write(content), begin.flush()), daemon=True)
        feeding.start()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=end, isatty=lambda: False))
        thread = when(lambda: not feeding.is_alive() and read(), signum)
        code, out, _ = lintra_says("transcribe", "-", "--rate", str(RATE), *form)
        thread.join()
        feeding.join()
    assert (code, out) == (128 + signum, whole)


@pytest.mark.parametrize("form", [["--stream"], []])
def test_a_signal_before_any_audio_is_no_error(lintra_says, long, monkeypatch, form):
    reads, writes = os.pipe()
    waits, wait = threading.Event(), listening._await
    monkeypatch.setattr(listening, "_await", lambda content: (waits.set(), wait(content)))
    with open(reads, "rb") as end, open(writes, "wb"):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=end, isatty=lambda: False))
        thread = when(waits.is_set, signal.SIGINT)
        found = lintra_says("transcribe", "-", str(long), "--rate", str(RATE), *form)
        thread.join()
    assert found == (128 + signal.SIGINT, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [None, signal.SIGINT])
def test_words_are_out_while_a_pipe_is_open(signum):
    """The program in a process of its own; the pipe is then closed, or the program stopped."""
    command = [sys.executable, "-m", "lintra.cli", "transcribe", "-", "--rate", "8000"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    form = ["--stream", "--json", "--block", "0.2"]
    with subprocess.Popen([*command, *form], cwd=ROOT, env=environment, **pipes) as process:
        try:
            process.stdin.write(b"".join(raw(file) + bytes(4_800) for file in SPOKEN[:2]))
            process.stdin.flush()
            said = [json.loads(process.stdout.readline())]
            while said[-1]["word"] != "three":
                said.append(json.loads(process.stdout.readline()))
            if signum is None:
                process.stdin.close()
            else:
                process.send_signal(signum)
            said += events(process.stdout.read().decode())
            assert process.wait(60) == (0 if signum is None else 128 + signum)
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert [x["word"] for x in said if x["final"]] == ["zero", "three"]


@pytest.mark.parametrize("form", [[], ["--srt"], ["--json"], ["--ctm"]])
def test_a_microphone_is_heard_until_it_is_stopped(lintra_says, long, monkeypatch, form):
    """At its own rate; the last words are written, and stopping it is a normal exit."""
    write_wave(Path("fast.wav"), waveform.read(long, 16_000), 16_000)
    room = Room(waveform.read("fast.wav", 16_000), 16_000).install(monkeypatch)
    thread = when(room.heard.is_set, signal.SIGINT)
    live = ["--live", "--microphone", "built", "--block", "0.2", *form]
    code, out, err = lintra_says("transcribe", *live)
    thread.join()
    assert code == 0
    assert err.startswith("hearing 'Built-in': Ctrl-C ends it\nmicrophone: ")
    assert "ms to hear it" in err
    _, expected, _ = lintra_says("transcribe", "fast.wav", "--stream", "--block", "0.2", *form)
    if form == ["--json"]:
        out, expected = ([x for x in events(each) if x["final"]] for each in (out, expected))
        assert [x | {"audio": "fast.wav"} for x in out] == expected
    else:
        assert out == expected.replace("fast ", "microphone ")


def test_a_microphone_that_hears_nothing_yet(lintra_says, monkeypatch):
    """Stopped before there is any audio: no words, and no error."""
    room = Room(np.zeros(0), RATE).install(monkeypatch)
    thread = when(room.heard.is_set, signal.SIGINT)
    code, out, err = lintra_says("transcribe", "--live")
    thread.join()
    assert (code, out.strip(), err) == (0, "", "hearing 'Built-in': Ctrl-C ends it\n")


def test_microphones_that_cannot_be_heard(lintra_says, long, monkeypatch):
    Room(np.zeros(9), RATE).install(monkeypatch)
    code, out, err = lintra_says("transcribe", "--live", "--microphone", "phone")
    assert (code, out) == (2, "")
    assert err == "lintra: there is no microphone 'phone': the input devices are 1 'Built-in', 2 'USB mic'\n"
    Room(waveform.read(long, RATE), RATE, ends="unplugged", lost=1).install(monkeypatch)
    code, out, err = lintra_says("transcribe", "--live", "--block", "0.1")
    assert code == 2
    assert len(out) > 5
    assert err.endswith("lintra: microphone 'Built-in' stopped: is it plugged in?\n")
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    code, _, err = lintra_says("transcribe", "--live")
    needed = "this command needs sounddevice, which is not installed: pip install 'lintra[live]'"
    assert (code, err) == (2, f"lintra: {needed}\n")


def test_a_busy_computer_says_that_audio_was_lost(lintra_says, long, monkeypatch):
    room = Room(waveform.read(long, RATE), RATE, lost=2).install(monkeypatch)
    thread = when(room.heard.is_set, signal.SIGINT)
    code, _, err = lintra_says("transcribe", "--live")
    thread.join()
    assert code == 0
    assert err.endswith("lintra: audio was lost 2 times: this computer is too busy\n")


def test_a_file_that_is_stopped_ends_with_its_last_words(lintra_says, long, monkeypatch):
    """What comes after it is not transcribed."""
    _, whole, _ = lintra_says("transcribe", "--stream", str(long))
    blocks = waveform.blocks

    def interrupted(*args, **options):
        for number, block in enumerate(blocks(*args, **options)):
            if number == 3:
                signal.raise_signal(signal.SIGINT)
            yield block

    monkeypatch.setattr(waveform, "blocks", interrupted)
    code, out, err = lintra_says("transcribe", "--stream", str(long), "never.wav")
    assert code == 130
    said = out.removeprefix(f"{long}: ").removesuffix("\n")
    assert 0 < len(said) < len(whole) - 1
    assert whole.startswith(said[:-1])
    assert "2.00 s of audio" in err


def test_waiting_ends_at_once():
    with stopping() as stop:
        with pytest.raises(StopRequested), stop.interrupting():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StopRequested), stop.interrupting():
            raise AssertionError("it was asked to stop before")
    assert stop.exit_code == 128 + signal.SIGTERM
    assert Path("-") == listening.STDIN
