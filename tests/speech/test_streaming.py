"""Audio in pieces of any size gives the text of the whole, symbol by symbol, in constant memory."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from lintra.attention import gated, leaves, linear, performer, retention, softmax
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.models import bilstm, ctc, encoder
from lintra.speech.decoding import greedy
from lintra.speech.streaming import Transcriber
from lintra.speech.transcription import words

READ = features.Config(rate=8_000, bins=8)
CHARACTERS = Symbols("character", (" ", *"abcdefg"))
WORDS = Symbols("word", ("one", "two", "three"))
PHONEMES = Symbols("phoneme", ("W", "AH", "N"), (("one", ("W", "AH", "N")),))
RECURRENT = [linear.Config(), retention.Config(), performer.Config(), gated.Config()]


def build(attention=None, symbols=CHARACTERS, **changes):
    torch.manual_seed(0)
    attention = linear.Config() if attention is None else attention
    part = encoder.Config(inputs=12, layers=2, heads=4, width=16, causal=True, attention=attention)
    options = {"symbols": symbols, "features": READ, "normalize": "global", "encoder": part} | changes
    model = ctc.Config(**options).build().double().eval()
    with torch.no_grad():  # a fresh model repeats the same symbol
        model.head.weight.mul_(20)
        if model.config.normalize == "global":
            model.fit_statistics(features.compute(noise(8_000), model.config.features))
    return model


def noise(samples, seed=0):
    """Alternately loud and quiet noise."""
    generator = np.random.default_rng(seed)
    loudness = np.repeat(generator.uniform(0.01, 0.5, samples // 400 + 1), 400)[:samples]
    return (loudness * generator.uniform(-1, 1, samples)).astype(np.float32)


def offline(model, samples):
    """The log-probabilities of the whole, [t n+1]."""
    frames = torch.from_numpy(features.compute(samples, model.config.features)).double()
    with torch.no_grad():
        return model(frames[None])[0][0]


def listening(model):
    """The transcriber of a model, and the log-probabilities that it will receive."""
    heard, extend = [], model.extend

    def overheard(x, state=None, **options):
        log_probs, state = extend(x, state, **options)
        heard.append(log_probs[0])
        return log_probs, state

    model.extend = overheard
    return Transcriber(model), heard


def cut(samples, sizes):
    return np.split(samples, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize("subsample", [2, 4])
@pytest.mark.parametrize("attention", RECURRENT, ids=str)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=8))
@settings(max_examples=6)
def test_streaming_is_the_whole(attention, subsample, sizes):
    """The text and, to the last digits of float64, the log-probabilities. The last piece has any size too."""
    model = build(attention, subsample=subsample)
    samples = noise(sum(sizes))
    transcriber, heard = listening(model)
    text = "".join([transcriber.push(piece) for piece in cut(samples, sizes)]) + transcriber.finish()
    expected = offline(model, samples)
    assert_close(torch.cat([expected[:0], *heard]), expected, rtol=1e-10, atol=1e-10)
    assert text == model.config.symbols.decode(greedy(expected))


@pytest.mark.parametrize("symbols", [CHARACTERS, WORDS, PHONEMES], ids=lambda symbols: symbols.unit)
def test_pieces_of_text_join_as_symbols_do(symbols):
    """A space between words, wherever the pieces end, but none before the first."""
    model, samples = build(symbols=symbols), noise(9_000, seed=3)
    transcriber = Transcriber(model)
    texts = [transcriber.push(piece) for piece in cut(samples, [300] * 30)]
    ids = greedy(offline(model, samples))
    assert len(ids) > 5
    assert sum(map(bool, texts)) > 3
    assert "".join(texts) + transcriber.finish() == symbols.decode(ids)


def test_text_comes_as_soon_as_it_can():
    """All that the frames so far determine comes out before the end."""
    model, samples = build(), noise(9_000, seed=3)
    transcriber, frames = Transcriber(model), 0
    text = ""
    for end in range(300, 9_001, 300):
        text += transcriber.push(samples[end - 300 : end])
        frames = READ.frames(end) // 4 * 4
        assert text == CHARACTERS.decode(greedy(offline(model, samples)[: frames // 4]))


@pytest.mark.parametrize("symbols", [CHARACTERS, WORDS, PHONEMES], ids=lambda symbols: symbols.unit)
@given(sizes=st.lists(st.integers(0, 1_500), min_size=1, max_size=8), seed=st.integers(0, 9))
@settings(max_examples=10)
def test_times_are_those_of_the_whole(symbols, sizes, seed):
    """Each word comes once; a partial word is a prefix of it, and its end only moves forward."""
    model, samples = build(symbols=symbols), noise(sum(sizes), seed)
    transcriber, said, partial = Transcriber(model), [], []
    for piece in [*cut(samples, sizes), None]:
        transcriber.finish() if piece is None else transcriber.push(piece)
        said += transcriber.words
        partial.append((len(said), transcriber.partial))
        assert transcriber.partial is None or transcriber.partial.end <= transcriber.seconds + 1e-9
    log_probs, frames = offline(model, samples), READ.frames(len(samples))
    ids = greedy(log_probs)
    assert said == words(model.config, log_probs, ids, frames=frames)
    assert [word.text for word in said] == symbols.decode(ids).split()
    assert transcriber.partial is None
    assert transcriber.duration == frames * READ.seconds
    for place, word in partial:
        if word is not None:
            assert said[place].start == word.start
            assert said[place].text.startswith(word.text)
            assert said[place].end >= word.end - 1e-9


def test_a_word_is_complete_as_soon_as_it_can_be():
    """With character symbols after the next space, with word symbols when they end."""
    for symbols, ends in ((CHARACTERS, lambda text: text.endswith(" ")), (WORDS, lambda _: False)):
        model, samples = build(symbols=symbols), noise(9_000, seed=3)
        transcriber, text, said = Transcriber(model), "", []
        for piece in cut(samples, [300] * 30):
            text += transcriber.push(piece)
            said += transcriber.words
            whole = len(said) + (transcriber.partial is not None)
            assert whole == len(text.split())
            if ends(text):
                assert transcriber.partial is None
        assert len(said) > 1


@pytest.mark.parametrize("attention", [*RECURRENT, softmax.Config(window=3)], ids=str)
def test_memory_is_constant(attention):
    """The state after 10 pieces and after 100 of the same size is equally large."""
    transcriber, sizes = Transcriber(build(attention)), []
    piece = noise(330)
    for count in range(1, 101):
        transcriber.push(piece)
        if count in (10, 26, 98):  # each time the same number of frames is left over from groups of 4
            kept = [x.untyped_storage().nbytes() for x in leaves(transcriber._state)]
            sizes.append((kept, transcriber._waiting.nbytes, len(transcriber._before)))
    assert sizes[0][0] == sizes[1][0] == sizes[2][0]
    assert all(waiting < 4 * READ.bins * 4 and before <= 1 for _, waiting, before in sizes)


def test_audio_without_a_frame_says_nothing():
    transcriber = Transcriber(build())
    assert transcriber.push(noise(10)) == ""
    assert transcriber.finish() == ""
    assert Transcriber(build()).finish() == ""


def test_nothing_follows_the_end():
    transcriber = Transcriber(build())
    transcriber.finish()
    for attempt in (transcriber.finish, lambda: transcriber.push(noise(10))):
        with pytest.raises(ValueError, match="this recording is finished: make a new Transcriber"):
            attempt()


LSTM = bilstm.Config(inputs=12, layers=1, width=4)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build(encoder=LSTM), "this model cannot stream: an LSTM of both directions"),
        (lambda: build(softmax.Config()), "cannot stream: attention 'softmax' remembers every frame"),
        (lambda: build(normalize="utterance"), "cannot stream: normalize='utterance' takes the mean"),
        (lambda: build().train(), r"a model that streams must be in evaluation mode: call eval\(\)"),
    ],
)
def test_what_cannot_stream_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        Transcriber(model())


def test_given_features_are_refused():
    model = build()
    model.config = dataclasses.replace(model.config, features=features.Config(kind="given", bins=8))
    with pytest.raises(ValueError, match="cannot stream: it hears features that are given"):
        Transcriber(model)


def test_samples_are_checked():
    with pytest.raises(ValueError, match=r"samples must be floats \[n\]"):
        Transcriber(build()).push(np.zeros((2, 3), np.float32))
