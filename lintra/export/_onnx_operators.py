"""Recurrences and short convolutions as one ONNX operator each: `LinearAttention` and `CausalConvWithState`.

Both are standard from opset 27 on; onnxruntime has kernels for operators of these names in its own domain,
com.microsoft. A traced model has lintra::linear_attention, lintra::recurrence and lintra::causal_conv1d; here
each is written by ONNX's and by what that leaves out:

    the denominator            the running sum of the keys; with decays, a column of ones in v and a
                               column more of the state
    the logarithm of inputs    a factor of the keys
    padding                    keys and decays that are 0; real tokens in front of a convolution
    fewer heads of k than v    keys that are repeated
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lintra.ops import LinearState, linear_attention
from lintra.ops.conv1d import causal_conv1d
from lintra.ops.features import FeatureMapName, apply_feature_map
from lintra.ops.layout import Layout
from lintra.ops.linear_attention import divide
from lintra.ops.linear_attention.recurrence import same_heads
from lintra.ops.padding import take, zero_padding

Opset = Literal[20, 27]
Domain = Literal["ai.onnx", "com.microsoft"]

_CONTRIB = "com.microsoft"
_LATER = "lintra.later"  # in place of the standard domain, until a graph is of opset 27
_IR_VERSION = 13  # of files with opset 27


@dataclass(frozen=True)
class Target:
    """The operators that a graph may have. Raises ValueError for any other."""

    opset: Opset = 20
    domain: Domain = "ai.onnx"  # com.microsoft: of the two operators; with it any opset will do

    def __post_init__(self):
        for name, kinds in (("opset", Opset), ("domain", Domain)):
            if (value := getattr(self, name)) not in (known := get_args(kinds)):
                raise ValueError(f"{name} must be {' or '.join(map(str, known))}, got {value}")

    @property
    def has_operators(self) -> bool:
        """Return whether a recurrence is one operator."""
        return self.opset == 27 or self.domain == _CONTRIB

    def lower(self, program: ExportedProgram) -> ExportedProgram:
        """Return a traced program with ONNX's operators in place of ours."""
        if not self.has_operators:
            return program
        ours, lowering = torch.ops.lintra, _Lowering(_CONTRIB if self.domain == _CONTRIB else _LATER)
        table: dict[Any, Callable[..., Any]] = {
            ours.linear_attention.default: lowering.linear_attention,
            ours.recurrence.default: lowering.recurrence,
            ours.causal_conv1d.default: lowering.causal_conv1d,
        }
        return program.run_decompositions(table)

    def finish(self, model: Any) -> Any:
        """Return a model of opset 20, an onnx.ModelProto, as one of this opset."""
        from onnx import version_converter

        if self.opset == 20:
            return model
        model = version_converter.convert_version(model, self.opset)
        for node in model.graph.node:
            if node.domain == _LATER:
                node.domain = ""
        imports = [each for each in model.opset_import if each.domain != _LATER]
        del model.opset_import[:]
        model.opset_import.extend(imports)
        model.ir_version = max(model.ir_version, _IR_VERSION)
        return model


