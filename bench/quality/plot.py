#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Draws a results file of uniprefill-quality: each rule's divergence by window, and its mean against the work left.

Needs matplotlib. usage: plot.py RESULTS.json PLOT.svg
"""

import io
import json
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "uniprefill"  # the same file for the same results
import matplotlib.pyplot as plt

KINDS = {"essays": "o", "code": "s", "law": "^"}


def main():
    if len(sys.argv) != 3:
        sys.exit("plot.py: arguments: expected RESULTS.json PLOT.svg, came %d" % (len(sys.argv) - 1))
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    names = list(results["summary"])
    figure, (by_window, by_work) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)

    for column, name in enumerate(names):
        for kind, marker in KINDS.items():
            rows = [w["rules"].get(name) for w in results["windows"] if w["stream"] == kind]
            values = [row["kl_mean"] for row in rows if row]
            offsets = [column + 0.03 * (i - len(values) / 2) for i in range(len(values))]
            by_window.plot(offsets, values, marker, color=f"C{column}", alpha=0.6, markersize=4)
        by_window.plot([column - 0.3, column + 0.3], [results["summary"][name]["kl_mean"]] * 2, color="black")
    by_window.set_yscale("log")
    by_window.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize="small")
    by_window.set_ylabel("KL(dense || rule) by window, nats")
    for kind, marker in KINDS.items():
        by_window.plot([], [], marker, color="gray", label=kind)
    by_window.plot([], [], color="black", label="mean")
    by_window.legend(frameon=False)

    for column, name in enumerate(names):
        row = results["summary"][name]
        by_work.plot(row["lin"], row["kl_mean"], "o", color=f"C{column}", markersize=8, label=name)
        if "expected" in row:
            by_work.plot(row["expected"]["lin"], row["expected"]["kl_mean"], "x", color=f"C{column}", markersize=8)
    by_work.plot([], [], "x", color="gray", label="measured elsewhere")
    by_work.set_xlabel("rows entering output projection and MLP, share of dense (lin)")
    by_work.set_ylabel("KL mean, nats")
    by_work.set_ylim(bottom=0)
    by_work.legend(frameon=False)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.writelines(line.rstrip() + "\n" for line in drawn.getvalue().splitlines())


main()
