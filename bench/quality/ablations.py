#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Draws what one setting changes while all others stay: G, n, sink, p, and a selection at one layer alone, from results of
uniprefill-quality --rules ablations (several files where a CUDA device did some: it leaves G and n out) and one that has the usual rule.

Needs matplotlib. usage: ablations.py USUAL.json RESULTS.json... PLOT.svg
"""

import io
import json
import re
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "uniprefill"  # the same file for the same results
import matplotlib.pyplot as plt

USUAL = "outside 0.98"
USUAL_VALUES = {"G": 64, "n": 128, "sink": 128, "p": 0.98}
TITLES = {
    "G": "rows of a block (G)",
    "n": "observation queries (n)",
    "sink": "sink, positions",
    "p": "p",
    "layer": "the one layer that selects, p 0.90",
}


def series_of(files, usual):
    """By setting: (value, summary) of each rule."""
    series = {kind: [(value, usual)] for kind, value in USUAL_VALUES.items()} | {"layer": []}
    for path in files:
        with open(path, encoding="utf-8") as file:
            for name, summary in json.load(file)["summary"].items():
                found = re.fullmatch(r"(G|n|sink|p|layer) ([0-9.]+)( alone)?", name)
                if found:
                    series[found[1]].append((float(found[2]), summary))
    return {kind: sorted(points, key=lambda point: point[0]) for kind, points in series.items()}


def main():
    if len(sys.argv) < 4:
        sys.exit("ablations.py: arguments: expected USUAL.json RESULTS.json... PLOT.svg, came %d" % (len(sys.argv) - 1))
    with open(sys.argv[1], encoding="utf-8") as file:
        usual = json.load(file)["summary"][USUAL]
    series = series_of(sys.argv[2:-1], usual)
    figure, axes = plt.subplots(1, len(series), figsize=(16, 3.6), constrained_layout=True)
    for axis, (kind, points) in zip(axes, series.items()):
        places = range(len(points))
        axis.plot(places, [summary["kl_mean"] for _, summary in points], "o-", color="C0")
        axis.set_xticks(places, [f"{value:g}" for value, _ in points], fontsize="small")
        axis.set_xlabel(TITLES[kind])
        axis.set_yscale("log") if kind in ("p", "layer") else axis.set_ylim(bottom=0)
        work = axis.twinx()
        work.plot(places, [summary["lin"] for _, summary in points], "s--", color="C1", markersize=4)
        work.set_ylim(0, 1)
        if kind != "layer":
            work.set_yticklabels([])
    axes[0].set_ylabel("KL mean, nats (circles)")
    work.set_ylabel("rows left, share of dense (squares)")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    with open(sys.argv[-1], "w", encoding="utf-8") as file:
        file.writelines(line.rstrip() + "\n" for line in drawn.getvalue().splitlines())


main()
