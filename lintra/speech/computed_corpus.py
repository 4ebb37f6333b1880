"""Features computed each time they are asked for, so that memory and start do not grow with the recordings.

How many frames an utterance has is known beforehand from the seconds that its manifest gives, else from the
header of its file, without decoding it.
"""

from collections.abc import Callable, Sequence

import numpy as np

from lintra.audio import features, waveform
from lintra.audio.augment import frames_at
from lintra.audio.errors import SpeechError
from lintra.speech.corpus import Skipped, check_speeds, id_at_speed, none_usable
from lintra.speech.manifest import Utterance
from lintra.speech.utterance_features import arrays, given

_SLACK = 0.5  # seconds by which a recording may be shorter than its manifest says, since times are rounded
_FOR_STATISTICS = 256  # utterances


class ComputedCorpus:
    """Utterances as a `Corpus` has them, their features computed when they are asked for and not kept."""

    def __init__(
        self, used: Sequence[tuple[Utterance, float]], frames: Sequence[int], config: features.Config
    ):
        """used: utterances with their speeds; frames: how many each has."""
        self._used, self._frames, self._config = used, frames, config

    def __len__(self) -> int:
        return len(self._used)

    @property
    def ids(self) -> list[str]:
        return [id_at_speed(x, speed) for x, speed in self._used]

    @property
    def texts(self) -> list[str | None]:
        return [x.text for x, _ in self._used]

    @property
    def speakers(self) -> list[str | None]:
        return [x.speaker for x, _ in self._used]

    def frames(self, i: int) -> int:
        """Return the number of frames of utterance i."""
        return self._frames[i]

    def array(self, i: int) -> np.ndarray:
        """Compute the features of utterance i, float32 [t bins].

        A recording that ends a little sooner than its manifest says has its last frame repeated. Raises
        SpeechError that names the utterance where it ends much sooner, or cannot be read any more.
        """
        utterance, speed = self._used[i]
        try:
            (x,) = arrays(utterance, self._config, [speed])
        except SpeechError as error:
            raise SpeechError(f"utterance {utterance.id}: {error}") from error
        lacking = self._frames[i] - len(x)
        if lacking * self._config.seconds * speed > _SLACK + self._config.seconds:
            raise SpeechError(
                f"utterance {utterance.id} has {len(x):,} frames, and its duration says {self._frames[i]:,}: "
                "correct the duration, or leave it out"
            )
        return x[: self._frames[i]] if lacking <= 0 else np.pad(x, ((0, lacking), (0, 0)), mode="edge")

    def sampled_frames(self) -> np.ndarray:
        """Compute the features of some utterances, evenly spread, as a sample of all, float32 [t bins]."""
        places = np.linspace(0, len(self) - 1, min(len(self), _FOR_STATISTICS)).astype(int)
        return np.concatenate([self.array(int(i)) for i in np.unique(places)])


def computed(
    utterances: Sequence[Utterance],
    config: features.Config,
    *,
    speeds: Sequence[float] = (1.0,),
    report: Callable[[int], object] = lambda done: None,
) -> tuple[ComputedCorpus, list[Skipped]]:
    """The utterances that can be used, and the others with the reason.

    No features are computed: a recording's length is its duration in the manifest, or that of its header; an
    MP3 without a duration is decoded. speeds and report are those of `prepare`, and so are the errors. Damage
    inside a recording is noticed when it is heard.
    """
    check_speeds(speeds)
    used, frames, skipped = [], [], []
    for number, utterance in enumerate(utterances, 1):
        try:
            found = _frames(utterance, config, speeds)
        except SpeechError as error:
            skipped.append(Skipped(utterance.id, str(error)))
        else:
            used += [(utterance, speed) for speed in speeds]
            frames += found
        report(number)
    if not used:
        raise none_usable(utterances, [x.reason for x in skipped])
    return ComputedCorpus(used, frames, config), skipped


def _frames(utterance: Utterance, config: features.Config, speeds: Sequence[float]) -> list[int]:
    """Return how many frames an utterance has at each speed. Raises SpeechError for none."""
    if config.kind == "given":
        rows = len(given(utterance.features, config.bins))
        return [frames_at(rows, speed) for speed in speeds]
    if utterance.audio is None:
        raise SpeechError("there is no audio, from which features could be computed")
    section = {"start": utterance.start, "duration": utterance.duration}
    seconds = waveform.seconds_of(utterance.audio, **section)
    found = [config.frames(round(seconds * config.rate / speed)) for speed in speeds]
    if not all(found):
        raise SpeechError(f"{seconds:.3g} seconds are too short for a frame of {config.frame_ms:g} ms")
    return found
