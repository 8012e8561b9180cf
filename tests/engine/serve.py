#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Serving with the real model: every request's tokens are those that it has alone, whatever the budget, the order of
arrival, the pool and the way of making room.

usage: serve.py ENGINE. Skipped (77) where UNIPREFILL_MODEL doesn't name the model's file. Texts are those of
bench/quality/texts.py; without a way to its package, the licences and this Python's library alone.
"""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

engine = sys.argv[1]
model = os.environ.get("UNIPREFILL_MODEL", "")
if not os.path.isfile(model):
    print("UNIPREFILL_MODEL doesn't name the model's file")
    sys.exit(77)

folder = pathlib.Path(tempfile.mkdtemp())
root = pathlib.Path(__file__).resolve().parents[2]


def list_of_texts():
    cache = pathlib.Path(os.environ.get("UNIPREFILL_CACHE") or pathlib.Path.home() / ".cache" / "uniprefill")
    try:
        texts = [sys.executable, root / "bench" / "quality" / "texts.py", cache / "streams"]
        subprocess.run(texts, check=True, capture_output=True, timeout=120)
        paths = [line for name in ("essays", "code", "law") for line in (cache / "streams" / (name + ".txt")).open()]
    except (OSError, subprocess.SubprocessError):
        print("no essays: licences and Python's library alone")
        library = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = [f"{path}\n" for path in sorted(pathlib.Path("/usr/share/common-licenses").glob("*")) if path.is_file()]
        paths += [f"{library / name}.py\n" for name in ("argparse", "ast", "tarfile", "typing", "subprocess", "inspect")]
    if not paths:
        print("no texts on this machine")
        sys.exit(77)
    listed = folder / "texts.txt"
    listed.write_text("".join(paths), encoding="utf-8")
    return listed


# Small spans and few forced rows, so that short prompts have several spans and drop rows in each; bf16 products
# because they are the fastest, and no less the same for being less exact.
REQUESTS = """--requests 48 --seed 3 --shared 0.8 --min-prompt 150 --max-prompt 450 --min-new 12 --max-new 48 --slots 12
    --threads 1 --span 64 -G 12 -n 16 --sink 6 --tail 14 --p 0.95 --arithmetic bf16 --step-seconds 0.25""".split()
# Lists that leave something out in such spans: the shipped window is wider than they are.
policy = json.loads((root / "examples" / "engine" / "policies" / "smollm2-135m-instruct.json").read_text(encoding="utf-8"))
policy["lists"] = {"p": 0.8, "sink": 6, "window": 16}
(folder / "policy.json").write_text(json.dumps(policy), encoding="utf-8")
REQUESTS += ["--policy", folder / "policy.json"]
RUNS = {  # the least budget is span + n - 1 = 79 rows, the smallest pool that takes the longest request 990 pages
    "least budget": "--rate 12 --pages 1000 --prefill-budget 79 --preemption recompute --check",
    "swapped": "--rate 12 --pages 1000 --prefill-budget 110 --preemption swap --order 7",
    "another order": "--rate 12 --pages 1000 --prefill-budget 150 --preemption recompute --order 11",
}

faults = []
texts = list_of_texts()
served = {}
for name, options in RUNS.items():
    command = [engine, "serve-sim", "--model", model, "--texts", texts, "--json", *REQUESTS, *options.split()]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        faults.append(f"{name}: {done.stderr.strip()}")
    if not done.stdout:
        continue
    report = json.loads(done.stdout)
    counts = report["counts"]
    print(f"{name}: {counts}")
    served[name] = {one["number"]: one["generated_ids"] for one in report["requests"]}

    # A run counts only if it saw all this.
    requests = len(report["requests"])
    for seen, least in {
        "preemptions": 20,
        "prefix_hits": 10,
        "requests_with_prefix": 5,
        "requests_of_several_spans": requests // 2 + 1,
        "requests_with_drops": requests // 2 + 1,
        "mixed_steps": 20,
        "pages_handed_back": 1000,
        "copied_pages": 100,
        "swapped_pages" if "swap" in options else "recomputed_rows": 100,
    }.items():
        if counts[seen] < least:
            faults.append(f"{name}: {seen}: expected at least {least}, came {counts[seen]}")
    for never in ("leaked_pages", "prefix_refusals"):
        if counts[never] != 0:
            faults.append(f"{name}: {never}: expected 0, came {counts[never]}")
    if "--check" in options and report["alone"] != {"requests": requests, "different": []}:
        faults.append(f"{name}: expected the tokens of each request alone, came others: {report['alone']}")

first = served.get("least budget", {})
for name, tokens in served.items():
    different = [number for number in first if tokens.get(number) != first[number]]
    if different or len(tokens) != len(first):
        faults.append(f"{name}: requests {different} have other tokens than with the least budget")
if len({tuple(tokens) for tokens in first.values()}) < len(first) // 2:
    faults.append("the answers are too much alike to tell anything")

# A recorded trace: its times, its lengths within the bounds, and the tokens of each request alone as ever.
LENGTHS = [(200, 9), (90, 12), (777, 5), (150, 44), (310, 8), (180, 7)]
trace = folder / "trace.csv"
trace.write_text(
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "".join(f"2023-11-16 23:59:5{7 + i // 2}.{5 * (i % 2)}000000,{p},{n}\n" for i, (p, n) in enumerate(LENGTHS)),
    encoding="utf-8",
)
command = [engine, "serve-sim", "--model", model, "--texts", texts, "--json", *REQUESTS[2:], "--pages", 1000]
command += ["--trace", trace, "--requests", len(LENGTHS), "--check"]
done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
if done.returncode != 0:
    faults.append(f"a trace: {done.stderr.strip()}")
else:
    came = [(one["arrival_s"], one["prompt"], len(one["generated_ids"])) for one in json.loads(done.stdout)["requests"]]
    expected = [(i / 2, min(max(p, 150), 450), min(max(n, 12), 48)) for i, (p, n) in enumerate(LENGTHS)]
    # An answer may end before the trace's did.
    if any(abs(c[0] - e[0]) > 1e-4 or c[1] != e[1] or c[2] > e[2] for c, e in zip(came, expected)) or len(came) != 6:
        faults.append(f"a trace: expected {expected}, came {came}")

for fault in faults:
    print(fault)
print(f"{len(faults)} fault(s)")
sys.exit(1 if faults else 0)
