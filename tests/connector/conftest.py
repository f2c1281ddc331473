"""The small models of the engine's tests, and nodes that are closed whatever happens."""

from collections.abc import Iterator

import pytest

from tests.connector.pair import Node
from tests.connector.wire import Gate
from tests.engine.conftest import tiny_mistral, tiny_model

__all__ = ["tiny_mistral", "tiny_model"]


@pytest.fixture
def made() -> Iterator[list[Node]]:
    """Nodes to close at the end of the test, with all their writes let go: a ZMQ context that is collected while its
    sockets are open waits for ever."""
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        if (producer := node.core.connector.producer) and isinstance(producer._transport, Gate):
            producer._transport.may_write.set()
        node.core.close()