class _Lowering:
    """Our operators, each with its own schema, by those of one domain."""

    def __init__(self, domain: str):
        self.domain = domain

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        log_input: Tensor | None,
        kv: Tensor,
        z: Tensor,
        mask: Tensor | None,
        cu_seqlens: None,
        causal: bool,
        normalize: bool,
        eps: float,
        feature_map: FeatureMapName | None,
        save: bool,
    ) -> tuple[Tensor, ...]:
        for_gradients = z.new_empty(q.shape[:3]), v.new_empty(0)
        if not causal:  # two products of matrices and no recurrence
            given = {"log_input": log_input, "state": LinearState(kv, z), "layout": _layout(k, mask)}
            options = {"causal": False, "normalize": normalize, "eps": eps, "feature_map": feature_map}
            y, (kv, z) = linear_attention(q, k, v, **given, **options, impl="torch")
            return y, kv, z, *for_gradients
        q, k, v = zero_padding(mask, apply_feature_map(feature_map, q), apply_feature_map(feature_map, k), v)
        if log_input is not None:
            k = k * zero_padding(mask, log_input)[0].exp()[..., None]
        log_decay = None if log_decay is None else zero_padding(mask, log_decay)[0]
        if not normalize:
            y, kv = self._recur(q, k, v, log_decay, None, kv)
            return y, kv, _sum_of_keys(k, log_decay, z), *for_gradients
        if log_decay is None:  # faster than a column: onnxruntime multiplies by v in registers of 16 numbers
            y, kv = self._recur(q, k, v, None, None, kv)
            z = z[:, None] + k.cumsum(1)  # [b t g f]
            by = (q.unflatten(2, (z.shape[2], -1)) * z[:, :, :, None]).sum(-1).flatten(2)
            return divide(y, by + eps), kv, z[:, -1].clone(), *for_gradients
        v, kv = torch.cat((v, torch.ones_like(v[..., :1])), -1), torch.cat((kv, z[..., None]), -1)
        y, kv = self._recur(q, k, v, log_decay, None, kv)
        y = divide(y[..., :-1], y[..., -1] + eps)
        return y, kv[..., :-1].clone(), kv[..., -1].clone(), *for_gradients

    def recurrence(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        cu_seqlens: None,
        scale: float,
        save: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = same_heads(*zero_padding(mask, q, k, v))
        log_decay, beta = (x if x is None else zero_padding(mask, x)[0] for x in (log_decay, beta))
        y, after = self._recur(q, k, v, log_decay, beta, state)
        return y * scale if scale != 1.0 else y, after, state.new_empty(0)

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        mask: Tensor | None,
        cu_seqlens: None,
        silu: bool,
    ) -> tuple[Tensor, Tensor]:
        layout = _layout(x, mask)
        # Nothing is kept of one token, for which the operator has no empty state; and onnxruntime's own is
        # slower for several tokens than a product for each column of the weights.
        several = self.domain == _CONTRIB and x.shape[1] != 1
        if weight.shape[1] == 1 or several:
            options: dict[str, Any] = {"activation": "silu" if silu else None, "state": state}
            return causal_conv1d(x, weight, bias, **options, layout=layout, impl="torch")
        left = layout.left_align()
        if left is None:
            return self._convolve(x, weight, bias, state, silu)
        x = left.gather(layout.zero(x))
        kept = left.mask.sum(1)[:, None] + torch.arange(weight.shape[1] - 1, device=x.device)
        y, _ = self._convolve(x, weight, bias, state, silu)
        return left.restore(y), take(torch.cat((state, x), 1), kept)

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
    ) -> tuple[Tensor, Tensor]:
        attributes: dict[str, Any] = {"activation": "silu" if silu else "none"}
        if channels_last := self.domain == _CONTRIB:  # as our tensors are; the standard has time last
            attributes["channels_last"] = 1
        else:
            x, state = x.mT, state.mT
        y, after = torch.onnx.ops.symbolic_multi_out(
            f"{self.domain}::CausalConvWithState",
            (x, weight[:, None], bias, state),
            attributes,
            dtypes=(x.dtype, state.dtype),
            shapes=(x.shape, state.shape),
            version=1,
        )
        return (y, after) if channels_last else (y.mT.clone(), after.mT.clone())

    def _recur(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return y [b t h e] and the state [b g f e] after the last token of k [b t g f] and v [b t g e]."""
        rules = {(False, False): "linear", (True, False): "gated", (False, True): "delta"}
        heads, groups, width = q.shape[2], k.shape[2], v.shape[3]
        attributes = {
            "q_num_heads": heads,
            "kv_num_heads": groups,
            "scale": 1.0,
            "update_rule": rules.get((log_decay is not None, beta is not None), "gated_delta"),
        }
        if log_decay is not None:
            log_decay = log_decay.flatten(2)  # [b t g], or [b t gf] where every feature has its own
        given = [*(x.flatten(2) for x in (q, k, v)), state, log_decay, beta]
        while given[-1] is None:
            given.pop()
        y, after = torch.onnx.ops.symbolic_multi_out(
            f"{self.domain}::LinearAttention",
            given,
            attributes,
            dtypes=(v.dtype, state.dtype),
            shapes=((*q.shape[:2], heads * width), state.shape),
            version=1,
        )
        return y.unflatten(2, (heads, width)), after


def _layout(x: Tensor, mask: Tensor | None) -> Layout:
    return Layout(x.shape[0], x.shape[1], x.device, mask=mask)


def _sum_of_keys(k: Tensor, log_decay: Tensor | None, z: Tensor) -> Tensor:
    """Return z [b g f] after the last token, where no token is divided by it."""
    if log_decay is None:
        return z + k.sum(1)
    later = torch.cat((log_decay[:, 1:], torch.zeros_like(log_decay[:, :1])), 1).flip(1).cumsum(1).flip(1)
    return log_decay.sum(1).exp()[..., None] * z + (k * later.exp()[..., None]).sum(1)
