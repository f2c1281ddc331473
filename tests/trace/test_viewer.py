"""The HTML viewer in a real Chromium: what it shows is what the engine held, and it can be used by mouse and keyboard."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nanopd.config import SamplingParams
from nanopd.core.output import ModelRunnerOutput
from nanopd.request import Request
from nanopd.trace import export
from nanopd.trace.events import Allocated, Moved, Refused, Transfer
from nanopd.trace.file import read
from tests.core import test_state_machine
from tests.core.drive import Driver, FakeGrammars, make_request, make_scheduler
from tests.trace.browser import CHROMIUM, Browser
from tests.trace.record import trace_to

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed (Debian: apt-get install chromium)")
ROOT = Path(__file__).parent.parent.parent
HOSTILE = '</script><img src="https://example.org/x" onerror="boom()">&amp;'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        browser.window(1280, 900)
        yield browser


@pytest.fixture(autouse=True)
def quiet(browser: Browser) -> Iterator[None]:
    """Whatever a test does: no error in the console, and nothing is asked of any network."""
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))] == []


def page(path: Path, *traces: Path) -> str:
    path.write_text(export.html(traces))
    return path.as_uri()


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """A pool too small for three requests. (The page, what the engine held after each step.)"""
    directory = tmp_path_factory.mktemp("tight")
    scheduler = make_scheduler(num_blocks=7, block_size=4, max_num_batched_tokens=16)
    states = trace_to(directory / "t.jsonl", scheduler)
    prefix = list(range(70, 75))
    for name, prompt in (("a", [*prefix, 1, 2]), ("b", [*prefix, 3, 4, 5]), (HOSTILE, [*prefix, 6])):
        scheduler.add_request(make_request(name, prompt=prompt, max_tokens=8))
    Driver(scheduler).run()
    return page(directory / "t.html", directory / "t.jsonl"), list(states.values())


SHOWN = """(() => {
  const cards = [...document.querySelectorAll('.card')].map((card) => ({...card.dataset}));
  const cells = [...document.querySelectorAll('.cell')].map((cell) => ({...cell.dataset}));
  const queue = (name) => [...document.querySelectorAll(`[data-queue="${name}"] .card`)].map((c) => c.dataset.request);
  const tokens = (id) => engines[0].tokensAt(id, positions[pos].k);
  return {queues: Object.fromEntries(['waiting', 'skipped_waiting', 'running', 'idle'].map((name) => [name, queue(name)])),
    tokens: Object.fromEntries(cards.map((c) => [c.request, tokens(c.request).slice(0, c.tokens)])),
    cards, cells, chain: [...document.querySelectorAll('.chain button')].map((b) => b.firstChild.data),
    pairs: [...document.querySelectorAll('.pair')].map((b) => [b.title, b.childNodes[2].data]),
    names: [...document.querySelectorAll('.card .name span:first-child')].map((s) => s.textContent)};
})()"""


def shown(browser: Browser) -> dict[str, Any]:
    """What the page shows, in the form in which tests/trace/compare.py describes an engine."""
    found = browser.run(SHOWN)
    assert browser.errors == []
    cells = found["cells"]
    free = sorted((cell for cell in cells if cell["free"]), key=lambda cell: int(cell["free"]))
    hashes = [base64.b64decode(cell["hash"]).hex() or None for cell in cells]
    unfinished = [card for card in found["cards"] if card["status"] not in ("stop", "length", "abort", "error")]
    assert all(int(card["tokens"]) == len(found["tokens"][card["request"]]) for card in unfinished)
    state = {
        "queues": found["queues"],
        "requests": {
            card["request"]: [card["status"], int(card["computed"]), found["tokens"][card["request"]]]
            for card in unfinished
        },
        "further_input": {card["request"]: [int(n) for n in card["further"].split()] for card in unfinished},
        "tables": {c["request"]: [int(b) for b in c["table"].split()] for c in found["cards"] if c["table"]},
        "ref_cnt": [int(cell["ref"]) for cell in cells],
        "free_queue": [int(cell["block"]) for cell in free],
        "hash_table": {h: b for b, h in enumerate(hashes) if h},
        "hashes": hashes,
    }
    chain = [f"B{b}" for b in state["free_queue"]]
    assert found["chain"] == (chain if len(chain) <= 32 else chain[:26] + chain[-4:])
    pairs = {base64.b64decode(h).hex(): int(b.removeprefix("B")) for h, b in found["pairs"]}
    assert pairs == state["hash_table"] or len(pairs) == 128 < len(state["hash_table"])
    assert found["names"] == [card["request"] for card in found["cards"]]
    return state


def as_shown(held: dict[str, Any]) -> dict[str, Any]:
    """The engine's own state, as far as the page shows it: of further input the length; tables of unfinished requests."""
    further = {i: [len(tokens) for tokens in inputs] for i, inputs in held["further_input"].items()}
    tables = {i: table for i, table in held["tables"].items() if i in held["requests"]}
    return held | {"further_input": further, "tables": tables}


