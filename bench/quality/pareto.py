#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Draws divergence against estimated time to first token at 8K, 32K and 128K tokens: what each rule of a results file of
uniprefill-quality would take on the machine that a timed file (--rules chunks) was measured on.

The estimate: seconds = rows * lin * N + pairs * (att + looks) * N (N + 1) / 2. The two rates are fitted to the dense runs and
the whole-prompt runs of the timed file, so they hold for one thread of that machine. Shares of rows and pairs are taken to be
those of 8,000 tokens at every length; looks (half a pair's work each) grow with N alone.

Needs matplotlib. usage: pareto.py RESULTS.json TIMED.json PLOT.svg
"""

import io
import json
import statistics
import sys

LENGTHS = (8192, 32768, 131072)


def causal(tokens):
    return tokens * (tokens + 1) / 2


def fit(timed):
    """Seconds for a row and for a pair, by least squares of relative errors, and the largest of those errors."""
    tokens = timed["prompt_tokens"]
    points = []
    for window in timed["windows"]:
        dense = window["dense_processor_s"]
        points.append((tokens, causal(tokens), dense))
        rule = window["rules"].get("whole prompt")
        if rule:
            pairs = (rule["att"] + rule["estimator"] / 2) * causal(tokens)
            points.append((rule["lin"] * tokens, pairs, rule["time"] * dense))
    rr = sum((r / s) ** 2 for r, p, s in points)
    pp = sum((p / s) ** 2 for r, p, s in points)
    rp = sum(r * p / s**2 for r, p, s in points)
    r1 = sum(r / s for r, p, s in points)
    p1 = sum(p / s for r, p, s in points)
    determinant = rr * pp - rp * rp
    row, pair = (r1 * pp - p1 * rp) / determinant, (p1 * rr - r1 * rp) / determinant
    worst = max(abs(row * r + pair * p - s) / s for r, p, s in points)
    return row, pair, worst


def points_of(results):
    """By rule: mean KL, lin, att and looks over the windows that have it."""
    made = {}
    for name in results["summary"]:
        rows = [window["rules"][name] for window in results["windows"] if name in window["rules"]]
        made[name] = [statistics.fmean(row[key] for row in rows) for key in ("kl_mean", "lin", "att", "estimator")]
    return made


def seconds_at(tokens, measured_at, rates, lin, att, looks):
    row, pair = rates
    looked = looks / 2 * causal(measured_at) / measured_at * tokens
    return row * lin * tokens + pair * (att * causal(tokens) + looked)


def main():
    if len(sys.argv) != 4:
        sys.exit("pareto.py: arguments: expected RESULTS.json TIMED.json PLOT.svg, came %d" % (len(sys.argv) - 1))
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    with open(sys.argv[2], encoding="utf-8") as file:
        row, pair, worst = fit(json.load(file))
    at = results["prompt_tokens"]
    rules = points_of(results)
    print(f"{row * 1e6:.1f} us a row, {pair * 1e9:.2f} ns a pair of a layer stack; off by {worst:.0%} at most")

    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "uniprefill"  # the same file for the same results
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(LENGTHS), figsize=(12, 4), constrained_layout=True, sharey=True)
    for panel, tokens in zip(panels, LENGTHS):
        dense = seconds_at(tokens, at, (row, pair), 1, 1, 0)
        found = {name: (seconds_at(tokens, at, (row, pair), *shares), kl) for name, (kl, *shares) in rules.items()}
        best = [
            point
            for point in sorted(found.values())
            if all(other == point or other[0] > point[0] or other[1] > point[1] for other in found.values())
        ]
        panel.plot([x for x, y in best], [y for x, y in best], color="lightgray", zorder=0)
        for column, (name, (seconds, kl)) in enumerate(found.items()):
            panel.plot(seconds, kl, "o", color=f"C{column}", label=name)
            print(f"{tokens:6d} tokens  {name:24s} {seconds:8.1f} s, {seconds / dense:.3f} of dense, KL {kl:.4f}")
        panel.axvline(dense, color="black", linestyle=":", label="dense")
        panel.set_title(f"{tokens // 1024}K tokens")
        panel.set_xlabel("estimated time to first token, s")
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("KL(dense || rule), mean over windows of 8,000, nats")
    panels[-1].legend(frameon=False, fontsize="small")
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    with open(sys.argv[3], "w", encoding="utf-8") as file:
        file.writelines(line.rstrip() + "\n" for line in drawn.getvalue().splitlines())


main()
