"""The page of a preflight in headless Chromium: what fits."""

import html
import json
import re
import shutil
import subprocess

import pytest

from fp8.lab.preflight.findings import Findings
from fp8.lab.preflight.page import page
from tests.fp8.lab.preflight.example_findings import interrupted, rich

pytest.importorskip("jinja2")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

#: A document with the page in a frame of a given width; it writes what it sees of it as JSON.
FRAME = """
<!DOCTYPE html><body style="margin: 0">
<iframe style="border: 0; width: {width}px; height: 800px" srcdoc="{page}"></iframe>
<pre id="seen"></pre>
<script>
const frame = document.querySelector("iframe");
frame.addEventListener("load", () => {{
  const seen = {{}}, page = frame.contentDocument, view = frame.contentWindow;
  try {{ {look} }} catch (error) {{ seen.error = String(error); }}
  document.getElementById("seen").textContent = JSON.stringify(seen);
}});
</script>
"""

WIDTHS = """
  const root = page.documentElement;
  const widths = () => [root.scrollWidth, root.clientWidth];
  seen.closed = widths();
  for (const element of page.querySelectorAll("details")) element.open = true;
  seen.open = widths();
"""

DECIDING = """
  const table = page.querySelector("#policies table"), box = table.closest(".scroll");
  const right = (element) => element.getBoundingClientRect().right;
  const shown = (cell) => view.getComputedStyle(cell).display !== "none";
  seen.columns = [...table.tHead.rows[0].cells].filter(shown).map((cell) => cell.innerText);
  seen.scrolls = box.scrollWidth > box.clientWidth + 1;
  seen.hidden = [...table.querySelectorAll("th, td")].filter(shown)
    .filter((cell) => right(cell) > page.documentElement.clientWidth).length;
  const top = (cell) => { const range = page.createRange(); range.selectNodeContents(cell);
    return range.getClientRects()[0].top; };
  seen.offsets = [...table.tBodies[0].rows].map((row) => [...row.cells].filter(shown)
    .filter((cell) => cell.innerText.trim()).map(top))
    .map((tops) => Math.max(...tops) - Math.min(...tops));
  const isRight = (element) => element.innerText && !element.children.length
    && right(element) > 2 / 3 * page.documentElement.clientWidth;
  const used = [...page.querySelectorAll("main section")].filter((section) =>
    [...section.querySelectorAll("*")].some(isRight));
  seen.used = used.map((section) => section.id);
"""


def seen(look, findings, folder, width):
    """What the script ``look`` records of the page, in a frame of this width."""
    file = folder / "frame.html"
    inner = html.escape(page(findings), quote=True)
    file.write_text(FRAME.format(width=width, page=inner, look=look))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'user'}",
    ]
    flags += ["--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom"]
    command = [str(BROWSER), *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    values = json.loads(html.unescape(found[1]))
    assert "error" not in values, values
    return values


def long_names():
    """A layer whose name has no place to break it, wherever it is named."""
    text = json.dumps(rich().to_dict()).replace("lm_head", "x" * 150)
    return Findings.from_dict(json.loads(text))


@pytest.mark.parametrize(
    ("findings", "width"),
    [(rich, 390), (rich, 1280), (long_names, 375), (interrupted, 375)],
)
def test_the_body_does_not_scroll_sideways(findings, width, tmp_path):
    """Nor with all details open; only tables and code do, each in its own box."""
    values = seen(WIDTHS, findings(), tmp_path, width)
    for state in ("closed", "open"):
        scroll, client = values[state]
        assert scroll <= client <= width


def test_what_decides_is_on_a_narrow_screen_and_its_rows_are_aligned(tmp_path):
    values = seen(DECIDING, rich(), tmp_path, 390)
    assert values["columns"] == ["Policy", "Outcome", "Gap of the loss", "Update error"]
    assert not values["scrolls"]
    assert values["hidden"] == 0
    assert max(values["offsets"]) <= 6  # half of the height of small letters


def test_a_wide_screen_is_used(tmp_path):
    used = seen(DECIDING, rich(), tmp_path, 1280)["used"]
    assert {"", "policies", "time", "how"} <= set(used)
