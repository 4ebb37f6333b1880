"""Text, images and sequences from a model: sampling as an RNN, beam search, and what makes a step fast."""

from lintra.generation.beam import Hypotheses, beam_search
from lintra.generation.forecasting import sample_paths
from lintra.generation.inputs import GenerationInputs, prepare_inputs
from lintra.generation.options import GenerationOptions, Sampler
from lintra.generation.sampling import (
    cast_state,
    check_recurrent,
    evaluation,
    generate,
    generate_reference,
    stream,
)

__all__ = [
    "GenerationInputs",
    "GenerationOptions",
    "Hypotheses",
    "Sampler",
    "beam_search",
    "cast_state",
    "check_recurrent",
    "evaluation",
    "generate",
    "generate_reference",
    "prepare_inputs",
    "sample_paths",
    "stream",
]
