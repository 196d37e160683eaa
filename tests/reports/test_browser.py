"""Pages in headless Chromium, on a phone, a tablet and a desk, light and dark."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest

from diffquant.verbs.report import report
from tests.support.earlier_results import FOLDERS, write_recorded
from tests.support.thorough import sampled

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium drives the browser: pip install selenium")
wait = pytest.importorskip("selenium.webdriver.support.wait")

ROOT = Path(__file__).parents[2]
RUNS = {
    "smollm2-logits-500": "report.html",
    "smollm2-search-cache": "search.html",
    "figure8-outliers": "outliers.html",
    "bench": "report.html",
}
SWEEP = "smollm2-logits-500/report.html"

# Without them Chromium asks for hosts of its maker's at every start.
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

# Texts whose colour is nearer to what lies behind them than WCAG 2.2 asks: 4.5 to 1, or 3 to 1 for a legend's marks.
FAINT = """
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => numbers(colour).slice(0, 3).map((c) => c / 255)
  .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, n) => sum + c * [0.2126, 0.7152, 0.0722][n], 0);
const behind = (element) => {
  for (let place = element; place; place = place.parentElement) {
    const colour = getComputedStyle(place).backgroundColor;
    if (numbers(colour)[3] !== 0) return colour;
  }
  return "rgb(255, 255, 255)";
};
const faint = [];
for (const element of document.querySelectorAll("body *:not(script)")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.getClientRects().length) continue;
  const style = getComputedStyle(element);
  // Letters over a coloured cell have a colour of their own.
  if (element.tagName === "text" && element.style.fill) continue;
  const [a, b] = [light(element.tagName === "text" ? style.fill : style.color), light(behind(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < (element.tagName === "B" ? 3 : 4.5)) faint.push(`${element.textContent} ${contrast.toFixed(2)}`);
}
return faint;
"""


def write_pages(folder, runs):
    """Write recorded runs, and a page of each."""
    for name in runs:
        for file in (each for place in FOLDERS for each in place.glob(f"{name}/*.json.xz")):
            write_recorded(f"{name}/{file.stem}", folder / name / file.stem)
    if "bench" in runs:
        shutil.copytree(ROOT / "bench" / "results" / "cpu", folder / "bench")
    report(folder)
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return write_pages(tmp_path_factory.mktemp("runs"), RUNS)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The page of a sweep."""
    return write_pages(tmp_path_factory.mktemp("sweep"), [SWEEP.partition("/")[0]]) / SWEEP


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (program and driver):
        pytest.skip("Chromium is not installed: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for switch in (*SWITCHES.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        yield browser


def show(browser, page, width=1400, scheme="light"):
    phone = width < 500
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    browser.get(page.as_uri())
    # A busy machine may have the page before still, or not all of this one.
    shown = "return [location.href, document.readyState]"
    wait.WebDriverWait(browser, 60).until(lambda browser: browser.execute_script(shown) == [page.as_uri(), "complete"])


def texts(browser, selector):
    shown = f"[...document.querySelectorAll('{selector}')].filter((each) => !each.closest('[hidden]'))"
    return browser.execute_script(f"return {shown}.map((each) => each.textContent)")


@pytest.mark.parametrize(("width", "scheme"), sampled(product([390, 768, 1400], ["light", "dark"]), 6))
def test_no_page_scrolls_sideways_or_has_faint_text(browser, pages, width, scheme):
    for page in ("index.html", *(f"{name}/{file}" for name, file in RUNS.items())):
        show(browser, pages / page, width, scheme)
        scrolled, visible = browser.execute_script(
            "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
        )
        assert scrolled <= visible, page
        assert browser.execute_script(FAINT) == [], page
        is_dark = (
            browser.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        )
        assert is_dark == (scheme == "dark")


def test_the_score_of_every_row_is_in_view_on_a_phone(browser, sweep):
    show(browser, sweep, 390)
    heads = texts(browser, "thead th")
    column = next(number for number, head in enumerate(heads, 1) if head.startswith("acc_norm"))
    ends = browser.execute_script(
        f"return [...document.querySelectorAll('.sheet:has(.baseline) td:nth-child({column})')]"
        ".map((cell) => cell.getBoundingClientRect().right)"
    )
    assert len(ends) == 18
    assert max(ends) <= 390


def test_a_click_on_a_head_sorts_and_what_has_no_number_stands_last(browser, sweep):
    show(browser, sweep)
    head = next(button for button in browser.find_elements("css selector", "th button") if "difference" in button.text)
    column = 1 + [button.text for button in browser.find_elements("css selector", "th button")].index(head.text)
    table = f".sheet:has(.baseline) td:nth-child({column})"
    for falls in (False, True):
        head.click()
        shown = texts(browser, table)
        numbers = [float(text.split()[0]) for text in shown if text != "-"]
        assert numbers == sorted(numbers, reverse=falls)
        assert min(numbers) == -5.8
        assert shown[-2:] == ["-", "-"]


def test_the_filter_leaves_rows_that_hold_every_word(browser, sweep):
    show(browser, sweep)
    field = browser.find_element("css selector", ".filter input")
    field.send_keys("diff-v2 3:")
    rows = texts(browser, ".sheet:has(.baseline) tbody tr")
    assert len(rows) == 2
    assert all("diff-v2" in row and "3:" in row for row in rows)
    assert texts(browser, ".sheet:has(.baseline) output") == ["2 of 18 rows"]


def test_a_point_tells_its_value(browser, sweep):
    show(browser, sweep)
    browser.execute_script("document.querySelector('.tip').focus()")
    tooltip = browser.find_element("id", "tooltip")
    assert tooltip.is_displayed()
    assert tooltip.text == "SmolLM2-135M-Instruct.Q4_1, 8 bits: 0 [-0.781, 0.781]"


def test_links_lead_to_files_that_are_there(browser, pages):
    for page in ("index.html", *(f"{name}/{file}" for name, file in RUNS.items())):
        show(browser, pages / page)
        links = browser.execute_script("return [...document.links].map((link) => decodeURI(link.href))")
        assert links
        assert all(Path(link.removeprefix("file://")).is_file() for link in links), links


def test_nothing_leaves_the_file_and_no_rule_of_the_policy_is_broken(browser, pages):
    browser.get_log("performance")
    browser.get_log("browser")
    for page in ("index.html", *(f"{name}/{file}" for name, file in RUNS.items())):
        show(browser, pages / page)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {e["params"]["request"]["url"].split(":")[0] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert asked <= {"file", "data"}
    assert "file" in asked
    assert browser.get_log("browser") == []
