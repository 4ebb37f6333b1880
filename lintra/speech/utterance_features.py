"""The features of one utterance: computed from its audio, or as given."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lintra.audio import features, waveform
from lintra.audio.augment import changed_tempo
from lintra.audio.errors import SpeechError
from lintra.io.files import refuse_irregular
from lintra.speech.manifest import Utterance


def arrays(utterance: Utterance, config: features.Config, speeds: Sequence[float]) -> list[np.ndarray]:
    """The features of an utterance at each speed, float32 [t bins]. Raises SpeechError."""
    if config.kind == "given":
        frames = given(utterance.features, config.bins)
        return [changed_tempo(frames, speed) for speed in speeds]
    if utterance.audio is None:
        raise SpeechError("there is no audio, from which features could be computed")
    samples = waveform.read(utterance.audio, config.rate, start=utterance.start, duration=utterance.duration)
    found = [features.compute(waveform.changed_speed(samples, speed), config) for speed in speeds]
    if not all(map(len, found)):
        raise SpeechError(
            f"{len(samples) / config.rate:.3g} seconds are too short for a frame of {config.frame_ms:g} ms"
        )
    return found


def given(source: np.ndarray | Path | None, bins: int | None = None) -> np.ndarray:
    """Given features, checked, float32 [t bins]; None: of any width. Raises SpeechError."""
    if source is None:
        raise SpeechError("there are no features, and none can be computed: they are to be given")
    name = f"{source}: " if isinstance(source, Path) else ""
    x = load(source) if isinstance(source, Path) else source
    wide = x.ndim == 2 and (x.shape[1] > 0 if bins is None else x.shape[1] == bins)
    if not wide or not np.issubdtype(x.dtype, np.floating):
        raise SpeechError(f"{name}features must be floats [t {bins or 'i'}], got {x.dtype} {list(x.shape)}")
    if not len(x):
        raise SpeechError(f"{name}features have no frames")
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise SpeechError(f"{name}features have numbers that are not finite")
    return x


def load(path: Path) -> np.ndarray:
    """The array of a .npy file or the only one of a .npz file; nothing is unpickled."""
    refuse_irregular(path, SpeechError)
    try:
        if path.suffix != ".npz":
            return np.lib.format.open_memmap(path, mode="r")
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            if len(found.files) != 1:
                raise SpeechError(f"{path} must hold one array, got {len(found.files)}")
            return found[found.files[0]]
    except FileNotFoundError as error:
        raise SpeechError(f"{path} does not exist") from error
    except SpeechError:
        raise
    except (OSError, EOFError, ValueError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        raise SpeechError(f"{path} cannot be read as an array of numbers: {error}") from error
