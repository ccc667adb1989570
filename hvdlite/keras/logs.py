"""The types of the metrics that Keras hands to callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Logs: TypeAlias = Mapping[str, float]
"""Metrics by name, for callbacks that only read them."""
MutableLogs: TypeAlias = dict[str, object]
"""Metrics by name, for callbacks that add or replace some."""
