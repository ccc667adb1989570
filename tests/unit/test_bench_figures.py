"""The figures of the benchmarks: what stands where, in which colour, and on which axes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import mpi4py
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation, Text

mpi4py.rc.initialize = False  # no test here communicates

from hvdlite.bench import __main__ as command_line  # noqa: E402
from hvdlite.bench import drawing, gpu, model, plot, saved, style, timing  # noqa: E402
from hvdlite.bench.compression import COMPRESSORS  # noqa: E402
from hvdlite.bench.contenders import KEYS, TITLES  # noqa: E402
from hvdlite.bench.memory import CONTENDERS as IN_MEMORY  # noqa: E402
from hvdlite.bench.saved import Json  # noqa: E402
from hvdlite.bench.strategies import STRATEGIES, read  # noqa: E402
from hvdlite.errors import HvdliteError  # noqa: E402

MACHINE: Json = {
    "date": "2026-01-02T03:04:05+00:00", "cpu": "Intel(R) Xeon(R) Platinum 8480C Processor with 56 cores", "cores": 2, "ranks": 2, "hosts": 1,
    "mpi": "Some MPI Library 2021.13 for Linux, package: and so on", "python": "3.12", "versions": {"hvdlite": "0.1.0", "torch": "2.13"},
}  # fmt: skip
SIZES = [4 << 2 * power for power in range(14)]
OURS_ALONE = re.compile(r"arena|\blane|shared|algbw|busbw|roll call", re.IGNORECASE)
"""Words that only readers of the code know."""


def sweep(*keys: str) -> Json:
    """Times that end close to each other, so that labels have to move."""
    rows = []
    for number, nbytes in enumerate(SIZES):
        seconds = {key: 1e-6 * (1 + place) ** (1 - number / 14) + nbytes / 1e9 for place, key in enumerate(keys)}
        spread = {key: (0.9 * its, 1.2 * its) for key, its in seconds.items()}
        rows.append(
            {"nbytes": nbytes, "count": nbytes // 4, "rounds": 7, "seconds": seconds, "crowded": 0.0, "sent": {},
             "spread": spread, "algbw": {}, "busbw": {}}
        )  # fmt: skip
    return {"benchmark": "allreduce", "contenders": dict.fromkeys(keys, ""), "rows": rows, "scalar_latency": {}}


def steps(name: str, *keys: str) -> Json:
    seconds = {key: 0.02 + 0.01 * place for place, key in enumerate(keys)}
    spread = {key: (0.9 * its, 1.2 * its) for key, its in seconds.items()}
    rows = [{"name": task, "seconds": seconds, "spread": spread} for task in ("MLP", "CNN, 8 layers", "transformer")]
    return {"benchmark": name, "rows": rows}


def one_model(content: Json) -> Json:
    return {**content, "rows": cast(list[Json], content["rows"])[:1]}


def prices() -> Json:
    rows: list[Json] = [
        {"name": name, "nbytes": nbytes, "seconds": 3e-5, "bare": 1e-5, "ratio": 3.0,
         "spread": {"hvdlite": [2e-5, 4e-5], "mpi4py": [0.5e-5, 2e-5]}}
        for name in ("allreduce_", "send / recv") for nbytes in (4, 4096, 1 << 20)
    ]  # fmt: skip
    rows += [
        {"name": name, "nbytes": nbytes, "seconds": 1e-5, "bare": None, "ratio": None, "spread": {}}
        for name, nbytes in (("barrier", 0), ("8 ordered", 4))
    ]
    return {"benchmark": "ops", "rows": rows}


def memory() -> Json:
    row = {"state": [5, 6], "memory": [4_000_000, 5_000_000], "peak": [9_000_000, 8_000_000], "backward": 0.1,
           "step": 0.2, "ratios": {}, "spread": {"backward": [0.1, 0.1], "step": [0.1, 0.25]}}  # fmt: skip
    rows = {key: {"title": contender.title, **row} for key, contender in IN_MEMORY.items()}
    return {"benchmark": "memory", "parameters": 124_000_000, "tensors": 10, "turns": 5, "steps": 5,
            "optimizer": "Adam", "rows": rows, "crowded": 0.0}  # fmt: skip


def overlap() -> Json:
    seconds = {"forward": 0.1, "local": 0.3, "end": 0.4, "hvdlite": 0.32}
    row = {"parameters": 1, "batch": 8, "seconds": seconds, "cpu": 0.01, "quartiles": [0.5, 0.8, 1.1], "crowded": 0.0}
    rows = [{**row, "name": "MLP", "could": 0.1}, {**row, "name": "MLP, elsewhere", "could": -0.1}]
    return {"benchmark": "overlap", "rows": rows}


def compression() -> Json:
    """Compressor number n needs n percent more steps, and its seeds differ."""
    rows = []
    for problem, (number, key) in itertools.product(("digits", "text"), enumerate(COMPRESSORS)):
        curves = [
            {"steps": [*range(10, 110, 10)], "accuracy": 0.9,
             "losses": [(3 + 0.1 * seed) / step * (1 + number / 100) for step in range(1, 11)]}
            for seed in range(5)
        ]  # fmt: skip
        speed = {"seconds": 0.1 / (1 + number), "wire": 100.0, "gradients": 90.0, "spread": [0.09, 0.12]}
        rows.append({"problem": problem, "compressor": key, "curves": curves,
                     "speeds": dict.fromkeys(("1 Gbit/s", "100 Mbit/s"), speed)})  # fmt: skip
    return {"benchmark": "compression", "rows": rows}


def strategies() -> Json:
    rows = []
    for condition, (number, key) in itertools.product(("slow network", "fast network"), enumerate(STRATEGIES)):
        runs = [
            {"seconds": [float(second) for second in range(number, 21 + number)], "accuracy": 0.9, "update": 0.1,
             "wire": 10.0, "losses": [2.0 * 0.8**second + 0.01 * seed for second in range(21)]}
            for seed in range(5)
        ]  # fmt: skip
        rows.append({"condition": condition, "strategy": key, "runs": runs})
    return {"benchmark": "strategies", "rows": rows}


RESULTS: dict[str, Callable[[], Json]] = {
    "allreduce": lambda: sweep(*KEYS),
    "allreduce on GPUs": lambda: sweep(*gpu.KEYS),
    "two contenders": lambda: sweep("mpi", "arena"),
    "step": lambda: steps("step", "none", "hvdlite", "ddp_views", "ddp_copies", "ddp"),
    "keras step": lambda: steps("keras step", "none", "hvdlite"),
    "fsdp": lambda: one_model(steps("fsdp", "whole", "none", "hvdlite", "gloo")),
    "ops": prices, "memory": memory, "overlap": overlap, "compression": compression, "strategies": strategies,
}  # fmt: skip
EVERY = [*RESULTS, "model"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Figure]:
    """A function that returns one of EVERY as it is in its file. Each is drawn once, and nobody may change it."""
    path, figures = str(tmp_path_factory.mktemp("figures") / "figure.png"), []
    save = Figure.savefig

    def keep(figure: Figure, path: str) -> None:
        save(figure, path)
        figures.append(figure)

    @cache
    def draw(name: str) -> Figure:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Figure, "savefig", keep)
            if name == "model":
                model.plot_model(path)
            else:
                drawing.draw(json.loads(json.dumps({"machine": MACHINE, **RESULTS[name]()})), path)  # as from a file
        return figures.pop()

    return draw


def texts(figure: Figure) -> list[Text]:
    return [text for text in cast(list[Text], figure.findobj(Text)) if text.get_text() and text.get_visible()]


def labels(axes: Axes) -> list[Annotation]:
    return [child for child in axes.get_children() if isinstance(child, Annotation)]


def test_every_figure_is_drawn_here() -> None:
    assert {str(result()["benchmark"]) for result in RESULTS.values()} == set(drawing.FIGURES)
    assert set(plot.CONTENDERS) == set(TITLES) and set(plot.COMPRESSED) == set(COMPRESSORS)
    assert set(plot.KEPT_TOGETHER) == set(STRATEGIES) and set(plot.TRAINED) == set(IN_MEMORY)


@pytest.mark.parametrize("name", EVERY)
def test_no_label_covers_another_or_leaves_the_picture(name: str, drawn: Callable[[str], Figure]) -> None:
    figure = drawn(name)
    named = [text for axes in figure.axes for text in (*labels(axes), axes.title, axes.xaxis.label)]
    assert any(isinstance(text, Annotation) for text in named), "nothing is labelled"
    shown = [text for text in (*named, *figure.texts) if text.get_text()]
    found = {text: np.array(Text.get_window_extent(text).extents) for text in shown}
    pairs = itertools.combinations(found.items(), 2)
    assert not [(one.get_text(), two.get_text()) for (one, a), (two, b) in pairs if common(a, b)]
    outer = figure.bbox.extents
    assert not [text for text, box in found.items() if (box[:2] < outer[:2]).any() or (box[2:] > outer[2:]).any()]


def common(one: timing.Floats, other: timing.Floats) -> bool:
    """Whether two boxes (x0, y0, x1, y1) have more than half a dot in common, both ways."""
    return bool(np.all(np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]) > 0.5))


@pytest.mark.parametrize("name", EVERY)
def test_words_that_a_stranger_knows(name: str, drawn: Callable[[str], Figure]) -> None:
    found = [text.get_text() for text in texts(drawn(name))]
    assert not [text for text in found if OURS_ALONE.search(text)]


@pytest.mark.parametrize("name", EVERY)
def test_colours_of_the_palette_and_blue_for_hvdlite(name: str, drawn: Callable[[str], Figure]) -> None:
    for axes in drawn(name).axes:
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        colors = {to_hex(line.get_color()).upper() for line in lines}
        colors |= {to_hex(patch.get_facecolor()).upper() for patch in axes.patches}
        assert colors <= {color.upper() for color in style.PALETTE}
        for label in labels(axes):
            if label.get_text().startswith("hvdlite"):
                assert label.get_color() == style.BLUE
        names = [text.get_text() for text in axes.get_yticklabels()]
        for bar_name, patch in zip(names, axes.patches, strict=False):
            assert (to_hex(patch.get_facecolor()).upper() == style.BLUE) or not bar_name.startswith("hvdlite")


@pytest.mark.parametrize("name", ["allreduce", "allreduce on GPUs", "compression", "strategies", "model"])
def test_lines_of_one_colour_differ_in_dashes_or_markers(name: str, drawn: Callable[[str], Figure]) -> None:
    for axes in drawn(name).axes:
        lines = [line for line in axes.lines if len(xs(line)) > 2]
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
        assert len(looks) == len(set(looks))


def xs(line: Line2D) -> list[float]:
    return [float(x) for x in np.asarray(line.get_xdata())]


def test_only_the_palette_is_used_by_looks() -> None:
    looks = [look for _, look in (*plot.CONTENDERS.values(), *plot.COPIES.values())]
    looks += [*plot.COMPRESSED.values(), *plot.KEPT_TOGETHER.values(), *plot.TRAINED.values()]
    assert {look.color for look in looks} <= set(style.PALETTE)


def test_panels_that_are_compared_share_their_axes(drawn: Callable[[str], Figure]) -> None:
    for name in ("allreduce", "strategies", "model", "step"):
        first, *others = drawn(name).axes
        assert others and all(share_x(first, axes) and share_y(first, axes) for axes in others), name
    curves, *bars = drawn("compression").axes[:3]
    assert share_x(*bars) and not share_x(curves, bars[0])


def share_x(one: Axes, other: Axes) -> bool:
    return bool(one.get_shared_x_axes().joined(one, other))


def share_y(one: Axes, other: Axes) -> bool:
    return bool(one.get_shared_y_axes().joined(one, other))


def test_quartiles_are_those_of_the_data() -> None:
    assert timing.quartiles([5, 1, 4, 2, 3]) == (2, 4) and timing.quartiles([[1, 2], [3, 4]]) == (1.75, 3.25)
    found = timing.Timing({"a": 3.0}, 0.0, {"a": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 3.0]])})
    assert found.spread == {"a": (2.25, 3.75)}


def heights(band: Collection) -> list[float]:
    return [float(y) for y in np.asarray(band.get_paths()[0].vertices)[:, 1]]


def test_bands_are_the_quartiles(drawn: Callable[[str], Figure]) -> None:
    """Of five seeds, the quartiles are the second and the fourth. Seed n's losses are 0.01 n above seed 0's."""
    rows = saved.rows_of(strategies(), "strategies", read)[: len(STRATEGIES)]
    base = [2.0 * 0.8**second for second in range(21)]
    smooth = [base[1], *((base[1] + base[2]) / 2,), *base[2:-2], (base[-3] + base[-2]) / 2, base[-2]]  # near the ends
    for row, band in zip(rows, drawn("strategies").axes[0].collections, strict=True):
        low, high = row.band
        assert low == pytest.approx([y + 0.01 for y in smooth]) and high == pytest.approx([y + 0.03 for y in smooth])
        assert set(heights(band)) == {*low, *high}
    curves = drawn("compression").axes[0].collections[0]
    assert sorted(set(heights(curves))) == pytest.approx(sorted(q / step for q in (3.1, 3.3) for step in range(1, 11)))
    (axes,) = drawn("two contenders").axes
    for line, band in zip(axes.lines, axes.collections, strict=True):
        medians = [float(y) for y in np.asarray(line.get_ydata())]
        assert sorted(set(heights(band))) == pytest.approx(sorted({part * y for part in (0.9, 1.2) for y in medians}))


def test_whiskers_are_the_quartiles(drawn: Callable[[str], Figure]) -> None:
    axes = drawn("step").axes[0]
    whiskers = [xs(line) for line in axes.lines if line.get_marker() == "|"]
    assert whiskers == [pytest.approx([0.9 * t, 1.2 * t]) for t in (20, 30, 40, 50, 60)]
    assert [label.get_text() for label in labels(axes)] == ["20.0", "30.0", "40.0", "50.0", "60.0"]


def test_labels_move_as_little_as_possible() -> None:
    assert style.apart([0.2, 0.8], 0.1, 0, 1) == pytest.approx([0.2, 0.8])
    assert style.apart([0.5, 0.5], 0.1, 0, 1) == pytest.approx([0.45, 0.55])
    assert style.apart([0.6, 0.5, 0.5], 0.2, 0, 1) == pytest.approx([0.733, 0.333, 0.533], abs=1e-3)
    assert style.apart([0.0, 0.0, 1.0], 0.1, 0, 1) == pytest.approx([0.0, 0.1, 1.0])
    assert style.apart([1.0, 1.0], 0.1, 0, 1) == pytest.approx([0.9, 1.0])
    assert style.apart([0.5] * 5, 0.4, 0, 1) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert style.apart([], 0.1, 0, 1) == []


def test_a_file_of_something_else_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    for text in ("nonsense", "5", '{"rows": []}'):
        path.write_text(text)
        with pytest.raises(HvdliteError, match="no results of a benchmark"):
            saved.content_of(str(path))
    with pytest.raises(HvdliteError, match=r"no results of the strategies benchmark: .* compression"):
        saved.rows_of({"benchmark": "compression", "rows": []}, "strategies", dict)
    with pytest.raises(HvdliteError, match="no figure of 'dance'"):
        drawing.draw({"benchmark": "dance", "machine": MACHINE}, str(path))


def test_without_matplotlib_there_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "figure.png"
    monkeypatch.setattr(style, "available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", "draw", "found.json", "--plot", str(path)])
    assert command_line.main() == 1 and "pip install matplotlib" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["bench", "model", "--plot", str(path)])
    assert command_line.main() == 0 and "pip install matplotlib" in capsys.readouterr().out and not path.exists()