class TracedMachine(test_state_machine.SchedulerMachine):
    lives: ClassVar[list[Any]] = []

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            self.lives.append((self.scheduler.path, self.scheduler.states))


def check_random_lives(
    browser: Browser, directory: Path, monkeypatch: pytest.MonkeyPatch, examples: int, steps: int
) -> int:
    """Shows every step of random lives; returns how many there were."""
    numbers = iter(range(10**6))

    def make(*args: Any, **options: Any) -> Any:
        scheduler = make_scheduler(*args, **options)
        scheduler.path = directory / f"{next(numbers)}.jsonl"
        scheduler.states = trace_to(scheduler.path, scheduler)
        return scheduler

    monkeypatch.setattr(test_state_machine, "make_scheduler", make)
    TracedMachine.lives.clear()
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
    run_state_machine_as_test(
        TracedMachine, settings=settings(max_examples=examples, stateful_step_count=steps, **options)
    )
    count = 0
    for path, states in TracedMachine.lives:
        browser.open(page(path.with_suffix(".html"), path) + "#step=0")
        order = list(states)
        for step in [*order, *order[::-7]]:  # forwards one by one, and some of the way back
            browser.run(f"go({step}), draw()")
            assert shown(browser) == as_shown(states[step]), f"{path}, step {step}"
            count += 1
    held = [held for _, states in TracedMachine.lives for held in states.values()]
    assert any(h["queues"]["idle"] for h in held) and any(any(h["further_input"].values()) for h in held), "no sessions"
    return count


