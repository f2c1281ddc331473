"""The solution of exercise 15."""

import itertools
from collections.abc import Mapping, Sequence


class PrefixRouter:
    """Sends a request where its prefix is, unless that node is too far ahead of the others in work.

    Args:
        bound: how many more requests in flight than the least loaded node a node may have and still be chosen.
        most: how many blocks are remembered for a node; about as many as its pool holds.
    """

    def __init__(self, bound: int, most: int) -> None:
        self.bound, self.most = bound, most
        self.seen: dict[str, dict[int, None]] = {}  # node -> ids of blocks sent there; the next to be forgotten first

    def matched(self, node: str, prompt: Sequence[int]) -> int:
        """How many blocks of the prompt, from its beginning on without a hole, are remembered for this node."""
        return sum(1 for _ in itertools.takewhile(self.seen.get(node, {}).__contains__, prompt))

    def remember(self, node: str, prompt: Sequence[int]) -> None:
        """The prompt went to this node: its blocks are now the latest there.

        At most `most` stay remembered. The blocks of older prompts are forgotten first; of one prompt, its end is
        forgotten before its beginning. `seen[node]` has the order in which they go: first comes the next to be forgotten.
        """
        seen = self.seen.setdefault(node, {})
        for block in reversed(prompt):
            seen.pop(block, None)
            seen[block] = None
        while len(seen) > self.most:
            del seen[next(iter(seen))]

    def choose(self, in_flight: Mapping[str, int], prompt: Sequence[int]) -> str | None:
        """The node for this prompt, which is remembered there. None if there is no node.

        A node that is not in `in_flight` is down, and when it comes back its cache is empty. Of the nodes within the bound
        take the one with the most matched blocks; of equals the one with the fewest requests in flight; of those the first.

        Args:
            in_flight: requests at each node that is up.
        """
        self.seen = {node: seen for node, seen in self.seen.items() if node in in_flight}
        if not in_flight:
            return None
        most = min(in_flight.values()) + self.bound
        able = [node for node, load in in_flight.items() if load <= most]
        best = max(able, key=lambda node: (self.matched(node, prompt), -in_flight[node]))
        self.remember(best, prompt)
        return best
