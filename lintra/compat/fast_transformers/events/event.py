"""Events: which module sent one, and the tensors that it shows. These are part of the graph of gradients."""

from collections.abc import Callable

from torch import Tensor


class Event:
    """Base. `source` is the module that sends it."""

    def __init__(self, source: object):
        self.source = source


class AttentionEvent(Event):
    """The weights of softmax attention after dropout, [n h l s]; of one token [n h s], or [n s h] where it
    reads another sequence.

    A function in their place is called when `attention_matrix` is first read: attention that does without
    these weights and has no dropout to draw then makes them only for a listener that looks.
    """

    def __init__(self, source: object, attention_matrix: Tensor | Callable[[], Tensor]):
        super().__init__(source)
        self._matrix = attention_matrix

    @property
    def attention_matrix(self) -> Tensor:
        if not isinstance(self._matrix, Tensor):
            self._matrix = self._matrix()
        return self._matrix

    @attention_matrix.setter
    def attention_matrix(self, matrix: Tensor) -> None:
        self._matrix = matrix


class QKVEvent(Event):
    """Queries [n l h e], keys [n s h e] and values [n s h d] of an attention layer."""

    def __init__(self, source: object, queries: Tensor, keys: Tensor, values: Tensor):
        super().__init__(source)
        self.queries, self.keys, self.values = queries, keys, values


class IntermediateOutput(Event):
    """The output [n l c] of a layer; the encoder or decoder around them is the source, layer after layer."""

    def __init__(self, source: object, x: Tensor):
        super().__init__(source)
        self.x = x
