"""Checked and prepared inputs of a generation: the first tokens, the source and the random numbers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lintra.generation import native_decode
from lintra.generation.ending import Ending
from lintra.generation.options import GenerationOptions
from lintra.generation.uniforms import uniforms
from lintra.models import Decoder, Seq2Seq
from lintra.nn.mask import lengths_to_mask
from lintra.nn.parameters import reference_param
from lintra.ops import checks


class GenerationInputs(NamedTuple):
    """Inputs of a generation on the model's device.

    tokens [b t] are the first ones, the start symbol included; mask [b t] says which of them are real (None:
    all); uniforms yields the random numbers [b] of every step.
    """

    tokens: Tensor
    mask: Tensor | None
    source: Tensor | None
    source_mask: Tensor | None
    options: GenerationOptions
    uniforms: Iterator[Tensor]

    def ending(self) -> Ending:
        """Return a tracker of the sequences that have ended: none yet."""
        return Ending(self.options, len(self.tokens), self.tokens.device)

    def memory(self, model: Decoder) -> list[Any]:
        """Return the encoded source, if the model is one that reads a source."""
        if self.source is None:
            return []
        assert isinstance(model, Seq2Seq)
        return [model.encode_memory(self.source, self.source_mask)]


def prepare_inputs(
    model: Decoder,
    prompt: Tensor | None,
    options: GenerationOptions | None = None,
    *,
    lengths: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    **keywords: Any,
) -> GenerationInputs:
    """Return the inputs of a generation, checked: its tensors on the model's device after the start symbol.

    Arguments and errors are those of `lintra.generation.stream`.
    """
    options = GenerationOptions.of(options, keywords)
    check_inputs(model, prompt, options, lengths=lengths, source=source, source_mask=source_mask)
    device = reference_param(model).device
    source = None if source is None else source.to(device)
    source_mask = None if source_mask is None else source_mask.to(device)
    if prompt is None:
        batch = (options.batch or 1) if source is None else len(source)
        prompt = torch.empty(batch, 0, dtype=torch.int64)
    tokens = prompt.to(device, torch.int64)
    mask = None if lengths is None else lengths_to_mask(lengths.to(device), tokens.shape[1])
    if model.start_token is not None:
        tokens = torch.cat((tokens.new_full((len(tokens), 1), model.start_token), tokens), 1)
        mask = None if mask is None else torch.cat((mask.new_ones(len(mask), 1), mask), 1)
    numbers = uniforms(options.steps, len(tokens), options.seed)
    return GenerationInputs(tokens, mask, source, source_mask, options, numbers)


def check_inputs(
    model: Decoder,
    prompt: Tensor | None,
    options: GenerationOptions,
    *,
    lengths: Tensor | None = None,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError unless a model can generate from these, as `stream` says."""
    if not isinstance(model, Decoder):
        raise TypeError(f"model must be a Decoder or a Seq2Seq, got {type(model).__name__}")
    if options.state_dtype is not None:
        for block in model.blocks:
            block.attn.attention.check_state_dtype(options.state_dtype)
    if options.weights != "float32":
        native_decode.check_weights(model, options.weights)
    for name, symbols in (("end", (options.end,)), *(("stop", each) for each in options.stop)):
        for symbol in symbols:
            if symbol is not None and not 0 <= symbol < model.config.vocabulary:
                raise ValueError(
                    f"{name} must be a symbol in 0 .. {model.config.vocabulary - 1}, got {symbol}"
                )
    _check_source(model, options.batch, source, source_mask)
    _check_prompt(prompt, options.batch, None if source is None else len(source))
    if lengths is not None:
        _check_lengths(lengths, prompt)
    longest = 0
    if prompt is not None:
        mask = None if lengths is None else lengths_to_mask(lengths.to(prompt.device), prompt.shape[1])
        real = prompt.to(torch.int64) if mask is None else prompt.to(torch.int64)[mask]
        checks.symbols("prompt", real.cpu(), model.config.vocabulary - 1)  # the start symbol is none of them
        longest = prompt.shape[1] if mask is None else int(mask.any(0).sum())
    if model.start_token is not None:
        longest += 1
    elif longest == 0 or (lengths is not None and bool((lengths == 0).any())):
        raise ValueError("this model has no start symbol: every prompt must have at least one token")
    model.check_reach(longest + options.steps - 1)  # the last token is not read


def _check_source(
    model: Decoder, batch: int | None, source: Tensor | None, source_mask: Tensor | None
) -> None:
    """Raise ValueError or TypeError unless there is a source where a model reads one, and it fits."""
    if isinstance(model, Seq2Seq):
        if source is None:
            raise ValueError("a Seq2Seq model needs a source")
        device = reference_param(model).device
        for name, x in (("source", source), ("source_mask", source_mask)):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        try:
            model.encoder.check_input(
                source.to(device), None if source_mask is None else source_mask.to(device)
            )
        except (ValueError, TypeError) as error:
            raise type(error)(f"source does not fit: {error}") from error
        if batch not in (None, len(source)):
            raise ValueError(f"batch must be that of the source, {len(source)}, or None; got {batch}")
    elif source is not None:
        raise ValueError(f"source goes with a Seq2Seq model, this one is a {type(model).__name__}")
    elif source_mask is not None:
        raise ValueError("source_mask belongs to a source, and there is none")


def _check_prompt(prompt: Any, batch: int | None, sources: int | None) -> None:
    """Raise ValueError or TypeError unless a prompt is integers [b t] of this batch, or None."""
    if prompt is None:
        return
    if not isinstance(prompt, Tensor):
        raise TypeError(f"prompt must be a tensor of integers [b t], got {type(prompt).__name__}")
    if prompt.dim() != 2 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        raise ValueError(f"prompt must be integers [b t], got {prompt.dtype} of shape {list(prompt.shape)}")
    asked = batch if sources is None else sources
    if asked not in (None, len(prompt)):
        whose = "of the prompt" if sources is None else "of the prompt and of the source"
        raise ValueError(f"batch must be that {whose}, {len(prompt)}, or None; got {asked}")


def _check_lengths(lengths: Any, prompt: Tensor | None) -> None:
    """Raise ValueError or TypeError unless lengths are [b], one for each prompt."""
    if prompt is None:
        raise ValueError("lengths belong to a prompt, and there is none")
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor of integers [b], got {type(lengths).__name__}")
    if tuple(lengths.shape) != (len(prompt),):
        raise ValueError(f"lengths must be [{len(prompt)}], one a prompt, got {list(lengths.shape)}")
