"""Hugging Face classes, one each for every mechanism: the mechanism is a field of the configuration.

    model = LintraForCausalLM(LintraConfig(vocab_size=256, attention="performer"))

Importing this package registers them with AutoConfig and the AutoModels; loading one needs no remote code. It
registers lintra's attention with transformers too, for the models of `lintra.compat.transformers`.
"""

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "lintra.hf needs transformers: pip install 'lintra[hf]'", name="transformers"
    ) from error

from lintra.compat.transformers.attention import cache_for, register_attention
from lintra.compat.transformers.cache import StateCache
from lintra.compat.transformers.pretrained import encoder_from_pretrained
from lintra.hf.cache import LintraCache
from lintra.hf.causal import LintraForCausalLM
from lintra.hf.config import LintraConfig
from lintra.hf.convert import from_hf, to_hf
from lintra.hf.encoders import LintraForMaskedLM, LintraForSequenceClassification, LintraModel

__all__ = [
    "LintraCache",
    "LintraConfig",
    "LintraForCausalLM",
    "LintraForMaskedLM",
    "LintraForSequenceClassification",
    "LintraModel",
    "StateCache",
    "cache_for",
    "encoder_from_pretrained",
    "from_hf",
    "register_attention",
    "to_hf",
]

# Trainer looks for these names: it shifts the labels of such models before it smooths them.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[LintraConfig.model_type] = LintraForCausalLM.__name__
AutoConfig.register(LintraConfig.model_type, LintraConfig, exist_ok=True)
AutoModel.register(LintraConfig, LintraModel, exist_ok=True)
AutoModelForCausalLM.register(LintraConfig, LintraForCausalLM, exist_ok=True)
AutoModelForMaskedLM.register(LintraConfig, LintraForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(LintraConfig, LintraForSequenceClassification, exist_ok=True)
