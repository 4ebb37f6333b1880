"""AN4 and FSDD: small ones of the same structure, and the real ones if they are present."""

import io
import lzma
import os
import tarfile
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lintra.audio.errors import SpeechError
from lintra.audio.waveform import Audio
from lintra.speech.corpora import DIGITS, FSDD_RATE, an4, fsdd

AN4_HEAD = "split\tutterance\tspeaker\tfirst_frame\tframes\ttranscript\n"
AN4_LINES = (
    "train\ta1\tann\t0\t4\tYES\n",
    "train\tb1\tbob\t4\t3\tNO  A B\n",
    "test\tc1\tcid\t0\t5\tGO\n",
)
CEPSTRA = {
    split: np.random.default_rng(n).normal(size=(13, n)).astype(np.float16)
    for split, n in (("train", 7), ("test", 5))
}


@pytest.fixture
def small_an4(tmp_path):
    (tmp_path / "an4_index.tsv").write_text(AN4_HEAD + "".join(AN4_LINES))
    for split, x in CEPSTRA.items():
        (tmp_path / f"an4_mfcc_{split}.f16.xz").write_bytes(lzma.compress(x.tobytes()))
    return tmp_path


def test_an4(small_an4):
    found = an4(str(small_an4))
    assert list(found) == ["train", "test"]
    assert [(u.id, u.speaker, u.text) for u in found["train"]] == [
        ("a1", "ann", "YES"),
        ("b1", "bob", "NO  A B"),
    ]
    assert [u.id for u in found["test"]] == ["c1"]
    np.testing.assert_array_equal(found["train"][1].features, CEPSTRA["train"].T[4:7].astype(np.float32))
    assert found["train"][1].features.dtype == np.float32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train\td\tdan\t4\t4\tX\n", r"index\.tsv, line 5: frames 4 to 8 of 7"),
        ("train\td\tdan\t-1\t4\tX\n", "line 5: first_frame must be a whole number, got '-1'"),
        ("train\td\tdan\t1\t4.0\tX\n", "line 5: frames must be a whole number"),
        ("train\td\tdan\t1\n", "line 5: expected 6 columns, got 4"),
        ("valid\td\tdan\t1\t2\tX\n", "line 5: split must be train or test, got 'valid'"),
    ],
)
def test_a_bad_line_of_an_index(small_an4, line, message):
    with open(small_an4 / "an4_index.tsv", "a") as file:
        file.write(line)
    with pytest.raises(SpeechError, match=message):
        an4(small_an4)


def test_a_bad_an4(small_an4):
    (small_an4 / "an4_index.tsv").write_text("".join(AN4_LINES))
    with pytest.raises(SpeechError, match="line 1 must be the columns split utterance speaker"):
        an4(small_an4)
    cepstra = small_an4 / "an4_mfcc_test.f16.xz"
    whole = cepstra.read_bytes()
    cepstra.write_bytes(whole[:-20])
    with pytest.raises(SpeechError, match=r"test\.f16\.xz cannot be read, it may be cut short"):
        an4(small_an4)
    cepstra.write_bytes(lzma.compress(bytes(25)))
    with pytest.raises(SpeechError, match="holds 25 bytes, which is not 13 float16 a frame"):
        an4(small_an4)
    cepstra.unlink()
    with pytest.raises(SpeechError, match=r"an4_mfcc_test\.f16\.xz does not exist"):
        an4(small_an4)


SPEAKERS, TAKES = ("ann", "bob"), range(7)  # the first two takes are for the test


def recording(digit, speaker, take):
    """Samples that encode which recording they are."""
    first = 1_000 * digit + 100 * SPEAKERS.index(speaker) + take
    return np.array([first, -1, -first], np.int16).repeat(2 + digit)


def wave_file(samples, channels=1, rate=FSDD_RATE):
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return content.getvalue()


@pytest.fixture
def small_fsdd(tmp_path):
    """Write the two files, with extra members in the archive and extra lines in the index; their folder."""

    def write(members=None, lines=()):
        files, index = {}, ["file,digit,speaker,take,split,samples"]
        for digit in range(10):
            for speaker in SPEAKERS:
                for take in TAKES:
                    name, samples = f"{digit}_{speaker}_{take}.wav", recording(digit, speaker, take)
                    files[name] = wave_file(samples)
                    split = "test" if take < 2 else "train"
                    index.append(f"{name},{digit},{speaker},{take},{split},{len(samples)}")
        with tarfile.open(tmp_path / "fsdd.tar.xz", "w:xz") as tar:
            for name, content in (files | (members or {})).items():
                member = tarfile.TarInfo(name)
                if content is None:
                    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                    tar.addfile(member)
                else:
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        (tmp_path / "fsdd_index.csv").write_text("\n".join([*index, *lines]) + "\n")
        return tmp_path

    return write


def samples_of(audio):
    assert isinstance(audio, Audio)
    assert audio.rate == FSDD_RATE
    return (audio.samples * 32_768).astype(np.int16)


