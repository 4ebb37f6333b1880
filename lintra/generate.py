"""The old place of `lintra.generation`."""

from lintra.legacy import moved_module

_NAMES = {
    "begin": "prepare_inputs",
    "Beginning": "GenerationInputs",
    "keep": "cast_state",
    "Options": "GenerationOptions",
}

__getattr__ = moved_module(__name__, "lintra.generation", _NAMES)
