"""The built site in a browser: no page, table or picture is cut off, on a desk or on a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_browser import browser, visit  # noqa: F401
from tests.test_docs import DOCS, ROOT

pytestmark = pytest.mark.slow

CUT_OFF = """
const screen = document.documentElement.clientWidth, found = [];
if (document.documentElement.scrollWidth > screen) found.push("the page");
for (const table of document.querySelectorAll("article table")) {
  const frame = table.closest(".md-typeset__scrollwrap") || table;
  if (frame.scrollWidth > frame.clientWidth + 1) found.push("table " + table.innerText.slice(0, 60));
}
for (const picture of document.querySelectorAll("article img")) {
  if (!picture.naturalWidth || picture.getBoundingClientRect().right > screen) found.push("picture " + picture.src);
}
return found;
"""
# A line of code that is too long can be scrolled; on a desk none should be.
LONG_CODE = """
return [...document.querySelectorAll("article pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.innerText.slice(0, 60));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the documentation tools are not installed (make docs installs them)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_is_cut_off(site: Path, browser: Any, width: int, dark: bool) -> None:  # noqa: F811
    seen = {}
    for page in sorted(DOCS.rglob("*.md")):
        name = str(page.relative_to(DOCS).with_suffix(".html"))
        visit(browser, (site / name).as_uri(), width, dark)
        found = browser.execute_script(CUT_OFF)
        if width > 1000:
            found += browser.execute_script(LONG_CODE)
        if found:
            seen[name] = found
    assert not seen


def test_a_phone_shows_a_wide_table_row_by_row_with_titles(site: Path, browser: Any) -> None:  # noqa: F811
    visit(browser, (site / "choosing.html").as_uri(), 390)
    wide = browser.execute_script("return document.querySelector('article table[data-wide]').innerText")
    shown = browser.execute_script(
        "const cell = document.querySelector('article table[data-wide] tbody tr td:nth-child(2)');"
        "return [getComputedStyle(cell).display, getComputedStyle(cell, '::before').content]"
    )
    assert "58,982,400" in wide
    assert shown == ["block", '"parameters of W"']
