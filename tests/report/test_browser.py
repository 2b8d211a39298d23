"""The pages in a real browser: no console message, no request to anywhere, sorting, hovering, dark, narrow, printed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kronecell.report import write_report
from kronecell.report.explore import Server, answer
from tests.run_cases import write_mixed, write_run, write_study

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--disable-default-apps", "--disable-extensions",
)  # fmt: skip


LONG = "ucf11-kcp442-with-a-long-name"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with chromedriver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    chrome.set_script_timeout(20)
    chrome.get("about:blank")  # else the browser's own first page may still be loading when a test begins
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_report([write_study(folder / "study", folds=2)], folder / "study.html")
    write_report([write_mixed(folder / "mixed")], folder / "mixed.html")
    write_run(folder / "cut", "ucf11-ori", "Ori", stopped="time")
    write_run(folder / "cut", "ucf11-tt", "TT")
    write_run(folder / "cut", "ucf11-tt", "TT", fold=1, stopped="time")
    write_run(folder / "cut", "ucf11-ht", "HT", state="interrupted")
    write_run(folder / "cut", LONG, "KCP(4,4,2)")
    write_report([folder / "cut"], folder / "cut.html")
    return {name: folder / f"{name}.html" for name in ("study", "mixed", "cut")}


def visit(browser: Any, url: str, width: int = 1200, dark: bool = False) -> None:
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # what other pages left behind
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": [scheme]})
    browser.get(url)


def requests(browser: Any) -> list[str]:
    """Addresses of all requests since the last visit, but for those within the browser itself."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [address for address in sent if not address.startswith("chrome:")]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {what}")


def texts(browser: Any, selector: str) -> list[str]:
    return list(
        browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", selector)
    )


def visible(browser: Any, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements("css selector", selector) if element.is_displayed()]


CONTRAST = """
const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
const light = (c) => c.slice(0, 3).map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const back = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
  if (c.length === 3 || c[3] > 0.5) return c; } return [255, 255, 255]; };
let worst = [99, ""];
const words = "h1,h2,h3,p,td,th,summary,li,label,.notice,.pick,.tick,footer,.name,.count,.size";
for (const e of document.querySelectorAll(words)) {
  if (!e.textContent.trim() || !e.getClientRects().length) continue;
  const s = getComputedStyle(e), ink = parse(e instanceof SVGElement ? s.fill : s.color);
  let ground = back(e instanceof SVGElement ? e.closest("svg").parentElement : e);
  if (e.classList.contains("name") || e.classList.contains("count")) {
    const box = e.parentElement.querySelector("rect"); if (box) ground = parse(getComputedStyle(box).fill);
  }
  const [a, b] = [light(ink), light(ground)].sort((p, q) => q - p), ratio = (a + 0.05) / (b + 0.05);
  if (ratio < worst[0]) worst = [ratio, e.tagName + " " + e.textContent.slice(0, 40)];
}
return worst;
"""


# What is wider than its box: a reader who does not scroll sideways misses it.
CUT = """
return [...document.querySelectorAll("body *")].filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth + 1
  && getComputedStyle(e).overflowX !== "visible").map((e) => e.className + ": " + e.textContent.slice(0, 40));
"""


