#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The uniprefill authors
"""Every function of the library is hidden: what one shared object compiled, no other may bind to.

Read from clang's syntax tree, so that templates count although nothing instantiates them. Implicit, defaulted and
deleted members are left out, lambdas and local classes follow their function.
"""

import re

import gate

options = gate.arguments(__doc__).parse_args()
clang = gate.need("clang++")
names, flags = gate.compilable(options.root, clang, ".hpp")
command = [clang, *flags, "-std=c++17", "-fsyntax-only", f"-I{options.root}/include", "-fno-color-diagnostics", "-x", "c++", "-"]
command += ["-Xclang", "-ast-dump", "-Xclang", "-ast-dump-filter=uniprefill"]
tree = gate.run(command, input=gate.include_lines(names))
if tree.returncode:
    gate.finish([line for line in tree.stdout.splitlines() if re.search(r":\d+: (fatal )?error:", line)], "the headers")

FUNCTIONS = {"FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXDestructorDecl", "CXXConversionDecl"}
RECORDS = {"CXXRecordDecl", "ClassTemplateSpecializationDecl", "ClassTemplatePartialSpecializationDecl"}
NODE = re.compile(r"^((?:[|` ][- ])*)(\w+) 0x[0-9a-f]+(.*)$")
NAMED = re.compile(r"(?:col|line):[\d:]+ ((?:(?:used|referenced|implicit|constexpr|class|struct|invalid) )*)"
                   r"(.+?)(?= '| definition|$| inline)")  # fmt: skip


class node:
    def __init__(self, depth, kind, rest):
        self.depth, self.kind, self.rest = depth, kind, rest
        named = NAMED.search(rest)
        self.qualifiers, self.name = named.groups() if named else ("", "")
        self.hidden = False
        self.pattern_seen = False

    def must_be_hidden(self):
        written = "implicit" not in self.qualifiers.split()
        return self.kind in FUNCTIONS and written and not re.search(r" (?:default|delete)\b", self.rest)


path, shown, functions = [], set(), 0


def leave(last):
    """Judges a node once all its children have been seen."""
    global functions
    around = [n.kind for n in path]
    if not last.must_be_hidden() or not (FUNCTIONS | {"LambdaExpr"}).isdisjoint(around):
        return
    if ("ClassTemplateDecl", "ClassTemplateSpecializationDecl") in zip(around, around[1:]):
        return  # an instantiation: the template itself has been judged
    if around[-1:] == ["FunctionTemplateDecl"]:
        if path[-1].pattern_seen:
            return
        path[-1].pattern_seen = True
    functions += 1
    if not last.hidden and not any(n.hidden for n in path if n.kind in RECORDS):
        scopes = [n.name for n in path if n.kind == "NamespaceDecl" or n.kind in RECORDS]
        shown.add("::".join([*scopes, last.name]) + "() isn't hidden")


for line in tree.stdout.splitlines():
    match = NODE.match(line)
    if not match:
        continue
    depth = len(match.group(1)) // 2
    while path and path[-1].depth >= depth:
        leave(path.pop())
    path.append(node(depth, match.group(2), match.group(3)))
    if match.group(2) == "VisibilityAttr" and match.group(3).endswith("Hidden"):
        path[-2].hidden = True
while path:
    leave(path.pop())
gate.finish(sorted(shown), f"{functions} functions")
