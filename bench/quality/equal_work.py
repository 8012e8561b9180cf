#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""One rule of a results file of uniprefill-quality against another at equal work.

The other is known at several p. Its divergence at the rule's work lies on a straight line between the logarithms of the nearest
two, all averaged over the windows that have every rule named. Work: floating-point operations at the windows' length, in the
shape of SmolLM2-135M, attention and the estimator's products included.

usage: equal_work.py RESULTS.json RULE OTHER OTHER...
"""

import json
import math
import statistics
import sys

HIDDEN, FFN, QUERIES, KEYS_AND_VALUES = 576, 1536, 576, 384


def work_of(rule, tokens):
    rows = 2 * HIDDEN * (2 * QUERIES + KEYS_AND_VALUES) + 6 * HIDDEN * FFN
    pairs = 4 * QUERIES * (tokens + 1) / 2
    return (rows * rule["lin"] + pairs * (rule["att"] + rule["estimator"] / 2)) / (rows + pairs)


def at_work(points, wanted):
    """points: (work, KL). None outside of them."""
    points = sorted(points)
    for (w0, k0), (w1, k1) in zip(points, points[1:]):
        if w0 <= wanted <= w1:
            part = (wanted - w0) / (w1 - w0) if w1 > w0 else 0
            return math.exp(math.log(k0) + part * (math.log(k1) - math.log(k0)))
    return None


def main():
    if len(sys.argv) < 5:
        sys.exit("equal_work.py: arguments: expected RESULTS.json RULE and two rules or more, came %d" % (len(sys.argv) - 1))
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)
    ours, others = sys.argv[2], sys.argv[3:]
    tokens = results["prompt_tokens"]
    windows = [w for w in results["windows"] if all(name in w["rules"] for name in [ours, *others])]
    if not windows:
        sys.exit("equal_work.py: rules: expected a window that has them all, came none")

    def mean(name, key):
        return statistics.fmean(w["rules"][name][key] for w in windows)

    def figures(name):
        return statistics.fmean(work_of(w["rules"][name], tokens) for w in windows), mean(name, "kl_mean")

    print(f"{len(windows)} windows")
    for name in [ours, *others]:
        work, kl = figures(name)
        worst = max(w["rules"][name]["kl_mean"] for w in windows)
        lin, att = mean(name, "lin"), mean(name, "att")
        print(f"{name:40.40s} KL {kl:.4f}, worst {worst:.3f}, work {work:.3f}, lin {lin:.3f}, att {att:.3f}")
    work, kl = figures(ours)
    equal = at_work([figures(name) for name in others], work)
    least, least_kl = min(figures(name) for name in others)
    if equal is None and work < least:
        print(f"less work than any of the others; the one with least has a KL of {least_kl:.4f}: {1 - kl / least_kl:.0%} less")
        return
    if equal is None:
        print("more work than any of the others")
        return
    print(f"at equal work the others' KL is {equal:.4f}: {1 - kl / equal:.0%} less")
    better = total = 0
    for window in windows:
        rules = window["rules"]
        points = [(work_of(rules[name], tokens), rules[name]["kl_mean"]) for name in others]
        alone = at_work(points, work_of(rules[ours], tokens))
        if alone is not None:
            total += 1
            better += rules[ours]["kl_mean"] < alone
    print(f"window by window, at each one's work: less in {better} of {total}")


main()
