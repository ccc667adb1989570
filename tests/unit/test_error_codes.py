"""The codes at the ends of messages, such as [HVD203], and the page that explains them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "diagnose" / "errors.md").read_text()
SOURCES = {path: path.read_text() for room in ("hvdlite", "launcher") for path in (ROOT / room).rglob("*.py")}
SECTION = re.compile(r'^<a id="(hvd\d{3})"></a>\n### (HVD\d{3}): [^\n]+\n\n(.*?)(?=^<a id|^## )', re.M | re.S)
SECTIONS = SECTION.findall(PAGE)


def test_each_code_has_one_section_and_each_section_a_message() -> None:
    used = {code for text in SOURCES.values() for code in re.findall(r"HVD\d{3}", text)}
    assert [code for _, code, _ in SECTIONS] == sorted(used)
    assert PAGE.count("\n### HVD") == len(SECTIONS), "a heading without its anchor"


def test_codes_are_written_in_one_way() -> None:
    for path, text in SOURCES.items():
        assert len(re.findall(r"\[HVD\d{3}\]", text)) == len(re.findall(r"HVD\d", text)), path


@pytest.mark.parametrize(("anchor", "code", "text"), SECTIONS, ids=[code for _, code, _ in SECTIONS])
def test_a_section_has_its_anchor_and_the_cure(anchor: str, code: str, text: str) -> None:
    assert anchor == code.lower() == generate.anchor(f"{code}: what is wrong")
    assert text.count("**Cure:** ") == 1 and len(text.splitlines()) <= 10


def test_the_table_at_the_top_leads_to_each_section() -> None:
    links = set(re.findall(r"\(#(hvd\d{3})\)", PAGE.partition("\n## ")[0]))
    assert links == {anchor for anchor, _, _ in SECTIONS}
