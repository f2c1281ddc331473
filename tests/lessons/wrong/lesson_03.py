"""Wrong block pools."""

WRONG = {
    "evicts when a block is freed": [
        (
            "                freed.append(block)\n",
            "                self.evict(block)\n                freed.append(block)\n",
        )
    ],
    "does not evict what it pops": [
        ("            self.evict(block)\n            block.ref_cnt = 1", "            block.ref_cnt = 1")
    ],
    "leaves a touched block in the queue": [
        (
            "            if block.ref_cnt == 0:\n                self.free_queue.remove(block)\n            block.ref_cnt += 1",
            "            block.ref_cnt += 1",
        )
    ],
    "frees in the wrong order": [("self.free_queue.append(freed)", "self.free_queue.append(reversed(freed))")],
    "frees a block that others hold": [
        ("            if block.ref_cnt == 0:\n                freed.append(block)", "            freed.append(block)")
    ],
    "a twin takes the place": [
        (
            "if block.block_hash is None and block_hash not in self.cached_block_hash_to_block:",
            "if block.block_hash is None:",
        )
    ],
    "counts new blocks as nobody's": [("            block.ref_cnt = 1\n", "            block.ref_cnt = 0\n")],
    "pops one too few": [("self.free_queue.popleft(n)", "self.free_queue.popleft(max(0, n - 1))")],
}
