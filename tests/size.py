"""Counts the lines of code in nanopd/: no blank lines, comments or docstrings. `make size` prints it, a test holds it.

The package has to stay small enough to be read whole: at most 3,200 lines, no file above 450.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "nanopd"
LIMIT, FILE_LIMIT = 3200, 450
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


if __name__ == "__main__":
    counts = count()
    for path, lines in counts.items():
        print(f"{lines:5}  {path}")
    print(f"{sum(counts.values()):5}  nanopd/ in all, of {LIMIT}")
    sys.exit(sum(counts.values()) > LIMIT or max(counts.values()) > FILE_LIMIT)
