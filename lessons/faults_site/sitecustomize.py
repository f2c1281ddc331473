"""Python imports a module of this name at its start. Only the drills put this folder on PYTHONPATH: see ../faults.py."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("nanopd_faults", Path(__file__).parent.parent / "faults.py")
assert _spec and _spec.loader
_faults = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_faults)
_faults.install()
