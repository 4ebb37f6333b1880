"""Encoders: hidden vectors, the masked tokens, and one prediction a sequence."""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from lintra.hf.base import LintraPreTrainedModel, layout_of
from lintra.models import encoder


class LintraModel(LintraPreTrainedModel):
    """The encoder of lintra.models, bidirectional where the mechanism can be and `causal` leaves it open."""

    def network_config(self) -> encoder.Config:
        return self.encoder_config(pool=None, head_activation=None, head_norm=False)

    def encoder_config(self, **given: Any) -> encoder.Config:
        """Return the encoder's configuration; with the symbol `start` of a decoder, whose embedding it may
        have. Raises ValueError for a decoder that embeds more than tokens."""
        config = self.config
        if config.context or config.embed != "token":
            raise ValueError(
                f"{type(self).__name__} embeds tokens alone, got context={tuple(config.context)} with "
                f"embed={config.embed!r}: its trained embedding would be lost"
            )
        return config.network(encoder, vocabulary=config.vocab_size + bool(config.start), **given)

    def encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, given: dict[str, Any]
    ) -> Tensor:
        """Return hidden vectors [b t c], 0 where padded, or [b c] with a pool. `given` is as in `layout_of`,
        `token_type_ids` [b t] where the network has types, and `global_attention_mask` [b t], 1 for tokens
        that see all, where a mechanism has such (Longformer).
        """
        whole = given.pop("global_attention_mask", None)
        extra = {} if whole is None else {"global_mask": whole != 0}
        if self.config.token_types:
            extra["token_types"] = given.pop("token_type_ids", None)
        return self.model(input_ids, **layout_of(input_ids, attention_mask, 0, given), **extra)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **given: Any
    ) -> BaseModelOutput:
        """Return the hidden vector of each token, [b t c]; 0 in padded places."""
        return BaseModelOutput(last_hidden_state=self.encode(input_ids, attention_mask, given))


class _WithHead(LintraModel):
    result: Any

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **given: Any,
    ) -> Any:
        """Return logits, and with labels the loss that transformers has for this task."""
        logits = getattr(self, str(self.head_name))(self.encode(input_ids, attention_mask, given))
        loss = None
        if labels is not None:
            options = {"vocab_size": logits.shape[-1], "config": self.config, **given}
            loss = self.loss_function(logits=logits, pooled_logits=logits, labels=labels, **options)
        return self.result(loss=loss, logits=logits)


class LintraForMaskedLM(_WithHead):
    """The encoder with `lm_head`: logits [b t n] of the token at each place; labels [b t], -100 for none."""

    head_name, result = "lm_head", MaskedLMOutput

    def network_config(self) -> encoder.Config:
        if self.config.tie_word_embeddings:
            raise ValueError("LintraForMaskedLM has a head of its own: tie_word_embeddings must be False")
        return self.encoder_config(pool=None, outputs=self.config.vocab_size)


class LintraForSequenceClassification(_WithHead):
    """The encoder with `classifier`: logits [b o] of each sequence, by `pool` of its mean,
    first or last token."""

    head_name, result = "classifier", SequenceClassifierOutput

    def network_config(self) -> encoder.Config:
        return self.encoder_config(outputs=self.config.num_labels)