def recordings_of(utterance):
    """(digit, speaker, take) of each recording in a string, decoded from its samples."""
    samples, found = samples_of(utterance.audio), []
    while len(samples):
        digit, rest = divmod(int(samples[0]), 1_000)
        found.append((digit, SPEAKERS[rest // 100], rest % 100))
        own = recording(*found[-1])
        np.testing.assert_array_equal(samples[: len(own)], own)
        samples = samples[len(own) :]
    return found


@pytest.mark.parametrize("rounds", [1, 3])
def test_strings_of_digits_use_each_recording(small_fsdd, rounds):
    found = fsdd(str(small_fsdd()), joined=(2, 5), rounds=rounds)
    for split, takes in (("train", TAKES[2:]), ("test", TAKES[:2])):
        used = Counter()
        for utterance in found[split]:
            recordings = recordings_of(utterance)
            assert utterance.text == " ".join(DIGITS[digit] for digit, _, _ in recordings)
            assert {speaker for _, speaker, _ in recordings} == {utterance.speaker}
            used.update(recordings)
            assert len(recordings) <= 5
        wanted = [(digit, speaker, take) for digit in range(10) for speaker in SPEAKERS for take in takes]
        assert used == Counter(wanted * (rounds if split == "train" else 1))
        assert len({utterance.id for utterance in found[split]}) == len(found[split])
    assert {len(u.text.split()) for u in found["train"]} >= {2, 3, 4, 5}


def test_strings_follow_from_the_seed(small_fsdd):
    folder = small_fsdd()
    one, again, other = ([u.text for u in fsdd(folder, seed=seed)["train"]] for seed in (0, 0, 1))
    assert one == again
    assert one != other
    assert all(len(u.text.split()) == 1 for u in fsdd(folder, joined=(1, 1))["train"])


def test_nothing_but_files_is_read_from_the_archive(small_fsdd):
    folder = small_fsdd({"../outside.wav": wave_file(np.zeros(3, np.int16)), "link.wav": None})
    before = sorted(folder.parent.rglob("*"))
    assert len(fsdd(folder)["test"]) > 0
    assert sorted(folder.parent.rglob("*")) == before
    small_fsdd({"link.wav": None}, ["link.wav,1,ann,9,test,3"])
    with pytest.raises(SpeechError, match=r"fsdd\.tar\.xz has no file link\.wav"):
        fsdd(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no wave", r"3_bob_4\.wav of .*fsdd\.tar\.xz is not a wave file"),
        (
            wave_file(np.zeros(4, np.int16), channels=2),
            r"must have 1 channel of 2 bytes at 8000 Hz, got \(2, 2",
        ),
        (wave_file(np.zeros(4, np.int16), rate=16_000), "must have 1 channel of 2 bytes at 8000 Hz"),
        (wave_file(np.zeros(4, np.int16)), r"index\.csv, line \d+: 3_bob_4\.wav of .* has 4 samples, not 15"),
    ],
)
def test_a_bad_recording_is_named(small_fsdd, content, message):
    with pytest.raises(SpeechError, match=message):
        fsdd(small_fsdd({"3_bob_4.wav": content}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x.wav,3,ann,9,train,8", r"line 142: .*fsdd\.tar\.xz has no file x\.wav"),
        ("3_ann_1.wav,10,ann,9,train,8", "line 142: digit must be 0 to 9, got 10"),
        ("3_ann_1.wav,three,ann,9,train,8", "line 142: digit must be a whole number, got 'three'"),
    ],
)
def test_a_bad_line_is_named(small_fsdd, line, message):
    with pytest.raises(SpeechError, match=rf"fsdd_index\.csv, {message}"):
        fsdd(small_fsdd(lines=[line]))


def test_a_bad_archive(small_fsdd):
    path = small_fsdd() / "fsdd.tar.xz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpeechError, match=r"fsdd\.tar\.xz cannot be read, it may be cut short"):
        fsdd(path.parent)
    path.unlink()
    with pytest.raises(SpeechError, match=r"fsdd\.tar\.xz does not exist"):
        fsdd(path.parent)


@pytest.mark.parametrize("joined", [(0, 3), (3, 2)])
def test_how_many_digits(small_fsdd, joined):
    with pytest.raises(ValueError, match=r"joined must be the fewest and the most digits of a string, got"):
        fsdd(small_fsdd(), joined=joined)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        fsdd(small_fsdd(), rounds=0)


def real(name):
    """The folder of the real data."""
    folder = Path(os.environ.get("LINTRA_DATA", "nowhere")) / "speech"
    if not (folder / name).exists():
        pytest.skip(f"needs {name} in the folder speech of $LINTRA_DATA")
    return folder


def test_the_real_an4():
    found = an4(real("an4_index.tsv"))
    assert {split: len(x) for split, x in found.items()} == {"train": 948, "test": 130}
    frames = {split: [len(u.features) for u in x] for split, x in found.items()}
    assert {split: sum(x) for split, x in frames.items()} == {"train": 253_682, "test": 35_570}
    assert (min(frames["train"] + frames["test"]), max(frames["train"] + frames["test"])) == (69, 639)
    assert len({u.speaker for u in found["train"]}) == 74
    assert sum(len(u.text.split()) for u in found["train"]) == 5_442


def test_the_real_digits():
    found = fsdd(real("fsdd.tar.xz"))
    assert {split: sum(len(u.text.split()) for u in x) for split, x in found.items()} == {
        "train": 2_700,
        "test": 300,
    }
    seconds = sum(len(u.audio.samples) for x in found.values() for u in x) / FSDD_RATE
    assert seconds / 60 == pytest.approx(21.9, abs=0.05)
