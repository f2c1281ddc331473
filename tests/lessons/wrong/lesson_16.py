"""Wrong instruments, and wrong conclusions."""

WRONG = {
    "forgets the arrival": [("times[line.event.request_id] = [line.time]", "times[line.event.request_id] = []")],
    "takes the plan for the token": [
        (
            "        if isinstance(line.event, Sampled):\n            for request_id, token_ids in line.event.token_ids.items():\n"
            "                times[request_id] += [line.time] * len(token_ids)",
            "        if isinstance(line.event, Planned):\n            for request_id, _, _ in line.event.scheduled:\n"
            "                times[request_id].append(line.time)",
        )
    ],
    "takes the value to the right": [
        (
            "sorted(values)[math.ceil(share * len(values)) - 1]",
            "sorted(values)[min(len(values) - 1, int(share * len(values)))]",
        )
    ],
    "does not sort": [("return sorted(values)[", "return list(values)[")],
    "counts up to where it had been, whatever was planned": [
        ("again += max(0, min(before, start + n) - start)", "again += max(0, before - start)")
    ],
    "remembers only the last plan": [
        ("reached[request_id] = max(before, start + n)", "reached[request_id] = start + n")
    ],
    "praises the cache for preemptions": [
        (
            "hits.setdefault(line.event.request_id, line.event.num_computed)",
            "hits[line.event.request_id] = hits.get(line.event.request_id, 0) + line.event.num_computed",
        )
    ],
    "divides by all that arrived, in tokens of the last": [
        ("queried = sum(lengths[request_id] for request_id in hits)", "queried = sum(lengths.values())")
    ],
    "takes the mean for the median": [("if percentile(waits, 0.5) > 0.5:", "if sum(waits) / len(waits) > 0.05:")],
    "sees no long gaps": [
        ("percentile(gaps, 0.99) >= 4 * percentile(gaps, 0.5)", "percentile(gaps, 0.9) >= 4 * percentile(gaps, 0.5)")
    ],
    "blames the cache first": [
        (
            '    if recomputed_share(lines) > 0.05:\n        return "preemption"\n    if hit_rate(lines) < 0.05:\n        return "cache"\n',
            '    if hit_rate(lines) < 0.05:\n        return "cache"\n    if recomputed_share(lines) > 0.05:\n        return "preemption"\n',
        )
    ],
}
