"""The drills' own modules, and small models."""

from tests.connector.conftest import made
from tests.engine.conftest import tiny_model

__all__ = ["made", "tiny_model"]
