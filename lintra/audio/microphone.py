"""Audio as a microphone hears it. Needs sounddevice, which is optional, and PortAudio."""

import contextlib
import queue
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from lintra.audio.errors import SpeechError
from lintra.audio.samples import Audio, check_rate, checked
from lintra.io.packages import package

_AT_ONCE = 0.05  # seconds of audio that the device delivers at once: less is lost at the end
_LOOK_UP = 0.1  # seconds without audio after which `stopped` is asked again


class Microphone:
    """An input device, by its name, a part of it or its number; None: the one that the system prefers.

    lost: how many times audio was lost, because the computer was too busy to read it. Raises SpeechError,
    with the devices there are, for one that is not there; ModuleNotFoundError that says how to install
    sounddevice.
    """

    def __init__(self, device: str | None = None):
        self._sounddevice = _sounddevice()
        wanted = int(device) if device is not None and device.isdecimal() else device
        try:
            found = self._sounddevice.query_devices(wanted, "input")
        except (ValueError, self._sounddevice.PortAudioError) as error:
            which = "microphone" if device is None else f"microphone {device!r}"
            raise SpeechError(f"there is no {which}: {_choice(self._sounddevice)}") from error
        self.number, self.name = int(found["index"]), str(found["name"])
        self.rate = round(found["default_samplerate"])  # the one that every device can be read at
        self.lost = 0
        check_rate(self.rate, f"microphone {self.name!r}")

    def pieces(self, *, seconds: float, stopped: Callable[[], bool]) -> Iterator[Audio]:
        """Yield the samples heard from now on, in pieces of about so many seconds, until `stopped` returns
        True.

        Raises SpeechError where the device cannot be opened, or goes away.
        """
        heard: queue.SimpleQueue[tuple[np.ndarray, bool] | None] = queue.SimpleQueue()

        def take(samples: np.ndarray, frames: int, time: Any, status: Any) -> None:  # in a thread of its own
            heard.put((samples[:, 0].copy(), bool(status.input_overflow)))

        name, wanted = f"microphone {self.name!r}", seconds * self.rate
        kept: list[np.ndarray] = []
        try:
            stream = self._sounddevice.InputStream(
                samplerate=self.rate,
                blocksize=max(1, round(min(seconds, _AT_ONCE) * self.rate)),
                device=self.number,
                channels=1,
                dtype="float32",
                callback=take,
                finished_callback=lambda: heard.put(None),
            )
            with stream:
                while not stopped():
                    with contextlib.suppress(queue.Empty):
                        kept.append(self._taken(heard.get(timeout=_LOOK_UP), name))
                    if sum(map(len, kept)) >= wanted:
                        yield Audio(np.concatenate(kept), self.rate)
                        kept = []
                for _ in range(heard.qsize()):
                    kept.append(self._taken(heard.get(), name))
            if kept:
                yield Audio(np.concatenate(kept), self.rate)
        except SpeechError:  # what came before is heard
            if kept:
                yield Audio(np.concatenate(kept), self.rate)
            raise
        except self._sounddevice.PortAudioError as error:
            raise SpeechError(f"{name} cannot be heard: {error}") from error

    def _taken(self, piece: tuple[np.ndarray, bool] | None, name: str) -> np.ndarray:
        if piece is None:
            raise SpeechError(f"{name} stopped: is it plugged in?")
        self.lost += piece[1]
        return checked(piece[0], name)


def _sounddevice() -> ModuleType:
    """The package. Raises ModuleNotFoundError where it is not installed, SpeechError without PortAudio."""
    try:
        return package("sounddevice", extra="live")
    except ModuleNotFoundError as error:
        if isinstance(error.__cause__, OSError):
            raise SpeechError(
                f"sounddevice cannot hear a microphone: {error.__cause__}, install it, for instance with "
                "apt install libportaudio2"
            ) from error
        raise


def _choice(sounddevice: ModuleType) -> str:
    """Say which input devices there are."""
    devices = [x for x in sounddevice.query_devices() if x["max_input_channels"] > 0]
    named = ", ".join(f"{x['index']} {x['name']!r}" for x in devices)
    return f"the input devices are {named}" if devices else "this computer has no input device"
