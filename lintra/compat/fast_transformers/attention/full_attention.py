"""Softmax attention."""

import torch
from torch import Tensor

from lintra.compat.fast_transformers._inner import SOFTMAX, MaskedAttention, Real, ScoredInnerAttention, pairs
from lintra.compat.fast_transformers.attention_registry import AttentionRegistry
from lintra.compat.fast_transformers.events import AttentionEvent
from lintra.ops.softmax_attention import fused_attention


class FullAttention(MaskedAttention, ScoredInnerAttention):
    """Softmax attention; any mask.

    Its weights are computed only if there is a listener that reads them, or dropout.
    """

    def _bidirectional(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if self.event_dispatcher.listening:
            return super()._bidirectional(q, k, v, real)
        return self._fused(q, k, v, None if real.k is None else real.k[:, None, None])

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, real: Real) -> Tensor:
        if self.event_dispatcher.listening or real.k is not None:
            return super()._causal(q, k, v, real)
        return self._fused(q, k, v, None, causal=True)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, real: Real) -> Tensor:
        visible = pairs(visible, real.k, q, k)
        if not self.event_dispatcher.listening:
            return self._fused(q, k, v, visible)
        made: list[Tensor] = []
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def weights() -> Tensor:
            # A listener may read them under no_grad: the output computed from them keeps its graph.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                shown = self._weights(q.movedim(1, 2), k.movedim(1, 2), visible)
                made.append(
                    torch.einsum("nhls,nshd->nlhd", shown, v)
                )  # before a listener can write into them
            return shown

        # Read after the forward pass, dropout would be sampled a second time: it is sampled at once.
        event = AttentionEvent(self, weights() if self._weighing()["dropout"] else weights)
        self.event_dispatcher.dispatch(event)
        if made:  # from the weights that were shown, dropout included
            return made[0]
        return self._fused(q, k, v, visible)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool = False) -> Tensor:
        by_head = (x.movedim(1, 2) for x in (q, k, v))
        y = fused_attention(*by_head, visible=visible, causal=causal, **self._weighing())
        return y.movedim(1, 2)


AttentionRegistry.register("full", FullAttention, SOFTMAX)
