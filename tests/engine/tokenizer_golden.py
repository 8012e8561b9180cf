#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Writes what other programs make of seeded random text, for tokenizer_test.cpp and tokenizer_model_test.cpp.

    pip install regex==2026.11.19 tokenizers==0.23.3 gguf==0.19.0 && python3 tokenizer_golden.py MODEL.gguf

tokenizer_splits.txt: words by the package `regex`, run on the published patterns.
    <pretokenizer> <text in hex> <lengths of the words in bytes>
tokenizer_ids.txt: ids by the package `tokenizers`, given the vocabulary and merges of SmolLM2's GGUF file.
    <text in hex> <ids>
Characters are drawn from those that Unicode 14.0 assigns, so that newer tables agree. Run with Python 3.11.
"""
import pathlib
import random
import sys
import unicodedata

import gguf
import regex
import tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = ["'", "'s", "'RE", "'ll ", " ", "  ", "\n", "\r\n", "\t", "a", "The", " x", "don't", "1", "12", "1234", " 7", ".", "!?", " -",
          "\u00e9", "\u00df", "\u0660", "\u00bd", "\u2167", "\u3000", "\u00a0", "\u2028", "\u4e2d\u6587", "\U0001f600", "\u0301",
          "\u0414\u0430", "\U00010400", "\u200d", "_", "\x1f", "\x85", "'\u017f"]  # fmt: skip


def random_text(source: random.Random) -> str:
    out = ""
    for _ in range(source.randrange(1, 16)):
        if source.random() < 0.85:
            out += source.choice(PIECES)
            continue
        while True:
            point = source.randrange(0x30000)
            if unicodedata.category(chr(point)) not in ("Cn", "Cs", "Co"):
                break
        out += chr(point)
    return out


def words(kind: str, text: str) -> list[str]:
    if kind != "smollm":
        return regex.findall(GPT2 if kind == "gpt-2" else LLAMA3, text)
    pieces = regex.split(r"(\p{N})", text)
    return [word for piece in pieces if piece for word in words("gpt-2", piece)]


def smollm2(path: str) -> tokenizers.Tokenizer:
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(line.split(" ")) for line in fields["tokenizer.ggml.merges"].contents()]
    out = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    out.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True),
         tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])  # fmt: skip
    return out


def main() -> None:
    assert unicodedata.unidata_version == "14.0.0"
    folder = pathlib.Path(__file__).parent
    source = random.Random(20260101)
    lines = []
    for kind in ("gpt-2", "smollm", "llama-bpe"):
        for _ in range(100):
            text = random_text(source)
            split = words(kind, text)
            assert "".join(split) == text
            lengths = " ".join(str(len(word.encode())) for word in split)
            lines.append(f"{kind} {text.encode().hex()} {lengths}\n")
    (folder / "tokenizer_splits.txt").write_text("".join(lines))

    model = smollm2(sys.argv[1])
    lines = []
    while len(lines) < 100:
        text = random_text(source)
        ids = model.encode(text).ids
        # The vocabulary has no token for some bytes: the package leaves them out.
        if tokenizers.decoders.ByteLevel().decode([model.id_to_token(i) for i in ids]) == text:
            lines.append(f"{text.encode().hex()} {' '.join(map(str, ids))}\n")
    (folder / "tokenizer_ids.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
