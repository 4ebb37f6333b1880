"""The recogniser: its loss sums over all paths, an utterance in a batch equals the utterance alone, pieces
equal the whole, and its state does not grow."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close

from lintra import checkpoint
from lintra.attention import gated, leaves, linear, longformer, lsh, map_state, performer, retention, softmax
from lintra.audio import features
from lintra.audio.symbols import Symbols
from lintra.models import bilstm, ctc, encoder
from tests.speech import paths

EXACT = {"rtol": 1e-8, "atol": 1e-10}  # float64 through two layers
BINS, WIDTH = 5, 16
LSTM = bilstm.Config(inputs=6, layers=2, width=8)
MECHANISMS = [linear.Config(), softmax.Config(), softmax.Config(window=4), lsh.Config()]
RECURRENT = [linear.Config(), retention.Config(), performer.Config(), gated.Config()]


def transformer(attention=None, **changes):
    return encoder.Config(
        **{"inputs": 6, "layers": 2, "heads": 4, "width": WIDTH, "attention": attention or linear.Config()}
        | changes
    )


def build(part=None, **changes):
    torch.manual_seed(0)
    part = transformer() if part is None else part
    if changes.get("subsample") == 1:
        part = dataclasses.replace(part, inputs=BINS)
    symbols, read = Symbols("character", ("a", "b")), features.Config(kind="given", bins=BINS)
    model = ctc.Config(**{"symbols": symbols, "features": read, "encoder": part} | changes).build()
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # fresh norms map zero padding to zero
            parameter.add_(0.1 * torch.randn_like(parameter))
        if model.config.normalize == "global":
            model.fit_statistics(3 + 2 * torch.randn(50, BINS).numpy())
    return model


def streaming(attention=None, **changes):
    return build(transformer(attention, causal=True), **{"normalize": "global"} | changes)


def draw(*shape):
    return 3 + 2 * torch.randn(*shape, BINS, dtype=torch.float64)


MASK = torch.tensor(
    [[True] * 11, [True] * 5 + [False] * 6, [False] * 2 + [True, True, False] * 3, [False] * 11]
)
KINDS = [*map(transformer, MECHANISMS), LSTM]


@pytest.mark.parametrize("normalize", ["utterance", "global"])
@pytest.mark.parametrize("subsample", [1, 2, 4])
@pytest.mark.parametrize("part", KINDS, ids=str)
def test_an_utterance_in_a_batch_is_itself_alone(part, subsample, normalize):
    """NaN as padding, at either end and in between, and after odd lengths; the last has no frame at all."""
    model, x = build(part, subsample=subsample, normalize=normalize), draw(4, 11)
    found, mask = model(x.masked_fill(~MASK[..., None], torch.nan), mask=MASK)
    assert found.shape == (4, model.config.steps(11), 3)
    assert mask.sum(1).tolist() == [model.config.steps(int(each.sum())) for each in MASK]
    assert (found[~mask] == 0).all()
    for i, real in enumerate(MASK):
        alone, every = model(x[i : i + 1, real])
        assert every.all()
        assert_close(found[i][mask[i]], alone[0], **EXACT)


@pytest.mark.parametrize("part", KINDS, ids=str)
def test_padding_has_no_gradient(part):
    """Padded frames get none; that of the parameters is the same whatever the padding is, NaN included."""
    model, found = build(part), []
    for junk in (torch.nan, 5.0):
        torch.manual_seed(1)
        x = draw(4, 11).masked_fill(~MASK[..., None], junk).requires_grad_()
        log_probs, _ = model(x, mask=MASK)
        loss = (log_probs * torch.arange(log_probs.numel()).sin().reshape(log_probs.shape)).sum()
        found.append(torch.autograd.grad(loss, [x, *model.parameters()], allow_unused=True))
    assert_close(found[0], found[1], rtol=0, atol=0)
    assert (found[0][0][~MASK] == 0).all()
    assert (found[0][0][0] != 0).any()


def brute_force(log_probs, ids):
    """-log of the sum over all paths of a text, differentiable."""
    every = itertools.product(range(log_probs.shape[1]), repeat=len(log_probs))
    return -torch.stack(
        [log_probs[range(len(path)), path].sum() for path in every if paths.collapsed(path) == tuple(ids)]
    ).logsumexp(0)


@pytest.mark.parametrize("subsample", [1, 2])
def test_the_loss_is_over_all_paths(subsample):
    """PyTorch's loss, with lengths from the mask; values, and gradients of all parameters."""
    model, x = build(subsample=subsample), draw(4, 5 * subsample)
    real, texts = torch.tensor([5, 4, 3, 5]) * subsample, [(1, 2, 1), (1, 1), (2,), ()]
    log_probs, mask = model(x, mask=torch.arange(x.shape[1]) < real[:, None])
    targets = torch.tensor([symbol for text in texts for symbol in text])
    lengths = torch.tensor([len(text) for text in texts])
    loss = functional.ctc_loss(log_probs.transpose(0, 1), targets, mask.sum(1), lengths, reduction="none")
    expected = torch.stack(
        [brute_force(each[here], text) for each, here, text in zip(log_probs, mask, texts, strict=True)]
    )
    assert_close(loss, expected, **EXACT)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    gradients = [
        torch.autograd.grad((weight * each).sum(), list(model.parameters()), retain_graph=True)
        for each in (loss, expected)
    ]
    assert_close(*gradients, **EXACT)


