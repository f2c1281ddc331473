"""Counts the lines of code in nanopd/: no blank lines, comments or docstrings. `make size` prints it, a test holds it.

The package has to stay small enough to be read. Its design asks for 3,200 lines in all, and it has more: the difference
is printed. So that it does not grow without anybody noticing, its two parts have a limit each: the engine, which is what
the lessons take apart, and what stands around it: HTTP, traces and the command line. No file is above 450.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanopd"
BUDGET = 3200
ENGINE_LIMIT, AROUND_LIMIT, FILE_LIMIT = 3974, 1408, 450
AROUND = ("__init__", "__main__", "cli", "batch", "serve", "trace")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source: str) -> int:
    """How many lines hold a token that is neither a comment nor part of a bare string (a docstring)."""
    bare_strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            bare_strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({token.start[0] for token in tokens if token.type not in _NO_CODE} - bare_strings)


def count() -> dict[str, int]:
    """Lines of code for each file of the package, by path relative to it."""
    return {str(p.relative_to(PACKAGE)): lines_of_code(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}


def parts(counts: dict[str, int]) -> tuple[int, int]:
    """(the engine, what stands around it)."""
    around = sum(n for path, n in counts.items() if Path(path).parts[0].removesuffix(".py") in AROUND)
    return sum(counts.values()) - around, around


if __name__ == "__main__":
    counts = count()
    for path, lines in counts.items():
        print(f"{lines:5}  {path}")
    engine, around = parts(counts)
    print(f"{engine:5}  the engine, of {ENGINE_LIMIT}")
    print(f"{around:5}  around it ({', '.join(AROUND[2:])}), of {AROUND_LIMIT}")
    print(f"{engine + around:5}  nanopd/ in all: {engine + around - BUDGET} more than the {BUDGET} of its design")
    sys.exit(engine > ENGINE_LIMIT or around > AROUND_LIMIT or max(counts.values()) > FILE_LIMIT)