@pytest.mark.parametrize("name", ["study", "mixed", "cut"])
@pytest.mark.parametrize("width", [1280, 1110, 990, 620, 390, 340])
def test_nothing_is_hidden_beside_the_screen(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    visit(browser, pages[name].as_uri(), width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.execute_script(CUT) == []


@pytest.mark.parametrize("name", ["study", "mixed"])
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, False), (390, True)])
def test_the_report_opens_quietly_and_fits(
    browser: Any, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    url = pages[name].as_uri()
    visit(browser, url, width, dark)
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.get_log("browser") == []
    assert [address for address in requests(browser) if not address.startswith("data:")] == [url]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    ratio, where = browser.execute_script(CONTRAST)
    assert ratio >= 4.5, where  # the usual bound for readable text
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
    assert len(browser.find_elements("css selector", ".chart svg")) == 3


def test_names_stay_text(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["mixed"].as_uri())
    assert browser.execute_script("return window.evil") is None
    assert any(words.startswith("<script>window.evil=1</script>") for words in texts(browser, "td"))
    assert any("<script>" in words for words in texts(browser, ".pick"))


def test_the_table_sorts_both_ways_by_number(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["study"].as_uri())
    heads = texts(browser, "table.main.sortable th")
    column = next(i for i, words in enumerate(heads) if words.replace("\n", " ").startswith("parameters of W"))
    button = browser.find_elements("css selector", "table.main.sortable th button")[column]

    def values() -> list[int]:
        cells = texts(browser, f"table.main.sortable tbody td:nth-child({column + 1})")
        return [int(cell.replace(",", "")) for cell in cells]

    browser.execute_script("arguments[0].click()", button)
    first = values()
    assert first == sorted(first) and len(set(first)) > 3
    browser.execute_script("arguments[0].click()", button)
    assert values() == sorted(first, reverse=True)


def hover(browser: Any, selector: str, index: int = 0) -> str:
    """Move the mouse over the middle of an element and return the text of its chart's tip."""
    element = browser.find_elements("css selector", selector)[index]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    webdriver.ActionChains(browser).move_to_element(element).perform()
    script = "return [...document.querySelectorAll('.tip')].filter(t => t.style.visibility === 'visible')[0]?.innerText"
    return str(wait_for(lambda: browser.execute_script(script), "a tip"))


def test_hovering_shows_values(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["study"].as_uri())
    tip = hover(browser, "circle.point")
    assert "accuracy" in tip and "95% interval" in tip and "parameters of W" in tip
    tip = hover(browser, "[data-chart=curves] svg")
    assert "epoch" in tip and tip.count("%") >= 7 and "2 runs" in tip
    bars = browser.find_elements("css selector", "rect.bar")
    widest = max(range(len(bars)), key=lambda i: float(bars[i].get_attribute("width")))
    assert "W: 58,982,400 of 59,249,419 parameters, 99.55%" in hover(browser, "rect.bar", widest)


def test_axes_and_legend_react(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["study"].as_uri())

    def points() -> list[str]:
        return [e.get_attribute("cx") for e in browser.find_elements("css selector", "circle.point")]

    before = points()
    browser.execute_script("document.getElementById('logx').click()")
    assert points() != before
    browser.execute_script("document.querySelector('.pick').click()")
    assert len(points()) == len(before) - 1
    change = "const s = document.getElementById('cost'); s.value = 'latency_ms'; s.dispatchEvent(new Event('change'))"
    browser.execute_script(change)
    words = [e.text for e in browser.find_elements("css selector", "[data-chart=scatter] text")]
    assert "latency of a clip, ms, measured at batch 1, 2 threads" in words
    assert browser.get_log("browser") == []


def test_stopped_runs_are_hollow_and_named_in_both_charts(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["cut"].as_uri())
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    fills = "return [...document.querySelectorAll('circle.point')].map(e => [e.ariaLabel, getComputedStyle(e).fill])"
    points = browser.execute_script(fills)
    assert len(points) == 3 and all((fill == paper) == ("(stopped)" in label) for label, fill in points)
    words = [e.text for e in browser.find_elements("css selector", "[data-chart=scatter] text")]
    assert {"ucf11-dense (stopped)", "ucf11-tt (stopped)", LONG} <= {*words}
    assert not visible(browser, "[data-chart=scatter] + .legend button")  # where every point has its name
    names = texts(browser, "[data-chart=curves] + .legend button")
    assert names == ["ucf11-ht", LONG, "ucf11-dense (stopped)", "ucf11-tt (stopped)"]


@pytest.mark.parametrize("width", [1200, 300])
def test_every_point_has_its_name_in_the_chart_or_in_its_legend(
    browser: Any, pages: dict[str, Path], width: int
) -> None:
    visit(browser, pages["cut"].as_uri(), width)
    labels = {e.get_attribute("aria-label").split(":")[0] for e in browser.find_elements("css selector", ".point")}
    inside = {e.text for e in browser.find_elements("css selector", "[data-chart=scatter] text")} & labels
    below = {*visible(browser, "[data-chart=scatter] + .legend button")}
    assert (inside, below) == ((labels, set()) if width == 1200 else (labels - {LONG}, labels))


OUTSIDE = """
return [...document.querySelectorAll(".chart svg text")].filter((e) => {
  const a = e.getBoundingClientRect(), b = e.ownerSVGElement.getBoundingClientRect();
  return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
}).map((e) => e.textContent);
"""


@pytest.mark.parametrize("name", ["mixed", "cut"])
@pytest.mark.parametrize("width", [1200, 390, 320])
def test_every_word_of_a_chart_is_inside_it(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    visit(browser, pages[name].as_uri(), width)
    choose = "const s = document.getElementById('cost'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    for cost in ("params_w", "params_model", "macs_executed", "macs_paper", "latency_ms"):
        browser.execute_script(choose, cost)
        assert browser.execute_script(OUTSIDE) == []


# Names in the scatter that stand nearer to another point than to their own.
ASTRAY = """
const points = [...document.querySelectorAll("circle.point")].map((e) => [e.ariaLabel.split(":")[0], +e.getAttribute("cx"), +e.getAttribute("cy")]);
return [...document.querySelectorAll("[data-chart=scatter] text")].filter((e) => points.some((p) => p[0] === e.textContent)).map((e) => {
  const b = e.getBBox(), away = (p) => Math.hypot(Math.max(b.x - p[1], 0, p[1] - b.x - b.width), Math.max(b.y - p[2], 0, p[2] - b.y - b.height));
  return [e.textContent, points.reduce((p, q) => (away(q) < away(p) ? q : p))[0]];
}).filter(([name, nearest]) => name !== nearest);
"""  # noqa: E501


@pytest.mark.parametrize("width", [1200, 390])
def test_no_name_stands_beside_another_point(browser: Any, tmp_path: Path, width: int) -> None:
    for label in ("TT", "BT", "TR", "HT", "KCP(4,4,2)", "KCP(4,2,2)"):
        path = write_run(tmp_path, f"ucf11-{label[:3].lower()}{len(label)}{label[-4:-1]}", label) / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"top1_last": 0.8}))
    write_report([tmp_path], tmp_path / "report.html")
    visit(browser, (tmp_path / "report.html").as_uri(), width)
    assert browser.execute_script(ASTRAY) == []


