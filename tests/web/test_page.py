"""The page in Chromium: it draws what the native program draws, for every visitor and in every way."""

import pytest

from lintra import native, runtime
from tests.web.conftest import Subject, damaged, serving, small_model

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]

WITHOUT_WASM = "delete globalThis.WebAssembly"
FORBIDDEN_WASM = "WebAssembly.instantiate = () => Promise.reject(new Error())"  # as a policy does
WITHOUT_SIMD = "WebAssembly.validate = () => false"
WITHOUT_RELAXED = (
    "{ const v = WebAssembly.validate; let n = 0; WebAssembly.validate = (x) => n++ > 0 && v(x) }"
)
WITHOUT_WORKER = "delete globalThis.Worker"
BROKEN_WORKER = """globalThis.Worker = class {
    constructor() { setTimeout(() => this.onerror(new Event("error"))) }
    postMessage() {}
    terminate() {}
}"""


@pytest.fixture
def served(small):
    with serving(small.page) as address:
        yield address


@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.slow), "served"])
def test_images_are_those_of_the_native_program(small, opened, request, how):
    address = request.getfixturevalue("served") if how == "served" else None
    with opened(small, address) as found:
        found.says("Finished")
        found.says("in a worker", "#how")
        assert found.images() == [small.draw(4, image) for image in range(4)]


def test_the_model_that_comes_with_lintra(shipped, opened):
    """From a file, without a network, on a page of at most 3 MB."""
    assert len(shipped.page.encode()) <= 3_000_000
    with opened(shipped, offline=True, reduced_motion="reduce") as found:
        found.says("Ready")
        found.page.select_option("#count", "1")
        found.says("Finished")
        assert found.images() == [shipped.draw(4)]
        found.says("66 KiB", "#state")  # as in the model's card
        found.says("3.06 MiB", "#cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (WITHOUT_WASM, "plain JavaScript, in a worker"),
        (WITHOUT_SIMD, "plain JavaScript, in a worker"),
        (WITHOUT_RELAXED, "WebAssembly with SIMD, in a worker"),
        (WITHOUT_WORKER, "relaxed SIMD, in slices"),
        (BROKEN_WORKER, "relaxed SIMD, in slices"),
        (f"{WITHOUT_WASM}; {WITHOUT_WORKER}", "plain JavaScript, in slices"),
        (f"{FORBIDDEN_WASM}; {WITHOUT_WORKER}", "plain JavaScript, in slices"),
    ],
)
def test_browsers_that_have_less(small, opened, script, told):
    with opened(small, script=script) as found:
        found.says("Finished")
        found.says(told, "#how")
        assert found.images() == [small.draw(4, image) for image in range(4)]


def draw_with_the_mouse(found):
    """A bow in the upper half."""
    left, top, width, height = found.box()
    mouse = found.page.mouse
    for i, (x, y) in enumerate([(0.3, 0.3), (0.5, 0.15), (0.7, 0.3), (0.6, 0.45)]):
        mouse.move(left + x * width, top + y * height, steps=5)
        if i == 0:
            mouse.down()
    mouse.up()


