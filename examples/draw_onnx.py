"""Draws an image with a model as ONNX, value by value, and writes it as PGM. Needs onnxruntime and numpy.

lintra export --to onnx --model mnist-small --out mnist-small
python examples/draw_onnx.py mnist-small-step.onnx 784 28 > three.pgm
"""

import json
import sys

import numpy as np
import onnxruntime

model, values, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
session = onnxruntime.InferenceSession(model)
about = session.get_modelmeta().custom_metadata_map
start, vocabulary = json.loads(about["start"]), json.loads(about["config"])["vocabulary"]
kinds = {"tensor(int64)": np.int64, "tensor(float)": np.float32}
state = {
    x.name: np.full([n if isinstance(n, int) else 1 for n in x.shape], float(start[x.name]), kinds[x.type])
    for x in session.get_inputs()[1:]
}
random, token, drawn = np.random.default_rng(3), vocabulary, []
for _ in range(values):  # the symbol behind the last one stands before the first
    params, *after = session.run(None, {"tokens": np.array([[token]]), **state})
    state = dict(zip(state, after, strict=True))
    token = int((params[0, 0, :vocabulary] + random.gumbel(size=vocabulary)).argmax())
    drawn.append(token)
print(f"P2 {width} {values // width} {vocabulary - 1}")
print("\n".join(" ".join(map(str, drawn[i : i + width])) for i in range(0, values, width)))
