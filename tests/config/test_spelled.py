"""Configurations as errors write them."""

import pytest

from lintra.attention import aft, linear, softmax
from lintra.config import fields


def test_what_differs_from_the_defaults_is_written():
    assert fields.spelled(softmax.Config()) == "softmax.Config()"
    assert fields.spelled(aft.Config(window=4, max_length=64)) == "aft.Config(window=4, max_length=64)"
    assert fields.spelled(linear.Config(feature_map=linear.Relu())) == "linear.Config(feature_map=Relu())"
    assert eval(fields.spelled(aft.Config(window=4, max_length=8))) == aft.Config(window=4, max_length=8)


def test_a_feature_map_by_a_name_is_answered_with_those_there_are():
    with pytest.raises(TypeError, match=r"feature_map must be a FeatureMap \(.*Relu\(\), .*\), got 'relu'"):
        linear.Config(feature_map="relu")
