"""Wrong running loops."""

WRONG = {
    "threshold 0 is a limit": [
        ("    if threshold > 0:\n        limits.append(threshold)\n", "    limits.append(threshold)\n")
    ],
    "no threshold at all": [("        limits.append(threshold)\n", "        pass\n")],
    "forgets the longest sequence": [("[missing, budget, max_model_len - 1 - num_computed]", "[missing, budget]")],
    "computes the last token of the longest sequence": [
        ("max_model_len - 1 - num_computed", "max_model_len - num_computed")
    ],
    "less than zero": [("    return max(0, min(limits))\n", "    return min(limits)\n")],
    "does not count the budget down": [("        budget -= num_new\n", "")],
    "decodes are free": [("        budget -= num_new\n", "        budget -= num_new if num_new > 1 else 0\n")],
    "stops at the first zero": [("            continue\n", "            break\n")],
    "walks a copy": [
        (
            "    i = 0\n    while i < len(running) and budget > 0:\n        request = running[i]\n        i += 1\n",
            "    for request in list(running):\n        if budget <= 0:\n            break\n",
        )
    ],
    "plans who was preempted itself": [
        ("        if block_ids is None:\n            return\n", "        block_ids = block_ids or []\n")
    ],
    "tells the state after the step": [
        (
            "CachedRequestData(request.request_id, block_ids, request.num_computed_tokens)",
            "CachedRequestData(request.request_id, block_ids, request.num_computed_tokens + num_new)",
        )
    ],
    "longest missing first": [
        ("    i = 0\n", "    i = 0\n    running.sort(key=lambda r: r.num_computed_tokens - r.num_tokens)\n")
    ],
}
