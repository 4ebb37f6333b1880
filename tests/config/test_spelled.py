"""Configurations as errors print them."""

from lintra.attention import aft, linear, softmax
from lintra.config import fields


def test_what_differs_from_the_defaults_is_written():
    assert fields.spelled(softmax.Config()) == "softmax.Config()"
    assert fields.spelled(aft.Config(window=4, max_length=64)) == "aft.Config(window=4, max_length=64)"
    assert fields.spelled(linear.Config(feature_map=linear.Relu())) == "linear.Config(feature_map=Relu())"
    assert eval(fields.spelled(aft.Config(window=4, max_length=8))) == aft.Config(window=4, max_length=8)
