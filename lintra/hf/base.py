"""Base of the Hugging Face classes: a network of lintra.models in `model`, and the inputs of `forward`."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lintra.hf.config import LintraConfig
from lintra.ops import checks
from lintra.ops.layout import locate, sequence_bounds

_LOSS = ("num_items_in_batch", "ignore_index", "shift_labels")  # keywords of a loss
_REDUNDANT = ("cu_seq_lens_k", "max_length_q", "max_length_k")  # with cu_seq_lens_q
_REFUSED = {
    "inputs_embeds": "the networks read input_ids",
    "output_attentions": "most mechanisms never make the matrix of attention weights",
    "output_hidden_states": "LintraModel gives the last ones, hooks of the modules model.blocks the others",
}


class LintraPreTrainedModel(PreTrainedModel):
    """Base: the network in `model`, under the names of its own parameters, and its head beside it."""

    config: LintraConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True  # no token can be taken back
    _no_split_modules = {"Block"}  # noqa: RUF012
    head_name: str | None = None
    model: Any

    def __init__(self, config: LintraConfig):
        super().__init__(config)
        for name in _REFUSED:
            if getattr(config, name, False):
                raise ValueError(f"{name} is not supported: {_REFUSED[name]}")
        self.model = self.network_config().build()
        if self.head_name is not None:
            setattr(self, self.head_name, self.model.head)
            self.model.head = nn.Identity()
        self.gradient_checkpointing = config.checkpoint_blocks
        self.post_init()

    def network_config(self) -> Any:
        """Return the configuration of the network, its head included, in lintra.models."""
        raise NotImplementedError

    def get_input_embeddings(self) -> nn.Module:
        if self.config.embed != "token":
            raise NotImplementedError(f"embed={self.config.embed!r} has no table of embeddings")
        return getattr(self.model.embedding, "own", self.model.embedding).table

    def set_input_embeddings(self, value: nn.Module) -> None:
        getattr(self.model.embedding, "own", self.model.embedding).table = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> Any:
        """Change the number of symbols. Raises ValueError where more than one table depends on it."""
        config = self.config
        several = config.start or config.context or config.tie_word_embeddings
        several = several or (config.head_activation and self.head_name == "lm_head")
        if several or config.embed != "token" or config.output["name"] != "Logits":
            raise ValueError(
                "resize_token_embeddings needs start=False, context=(), tie_word_embeddings=False, "
                "head_activation=None, embed='token' and logits"
            )
        table = super().resize_token_embeddings(new_num_tokens, *args, **options)
        self.model.config = replace(self.network_config(), checkpoint_blocks=self.gradient_checkpointing)
        return table

    def _init_weights(self, module: nn.Module) -> None:
        """Leave a module as it is: the networks initialise their parameters when they are built."""

    @torch.no_grad()
    def _initialize_missing_keys(self, *_: Any, **__: Any) -> None:
        """Initialise weights that a file lacks, such as a new head, as in a new network."""
        tensors = {
            f"{prefix}.{name}" if prefix else name: x
            for prefix, part in self.named_modules()
            if not getattr(part, "_is_hf_initialized", False)  # such as a quantised layer
            for name, x in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
        }
        missing = [name for name, x in tensors.items() if not getattr(x, "_is_hf_initialized", False)]
        fresh = type(self)(copy.deepcopy(self.config)).state_dict() if missing else {}
        for name in missing:
            tensors[name].copy_(fresh[name])

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **how: Any
    ) -> None:
        """Recompute every block in the backward, or none, with lintra's own options for PyTorch's
        function."""
        of = getattr(gradient_checkpointing_func, "func", checkpoint)
        if how.get("every_n_layers", 1) != 1 or of is not checkpoint:
            raise ValueError("all blocks are recomputed or none, in memory: every_n_layers=1, offload=False")
        self.gradient_checkpointing = enable
        self.model.config = replace(self.model.config, checkpoint_blocks=enable)


def layout_of(
    input_ids: Tensor | None, attention_mask: Tensor | None, before: int, given: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Return mask [b t] and cu_seqlens [n+1], at most one, of a call of `forward` after `before` tokens.

    attention_mask, 1 for real tokens wherever padding is, is [b t] or [b before+t]. Packed sequences [1 t]
    come with `cu_seq_lens_q`, or with `position_ids` that begin again at 0; positions that count the tokens
    are redundant. What remains in `given` are the keywords of a loss; raises TypeError or ValueError for
    others.
    """
    asked = {name: given.pop(name) for name in given.keys() - _LOSS}
    asked = {
        name: x for name, x in asked.items() if x is not None and x is not False and name not in _REDUNDANT
    }
    for name in asked.keys() & _REFUSED.keys():
        raise ValueError(f"{name} is not supported: {_REFUSED[name]}")
    if input_ids is None:
        raise ValueError("input_ids must be given")
    cu_seqlens, position = asked.pop("cu_seq_lens_q", None), asked.pop("position_ids", None)
    if cu_seqlens is not None or position is not None:
        asked.pop("seq_idx", None)  # the number of each token's sequence, which they say
    types = asked.pop("token_type_ids", None)
    if types is not None and checks.readable(types) and bool(types.any()):
        raise ValueError("token_type_ids must be 0: the networks have no embedding of segments")
    if asked:
        raise TypeError(f"forward takes no {', '.join(asked)}")
    b, t = input_ids.shape
    if attention_mask is not None and attention_mask.shape not in ((b, t), (b, before + t)):
        shape = list(attention_mask.shape)
        raise ValueError(f"attention_mask must be [{b} {before + t}], 1 for real tokens, got shape {shape}")
    if cu_seqlens is None and position is not None and not _counts(position, b, t, before, attention_mask):
        cu_seqlens = _cu_seqlens(position, t)
    if attention_mask is None:
        return {"mask": None, "cu_seqlens": cu_seqlens}
    mask = attention_mask[:, attention_mask.shape[1] - t :] != 0
    return {"mask": None if checks.readable(mask) and bool(mask.all()) else mask, "cu_seqlens": cu_seqlens}


def _counts(position: Tensor, b: int, t: int, before: int, attention_mask: Tensor | None) -> bool:
    """Return whether positions [b or 1, t] are the numbers of real tokens before each, as they are anyway."""
    if position.shape not in ((b, t), (1, t)):
        return False
    if attention_mask is None:
        return bool((position == torch.arange(before, before + t, device=position.device)).all())
    real = attention_mask != 0
    number = real.cumsum(1) - 1 + (before if real.shape[1] == t else 0)
    return bool((position == number[:, -t:])[real[:, -t:]].all()) if t else True


def _cu_seqlens(position: Tensor, time: int) -> Tensor:
    """Return cu_seqlens [n+1] of packed sequences by the positions [1 t] of their tokens."""
    if position.shape == (1, time):
        cu_seqlens = sequence_bounds((position == 0).cumsum(1))
        if bool((locate(cu_seqlens, time)[1] == position).all()):
            return cu_seqlens
    raise ValueError(
        "position_ids must be [1 t], from 0 in each packed sequence: others are counted by attention_mask"
    )
