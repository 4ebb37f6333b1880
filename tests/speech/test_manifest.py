"""Lists of recordings: the meaning of each form, and error messages that name the line of each mistake."""

import json
from pathlib import Path

import pytest

from lintra.audio.errors import SpeechError
from lintra.speech.manifest import Utterance, read_kaldi, read_manifest


@pytest.fixture
def manifest(tmp_path):
    """Write a manifest of these bytes or objects; return its path."""

    def write(*content):
        path = tmp_path / "train.jsonl"
        path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in content))
        return path

    return write


@pytest.fixture
def kaldi(tmp_path):
    """Write the files of a Kaldi folder; return its path."""

    def write(**files):
        for name, content in files.items():
            (tmp_path / name.replace("_scp", ".scp")).write_text(content)
        return tmp_path

    return write


def test_a_manifest(manifest, tmp_path):
    path = manifest(
        {"audio": "a b.wav", "text": "ONE"},
        {"audio": "/abs/c.flac", "text": "", "start": 1, "duration": 2.5, "speaker": "ann", "lang": "en"},
        {"audio": "a b.wav", "text": "TWO\u2028x", "start": 0.25, "duration": None},
        {"id": "x", "audio": "sub/a b.wav", "text": "THREE"},
        {"audio": "~draft.wav", "text": "", "start": 12345.67},
        {"audio": "~draft.wav", "text": "", "start": 12345.68},
        {"audio": "~/home.wav", "text": ""},
    )
    assert read_manifest(str(path)) == [
        Utterance(id="a b.wav", text="ONE", audio=tmp_path / "a b.wav"),
        Utterance(
            id="/abs/c.flac:1", text="", audio=Path("/abs/c.flac"), start=1, duration=2.5, speaker="ann"
        ),
        Utterance(id="a b.wav:0.25", text="TWO\u2028x", audio=tmp_path / "a b.wav", start=0.25),
        Utterance(id="x", text="THREE", audio=tmp_path / "sub/a b.wav"),
        Utterance(id="~draft.wav:12345.67", text="", audio=tmp_path / "~draft.wav", start=12345.67),
        Utterance(id="~draft.wav:12345.68", text="", audio=tmp_path / "~draft.wav", start=12345.68),
        Utterance(id="~/home.wav", text="", audio=Path.home() / "home.wav"),
    ]


def test_a_manifest_from_windows(manifest, tmp_path):
    line = json.dumps({"audio": "a.wav", "text": "Stra\u00dfe \u2028"}, ensure_ascii=False).encode()
    (found,) = read_manifest(manifest(b"\xef\xbb\xbf" + line + b"\r", b"\r", b"  "))
    assert found == Utterance(id="a.wav", text="Stra\u00dfe \u2028", audio=tmp_path / "a.wav")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON: Expecting"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b"audio.wav HELLO", "line 2 is not JSON"),
        (b'{"audio": "\xff"}', r"line 2 is not UTF-8 text \(byte 12\)"),
        ([1], r"line 2 must be an object \{\.\.\.\}, got \[1\]"),
        ({}, "line 2 lacks 'audio': it has nothing"),
        ({"audio_filepath": "b", "text": ""}, "line 2 lacks 'audio': it has audio_filepath, text"),
        ({"audio": "b"}, "line 2 lacks 'text': it has audio"),
        ({"audio": "b", "text": None}, "line 2 lacks 'text'"),
        ({"audio": "b", "Text": ""}, r"line 2 has the unknown field 'Text' \(perhaps text\)"),
        ({"audio": "b", "text": "", "durations": 1}, "line 2 has the unknown field 'durations'"),
        ({"audio": 3, "text": ""}, "line 2: audio must be str, got 3"),
        ({"audio": "", "text": ""}, "line 2: audio must not be empty"),
        ({"audio": "b", "text": "\ud800"}, r"line 2: text must be Unicode text, got '\\ud800'"),
        ({"audio": "b", "text": ["A"]}, r"line 2: text must be str, got \['A'\]"),
        ({"audio": "b", "text": "", "id": 7}, "line 2: id must be str, got 7"),
        ({"audio": "b", "text": "", "id": ""}, "line 2: id must not be empty"),
        ({"audio": "b", "text": "", "start": "1.5"}, r"line 2: start must be float, got '1\.5'"),
        ({"audio": "b", "text": "", "start": True}, "line 2: start must be float, got True"),
        ({"audio": "b", "text": "", "start": -0.1}, r"line 2: start must be 0 or more seconds, got -0\.1"),
        (
            {"audio": "b", "text": "", "start": float("nan")},
            "line 2: start must be 0 or more seconds, got nan",
        ),
        ({"audio": "b", "text": "", "start": 10**400}, "line 2: start must be 0 or more seconds"),
        ({"audio": "b", "text": "", "duration": 0}, "line 2: duration must be more than 0 seconds, got 0"),
        ({"audio": "b", "text": "", "duration": -2.0}, "line 2: duration must be more than 0"),
        ({"audio": "b", "text": "", "duration": float("inf")}, "line 2: duration must be .* got inf"),
        ({"audio": "a.wav", "text": ""}, r"line 2: the id 'a\.wav' is there already"),
    ],
)
def test_bad_lines_are_named(manifest, line, message):
    with pytest.raises(SpeechError, match=rf"train\.jsonl, {message}"):
        read_manifest(manifest({"audio": "a.wav", "text": "ONE"}, line))


