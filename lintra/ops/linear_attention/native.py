"""The C++ kernels as the operators `lintra::linear_attention` and `lintra::recurrence`."""

from lintra.native import linear_attention as kernel
from lintra.native import recurrence
from lintra.ops.linear_attention import operator

linear_attention_native = operator.register(
    "linear_attention", "native", kernel.forward, kernel.backward, ["CPU"]
)


def _recurrence_backward(dy, dstate, q, k, v, log_decay, beta, saved, state, mask, cu_seqlens, scale):
    if not saved.numel():  # the forward did not expect to be differentiated
        saved = recurrence.forward(q, k, v, log_decay, beta, state, mask, cu_seqlens, scale, True)[2]
    return recurrence.backward(dy, dstate, q, k, v, log_decay, beta, saved, mask, cu_seqlens, scale)


recurrence_native = operator.register_recurrence(
    "recurrence", "native", recurrence.forward, _recurrence_backward, recurrence.saved_size, ["CPU"]
)
