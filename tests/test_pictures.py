"""Pictures are PNG files with the expected content; whether they look good, a person must judge."""

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from lintra import attention, checkpoint, pictures
from lintra.pictures import charts, lines
from lintra.pictures.figure import COLORS, save


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.mark.parametrize("shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
def test_grids_show_the_images(tmp_path, shape):
    white = torch.full((5, *shape), 255, dtype=torch.uint8)
    dark = torch.zeros_like(white)
    for name, images in (("white", white), ("dark", dark)):
        pictures.samples(tmp_path / f"{name}.png", images, "five")
        pictures.completions(
            tmp_path / f"{name}2.png", images, 3, images[:, None].repeat(1, 2, 1, 1, 1), "five completed"
        )
    for number in ("", "2"):
        bright, black = pixels(tmp_path / f"white{number}.png"), pixels(tmp_path / f"dark{number}.png")
        assert bright.shape == black.shape
        assert (black == 0).mean() > 0.2
        assert (bright == 0).mean() < 0.02


def test_curves_with_little_in_them(tmp_path):
    for train, validate in [
        ({}, {}),
        ({10: 2.0}, {}),
        ({i: 1 / i for i in range(1, 99)}, {50: 0.1, 98: 0.05}),
    ]:
        pictures.loss_curve(tmp_path / "loss.png", train, validate, unit="nats per symbol", title="loss")
        assert pixels(tmp_path / "loss.png").std() > 1
    pictures.time_per_token(tmp_path / "time.png", (16, 32), {"a": [1.0, 1.1], "b": [1.0, 4.0]}, "time")
    assert pixels(tmp_path / "time.png").std() > 1


@pytest.mark.parametrize(("least", "low"), [(40.0, 0.0), (60.0, None)])
def test_curves_begin_at_nothing_or_near_the_least(tmp_path, monkeypatch, least, low):
    figures = []
    monkeypatch.setattr(lines, "save", lambda path, figure: figures.append(figure))
    errors = {"a": {10: 90.0, 20: least}, "b": {10: 80.0, 20: 70.0}}
    pictures.curves(tmp_path / "a.png", errors, x="step", y="errors (%)", title="learning")
    (axes,) = figures[0].axes
    assert axes.get_xlim()[0] == 0
    bottom = axes.get_ylim()[0]
    assert bottom == low if low is not None else 0.9 * least < bottom < least


def drawn(monkeypatch, call, *args, **options):
    """The panels of a picture: each with its title and the names next to its lines."""
    figures = []
    monkeypatch.setattr(lines, "save", lambda path, figure: figures.append(figure) or save(path, figure))
    call(*args, **options)
    return [axes for axes in figures[0].axes if axes.lines]


def names(axes):
    return sorted(text.get_text() for text in axes.texts if text.get_text())


@pytest.mark.parametrize("draw", [pictures.logarithmic, pictures.percentages])
def test_few_lines_share_a_panel(tmp_path, monkeypatch, draw):
    """The axis shows the measured lengths, and every line has its name; both are inside the picture."""
    timings = {"a": {800: 1.0, 1600: 1.1}, "b": {800: 1.0, 1600: 4.0, 2400: 90.0}}
    others = {"left": {"c": {800: 2.0, 2400: 90.0}}, "right": {"d": {800: 50.0}, "e": {}}}
    text = {"x": "frames", "y": "seconds", "title": "time"}
    (axes,) = drawn(monkeypatch, draw, tmp_path / "a.png", timings, others=others, **text)
    assert list(axes.get_xticks()) == [800, 1600, 2400]
    assert names(axes) == ["a", "b", "c", "d"]
    found = pixels(tmp_path / "a.png")
    for color in COLORS[:4]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (found == wanted).all(-1).any()


def test_many_lines_have_panels_of_at_most_seven(tmp_path, monkeypatch):
    """Each group has the reference lines too; a group that is too large is split into equal parts."""
    lines = {name: {1: 1.0, 2: 3.0} for name in ("linear", "softmax")}
    others = {"few": {"a": {1: 2.0}}, "many": {f"m{i}": {1: i + 1.0, 2: 9.0} for i in range(6)}, "none": {}}
    text = {"x": "tokens", "y": "seconds", "title": "time"}
    panels = drawn(monkeypatch, pictures.logarithmic, tmp_path / "a.png", lines, others=others, **text)
    assert [axes.get_title(loc="left") for axes in panels] == ["few", "many, 1 of 2", "many, 2 of 2"]
    of = [["a"], ["m0", "m1", "m2"], ["m3", "m4", "m5"]]
    assert [names(axes) for axes in panels] == [sorted(["linear", *each, "softmax"]) for each in of]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in panels}) == 1


