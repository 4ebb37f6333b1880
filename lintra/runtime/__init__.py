"""The runtime: a trained decoder or recogniser as an RNN in C without dependencies, reached with ctypes.

`lintra_runtime.h` documents it; here are its models and sequences as objects. The files it reads are
written by `lintra.export.runtime` or `lintra export --to runtime`; `lintra.runtime.audio` transcribes with
them. The library holds one instruction set, and the one that `lintra.native` uses is taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lintra import native
from lintra.generation import GenerationInputs, Sampler
from lintra.io.files import refuse_irregular

FORMAT = 3  # LRT_FORMAT
ALIGN = 64  # LRT_ALIGN, bytes
_BAD_TOKEN, _NOTHING_READ, _FULL = -11, -13, -21  # LRT_BAD_TOKEN, LRT_NOTHING_READ, LRT_FULL
_ROOM = 256  # tokens that a sequence has room for at first
_FACTS = ("vocabulary", "start", "params", "components", "positions", "layers", "width", "heads", "kv_heads")
_FACTS += ("weights", "input", "subsample", "spaced")

_SIZE, _INT, _POINTER = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
_DOUBLE, _WORD = ctypes.c_double, ctypes.c_uint32
_FUNCTIONS = {  # name -> result, arguments
    "lrt_error": (ctypes.c_char_p, _INT),
    "lrt_format": (_INT,),
    "lrt_model_size": (_SIZE,),
    "lrt_load": (_INT, _POINTER, _SIZE, _POINTER, _SIZE),
    "lrt_fact": (_INT, _POINTER, _INT),
    "lrt_float32_size": (_SIZE, _POINTER),
    "lrt_to_float32": (_INT, _POINTER, _POINTER, _SIZE),
    "lrt_sequence_size": (_SIZE, _POINTER),
    "lrt_sequence_size_for": (_SIZE, _POINTER, _WORD),
    "lrt_start": (_INT, _POINTER, _SIZE, _POINTER),
    "lrt_room": (_WORD, _POINTER),
    "lrt_copy": (_INT, _POINTER, _SIZE, _POINTER),
    "lrt_step": (_INT, _POINTER, _WORD),
    "lrt_prefill": (_INT, _POINTER, _POINTER, _SIZE),
    "lrt_read": (_INT, _POINTER, _POINTER, _SIZE),
    "lrt_new_symbol": (_INT, _POINTER),
    "lrt_symbol": (ctypes.c_char_p, _POINTER, _WORD),
    "lrt_features_of": (_POINTER, _POINTER),
    "lrt_features_size": (_SIZE, _POINTER),
    "lrt_features_start": (_INT, _POINTER, _SIZE, _POINTER),
    "lrt_features_push": (_INT, _POINTER, _POINTER, _SIZE),
    "lrt_features_frame": (_POINTER, _POINTER),
    "lrt_seen": (_WORD, _POINTER),
    "lrt_params": (_POINTER, _POINTER),
    "lrt_log_probs": (_POINTER, _POINTER),
    "lrt_sample": (_INT, _POINTER, _DOUBLE, _WORD, _DOUBLE, _DOUBLE),
    "lrt_seed": (None, _POINTER, _WORD, _WORD),
    "lrt_uniform": (_DOUBLE, _POINTER),
    "lrt_state_size": (_SIZE, _POINTER),
    "lrt_state_size_for": (_SIZE, _POINTER, _WORD),
    "lrt_save_state": (_INT, _POINTER, _POINTER, _SIZE),
    "lrt_load_state": (_INT, _POINTER, _POINTER, _SIZE),
}


class Error(ValueError):
    """Refusal of the runtime, with its reason."""


def available() -> bool:
    """Return whether the library is built and loads. Raises ValueError if LINTRA_NATIVE is wrong."""
    return why_not() is None


def why_not() -> str | None:
    """Return why the runtime cannot be used here; None if it can. Raises ValueError if LINTRA_NATIVE is
    wrong."""
    try:
        _library()
    except RuntimeError as error:
        return str(error)
    return None


class Model:
    """A model from the content of a file. `facts` are those of lrt_fact, start and positions -1 for none.

    Raises Error for content that is not a valid model, RuntimeError without the library.
    """

    def __init__(self, content: bytes):
        self.library = _library()
        self.content = aligned(max(1, len(content)))  # an empty array has no address
        self.content[: len(content)] = np.frombuffer(content, np.uint8)
        self.memory = aligned(self.library.lrt_model_size())
        at = self.memory.ctypes.data
        self.check(self.library.lrt_load(at, len(self.memory), self.content.ctypes.data, len(content)))
        self.address = at
        self.facts = {name: self.library.lrt_fact(at, i) for i, name in enumerate(_FACTS)}

    @classmethod
    def open(cls, file: str | Path) -> Model:
        """The model in a file. Raises Error that names it."""
        refuse_irregular(Path(file), Error)
        try:
            return cls(Path(file).read_bytes())
        except OSError as error:
            raise Error(f"{file} cannot be read: {error.strerror}") from error
        except Error as error:
            raise Error(f"{file}: {error}") from error

    def symbol(self, number: int) -> str | None:
        """The name of a symbol of a recogniser; None for the blank, 0, and for numbers without a symbol."""
        if not 0 <= index(number) < 2**32:  # otherwise a number that wraps around might be one
            return None
        name = self.library.lrt_symbol(self.address, number)
        return None if name is None else name.decode(errors="replace")

    def to_float32(self) -> bytes | None:
        """Return the file with its float16 weights as float32, which the runtime reads faster in WebAssembly;
        None where they are of another kind."""
        size = self.library.lrt_float32_size(self.address)
        if not size:
            return None
        content = aligned(size)
        self.check(self.library.lrt_to_float32(self.address, content.ctypes.data, size))
        return content.tobytes()

    def state_size(self, tokens: int) -> int:
        """Bytes of a state saved after so many tokens, always the same without softmax attention. Raises
        Error for fewer than 0."""
        if tokens < 0:
            raise Error(f"tokens must be at least 0, got {tokens}")
        return self.library.lrt_state_size_for(self.address, min(tokens, 2**32 - 1))

    def check(self, code: int) -> int:
        """Return what a call returned. Raises Error if that is an error."""
        if code < 0:
            raise Error(self.library.lrt_error(code).decode())
        return code


class Sequence:
    """A sequence of a model: its state and the distribution of its next symbol. Raises Error for what the
    runtime refuses and TypeError for a token that is not an integer, which leave it unchanged.

    Softmax attention keeps every token: the memory of its sequences doubles where it is full.
    """

    def __init__(self, model: Model):
        self.model, self.library = model, model.library
        self.memory, self.address = self._memory(_ROOM)
        model.check(self.library.lrt_start(self.address, len(self.memory), model.address))

    @property
    def seen(self) -> int:
        """Tokens read so far, or steps of frames."""
        return self.library.lrt_seen(self.address)

    def step(self, token: int) -> None:
        """One token."""
        self._check(token)
        self._grow(lambda: self.library.lrt_step(self.address, token))

    def prefill(self, tokens: Iterable[int]) -> None:
        """Several tokens, one after the other; only the params of the last are computed."""
        given = list(tokens)
        self._check(*given)
        words = np.array(given, np.uint32)
        self._grow(lambda: self.library.lrt_prefill(self.address, words.ctypes.data, len(words)))

    def read(self, frames: Float[np.ndarray, "t i"]) -> None:
        """Read as many frames as the model's `subsample`, or fewer, which end the utterance."""
        if frames.ndim != 2 or frames.shape[1] != self.model.facts["input"]:
            raise Error(f"frames must be [t i={self.model.facts['input']}], got {list(frames.shape)}")
        given = np.ascontiguousarray(frames, np.float32)
        self._grow(lambda: self.library.lrt_read(self.address, given.ctypes.data, len(given)))

    def new_symbol(self) -> int:
        """The symbol that the last frames add to the most probable path; 0: none."""
        return self.model.check(self.library.lrt_new_symbol(self.address))

    def _check(self, *tokens: int) -> None:
        # Otherwise a number that is rounded or wraps around might be a token.
        if not all(0 <= index(token) < 2**32 for token in tokens):
            raise Error(self.library.lrt_error(_BAD_TOKEN).decode())

    def params(self) -> Tensor:
        """Return what the last token gave [p], as `Decoder.extend` does."""
        return self._numbers(self.library.lrt_params(self.address), self.model.facts["params"])

    def log_probs(self) -> Tensor:
        """The natural logarithms of the probabilities of all symbols [n]."""
        return self._numbers(self.library.lrt_log_probs(self.address), self.model.facts["vocabulary"])

    def sample(self, uniform: float | None = None, sampler: Sampler = Sampler()) -> int:  # noqa: B008 (frozen)
        """The symbol that a number in [0, 1) draws, as `Sampler.draw` does; None: the next number of the
        sequence's own generator."""
        if uniform is None:
            self._read(self.library.lrt_params(self.address))  # or no number is taken
            uniform = self.uniform()
        top_k = min(sampler.top_k or 0, self.model.facts["vocabulary"])
        top_p = 1.0 if sampler.top_p is None else sampler.top_p
        # The runtime takes no more than float32 holds; all symbols are as likely there as above it.
        temperature = min(sampler.temperature, torch.finfo(torch.float32).max)
        sampled = self.library.lrt_sample(self.address, temperature, top_k, top_p, uniform)
        return self.model.check(sampled)

    def seed(self, seed: int) -> None:
        """Set the sequence's own generator."""
        if not 0 <= seed < 2**64:
            raise Error(f"seed must be between 0 and 2^64 - 1, got {seed}")
        self.library.lrt_seed(self.address, seed & 0xFFFFFFFF, seed >> 32)

    def uniform(self) -> float:
        """The next number in [0, 1) of the sequence's own generator."""
        return self.library.lrt_uniform(self.address)

    def save(self) -> bytes:
        """The state, to be loaded by a sequence of the same model elsewhere."""
        state = np.empty(self.model.state_size(self.seen), np.uint8)
        self.model.check(self.library.lrt_save_state(self.address, state.ctypes.data, len(state)))
        return state.tobytes()

    def load(self, state: bytes) -> None:
        """Resume from what `save` returned, any buffer of bytes; the params come with the next token."""
        given = bytes(memoryview(state))
        self._grow(lambda: self.library.lrt_load_state(self.address, given, len(given)))

    def _memory(self, tokens: int) -> tuple[Any, int]:
        """Memory of a sequence of so many tokens, and where it begins."""
        size = self.library.lrt_sequence_size_for(self.model.address, tokens)
        memory = aligned(size)
        return memory, memory.ctypes.data

    def _grow(self, call: Callable[[], int]) -> None:
        """Make a call, and repeat it with more memory as long as there is too little."""
        while (code := call()) == _FULL:
            room = self.library.lrt_room(self.address)
            memory, address = self._memory(min(2 * room, 2**32 - 1))
            self.model.check(self.library.lrt_copy(address, len(memory), self.address))
            self.memory, self.address = memory, address
        self.model.check(code)

    def _numbers(self, address: int | None, count: int) -> Tensor:
        numbers = (ctypes.c_float * count).from_address(self._read(address))
        return torch.from_numpy(np.array(numbers, np.float32))

    def _read(self, address: int | None) -> int:
        """Return an address of results. Raises Error if there are none, as before the first token."""
        if address is None:
            raise Error(self.library.lrt_error(_NOTHING_READ).decode())
        return address