@pytest.mark.parametrize("which", ["small", "shipped"])
def test_half_a_digit_is_completed(which, opened, request):
    subject = request.getfixturevalue(which)
    _height, width, _ = subject.task.image_shape
    with opened(subject, reduced_motion="reduce") as found:
        found.says("Ready")
        found.page.select_option("#count", "2")
        draw_with_the_mouse(found)
        found.says("Finished")
        given = found.own()[: subject.task.length // 2]
        assert max(given) == subject.task.levels - 1
        assert not any(found.own()[len(given) :])
        assert not any(given[::width])  # nothing at the edge, where the mouse was not
        assert found.images() == [subject.draw(4, image, given) for image in range(2)]


def test_an_empty_drawing_is_no_beginning(small, opened):
    """Drawn, then erased: the page is as before."""
    with opened(small) as found:
        draw_with_the_mouse(found)
        found.says("Complete it", "#go")
        found.page.click("#clear")
        found.says("Draw digits", "#go")
        found.page.click("#go")
        found.says("Finished")
        found.says("from nothing")
        assert found.images() == [small.draw(4, image) for image in range(4)]


def test_keys_draw(small, opened):
    with opened(small, reduced_motion="reduce") as found:
        found.says("Ready")
        found.page.focus("#own")
        press = found.page.keyboard.press
        for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", " "):
            press(key)
        found.says("Row 1, column 4: ink.")
        press("Shift+ArrowDown")
        press("Shift+ArrowDown")
        found.says("Row 3, column 4: ink.")
        assert found.own()[3:24:8] == [small.task.levels - 1] * 3
        press("Delete")
        found.says("Row 3, column 4: empty.")
        given = found.own()[:32]
        assert given[3:24:8] == [small.task.levels - 1, 0, 0]
        press("Enter")
        found.says("Finished")
        assert found.images() == [small.draw(4, image, given) for image in range(4)]
        label = found.page.locator("#images canvas").first.get_attribute("aria-label")
        assert label.startswith("Image 1 of 4, finished: ink in rows ")


@pytest.mark.slow
def test_keys_that_draw_stop_what_was_begun(small, opened):
    """Otherwise it would continue from a drawing other than the visible one."""
    with opened(small, reduced_motion="reduce") as found:
        found.says("Ready")
        found.set("pace", 0)
        for key in (" ", "Shift+ArrowRight", "Delete"):
            found.page.click("#go")
            found.page.focus("#own")
            found.page.keyboard.press("ArrowLeft")
            assert found.page.locator("#stop").is_enabled()
            found.page.keyboard.press(key)
            assert found.page.locator("#stop").is_disabled()


def test_settings(small, opened):
    with opened(small) as found:
        found.says("Finished")
        found.set("temperature", 0)
        found.set("seed", 2**32 - 1)
        found.page.select_option("#count", "6")
        found.says("Finished")
        assert found.images() == [small.draw(0, temperature=0.0)] * 6
        found.set("temperature", 1.5)
        found.page.click("#go")
        found.says("Finished")
        assert found.images() == [small.draw(2**32 - 1, image, temperature=1.5) for image in range(6)]
        found.set("seed", -1)
        found.page.click("#go")
        assert found.page.locator("#seed:invalid").count() == 1
        found.says("Finished")


@pytest.mark.slow
@pytest.mark.parametrize("script", [None, WITHOUT_WORKER])
def test_stopped_and_slowed(small, opened, script):
    """At the slowest pace, 64 values take four seconds; the page responds all the while, and continues at
    once when the pace allows."""
    with opened(small, script=script, reduced_motion="reduce") as found:
        found.says("Ready")
        found.set("pace", 0)
        found.page.click("#go")
        found.page.click("#stop")
        found.says("Stopped.")
        assert found.images() != [small.draw(4, image) for image in range(4)]
        found.page.click("#go")
        found.set("pace", 8)
        found.says("Finished")
        assert found.images() == [small.draw(4, image) for image in range(4)]


def test_rows_that_are_given(small, opened):
    with opened(small, reduced_motion="reduce") as found:
        found.says("Ready")
        draw_with_the_mouse(found)
        found.set("rows", 2)
        found.page.click("#go")
        found.says("Finished")
        given = found.own()[:16]
        assert max(given) > 0 == max(found.own()[16:])
        assert found.images() == [small.draw(4, image, given) for image in range(4)]


def test_softmax_that_reads_again_is_softmax_that_remembers(small, opened):
    """The linear model draws what the first image shows."""
    with opened(small) as found:
        found.says("Finished")
        drawn = []
        for again in ("1", ""):
            found.page.select_option("#again", again)
            found.page.click("#race")
            found.says("Both have finished.", "#race-status")
            drawn.append([found.values(found.page.locator(f"#race-{i}")) for i in range(2)])
        assert drawn[0] == drawn[1]
        assert drawn[0][0] == small.draw(4)
        assert drawn[0][1] != drawn[0][0]
        label = found.page.locator("#race-chart").get_attribute("aria-label")
        assert label.startswith("Milliseconds a pixel by now: linear ")


@pytest.mark.parametrize("width", [320, 375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_beside_the_page(small, opened, width, scheme):
    with opened(small, viewport={"width": width, "height": 800}, color_scheme=scheme) as found:
        found.says("Finished")
        assert found.page.evaluate("document.documentElement.scrollWidth") == width


def test_everything_has_a_name(small, opened):
    with opened(small) as found:
        found.says("Finished")
        controls = {
            "button": [
                *("Erase", "Clear", "An example", "Draw digits", "Stop", "Another seed", "Start both"),
                "Stop both",
            ],
            "slider": ["Rows you give", "Speed", "Temperature"],
            "spinbutton": ["Seed"],
            "combobox": ["Images", "What softmax does for every pixel"],
            "application": ["Your drawing, 8 by 8 pixels"],
        }
        for role, names in controls.items():
            for name in names:
                assert found.page.get_by_role(role, name=name, exact=True).count() == 1, name
            assert found.page.get_by_role(role).count() == len(names)


def test_no_button_becomes_another_under_the_pointer(shipped, opened):
    """A double click on the start button starts twice; the stop button is a separate one beside it."""
    with opened(shipped, reduced_motion="reduce") as found:
        found.says("Ready")
        found.set("pace", 0)
        go, stop = found.page.locator("#go"), found.page.locator("#stop")
        before = go.text_content(), go.bounding_box(), stop.bounding_box()
        assert stop.is_disabled()
        go.dblclick()
        assert stop.is_enabled()
        assert (go.text_content(), go.bounding_box(), stop.bounding_box()) == before
        stop.focus()
        found.page.keyboard.press("Enter")
        found.says("Stopped.")
        assert stop.is_disabled()
        assert found.page.evaluate("document.activeElement.id") == "go"


def test_the_race_keeps_its_buttons(small, opened):
    """It has a stop button of its own, too."""
    with opened(small, reduced_motion="reduce") as found:
        found.says("Ready")
        race, end = found.page.locator("#race"), found.page.locator("#race-stop")
        assert end.is_disabled()
        race.click()
        assert race.text_content() == "Start both"
        found.says("Both", "#race-status")


PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


def in_sight(found, *names):
    """The names of what is entirely inside the window, to a pixel: windows scroll by whole pixels."""
    script = """names => names.filter((name) => {
        const box = document.getElementById(name).getBoundingClientRect();
        return box.top > -1 && box.bottom < innerHeight + 1 && box.left >= 0 && box.right <= innerWidth;
    })"""
    return found.page.evaluate(script, list(names))


@pytest.mark.parametrize("count", ["1", "4", "6"])
def test_a_phone_shows_the_drawing_and_what_comes_of_it(small, opened, count):
    with opened(small, reduced_motion="reduce", **PHONE) as found:
        found.says("Ready")
        found.page.select_option("#count", count)
        found.says("Finished")
        found.page.evaluate("document.getElementById('studio').scrollIntoView()")
        shown = ("own", "images", "status", "go", "stop")
        assert in_sight(found, *shown) == list(shown)
        assert found.page.evaluate("document.documentElement.scrollWidth") == 390
        sizes = [canvas.bounding_box()["width"] for canvas in found.page.locator("#images canvas").all()]
        assert min(sizes) > 64


@pytest.mark.slow
def test_a_finger_on_a_phone_brings_the_results_into_sight(small, opened):
    with opened(small, reduced_motion="reduce", **PHONE) as found:
        found.says("Ready")
        found.page.evaluate("scrollBy(0, document.getElementById('own').getBoundingClientRect().top - 544)")
        assert in_sight(found, "images") == []
        box = found.page.locator("#own").bounding_box()
        found.page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 4)
        found.says("Finished")
        assert in_sight(found, "images", "status") == ["images", "status"]


@pytest.mark.parametrize(
    "screen", [PHONE, {"viewport": {"width": 1280, "height": 900}}], ids=["phone", "desktop"]
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(small, opened, screen, scheme):
    """Contrast, names, roles and order, by the rules of axe-core."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe-playwright-python is not installed")
    with opened(small, color_scheme=scheme, **screen) as found:
        found.says("Finished")
        found.page.evaluate(axe.AXE_FILE_PATH.read_text())
        violations = found.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(x["id"], x["help"], x["nodes"][0]["html"]) for x in violations] == []


def test_a_damaged_model_is_told_of(small, opened):
    with opened(small, page=damaged(small.page, small.file)) as found:
        found.says("This does not work here: this is damaged: its checksum differs.")
        assert found.page.locator("#go").is_disabled()


def test_an_instruction_set_without_fused_sums_draws_the_same(small, opened):
    """To the bit, with the program that has no fused sums either."""
    if "baseline" not in native.instruction_sets():
        pytest.skip("the instruction sets of this processor have fused sums")
    with opened(small, script=WITHOUT_RELAXED) as found:
        found.says("Finished")
        with native.use("baseline"):
            assert found.images() == [small.draw(4, image) for image in range(4)]


def test_a_finger_draws(small, opened):
    with opened(small, has_touch=True, is_mobile=True, viewport={"width": 375, "height": 812}) as found:
        found.says("Finished")
        left, top, width, height = found.box()
        found.page.touchscreen.tap(left + width / 2, top + height / 4)
        found.says("Complete it", "#go")
        found.says("Finished")
        given = found.own()[:32]
        assert given[2 * 8 + 4] > 0
        assert found.images() == [small.draw(4, image, given) for image in range(4)]


def test_only_the_first_finger_draws(small, opened):
    """A second finger draws no line between the two, and does not end the stroke."""
    with opened(small, has_touch=True, reduced_motion="reduce") as found:
        found.says("Ready")
        left, top, width, height = found.box()
        session = found.page.context.new_cdp_session(found.page)

        def touch(kind, *fingers):
            points = [{"id": i, "x": left + x * width, "y": top + y * height} for i, x, y in fingers]
            session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", (0, 0.1, 0.1))
        touch("touchStart", (0, 0.1, 0.1), (1, 0.9, 0.1))
        touch("touchMove", (0, 0.1, 0.2), (1, 0.9, 0.2))
        touch("touchEnd", (1, 0.9, 0.2))
        assert found.page.locator("#status").text_content() == "Ready."
        touch("touchMove", (0, 0.1, 0.4))
        touch("touchEnd")
        found.says("Finished")
        given = found.own()[:32]
        assert all(given[8 * row] for row in range(4))
        assert not any(value for i, value in enumerate(given) if i % 8 > 2)
        touch("touchStart", (0, 0.9, 0.1))  # the next first finger
        touch("touchEnd")
        assert found.own()[7] > 0


def test_an_example_is_a_beginning(small, opened):
    with opened(small) as found:
        found.says("Finished")
        beginnings = []
        for _ in range(5):
            found.page.click("#example")
            found.says("Finished")
            beginnings.append(found.own())
        assert len({tuple(beginning) for beginning in beginnings}) == 5
        assert found.images() == [small.draw(4, image, beginnings[-1][:32]) for image in range(4)]


def test_strokes_are_erased_by_the_mouse(small, opened):
    with opened(small, reduced_motion="reduce") as found:
        found.says("Ready")
        draw_with_the_mouse(found)
        found.page.click("#erase")
        draw_with_the_mouse(found)
        assert not any(found.own())
        found.says("Draw digits", "#go")


def test_a_model_that_wants_a_first_value(opened):
    """Without a start symbol, as in the paper: the first value is 0, and the rest is drawn."""
    subject = Subject(*small_model(start=False))
    with opened(subject) as found:
        found.says("Finished")
        assert found.images() == [subject.draw(4, image) for image in range(4)]
        found.page.click("#race")
        found.says("Both have finished.", "#race-status")
        assert found.values(found.page.locator("#race-0")) == subject.draw(4)
