"""Text while it comes: no half characters, no half stop strings, nothing lost."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanopd.config import SamplingParams
from nanopd.engine.detokenizer import Detokenizer


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def run(text: str, stop: list[str], min_tokens: int = 0) -> tuple[list[str], str | None]:
    """What is shown after each byte of `text`, and which stop string ended it."""
    params = SamplingParams(stop=tuple(stop), max_tokens=10_000, min_tokens=min_tokens)
    detokenizer = Detokenizer(Bytes(), list(b"prompt"), params)  # type: ignore[arg-type]
    shown, data = [], text.encode()
    for i, byte in enumerate(data):
        found = detokenizer.append([byte], finished=i == len(data) - 1)
        shown.append(detokenizer.text)
        if found is not None:
            return shown, found
    return shown, None


@given(st.text(max_size=40))
def test_the_whole_text_comes_and_only_grows(text: str):
    shown, _ = run(text, [])
    assert (shown or [""])[-1] == text
    for before, after in itertools.pairwise(shown):
        assert after.startswith(before)
        assert "�" not in before or "�" in text


@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str]):
    shown, found = run(text, stops)
    # The stop string that is complete first; of several complete at the same character, the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert found is None
        assert (shown or [""])[-1] == text
        return
    assert found in stops
    end = min(ends)[0]
    start = min(begin for e, begin in ends if e == end)
    assert shown[-1] == text[:start]
    assert all(text[:start].startswith(s) for s in shown), "something was shown that had to be taken back"


@pytest.mark.parametrize("stop", ["STOP", "xSTOP", "P"])
def test_a_stop_string_that_spans_tokens_is_never_shown_half(stop: str):
    shown, found = run("text xSTOP more", [stop])
    assert found == stop
    for text in shown:
        assert not any(text.endswith(stop[:n]) for n in range(1, len(stop) + 1)), shown


def test_what_only_looked_like_a_stop_string_is_shown():
    shown, found = run("STOMP", ["STOP"])
    assert found is None
    assert shown == ["", "", "", "STOM", "STOMP"]


def test_no_stop_before_min_tokens():
    shown, found = run("abc", ["a"], min_tokens=2)
    assert (shown[-1], found) == ("abc", None)
    assert run("aba", ["a"], min_tokens=3)[1] == "a"


def test_tokens_without_text_do_not_hurry_a_character():
    detokenizer = Detokenizer(Bytes(), [65], SamplingParams())  # type: ignore[arg-type]
    for token in [300, 300, 300, *"👩".encode()]:
        detokenizer.append([token])
    assert detokenizer.text == "👩"


def test_bytes_that_are_no_character_do_not_hold_the_rest_back_for_ever():
    detokenizer = Detokenizer(Bytes(), [65], SamplingParams())  # type: ignore[arg-type]
    for _ in range(20):
        detokenizer.append([0xFF])
    assert len(detokenizer.text) > 10


def test_a_broken_last_character_is_shown_at_the_end():
    detokenizer = Detokenizer(Bytes(), [65], SamplingParams())  # type: ignore[arg-type]
    detokenizer.append([0xE2, 0x82])
    assert detokenizer.text == ""
    detokenizer.append([], finished=True)
    assert detokenizer.text == "�"
