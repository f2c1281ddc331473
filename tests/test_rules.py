"""Every rule that code or a test cites is written out in lessons/rules.md, and every rule there is cited somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
CITED = re.compile(r"(?<![\w-])([SKTP])(\d{1,2})(?:-[SKTP](\d{1,2}))?(?!\w|\.\d)")


def cited(folder: str) -> set[str]:
    """Rules named in comments and docstrings; S1-S11 names eleven."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for line in path.read_text().splitlines():
            if re.search(r"[Rr]ules? |[(#\"]", line):
                for kind, first, last in CITED.findall(line):
                    found |= {f"{kind}{i}" for i in range(int(first), int(last or first) + 1)}
    return found


def test_rules_are_written_out_and_cited():
    written = set(re.findall(r"^- \*\*(\w+)\*\*", (ROOT / "lessons/rules.md").read_text(), re.M))
    assert {f"S{i}" for i in range(1, 14)} | {f"K{i}" for i in range(1, 11)} | {f"T{i}" for i in range(1, 5)} <= written
    used = (cited("nanopd") | cited("tests")) - {"P0"}  # a register in a line of SASS
    assert used <= written, f"cited, but not written out: {sorted(used - written)}"
    unused = written - cited("nanopd")
    assert not unused, f"written out, but cited nowhere in the code: {sorted(unused)}"