def test_ranges_are_bars_at_their_points(tmp_path, monkeypatch):
    ranges = {"a": {2: (20.0, 80.0)}}
    (axes,) = drawn(
        monkeypatch,
        pictures.percentages,
        tmp_path / "a.png",
        {"a": {2: 50.0}, "b": {2: 10.0}},
        ranges=ranges,
        x="state",
        y="recalled",
        title="recall",
    )
    (bars,) = axes.collections
    assert [bar.tolist() for bar in bars.get_segments()] == [[[2.0, 20.0], [2.0, 80.0]]]


def test_lines_are_of_the_family_of_their_mechanism():
    every = {name: {} for name in (*attention.names(), "lsh-4", "clustered, bidirectional")}
    found = pictures.families(every | {"mine": {}})
    assert set().union(*found.values()) == {*every, "mine"}
    assert set(found["hashing and clusters"]) == {"lsh", "lsh-4", "clustered", "clustered, bidirectional"}
    assert list(found["others"]) == ["mine"], "a mechanism has no family"
    assert list(pictures.families({"kda": {}, "gated": {}})["recurrences"]) == ["gated", "kda"]


def test_small_losses_are_told_apart(tmp_path, monkeypatch):
    losses = {"a": {0: 2.0, 10: 0.01, 20: 0.0}, "b": {0: 2.0, 20: 0.001}}
    text = {"x": "step", "y": "loss", "title": "learning", "log": True}
    (axes,) = drawn(monkeypatch, pictures.curves, tmp_path / "a.png", losses, **text)
    assert (axes.get_yscale(), axes.get_xscale(), names(axes)) == ("log", "linear", ["a", "b"])
    assert [list(line.get_xdata()) for line in axes.lines] == [[0, 10], [0, 20]]


def test_matrices_share_a_scale_that_a_bar_explains(tmp_path, monkeypatch):
    """A weight has the same colour in every panel and picture, whatever else they show."""
    figures = []
    monkeypatch.setattr(charts, "save", lambda path, figure: figures.append(figure) or save(path, figure))
    large = np.diag([1.0, -1.0])
    pictures.matrices(tmp_path / "a.png", {"large": large, "small": 0.1 * large}, "weight")
    left, right = (axes.images[0] for axes in figures[0].axes[:2])
    assert (left.norm(0.1), left.get_clim()) == (right.norm(0.1), right.get_clim())
    assert left.get_clim() == (-1, 1)
    (bar,) = figures[0].axes[1].child_axes
    assert bar.get_ylabel() == "weight"
    assert bar.get_ylim() == (-1, 1)


@pytest.mark.parametrize("panels", [("clustered, bidirectional",), ("bidirectional", "causal")])
def test_labels_of_matrices_are_inside_the_picture(tmp_path, monkeypatch, panels):
    figures = []
    monkeypatch.setattr(charts, "save", lambda path, figure: figures.append(figure) or save(path, figure))
    unit = "weight of a value, 64 tokens"
    pictures.matrices(tmp_path / "a.png", dict.fromkeys(panels, np.eye(64)), unit)
    box, (width, height) = figures[0].get_tightbbox(), figures[0].get_size_inches()
    assert 0 < box.x0 < box.x1 < width
    assert 0 < box.y0 < box.y1 < height


def test_pixels_of_tiny_images_are_squares(tmp_path):
    image = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    image[0, ::2] = 200
    pictures.samples(tmp_path / "a.png", image, "")
    column = pixels(tmp_path / "a.png")[:, 160, 0]
    dark = np.nonzero(column == 0)[0]
    between = column[dark.min() : dark.max()]
    assert set(between) == {0, 200}


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([], []),
        ([0.2, 0.5, 0.9], [0.2, 0.5, 0.9]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.95, 0.95], [0.9, 1.0]),
        ([0.0, 0.02, 0.5], [0.0, 0.1, 0.5]),
    ],
)
def test_names_are_moved_apart(heights, expected):
    assert list(lines._moved_apart(heights, 0.1)) == pytest.approx(expected)  # sums of few numbers


def test_words_stand_over_what_was_heard(tmp_path):
    """Each in its own colour, from its start to its end."""
    words = [("one", 0.2, 0.8), ("two", 1.2, 1.8)]
    steps = {"shift": 0.01, "stride": 0.04}
    pictures.alignment(
        tmp_path / "a.png", np.zeros((200, 40)), words, np.full(50, 0.5), **steps, title="said: one two"
    )
    found, columns = pixels(tmp_path / "a.png"), []
    for color in COLORS[:2]:
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        columns.append(np.nonzero((found == wanted).all(-1).sum(0) >= 2)[0])
    (one, two), wide = columns, found.shape[1]
    assert one.max() < two.min()
    assert np.ptp(one) == pytest.approx(np.ptp(two), abs=0.02 * wide)


def test_a_roof_over_points(tmp_path):
    points = {"a": (0.5, 3.0), "b": (20.0, 90.0)}
    pictures.roofline(tmp_path / "roof.png", points, arithmetic=100.0, memory=10.0, title="roof")
    assert pixels(tmp_path / "roof.png").std() > 1


