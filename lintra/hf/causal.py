"""A decoder that predicts the next token, with `generate` on its own state."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from lintra.compat.transformers.cache import CACHE
from lintra.hf.base import LintraPreTrainedModel, layout_of
from lintra.hf.cache import LintraCache
from lintra.hf.config import LintraConfig
from lintra.hf.offload import extending, is_offloaded, onloaded, several_devices
from lintra.models import decoder
from lintra.ops import checks
from lintra.ops.padding import last_real, take


class LintraForCausalLM(LintraPreTrainedModel, GenerationMixin):
    """The decoder of lintra.models, its head as `lm_head`. Raises ValueError for a mechanism without a causal
    form."""

    head_name = "lm_head"

    def __init__(self, config: LintraConfig):
        if config.causal is False:
            raise ValueError("LintraForCausalLM sees no future: causal must be True or None, got False")
        config = copy.copy(config)
        config.causal = True  # of an encoder, too, that is loaded from where this decoder is saved
        super().__init__(config)
        if config.start and self.generation_config.bos_token_id is None:
            self.generation_config.bos_token_id = self.model.start_token

    def network_config(self) -> decoder.Config:
        return self.config.network(decoder)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: LintraCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: LintraCache | None = None,
        **given: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [b t n] of what follows each token, or those of the last `logits_to_keep` tokens.

        1 is the last real token, wherever padding is. labels [b t] are input_ids, or -100; the loss is the
        mean in nats over all but the first of each sequence. use_cache: None, that of the configuration, but
        not in training, with labels, or where later tokens decide what earlier ones see (attention "lsh").
        `cache` is the name of `past_key_values` since transformers 5.24.
        """
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are one argument: pass one of them")
        cache = _checked(past_key_values if cache is None else cache)
        layout = layout_of(input_ids, attention_mask, 0 if cache is None else cache.length, given)
        assert input_ids is not None
        if cache is not None and attention_mask is not None and checks.readable(attention_mask):
            _check_read(attention_mask, cache, input_ids.shape[1])
        packed, mask = layout["cu_seqlens"], layout["mask"]
        if packed is not None and (use_cache or cache is not None):
            raise ValueError("packed sequences cannot be continued: use_cache must be False")
        if use_cache is None:
            lookahead = any(block.attn.attention.can.lookahead for block in self.model.blocks)
            unable = self.training or lookahead or several_devices(self)
            wanted = not unable and labels is packed is None
            use_cache = self.config.use_cache and wanted
        offloaded = is_offloaded(self)
        if use_cache or cache is not None:
            if several_devices(self):
                raise ValueError(
                    "a model on several devices cannot use a cache: load it with one device in device_map, "
                    "or pass use_cache=False"
                )
            cache = LintraCache() if cache is None else cache
            with onloaded(extending(self.model) if offloaded else ()):
                hidden, state = self.model.extend(input_ids, cache.state, mask=mask)
            if use_cache:
                cache.state, cache.length = state, cache.length + input_ids.shape[1]
        else:
            hidden = self.model(input_ids, **layout)
        with onloaded([self.get_input_embeddings()] if offloaded and self.config.tie_word_embeddings else ()):
            logits = self.lm_head(_kept(hidden, mask, logits_to_keep))
        if self.config.output["name"] != "Logits":
            logits = self.model.output.log_probs(logits)
        loss = None
        if labels is not None:
            if packed is not None:  # nothing precedes the first token of a sequence
                first = labels.new_zeros(labels.shape[1] + 1, dtype=torch.bool)  # an empty one may begin at t
                first = first.index_fill(0, packed.long(), True)[:-1]
                labels = labels.masked_fill(first, -100)
            elif mask is not None:
                labels = labels.masked_fill(~(mask & mask.roll(1, 1)), -100)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **given)
        kept: dict[str, Any] = {CACHE: cache if use_cache else None}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        table = super().resize_token_embeddings(*args, **options)
        self.model.output = self.model.config.output.build(self.config.vocab_size)
        return table

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        """Give `generate` a cache of states in place of one of keys and values."""
        kind, mask = generation_config.cache_implementation, model_kwargs.get("attention_mask")
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation must be None: the cache holds states, got {kind!r}")
        if generation_config.prefill_chunk_size and mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "prefill_chunk_size needs padding at the left, so that the last piece ends every prompt"
            )
        own = _checked(model_kwargs.get(CACHE))
        if own is not None:
            if mask is not None and checks.has_values(mask):  # once, also where reading waits for a GPU
                _check_read(mask, own, mask.shape[1] - own.length)
            own._is_user_defined = True
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE] = LintraCache()


def _checked(cache: Any) -> LintraCache | None:
    if cache is not None and not isinstance(cache, LintraCache):
        raise TypeError(f"{CACHE} must be a LintraCache, which holds states, got {type(cache).__name__}")
    return cache


def _check_read(attention_mask: Tensor, cache: LintraCache, new: int) -> None:
    """Raise ValueError where a mask of all tokens hides others than those that the state has not read.

    `generate` feeds padding to rows that have ended, and with a cache of keys could hide it later; a state
    has read it."""
    if cache.state is None or attention_mask.shape[1] != cache.length + new or not cache.length:
        return
    shown, read = (attention_mask[:, : cache.length] != 0).sum(1).tolist(), cache.state.seen.tolist()
    if shown != read:
        raise ValueError(
            f"attention_mask has {shown} real tokens before the new ones and the cache has read {read}: rows "
            "that have ended cannot be continued with the others; pass the whole sequences without a cache"
        )


def _kept(hidden: Tensor, mask: Tensor | None, keep: int | Tensor) -> Tensor:
    """Return the hidden vectors [b t c] of the tokens whose logits are wanted."""
    if isinstance(keep, Tensor) or keep != 1 or mask is None:
        return hidden[:, keep if isinstance(keep, Tensor) else slice(-keep, None)]
    return take(hidden, last_real(mask)[:, None])
