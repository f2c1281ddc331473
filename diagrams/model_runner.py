"""The model runner's pipeline, one stage for each of its methods."""

import inspect

from diagrams.drawing import Box, Picture
from nanopd.worker.model_runner import ModelRunner

STAGES = [
    ("synchronize_input_prep", "waits until the device has read the last step's inputs (a CUDA event)", "plain"),
    ("_update_states", "who is new, who has gone, who has got more blocks (S7)", "plain"),
    ("_prepare_inputs", "one flat batch: token ids, positions, `logits_indices`", "a"),
    ("_determine_batch_execution_and_padding", "a captured graph or eager, and the padded size", "plain"),
    ("_build_attention_metadata", "`query_start_loc`, `seq_lens`, block tables", "a"),
    ("_preprocess", "all on the device; `slot_mapping` from positions and tables (K1)", "a"),
    ("_model_forward", "each layer writes K and V into the slots, then attends", "b"),
    ("hidden_states[logits_indices]", "the last token of each request that has caught up", "c"),
    ("compute_logits", "`[S, vocab_size]`, of those rows only", "c"),
    ("_sample", "a token each, written into the tables for the next step", "c"),
]


def draw() -> Picture:
    """Top to bottom, in the order of `execute_model`."""
    p = Picture(
        "The model runner's pipeline",
        "One step in the order of ModelRunner.execute_model: prepare inputs on the host, forward on the device, "
        "logits and a token only for requests that have caught up.",
        "nanopd/worker/model_runner.py",
    )
    source = inspect.getsource(ModelRunner.execute_model)
    called = [source.index(name) for name, _, _ in STAGES if name not in ("compute_logits", "_sample")]
    assert called == sorted(called), "the pipeline has another order now"
    top = p.box(60, 0, "`SchedulerOutput`", 350, 36, "accent")
    p.text(440, 18, "from the scheduler: the plan, with the connector's part of it", kind="soft")
    p.group(30, 56, 410, 332)
    p.text(20, 222, "host", "end", "soft")
    before: Box = top
    for i, (name, what, kind) in enumerate(STAGES):
        y = 74 + i * 52 + (14 if i > 5 else 0)
        box = p.box(60, y, f"`{name}`", 350, 36, kind)
        p.text(460, y + 18, what, kind="ink")
        p.arrow(before.b(), box.t())
        before = box
    p.text(20, 490, "device", "end", "soft")
    out = p.box(60, 74 + 10 * 52 + 14, "`ModelRunnerOutput`", 350, 36, "accent")
    p.arrow(before.b(), out.t())
    p.text(460, out.rect.y0 + 18, "sampled tokens, and what the connector has seen end", kind="soft")
    return p
