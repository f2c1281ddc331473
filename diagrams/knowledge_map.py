"""What there is to know about LLM inference, and what it stands on; with the part of this project about it."""

from diagrams.drawing import Picture


def draw() -> Picture:
    """Basics at the top, goals at the bottom."""
    p = Picture(
        "The map of LLM inference",
        "Fields of knowledge and which needs which, from Python and attention at the top to goodput, cost and fault "
        "tolerance at the bottom; with the place in this project where each can be seen.",
        "after a map of vLLM",
    )
    w = 216
    col = [0, 244, 488, 732]
    a = p.box(col[0], 0, "Python, C++, Linux,\nconcurrency, memory", w, 52)
    t = p.box(col[2], 0, "Transformer, attention,\nautoregression", w, 52)
    b = p.box(col[0], 90, "PyTorch, how a GPU runs\n`models/`", w, 52, "c")
    c = p.box(col[2], 90, "prefill, decode, KV cache\n`prefill_decode.svg`", w, 52, "a")
    r = p.box(col[1], 180, "FLOPs, bytes, roofline\n`roofline.svg`", w, 52, "c")
    k = p.box(col[3], 180, "paged KV, prefix cache\n`core/kv_cache.py` K1-K10", w, 52, "a")
    s = p.box(col[2], 180, "batching, chunked prefill\n`core/scheduler.py` S1-S3", w, 52, "accent")
    e = p.box(col[2], 290, "engine, scheduler, worker\n`engine/core.py` S7, S8", w, 52, "accent")
    o = p.box(col[0], 290, "kernels, graphs, compilers\n`kernels/` T1-T4", w, 52, "c")
    x = p.box(col[3], 290, "KV connector, Mooncake\n`connector/` P1-P5", w, 52, "d")
    q = p.box(col[1], 380, "TP, PP, DP, EP, collectives\n`replicas.svg`", w, 52)
    d = p.box(col[3], 470, "P/D, replicas, caches\n`serve/router.py` P6-P8", w, 52, "d")
    m = p.box(col[0], 470, "metrics, benchmarks, profiles\n`nanopd bench`, `trace/`", w, 52, "warn")
    f = p.box(col[0], 560, "SLO, goodput, cost, fault tolerance", 460, 44, "good")
    p.arrow(a.b(), b.t())
    p.arrow(t.b(), c.t())
    p.arrow(b.r(), r.t(0.3), way="-|")
    p.arrow(c.l(), r.t(0.7), way="-|")
    p.arrow(c.b(0.5), s.t())
    p.arrow(c.r(), k.t(), way="-|")
    p.arrow(k.b(0.2), e.t(0.85), way="|-|", bend=262)
    p.arrow(k.b(0.5), x.t())
    p.arrow(s.b(), e.t())
    p.arrow(b.b(0.25), o.t(0.25))
    p.arrow(r.b(0.3), o.t(0.75), way="|-|", bend=262)
    p.arrow(e.l(), o.r())
    p.arrow(e.b(0.35), q.r(), way="|-")
    p.arrow(q.b(0.75), d.l(0.3), way="|-")
    p.arrow(x.b(), d.t())
    p.arrow(o.b(0.4), m.t(0.4))
    p.arrow(d.l(0.75), m.r(0.75))
    p.arrow(e.l(0.8), m.r(0.3), way="-|-", bend=230)
    p.arrow(m.b(0.5), f.t(108 / 460))
    return p
