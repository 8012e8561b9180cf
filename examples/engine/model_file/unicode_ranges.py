#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Writes unicode_ranges.inc: which code points are letters, numbers and white space.

Run with Python 3.11, whose unicodedata is Unicode 14.0: python3 unicode_ranges.py > unicode_ranges.inc
White_Space is the property of PropList.txt: the separators Z* and U+0009..U+000D, U+0085.
"""
import sys
import unicodedata


def kind(point: int) -> str:
    category = unicodedata.category(chr(point))
    if category[0] in "LN":
        return category[0]
    if category[0] == "Z" or 0x09 <= point <= 0x0D or point == 0x85:
        return "S"
    return ""


def main() -> None:
    ranges = []
    for point in range(sys.maxunicode + 1):
        name = kind(point)
        if ranges and name == ranges[-1][2] and ranges[-1][1] == point - 1:
            ranges[-1][1] = point
        elif name:
            ranges.append([point, point, name])
    print("// SPDX-License-Identifier: Apache-2.0")
    print("// SPDX-FileCopyrightText: The uniprefill authors")
    print(f"// Written by unicode_ranges.py from Unicode {unicodedata.unidata_version}: {len(ranges)} ranges, sorted.")
    line = ""
    for first, last, name in ranges:
        item = f"{{0x{first:X}, 0x{last:X}, {name}}},"
        if len(line) + 1 + len(item) > 110:
            print(line)
            line = ""
        line += (" " if line else "") + item
    print(line)


if __name__ == "__main__":
    main()
