"""Text as subword tokens, by a file of Hugging Face's `tokenizers`: encoded, decoded, and learned from texts.

The package is an extra, lintra[tokenizers], and is imported where a tokenizer is read or learned.
"""

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from lintra.io.files import Error, expanded, read_json, write_atomically
from lintra.io.packages import package

BYTES = 256  # symbols that a byte-level vocabulary begins with
LARGEST = 2**22  # tokens of a vocabulary that is learned: memory for them is allocated at once
END = "<|endoftext|>"  # the token between documents, as GPT-2 calls it
PIECE = 2**16  # bytes of a text that are encoded by themselves, about
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from a part of a character too

# Places that no token crosses with any common pre-tokenizer (GPT-2, GPT-4, Llama 3): a line's end between
# lines with something at both ends, or else the space before a word.
_BETWEEN_LINES = re.compile(rb"(?:(?<=\S\n)|(?<=\S\r\n))(?=\S)")
_BETWEEN_WORDS = re.compile(rb"(?<=\S)(?= \S)")


def check_vocabulary(tokens: int) -> None:
    """Raise ValueError unless so many tokens can be learned."""
    if not BYTES < tokens <= LARGEST:
        raise ValueError(
            f"vocabulary must be at least {BYTES + 1}, for all bytes and an end, and at most {LARGEST:,}, "
            f"got {tokens}"
        )


class Tokenizer:
    """A tokenizer of text, as its file describes it, without the special tokens that it would add.

    vocabulary: number of token numbers, 0 .. vocabulary - 1; sum: SHA-256 of its content.
    """

    def __init__(self, content: bytes, name: str = "tokenizer"):
        """content: that of a file, without its byte order mark; name: what errors call it. Raises Error
        where it is not a tokenizer."""
        library = _package()
        self.content, self.name = content.removeprefix(codecs.BOM_UTF8), name
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(self.content.decode())
        except Exception as error:  # the package raises nothing narrower
            reason = " ".join(str(error).split())
            raise Error(f"{name} is not a tokenizer of Hugging Face's tokenizers: {reason}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not self.vocabulary:
            raise Error(f"{name} is a tokenizer without any token")

    @classmethod
    def read(cls, file: str | Path) -> "Tokenizer":
        """Read a tokenizer.json. Raises Error where it is missing, damaged or something else."""
        file = expanded(file)
        if file.is_dir():
            raise Error(f"{file} is a folder: name the tokenizer.json in it")
        read_json(file)  # reports what is wrong with any other file
        return cls(file.read_bytes(), str(file))

    @classmethod
    def learn(cls, texts: Iterable[str], vocabulary: int) -> "Tokenizer":
        """Learn byte-level byte-pair encoding, GPT-2's (Radford et al. 2019, section 2.2), from texts.

        vocabulary: tokens, with the 256 bytes and `END` among them; fewer where the texts have no more pairs.
        Raises ValueError for less than those and for more than LARGEST.
        """
        check_vocabulary(vocabulary)
        library = _package()
        level = library.pre_tokenizers.ByteLevel
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=sorted(level.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer.to_str(pretty=True).encode())

    def save(self, file: str | Path) -> None:
        """Write the file, whole or not at all. Raises Error."""
        write_atomically(Path(file), lambda place: place.write_bytes(self.content))

    @cached_property
    def sum(self) -> str:
        return sha256(self.content).hexdigest()

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest type of numpy that holds a token."""
        return np.uint16 if self.vocabulary <= 2**16 else np.uint32

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises Error where the tokenizer has none for a part of it."""
        return self._encoded(lambda: self._tokenizer.encode(text, add_special_tokens=False)).ids

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, computed on all threads. Raises Error as `encode` does."""
        found = self._encoded(
            lambda: self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        )
        return [np.array(each.ids, self.dtype) for each in found]

    def _encoded(self, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except Exception as error:  # the package raises nothing narrower
            reason = " ".join(str(error).split())
            raise Error(f"{self.name} cannot encode this text: {reason}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones by their names; parts of a character are U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def token(self, name: str) -> int | None:
        """Return the number of the token with this name, such as "<|endoftext|>"; None if there is none."""
        return self._tokenizer.token_to_id(name)


class TextStream:
    """Text of tokens that come one by one, given out as soon as its characters are whole.

    decode: tokens -> text, with U+FFFD for a part of a character; end: a token that ends the text and is not
    in it; stop: texts after which it ends; prompt: tokens before the first, which are not given out and in
    which no stop text counts. The pieces given out together are `decode` of all tokens up to the end, cut
    after the first of `stop`; where a decoder takes back whole characters because what follows them is not
    a character (byte fallback), they stay.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        end: int | None = None,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
    ):
        self.decode, self.end, self.stop = decode, end, stop
        self.ended = False
        self._tokens = list(prompt)  # those that the next characters may depend on
        self._context = len(self._tokens)  # tokens at their beginning that are given out
        self._given = len(decode(self._tokens))  # characters of these that are given out
        self._recent = ""  # the last characters, as many as may begin a stop text

    def push(self, token: int) -> str:
        """Return the text that one more token makes certain: "" after its end."""
        if self.ended:
            return ""
        if token == self.end:
            return self.finish()
        self._tokens.append(token)
        text = self.decode(self._tokens)
        # U+FFFD at the end may be parts of a character: of some decoders one for each byte, and one for each
        # whole character before them too, until the last byte is there.
        known = len(text.rstrip(_UNFINISHED))
        new, self._given = text[self._given : known], max(self._given, known)
        if known == len(text):  # decoders treat the first token differently: the latest whole ones stay
            self._tokens = self._tokens[self._context :]
            self._context = len(self._tokens)
            self._given = len(self.decode(self._tokens))
        return self._until_stop(new)

    def finish(self) -> str:
        """Return the rest of the text, which ends here."""
        left = "" if self.ended else self._until_stop(self.decode(self._tokens)[self._given :])
        self.ended = True
        return left

    def _until_stop(self, new: str) -> str:
        """Return the part of new text up to where a stop text ends, if one does."""
        seen = self._recent + new
        places = [seen.find(each) + len(each) for each in self.stop if each in seen]
        if places:
            self.ended = True
            return new[: min(places) - len(self._recent)]
        longest = max(map(len, self.stop), default=1) - 1
        self._recent = seen[-longest:] if longest else ""
        return new


def pieces(text: bytes | memoryview, size: int = PIECE) -> Iterator[str]:
    """Cut a text in UTF-8 into pieces of about `size` bytes, `2 * size` at most, at places where no token of
    the usual tokenizers passes; where there is no such place, between two characters."""
    start = 0
    while len(text) - start > 2 * size:
        end = cut(text, start + size, start + 2 * size)
        yield str(text[start:end], "utf-8")
        start = end
    if start < len(text):
        yield str(text[start:], "utf-8")


def cut(text: bytes | memoryview, first: int, last: int) -> int:
    """Return a place from `first` to `last` at which a text in UTF-8 may be cut: at the end of a line, or
    else between words, or else characters."""
    for pattern in (_BETWEEN_LINES, _BETWEEN_WORDS):
        if found := pattern.search(text, first, last):
            return found.start()
    return character_start(text, last)


def character_start(text: bytes | memoryview, place: int) -> int:
    """Return the place of the first byte of the UTF-8 character to which the byte at `place` belongs."""
    while place > 0 and place < len(text) and text[place] & 0xC0 == 0x80:
        place -= 1
    return place


def _package() -> ModuleType:
    """The package `tokenizers`. Raises ModuleNotFoundError that says how to install it."""
    return package("tokenizers", extra="tokenizers", needs="subword tokens need")
