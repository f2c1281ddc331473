"""Exercise 15: a routing policy.

Write the three methods. The real router will choose by your class: `nanopd grade 15 exercise.py`. The nodes behind it run
the real scheduler and the real block pool.

A prompt comes as the ids of its blocks. Each id stands for its block and everything before it, so two prompts have the
same ids exactly as far as they begin alike.
"""

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
        raise NotImplementedError("matched")

    def remember(self, node: str, prompt: Sequence[int]) -> None:
        """The prompt went to this node: its blocks are now the latest there.

        At most `most` stay remembered. The blocks of older prompts are forgotten first; of one prompt, its end is
        forgotten before its beginning. `seen[node]` has the order in which they go: first comes the next to be forgotten.
        """
        raise NotImplementedError("remember")

    def choose(self, in_flight: Mapping[str, int], prompt: Sequence[int]) -> str | None:
        """The node for this prompt, which is remembered there. None if there is no node.

        A node that is not in `in_flight` is down, and when it comes back its cache is empty. Of the nodes within the bound
        take the one with the most matched blocks; of equals the one with the fewest requests in flight; of those the first.

        Args:
            in_flight: requests at each node that is up.
        """
        raise NotImplementedError("choose")
