"""Draw an image with an ONNX model, value by value, and write it as PGM. Needs onnxruntime and numpy.

lintra export --to onnx --model mnist-small --out mnist-small
python examples/draw_onnx.py mnist-small-onnx.json 784 28 > three.pgm
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import onnxruntime

description, values, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
about = json.loads(description.read_text())
if about["opset"] > 26:  # newer than onnxruntime 1.31 reads by default
    os.environ["ALLOW_RELEASED_ONNX_OPSET_ONLY"] = "0"
token = about.get("start_symbol")
if token is None or about["output"]["name"] != "Logits":
    sys.exit("the model must be a decoder with a start symbol and logits")
vocabulary = about["vocabulary"]
session = onnxruntime.InferenceSession(description.with_name(about["files"]["step"]))
states = [x for x in about["inputs"] if "start" in x]
state = {
    x["name"]: np.full([n if isinstance(n, int) else 1 for n in x["shape"]], float(x["start"]), x["type"])
    for x in states
}
random, drawn = np.random.default_rng(3), []
for _ in range(values):
    params, *after = session.run(["params", *(x["next"] for x in states)], {"tokens": [[token]], **state})
    state = dict(zip(state, after, strict=True))
    token = int((params[0, 0, :vocabulary] + random.gumbel(size=vocabulary)).argmax())
    drawn.append(token)
print(f"P2 {width} {values // width} {vocabulary - 1}")
print("\n".join(" ".join(map(str, drawn[i : i + width])) for i in range(0, values, width)))
