"""A fused step compared with `model.extend`: the same parameters, the same states, the same tokens."""

import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lintra import native
from lintra.attention import linear, map_state, retention, softmax
from lintra.generation import native_decode
from lintra.generation.native_decode import NativeDecoder
from lintra.generation.sampling import generate, generate_reference, stream
from lintra.models import decoder
from lintra.nn import MLP, LogisticMixture
from lintra.nn.block import Block
from tests import kinds
from tests.generation.test_sampling import build_seq2seq
from tests.kinds import build

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"no native library: {native.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

# Relative to the largest number. float32: the same products in another order, gelu within 1.2e-7. bfloat16
# rounds a weight by up to 2^-9 of itself, int8 by up to 2^-8 of the largest in its row. These errors hardly
# average out over the few inputs of these models, and add up over the layers.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 4e-2}

KINDS = kinds.KINDS | {
    "wide heads": {"head_dim": 20, "heads": 4, "kv_heads": 2, "width": 36},
    "narrow heads": {"head_dim": 5, "heads": 3, "width": 32},
    "mixture": {
        "output": LogisticMixture(components=3),
        "position": "concatenated",
        "heads": 2,
        "width": 128,
    },
    "one": {"heads": 1, "width": 1, "position": "none", "mlp_ratio": 1.0, "layers": 1},
}


def close(mine, right, tolerance):
    assert mine.shape == right.shape
    assert mine.numel() == 0 or (mine - right).abs().max() <= tolerance * right.abs().max().clamp(min=1e-3)


@torch.no_grad()
def begun(model, batch):
    """Seven tokens for each sequence, and the state after the first three."""
    tokens = torch.randint(0, model.config.vocabulary, (batch, 7), generator=torch.Generator().manual_seed(1))
    return tokens, model.extend(tokens[:, :3])[1]


def run(extend, tokens, state):
    """The parameters at each of the last four tokens, and the state after them."""
    params = []
    with torch.no_grad():
        for i in range(3, 7):
            y, state = extend(tokens[:, i : i + 1], state)
            params.append(y)
    return torch.cat(params, 1), state


@pytest.mark.parametrize("weights", TOLERANCE)
@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_step_is_a_step(kind, batch, weights, instruction_set):
    model = build(**KINDS[kind])
    tokens, state = begun(model, batch)
    before = map_state(torch.clone, state)
    right, after = run(model.extend, tokens, state)
    mine, mine_after = run(NativeDecoder(model, state, weights), tokens, state)
    close(mine, right, TOLERANCE[weights])
    map_state(lambda x, y: close(x.double(), y.double(), TOLERANCE[weights]), mine_after, after)
    map_state(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), state, before)


def test_all_numbers_of_rows(instruction_set):
    """Tiles of every height; a sequence gives the same bits alone as in a batch."""
    model = build(width=72)
    for batch in range(1, 30):
        tokens, state = begun(model, batch)
        all_of_them, _ = run(NativeDecoder(model, state), tokens, state)
        close(all_of_them, run(model.extend, tokens, state)[0], TOLERANCE["float32"])
        one = map_state(lambda x: x[:1], state)
        assert torch.equal(run(NativeDecoder(model, one), tokens[:1], one)[0], all_of_them[:1])


def test_far_tails_of_gelu_are_0(instruction_set):
    """Subnormal ones would be slow to multiply. Weights near the largest float would show any."""
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            up, down = block.mlp.up, block.mlp.down
            up.weight.zero_()
            up.bias.copy_(torch.linspace(-13.01, -15, up.bias.numel()))
            down.weight.fill_(1e38)
    tokens, state = begun(model, 1)
    found, _ = run(NativeDecoder(model, state), tokens, state)
    close(found, run(model.extend, tokens, state)[0], TOLERANCE["float32"])  # in PyTorch they are 0


def test_threads_share_the_work_and_change_nothing(instruction_set):
    model = build(width=96, layers=3)
    for batch in (1, 64):
        tokens, state = begun(model, batch)
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            step = NativeDecoder(model, state)
            step.native.pace.left = 0  # use all threads from the first call on
            results.append(run(step, tokens, state))
        for params, after in results[1:]:
            assert torch.equal(params, results[0][0])
            map_state(lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0), after, results[0][1])


def test_threads_rest_where_they_make_it_slower():
    """One thread after a slow call, for longer each time; all threads again once they are no slower."""
    pace, given = native.decoder.Pace(), []
    for seconds_of_two in [9.0] * 20 + [0.5] * 20:
        while (threads := pace.threads(2)) == 1:
            given.append(threads)
            pace.took(1, 1.0)
        given.append(threads)
        pace.took(2, seconds_of_two)
    places = [i for i, threads in enumerate(given) if threads == 2]
    alone = [b - a - 1 for a, b in pairwise(places)]
    assert places[0] == 2
    assert alone[:10] == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]
    assert alone[20:] == [0] * 19
    assert pace.next == 4


