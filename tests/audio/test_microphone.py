"""A microphone returns all that it hears, and reports what is wrong with it; the devices are a stand-in."""

import importlib.util
import sys

import numpy as np
import pytest

from lintra.audio.errors import SpeechError
from lintra.audio.microphone import Microphone
from tests.audio.microphones import Room

RATE = 8_000


def noise(n=RATE):
    return np.random.default_rng(0).uniform(-0.5, 0.5, n).astype(np.float32)


def test_everything_is_heard_until_it_is_stopped(monkeypatch):
    """This includes what has arrived by then, however it is cut."""
    for seconds in (0.01, 0.13, 60.0):
        room = Room(noise(RATE + 7), RATE).install(monkeypatch)
        pieces = list(Microphone().pieces(seconds=seconds, stopped=room.heard.is_set))
        assert {piece.rate for piece in pieces} == {RATE}
        np.testing.assert_array_equal(np.concatenate([x.samples for x in pieces]), room.samples)
        assert all(seconds * RATE <= len(x.samples) < (seconds + 0.05) * RATE for x in pieces[:-1])
        (settings,) = room.opened
        assert (settings["device"], settings["channels"], settings["samplerate"]) == (1, 1, RATE)


@pytest.mark.parametrize(
    ("wanted", "name"), [(None, "Built-in"), ("usb", "USB mic"), ("2", "USB mic"), ("1", "Built-in")]
)
def test_a_device_by_its_name_or_number(monkeypatch, wanted, name):
    Room(noise(), RATE).install(monkeypatch)
    assert Microphone(wanted).name == name


@pytest.mark.parametrize("wanted", ["nothing", "9", "0", "speakers and more", ""])
def test_one_that_is_not_there(monkeypatch, wanted):
    Room(noise(), RATE).install(monkeypatch)
    message = rf"^there is no microphone '{wanted}': the input devices are 1 'Built-in', 2 'USB mic'$"
    with pytest.raises(SpeechError, match=message):
        Microphone(wanted)


def test_a_computer_without_one(monkeypatch):
    room = Room(noise(), RATE).install(monkeypatch)
    room.devices, room.preferred = room.devices[:1], -1
    with pytest.raises(SpeechError, match=r"^there is no microphone: this computer has no input device$"):
        Microphone()


def test_one_that_cannot_be_opened_goes_away_or_is_no_microphone(monkeypatch):
    Room(noise(), RATE, broken=True).install(monkeypatch)
    with pytest.raises(SpeechError, match=r"microphone 'Built-in' cannot be heard: Device unavailable"):
        list(Microphone().pieces(seconds=1.0, stopped=lambda: False))
    Room(noise(), RATE, ends="unplugged").install(monkeypatch)
    heard = []

    def hear():
        for piece in Microphone().pieces(seconds=60.0, stopped=lambda: False):
            heard.append(len(piece.samples))

    with pytest.raises(SpeechError, match="microphone 'Built-in' stopped: is it plugged in"):
        hear()
    assert heard == [len(noise())]  # all that was heard until then
    Room(np.full(9, np.nan), RATE).install(monkeypatch)
    with pytest.raises(SpeechError, match="microphone 'Built-in' has samples that are not finite"):
        list(Microphone().pieces(seconds=0.1, stopped=lambda: False))
    Room(noise(), 10).install(monkeypatch)
    with pytest.raises(SpeechError, match="microphone 'Built-in' must have a rate of at least 1,000 Hz"):
        Microphone()


def test_audio_that_is_lost_is_counted(monkeypatch):
    room = Room(noise(), RATE, lost=3).install(monkeypatch)
    microphone = Microphone()
    list(microphone.pieces(seconds=1.0, stopped=room.heard.is_set))
    assert microphone.lost == 3


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs sounddevice .*pip install 'lintra\[live\]'"):
        Microphone()


@pytest.mark.skipif(importlib.util.find_spec("sounddevice") is None, reason="sounddevice is not installed")
def test_the_package_itself():
    """Without PortAudio, or without a microphone of this name, an error message says so."""
    with pytest.raises(SpeechError, match=r"apt install libportaudio2$|there is no microphone 'no such"):
        Microphone("no such microphone")