def test_log_probs_are_of_the_blank_and_each_symbol():
    log_probs, _ = build()(draw(2, 9))
    assert_close(log_probs.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64))
    single, _ = build().float()(draw(2, 9).float())
    assert single.dtype == torch.float32
    narrow, _ = build().bfloat16()(draw(2, 9).bfloat16())
    assert narrow.dtype == torch.float32
    assert_close(narrow.exp().sum(-1), torch.ones(2, 3))


@given(st.integers(0, 23), st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_frames_become_steps(time, subsample):
    model = build(subsample=subsample)
    log_probs, mask = model(draw(1, time))
    assert log_probs.shape == (1, model.config.steps(time), 3)
    assert mask.shape == log_probs.shape[:2]
    assert model.config.steps(time) == math.ceil(time / subsample)


def test_a_stage_reads_the_frames_it_says():
    """One stage reads 2j - 1, 2j and 2j + 1; two stages read 4j - 3 .. 4j + 3."""
    for subsample, reach in ((2, 1), (4, 3)):
        model = build(transformer(softmax.Config(window=1)), normalize="global", subsample=subsample)
        x = draw(1, 16).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x)[0][0, 2].sum().exp(), x)
        used = (gradient[0] != 0).any(1).nonzero()[:, 0]
        assert used.tolist() == list(range(2 * subsample - reach, 2 * subsample + reach + 1))


def test_normalization_by_utterance_is_its_mean_and_variance():
    """Scaling or offsetting a recording changes nothing; a constant band becomes 0."""
    model, x = build(), draw(2, 9)
    x[..., 2] = 7.0
    assert_close(model(10 * x - 3)[0], model(x)[0], rtol=1e-3, atol=1e-4)  # the eps of the variance
    normal = model._normalized(x, None)
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    assert_close(normal, expected)
    assert (normal[..., 2] == 0).all()


