"""Each part of the package may import only the parts to its left."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lintra"
ORDER = [
    {"config", "legacy"},
    {"agreement", "allocator", "io"},
    {"native"},
    {"ops"},
    {"attention"},
    {"nn"},
    {"audio", "tokenizer"},
    {"models"},
    {"distributed"},
    {"testing"},
    {"checkpoint"},
    {"generation"},
    {"generate", "beam"},
    {"speech"},
    {"transcribe"},
    {"tasks"},
    {"train"},
    {"hf", "compat", "export", "runtime", "web", "pictures", "bench", "evaluate", "demo"},
    {"cli"},
]
RANK = {name: i for i, names in enumerate(ORDER) for name in names}
# used by these neighbours of the same rank
FREE = {
    "compat": {"hf"},
    "pictures": {"bench", "evaluate", "demo"},
    "bench": {"demo"},
    "export": {"web"},
    "runtime": {"web"},
}


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> set[str]:
    """The parts of lintra that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("lintra.")}
    return {name for name in found if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()}


def test_the_order_is_of_what_there_is_and_what_contributors_read():
    assert sorted(RANK) == sorted({part(file) for file in FILES} - {"__init__"})
    told = (PACKAGE.parent / "CONTRIBUTING.md").read_text().split("checks it:\n\n")[1].split("\n\n")[0]
    assert [set(re.findall(r"\w+", names)) for names in told.split("<-")] == ORDER


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_to_the_left(file):
    here = part(file)
    if here == "__init__":
        return
    assert here in RANK, f"{here} has no place in the order of tests/test_layers.py"
    for name in imports(file) - {here}:
        neighbour = RANK[name] == RANK[here] and here in FREE.get(name, ())
        assert RANK[name] < RANK[here] or neighbour, f"{here} imports {name}, which stands to its right"


ANNOTATIONS = """
import warnings; warnings.simplefilter("ignore")
from jaxtyping import install_import_hook
with install_import_hook("lintra", "beartype.beartype"):
    import torch
    from lintra import generation
    from lintra.attention import linear, softmax
    from lintra.generation import beam_search
    from lintra.models import bilstm, ctc, decoder, encoder, forecaster, seq2seq
    from lintra.nn import Gaussian, Quantiles, StudentT
    from lintra.audio import features, symbols
    from lintra.speech import alignment, decoding, ngram, scoring, streaming
for attention in (linear.Config(), linear.Config(impl="torch"), linear.Config(feature_map=linear.Hedgehog()),
                  softmax.Config(window=4)):
    for position in ("sinusoidal", "rotary"):
        config = decoder.Config(vocabulary=9, attention=attention, layers=1, heads=4, kv_heads=2, width=32,
                                position=position, output=decoder.LogisticMixture(components=2))
        model = config.build()
        tokens = torch.randint(0, 9, (2, 11))
        mask = torch.arange(11) < torch.tensor([[11], [4]])
        model.output.log_prob(model(tokens, mask=mask), tokens).sum().backward()
        generation.generate(model, tokens, steps=2, seed=0, lengths=mask.sum(1))
        row, cu_seqlens = tokens.flatten()[None], torch.tensor([0, 4, 4, 22])
        model(model.shift(row, cu_seqlens), cu_seqlens=cu_seqlens)
        model.extend(row, cu_seqlens=cu_seqlens)
tokens, mask = torch.randint(0, 9, (2, 11)), torch.arange(11) < torch.tensor([[11], [4]])
shape = dict(layers=1, heads=2, width=16)
for pool in ("mean", "first", "last", None):
    ends = dict(outputs=3, pool=pool)
    encoder.Config(vocabulary=9, **ends, **shape).build()(tokens, mask=mask)
    encoder.Config(inputs=5, **ends, **shape).build()(torch.randn(2, 11, 5))
    encoder.Config(vocabulary=9, **ends, **shape).build()(row, cu_seqlens=cu_seqlens)
    bilstm.Config(vocabulary=9, layers=1, width=4, **ends).build()(tokens, mask=mask)
model = seq2seq.Config(vocabulary=9, encoder=encoder.Config(vocabulary=9, **shape), **shape).build()
model(tokens, model.encode_memory(tokens, mask), mask=mask)
model(row, model.encode_memory(row, cu_seqlens=cu_seqlens), cu_seqlens=cu_seqlens)
generation.generate(model, source=tokens, source_mask=mask, steps=2, seed=0)
beam_search(model, tokens, source=tokens, source_mask=mask, steps=2, beam=3)
for output in (Gaussian(), StudentT(), Quantiles()):
    model = forecaster.Config(output=output, **shape).build()
    values = torch.randn(2, 11)
    predicted, state = model.extend(values)
    output.loss(predicted.params, predicted.standardised(values))
    generation.sample_paths(model, values, horizon=2, samples=3, seed=0)
words = symbols.Symbols("word", ("yes", "no"))
model = ctc.Config(symbols=words, features=features.Config(), normalize="global",
                   encoder=encoder.Config(inputs=6, causal=True, **shape)).build().eval()
model.fit_statistics(torch.randn(9, 40).numpy())
log_probs, mask = model(torch.randn(2, 11, 40), mask=mask)
model.extend(torch.randn(2, 8, 40), model.start(2))
lm = ngram.NGram.learn([[1, 2]], order=2, symbols=2)
heard = decoding.beam(log_probs[0], width=3, lm=lm, weight=0.5)[0]
alignment.word_times(words, heard.ids, alignment.align(log_probs[0], heard.ids), seconds=0.04)
scoring.bootstrap([scoring.word_edits("yes no", words.decode(heard.ids))])
transcriber = streaming.Transcriber(model)
transcriber.push(torch.rand(9_000).numpy()), transcriber.finish()
for attention in (linear.Config(), softmax.Config()):
    cross = attention.build(heads=4, dim=8, causal=False)
    cross.cross_attend(torch.randn(2, 3, 4, 8), cross.encode_memory(*torch.randn(2, 2, 5, 4, 8)))
print("checked")
"""


def test_annotated_shapes_are_the_real_ones():
    """jaxtyping and beartype check every annotation that data pass."""
    done = subprocess.run([sys.executable, "-c", ANNOTATIONS], capture_output=True, text=True)
    assert done.stdout.strip() == "checked", done.stderr


LATER = """
import sys
import lintra
assert not {"lintra.train", "lintra.export", "lightning"} & set(sys.modules)
for name in lintra._LATER:
    getattr(lintra, name)
try:
    lintra.nothing
except AttributeError as error:
    print(error)
"""


def test_what_needs_more_than_pytorch_is_imported_when_it_is_asked_for():
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True)
    assert done.stdout == "module 'lintra' has no attribute 'nothing'\n", done.stderr
