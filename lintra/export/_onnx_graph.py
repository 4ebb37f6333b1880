"""A module of tensors as the content of an ONNX file."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lintra.export._onnx_operators import Target

Axes = dict[int, str]  # of a tensor, the names of those axes that may have any length


@dataclass(kw_only=True)
class Graph:
    """A module, an example of its inputs by name, and what is known of its inputs and outputs."""

    module: nn.Module
    inputs: dict[str, Tensor]
    axes: dict[str, Axes]  # of inputs
    outputs: dict[str, Axes]
    shortest: int = 2  # tokens that are assumed at least; the tests try fewer
    longest: int | None = None  # and at most
    starts: dict[str, float | str] = field(default_factory=dict)  # what fills an input before any token

    def example(self) -> dict[str, Tensor]:
        """Return the outputs of the example inputs, of one token where there may be any number."""
        given = [x[:, :1] if self.axes[name].get(1) == "time" else x for name, x in self.inputs.items()]
        with torch.no_grad():
            found = self.module.eval()(*given)
        return dict(zip(self.outputs, found, strict=True))

    def to_bytes(self, target: Target, about: dict[str, str]) -> bytes:
        """Return the content of a file with the strings `about` in its metadata."""
        from onnx_ir.passes import common

        dims = {name: torch.export.Dim(name) for axes in self.axes.values() for name in axes.values()}
        dims |= {"time": torch.export.Dim("time", min=self.shortest, max=self.longest)}
        shapes = tuple({i: dims[axis] for i, axis in self.axes[name].items()} for name in self.inputs)
        with torch.no_grad(), _quiet():
            args = tuple(self.inputs.values())
            # The exporter's assumptions about lengths are not proved: the tests try lengths of every kind.
            traced = torch.export.export(
                self.module.eval(),
                args,
                dynamic_shapes=(shapes,),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            program = torch.onnx.export(
                target.lower(traced),
                input_names=list(self.inputs),
                output_names=list(self.outputs),
                dynamic_shapes=(shapes,),
                opset_version=20,  # the last that the exporter knows all of; `finish` raises it
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            common.ClearMetadataAndDocStringPass()(program.model)  # source files and lines
            for x in program.model.graph.outputs:
                assert x.shape is not None
                for i, axis in self.outputs[x.name or ""].items():
                    x.shape[i] = axis
            program.model.metadata_props.update(about)
            return target.finish(program.model_proto).SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's messages to its own developers."""
    logger = logging.getLogger("torch.onnx._internal.exporter")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