def test_a_mean_of_fewer_runs_is_a_thin_line(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["cut"].as_uri())
    script = "return [...document.querySelectorAll('[data-chart=curves] polyline')].map(e => [e.getAttribute('stroke'),"
    lines = browser.execute_script(script + "e.getAttribute('stroke-width'), e.points.length])")
    assert sorted((width, points) for _, width, points in lines) == [("1", 20), *[("2", 20)] * 3, ("2", 40)]


def test_the_report_prints_with_everything_open(browser: Any, pages: dict[str, Path]) -> None:
    visit(browser, pages["study"].as_uri(), dark=True)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [dark]})
    page = "return [getComputedStyle(document.body).backgroundColor, document.documentElement.scrollWidth]"
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1000, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    )
    background, width = browser.execute_script(page)
    assert background == "rgb(255, 255, 255)" and width <= 1000  # ink on paper, nothing beyond its edge
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"]
    assert len(pdf) > 50_000
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    heights = (
        "return [...document.querySelectorAll('.chart svg')].slice(0, 2).map(e => e.getBoundingClientRect().height)"
    )
    assert sum(browser.execute_script(heights)) < 500  # two charts on a page 700 high, with what is said of them
    marks = "return [...document.querySelectorAll('.swatch')].map(e => getComputedStyle(e).printColorAdjust)"
    assert {*browser.execute_script(marks)} == {"exact"}  # browsers print no backgrounds unless told
    browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert all(browser.execute_script("return [...document.querySelectorAll('details')].map(d => d.open)"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def type_into(browser: Any, name: str, text: str) -> None:
    browser.execute_script(
        "const f = document.getElementById('form')[arguments[0]]; f.value = arguments[1];"
        "f.dispatchEvent(new Event('input', {bubbles: true}))", name, text,
    )  # fmt: skip


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_explore_shows_the_librarys_numbers_as_one_types(browser: Any, server: Server, width: int, dark: bool) -> None:
    visit(browser, server.url, width, dark)

    def params() -> str:
        return str(browser.execute_script("return document.getElementById('params').dataset.value || ''"))

    wait_for(params, "the first answer")
    fields = {"kind": "kcp", "M": "57600", "N": "256", "K": "4", "CA": "4", "CB": "2", "gates": "4", "rows": "96"}
    for change in ({}, {"K": "2"}, {"kind": "tt", "r": "3"}, {"M": "4096", "N": "64"}, {"shared": "paper"}):
        fields |= change
        for name, text in change.items():
            type_into(browser, name, text)
        expected = answer(fields)["count"]
        wait_for(lambda e=expected: params() == str(e["params"]), f"{expected['params']} after {change}")
        shown = texts(browser, "#orders tbody tr")
        assert [line.split()[0] for line in shown] == [*expected["orders"]]
        for line, order in zip(shown, expected["orders"].values(), strict=True):
            figures = [int(cell.replace(",", "")) for cell in line.split()[1:]]
            assert figures == [order["macs"], order["hoisted_macs"], order["total_macs"], order["peak"]]
        assert expected["format"] in texts(browser, "#python")[0]
    wait_for(lambda: "ms" in texts(browser, "#measured")[0], "a measured latency")
    assert browser.find_elements("css selector", "#drawing svg")
    assert "tensor train" in texts(browser, "select[name=kind]")[0] and "W = " in texts(browser, "#equation")[0]
    assert browser.execute_script(INSIDE) == [True, True]
    assert browser.execute_script(CUT) == []
    assert [line.split() for line in texts(browser, "#steps tbody tr")] == [
        [f"{cell:,}" if isinstance(cell, int) else word for cell in row for word in str(cell).split()]
        for row in answer(fields)["steps"]
    ]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    ratio, where = browser.execute_script(CONTRAST)
    assert ratio >= 4.5, where
    assert all(address.startswith((server.url, "data:")) for address in requests(browser))
    assert browser.get_log("browser") == []


# Both buttons for copying lie on what they copy.
INSIDE = """
return [...document.querySelectorAll("button.copy")].map((button) => {
  const a = button.getBoundingClientRect(), b = button.nextElementSibling.getBoundingClientRect();
  return a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
});
"""


def test_explore_says_what_is_wrong_and_recovers(browser: Any, server: Server) -> None:
    visit(browser, server.url)
    wait_for(lambda: texts(browser, "#params")[0], "the first answer")
    type_into(browser, "M", "99999999999999999999")
    wait_for(lambda: "must be from 1 to" in texts(browser, "#error")[0], "the message")
    type_into(browser, "M", "1024")
    wait_for(lambda: texts(browser, "#error")[0] == "", "the message to go")


@pytest.mark.slow
def test_the_page_of_the_demo(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("av")
    command = [sys.executable, "-m", "kronecell", "demo", "--quick", "--out", str(tmp_path / "demo")]
    subprocess.run(command, check=True, capture_output=True)
    url = (tmp_path / "demo" / "report.html").as_uri()
    for width, dark in ((1200, False), (390, True)):
        visit(browser, url, width, dark)
        assert browser.get_log("browser") == []
        assert [address for address in requests(browser) if not address.startswith("data:")] == [url]
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(CONTRAST)[0] >= 4.5
        assert len(texts(browser, "table.main.sortable tbody tr")) == 6
    assert "accuracy" in hover(browser, "circle.point")