def test_statistics_are_of_all_frames(monkeypatch):
    """Whether they are read in one piece or in parts."""
    x = draw(1, 37)[0]
    x[:, 2] = 7.0
    model = streaming()
    for part in (2**16, 10):
        monkeypatch.setattr(ctc, "_PART", part)
        model.fit_statistics(x.float().numpy())
        assert_close(model.mean, x.mean(0), rtol=1e-6, atol=1e-6)  # the frames are float32
        assert_close(model.scale, (x.var(0, correction=0) + 1e-5).rsqrt(), rtol=1e-5, atol=1e-6)
    assert not model.mean.requires_grad


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((0, BINS)), r"frames must be \[t i=5\], at least one, got shape \[0, 5\]"),
        (np.zeros((2, 3)), r"frames must be \[t i=5\], at least one, got shape \[2, 3\]"),
        (np.zeros(5), r"frames must be \[t i=5\], at least one, got shape \[5\]"),
        (np.full((2, BINS), np.nan), "frames must be finite, got NaN or infinity among them"),
        (np.array([[0.0] * 4 + [np.inf]]), "frames must be finite, got NaN or infinity among them"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_statistics_are_refused(frames, message):
    with pytest.raises(ValueError, match=message):
        streaming().fit_statistics(frames)


def test_statistics_of_an_utterance_are_not_set():
    with pytest.raises(ValueError, match="statistics are for normalize='global', got 'utterance'"):
        build().fit_statistics(np.zeros((2, BINS)))


@pytest.mark.parametrize("subsample", [1, 2, 4])
@pytest.mark.parametrize("attention", [*RECURRENT, softmax.Config(), softmax.Config(window=4)], ids=str)
@given(st.data())
@settings(max_examples=5)
def test_pieces_are_the_whole(attention, subsample, data):
    """Pieces of any size, also empty ones; the last one holds the rest."""
    model = streaming(attention, subsample=subsample)
    groups = data.draw(st.lists(st.integers(0, 4), max_size=5))
    pieces = [subsample * each for each in groups] + [data.draw(st.integers(0, 9))]
    x = draw(2, sum(pieces))
    found, state = [], None
    for i, piece in enumerate(x.split(pieces, 1)):
        log_probs, state = model.extend(piece, state, last=i == len(groups))
        found.append(log_probs)
    assert_close(torch.cat(found, 1), model(x)[0], **EXACT)


@pytest.mark.parametrize("attention", RECURRENT, ids=str)
def test_memory_is_constant(attention):
    """After 10,000 + 8 frames the state, with the storage behind its views, is as large as after 8 + 8."""
    model, sizes = streaming(attention).float(), []
    with torch.no_grad():
        for time in (8, 10_000):
            _, state = model.extend(draw(1, time).float())
            _, state = model.extend(draw(1, 8).float(), state)
            sizes.append([(x.shape, x.untyped_storage().nbytes()) for x in leaves(state)])
    assert sizes[0] == sizes[1]


def test_pieces_have_the_gradients_of_the_whole():
    model, x, found = streaming(), draw(2, 21), []
    first, state = model.extend(x[:, :8])
    pieces = torch.cat((first, model.extend(x[:, 8:], state, last=True)[0]), 1)
    for y in (pieces, model(x)[0]):
        loss = (y * torch.arange(y.numel()).sin().reshape(y.shape)).sum()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert_close(found[0], found[1], **EXACT)


def test_states_can_be_indexed():
    model, x, more = streaming(), draw(3, 8), draw(3, 4)
    _, state = model.extend(x)
    order = torch.tensor([2, 0])
    found, _ = model.extend(more[order], map_state(lambda each: each[order], state))
    assert_close(found, model.extend(more, state)[0][order], **EXACT)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: build(LSTM), "an LSTM of both directions begins at the end too"),
        (build, "its encoder looks at what comes later; build it with causal=True"),
        (lambda: streaming(lsh.Config()), "with attention 'lsh' later frames decide which earlier ones are"),
        (lambda: streaming(normalize="utterance"), "the mean of all frames; train with normalize='global'"),
    ],
)
def test_what_needs_the_whole_is_refused(make, why):
    model = make()
    assert why in model.why_not_extend()
    assert model.why_not_stream() == model.why_not_extend()
    for attempt in (lambda: model.start(1), lambda: model.extend(draw(1, 8))):
        with pytest.raises(ValueError, match="extend needs a model that can hear piece by piece: .*" + why):
            attempt()