def test_it_shows_what_the_engine_held_at_every_step_of_random_lives(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert check_random_lives(browser, tmp_path, monkeypatch, examples=25, steps=30) > 200


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_shows_what_the_engine_held_for_long(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    print("steps shown:", check_random_lives(browser, tmp_path, monkeypatch, examples=400, steps=60))


def test_the_keyboard_moves_through_the_steps(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    url, states = tight
    browser.open(url)
    assert shown(browser) == as_shown(states[0])
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert shown(browser) == as_shown(states[2])
    browser.key("ArrowLeft")
    assert shown(browser) == as_shown(states[1])
    browser.key("End")
    assert shown(browser) == as_shown(states[-1])
    browser.key("ArrowRight")
    assert shown(browser) == as_shown(states[-1])
    browser.key("ArrowLeft", shift=True)
    assert shown(browser) == as_shown(states[-11])
    browser.key("Home")
    browser.key("p")
    preempted = next(n for n, held in enumerate(states) if any(r[0] == "preempted" for r in held["requests"].values()))
    assert shown(browser) == as_shown(states[preempted])
    assert "S3 case A" in browser.run("document.querySelector('.story').innerText")
    browser.key(" ")  # plays
    browser.run("new Promise((done) => setTimeout(done, 700))")
    browser.key(" ")
    assert browser.run("pos") > preempted
    stopped = browser.run("pos")
    browser.run("new Promise((done) => setTimeout(done, 500))")
    assert browser.run("pos") == stopped


def test_a_click_on_a_request_shows_its_life(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    browser.open(tight[0] + "#step=3")
    browser.click(".card[data-request='b']")
    text = browser.run("document.getElementById('detail').innerText")
    assert "arrived with 8 tokens" in text
    assert "admitted to running" in text
    assert "block table" in text
    later = browser.run("[...document.querySelectorAll('.hist li.later')].map((li) => li.innerText).join('\\n')")
    assert "finished (length) with 8 tokens" in later
    browser.key("Escape")
    assert "Click a request" in browser.run("document.getElementById('detail').innerText")


def test_a_click_on_a_block_shows_its_history(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    browser.open(tight[0])
    browser.key("End")
    browser.click(".cell[data-block='0']")
    text = browser.run("document.getElementById('detail').innerText")
    assert re.search(r"popped for\s+a\b", text)
    assert re.search(r"prefix hit of\s+b\b", text)
    assert "its contents can still be found" in text
    browser.click(".hist li:nth-child(1) a")  # to the step in which it was popped
    assert browser.run("pos") == 0


def test_the_slot_of_the_token_under_the_pointer(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    """Rule K1, filled in: for every token that has a block."""
    url, states = tight
    browser.open(url + "#step=3&request=b")
    table = states[3]["tables"]["b"]
    for position in range(len(table) * 4):
        if browser.run(f"!document.querySelector('[data-position=\"{position}\"]')"):
            break
        browser.hover(f"[data-position='{position}']")
        text = browser.run("document.querySelector('.slot').innerText")
        slot = table[position // 4] * 4 + position % 4
        assert f"table[{position} // 4] × 4 + {position} % 4" in text
        assert f"= {slot}\n" in text
        assert f"{table[position // 4] * 512 + position % 4 * 128:,}" in text, "the byte, by the strides of the header"
    assert position > 8


def test_search(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    browser.open(tight[0])
    for query, finds in (("b3", "Block B3"), ("a", "Request"), (HOSTILE[:9], "Request")):
        browser.key("/")
        browser.type(query)
        browser.key("Enter")
        assert finds in browser.run("document.getElementById('detail').innerText")
    browser.key("/")
    browser.type("preempted")
    browser.key("Enter")
    assert "preempted" in browser.run("document.querySelector('.hist li.now').innerText")
    browser.key("/")
    browser.type("step 2")
    browser.key("Enter")
    assert browser.run("pos") == 2
    browser.key("/")
    browser.type("no such thing")
    assert browser.run("document.getElementById('results').innerText") == "Nothing found."
    assert browser.run(ON_TOP % "#results button")
    browser.key("Escape")


ON_TOP = """(() => { const hit = document.querySelector('%s'), box = hit.getBoundingClientRect();
  return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === hit; })()"""


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 900, False), (390, 844, True)])
def test_hits_are_in_sight_whole_and_in_order_of_time(
    browser: Browser, tight: tuple[str, list[dict[str, Any]]], width: int, height: int, phone: bool
):
    try:
        browser.window(width, height, phone=phone)
        browser.open(tight[0])
        for query in ("preempted", "finished", "evicted", "shared", "waits"):
            browser.run("document.getElementById('search').focus()")
            browser.type(query)
            assert browser.run(ON_TOP % "#results button.first"), query
            hits = browser.run("[...document.querySelectorAll('#results button')].map((b) => b.innerText)")
            steps = [int(hit.split(":")[0].removeprefix("step ")) for hit in hits]
            assert steps == sorted(steps), "from the first to the last"
            assert all(re.match(r"step \d+: (request .|block B\d)", hit) for hit in hits)
            cut = "[...document.querySelectorAll('#results button')].some((b) => b.scrollWidth > b.clientWidth)"
            assert not browser.run(cut)
            browser.key("Escape")
    finally:
        browser.window(1280, 900)


def test_a_link_leads_to_the_same_picture(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    url, states = tight
    browser.open(url)
    for _ in range(4):
        browser.key("ArrowRight")
    browser.click(".card[data-request='a']")
    browser.run("new Promise((done) => setTimeout(done, 300))")
    link, before = browser.run("location.href"), browser.run("document.getElementById('main').innerText")
    assert "step=4" in link
    browser.open(link)
    assert browser.run("document.getElementById('main').innerText") == before
    assert shown(browser) == as_shown(states[4])
    for strange in ("#step=99999", "#step=-1&block=x", "#request=nobody", "#block=999&engine=7", "#%%%", "#step=1e9"):
        browser.open(url + strange)
        assert browser.run("document.querySelectorAll('.cell').length") == 7


def test_every_rule_it_shows_is_one_of_the_rules(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    """The page has a sentence for each rule that it, or an event of the engine, names; and each is in lessons/rules.md."""
    written = set(re.findall(r"^- \*\*(\w+)\*\*", (ROOT / "lessons/rules.md").read_text(), re.M))
    named = re.findall(r'RULE\("([SKP]\d+)', (ROOT / "nanopd/trace/viewer.html").read_text())
    named += re.findall(r'"(S\d+)(?: case [AB])?"', (ROOT / "nanopd/core/scheduler.py").read_text())
    browser.open(tight[0])
    told = browser.run("Object.fromEntries(Object.entries(RULES))")
    assert {"S3", "S4", "K4", "K5", "K6", "S10"} <= set(named) <= told.keys() <= written
    assert {f"S{i}" for i in range(1, 14)} | {f"K{i}" for i in range(1, 11)} | {"P3", "P4", "P5"} == told.keys()
    browser.key("p")
    for how in (browser.hover, browser.click):
        how(".story .rule[data-rule='S3']")
        assert browser.run("document.getElementById('tip').innerText") == f"S3: {told['S3']}"
        assert 0 < len(told["S3"]) < 300
        browser.key("Escape")
        assert browser.run("document.getElementById('tip').innerText") == ""
    browser.run("document.querySelector('.story .rule[data-rule=K6]').focus()")
    assert browser.run("document.getElementById('tip').innerText") == f"K6: {told['K6']}"
    browser.key("?")
    text = browser.run("document.getElementById('help').innerText")
    assert all(sentence in text for sentence in told.values())
    browser.key("Escape")
    assert not browser.run("document.getElementById('help').open")


def narrow(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """The run of the lessons' question: request 1 is thrown out for 0, and finds its first block again."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=16)
    states = trace_to(directory / "n.jsonl", scheduler)
    for name in "01":
        scheduler.add_request(make_request(name, prompt=[int(name) + 50, *range(8)], max_tokens=8))
    Driver(scheduler).run()
    return page(directory / "n.html", directory / "n.jsonl"), list(states.values())


def test_what_a_preemption_costs(browser: Browser, tmp_path: Path):
    url, states = narrow(tmp_path)
    _, lines = read(tmp_path / "n.jsonl")
    browser.open(url)
    browser.key("p")
    at = browser.run("pos")
    before, held = states[at - 1], states[at]
    (victim,) = [i for i, r in held["requests"].items() if r[0] == "preempted"]
    lost, had = before["requests"][victim][1], before["tables"][victim]
    story = browser.run("document.querySelector('.story').innerText")
    assert f"its {lost} computed tokens no longer count" in story
    assert "free queue now:" in story
    assert browser.run("document.getElementById('jump').disabled"), "there is only one"
    assert browser.run("document.getElementById('which').textContent") == "preemption 1 of 1"
    assert "preempted" in browser.run(f"document.querySelector('.card[data-request=\"{victim}\"] .why').innerText")

    browser.key("ArrowRight")  # it waits
    browser.click(f".card[data-request='{victim}']")
    assert "preempted" in browser.run(f"document.querySelector('.card[data-request=\"{victim}\"] .why').innerText")
    assert "waits" in browser.run("document.querySelector('.hist li.now').innerText")
    assert browser.run("document.querySelectorAll('[data-position].again').length") == lost

    back = next(n for n in range(at + 1, len(states)) if states[n]["requests"][victim][0] == "running")
    browser.run(f"go({back}), draw()")
    new = states[back]["tables"][victim]
    (got,) = (line.event for line in lines if line.step == back and isinstance(line.event, Allocated))
    found = 4 * got.num_hits
    assert 0 < found < lost
    text = f"of {lost} tokens computed before the preemption {found} found, {lost - found} to compute again"
    assert text in browser.run("document.querySelector('.story').innerText")
    assert text in browser.run("document.querySelector('.facts').innerText")
    assert browser.run("document.querySelectorAll('[data-position].again').length") == lost - found
    fates = browser.run(
        "[...document.querySelectorAll('.facts dd > div')].map((d) => d.innerText.replace(/\\s+/g, ' '))"
    )
    assert fates == [
        f"B{a} → B{b} {'kept' if 4 * i < found else 'computed again'}" for i, (a, b) in enumerate(zip(had, new))
    ]


def test_free_blocks_that_are_its_own_hits_are_told_apart(browser: Browser, tmp_path: Path):
    """`none free` next to a free queue with blocks in it: those that the request would find again do not count."""
    url, states = narrow(tmp_path)
    _, lines = read(tmp_path / "n.jsonl")
    browser.open(url)
    told = 0
    for step in range(len(states)):
        refused = [line.event for line in lines if line.step == step and isinstance(line.event, Refused)]
        if not refused or any(isinstance(line.event, Moved) and line.step == step for line in lines):
            continue
        browser.run(f"go({step}), draw()")
        line = browser.run("document.querySelector('.story li.warn').innerText.replace(/\\s+/g, ' ')")
        queue = states[step]["free_queue"]
        assert f"{refused[-1].wanted} new, {refused[-1].free or 'none'} free" in line
        own = re.findall(r"B\d", line.split("besides its own ")[1]) if "besides" in line else []
        assert len(own) == len(queue) - refused[-1].free
        assert {int(b.removeprefix("B")) for b in own} <= set(queue)
        told += bool(own)
    assert told


def test_the_strip_says_what_lies_under_the_pointer(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    browser.open(tight[0])
    browser.hover("#map")
    assert re.match(r"step \d+: \d+ tokens?, \d of 7 blocks in use", browser.run("$('tip').textContent"))


def test_names_are_text_and_nothing_else(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    url, states = tight
    browser.open(url)
    for step in range(len(states)):
        browser.run(f"go({step}), select({{request: {json.dumps(HOSTILE)}}})")
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    assert HOSTILE in browser.run("document.body.innerText")


@pytest.mark.parametrize(("width", "height", "phone"), [(1280, 900, False), (1024, 768, False), (390, 844, True)])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_sticks_out(
    browser: Browser, tight: tuple[str, list[dict[str, Any]]], width: int, height: int, phone: bool, dark: bool
):
    try:
        browser.window(width, height, dark, phone)
        browser.open(tight[0] + "#step=5&request=b")
        assert browser.run("document.documentElement.scrollWidth") <= width
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == dark
    finally:
        browser.window(1280, 900)


def test_p_and_d_in_two_lanes(browser: Browser, tmp_path: Path):
    """Two engines in order of time, with the transfer between them; each lane shows its own engine."""
    held = {}
    for role in ("prefill", "decode"):
        scheduler = make_scheduler(num_blocks=6 if role == "prefill" else 8, block_size=4)
        held[role] = trace_to(tmp_path / role, scheduler, role=role)
        scheduler.add_request(make_request("x", prompt=7, max_tokens=3))
        driver = Driver(scheduler)
        driver.step()
        for state in ("sending", "done") if role == "prefill" else ("asked", "done"):
            side = "send" if role == "prefill" else "recv"
            scheduler.trace(Transfer("x", "tx", side, state, "9 bytes" * (state == "done")))
        driver.run()
    browser.open(page(tmp_path / "pd.html", tmp_path / "prefill", tmp_path / "decode"))
    browser.key("End")
    assert browser.run("[...document.querySelectorAll('.lane')].map((l) => l.querySelectorAll('.cell').length)") == [
        6,
        8,
    ]
    titles = browser.run("[...document.querySelectorAll('.lane .title')].map((t) => t.innerText)")
    assert titles[0].startswith("P · prefill")
    assert titles[1].startswith("D · decode")
    assert "come" in browser.run("document.querySelector('[data-transfer=tx]').innerText")
    assert browser.run("positions.length") == sum(len(states) for states in held.values())
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    browser.click(".lane:nth-of-type(3) .card")
    assert "engine=1" in browser.run("new Promise((done) => setTimeout(() => done(location.hash), 300))")


def test_what_a_session_does_is_told_in_words(browser: Browser, tmp_path: Path):
    """S13: input that comes early waits, an answer ends, A needs the blocks of the idle session, and it goes on without."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=32, max_num_seqs=1)
    states = trace_to(tmp_path / "t.jsonl", scheduler)
    driver = Driver(scheduler)

    def say(turn: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=3, seed=0)
        scheduler.add_request(Request("S", [100 * turn + i for i in range(tokens)], params, [2], turn=turn))

    say(0, 9)
    driver.step()
    say(1, 4)
    driver.run()
    scheduler.add_request(make_request("A", prompt=6, max_tokens=5))
    scheduler.add_request(make_request("B", prompt=1, max_tokens=1))
    driver.run()
    say(2, 1)
    driver.run()
    scheduler.finish_requests(["S"])
    driver.step()
    browser.open(page(tmp_path / "t.html", tmp_path / "t.jsonl") + "#step=0&request=S")

    def text(selector: str) -> str:
        return " ".join(browser.run(f"document.querySelector({json.dumps(selector)}).innerText").split())

    def told(step: int, *sentences: str) -> str:
        browser.run(f"go({step}), draw()")
        assert shown(browser) == as_shown(states[step])
        story = text(".story")
        assert re.search(".*".join(map(re.escape, sentences)), story), f"step {step}: {story}"
        return text("[data-request=S] .why") + " | " + text(".facts")

    assert "turn 1 of 3 in this trace: 9 tokens of input, 1 of output" in told(0, "Arrived: S")
    facts = told(1, "S13 further input of S : 4 tokens; it waits until the answer has ended", "Decodes one token: S")
    assert "+1 input" in facts and "further input 4 tokens: 100 101 102 103" in facts
    facts = told(2, "S13 the answer of S has ended S13 S goes on with 4 more tokens, in the 3 blocks that it has kept")
    assert (
        "turn 2 of 3 in this trace: 4 tokens of input (12 before it), 0 of output" in facts and "+1 input" not in facts
    )
    facts = told(5, "S13 the answer of S has ended; it waits for input and keeps 5 blocks")
    assert "waiting for input · in idle" in facts
    gives = "S13 S gives up 5 blocks for A (needs 2, 1 free); 18 computed tokens no longer count"
    facts = told(6, "Arrived: A B", gives, "K6 S frees B4B3B2B1B0", "A is admitted")
    assert text("[data-request=B] .why") == "S4 1 run already", "nobody waits behind A, which has got its blocks"
    assert "S13 gave up its blocks for A · no blocks | status waiting for input" in facts
    facts = told(10, "A finished: length")
    assert facts.startswith("after 2 answers · no blocks") and "holds K and V of none of them now" in facts
    lost = "of 18 tokens computed before it gave up its blocks 8 found, 10 to compute again"
    goes_on = "S13 further input of S : 1 token S13 S goes on with 1 more token; it has no blocks any more"
    assert lost in told(12, goes_on, "S comes back and computes tokens 8–19 (12)", lost)
    told(14, "S13 the answer of S has ended; it waits for input and keeps 6 blocks")
    out = browser.run("[...document.querySelectorAll('.tok.out[data-position]')].map((t) => +t.dataset.position)")
    assert out == [9, 10, 11, 16, 17, 18, 20, 21, 22], "all answers are output, also those of earlier turns"
    told(15, "S ended: abort, after 3 turns")
    browser.run("selected.all = true, draw()")
    life = text(".hist")
    for sentence in (
        "S13 further input: 4 tokens; it waits in streaming_queue until the answer has ended",
        "S13 answer 1 has ended, with 3 tokens S13 further input: goes on with 4 more tokens",
        "S13 answer 2 has ended, with 3 tokens; waits for input, and keeps B0B1B2B3B4",
        "S13 gives up B0B1B2B3B4 for A ; 18 computed tokens no longer count",
        "the session ended (abort) after 3 turns",
    ):
        assert sentence in life, life
    idle = browser.run("[...document.querySelectorAll('.life .s-idle')].map((i) => i.title)")
    assert idle[-1] == "waiting for input from step 14"


def test_input_that_is_refused_leaves_the_session(browser: Browser, tmp_path: Path):
    """S13: the first for its grammar, the third when its first token is due. What comes then takes their places."""
    scheduler = make_scheduler(block_size=4, grammars=(grammars := FakeGrammars()))
    states = trace_to(tmp_path / "t.jsonl", scheduler)
    driver = Driver(scheduler)
    for turn, news in enumerate((["no"], [], [None, "no"], [])):
        params = SamplingParams(max_tokens=2, seed=0, structured_outputs={"regex": "x"} if news else None)
        scheduler.add_request(Request("S", [100 * turn + i for i in range(6)], params, [2], turn=turn))
        for grammars.news["S"] in news:
            driver.step()
        driver.run()
    browser.open(page(tmp_path / "t.html", tmp_path / "t.jsonl") + "#step=0&request=S")
    stories = []
    for step, state in states.items():
        browser.run(f"go({step}), draw()")
        assert shown(browser) == as_shown(state)
        stories.append(" ".join(browser.run("document.querySelector('.story').innerText").split()))
    refused = [step for step, story in enumerate(stories) if "S13 the input of S is refused, and leaves it" in story]
    assert len(refused) == 2 and refused[0] == 0
    tokens = browser.run("[...document.querySelectorAll('.tok[data-position]')].map((t) => t.title.split(' ').at(-1))")
    assert tokens == [str(token) for token in scheduler.requests["S"].token_ids]
    assert len(tokens) == 2 * (6 + 2)


def test_an_urgent_input_of_a_session_goes_to_its_place_in_the_queue(browser: Browser, tmp_path: Path):
    """Random lives seldom come to this: a session that goes on, ahead of others that wait."""
    scheduler = make_scheduler(max_num_seqs=1, scheduling_policy="priority")
    states = trace_to(tmp_path / "t.jsonl", scheduler)
    driver = Driver(scheduler)

    def say(turn: int, priority: int) -> None:
        params = SamplingParams(max_tokens=1, seed=0)
        scheduler.add_request(Request("S", [turn] * 5, params, [2], priority=priority, turn=turn))

    say(0, 0)
    driver.step()
    for name in "ABC":
        scheduler.add_request(make_request(name))
    driver.step()
    say(1, -1)
    driver.step()
    assert states[2]["queues"]["waiting"] == ["S", "B", "C"]
    browser.open(page(tmp_path / "t.html", tmp_path / "t.jsonl") + "#step=2")
    assert shown(browser) == as_shown(states[2])


def test_a_run_without_sessions_has_no_queue_for_them(browser: Browser, tight: tuple[str, list[dict[str, Any]]]):
    browser.open(tight[0])
    assert browser.run("document.querySelector('[data-queue=idle]').parentElement.hidden")
    assert "session" not in browser.run("document.body.innerText")


@pytest.mark.slow
def test_5000_steps(browser: Browser, tmp_path: Path):
    """A long trace opens, every step can be reached, and what is shown is right. The times are printed."""
    scheduler = make_scheduler(num_blocks=256, block_size=16, max_num_seqs=24, max_num_batched_tokens=256)
    states = trace_to(tmp_path / "t.jsonl", scheduler)
    for n in range(5100):
        if n % 6 == 0:
            scheduler.add_request(make_request(f"request-{n}", prompt=20 + n * 7 % 200, max_tokens=30 + n * 13 % 200))
        output = scheduler.schedule()
        ready = (
            i
            for i in output.num_scheduled_tokens
            if scheduler.requests[i].num_computed_tokens == scheduler.requests[i].num_tokens
        )
        scheduler.update_from_output(output, ModelRunnerOutput({i: [n % 1000] for i in ready}))
    url = page(tmp_path / "t.html", tmp_path / "t.jsonl")
    browser.open(url)
    loaded = browser.run("performance.getEntriesByType('navigation')[0].domComplete")
    times = """(async () => {
      const frame = () => new Promise(requestAnimationFrame), times = [];
      for (const to of %s) {
        const start = performance.now();
        pos = to;
        draw();
        await frame();
        times.push(performance.now() - start);
      }
      return times.sort((a, b) => a - b);
    })()"""
    for what, steps in (
        ("one by one", range(2000, 2200)),
        ("backwards", range(4200, 4000, -1)),
        ("anywhere", [n * 1879 % len(states) for n in range(200)]),
    ):
        t = browser.run(times % list(steps))
        print(f"{what}: median {t[100]:.1f} ms, 95% {t[190]:.1f} ms, longest {t[-1]:.1f} ms a frame")
    print(f"{Path(tmp_path / 't.html').stat().st_size / 1e6:.1f} MB, loaded in {loaded:.0f} ms")
    for step in (0, 31, 32, 83, 84, 2500, max(states), 1):
        browser.run(f"go({step}), draw()")
        assert shown(browser) == as_shown(states[step])


def test_cascade_is_told_where_it_was_used(browser: Browser, tmp_path: Path):
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    trace_to(tmp_path / "t.jsonl", scheduler)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [1, 3, 4, 5, 6], max_tokens=4))
    for blocks in (0, 1):
        output = scheduler.schedule()
        assert output.num_common_prefix_blocks == 1, "an offer, whatever attention makes of it"
        sampled = {name: [7] for name in output.num_scheduled_tokens}
        scheduler.update_from_output(output, ModelRunnerOutput(sampled, num_common_prefix_blocks=blocks))
    browser.open(page(tmp_path / "t.html", tmp_path / "t.jsonl"))
    for step, shown_there in ((0, False), (1, True)):
        browser.run(f"go({step}), draw()")
        text = browser.run("document.body.innerText")
        assert ("Cascade: attention read the first 1 block of all tables once for all" in text) == shown_there


def test_drafts_and_what_became_of_them(browser: Browser, tmp_path: Path):
    scheduler = make_scheduler(num_blocks=16, block_size=4, speculative_ngram=4)
    states = trace_to(tmp_path / "t.jsonl", scheduler)
    scheduler.add_request(make_request("a", [3, 4, 1, 3, 4, 1, 3, 4], max_tokens=9))
    driver = Driver(scheduler)
    driver.step({"a": 1})
    driver.right = 2
    while scheduler.has_unfinished_requests():
        driver.step({"a": 9})
    browser.open(page(tmp_path / "t.html", tmp_path / "t.jsonl"))
    browser.run("go(1), draw()")
    assert shown(browser) == as_shown(states[1]), "computed goes back behind the wrong drafts"
    assert "4 drafts among them: " in browser.run("document.body.innerText")
    browser.click(".card[data-request='a']")
    assert "decodes 8 tokens (3 of 5 drafts right)" in browser.run("document.getElementById('detail').innerText")
