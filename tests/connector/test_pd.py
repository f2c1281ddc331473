"""P/D over the real Mooncake: one request, two engines, the tokens of one (rules S5, S10, K8, P3-P6)."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from nanopd.config import LAYOUTS
from tests.connector.pair import Node, alone, run

Prompts = dict[str, list[int]]


def make_prompts(count: int, seed: int = 0) -> Prompts:
    """Mixed lengths; every third one begins like the first."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = {}
    for i in range(count):
        own = [rng.randrange(256) for _ in range(rng.choice([1, 3, 4, 5, 17, 40, 100, 200]))]
        prompts[f"r{i}"] = shared + own if i % 3 == 0 else own
    return prompts


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return make_prompts(16)


@pytest.fixture(scope="module")
def expected(tiny_model: Path, prompts: Prompts) -> dict[str, list[int]]:
    return alone(tiny_model, prompts.items())


def check_empty(*nodes: Node) -> None:
    for node in nodes:
        node.core.scheduler.check_invariants()
        assert node.num_free == len(node.core.scheduler.kv.pool.blocks)
        node.core.close()


@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("push", ["whole", "per_chunk"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_engine(
    tiny_model: Path, prompts: Prompts, expected: dict[str, list[int]], layout: str, push: str, first: str
):
    # Enough blocks for all: a P that lacks some gives up prompts that a busy D has not asked for in time.
    options: dict[str, Any] = {"kv_layout": layout, "long_prefill_token_threshold": 24, "num_blocks": 600}
    p = Node(tiny_model, "prefill", {"kv_push": push, "kv_send_order": "shortest"}, **options)
    d = Node(tiny_model, "decode", **options)
    if first == "P":
        for request_id, prompt in prompts.items():
            p.prefill(request_id, prompt)
        run(p, until=lambda: len(p.ended) > 8)
    for request_id, prompt in prompts.items():
        d.decode(request_id, prompt, p)
    if first == "D":
        for _ in range(5):
            d.step()
        for request_id, prompt in prompts.items():
            p.prefill(request_id, prompt)
    run(p, d)
    assert d.tokens == expected
    assert {i: out.new_token_ids for i, out in p.ended.items()} == {i: tokens[:1] for i, tokens in expected.items()}
    loaded = sum(len(prompt) > 4 for prompt in prompts.values())
    sent, received = p.core.connector.stats(), d.core.connector.stats()
    # Prompts of up to one block are computed, not fetched; so are those whose beginning D has already, but for the rest.
    assert sent.sent == received.received <= loaded and received.receive_failures == 0
    assert sent.sent >= loaded - 5
    assert sent.sent_bytes == received.received_bytes > 0
    check_empty(p, d)


@pytest.mark.parametrize("push", ["whole", "per_chunk"])
def test_small_pools_preempt_on_both_sides(
    tiny_model: Path, prompts: Prompts, expected: dict[str, list[int]], push: str
):
    options: dict[str, Any] = {"num_blocks": 66, "long_prefill_token_threshold": 24}
    p = Node(tiny_model, "prefill", {"kv_push": push}, **options)
    d = Node(tiny_model, "decode", **options)
    for request_id, prompt in prompts.items():
        d.decode(request_id, prompt, p)
        p.prefill(request_id, prompt)
    run(p, d, seconds=60)
    assert d.tokens == expected
    check_empty(p, d)


def test_a_preemption_on_d_after_a_load(tiny_model: Path):
    prompts = {f"r{i}": [i * 7 + j for j in range(20)] for i in range(6)}
    want = alone(tiny_model, prompts.items(), max_tokens=30)
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode", num_blocks=40)
    for request_id, prompt in prompts.items():
        p.prefill(request_id, prompt)
        d.decode(request_id, prompt, p, max_tokens=30)
    run(p, d)
    assert d.core.scheduler.stats().num_preemptions > 0 and d.core.connector.stats().received == 6
    assert d.tokens == want
    check_empty(p, d)


@pytest.mark.parametrize("num_blocks", [200, 30])
@pytest.mark.parametrize(
    "wishes", [{}, {"temperature": 0.8, "seed": 7, "frequency_penalty": -1.5}], ids=["greedy", "seed"]
)
def test_drafts_on_d_change_no_token(
    tiny_model: Path, made: list[Node], wishes: dict[str, Any], num_blocks: int, monkeypatch: pytest.MonkeyPatch
):
    """K8 and K9: drafts, right or wrong, behind blocks that D has loaded, or has lost and found again (S3)."""
    monkeypatch.setattr("nanopd.core.ngram.CHANCE", 1)  # so that there are many
    rng = random.Random(3)
    parts = [[rng.randrange(200) for _ in range(rng.randint(3, 12))] for _ in range(8)]
    prompts = {f"r{i}": part * rng.randint(2, 5) for i, part in enumerate(parts)}
    want = alone(tiny_model, prompts.items(), max_tokens=40, **wishes)
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode", num_blocks=num_blocks, speculative_ngram=3)
    made += [p, d]
    for request_id, prompt in prompts.items():
        p.prefill(request_id, prompt, **wishes)
        d.decode(request_id, prompt, p, max_tokens=40, **wishes)
    run(p, d)
    assert d.tokens == want
    stats, transfers = d.core.scheduler.stats(), d.core.connector.stats()
    assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_blocks == 30)
    assert transfers.received == len(prompts) and transfers.receive_failures == 0
    check_empty(p, d)


def test_a_partial_hit_on_d_fetches_only_the_rest(tiny_model: Path):
    prefix = list(range(100, 132))
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    d.add("warm", [*prefix, 1])
    run(d)
    prompt = prefix + list(range(20))
    p.prefill("r", prompt)
    request = d.decode("r", prompt, p)
    run(p, d)
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    block_bytes = d.core.runner.kv_cache.memory[0].nbytes  # cross_layer
    assert d.core.connector.stats().received_bytes == 5 * block_bytes  # 20 tokens of 52
    assert request.metrics.num_cached_tokens == 52
    check_empty(p, d)


def test_a_full_hit_on_d_tells_p_to_let_go(tiny_model: Path):
    """Rule P5."""
    prompt = list(range(100, 132))
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    d.add("warm", prompt)
    p.prefill("r", prompt)
    run(d)
    run(p, until=lambda: "r" in p.ended)
    p.step()
    assert p.core.scheduler.reclaiming == {"r"}
    start = time.monotonic()
    d.decode("r", prompt, p)
    run(p, d)
    assert time.monotonic() - start < 5  # and not after kv_hold_timeout
    assert p.core.connector.stats().sent == 0
    check_empty(p, d)


@pytest.mark.parametrize("moment", ["before P has it", "while P computes", "after P is done"])
def test_d_aborts(tiny_model: Path, moment: str):
    """Rules P4 and P5: P lets go, and D's blocks are out of use until P has said so."""
    prompt = list(range(200))
    p, d = Node(tiny_model, "prefill", long_prefill_token_threshold=8), Node(tiny_model, "decode")
    if moment == "after P is done":
        p.prefill("r", prompt)
        run(p, until=lambda: "r" in p.ended)
        d.decode("r", prompt, p)
        d.core.abort_requests(["r"])  # before it has asked
    else:
        if moment == "while P computes":
            p.prefill("r", prompt)
            p.step()
        d.decode("r", prompt, p)
        d.step()
        assert d.core.scheduler.loading == {"r"}
        d.core.abort_requests(["r"])
        assert d.core.scheduler.reclaiming == {"r"} and d.num_free == 150
        run(d)
        if moment == "before P has it":
            p.prefill("r", prompt)
    run(p, d)
    check_empty(p, d)


@pytest.mark.parametrize("asked", [True, False])
def test_p_aborts(tiny_model: Path, asked: bool):
    """Rule P5: D hears of it at once and computes the prompt itself."""
    prompt = list(range(200))
    p, d = Node(tiny_model, "prefill", long_prefill_token_threshold=8), Node(tiny_model, "decode")
    p.prefill("r", prompt)
    p.step()
    if asked:
        d.decode("r", prompt, p)
        d.step()
        time.sleep(0.1)
    p.core.abort_requests(["r"])
    run(p)
    start = time.monotonic()
    if not asked:
        d.decode("r", prompt, p)
    run(d)
    assert time.monotonic() - start < 5
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    assert d.core.connector.stats().receive_failures == 1
    check_empty(p, d)


def test_nobody_fetches(tiny_model: Path):
    """Rule P3: P holds the blocks for kv_hold_timeout."""
    p = Node(tiny_model, "prefill", {"kv_hold_timeout": 0.3})
    p.prefill("r", list(range(50)))
    start = time.monotonic()
    run(p)
    assert 0.3 < time.monotonic() - start < 3
    check_empty(p)


def test_p_never_answers(tiny_model: Path):
    """Rule P3: D computes itself after kv_load_timeout; the blocks it had are free again once P has confirmed (P4)."""
    prompt = list(range(50))
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode", {"kv_load_timeout": 0.3})
    d.decode("r", prompt, p)
    run(d)
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    assert d.core.connector.stats().receive_failures == 1
    check_empty(p, d)


def test_there_is_no_p(tiny_model: Path):
    """Rule P6: seen at once, long before the timeout."""
    prompt = list(range(50))
    d = Node(tiny_model, "decode")
    d.decode("r", prompt, 9)
    start = time.monotonic()
    run(d)
    assert time.monotonic() - start < 4
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    check_empty(d)


def test_p_goes_away_and_another_comes(tiny_model: Path):
    """Rule P6: only the requests that depend on it are computed here; the next P on that port is asked again."""
    prompt = list(range(50))
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    port = p.core.connector.port
    d.decode("r", prompt, p)
    d.step()
    time.sleep(0.1)
    p.core.close()
    run(d)
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    again = Node(tiny_model, "prefill", {"kv_port": port})  # the later option wins
    again.prefill("s", prompt[::-1])
    d.decode("s", prompt[::-1], again)
    run(again, d)
    assert d.core.connector.stats().received == 1
    check_empty(again, d)


def test_another_prompt_under_the_same_id(tiny_model: Path):
    """Never wrong tokens (P8): P compares a hash of the prompt."""
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    p.prefill("r", list(range(50)))
    d.decode("r", list(range(1, 51)), p)
    run(p, d)
    assert d.tokens["r"] == alone(tiny_model, [("r", list(range(1, 51)))])["r"]
    assert d.core.connector.stats().receive_failures == 1
    check_empty(p, d)


@pytest.mark.parametrize("options", [{"block_size": 8}, {"kv_layout": "kv_first"}, {"dtype": "bfloat16"}])
def test_another_layout(tiny_model: Path, options: dict[str, Any]):
    """Rule P2."""
    prompt = list(range(50))
    p, d = Node(tiny_model, "prefill", **options), Node(tiny_model, "decode")
    p.prefill("r", prompt)
    d.decode("r", prompt, p)
    run(d)
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    run(p)
    check_empty(p, d)


def test_another_model(tiny_model: Path, tiny_mistral: Path):
    """Rule P2: the same shapes, other weights."""
    prompt = list(range(50))
    p, d = Node(tiny_mistral, "prefill"), Node(tiny_model, "decode")
    p.prefill("r", prompt)
    d.decode("r", prompt, p)
    run(d)
    assert d.core.connector.stats().receive_failures == 1
    assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    run(p)
    check_empty(p, d)


def test_an_id_used_twice(tiny_model: Path):
    prompts = [list(range(60)), list(range(100, 170))]
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    for prompt in prompts:
        p.prefill("r", prompt)
        d.decode("r", prompt, p)
        run(p, d)
        assert d.tokens["r"] == alone(tiny_model, [("r", prompt)])["r"]
    check_empty(p, d)


def test_a_transfer_id_used_twice_at_once(tiny_model: Path):
    """The first request of each side has it; the others are computed, and nobody's blocks are kept."""
    prompts = [list(range(60)), list(range(100, 170))]
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    for i, prompt in enumerate(prompts):
        p.prefill(f"p{i}", prompt, transfer_id="same")
        d.decode(f"d{i}", prompt, p, transfer_id="same")
    run(p, d)
    for i, prompt in enumerate(prompts):
        assert d.tokens[f"d{i}"] == alone(tiny_model, [("r", prompt)])["r"]
    check_empty(p, d)