def test_what_grows_can_extend_and_not_stream():
    audio = features.Config(bins=BINS)
    for attention in (*RECURRENT, softmax.Config(window=4), longformer.Config(window=4)):
        assert streaming(attention, features=audio).why_not_stream() is None
        model = streaming(attention)
        assert model.why_not_extend() is None
        assert model.why_not_stream() == "it hears features that are given, and what comes in pieces is audio"
    for attention in (softmax.Config(), (RECURRENT[0], softmax.Config())):
        model = streaming(attention, features=audio)
        assert model.why_not_extend() is None
        assert (
            model.why_not_stream() == "attention 'softmax' remembers every frame, so that memory would grow"
        )


def test_what_extend_is_given_is_checked():
    model = streaming()
    with pytest.raises(
        ValueError, match="x must be a multiple of subsample=4 frames until the last ones, got t=6"
    ):
        model.extend(draw(1, 6))
    with pytest.raises(ValueError, match="state is for 3 sequences, x for 1"):
        model.extend(draw(1, 8), model.start(3))
    with pytest.raises(ValueError, match=r"of widths \[\d+\], the model has stages of widths \[\d+, \d+\]"):
        model.extend(draw(1, 8), streaming(subsample=2).start(1))
    with pytest.raises(TypeError, match="state must be a CTCState, got EncoderState"):
        model.extend(draw(1, 8), model.encoder.start(1))
    with pytest.raises(ValueError, match=r"x must be .*c=5"):
        model.extend(torch.zeros(1, 8, 3))


def test_frames_are_checked():
    with pytest.raises(ValueError, match=r"x must be .*c=5"):
        build()(torch.zeros(1, 8, 3))
    with pytest.raises(TypeError, match="mask must be boolean"):
        build()(draw(1, 8), mask=torch.ones(1, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"subsample": 3}, "subsample must be 1, 2 or 4 frames, got 3"),
        ({"part": encoder.Config(vocabulary=4)}, "the encoder must read features, got vocabulary=4"),
        ({"part": transformer(outputs=3)}, "needs outputs=None and pool=None, got 3 and None"),
        ({"part": transformer(pool="mean")}, "needs outputs=None and pool=None, got None and 'mean'"),
    ],
)
def test_config_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_without_stages_the_encoder_reads_the_frames():
    symbols, read = Symbols("word", ("yes", "no")), features.Config(kind="given", bins=BINS)
    with pytest.raises(ValueError, match=r"with subsample=1 the encoder reads the 5 numbers .* got inputs=6"):
        ctc.Config(symbols=symbols, features=read, subsample=1, encoder=transformer())
    with pytest.raises(TypeError, match="normalize must be 'utterance' or 'global', got 'batch'"):
        ctc.Config(symbols=symbols, features=read, normalize="batch", encoder=transformer())


@pytest.mark.parametrize("part", [transformer(retention.Config(), causal=True), LSTM], ids=str)
@pytest.mark.parametrize(
    "symbols",
    [
        Symbols("character", (" ", "'", "é", "ß")),
        Symbols("phoneme", ("AH", "K", "T"), (("cat", ("K", "AH", "T")), ("tack", ("T", "AH", "K")))),
    ],
    ids=lambda symbols: symbols.unit,
)
def test_all_that_transcribing_needs_is_saved(tmp_path, part, symbols):
    """Symbols and lexicon, features, statistics."""
    model = build(part, symbols=symbols, normalize="global").float()
    checkpoint.save(model, tmp_path / "model")
    again = checkpoint.load(tmp_path / "model")
    assert type(again) is ctc.CTC
    assert again.config == model.config
    assert torch.equal(again.scale, model.scale)
    x = draw(2, 9).float()
    assert_close(again(x)[0], model(x)[0], rtol=1e-5, atol=1e-5)  # a matrix product may depend on addresses
    assert again.config.seconds == 0.04


def test_the_time_of_a_prediction_is_a_whole_number_of_samples():
    config = build().config
    odd = dataclasses.replace(config, features=features.Config(rate=11_025))
    assert odd.seconds == odd.subsample * odd.features.shift / 11_025 != odd.subsample * 0.01