def stream(model: Model, begun: GenerationInputs) -> Iterator[Tensor]:
    """Yield the next token of every sequence [b], as `lintra.generation.stream` with the same random
    numbers.

    begun: the result of `lintra.generation.prepare_inputs` for the request. Raises Error, also for `weights`
    and `state_dtype`, which the file of the model decides.
    """
    for name, default in (("weights", "float32"), ("state_dtype", None)):
        if (value := getattr(begun.options, name)) != default:
            raise Error(f"{name} is as the model was exported: leave {name}={value!r} out")
    sequences = [Sequence(model) for _ in begun.tokens]
    for i, sequence in enumerate(sequences):
        real = begun.tokens[i] if begun.mask is None else begun.tokens[i][begun.mask[i]]
        sequence.prefill(real.tolist())
    sampled: list[int] = []
    sampler, ending = begun.options.sampler, begun.ending()
    for uniforms in begun.uniforms:
        for sequence, token in zip(sequences, sampled, strict=False):  # none before the first
            sequence.step(token)
        pairs = zip(sequences, uniforms.tolist(), strict=True)
        sampled = [sequence.sample(uniform, sampler) for sequence, uniform in pairs]
        tokens = ending.mark(torch.tensor(sampled, dtype=torch.int64))
        yield tokens
        if ending.all():
            return
        sampled = tokens.clamp(min=0).tolist()


def aligned(size: int) -> Any:
    """Memory as bytes, aligned as the runtime requires."""
    memory = np.zeros(size + ALIGN, np.uint8)
    first = -memory.ctypes.data % ALIGN
    return memory[first : first + size]


def _library() -> Any:
    """The library for the instruction set in use. Raises RuntimeError with the reason if there is none."""
    usable = native.instruction_sets()
    if not usable:
        raise RuntimeError(f"the runtime is not available: {native.why_not()}")
    return _load(native.instruction_set() if native.available() else usable[0])


@cache
def _load(instruction_set: str) -> Any:
    file = native.library_file(f"liblintra_runtime_{instruction_set}.so")
    try:
        library = ctypes.CDLL(str(file))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"{file} does not load: {error}") from error
    if library.lrt_format() != FORMAT:
        raise RuntimeError(f"{file} reads format {library.lrt_format()}, not {FORMAT}: reinstall lintra")
    return library
