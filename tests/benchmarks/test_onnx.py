"""The bound for reading a prompt: the products with the weights of a graph."""

import numpy as np
import pytest
from torch import nn

from benchmarks import onnx

pytest.importorskip("onnxruntime")
onnx_package = pytest.importorskip("onnx")
helper, numpy_helper = onnx_package.helper, onnx_package.numpy_helper


@pytest.mark.slow
def test_the_products_of_a_graph_are_the_linear_maps_of_its_model():
    """In the graph of a step as in one for any length: all those of a delta rule but its convolutions."""
    model = onnx._model("delta", onnx.QUICK)
    reader = onnx._reader(model, onnx.TARGETS[onnx.PLAIN])
    assert reader.single
    maps = [(x.in_features, x.out_features) for x in model.modules() if isinstance(x, nn.Linear)]
    assert sorted(onnx.products(reader.content)) == sorted(maps)


def test_weights_of_a_gemm_are_read_as_it_does():
    x, y = (onnx._floats(name, (2, n)) for name, n in (("x", 3), ("y", 5)))
    weight = helper.make_tensor("w", 1, (5, 3), np.zeros(15))
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    product = helper.make_node("MatMul", ["x", "x"], ["other"])
    graph = helper.make_graph([node, product], "one", [x], [y], [weight])
    assert onnx.products(helper.make_model(graph).SerializeToString()) == [(3, 5)]


def test_the_graph_of_weights_alone_multiplies_them_all():
    """Each is multiplied with activations of its width, over all tokens; the first token is the output."""
    shapes = [(4, 6), (6, 4), (4, 3)]
    content = onnx.weights_alone(shapes)
    assert onnx.products(content) == shapes
    runner = onnx.session(content)
    graph = onnx_package.load_from_string(content).graph
    weights = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
    x = {"x0": np.ones((1, 7, 4), np.float32), "x1": np.ones((1, 7, 6), np.float32)}
    for i, (y, (width, out)) in enumerate(zip(runner.run(None, x), shapes, strict=True)):
        assert y.shape == (1, 1, out)
        assert weights[f"w{i}"].shape == (width, out)
        np.testing.assert_allclose(y[0, 0], weights[f"w{i}"].sum(0), atol=1e-6)  # sums of float32
