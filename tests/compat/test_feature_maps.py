"""Feature maps: their arguments, when they draw, what they estimate."""

import inspect
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from lintra.compat.fast_transformers import feature_maps
from lintra.compat.fast_transformers.attention import LinearAttention
from lintra.compat.fast_transformers.builders import AttentionBuilder
from lintra.compat.fast_transformers.feature_maps import (
    ActivationFunctionFeatureMap,
    Favor,
    GeneralizedRandomFeatures,
    RandomFourierFeatures,
    SmoothedRandomFourierFeatures,
    elu_feature_map,
)
from lintra.compat.fast_transformers.feature_maps.base import FeatureMap
from lintra.compat.fast_transformers.feature_maps.fourier_features import begin, orthogonal_random_matrix_
from lintra.compat.fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from lintra.testing.laws import EXACT

RANDOM = [RandomFourierFeatures, SmoothedRandomFourierFeatures, Favor, GeneralizedRandomFeatures]
CPU = torch.device("cpu")


class Squared(FeatureMap):
    """A user's map, which records when it is asked to draw."""

    def __init__(self, query_dims, offset=0.0):
        super().__init__(query_dims)
        self.offset, self.asked = offset, []

    def new_feature_map(self, device):
        self.asked.append(device)

    def forward(self, x):
        return x.square() + self.offset


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_width_comes_first():
    phi = ActivationFunctionFeatureMap(4, torch.relu)
    assert phi.query_dims == 4
    assert phi.activation_function is torch.relu
    x = draw(2, 3, 1, 4)
    assert_close(phi(x), x.relu(), **EXACT)
    assert tuple(inspect.signature(ActivationFunctionFeatureMap).parameters) == (
        "query_dims",
        "activation_function",
    )


def test_every_map_has_a_factory():
    assert Favor.factory(64)(8).n_dims == 64
    assert Favor.factory(64, 0.5, orthogonal=False)(8).softmax_temp == 0.5
    assert Squared.factory(2.0)(8).offset == 2.0
    assert Squared.factory(offset=2.0)(8).query_dims == 8
    phi = ActivationFunctionFeatureMap.factory(torch.exp)(8)
    assert (phi.query_dims, phi.activation_function) == (8, torch.exp)
    assert isinstance(FeatureMap.factory()(8), FeatureMap)


def test_a_factory_builds_one_map_each_time():
    build = Favor.factory(8)
    one, other = build(4), build(4)
    assert one is not other
    assert not torch.equal(one.omega, other.omega)


def test_elu():
    x = draw(2, 3, 1, 4)
    assert_close(elu_feature_map(4)(x), functional.elu(x) + 1, **EXACT)


def test_keys_and_queries_may_have_maps_of_their_own():
    class Both(FeatureMap):
        def forward_queries(self, x):
            return x.exp()

        def forward_keys(self, x):
            return x.square()

    x = draw(1, 2, 1, 3)
    assert torch.equal(Both(3).forward_queries(x), x.exp())
    assert torch.equal(Both(3).forward_keys(x), x.square())
    assert torch.equal(Squared(3).forward_keys(x), Squared(3)(x))


def test_maps_that_are_not_random_stay():
    phi = elu_feature_map(4)
    phi.new_feature_map("cpu")
    assert list(phi.buffers()) == []


@pytest.mark.parametrize("kind", RANDOM)
def test_redraw_counts_the_calls(kind):
    phi = kind(4, 8, redraw=2)
    omegas = [phi.omega]
    for _ in range(4):
        phi.new_feature_map("cpu")
        omegas.append(phi.omega)
    same = [torch.equal(one, other) for one, other in itertools.pairwise(omegas)]
    assert same == [False, True, False, True]


@pytest.mark.parametrize("kind", RANDOM)
def test_deterministic_eval_draws_in_training_alone(kind):
    phi = kind(4, 8, deterministic_eval=True).eval()
    before = phi.omega
    phi.new_feature_map("cpu")
    assert phi.omega is before
    phi.train().new_feature_map("cpu")
    assert not torch.equal(phi.omega, before)