def test_no_manifest(manifest, tmp_path):
    with pytest.raises(SpeechError, match="holds no utterances"):
        read_manifest(manifest(b"", b"\r"))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(SpeechError, match="cannot be read"):
            read_manifest(path)


WAVES = "r1 one.wav\nr2 /abs/two words.wav\n"


def test_a_kaldi_folder(kaldi):
    folder = kaldi(text="r2 HELLO  WORLD\nr1\n", wav_scp=WAVES)
    assert read_kaldi(str(folder)) == [
        Utterance(id="r2", text="HELLO  WORLD", audio=Path("/abs/two words.wav")),
        Utterance(id="r1", text="", audio=folder / "one.wav"),
    ]


def test_a_kaldi_folder_with_segments_and_speakers(kaldi):
    folder = kaldi(
        text="b TWO\na ONE\n",
        wav_scp=WAVES,
        segments="a r1 0.5 1.25\nb r1 2 -1\n",
        utt2spk="a ann\nb bob\n",
        feats_scp="a a.npy\nb sub/b.npz\n",
    )
    audio = {"audio": folder / "one.wav"}
    assert read_kaldi(folder) == [
        Utterance(id="b", text="TWO", start=2, speaker="bob", features=folder / "sub/b.npz", **audio),
        Utterance(
            id="a", text="ONE", start=0.5, duration=0.75, speaker="ann", features=folder / "a.npy", **audio
        ),
    ]


def test_a_kaldi_folder_of_features(kaldi):
    folder = kaldi(text="a ONE\n", feats_scp="a a.npy\n")
    assert read_kaldi(folder) == [Utterance(id="a", text="ONE", features=folder / "a.npy")]


TEXT = "r1 ONE\nr2 TWO\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"wav_scp": WAVES}, "is not a Kaldi folder: .*text does not exist"),
        ({"text": TEXT}, r"has no audio \(wav\.scp\) and no features \(feats\.scp\)"),
        ({"text": "", "wav_scp": WAVES}, r"wav\.scp, line 1: utterance 'r1' has no text"),
        ({"text": TEXT + "r1 X", "wav_scp": WAVES}, "text, line 3: 'r1' is there already, in line 1"),
        ({"text": TEXT, "wav_scp": WAVES + "r2 x"}, r"wav\.scp, line 3: 'r2' is there already, in line 2"),
        ({"text": TEXT + "r3 X", "wav_scp": WAVES}, "text, line 3: utterance 'r3' has no audio"),
        ({"text": "r1 ONE", "wav_scp": WAVES}, r"wav\.scp, line 2: utterance 'r2' has no text"),
        (
            {"text": TEXT, "wav_scp": WAVES, "utt2spk": "r1 ann"},
            "text, line 2: utterance 'r2' has no speaker",
        ),
        ({"text": TEXT, "wav_scp": "r1\nr2 b.wav"}, r"wav\.scp, line 1: expected an id and what belongs"),
        (
            {"text": TEXT, "wav_scp": "r1 sox a -t wav - |\nr2 b"},
            r"wav\.scp, line 1: a command, which is not",
        ),
        ({"text": TEXT, "wav_scp": "r1 a\nr2 | b"}, r"wav\.scp, line 2: a command"),
        ({"text": TEXT, "wav_scp": "r1 a\nr2 -"}, r"wav\.scp, line 2: a command"),
        ({"text": TEXT, "feats_scp": "r1 a.npy\nr2 b.ark:17"}, r"feats\.scp, line 2: features must be in a"),
        ({"text": TEXT, "feats_scp": "r1 a.npy"}, "text, line 2: utterance 'r2' has no features"),
    ],
)
def test_bad_folders_are_named(kaldi, files, message):
    with pytest.raises(SpeechError, match=message):
        read_kaldi(kaldi(**files))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ("a r1 0", "expected an utterance, its recording, start and end in seconds"),
        ("a r1 0 1 2", "expected an utterance, its recording"),
        ("a r1 0 one", "expected an utterance, its recording"),
        ("a r3 0 1", "there is no recording 'r3' in wav.scp"),
        ("a r1 -1 1", "an end must come after its start, got -1 to 1"),
        ("a r1 1 1", "an end must come after its start"),
        ("a r1 nan 1", "an end must come after its start"),
        ("a r1 0 inf", "an end must come after its start"),
    ],
)
def test_bad_segments_are_named(kaldi, segment, message):
    with pytest.raises(SpeechError, match=f"segments, line 1: {message}"):
        read_kaldi(kaldi(text="a ONE\n", wav_scp=WAVES, segments=segment))


def test_no_folder(tmp_path):
    with pytest.raises(SpeechError, match="is not a Kaldi folder"):
        read_kaldi(tmp_path / "none")


@pytest.mark.parametrize("name", ["begin", "end", "offset"])
def test_sections_in_other_words_are_told(tmp_path, name):
    (tmp_path / "list.jsonl").write_text(json.dumps({"audio": "a.wav", "text": "A", name: 3.5}) + "\n")
    with pytest.raises(
        SpeechError, match=rf"line 1 has '{name}': give the seconds of a section as start and"
    ):
        read_manifest(tmp_path / "list.jsonl")
