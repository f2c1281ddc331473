"""Wrong connectors."""

WRONG = {
    "counts the local hit too": [
        (
            "        for block_hash in request.block_hashes[num_computed_tokens // self.block_size :]:",
            "        for block_hash in request.block_hashes:",
        )
    ],
    "sees no hole": [("                break\n", "                continue\n")],
    "takes unknown for missing": [("            if there is None:\n                return None, False\n", "")],
    "loads into the beginning of the table": [("block_ids[start:end])", "block_ids)")],
    "tells everything again in each step": [("meta, self.next = self.next, StoreMeta()", "meta = self.next")],
    "tells of one load a step": [
        (
            "self.next.load[request.request_id] = list(zip(request.block_hashes[start:end], block_ids[start:end]))",
            "self.next.load = {request.request_id: list(zip(request.block_hashes[start:end], block_ids[start:end]))}",
        )
    ],
    "saves what was cut short": [
        ("        if request.status not in REGULAR_ENDS:\n            return False, None\n", "")
    ],
    "saves a token that was sampled and not computed": [
        ("num_full = request.num_computed_tokens", "num_full = request.num_tokens")
    ],
    "saves what the store has": [(" if self.index.lookup(block_hash) is False]", "]")],
    "lets go of blocks that are still to be read": [("return bool(missing), None", "return False, None")],
    "holds blocks for nothing": [("return bool(missing), None", "return True, None")],
}
