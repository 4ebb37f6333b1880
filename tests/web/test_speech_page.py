"""The page that hears, in Chromium with a recording as microphone, writes what `lintra transcribe` does."""

import re
from pathlib import Path

import numpy as np
import pytest

from lintra import checkpoint, runtime, web
from lintra.audio import waveform
from lintra.cli.transcribe import transcribe_command
from lintra.export import runtime as export
from tests.runtime import recognisers
from tests.web.conftest import damaged, opening, serving
from tests.web.test_page import WITHOUT_RELAXED, WITHOUT_SIMD, WITHOUT_WASM, WITHOUT_WORKER

DATA = Path(__file__).parents[1] / "speech/data"

pytestmark = [
    pytest.mark.skipif(not runtime.available(), reason=f"no runtime: {runtime.why_not()}"),
    pytest.mark.usefixtures("one_thread"),
]


class Recogniser:
    """A recogniser and its page."""

    levels = None  # it draws nothing

    def __init__(self, model):
        self.model, self.page = model, web.page(model, None, "<b>subject</b>")
        self.file = export.to_bytes(model, "float16")


@pytest.fixture(scope="module")
def shipped():
    return Recogniser(checkpoint.load("spoken-digits"))


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Digits from three speakers, with a little noise around them: two seconds in files of two rates."""
    soundfile, soxr = pytest.importorskip("soundfile"), pytest.importorskip("soxr")
    said = [waveform.read(DATA / f"{name}.wav", 8_000) for name in ("3_theo_0", "7_jackson_1", "0_nicolas_2")]
    hush = (2e-4 * np.random.default_rng(0).standard_normal(4_000)).astype(np.float32)
    samples, folder = np.concatenate([hush, *said, hush]), tmp_path_factory.mktemp("said")
    soundfile.write(folder / "said.wav", samples, 8_000, subtype="PCM_16")
    high = soxr.resample(samples, 8_000, 44_100)
    soundfile.write(folder / "high.wav", np.stack([high, high], 1), 44_100, subtype="PCM_16")
    return folder


def transcribed(file, capsys):
    """The output of the command."""
    assert transcribe_command([str(file)]) == 0
    return capsys.readouterr().out.rstrip("\n")


@pytest.fixture(scope="module")
def hearing(launch, recording):
    """A browser whose microphone plays the recording, once."""
    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    browser = launch(*fake, f"--use-file-for-fake-audio-capture={recording / 'said.wav'}%noloop")
    yield browser
    browser.close()


@pytest.fixture
def listening(hearing, tmp_path):
    return opening(hearing, tmp_path)


@pytest.fixture
def served(shipped):
    with serving(shipped.page) as address:
        yield address


def text(found):
    return found.page.locator("#text").inner_text()


@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.slow), "served"])
def test_the_microphone(shipped, recording, listening, request, capsys, how):
    address = request.getfixturevalue("served") if how == "served" else None
    expected = transcribed(recording / "said.wav", capsys)
    assert len(expected.split()) == 3
    with listening(shipped, address) as found:
        found.says("Ready")
        found.page.click("#go")
        found.says("Listening")
        assert found.page.locator("#file").is_disabled()
        found.says(expected.split()[0], "#text")  # while it is being said
        assert found.page.locator("#status").text_content() == "Listening: speak."
        assert re.fullmatch(r"[-−]\d+ dB", found.page.locator("#level-told").text_content() or "")
        found.says(expected, "#text")
        found.page.click("#go")
        found.says("Finished")
        assert text(found) == expected
        assert found.page.locator("#level").evaluate("meter => meter.value") == 0
        found.says("Start listening", "#go")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (WITHOUT_RELAXED, "WebAssembly with SIMD, in a worker"),
        (WITHOUT_WORKER, "relaxed SIMD, in slices"),
    ],
)
def test_the_microphone_of_browsers_that_have_less(shipped, recording, listening, capsys, script, told):
    expected = transcribed(recording / "said.wav", capsys)
    with listening(shipped, script=f"delete globalThis.AudioWorkletNode; {script}") as found:
        found.says("Ready")
        found.says(told, "#how")
        found.page.click("#go")
        found.says(expected, "#text")
        found.page.click("#go")
        found.says("Finished")
        deprecated = found.complaints.pop()
        assert "ScriptProcessorNode is deprecated" in deprecated


@pytest.mark.parametrize("name", ["said.wav", "high.wav"])
def test_a_recording(shipped, recording, opened, capsys, name):
    """Chosen twice: the second transcript is below the first."""
    expected = transcribed(recording / name, capsys)
    with opened(shipped, offline=True) as found:
        found.says("Ready")
        for times in (1, 2):
            found.page.set_input_files("#file", recording / name)
            found.says("Finished: 2.")
            assert text(found).split("\n\n") == [expected] * times
            found.page.evaluate("document.getElementById('status').textContent = ''")
        found.says("67 KiB", "header")
        found.page.click("#clear")
        assert text(found) == ""
        assert found.page.locator("#hint").is_visible()


def drop(found, content, name):
    """Drop a file on the text."""
    script = """([content, name]) => {
        const data = new DataTransfer();
        data.items.add(new File([Uint8Array.from(content)], name));
        const options = { dataTransfer: data, bubbles: true, cancelable: true };
        const sheet = document.getElementById("sheet");
        return ["dragover", "drop"].map((kind) => sheet.dispatchEvent(new DragEvent(kind, options)));
    }"""
    assert found.page.evaluate(script, [list(content), name]) == [
        False,
        False,
    ]  # the browser leaves them to the page


@pytest.mark.slow
def test_a_recording_that_is_dropped(shipped, recording, opened, capsys):
    with opened(shipped) as found:
        found.says("Ready")
        drop(found, (recording / "said.wav").read_bytes(), "said.wav")
        found.says("Finished")
        assert text(found) == transcribed(recording / "said.wav", capsys)
        drop(found, b"RIFF, but no audio", "wrong.wav")
        found.says("wrong.wav cannot be heard: it is not audio that this browser reads.")
        assert found.page.locator("#go").is_enabled()


def failing(name):
    return f"navigator.mediaDevices.getUserMedia = async () => {{ throw new DOMException('why', '{name}') }}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (failing("NotAllowedError"), "The microphone was refused: allow it to this page in the browser"),
        (failing("NotFoundError"), "There is no microphone: connect one, or choose a recording."),
        (failing("NotReadableError"), "another program may be using it"),
        (failing("SecurityError"), "The browser's settings forbid pages the microphone"),
        (failing("AbortError"), "The microphone does not work here: why."),
        (
            "Object.defineProperty(navigator, 'mediaDevices', { value: undefined })",
            "The browser gives this page no microphone: open it at https:, at localhost or from a file",
        ),
    ],
)
def test_microphones_that_are_not_there(shipped, recording, opened, capsys, script, told):
    """A message says what to do; a recording still works."""
    with opened(shipped, script=f"addEventListener('DOMContentLoaded', () => {{ {script} }})") as found:
        found.says("Ready")
        found.page.click("#go")
        found.says(told)
        found.says("Start listening", "#go")
        found.page.set_input_files("#file", recording / "said.wav")
        found.says("Finished")
        assert text(found) == transcribed(recording / "said.wav", capsys)


OPENED = """addEventListener('DOMContentLoaded', () => {
    const devices = navigator.mediaDevices, ask = devices.getUserMedia.bind(devices);
    devices.getUserMedia = async (what) => (globalThis.stream = await ask(what));
})"""


@pytest.mark.slow
def test_a_microphone_that_is_taken_away(shipped, listening):
    with listening(shipped, script=OPENED) as found:
        found.says("Ready")
        found.page.click("#go")
        found.says("Listening")
        found.page.evaluate("stream.getTracks()[0].dispatchEvent(new Event('ended'))")
        found.says(" s")  # as after Stop
        found.says("Start listening", "#go")
        assert found.page.evaluate("stream.getTracks()[0].readyState") == "ended"


SILENT = """addEventListener('DOMContentLoaded', () => {
    const now = performance.now.bind(performance);
    globalThis.ahead = 0;
    performance.now = () => now() + ahead;
    navigator.mediaDevices.getUserMedia = async () => {
        const context = new AudioContext(), sink = context.createMediaStreamDestination();
        globalThis.sound = () => {
            const tone = context.createOscillator();
            tone.connect(sink);
            tone.start();
        };
        return sink.stream;
    };
})"""


def test_a_microphone_that_gives_silence(shipped, opened):
    """The page reports a microphone that has been silent for seconds, which pass at once here, until it gives
    sound."""
    with opened(shipped, script=SILENT) as found:
        found.says("Ready")
        found.page.click("#go")
        found.says("Listening: speak.")
        found.page.evaluate("ahead = 6000")
        found.says("Listening, but the microphone gives silence: is it muted?")
        found.page.evaluate("sound()")
        found.says("Listening: speak.")
        found.page.click("#go")
        found.says(" s")


def test_stopped_while_the_browser_still_asks(shipped, listening):
    """A microphone that is granted too late is released."""
    slow = OPENED.replace(
        "await ask(what))", "await new Promise((go) => (globalThis.give = go)).then(() => ask(what)))"
    )
    with listening(shipped, script=slow) as found:
        found.says("Ready")
        found.page.click("#go")
        found.says("Asking for the microphone")
        found.page.click("#go")
        found.says("Stopped.")
        found.page.evaluate("give()")
        wait_until(found, "globalThis.stream?.getTracks()[0].readyState === 'ended'")
        assert found.page.locator("#status").text_content() == "Stopped."


RESUMING = """addEventListener('DOMContentLoaded', () => {
    const resume = AudioContext.prototype.resume;
    AudioContext.prototype.resume = async function () {
        await new Promise((go) => (globalThis.go = go));
        return resume.call(this).finally(() => (globalThis.gone = true));
    };
})"""


def test_stopped_while_the_microphone_still_starts(shipped, listening):
    """It is released without a complaint, and works when it is requested again."""
    with listening(shipped, script=f"{OPENED};{RESUMING}") as found:
        found.says("Ready")
        found.page.click("#go")
        wait_until(found, "globalThis.go")
        found.page.click("#go")
        found.says("Stopped.")
        found.page.evaluate("go()")
        wait_until(found, "globalThis.gone")
        wait_until(found, "stream.getTracks()[0].readyState === 'ended'")
        assert found.page.locator("#status").text_content() == "Stopped."
        found.page.evaluate("go = null")
        found.page.click("#go")
        wait_until(found, "globalThis.go")
        found.page.evaluate("go()")
        found.says("Listening")
        found.page.click("#go")
        found.says(" s")


def wait_until(found, condition):
    """Poll repeatedly: the page's policy forbids what wait_for_function does."""
    for _ in range(1200):
        if found.page.evaluate(f"Boolean({condition})"):
            return
        found.page.wait_for_timeout(50)
    raise AssertionError(f"it is never so: {condition}")