@pytest.mark.parametrize("batch", [1, 64])
def test_the_same_tokens_as_the_definition(batch):
    model = build(vocabulary=256, output=LogisticMixture(components=2), max_length=60, position="learned")
    found = generate(model, steps=40, seed=3, batch=batch)
    assert torch.equal(found, generate_reference(model, steps=40, seed=3, batch=batch))
    prompt, lengths = torch.randint(0, 256, (batch, 9)), torch.arange(batch) % 10
    options = {"lengths": lengths, "steps": 40, "seed": 4, "top_p": 0.9}
    assert torch.equal(generate(model, prompt, **options), generate_reference(model, prompt, **options))


def test_generation_is_fused_where_it_is_worth_it(monkeypatch):
    made = []
    monkeypatch.setattr(
        native_decode, "NativeDecoder", lambda *args: made.append(args[2:]) or NativeDecoder(*args)
    )
    model = build()
    generate(model, steps=native_decode.MIN_STEPS)
    generate(model.double(), steps=40)
    generate(build(attention=softmax.Config()), steps=40)
    with native.use("off"):
        generate(build(), steps=40)
    assert made == []
    generate(build(), steps=native_decode.MIN_STEPS + 1)
    generate(build(), steps=2, weights="int8")
    assert made == [("float32",), ("int8",)]


def test_what_goes_on_from_any_state():
    """A state may be kept, copied and used again."""
    model = build()
    tokens, state = begun(model, 2)
    step = NativeDecoder(model, state)
    first, after = run(step, tokens, state)
    kept = map_state(torch.clone, after)
    assert torch.equal(run(step, tokens, state)[0], first)
    close(run(step, tokens, kept)[0], run(model.extend, tokens, kept)[0], TOLERANCE["float32"])


def test_nan_goes_through(instruction_set):
    for weights in TOLERANCE:
        model = build()
        with torch.no_grad():
            model.blocks[0].mlp.up.weight[1, 1] = torch.nan
        tokens, state = begun(model, 2)
        assert run(NativeDecoder(model, state, weights), tokens, state)[0].isnan().all()


def test_a_poisoned_sequence_stays_alone():
    model = build()
    tokens, state = begun(model, 20)
    right, _ = run(NativeDecoder(model, state), tokens, state)
    state.layers[0].attention.kv[7] = torch.nan
    found, _ = run(NativeDecoder(model, state), tokens, state)
    others = torch.arange(20) != 7
    assert found[7].isnan().all()
    assert torch.equal(found[others], right[others])


class Other(Block):
    """A user's block."""


class Wrapped(nn.Module):
    """A wrapper around a linear map, which could add to it."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def test_what_cannot_be_fused():
    def changed(change):
        model = build()
        change(model)
        return model

    def other_block(model):
        model.blocks[0].__class__ = Other

    def wrapped(model):
        model.blocks[1].attn.qkv_proj = Wrapped(model.blocks[1].attn.qkv_proj)

    def other_method(model):
        model.blocks[1].attn.qkv_proj.forward = lambda x: x

    def other_weight(model):
        parametrize.register_parametrization(model.blocks[1].mlp.up, "weight", nn.Identity())

    for model, reason in (
        (
            build(attention=softmax.Config()),
            r"knows linear attention with elu.1 or relu, got softmax\.Config",
        ),
        (build(attention=retention.Config()), r"knows linear attention with elu.1 or relu, got retention\.C"),
        (build(attention=linear.Config(feature_map=linear.Hedgehog())), "knows linear attention"),
        (build(attention=(linear.Config(), softmax.Config())), r"elu.1 or relu, got softmax\.Config"),
        (
            build(attention=(linear.Config(), linear.Config(feature_map=linear.Relu()))),
            "needs layers that are alike, these differ in size or kind",
        ),
        (build(attention=linear.Config(impl="torch")), "is native, got impl='torch'"),
        (build(activation="gelu_tanh"), "does not know the activation 'gelu_tanh'"),
        (build(position="rotary"), "does not support rotary positions"),
        (build().double(), "takes float32 on the CPU, got torch.float64 on cpu"),
        (build_seq2seq().float(), "does not read another sequence"),
        (changed(other_block), "does not know Other"),
        (changed(wrapped), "does not know Wrapped"),
        (changed(other_method), "pass over the hooks of Linear"),
        (changed(other_weight), "does not know ParametrizedLinear"),
        (changed(lambda model: model.head.register_forward_hook(print)), "pass over the hooks of Linear"),
    ):
        with pytest.raises(ValueError, match=f"weights='int8' needs a fused step: .*{reason}"):
            stream(model, steps=1, weights="int8", source=None)
    with native.use("off"), pytest.raises(ValueError, match="native kernels are not available: switched off"):
        stream(build(), steps=1, weights="int8")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="autocast asks for another"):
        stream(build(), steps=1, weights="int8")
    with pytest.raises(ValueError, match="weights must be one of float32, bfloat16, int8, got 'int4'"):
        stream(build(), steps=1, weights="int4")


def test_calls_are_checked():
    model = build()
    tokens, state = begun(model, 2)
    step = NativeDecoder(model, state)
    with pytest.raises(ValueError, match="takes no mask"):
        step(tokens[:, :1], state, mask=tokens[:, :1] > 0)
    for wrong in (tokens, tokens[:1, :1]):
        with pytest.raises(ValueError, match=r"tokens must be \[2, 1\], got"):
            step(wrong, state)
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        NativeDecoder(model.train(), state)


def test_no_memory():
    """If the system refuses working memory, an error is raised; nothing crashes."""
    model = build()
    step = NativeDecoder(model, begun(model, 1)[1])
    step.native.shape = step.native.shape._replace(batch=0)  # no memory is needed for the result
    words = list(native.DECODER_REST.unpack(step.native.rest))
    words[1] = 2**50
    step.native.rest = native.DECODER_REST.pack(*words)
    with pytest.raises(MemoryError):
        step.native(torch.zeros(1, 36))


FORK = """
import os, sys, torch
from tests.generation.test_native_decode import NativeDecoder, begun, build
torch.set_num_threads(2)
model = build(width=96)
tokens, state = begun(model, 1)
step = NativeDecoder(model, state)
x = torch.zeros(1, 96)
step.native.pace.left = 0
step.native(x)
child = os.fork()
if child == 0:
    step.native(x)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_decodes_on():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_layers_that_differ_are_not_fused():
    """The native code has one size for all layers."""
    model = build(width=16, heads=2)
    model.blocks[1].mlp = MLP(16, ratio=8.0)
    assert "layers that are alike" in native_decode.why_not(model)
    for norm in (lambda model: model.blocks[1].mlp_norm, lambda model: model.norm):
        model = build()
        norm(model).eps = 1e-2
        assert native_decode.why_not(model) == "norms must have the same eps"