def test_a_picture_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    pictures.samples(path, torch.zeros(1, 8, 8, 1, dtype=torch.uint8), "before")
    before = path.read_bytes()

    def broken(self, file, *_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", broken)
    with pytest.raises(checkpoint.Error, match=r"a\.png cannot be written"):
        pictures.samples(path, torch.zeros(1, 8, 8, 1, dtype=torch.uint8), "after")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"]


def test_a_name_stands_beside_each_row(tmp_path):
    images = torch.zeros(3, 8, 8, 1, dtype=torch.uint8)
    for i, name in enumerate(("1.0", "WWWW")):
        pictures.rows(tmp_path / f"{i}.png", {"0.5": images, name: images[:2]}, "rows")
    one, other = (pixels(tmp_path / f"{i}.png") for i in range(2))
    assert one.shape == other.shape
    rows, columns = np.nonzero((one != other).any(-1))
    assert rows.min() > len(one) / 2  # the name of the second row, left of the images
    assert columns.max() < np.nonzero((one == 0).all(-1).any(0))[0].min()


@pytest.mark.parametrize("channels", [1, 3])
def test_heat_is_where_the_bits_are(tmp_path, channels):
    images = torch.full((2, 8, 8, channels), 255, dtype=torch.uint8)
    maps, titles = torch.ones(2, 8, 8), ("mean", "single")
    maps[:, 0, 0] = torch.nan  # unknown values stay empty
    for i in range(2):
        maps[1, 7, 7] = 1 + 4.0 * i
        pictures.heat(tmp_path / f"{i}.png", maps.mean(0), images, maps, unit="bits", titles=titles)
    one, other = (pixels(tmp_path / f"{i}.png").astype(int) for i in range(2))
    assert one.shape == other.shape
    assert (one != other).any()


def test_histograms_of_what_is_not_positive(tmp_path):
    for i, values in enumerate(([0.0, 0.5, 2.0], [0.0], [-1e-5, 0.0])):
        pictures.histograms(tmp_path / f"{i}.png", {"a": np.array(values)}, x="bits", title="t")
        assert (tmp_path / f"{i}.png").stat().st_size


def test_histograms_share_an_axis(tmp_path):
    """Equal spreads look equal, and a single number has its own bar."""
    draw = np.random.default_rng(0)
    values = {"one": draw.uniform(1, 2, 99), "other": draw.uniform(4, 8, 99), "single": np.array([3.0])}
    pictures.histograms(tmp_path / "a.png", values, x="bits/dim", title="histograms")
    found = pixels(tmp_path / "a.png")
    first, last = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLORS[:2])
    where = [np.nonzero((found == color).all(-1))[1] for color in (first, last)]
    assert where[0].max() < where[1].min()


@pytest.mark.parametrize(("shape", "mode"), [((8, 6, 1), "L"), ((8, 6, 3), "RGB")])
def test_an_image_is_read_as_it_is(tmp_path, shape, mode):
    image = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(image.squeeze(-1).numpy() if mode == "L" else image.numpy()).save(tmp_path / "a.png")
    assert torch.equal(pictures.read(tmp_path / "a.png", shape), image)


def test_sixteen_bits_are_scaled_as_advised(tmp_path):
    """Pillow by itself would clip them: nearly all would be white."""
    values = (np.arange(48).reshape(8, 6) * 1365).astype(np.uint16)
    image = Image.fromarray(values)
    image.save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"mode L: convert it, in Pillow with \.point") as caught:
        pictures.read(tmp_path / "a.png", (8, 6, 1))
    converted = eval(f"image{str(caught.value).rpartition(' with ')[2]}", {"image": image})
    assert np.array_equal(np.asarray(converted), values // 256)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_goes_on_black(tmp_path, mode):
    more = {"transparency": 0} if mode == "P" else {}
    Image.new(mode, (6, 8)).save(tmp_path / "a.png", **more)
    with pytest.raises(
        ValueError, match=rf"mode {mode}; .* mode L: put it on black and convert it, in Pillow"
    ):
        pictures.read(tmp_path / "a.png", (8, 6, 1))


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [
        struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "content",
    [
        png((b"IHDR", bytes(5))),
        png(
            (b"IHDR", struct.pack(">IIBBBBB", 6, 8, 8, 0, 0, 0, 0)),
            (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21))),
        ),
        b"P5 6 8x 255\n" + bytes(48),
        b"P5 6 8 255\n" + bytes(9),
        b"P5 60000 60000 255\n",
        b"",
    ],
    ids=["header", "text", "number", "short", "huge", "empty"],
)
def test_a_damaged_image_is_told_by_name(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"a\.png cannot be read as an image, it must have 6 x 8 pixels in grey"
    ):
        pictures.read(tmp_path / "a.png", (8, 6, 1))