@pytest.mark.parametrize("script", [WITHOUT_WASM, WITHOUT_SIMD])
def test_browsers_without_webassembly(shipped, opened, script):
    with opened(shipped, script=script) as found:
        found.says("This does not work here: this browser has no WebAssembly with SIMD")
        assert found.page.locator("#go").is_disabled()
        assert found.page.locator("#file").is_disabled()


def test_a_damaged_model(shipped, opened):
    with opened(shipped, page=damaged(shipped.page, shipped.file)) as found:
        found.says("This does not work here: this is damaged: its checksum differs.")
        assert found.page.locator("#go").is_disabled()


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_stands_beside_the_page(shipped, opened, width, scheme):
    with opened(shipped, viewport={"width": width, "height": 800}, color_scheme=scheme) as found:
        found.says("Ready")
        found.page.evaluate("document.getElementById('text').textContent = 'w'.repeat(500)")
        assert found.page.evaluate("document.documentElement.scrollWidth") == width


def test_everything_has_a_name(shipped, opened):
    with opened(shipped) as found:
        found.says("Ready")
        controls = {"button": ["Start listening", "Choose a recording", "Clear"], "meter": ["Level"]}
        controls |= {"log": ["What was said"], "region": ["Listening", "Speed and memory"]}
        for role, names in controls.items():
            for name in names:
                assert found.page.get_by_role(role, name=name).count() == 1, name
            assert found.page.get_by_role(role).count() == len(names)
        assert found.page.locator("#text").get_attribute("aria-live") == "polite"


