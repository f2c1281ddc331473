"""The small models of the engine's tests."""

from tests.engine.conftest import tiny_mistral, tiny_model

__all__ = ["tiny_mistral", "tiny_model"]
