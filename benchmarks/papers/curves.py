"""Measures by round, a panel for each measure and a line for each row of a table (FedDTL's Figures 2, 4 and 11 to 14,
FFT-GP's Figure 6): drawn from the records of runs, without their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from fedvlm.core.records import value_of
from fedvlm.report.figures import LIGHT, Picture
from fedvlm.training.folder import RunFolder
from papers.models import settled, styled

SIZE = 3.4  # inches of a panel
Group = Sequence[RunFolder]  # runs of one row on one data set


def draw(rows: Mapping[str, Sequence[Group]], measures: Mapping[str, float]) -> Picture:
    """Of each row that has runs the mean over them, and over its data sets where it has several; `measures` have the factor
    that they are drawn with, 100 for percents."""
    rows = {title: found for title, groups in rows.items() if (found := [runs for runs in groups if runs])}
    with styled():
        picture = Picture(figsize=(SIZE * len(measures), SIZE), layout=ConstrainedLayoutEngine())
        axes = picture.subplots(1, len(measures), squeeze=False)[0]
        for ax, (measure, factor) in zip(axes, measures.items(), strict=True):
            for (title, groups), colour in zip(rows.items(), LIGHT.colours * len(rows), strict=False):
                line = mean_of([by_round(runs, measure) for runs in groups])
                ax.plot(list(line), [factor * v for v in line.values()], "-", color=colour, label=title)
            ax.set_title(f"{measure}, %" if factor == 100 else measure)
            ax.set_xlabel("round")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0].legend(frameon=False, fontsize=7)
        return settled(picture)


def by_round(runs: Group, measure: str) -> dict[int, float]:
    """The mean over runs, of the rounds in which all of them have it."""
    each = [{r["round"]: v for r in run.rounds() if (v := value_of(r, measure)) is not None} for run in runs]
    return mean_of(each)


def mean_of(lines: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Of the rounds that all lines have."""
    if not lines:
        return {}
    shared = sorted(set(lines[0]).intersection(*lines[1:]))
    return {round: fmean(line[round] for line in lines) for round in shared}
