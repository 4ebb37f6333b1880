"""A stand-in for sounddevice: its devices hear what a test gives them, as fast as they can."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import numpy as np


class PortAudioError(Exception):
    pass


class Room:
    """Devices and what their microphones hear: samples [n] at a rate, all of them at once.

    ends: it "stays" on and silent, or is "unplugged"; broken: cannot be opened; lost: blocks that overflow.
    """

    def __init__(self, samples, rate, *, ends="stays", broken=False, lost=0):
        self.samples, self.rate = np.asarray(samples, np.float32), rate
        self.ends, self.broken, self.lost = ends, broken, lost
        self.heard = threading.Event()  # set once all of it has been heard
        self.opened = []  # the settings of every stream
        self.devices = [
            {"name": "Speakers", "index": 0, "max_input_channels": 0, "default_samplerate": 44_100.0},
            {"name": "Built-in", "index": 1, "max_input_channels": 2, "default_samplerate": float(rate)},
            {"name": "USB mic", "index": 2, "max_input_channels": 1, "default_samplerate": float(rate)},
        ]
        self.preferred = 1

    def install(self, monkeypatch) -> "Room":
        module = ModuleType("sounddevice")
        module.PortAudioError = PortAudioError
        module.query_devices = self.query
        module.InputStream = lambda **settings: Stream(self, settings)
        monkeypatch.setitem(sys.modules, "sounddevice", module)
        return self

    def query(self, device=None, kind=None):
        if device is None and kind is None:
            return self.devices
        if device is None:
            device = self.preferred
        if isinstance(device, str):
            named = [x for x in self.devices if device.lower() in x["name"].lower()]
            if len(named) != 1:
                raise ValueError(f"No input device matching {device!r}")
            return named[0]
        if not 0 <= device < len(self.devices):
            raise PortAudioError(f"Error querying device {device}")
        if not self.devices[device]["max_input_channels"]:
            raise ValueError("Not an input device")
        return self.devices[device]


class Stream:
    def __init__(self, room, settings):
        if room.broken:
            raise PortAudioError("Device unavailable [PaErrorCode -9985]")
        room.opened.append(settings)
        self._room, self._settings, self._closed = room, settings, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._closed.set()
        self._thread.join()

    def _run(self):
        room, take, size = self._room, self._settings["callback"], self._settings["blocksize"]
        for number, first in enumerate(range(0, len(room.samples), size)):
            status = SimpleNamespace(input_overflow=number < room.lost)
            block = room.samples[first : first + size, None]
            take(block, len(block), None, status)
        room.heard.set()
        if room.ends == "stays":
            self._closed.wait()
        self._settings["finished_callback"]()