def test_keys(shipped, opened):
    """The first button starts and stops, also without a mouse."""
    with opened(
        shipped, script=f"addEventListener('DOMContentLoaded', () => {{ {failing('AbortError')} }})"
    ) as found:
        found.says("Ready")
        stops = []
        for _ in range(4):
            found.page.keyboard.press("Tab")
            stops.append(found.page.evaluate("document.activeElement.id"))
        assert stops == ["go", "file", "clear", "text"]
        found.page.focus("#go")
        found.page.keyboard.press("Enter")
        found.says("The microphone does not work here")


def test_without_javascript(shipped, opened):
    with opened(shipped, java_script_enabled=False) as found:
        found.says("by JavaScript, which this browser does not run", "noscript p")


def test_the_page_is_whole_and_asks_for_nothing(shipped):
    page = shipped.page
    assert len(page.encode()) <= 3_000_000
    assert "{{" not in page
    assert "&lt;b&gt;subject&lt;/b&gt;: 4 layers of width 128" in page
    assert "<b>eight</b>, <b>five</b>" in page
    assert not re.findall(r'(?:src|href)="(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)', page)


def test_what_it_writes_is_told():
    characters = web.page(recognisers.build("two to one"), None, "mine")
    assert "It writes characters, 4 kinds of them." in characters
    many = recognisers.Symbols("word", tuple(f"w{i}" for i in range(100)))
    assert "It knows 100 words" in web.page(recognisers.build(symbols=many), None, "mine")
    one = recognisers.Symbols("word", ("<yes>",))
    assert "It knows the word <b>&lt;yes&gt;</b>" in web.page(recognisers.build(symbols=one), None, "mine")


def test_recognisers_without_a_page():
    for changes, reason in (
        ({"normalize": "utterance"}, "takes the mean of all frames"),
        ({"features": recognisers.GIVEN}, "it hears features that are given"),
    ):
        model = recognisers.build(**changes)
        assert reason in (web.why_not(model, None) or "")
        with pytest.raises(ValueError, match="there is no page of this model: "):
            web.page(model, None, "none")
