"""The demo page: what the server sends, and the page in Debian's Chromium against ``ramp``, heard sample by sample.

Without Chromium (``apt-get install chromium``) the tests in the browser are skipped; CI installs it.
"""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from api_fakes import FULL, SPEECH_ONLY, TEXT_ONLY, FakeDispatcher, app_of, audio, client_of, text, wav
from api_fakes import serving as served

from omni_ray.config.ingress import IngressConfig
from omni_ray.models.ramp import oracle
from tests.conftest import Served, Serving
from tests.monitoring.test_files import CONFIG

CHROMIUM = shutil.which("chromium")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

TAP = """
const module = URL.createObjectURL(new Blob([`
  registerProcessor("tap", class extends AudioWorkletProcessor {
    process([input]) { if (input.length) this.port.postMessage(input[0].slice()); return true; }
  })`], { type: "text/javascript" }));
window.played = [];
window.clocks = [];
const connect = AudioNode.prototype.connect, resume = AudioContext.prototype.resume;
AudioNode.prototype.connect = function (to, ...more) {
  if (to === this.context.destination && this.context.tap) connect.call(this, this.context.tap);
  else if (to === this.context.destination) this.context.early = this;
  return connect.call(this, to, ...more);
};
AudioContext.prototype.resume = async function () {
  if (!this.tap) {
    await this.audioWorklet.addModule(module);
    this.tap = new AudioWorkletNode(this, "tap", { numberOfInputs: 1, numberOfOutputs: 0, channelCount: 1 });
    this.tap.port.onmessage = (event) => { window.played.push(...event.data); window.clocks.push(this.currentTime); };
    if (this.early) connect.call(this.early, this.tap);
  }
  return resume.call(this);
};
"""
"""Records what reaches the loudspeaker, in the audio thread. Needs ``bypass_csp``; other tests keep the policy on."""


TONE_HZ = 440


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium with a microphone that hears a tone, without end."""
    from playwright.sync_api import sync_playwright

    heard = tmp_path_factory.mktemp("microphone") / "tone.wav"
    heard.write_bytes(wav(0.5 * np.sin(2 * np.pi * TONE_HZ * np.arange(48_000) / 48_000), 48_000))
    flags = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*flags, f"--use-file-for-fake-audio-capture={heard}"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def app(serving: Serving) -> Served:
    """``ramp``, its sound made in real time's fifth, so that it streams while it plays."""
    return serving("ramp", CONFIG)


