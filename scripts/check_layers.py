#!/usr/bin/env python3
"""Holds the C++ sources to the order of the rooms, and the library to its manners.

A room of spolia/ includes itself and the rooms before it in ROOMS; everything else may include any room. Every quoted
include is a path from the root to a file that is there. The library neither prints nor ends the process; its tests and
benchmarks may. Each violation is printed as FILE:LINE: REASON; the exit status says whether there was one.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOMS = ["base", "device", "tensor", "layout", "state", "mapping", "plan", "store", "format", "comm", "engine",
         "checkpoint", "assemble", "optim"]
FOLDERS = ["spolia", "cli", "bench", "examples", "fuzz", "python", "tests"]

# A literal or a comment, so that neither a commented include nor a word in a message counts.
LITERAL_OR_COMMENT = re.compile(
    r'R"(?P<end>[^()\\\s]*)\(.*?\)(?P=end)"'
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'"
    r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?P<name>"[^"\n]*"|<[^>\n]*>)', re.MULTILINE)
# Calls of free functions only: an object may have an abort() of its own.
BAD_MANNERS = re.compile(
    r"\bstd::(?:cout|cerr|clog|wcout|wcerr)\b|\bfmt::print\b|#[ \t]*include[ \t]*<(?:iostream|fmt/ostream\.h)>"
    r"|(?:(?<![\w.:>&*~])|\bstd::|(?<!\w)::)"
    r"(?:v?f?printf|f?puts|putchar|perror|_?exit|_Exit|quick_exit|abort|terminate)[ \t]*\(")


def blanked(text, comments_only=False):
    """`text` with comments and, unless `comments_only`, literals blanked; every line keeps its number."""
    def blank(match):
        literal = not match[0].startswith(("//", "/*"))
        return match[0] if literal and comments_only else re.sub(r"[^\n]", " ", match[0])
    return LITERAL_OR_COMMENT.sub(blank, text)


def is_declaration(code, start):
    """Whether the name at `start` is being declared: a type stands before it."""
    before = re.search(r"(\w+)[ \t]+$", code[:start])
    return bool(before) and before[1] not in {"return", "else", "do", "co_return"}


def include_fault(root, path, name):
    """What is wrong with including `name` (with its quotes or brackets) in `path`, or None."""
    target = name[1:-1]
    if name.startswith("<"):
        return "include the project's files in quotes" if target.startswith("spolia/") else None
    if Path(path).parts[0] == "examples" and ((root / path).parent / target).is_file():
        return None  # an example is a project of its own
    if not (root / target).is_file() or ".." in Path(target).parts:
        return f"{name} is not a path from the root to a file of the project; other headers take <>"
    room, included = (Path(p).parts[1] if Path(p).parts[0] == "spolia" else None for p in (path, target))
    if included and included not in ROOMS:
        return f"{name} is in no known room"
    if room in ROOMS and not included:
        return f"the library may not include {name} from outside spolia/"
    if room in ROOMS and ROOMS.index(included) > ROOMS.index(room):
        return f"{room} may not include {name}: {included} comes after it"
    return None


def faults_of(root, path):
    """(line, reason) for each fault of the file `path`, relative to `root`."""
    text = (root / path).read_text(encoding="utf-8")
    found = []
    if path.parts[0] == "spolia" and path.parts[1] not in ROOMS:
        found.append((0, "this file is in no known room"))
    for match in INCLUDE.finditer(blanked(text, comments_only=True)):
        if reason := include_fault(root, path, match["name"]):
            found.append((match.start(), reason))
    if path.parts[0] == "spolia" and not path.stem.endswith(("_test", "_bench")):
        code = blanked(text)
        for match in BAD_MANNERS.finditer(code):
            if not is_declaration(code, match.start()):
                found.append((match.start(), f"the library never prints, exits or aborts: {match[0].strip()}"))
    return [(text.count("\n", 0, at) + 1, reason) for at, reason in sorted(found)]


def check(root):
    """The violations below `root` as printed lines, and the number of files looked at."""
    files = sorted(path.relative_to(root) for folder in FOLDERS for path in (root / folder).rglob("*")
                   if path.suffix in {".h", ".cc"})
    return [f"{path}:{line}: {reason}" for path in files for line, reason in faults_of(root, path)], len(files)


# Files of a small tree, with the number of the line at fault, or None where the file is in order.
SELF_TEST = {
    "spolia/base/a.h": ("#pragma once\n", None),
    "spolia/base/upward.cc": ('#include "spolia/base/a.h"\n#include "spolia/tensor/t.h"\n', 2),
    "spolia/tensor/t.h": ('#include "spolia/base/a.h"\n#include <vector>\n', None),
    "spolia/tensor/t_test.cc": ('#include <iostream>\n#include "spolia/tensor/t.h"\nint main() { std::cout << 1; }\n', None),
    "spolia/tensor/upward_test.cc": ('\n#include "spolia/engine/e.h"\n', 2),
    "spolia/engine/e.h": ('#include "spolia/tensor/t.h"\n', None),
    "spolia/engine/neighbour.cc": ('#include "e.h"\n', 1),
    "spolia/engine/dots.cc": ('#include "spolia/engine/../base/a.h"\n', 1),
    "spolia/engine/angle.cc": ("#include <spolia/base/a.h>\n", 1),
    "spolia/engine/missing.cc": ('#include "spolia/base/none.h"\n', 1),
    "examples/e/main.cc": ('#include "beside.h"\n', None),
    "examples/e/beside.h": ('#include <vector>\n', None),
    "examples/e/wrong.cc": ('#include "not_there.h"\n', 1),
    "spolia/engine/outside.cc": ('#include "cli/c.h"\n', 1),
    "spolia/engine/prints.cc": ('void f() {\n  std::printf("%d", 1);\n}\n', 2),
    "spolia/engine/exits.cc": ("void f(bool b) {\n  if (b) return;\n  else exit(1);\n}\n", 3),
    "spolia/engine/aborts.cc": ("void f() { ::abort(); }\n", 1),
    "spolia/engine/fine.cc": ('// exit(1); #include "nowhere.h"\n/* std::cerr */ const char* s = "abort()";\n'
                              'void abort();\nvoid g(G& g) { g.abort(); snprintf(0, 0, "x"); }\n'
                              'auto r = R"(puts("x"))"; int n = 1\'000;\n', None),
    "spolia/attic/x.h": ("\n", 1),
    "spolia/loose.h": ("\n", 1),
    "cli/c.h": ('#include "spolia/engine/e.h"\n#include "spolia/base/a.h"\n', None),
    "cli/attic.cc": ('#include <cstdio>\n#include "spolia/attic/x.h"\n', 2),
    "tests/t.cc": ('#include "spolia/engine/e.h"\n', None),
}


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, (text, _) in SELF_TEST.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, encoding="utf-8")
        lines, _ = check(root)
    found = sorted(":".join(line.split(":", 2)[:2]) for line in lines)
    expected = sorted(f"{name}:{line}" for name, (_, line) in SELF_TEST.items() if line)
    assert found == expected, f"found and expected differ in {sorted(set(found) ^ set(expected))}: {lines}"


def main(arguments):
    if arguments == ["--self-test"]:
        self_test()
        print(f"check_layers: the self-test's {len(SELF_TEST)} files are judged rightly")
        return 0
    if arguments:
        print("usage: check_layers.py [--self-test]", file=sys.stderr)
        return 2
    lines, files = check(Path(__file__).resolve().parent.parent)
    print("\n".join(lines + [f"check_layers: {files} files, {len(lines)} violations"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