@pytest.mark.parametrize("norm", [nn.RMSNorm(16), nn.LayerNorm(16, elementwise_affine=False), nn.Identity()])
def test_norms_without_weights_or_eps_are_not_fused(norm):
    model = build(width=16, heads=2)
    model.blocks[0].mlp_norm = norm
    assert "norms must have weights and an eps" in native_decode.why_not(model)


def test_a_layer_norm_without_a_bias_centres_all_the_same():
    model = build(width=16, heads=2)
    for block in model.blocks:
        block.attn_norm, block.mlp_norm = (nn.LayerNorm(16, bias=False) for _ in range(2))
    model.norm = nn.LayerNorm(16, bias=False)
    tokens, state = begun(model, 2)
    right, _ = run(model.extend, tokens, state)
    mine, _ = run(NativeDecoder(model, state), tokens, state)
    close(mine, right, TOLERANCE["float32"])


def test_a_class_of_one_s_own_is_not_fused():
    class Louder(decoder.Decoder):
        def extend(self, *args, **options):
            params, state = super().extend(*args, **options)
            return 2 * params, state

    assert "does not know Louder" in native_decode.why_not(Louder(build().config).eval())


def test_states_are_checked():
    """The native code trusts the addresses of states."""
    model, other = build(heads=2, width=16), build(heads=4, width=16)
    step = NativeDecoder(model, model.start(2))
    token = torch.zeros(2, 1, dtype=torch.int64)
    narrow = map_state(lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x, model.start(2))
    for state in (other.start(2), narrow):
        with pytest.raises(ValueError, match=r"state must hold torch.float32"):
            NativeDecoder(model, state)
        with pytest.raises(ValueError, match=r"state must hold torch.float32"):
            step(token, state)
    with pytest.raises(ValueError, match="state must hold"):
        step(token, model.start(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: setattr(b.mlp, "dropout", nn.RMSNorm(85)), "RMSNorm in the place of a dropout"),
        (lambda b: setattr(b.attn, "out_proj", nn.Identity()), "Identity as out_proj"),
        (lambda b: setattr(b, "mlp", nn.Identity()), "blocks with an MLP, got Identity"),
    ],
)
def test_what_stands_in_an_unusual_place_is_refused(change, message):
    model = decoder.Config(vocabulary=16, width=32, heads=2, layers=2, activation="swiglu").build().eval()
    for block in model.blocks:
        change(block)
    assert message in native_decode.why_not(model)


def test_autocast_during_a_call_changes_nothing():
    model = decoder.Config(vocabulary=256, embed="value", width=32, heads=2, layers=2).build().eval()
    first, second = (NativeDecoder(model, model.start(2)) for _ in range(2))
    tokens = torch.tensor([[3], [200]])
    expected = first(tokens, first.state)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = second(tokens, second.state)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
