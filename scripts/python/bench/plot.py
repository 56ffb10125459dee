"""The plot: how the ways compare at a glance."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, StrMethodFormatter

from bench.cases import Case, Way, size_name
from bench.cpu import GROUPS
from bench.figures import Figures
from bench.report import Results, endpoint_figures, triton_figures

# Of Okabe and Ito: colour-blind eyes tell them apart too.
_WAY_COLOURS = {"direct": "#0072B2", "replica": "#E69F00", "python": "#CC79A7"}
_GROUP_COLOURS = ("#999999", "#0072B2", "#E69F00", "#CC79A7", "#F0E442", "#DDDDDD")
_FORWARDER_STYLES = {1: "-", 2: "--", 4: ":"}


def write_plot(results: Results, path: Path) -> None:
    """Write an SVG: a column for each size, and rows for answers per second, p99 and CPU time."""
    cases = list(next(iter(results.values())))
    kinds = list(dict.fromkeys((case.rpc, case.size) for case in cases))
    # Text stays text, and the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "bench", "font.size": 8}):
        figure = Figure(figsize=(2.4 * len(kinds) + 1.2, 8), layout="constrained")
        axes = figure.subplots(3, len(kinds), squeeze=False)
        for column, kind in enumerate(kinds):
            same = [case for case in cases if (case.rpc, case.size) == kind]
            axes[0, column].set_title(f"{same[0].rpc}, {size_name(same[0].size)}")
            _draw_lines(axes[0, column], results, same, lambda figures: figures.rate)
            _draw_lines(axes[1, column], results, same, lambda figures: figures.latency_ms[99])
            _draw_cpu(axes[2, column], results, same[len(same) // 2])
        for row, label in enumerate(("answers/s", "p99 latency, ms", "CPU s per 1,000 answers")):
            axes[row, 0].set_ylabel(label)
        columns = min(len(kinds) * 2 + 1, len(GROUPS))
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=columns, frameon=False)
        figure.legend(*axes[2, 0].get_legend_handles_labels(), loc="outside lower left", ncols=columns, frameon=False)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _series(results: Results, cases: Sequence[Case]) -> Iterator[tuple[Way | None, list[Figures]]]:
    yield None, [triton_figures(results, case) for case in cases]
    for way in results:
        yield way, [endpoint_figures(results, way, case) for case in cases]


def _name(way: Way | None) -> str:
    return "Triton itself" if way is None else str(way)


def _draw_lines(axes: Axes, results: Results, cases: Sequence[Case], value: Callable[[Figures], float]) -> None:
    callers = [case.callers for case in cases]
    for way, figures in _series(results, cases):
        axes.plot(
            callers,
            [value(each) for each in figures],
            marker="o",
            markersize=3,
            color=_WAY_COLOURS[way.ingress] if way else "black",
            linestyle=_FORWARDER_STYLES.get(way.forwarders, "-.") if way else "-",
            label=_name(way),
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(callers))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.set_xlabel(f"{cases[0].caller}s")
    axes.grid(visible=True, which="major", linewidth=0.3)


def _draw_cpu(axes: Axes, results: Results, case: Case) -> None:
    series = [(_name(way), figures) for way, (figures,) in _series(results, [case])]
    bottoms = [0.0] * len(series)
    for group, colour in zip(GROUPS, _GROUP_COLOURS, strict=True):
        heights = [figures.cpu_s[group] for _, figures in series]
        axes.bar(range(len(series)), heights, bottom=bottoms, color=colour, label=group)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_xticks(range(len(series)), [name for name, _ in series], rotation=30, ha="right")
    axes.set_title(f"with {case.callers} {case.caller}s", fontsize=8)
