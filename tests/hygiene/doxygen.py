#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""The API reference builds without a warning, everything public is described, and functions state their contract.

Described: types, macros, functions (accessors without arguments speak for themselves), and the shape behind each pointer.
A function that can refuse (its result is a `status`) says, itself or in the comment of its group, class or file: errors,
complexity, thread safety and determinism.
"""

import os
import re
import xml.etree.ElementTree

import gate

CONTRACT = {
    "errors": r"error|refus|fault|fails|must|ok |invalid|wrong_state|not_supported|unknown_request",
    "complexity": r"complexity|O\(|linear|constant|proportional",
    "thread safety": r"thread",
    "determinism": r"determin|bit-identical|bit for bit|exact|same (answer|bits|order)",
}

options = gate.arguments(__doc__).parse_args()
doxygen = gate.need("doxygen")
faults = []


def texts(element, tag):
    return ["".join(part.itertext()) for part in element.findall(tag)]


def described(element):
    tags = ("briefdescription", "detaileddescription", "inbodydescription")
    return " ".join(text for tag in tags for text in texts(element, tag))


with gate.scratch() as folder:
    environment = dict(os.environ, UNIPREFILL_DOCS_OUTPUT=folder, UNIPREFILL_VERSION="")
    result = gate.run([doxygen, "docs/Doxyfile"], cwd=options.root, env=environment)
    if result.returncode:
        lines = result.stdout.replace(f"{options.root.resolve()}/", "").splitlines()
        faults += [line for line in lines if line.strip()] or ["doxygen failed"]

    compounds = []
    for path in sorted(os.listdir(f"{folder}/xml")) if os.path.isdir(f"{folder}/xml") else []:
        if path.endswith(".xml") and path != "index.xml":
            compounds += xml.etree.ElementTree.parse(f"{folder}/xml/{path}").getroot().findall("compounddef")


def place(element):
    """file:line of a declaration, the file as it is included."""
    location = element.find("location")
    return location.get("file").removeprefix("include/"), location.get("line")


def type_of(member):
    element = member.find("type")
    return "".join(element.itertext()).strip() if element is not None else ""


def speaks_for_itself(member):
    if member.get("kind") == "function":
        # Constructors that do nothing but hold, destructors, accessors, defaulted and deleted functions.
        return member.find("param") is None or member.findtext("argsstring", "").endswith(("=default", "=delete"))
    if member.get("kind") in ("variable", "typedef", "friend"):
        return not type_of(member).endswith("*")
    return False


file_comments = {place(c)[0]: described(c) for c in compounds if c.get("kind") == "file"}
functions = 0
for compound in compounds:
    is_class = compound.get("kind") in ("class", "struct")
    if compound.get("prot") == "private":
        continue
    specialised = "<" in compound.findtext("compoundname")
    if is_class and not specialised and not described(compound).strip():
        faults.append("{}:{}: {} isn't described".format(*place(compound), compound.findtext("compoundname")))
    for group, member in ((group, member) for group in compound.iter("sectiondef") for member in group.iter("memberdef")):
        if member.get("prot") == "private" or (compound.get("kind") == "file" and member.get("kind") != "define"):
            continue
        where = "{}:{}: {}".format(*place(member), member.findtext("name"))
        own = described(member)
        if not own.strip() and not speaks_for_itself(member):
            faults.append(f"{where} isn't described")
        if member.get("kind") == "function" and re.search(r"\bstatus$", type_of(member)) and "/core/" not in where:
            functions += 1
            text = own + "".join(part for tag in ("header", "description") for part in texts(group, tag))
            text += (described(compound) if is_class else "") + file_comments.get(place(member)[0], "")
            missing = [what for what, words in CONTRACT.items() if not re.search(words, text, re.I)]
            if missing:
                faults.append(f"{where} doesn't say: {', '.join(missing)}")
gate.finish(sorted(set(faults)), f"the reference and {functions} functions that can refuse")
