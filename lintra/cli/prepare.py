"""`lintra prepare tokenizer --data PATH`: what is made of data before training."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from lintra.cli.arguments import UsageError, parse
from lintra.cli.output import Quiet
from lintra.io.files import refuse_folder, refuse_unwritable
from lintra.tasks.datasets import text_files
from lintra.tokenizer import Tokenizer, check_vocabulary, pieces

NAMES = ("tokenizer",)
_JUDGED = 16  # pieces of the text that is held out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Learn byte-level byte-pair encoding from the part of a text that lintra train text learns from."""

    data: str | None = None  # a text file (.gz, .xz too) or a folder of them
    vocabulary: int = 8_192  # tokens, the 256 bytes and an end among them
    out: Path | None = None  # the file; else tokenizer.json, if there is none yet
    output: Quiet = dataclasses.field(default_factory=Quiet)

    def __post_init__(self):
        check_vocabulary(self.vocabulary)
        refuse_folder("out", self.out)


def prepare_command(args: Sequence[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("Make what training needs: lintra prepare NAME [--flag value ...]\n")
        print("  tokenizer   a tokenizer.json of a text, for lintra train text --tokenizer")
        return 0
    if args[0] not in NAMES:
        raise UsageError(f"prepare must be followed by {' or '.join(NAMES)}, got {args[0]!r}")
    _tokenizer(parse(Options, args[1:], prog="lintra prepare tokenizer", description=Options.__doc__ or ""))
    return 0


def _tokenizer(options: Options) -> None:
    out = Path("tokenizer.json") if options.out is None else options.out
    if options.out is None and out.exists():
        raise UsageError(f"{out} exists: say --out {out} to replace it")
    read = text_files.split(options.data, utf8=True)
    place, text = out.resolve(), read.path.resolve()
    if place == text or (text.is_dir() and text in place.parents):
        raise UsageError(
            f"{out} is or would be a part of the text in {read.path}: name another file with --out"
        )
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