@pytest.mark.parametrize("kind", RANDOM)
def test_a_new_map_keeps_its_number_type_and_takes_the_device(kind):
    phi = kind(4, 8).double()
    phi.new_feature_map()
    assert phi.omega.dtype == torch.float64
    phi.new_feature_map("meta")
    assert phi.omega.device.type == "meta"
    assert "omega" in phi.state_dict()


def test_attention_begins_with_a_new_map_of_somebody_elses():
    own = Squared(4)
    begin(own, CPU)
    begin(own, CPU)
    assert own.asked == [CPU, CPU]
    begin(nn.Identity(), CPU)  # any module can be a map


@pytest.mark.parametrize("kind", RANDOM)
def test_attention_leaves_our_random_maps(kind):
    class Own(kind):
        def new_feature_map(self, device):
            super().new_feature_map(device)

    class Renamed(kind):
        pass

    for phi, stays in ((kind(4), True), (Renamed(4), True), (Own(4), False)):
        before = phi.omega
        begin(phi, CPU)
        assert (phi.omega is before) is stays


@pytest.mark.parametrize(("kind", "mask"), [("linear", FullMask), ("causal-linear", TriangularCausalMask)])
def test_somebody_elses_map_draws_in_every_forward(kind, mask):
    """A map with a new offset changes the output."""

    class Drawn(Squared):
        def new_feature_map(self, device):
            super().new_feature_map(device)
            self.offset = float(len(self.asked))

    attention = AttentionBuilder.from_kwargs(query_dimensions=4, feature_map=Drawn.factory()).get(kind)
    x, lengths = draw(2, 5, 1, 4), LengthMask(torch.tensor([5, 5]))
    first, second = (attention(x, x, x, mask(5), lengths, lengths) for _ in range(2))
    assert attention.feature_map.asked == [CPU, CPU]
    assert not torch.allclose(first, second)


def test_stabilized_favor_takes_sequences():
    plain, phi = Favor(4, 8), Favor(4, 8, stabilize=True)
    phi.load_state_dict(plain.state_dict())
    for shape in ((2, 5, 4), (2, 5, 3, 4)):
        x = draw(*shape).float()
        ratio = (phi(x) / plain(x)).movedim(1, -2).flatten(-2)  # one number per sequence and head
        assert_close(ratio, ratio[..., :1].expand_as(ratio), rtol=1e-5, atol=0)
        assert phi(x).amax() == 1.0
    with pytest.raises(ValueError, match=r"takes sequences \[n l ... d\], got x of \[5, 4\]"):
        phi(torch.zeros(5, 4))


@pytest.mark.parametrize("columns", [3, 4, 10])
def test_orthogonal_random_matrix(columns):
    w = torch.zeros(4, columns, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(0)
    orthogonal_random_matrix_(w)
    first = w.detach().clone()
    for block in first.split(4, 1):
        gram = block.mT @ block
        assert_close(gram, gram.diagonal().diag(), **EXACT)
        assert (gram.diagonal() > 0).all()
    orthogonal_random_matrix_(w)
    assert not torch.equal(w, first)
    torch.manual_seed(0)
    orthogonal_random_matrix_(w)
    assert torch.equal(w, first)


def test_the_modules_have_their_names():
    from lintra.compat.fast_transformers.feature_maps import base, fourier_features

    assert base.elu_feature_map is feature_maps.elu_feature_map
    assert fourier_features.Favor is feature_maps.Favor


def test_padding_does_not_set_the_maximum_of_a_stabilized_favor():
    attention = LinearAttention(32, Favor.factory(stabilize=True, deterministic_eval=True)).eval()
    x = 20 * torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(0))
    padded, lengths = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2)), LengthMask(torch.tensor([4]), 6)
    whole = FullMask(6)
    alone = attention(x, x, x, FullMask(4), LengthMask(torch.tensor([4])), LengthMask(torch.tensor([4])))
    torch.testing.assert_close(attention(padded, padded, padded, whole, lengths, lengths)[:, :4], alone)


@pytest.mark.parametrize("kind", [RandomFourierFeatures, Favor])
def test_features_are_saved_as_they_lie(kind):
    features = kind(8)
    features.new_feature_map("cpu")
    assert all(x.is_contiguous() for x in features.state_dict().values())
