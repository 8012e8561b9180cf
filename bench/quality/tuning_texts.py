#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Copies texts that no window of the bench holds, for calibration. usage: tuning_texts.py DIR

DIR/code_*.txt are modules of this Python's library and DIR/law_*.txt licences, none of them among those of texts.py. Essays
that no window holds are what `uniprefill-quality --between DIR/essays.txt` writes. About 200,000 tokens of SmolLM2's with those.
"""

import pathlib
import shutil
import sys
import sysconfig

CODE = ["shutil", "difflib", "configparser", "email/message", "unittest/mock", "zipfile", "pickle", "datetime"]
LAW = ["Artistic", "CC0-1.0", "MPL-1.1"]


def licences(library):
    """Debian's, Python's and, where there is one, the CUDA Toolkit's."""
    debian = [pathlib.Path("/usr/share/common-licenses") / name for name in LAW]
    toolkit = sorted(pathlib.Path("/usr/local").glob("cuda*/dist-info/*cuda_runtime*/licenses/License.txt"))
    toolkit += sorted(pathlib.Path("/usr/local").glob("cuda*/EULA.txt"))
    return debian + [library / "LICENSE.txt"] + toolkit[:1]


def main():
    if len(sys.argv) != 2:
        sys.exit("tuning_texts.py: argument: expected a folder, came %d arguments" % (len(sys.argv) - 1))
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    sources = {"code_" + name.replace("/", "_"): library / (name + ".py") for name in CODE}
    for number, path in enumerate(licences(library)):
        sources[f"law_{number}_{path.stem}"] = path
    for name, path in sources.items():
        if not path.is_file():
            sys.exit(f"tuning_texts.py: {name}: expected {path}, which isn't there")
        shutil.copyfile(path, folder / (name + ".txt"))
        print(folder / (name + ".txt"))


main()
