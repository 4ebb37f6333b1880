"""Error rates of a recogniser over many utterances, and their uncertainty."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from jaxtyping import Float
from torch import Tensor

from lintra.audio.errors import SpeechError
from lintra.audio.symbols import Symbols, Unit, plain
from lintra.evaluate.estimates import Stopped
from lintra.generation.sampling import evaluation
from lintra.legacy import renamed_attributes
from lintra.models import CTC
from lintra.speech.alignment import Word
from lintra.speech.corpus import Corpus, Skipped
from lintra.speech.scoring import Edits, bootstrap, character_edits, word_edits
from lintra.speech.transcription import Search, log_probs, words
from lintra.tasks import Report

# Kinds of errors, by the unit that a model writes.
KINDS: Mapping[Unit, Mapping[str, Callable[[str, str], Edits]]] = {
    "character": {"character": character_edits, "word": word_edits},
    "word": {"word": word_edits, "character": character_edits},
    "phoneme": {"phoneme": word_edits},
}


@dataclass(frozen=True)
class ErrorRate:
    """Edits of all utterances together, relative to the reference symbols, and a 95 % interval."""

    rate: float
    low: float
    high: float
    substitutions: int
    insertions: int
    deletions: int
    length: int  # reference symbols

    @classmethod
    def of(cls, edits: Sequence[Edits]) -> "ErrorRate":
        """Return the rate of the edits of all utterances; its interval comes from resampling these."""
        total = sum(edits, Edits())
        return cls(total.rate, *bootstrap(edits), **asdict(total))


@renamed_attributes(said="reference", found="hypothesis")
@dataclass(frozen=True)
class ScoredUtterance:
    """An utterance with its reference and its hypothesis, both in the model's symbols."""

    id: str
    reference: str
    hypothesis: str
    words: tuple[Word, ...] = ()  # found words with their times, if requested
    duration: float = 0.0  # seconds of its frames

    def edits(self, unit: Unit) -> dict[str, Edits]:
        """Return its errors of each kind: "character" and "word", or "phoneme"."""
        return {name: edits(self.reference, self.hypothesis) for name, edits in KINDS[unit].items()}


def transcripts(
    model: CTC,
    corpus: Corpus,
    places: Sequence[int],
    search: Search,
    *,
    batch: int,
    timestamps: bool = False,
    report: Report = lambda done: None,
    stopped: Stopped = lambda: False,
) -> tuple[list[ScoredUtterance], list[Skipped]]:
    """Return what a model finds in the utterances at these places; and those that it cannot read, or whose
    transcript, if any, cannot be compared. `batch` utterances of similar length are processed at once: that
    changes memory and time, not the result. timestamps: include the times of words. If stopped, the results
    so far are returned, those of the shortest utterances, which come first.
    """
    config, symbols = model.config, model.config.symbols
    said: dict[int, str] = {}
    skipped: list[Skipped] = []
    for place in places:
        try:
            said[place] = reference(symbols, corpus.texts[place])
        except SpeechError as error:
            skipped.append(Skipped(corpus.ids[place], str(error)))
    found: dict[int, ScoredUtterance] = {}
    order = sorted(said, key=corpus.frames)
    with evaluation(model):
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            of_each = _log_probs(model, corpus, chosen, skipped)
            for place, each in of_each.items():
                ids, frames = search(each), corpus.frames(place)
                found[place] = ScoredUtterance(
                    corpus.ids[place],
                    said[place],
                    symbols.decode(ids),
                    tuple(words(config, each, ids, frames=frames)) if timestamps else (),
                    frames * config.features.seconds,
                )
            report(len(found) + len(skipped))
            if stopped():
                break
    return [found[place] for place in said if place in found], skipped


def _log_probs(
    model: CTC, corpus: Corpus, places: Sequence[int], skipped: list[Skipped]
) -> dict[int, Float[Tensor, "t n"]]:
    """The log-probabilities of the utterances at these places; without those that cannot be heard even alone,
    such as one too long for a mechanism: these go to `skipped`."""
    try:
        return dict(zip(places, log_probs(model, [corpus.array(place) for place in places]), strict=True))
    except ValueError as error:
        if len(places) == 1:
            skipped.append(Skipped(corpus.ids[places[0]], str(error)))
            return {}
    alone = (_log_probs(model, corpus, [place], skipped) for place in places)
    return {place: each for found in alone for place, each in found.items()}


def reference(symbols: Symbols, text: str | None) -> str:
    """A transcript as the model would write it. Characters and words it does not know stay, as errors that it
    cannot avoid. Raises SpeechError for no text, and a word whose phonemes are not known.
    """
    if not text or not text.strip():
        raise SpeechError("it has no transcript")
    return symbols.decode(symbols.encode(text)) if symbols.unit == "phoneme" else plain(text)


def error_rates(scored: Sequence[ScoredUtterance], unit: Unit) -> dict[str, ErrorRate]:
    """Return the rate of each kind of error: "character" and "word", or "phoneme". Results of several models
    for an utterance, of one id, are resampled as one sample of speech. ValueError if there are no utterances.
    """
    found: dict[str, list[ScoredUtterance]] = {}
    for each in scored:
        found.setdefault(each.id, []).append(each)
    each = [[x.edits(unit) for x in same] for same in found.values()]
    return {
        name: ErrorRate.of([sum((edits[name] for edits in same), Edits()) for same in each])
        for name in KINDS[unit]
    }