@pytest.fixture
def page(browser: Any, app: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; any error on its console fails the test."""
    options = {"viewport": {"width": 1100, "height": 900}, **getattr(request, "param", {})}
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    opened, complaints = context.new_page(), []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    if options.get("bypass_csp"):
        opened.add_init_script(TAP)
    opened.goto(f"{app.url}/")
    yield opened
    context.close()
    assert complaints == []


def ask(page: Any, words: str) -> None:
    page.get_by_label("Your question").fill(words)
    page.get_by_role("button", name="Ask").click()


def status(page: Any, words: str) -> None:
    page.get_by_role("status").filter(has_text=words).wait_for()


async def test_what_the_server_sends() -> None:
    """One answer with everything in it; its policy lets this script and style run, and nothing else."""
    async with client_of(FakeDispatcher()) as client:
        response = await client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    html = response.text
    assert not re.search(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:,)[a-z]*:?//""", html)
    assert not re.search(r"\son[a-z]+=|\sstyle=|javascript:|eval\(|innerHTML", html)
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    for tag in ("script", "style"):
        (source,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"


@pytest.mark.parametrize(
    ("pipeline", "keys", "expected"),
    [
        (FULL, (), {"text": "thinker", "audio": "talker", "hears": True, "keyed": False}),
        (FULL, ("k",), {"text": "thinker", "audio": "talker", "hears": True, "keyed": True}),
        (TEXT_ONLY, (), {"text": "thinker", "audio": None, "hears": False, "keyed": False}),
    ],
)
async def test_the_page_knows_what_the_model_can(pipeline: Any, keys: tuple[str, ...], expected: Any) -> None:
    """Said in the page, in a block that no name can break out of; without a key, which only ``/v1`` asks for."""
    fake = FakeDispatcher(pipeline.model_copy(update={"description": "</script><script>alert(1)"}))
    async with client_of(fake, *keys) as client:
        html = (await client.get("/")).text
    (block,) = re.findall(r'<script type="application/json" id="server">(.*?)</script>', html, re.DOTALL)
    assert json.loads(block) == {"model": "m", "description": "</script><script>alert(1)", **expected}


async def test_no_page() -> None:
    """Turned off, or without a chat: 404, and everything else as before."""
    async with client_of(FakeDispatcher(config=IngressConfig(demo_page=False))) as client:
        assert (await client.get("/")).status_code == 404
        assert (await client.get("/health")).status_code == 200
    async with client_of(FakeDispatcher(SPEECH_ONLY)) as client:
        assert "no demo page" in (await client.get("/")).json()["error"]["message"]
    assert "/" not in app_of(FakeDispatcher()).openapi()["paths"]


@in_browser
@pytest.mark.parametrize("page", [{"bypass_csp": True}], indirect=True)
def test_every_sample_is_played_once_and_in_order(page: Any) -> None:
    """What reaches the loudspeaker is what the oracle says, without a gap between pieces; the audio clock runs."""
    words = "one two three four five six"
    ask(page, words)
    status(page, "Done")
    played = np.round(np.asarray(page.evaluate("window.played")) * 32768).astype("<i2")
    wanted = np.frombuffer(oracle.pcm(words), "<i2")
    assert wanted[0]
    assert wanted[-1]
    heard = played[np.flatnonzero(played)[0] : np.flatnonzero(played)[-1] + 1]
    assert heard.tobytes() == wanted.tobytes()
    clocks = page.evaluate("window.clocks")
    assert clocks == sorted(clocks)
    assert clocks[-1] - clocks[0] > len(wanted) / 24_000 - 0.1
    assert page.locator("#answer").inner_text() == words
    summary = page.locator("#summary").inner_text()
    assert f"{len(wanted) / 24_000:.2f} s of speech, no gap." in summary


@in_browser
def test_asks_shows_and_stops(page: Any) -> None:
    """With the policy on: keys send, the timeline fills in order, Stop ends the sound, an error is said in words."""
    question = page.get_by_label("Your question")
    question.fill("a b c")
    question.press("Enter")
    status(page, "Done")
    times = [float(page.locator(f"#time-{lane}").inner_text().split()[1]) for lane in ("wait", "text", "sound", "play")]
    assert times == sorted(times)
    assert all(page.locator(f"#bar-{lane}").is_visible() for lane in ("wait", "text", "sound", "play"))
    length = len(oracle.pcm("a b c")) / 48_000
    assert f"{length:.2f} s of speech" in page.get_by_role("img").get_attribute("aria-label")
    assert page.get_by_label("Voice").input_value() == "a"
    ask(page, " ".join(["long"] * 300))
    status(page, "Speaking")
    page.get_by_role("button", name="Stop").click()
    status(page, "Stopped")
    assert page.get_by_role("button", name="Ask").is_enabled()
    page.get_by_label("Your question").fill(" ")
    page.get_by_role("button", name="Ask").click()
    status(page, "Write a question first")


@in_browser
def test_a_question_need_not_wait_for_the_voices(browser: Any) -> None:
    """A slow server got a question without a voice's name, and refused it."""
    with served(FakeDispatcher(FULL, [*text("hello"), *audio(2400)])) as url:
        context = browser.new_context()
        page = context.new_page()
        page.route("**/v1/audio/voices", lambda route: None)  # it never comes
        page.goto(f"{url}/")
        ask(page, "hi")
        status(page, "Done")
        assert page.locator("#answer").inner_text() == "hello"
        context.close()


@in_browser
def test_what_the_microphone_hears_is_the_question(browser: Any) -> None:
    """Speak, then send: the server gets a 16 kHz mono clip with that tone in it, and answers."""
    fake = FakeDispatcher(script=[*text("a tone"), *audio(2400)])
    with served(fake) as url:
        context = browser.new_context(permissions=["microphone"])
        page = context.new_page()
        page.goto(f"{url}/")
        speak = page.get_by_role("button", name="Speak")
        speak.click()
        status(page, "Listening")
        assert page.locator("#speak").get_attribute("aria-pressed") == "true"
        page.wait_for_timeout(1500)
        page.get_by_role("button", name="Send what I said").click()
        status(page, "Done")
        context.close()
    ((clip,),) = fake.clips
    assert clip.sample_rate == 16_000
    assert 1 < len(clip.samples) / 16_000 < 10
    middle = clip.samples[len(clip.samples) // 4 :][: len(clip.samples) // 2]
    loudest = np.abs(np.fft.rfft(middle)).argmax() * 16_000 / len(middle)
    assert loudest == pytest.approx(TONE_HZ, abs=5)


@in_browser
@pytest.mark.parametrize("page", [{"viewport": {"width": 320, "height": 640}, "color_scheme": "dark"}], indirect=True)
def test_fits_a_phone_and_keyboard(page: Any) -> None:
    """No sideways scrolling at 320 px; every control has a name, is reached by Tab and large enough for a finger."""
    page.get_by_label("Voice").wait_for()  # it appears when the voices have been fetched
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    controls = page.locator("button:visible, select:visible, textarea:visible, input:visible")
    for index in range(controls.count()):
        assert controls.nth(index).bounding_box()["height"] >= 38
    reached = set()
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"question", "voice", "send"} <= reached
    for name in ("--ink", "--soft", "--accent", "--bad"):
        assert contrast(page, name, "--panel") >= 4.5, name


@in_browser
def test_a_server_with_keys_asks_for_one(browser: Any) -> None:
    """The refused question names what is missing; with the key it is answered, and nothing remembers it."""
    with served(FakeDispatcher(TEXT_ONLY, text("hello")), "secret") as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{url}/")
        assert not page.locator("#sound-section").is_visible()
        ask(page, "hi")
        status(page, "an API key is required")
        page.get_by_label("API key").fill("secret")
        ask(page, "hi")
        status(page, "Done")
        assert page.locator("#answer").inner_text() == "hello"
        assert context.storage_state() == {"cookies": [], "origins": []}
        context.close()


def contrast(page: Any, front: str, back: str) -> float:
    """WCAG's ratio of two of the page's colours."""

    def luminance(name: str) -> float:
        value = page.evaluate("(n) => getComputedStyle(document.documentElement).getPropertyValue(n).trim()", name)
        channels = [int(value[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(front), luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_response_without_a_browser(app: Served) -> None:
    """Through real Serve, below a route prefix."""
    response = httpx.get(f"{app.url}/")
    assert response.status_code == 200
    assert '"model": "ramp"' in response.text
