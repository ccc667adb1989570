"""The measures of the house hold, apart from the exceptions that `tests/explained.py` gives reasons for."""

from __future__ import annotations

import pytest

from tests import measures
from tests.explained import EXPLAINED


@pytest.mark.parametrize("measure", measures.MEASURES)
def test_nothing_is_unexplained(measure: str) -> None:
    assert [row for row in measures.MEASURES[measure]() if row not in EXPLAINED] == []


def test_what_is_explained_still_occurs() -> None:
    assert set(EXPLAINED) <= {row for rows in measures.MEASURES.values() for row in rows()}


@pytest.mark.parametrize("package", measures.PACKAGES)
def test_few_annotations_mention_any(package: str) -> None:
    some, all_of_them = measures.share_of_any(package)
    assert some <= measures.MOST_ANY * all_of_them
