#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""The program as a person meets it: bad input is one line that names the argument, exit code 2, nothing half-written.

usage: cli.py ENGINE. Skipped (77) where UNIPREFILL_MODEL doesn't name the model's file.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

engine = sys.argv[1]
model = os.environ.get("UNIPREFILL_MODEL", "")
if not os.path.isfile(model):
    print("UNIPREFILL_MODEL doesn't name the model's file")
    sys.exit(77)

faults = []
folder = pathlib.Path(tempfile.mkdtemp())


def run(*arguments, text=None):
    return subprocess.run([engine, *map(str, arguments)], input=text, capture_output=True, text=True, timeout=240)


def refuses(named, *arguments, text=None):
    """The command ends with exit code 2 and one line that has `named`, what was expected and what came."""
    done = run(*arguments, text=text)
    line = done.stderr.strip()
    good = (
        done.returncode == 2
        and "\n" not in line
        and line.startswith("uniprefill-engine: ")
        and named in line
        and "expected" in line
        and "came" in line
        and done.stdout == ""
    )
    if not good:
        faults.append(f"{arguments}: exit code {done.returncode}, {done.stdout!r}, {done.stderr!r}")


def file(name, content):
    path = folder / name
    path.write_bytes(content)
    return path


out = folder / "report"
prompt = ("--text", "The capital of France is")
with open(model, "rb") as whole:
    head = whole.read(1 << 20)

for bad in (folder / "missing.gguf", folder, file("empty.gguf", b""), file("text.gguf", b"not a model at all" * 10)):
    refuses(bad.name, "generate", "--model", bad, *prompt)
    refuses(bad.name, "inspect", "--model", bad)
for size in (4, 24, 100, 5000, len(head)):
    refuses("", "inspect", "--model", file("truncated.gguf", head[:size]))
swapped = head.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00lamba", 1)
refuses("", "generate", "--model", file("other.gguf", swapped), *prompt)

refuses("--text-file", "generate", "--model", model, "--text-file", folder / "missing.txt")
refuses("", "generate", "--model", model, "--text", "")
refuses("", "generate", "--model", model, "--text-file", "-", text="")
refuses("", "generate", "--model", model, "--text", " a" * 9000)
for option, values in {
    "--p": ("0", "-1", "1.0001", "nan", "x"),
    "--block-rows": ("7", "257", "1e3"),
    "--observations": ("0", "513"),
    "--layers": ("30", "3,3", "7,5", "-1", "7:2", "x"),
    "--threads": ("0", "100000"),
    "--tokens": ("-1",),
    "--temperature": ("-1", "inf"),
    "--policy": (folder / "missing.json", file("bad.json", b"{"), file("deep.json", b"[" * 60000)),
    "--selector": ("best",),
}.items():
    for value in values:
        named = value.name if isinstance(value, pathlib.Path) else option
        refuses(named, "generate", "--model", model, *prompt, option, value)
refuses("", "generate", "--model", model, *prompt, "--nonsense")
refuses("/dev/null/report", "compare", "--model", model, *prompt, "--out", "/dev/null/report")
listed = file("texts.txt", b"/usr/share/common-licenses/GPL-3\n")
serving = ("serve-sim", "--model", model, "--texts", listed)
refuses("--texts", "serve-sim", "--model", model)
refuses("missing.txt", "serve-sim", "--model", model, "--texts", folder / "missing.txt")
refuses("missing.txt", "serve-sim", "--model", model, "--texts", file("list.txt", b"/missing.txt\n"))
refuses("t.csv' line 2", *serving, "--trace", file("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023,1\n"))
refuses("prefill budget", *serving, "--span", 512, "--prefill-budget", 512)
refuses("pages", *serving, "--pages", 100)
refuses("--max-prompt", *serving, "--max-prompt", 9000)
licence = "/usr/share/common-licenses/GPL-3"
calibrating = ("calibrate", model, "--texts", licence)
refuses("--texts", "calibrate", model)
refuses("missing.txt", "calibrate", model, "--texts", folder / "missing.txt")
refuses("--texts", *calibrating, "--windows", 9)
refuses("--tokens", *calibrating, "--tokens", 8192)
refuses("--out", *calibrating, "--out", folder)
refuses("/dev/null", *calibrating, "--out", "/dev/null/policy.json")
refuses("--time-limit", *calibrating, "--tokens", 512, "--time-limit", 0.00001)
refuses("--device", *calibrating, "--device", "gpu")
refuses("--att", *calibrating, "--lin", 0.5)
refuses("--lin", *calibrating, "--lin", 0, "--att", 0.5)
refuses("--worst", *calibrating, "--worst", 0.5)
bounded = (*calibrating, "--tokens", 512, "--windows", 1, "--lin", 0.6, "--att", 0.5)
refuses("missing.json", *bounded, "--begin", folder / "missing.json")
other = b'{"uniprefill_policy": 1, "layers": [{"layer": 7, "selector": "fixed-ratio", "p": 0.5}]}'
refuses("--begin: layers[0].selector", *bounded, "--begin", file("other.json", other))
if list(folder.glob("report*")):
    faults.append("a refused run left a report")

answer = run("generate", "--model", model, *prompt, "--tokens", 2)
if answer.returncode != 0 or answer.stdout != " Paris.\n":
    faults.append(f"generate: {answer}")

# What calibration writes is a policy, even if there was no time to look for one.
found = folder / "found.json"
done = run(*calibrating, "--tokens", 512, "--windows", 1, "--time-limit", 0.2, "--out", found)
if done.returncode != 0 or "Chosen:" not in done.stdout or not (folder / "found.measured.json").exists():
    faults.append(f"calibrate: {done}")
else:
    json.loads((folder / "found.measured.json").read_text())
    answer = run("generate", "--model", model, *prompt, "--tokens", 2, "--policy", found)
    if answer.returncode != 0 or answer.stdout != " Paris.\n":
        faults.append(f"generate with what calibrate wrote: {answer}")

# The same of a search within bounds of work, and what there is no device for is said.
done = run(*bounded, "--time-limit", 0.7, "--out", found)
if done.returncode != 0 or "Chosen:" not in done.stdout or "within lin 0.6" not in found.read_text():
    faults.append(f"calibrate within bounds: {done}")
elif run("generate", "--model", model, *prompt, "--tokens", 2, "--policy", found).returncode != 0:
    faults.append("generate with what calibrate within bounds wrote")
done = run(*bounded, "--device", "cuda", "--time-limit", 0.2, "--out", found)
if done.returncode != 0 and (done.returncode != 2 or "--device: expected" not in done.stderr):
    faults.append(f"calibrate on a device: {done}")

# A text that the model answers with its end at once still compares, and --tokens holds for both runs.
chat = "<|im_start|>user\nHello<|im_end|>\n"
compared = run("compare", "--model", model, "--text", chat * 3, "--tokens", 3, "--out", out, "--json")
if compared.returncode != 0:
    faults.append(f"compare: {compared}")
else:
    report = json.loads(compared.stdout)
    if report != json.loads((out / "report.json").read_text()) or not (out / "report.html").exists():
        faults.append("compare: what is printed isn't what is written")
    if max(len(report[name]["generated_ids"]) for name in ("dense", "sparsified")) > 3:
        faults.append("compare: --tokens isn't honoured")

for fault in faults:
    print(fault)
print(f"{len(faults)} fault(s)")
sys.exit(1 if faults else 0)
