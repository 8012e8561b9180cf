# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Times llama.cpp's prefill of a text and sets it beside a report of the example engine.

Time to first token: the prompt's tokens go in, the last one's logits come out; loading and tokenizing don't count. Each
setting of flash attention and micro-batch runs after a short warm-up; the best counts.
"""

import argparse
import ctypes
import importlib.metadata
import json
import pathlib
import sys
import time

import llama_cpp as lc

BATCH = 2048


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--check", action="store_true", help="only see whether llama.cpp runs the model")
    parser.add_argument("--text-file", type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each setting, of which the fastest counts")
    parser.add_argument("--report", type=pathlib.Path, help="the engine's report.json on the same text")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    if not given.check and not (given.text_file and given.report and given.out):
        parser.error("--text-file, --report and --out: expected all three, came fewer")
    return given


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def tokenize(model, text):
    vocabulary = lc.llama_model_get_vocab(model)
    tokens = (lc.llama_token * (len(text) + 8))()
    count = lc.llama_tokenize(vocabulary, text, len(text), tokens, len(tokens), False, False)
    if count < 0:
        sys.exit(f"text-file: expected a text that llama.cpp tokenizes, came an error ({count})")
    return list(tokens[:count])


def prefill(context, tokens):
    lc.llama_memory_clear(lc.llama_get_memory(context), True)
    start = time.perf_counter()
    for first in range(0, len(tokens), BATCH):
        part = tokens[first : first + BATCH]
        array = (lc.llama_token * len(part))(*part)
        if lc.llama_decode(context, lc.llama_batch_get_one(array, len(part))) != 0:
            sys.exit("llama_decode: expected success, came an error")
    logits = lc.llama_get_logits_ith(context, -1)
    float(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))[0])
    return time.perf_counter() - start


def new_context(model, length, micro_batch, threads, flash):
    params = lc.llama_context_default_params()
    params.n_ctx = length
    params.n_batch = BATCH
    params.n_ubatch = micro_batch
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lc.llama_init_from_model(model, params)
    if not context:
        sys.exit("llama_init_from_model: expected a context, came none")
    return context


@lc.llama_log_callback
def silent(level, text, data):
    pass


def main():
    given = arguments()
    lc.llama_log_set(silent, ctypes.c_void_p(0))
    lc.llama_backend_init()
    model = lc.llama_model_load_from_file(given.model.encode(), lc.llama_model_default_params())
    if not model:
        sys.exit(f"model: expected a GGUF file that llama.cpp loads, came {given.model}")
    if given.check:
        prefill(new_context(model, 256, 512, given.threads, True), list(range(100, 228)))
        return

    report = json.loads(given.report.read_text())
    prompt_tokens = report["tokens"]
    tokens = tokenize(model, given.text_file.read_bytes())
    if len(tokens) < prompt_tokens:
        sys.exit(f"report: expected at most the text's {len(tokens)} tokens, came {prompt_tokens}")
    tokens = tokens[:prompt_tokens]

    runs = []
    for flash in (False, True):
        for micro_batch in (512, 2048):
            context = new_context(model, prompt_tokens + 64, micro_batch, given.threads, flash)
            prefill(context, tokens[:128])
            seconds = [prefill(context, tokens) for _ in range(given.repeats)]
            lc.llama_free(context)
            runs.append({"flash_attention": flash, "micro_batch": micro_batch, "ttft_s": seconds})
            print(f"llama.cpp, flash attention {flash}, micro-batch {micro_batch}: {min(seconds):.2f} s", file=sys.stderr)

    best = min(min(run["ttft_s"]) for run in runs)
    dense, sparsified = report["dense"]["ttft_s"], report["sparsified"]["ttft_s"]
    result = {
        "cpu": cpu_name(),
        "threads": given.threads,
        "commit": given.commit,
        "model": pathlib.Path(given.model).name,
        "text": given.text_file.name,
        "tokens": prompt_tokens,
        "llama_cpp": {
            "llama_cpp_python": importlib.metadata.version("llama_cpp_python"),
            "system": lc.llama_print_system_info().decode().strip(" |"),
            "batch": BATCH,
            "runs": runs,
            "best_ttft_s": best,
        },
        "engine": {key: report[key] for key in ("arithmetic", "policy", "quality", "lin", "att") if key in report},
        "dense_ttft_s": dense,
        "sparsified_ttft_s": sparsified,
        "dense_of_llama_cpp": dense / best,
        "speedup_over_llama_cpp": best / sparsified,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{prompt_tokens} tokens, {given.threads} threads: llama.cpp {best:.2f} s, engine dense {dense:.2f} s "
        f"({dense / best:.2f} of it), sparsified {sparsified:.2f} s ({best / sparsified:.1f} times faster)"
    )


main()
