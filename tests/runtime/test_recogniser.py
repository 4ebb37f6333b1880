"""Recognisers in the runtime compared with PyTorch: the same log-probabilities and text for any pieces."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lintra import checkpoint, runtime
from lintra.attention import performer
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.export import runtime as export
from lintra.models import bilstm
from lintra.runtime import Error, Model, Sequence
from lintra.runtime.audio import Transcriber
from lintra.speech import streaming
from lintra.speech.decoding import greedy
from tests.kinds import build as build_decoder
from tests.runtime.recognisers import GIVEN, PHONEMES, RECOGNISERS, WORDS, build, frames, noise
from tests.runtime.test_runtime import TOLERANCE, close

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

STEPS = 9  # the number of learned positions


def loaded(model, weights="float32"):
    return Model(export.to_bytes(model, weights))


def heard(sequence, given):
    """The log-probabilities after each group of frames [t n], and the symbols that each adds."""
    group, log_probs, symbols = sequence.model.facts["subsample"], [], []
    for at in range(0, len(given), group):
        sequence.read(given[at : at + group])
        log_probs.append(sequence.log_probs())
        symbols.append(sequence.new_symbol())
    return torch.stack(log_probs), [symbol for symbol in symbols if symbol]


@torch.no_grad()
def extended(model, given):
    """The log-probabilities of PyTorch when it reads group by group."""
    group, state, found = model.config.subsample, None, []
    for at in range(0, len(given), group):
        part = torch.from_numpy(given[at : at + group])[None]
        log_probs, state = model.extend(part, state, last=len(given) - at <= group)
        found.append(log_probs[0])
    return torch.cat(found)


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("kind", RECOGNISERS)
def test_reading_is_extending(kind, weights, instruction_set):
    """With a full group at the end, and with every smaller number of frames in it."""
    model = build(kind)
    group, runtime_model = model.config.subsample, loaded(model, weights)
    for missing in range(group):
        given = frames(model, STEPS * group - missing)
        sequence = Sequence(runtime_model)
        mine, symbols = heard(sequence, given)
        close(mine, extended(model, given), TOLERANCE[weights])
        assert symbols == greedy(mine)
        assert sequence.seen == STEPS


def test_the_recogniser_that_comes_with_lintra():
    """The frames of four seconds, in one pass of PyTorch and step by step."""
    model = checkpoint.load("spoken-digits")
    given = features.compute(noise(32_000), model.config.features)
    with torch.no_grad():
        right = model(torch.from_numpy(given)[None])[0][0]
    mine, symbols = heard(Sequence(loaded(model)), given)
    close(mine, right, 1e-5)
    assert symbols == greedy(right)
    # Weights are stored in 16 bits; those of the keys are scaled and rounded again.
    half, symbols = heard(Sequence(loaded(model, "float16")), given)
    close(half, right, 1e-2)
    assert symbols == greedy(right)


@pytest.mark.parametrize("kind", [kind for kind in RECOGNISERS if "features" not in RECOGNISERS[kind][1]])
@given(st.lists(st.integers(0, 900), min_size=1, max_size=8))
@settings(max_examples=5)
def test_text_is_that_of_the_library(kind, sizes):
    """Audio in pieces of any size."""
    model = build(kind)
    position = model.encoder.position
    reach = 4_000 if getattr(position, "table", None) is None else 2_900  # samples of nine steps
    samples = noise(min(sum(sizes), reach))
    mine, right = Transcriber(loaded(model)), streaming.Transcriber(model)
    for piece in np.split(samples, np.cumsum(sizes)[:-1].clip(max=len(samples))):
        assert mine.push(piece) == right.push(piece)
    assert mine.finish() == right.finish()
    for call in (mine.finish, lambda: mine.push(samples)):
        with pytest.raises(Error, match="this recording is finished"):
            call()


@pytest.mark.parametrize("kind", RECOGNISERS)
def test_float16_becomes_float32(kind):
    """A float16 file turned into float32 holds the same numbers and the same names."""
    model = build(kind)
    half = loaded(model, "float16")
    content = half.to_float32()
    assert content is not None
    whole, given = Model(content), frames(model, STEPS * model.config.subsample)
    assert whole.facts == half.facts | {"weights": 32}
    mine, right = (heard(Sequence(each), given) for each in (whole, half))
    assert torch.equal(mine[0], right[0])
    assert mine[1] == right[1]
    names = model.config.symbols.names
    assert tuple(whole.symbol(i) for i in range(1, whole.facts["vocabulary"])) == names


@pytest.mark.parametrize("symbols", [WORDS, PHONEMES])
def test_names(symbols):
    model = loaded(build(symbols=symbols))
    assert [model.symbol(i) for i in range(len(symbols.names) + 2)] == [None, *symbols.names, None]
    assert model.facts["spaced"] == 1
    assert loaded(build()).facts["spaced"] == 0
    assert [model.symbol(number) for number in (-1, 2**32 + 1, 1 - 2**32)] == [None] * 3
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        model.symbol(1.5)  # pyright: ignore[reportArgumentType]
    assert loaded(build_decoder()).symbol(1) is None


@pytest.mark.parametrize("kind", RECOGNISERS)
def test_a_state_is_saved_and_goes_on(kind):
    model = build(kind)
    given, runtime_model, cut = (
        frames(model, 8 * model.config.subsample),
        loaded(model),
        model.config.subsample,
    )
    sequence = Sequence(runtime_model)
    heard(sequence, given[: 3 * cut])
    state = sequence.save()
    right = heard(sequence, given[3 * cut :])
    other = Sequence(runtime_model)
    heard(other, given[:cut])
    other.load(state)
    for call in (other.log_probs, other.new_symbol):
        with pytest.raises(Error, match="nothing to draw from"):
            call()
    mine = heard(other, given[3 * cut :])
    assert torch.equal(mine[0], right[0])
    assert mine[1] == right[1]
    assert other.save() == sequence.save()


def test_an_end_is_kept_in_the_state():
    model = build()
    sequence = Sequence(loaded(model))
    sequence.read(frames(model, 3))
    before = sequence.save()
    for again in (sequence, Sequence(sequence.model)):
        again.load(before)
        with pytest.raises(Error, match="the utterance has ended"):
            again.read(frames(model, 4))
        assert again.save() == before


def test_what_a_sequence_refuses():
    model = build("learned")
    sequence = Sequence(loaded(model))
    with pytest.raises(Error, match="nothing to draw from"):
        sequence.new_symbol()
    sequence.read(frames(model, 4))
    before = sequence.save()
    for wrong, reason in (
        (frames(model, 0), "an option is out of bounds"),
        (frames(model, 5), "an option is out of bounds"),
        (frames(model, 4)[:, :9], "frames must be [t i=10], got [4, 9]"),
        (frames(model, 4)[0], "frames must be [t i=10], got [10]"),
        (np.full((4, 10), np.nan, np.float32), "infinite, not a number"),
        (np.full((4, 10), -np.inf, np.float32), "infinite, not a number"),
    ):
        with pytest.raises(Error, match=re.escape(reason)):
            sequence.read(wrong)
    for call in (sequence.step, lambda token: sequence.prefill([token])):
        with pytest.raises(Error, match="the model reads frames where it was given tokens"):
            call(0)
    assert sequence.save() == before
    for _ in range(STEPS - 1):
        sequence.read(frames(model, 4))
    with pytest.raises(Error, match="no position for so many tokens"):
        sequence.read(frames(model, 4))
    decoder = Sequence(loaded(build_decoder()))
    with pytest.raises(Error, match="or tokens where it was given frames"):
        decoder.read(np.zeros((1, 0), np.float32))
    with pytest.raises(Error, match="or tokens where it was given frames"):
        decoder.new_symbol()


def test_models_that_hear_no_audio():
    for model in (build(features=GIVEN), build_decoder()):
        with pytest.raises(Error, match="the model reads no audio"):
            Transcriber(loaded(model))


def with_encoder(**changes):
    model = build()
    return build(encoder=dataclasses.replace(model.config.encoder, **changes))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: build(normalize="utterance"), "piece by piece: normalize='utterance' takes the mean"),
        (lambda: with_encoder(causal=False), "its encoder looks at what comes later"),
        (lambda: with_encoder(attention=performer.Config()), "the runtime knows the attentions linear"),
        (lambda: with_encoder(embedding_norm=True), "encoders with token_types or embedding_norm"),
        (lambda: build(encoder=bilstm.Config(inputs=12)), "an LSTM of both directions"),
        (lambda: build(features=dataclasses.replace(GIVEN, kind="fbank", dither=1.0)), "it adds no noise"),
        (
            lambda: build(features=features.Config(rate=96_000, frame_ms=400.0)),
            "takes frame of at most 32,768",
        ),
    ],
)
def test_recognisers_that_are_refused(model, reason):
    with pytest.raises(ValueError, match=re.escape(reason.replace("it adds", "the runtime adds"))):
        export.to_bytes(model())


def test_a_symbol_that_would_end_its_name():
    """A zero byte is not white space, and no text contains one."""
    with pytest.raises(ValueError, match="names of symbols without zero bytes"):
        export.to_bytes(build(symbols=Symbols("character", ("a", "\0"))))
