"""The package stays small enough to be read whole, and its imports point one way."""

import ast
import subprocess
import sys

from tests.size import AROUND_LIMIT, ENGINE_LIMIT, FILE_LIMIT, PACKAGE, count, lines_of_code, parts


def test_within_the_budget():
    counts = count()
    engine, around = parts(counts)
    assert engine <= ENGINE_LIMIT
    assert around <= AROUND_LIMIT
    assert max(counts.values()) <= FILE_LIMIT


def test_only_code_counts():
    source = '"""Doc."""\n\n# comment\nx = 1\n\n\ndef f(\n    a,\n):\n    "doc"\n'
    assert lines_of_code(source) == 4


LAYERS = {
    "config": 0,
    "request": 0,
    "core": 1,
    "trace": 1,
    "kernels": 1,
    "models": 1,
    "connector": 2,
    "worker": 2,
    "engine": 3,
}


def test_imports_point_one_way():
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for node in ast.parse(path.read_text()).body:  # top level only: TYPE_CHECKING blocks do not run
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanopd."):
                there = (node.module or "").split(".")[1]
                assert LAYERS.get(there, 9) <= LAYERS.get(here, 9), f"{path} imports {node.module}"


def test_the_core_imports_no_torch():
    code = "import sys, nanopd.core.scheduler, nanopd.connector.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_imports_nothing_heavy():
    heavy = {"torch", "transformers", "numpy", "rich"}
    code = (
        f"import sys; from nanopd import cli; cli.add_checkout_commands(); sys.exit(bool({heavy} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
