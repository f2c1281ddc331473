"""Measurements of the engine; not part of it. `nanopd bench …` runs them from a source checkout.

    commands.py    their command line: the only file that is loaded before one of them is asked for
    offline.py     a batch of requests through one engine: throughput and latencies
    split.py       where the time of a step goes
    scheduler.py   the scheduler alone
    peers.py       another engine and ours in turn (peer_worker.py, peer_scheduler.py: one of them; worker.py: its process)
    serve.py       time to the first token over HTTP: one node against P/D
    transfer.py    KV blocks from one process to another
    kernels.py     the Triton kernels on a GPU, against what the chip can do
    aot.py         the Triton kernels compiled for GPUs that are not here

Each yields plain numbers, `commands.show` prints them. Machines are noisy: compare two things in one run, and trust ratios
and medians, not single figures.
"""
