"""Text, images and sequences from a model: sampling as an RNN, beam search, and what makes a step fast."""

from lintra.generation.beam import Hypotheses, beam_search
from lintra.generation.sampling import (
    GenerationInputs,
    Options,
    Sampler,
    cast_state,
    check_recurrent,
    evaluation,
    generate,
    generate_reference,
    prepare_inputs,
    stream,
)

__all__ = [
    "GenerationInputs",
    "Hypotheses",
    "Options",
    "Sampler",
    "beam_search",
    "cast_state",
    "check_recurrent",
    "evaluation",
    "generate",
    "generate_reference",
    "prepare_inputs",
    "stream",
]
