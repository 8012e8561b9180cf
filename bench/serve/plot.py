#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Draws bench/results/serve_sim.json: pages in use over time, and times to the first and to later tokens.

Needs matplotlib. usage: plot.py RESULTS.json PLOT.svg
"""

import io
import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "uniprefill"  # the same file for the same results
import matplotlib.pyplot as plt

COLORS = {"sparsified": "C0", "dense": "C1"}


def draw_pages(axes, run):
    steps = run["steps"]
    shared = [pages - cached for pages, cached in zip(steps["pages"], steps["cached_pages"])]
    axes.fill_between(steps["end_s"], shared, step="pre", color="C0", alpha=0.6, linewidth=0, label="of requests")
    axes.fill_between(
        steps["end_s"], shared, steps["pages"], step="pre", color="C0", alpha=0.2, linewidth=0, label="prefix cache alone"
    )
    axes.plot(steps["end_s"], steps["dense_pages"], color="C1", linewidth=0.8, drawstyle="steps-pre", label="without drops")
    axes.axhline(run["server"]["pages"], color="black", linewidth=0.8, label="the pool")
    axes.set_xlabel("seconds")
    axes.set_ylabel("pages in use (sparsified)")
    axes.set_ylim(0, 1.4 * run["server"]["pages"])
    axes.legend(frameon=False, loc="upper center", ncols=2, fontsize="small")


def draw_times(axes, runs, key, label):
    for name, run in runs.items():
        values = sorted(request[key] for request in run["requests"] if request[key] is not None)
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axes.plot(values, shares, color=COLORS[name], drawstyle="steps-post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)


def main():
    if len(sys.argv) != 3:
        sys.exit("plot.py: arguments: expected RESULTS.json PLOT.svg, came %d" % (len(sys.argv) - 1))
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    runs = {name: results[name] for name in COLORS}
    figure, (pages, first, later) = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    draw_pages(pages, runs["sparsified"])
    draw_times(first, runs, "ttft_s", "time to first token, seconds")
    draw_times(later, runs, "tpot_s", "time per later token, seconds")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.writelines(line.rstrip() + "\n" for line in drawn.getvalue().splitlines())


main()
