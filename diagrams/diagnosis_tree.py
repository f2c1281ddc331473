"""Too slow: where to look, what to look at here, and how to find out."""

from diagrams.drawing import Picture


def draw() -> Picture:
    """One question, five answers, one way on."""
    p = Picture(
        "A latency goal is missed: where is the time?",
        "First make sure what is measured; then find where most of the delay is: queueing, CPU and IPC, the GPU, the "
        "network between chips, or fetching caches; then one hypothesis that can fail, and a controlled experiment.",
        "after a map of vLLM",
    )
    top = p.box(300, 0, "TTFT, inter-token latency or goodput missed", 340, 40, "bad")
    sure = p.box(300, 72, "Is the clock right? Which load? Warm or cold?", 340, 40)
    where = p.box(300, 144, "Where is most of the delay?", 340, 40, "accent")
    p.arrow(top.b(), sure.t())
    p.arrow(sure.b(), where.t())
    w = 176
    kinds = [
        ("queueing", "arrival rate,\nadmission, KV\npressure, routing", "`/metrics`,\n`queue_time`,\npreemptions"),
        ("CPU, IPC", "tokenizer,\nscheduler,\nserialization, logs", "`nanopd bench`\n`scheduler`"),
        ("GPU", "kernels: arithmetic\nor bandwidth,\nlaunches", "`nanopd bench`\n`kernels`,\nroofline"),
        ("between chips", "collectives,\ntopology, small\nmessages, balance", "(one chip here)"),
        ("fetching caches", "lookup, network,\nlayout, locks,\nqueues", "`nanopd bench`\n`transfer`, pieces"),
    ]
    hypothesis = p.box(300, 470, "One hypothesis that can be proved wrong", 340, 40, "accent")
    for i, (name, what, see) in enumerate(kinds):
        x = i * 192
        head = p.box(x, 228, name, w, 36, "warn", bold=True)
        p.box(x, 264, f"{what}", w, 84)
        look = p.box(x, 348, see, w, 76, "good")
        p.arrow(where.b(), head.t(), way="|-|", bend=206)
        p.arrow(look.b(), hypothesis.t(), way="|-|", bend=446)
    test = p.box(300, 542, "All else fixed: a controlled experiment", 340, 40)
    done = p.box(300, 614, "Right answers? Percentiles, goodput, cost?", 340, 40, "good")
    p.arrow(hypothesis.b(), test.t())
    p.arrow(test.b(), done.t())
    p.text(662, 634, "not better: the next hypothesis", kind="soft")
    p.text(0, 634, "yellow: where; green: what tells, here", kind="soft")
    return p
