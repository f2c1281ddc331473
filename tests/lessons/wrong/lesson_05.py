"""Wrong preemptions."""

WRONG = {
    "the victim goes to the end": [("scheduler.waiting.appendleft(request)", "scheduler.waiting.append(request)")],
    "computed tokens stay": [("    request.num_computed_tokens = 0\n", "")],
    "keeps its blocks": [("    scheduler.kv.free(request.request_id)\n", "")],
    "frees in the wrong order": [
        (
            "    scheduler.kv.free(request.request_id)\n",
            "    scheduler.kv.pool.free(scheduler.kv.tables.pop(request.request_id))\n"
            "    scheduler.kv._num_offered.pop(request.request_id)\n",
        )
    ],
    "the status is waiting": [("= RequestStatus.PREEMPTED", "= RequestStatus.WAITING")],
    "does not count": [("    request.metrics.num_preemptions += 1\n", "")],
    "the first is the victim": [("victim = scheduler.running.pop()", "victim = scheduler.running.pop(0)")],
    "does not tell who was preempted": [("            output.preempted_req_ids.add(victim.request_id)\n", "")],
    "one victim, no second": [
        ("        while (blocks :=", "        if (blocks :="),
        (
            '            scheduler._preempt(victim, "S3 case A", request.request_id)\n',
            '            scheduler._preempt(victim, "S3 case A", request.request_id)\n'
            "            blocks = scheduler.kv.allocate_slots(request, num_computed, num_new)\n"
            "            if blocks is None:\n                continue\n",
        ),
    ],
    "takes turns instead of trying again": [
        (
            '            scheduler._preempt(victim, "S3 case A", request.request_id)\n',
            '            scheduler._preempt(victim, "S3 case A", request.request_id)\n            return\n',
        )
    ],
    "no end after case B": [
        (
            "                return\n            scheduler._preempt",
            "                continue\n            scheduler._preempt",
        )
    ],
    "blocks instead of their ids": [("[block.block_id for block in blocks]", "list(blocks)")],
    "moves computed tokens on itself": [
        (
            "        output.total_num_scheduled_tokens += num_new\n",
            "        output.total_num_scheduled_tokens += num_new\n        request.num_computed_tokens += num_new\n",
        )
    ],
    "the request itself goes first": [
        (
            "            victim = scheduler.running.pop()\n",
            "            victim = request\n            scheduler.running.remove(victim)\n",
        )
    ],
    "a victim does not end the budget's count": [
        (
            "        output.total_num_scheduled_tokens += num_new\n",
            "        output.total_num_scheduled_tokens += 0 if output.preempted_req_ids else num_new\n",
        )
    ],
}
