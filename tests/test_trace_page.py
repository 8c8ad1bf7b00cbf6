"""The page of `python -m llama trace --html`, in a real headless browser (Debian's chromium and chromium-driver)."""

import base64
import dataclasses
import json
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama.cli import trace as tracing

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ["headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
FLAGS += ["disable-component-update", "disable-sync", "disable-dev-shm-usage"]
PROMPT = "Hello <b>world</b> & </script><img src=x onerror=\"document.title='owned'\"> \u4f60"
RIGHT, HOME, END, TAB = "\ue014", "\ue011", "\ue010", "\ue004"

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium with its driver: apt-get install --no-install-recommends chromium chromium-driver",
)


class Browser:
    """chromedriver's plain HTTP protocol (W3C WebDriver), as far as these tests need it."""

    def __init__(self, profile: Path) -> None:
        self.process = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = next(
            found[1] for line in self.process.stdout if (found := re.search(r"successfully on port (\d+)", line))
        )
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.url = f"http://127.0.0.1:{port}/session"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self.url += "/" + self.call("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self.process.terminate()
            raise

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self.opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def run(self, script: str, *args: Any) -> Any:
        return self.call("/execute/sync", {"script": script, "args": args})

    def cdp(self, command: str, **params: Any) -> Any:
        return self.call("/goog/cdp/execute", {"cmd": command, "params": params})

    def press(self, *keys: str) -> None:
        """Keys to whatever has the focus, as a person's keyboard sends them."""
        moves = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": moves}]})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def table(self, selector: str) -> list[list[str]]:
        rows = "return [...document.querySelector(arguments[0]).tBodies[0].rows].map(r => [...r.cells].map(c => c.innerText))"
        return self.run(rows, selector)  # type: ignore[no-any-return]

    def view(self, width: int, height: int, scheme: str = "light") -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path, whole: bool = True) -> None:
        shot = self.cdp("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.call("/se/log", {"type": "browser"})]

    def close(self) -> None:
        try:
            self.call("", method="DELETE")
        finally:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[tracing.Trace, Path]:
    """A trace whose prompt would love to be markup, and its page, written by the command."""
    path, kept = tmp_path_factory.mktemp("page") / "trace.html", []
    write = tracing.write_page

    def keep(found: tracing.Trace, where: str) -> None:
        kept.append(found)
        write(found, where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "write_page", keep)
        tracing.trace(PROMPT, tokens=4, html=str(path), layer=2, temperature=0.8, device="cpu")
    return kept[0], path


@pytest.fixture(scope="module")
def browser(made: tuple[tracing.Trace, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    try:
        opened.view(1280, 800)
        opened.call("/url", {"url": made[1].as_uri()})
        opened.run("document.querySelector('summary').focus()")
        opened.press("\ue007")  # Enter opens the table of numbers
        yield opened
    finally:
        opened.close()


def test_the_page_holds_the_trace_and_loads_nothing(made: tuple[tracing.Trace, Path]) -> None:
    trace, path = made
    page = path.read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None and json.loads(data[1]) == json.loads(json.dumps(dataclasses.asdict(trace)))
    markup = page.replace(data[1], "")
    assert not re.search(
        r"https?:|//\w|\bsrc=|\bhref=|url\(|@import|innerHTML|\bfetch\b", re.sub(r"\s// .*", "", markup)
    )
    assert "default-src 'none'" in markup and "{{" not in page


@needs_browser
def test_the_slider_by_keyboard_and_the_values_read_back(browser: Browser, made: tuple[tracing.Trace, Path]) -> None:
    trace = made[0]
    browser.run("document.activeElement.blur(); document.getElementById('step').focus()")
    browser.press(HOME)
    for step in trace.steps:
        slider = browser.run(
            "const s = document.getElementById('step'); return [s.value, s.ariaValueText ?? s.getAttribute('aria-valuetext')]"
        )
        assert slider[0] == str(step.number) and f"\u201c{step.piece}\u201d" in slider[1]
        assert slider[1].startswith(f"Step {step.number} of 4: {step.phase}, ")
        assert browser.run("return document.getElementById('text').textContent") == step.text[-150:]
        shapes = [[name, shape, note] for name, shape, note in step.shapes]
        assert browser.table("#shapes") == shapes
        wanted = [
            [option.piece.replace(" ", "\u2423"), str(option.id)]
            + [f"{100 * share:.1f} %" for share in (option.raw, option.tempered, option.final)]
            for option in step.candidates
        ]
        found = browser.table("#candidates")
        assert [[name.split("\n")[0].strip(), *rest] for name, *rest in found] == wanted
        states = ["drawn" if option.drawn else "kept" if option.kept else "out" for option in step.candidates]
        assert [row[0].split("\n")[-1].strip() for row in found] == states
        widths = browser.run(
            "return [...document.querySelectorAll('#candidates .fill i')].map(i => parseFloat(i.style.width))"
        )
        shares = [share for option in step.candidates for share in (option.raw, option.tempered, option.final)]
        assert widths == pytest.approx([100 * share for share in shares], abs=0.01)
        assert f"{step.uniform:.4f} lies in {step.low:.4f} to {step.high:.4f}" in browser.text("#draw")
        slots = browser.run(
            "return [...document.querySelectorAll('#slots li')].map(slot => slot.className.split(' ')[0])"
        )
        last = trace.steps[-1].cur_pos
        wanted_slots = (
            ["old"] * step.prev_pos
            + ["new"] * (step.cur_pos - step.prev_pos)
            + ["next"]
            + ["free"] * (last - step.cur_pos)
        )
        assert slots == wanted_slots
        weights = browser.table("#weights")
        assert len(weights) == step.cur_pos
        for j, (_, may_look, *shares) in enumerate(weights):
            expected = [100 * head.weights[-1][j] for head in step.heads]
            assert may_look == "yes" and [float(share[:-2]) for share in shares] == pytest.approx(expected, abs=0.051)
        browser.press(RIGHT)
    assert browser.run("return document.getElementById('step').value") == "4"
    assert browser.complaints() == []


@needs_browser
def test_the_heat_maps_are_painted_from_the_trace(browser: Browser, made: tuple[tracing.Trace, Path]) -> None:
    """Read the pixels: which cells are painted at all, and how strongly."""
    trace = made[0]
    pixels = """show(arguments[0]); shown = arguments[1]; drawMaps();
        const canvas = document.getElementById("big"), { left, top, cell } = canvas.place, size = trace.steps.at(-1).cur_pos;
        const copy = new OffscreenCanvas(canvas.width, canvas.height), at = k => Math.floor((k + .5) * cell);
        const context = copy.getContext("2d", { willReadFrequently: true });
        context.drawImage(canvas, 0, 0);
        return [...Array(size).keys()].map(i => [...Array(size).keys()].map(j =>
            [...context.getImageData(left + at(j), top + at(i), 1, 1).data]));"""
    for number in (0, 2):
        fed, size = trace.steps[number].cur_pos, trace.steps[-1].cur_pos
        mask = browser.run(pixels, number, 0)
        painted = [[cell[3] > 0 for cell in row] for row in mask]
        assert painted == [[i < fed and j <= i for j in range(size)] for i in range(size)]
        head = browser.run(pixels, number, 2)
        rows = [row for step in trace.steps[: number + 1] for row in step.heads[1].weights]
        full, empty = mask[0][0][0], 238  # the red of --cold and of --none
        for i, row in enumerate(rows):
            for j, share in enumerate(row[: i + 1]):
                assert abs(head[i][j][0] - (empty + (full - empty) * share**0.5)) <= 3, (i, j, share)
    assert browser.complaints() == []


@needs_browser
def test_buttons_and_heads_by_keyboard(browser: Browser, made: tuple[tracing.Trace, Path]) -> None:
    trace = made[0]
    browser.run("show(0); document.getElementById('back').disabled || fail; document.getElementById('step').focus()")
    browser.press(TAB, " ", " ")  # the step before is disabled, so Tab leads to the next one
    assert browser.run("return document.getElementById('step').value") == "3"
    browser.press(" ")
    assert browser.run("return document.getElementById('forth').disabled")
    browser.run(
        "document.querySelector('[name=map]').focus(); shown = 0; drawMaps(); document.querySelector('[name=map]').checked = true"
    )
    assert browser.run("return document.getElementById('big').ariaLabel").startswith("No mask")
    browser.press(RIGHT, RIGHT)
    step = trace.steps[-1]
    weights = step.heads[1].weights[-1]
    best = max(range(step.cur_pos), key=lambda j: weights[j])
    label = browser.run("return document.getElementById('big').ariaLabel")
    assert label.startswith("Layer 2, head 1: ") and f"({best}) {100 * weights[best]:.1f} %" in label
    assert browser.text("#reading") == label


@needs_browser
def test_every_control_and_picture_has_a_name(browser: Browser) -> None:
    found = browser.call(
        "/elements", {"using": "css selector", "value": "canvas, input, button, table, section, [role]"}
    )
    assert len(found) > 15
    for element in found:
        place = "/element/" + next(iter(element.values()))
        role, name = browser.call(place + "/computedrole"), browser.call(place + "/computedlabel")
        assert name.strip(), (role, browser.run("return arguments[0].outerHTML.slice(0, 200)", element))
    slider = browser.call("/element", {"using": "css selector", "value": "#step"})
    assert browser.call("/element/" + next(iter(slider.values())) + "/computedrole") == "slider"


@needs_browser
def test_text_is_never_markup(browser: Browser, made: tuple[tracing.Trace, Path]) -> None:
    assert browser.run("return document.querySelectorAll('img, header b, main b:not(#line b)').length") == 0
    assert browser.run("return document.title") == "One generation, step by step"
    assert browser.text("#prompt") == f"\u201c{PROMPT}\u201d"
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (320, 568)])
def test_it_fits_and_can_be_read(browser: Browser, width: int, height: int, scheme: str) -> None:
    browser.view(width, height, scheme)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    cut = "const t = document.querySelector(arguments[0]).parentElement; return t.scrollWidth - t.clientWidth"
    assert browser.run(cut, "#candidates") <= 0 and browser.run(cut, "#shapes") <= 0
    assert browser.run("return document.getElementById('forth').getBoundingClientRect().height") >= 44
    colours = dict(
        browser.run(
            "const s = getComputedStyle(document.documentElement);"
            "return ['page', 'card', 'ink', 'soft', 'accent', 'mark', 'none'].map(n => [n, s.getPropertyValue('--' + n).trim()])"
        )
    )
    assert (luminance(colours["page"]) > 0.5) == (scheme == "light")
    for pair in (
        "ink page",
        "ink card",
        "ink mark",
        "soft page",
        "soft card",
        "soft none",
        "soft mark",
        "accent card",
        "accent mark",
    ):
        light, dark = sorted((luminance(colours[name]) for name in pair.split()), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, pair  # WCAG 2.1, 1.4.3


def luminance(colour: str) -> float:
    """Of #rgb or #rrggbb, as WCAG 2.1 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    red, green, blue = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
