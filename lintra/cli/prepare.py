"""`lintra prepare NAME`: prepare data for training."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from lintra.cli.arguments import UsageError, parse
from lintra.cli.output import Quiet
from lintra.cli.progress import progress
from lintra.config import fields
from lintra.io.files import is_part_of, refuse_folder, refuse_unwritable
from lintra.tasks.datasets import shard_writer, text_files, token_shards
from lintra.tasks.datasets.documents import LONGEST, documents
from lintra.tokenizer import Tokenizer, check_vocabulary, pieces

_JUDGED = 16  # pieces of the text that is held out

Sources = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES")]
Out = Annotated[Path | None, tyro.conf.arg(aliases=["-o"])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Learn byte-level byte-pair encoding from the part of a text that lintra train text learns from."""

    data: str | None = None  # a text file (.gz, .xz too) or a folder of them
    vocabulary: int = 8_192  # tokens, including the 256 bytes and an end
    out: Out = None  # the file; else tokenizer.json, if there is none yet
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        check_vocabulary(self.vocabulary)
        refuse_folder("out", self.out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Write texts of any size as shards of tokens, which lintra train text --data reads from the disk. A line
    of a file *.jsonl or *.ndjson is a document, any other file is one; .gz and .xz are decompressed."""

    files: Sources = ()  # text files, JSON lines, folders of them
    tokenizer: str = "bytes"  # a tokenizer.json; or bytes
    out: Out = None  # the new folder of shards
    field: str = "text"  # the text in a line of JSON
    validate: float = 0.01  # the part of the documents held out to validate on
    document_bytes: int = LONGEST  # documents of over twice this are cut, at line ends
    shard_tokens: int = shard_writer.SHARD_TOKENS  # tokens in a shard, at most
    end: str | None = None  # a token of the tokenizer after each document, such as <|endoftext|>
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        fields.at_least(self, document_bytes=64, shard_tokens=1)
        if not self.files:
            raise ValueError("files must name at least one file or folder to read, got none")
        if self.out is None:
            raise ValueError("out must name a new folder for the shards, got none: say --out FOLDER")
        if not 0 < self.validate < 1:
            raise ValueError(f"validate must be above 0 and below 1, got {self.validate}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Read all shards of a folder, and report any file that is not as it was written."""

    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = None  # of shards
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        if self.folder is None or not token_shards.is_shards(self.folder):
            raise ValueError(
                f"folder must be a folder of shards with {token_shards.INDEX}, got {self.folder}"
            )


def prepare_command(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("Prepare data for training: lintra prepare NAME [--flag value ...]\n")
        print("  tokenizer   a tokenizer.json of a text, for lintra train text --tokenizer")
        print("  text        shards of texts of any size, for lintra train text --data")
        print("  check       whether shards are as they were written")
        return 0
    if args[0] not in FORMS:
        *names, last = FORMS
        raise UsageError(f"prepare must be followed by {', '.join(names)} or {last}, got {args[0]!r}")
    form, takes, make = FORMS[args[0]]
    about = form.__doc__ or ""
    make(parse(form, args[1:], prog=f"lintra prepare {args[0]}", description=about, takes=takes))
    return 0


def _tokenizer(options: Options) -> None:
    out = Path("tokenizer.json") if options.out is None else options.out
    if options.out is None and out.exists():
        raise UsageError(f"{out} exists: say --out {out} to replace it")
    read = text_files.split(options.data, utf8=True)
    _refuse_inside(out, [read.path], "file")
    refuse_unwritable(out)
    start = time.perf_counter()
    found = Tokenizer.learn(pieces(read.train), options.vocabulary)
    seconds = time.perf_counter() - start
    found.save(out)
    fewer = "" if found.vocabulary == options.vocabulary else f", as {read.path} has no more pairs"
    print(f"{out}: {found.vocabulary:,} tokens{fewer}, learned in {seconds:.1f} s")
    if options.output.quiet:
        return
    if judged := list(itertools.islice(pieces(read.validate), _JUDGED)):
        size = sum(len(part.encode()) for part in judged) / sum(map(len, found.encode_all(judged)))
        print(f"{size:.2f} bytes a token in the last tenth of the text, which it has not seen")


def _text(options: TextOptions) -> None:
    assert options.out is not None
    tokenizer = None if options.tokenizer == "bytes" else Tokenizer.read(options.tokenizer)
    end = _end(options, tokenizer)
    for path in options.files:
        if not path.exists():
            raise UsageError(f"{path} does not exist: name text files, or folders of them")
    _refuse_inside(options.out, options.files, "folder")
    files = list(itertools.chain.from_iterable(map(text_files.files_of, options.files)))
    total = sum(file.stat().st_size for file in files)
    start = time.perf_counter()
    with progress("preparing", total, "bytes", quiet=options.output.quiet) as report:
        found = documents(
            files,
            field=options.field,
            longest=options.document_bytes,
            utf8=tokenizer is not None,
            report=report,
        )
        written = shard_writer.write_shards(
            options.out,
            found,
            tokenizer,
            held_out=options.validate,
            shard_tokens=options.shard_tokens,
            end=end,
        )
    seconds = time.perf_counter() - start
    unit = "bytes" if tokenizer is None else "tokens"
    train, validate = (
        f"{written.total(split, 'documents'):,} documents of {written.total(split, 'tokens'):,} {unit}"
        for split in token_shards.SPLITS
    )
    print(f"{options.out}: {train} to learn from, {validate} held out, in {seconds:.1f} s")
    if tokenizer is not None:
        size, tokens = (sum(written.total(x, y) for x in token_shards.SPLITS) for y in ("bytes", "tokens"))
        print(f"{size / tokens:.2f} bytes a token, {tokenizer.vocabulary:,} tokens in the vocabulary")
    if written.empty:
        print(f"{written.empty:,} documents are empty: left out")
    if not written.exact:
        print("The tokenizer does not keep all of the text: bits/byte compare with its own only")


def _end(options: TextOptions, tokenizer: Tokenizer | None) -> int | None:
    """Return the number of the token that ends documents. Raises UsageError where there is no such token."""
    if options.end is None:
        return None
    found = None if tokenizer is None else tokenizer.token(options.end)
    if found is None:
        raise UsageError(
            f"end must be a token of a tokenizer.json, got {options.end!r} of {options.tokenizer}"
        )
    return found


def _refuse_inside(out: Path, read: Sequence[Path], what: str) -> None:
    """Raise UsageError if the output would be a part of the input."""
    for path in read:
        if is_part_of(out, path):
            raise UsageError(
                f"{out} is or would be a part of the text in {path}: name another {what} with --out"
            )


def _check(options: CheckOptions) -> None:
    assert options.folder is not None
    shards = token_shards.Shards(options.folder)
    with progress("checking", shards.size, "bytes", quiet=options.output.quiet) as report:
        shards.check(report)
    count = len(shards.train.shards) + len(shards.validate.shards)
    print(f"{options.folder}: {count:,} shards are as they were written, {shards.size:,} bytes")


# name -> its options, what it takes beside flags, and what makes it
FORMS = {
    "tokenizer": (Options, "", _tokenizer),
    "text": (TextOptions, "FILES ...", _text),
    "check": (CheckOptions, "FOLDER", _check),
}
