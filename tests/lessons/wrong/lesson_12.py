"""Wrong transfer engines."""

WRONG = {
    "a small rest gets a slice of its own": [
        ("left if left <= SLICE_SIZE + FRAGMENT_LIMIT else SLICE_SIZE", "min(left, SLICE_SIZE)")
    ],
    "targets are not moved on": [("request.target + offset", "request.target")],
    "numbers the slices of each request": [
        (
            "        slices = [one for request in requests for one in self.cut(request)]\n        for n, one in enumerate(slices):\n",
            "        for n, one in (pair for request in requests for pair in enumerate(self.cut(request))):\n",
        )
    ],
    "one queue pair gets everything": [
        ("share = -(-len(mine) // (len(endpoint.queue_pairs) - i))", "share = len(mine)")
    ],
    "forgets what does not fit": [("                    rest += mine[fits:share]\n", "")],
    "never lowers the depth": [("                one.queue_pair.depth -= 1\n", "")],
    "lowers the depth only for what was written": [
        ("                one.queue_pair.depth -= 1\n", ""),
        (
            "                    one.request.num_succeeded += 1",
            "                    one.queue_pair.depth -= 1\n                    one.request.num_succeeded += 1",
        ),
    ],
    "tries for ever": [("one.num_retries >= MAX_RETRIES", "False")],
    "never tries again": [("one.num_retries >= MAX_RETRIES", "True")],
    "tries the same card again": [("one.nic = (one.nic + 1) % self.segment.num_nics", "pass")],
    "says 0 when something failed": [
        ('return 0 if all(request.status == "COMPLETED" for request in requests) else -1', "return 0")
    ],
}
