"""Stop strings: the same answer for every chunking, nothing held back that cannot begin a stop."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import EngineError, ErrorReason
from services.gateway.core.stop_strings import StopScan, StopStrings

ALPHABET = "ab"
texts = st.text(alphabet="abc", max_size=24)
stop_lists = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), max_size=5)


@st.composite
def chunked_texts(draw: st.DrawFn) -> list[str]:
    """Draw a text cut into chunks at random places, empty chunks included."""
    text = draw(texts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def brute_force(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The rule by definition: the first end of any stop; of those, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


def run(chunks: list[str], scanner: StopStrings) -> tuple[str, str | None]:
    shown = "".join(scanner.feed(chunk).text for chunk in chunks)
    return shown + scanner.flush(), scanner.found


@given(chunks=chunked_texts(), stops=stop_lists, include_stop=st.booleans())
def test_result_equals_the_definition_for_every_chunking(chunks, stops, include_stop):
    expected = brute_force("".join(chunks), stops, include_stop=include_stop)
    assert run(chunks, StopStrings(stops, include_stop=include_stop)) == expected


@given(text=texts, stops=stop_lists)
def test_held_back_text_is_always_the_longest_suffix_that_begins_a_stop(text, stops):
    scanner, shown = StopStrings(stops), ""
    for end, character in enumerate(text, start=1):
        scan = scanner.feed(character)
        shown += scan.text
        if scan.stop is not None:
            return
        seen = text[:end]
        held = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert shown == seen[: len(seen) - held]


def test_stop_across_chunk_borders_is_found_and_cut():
    scanner = StopStrings(["###"])
    assert scanner.feed("text #") == StopScan("text ")
    assert scanner.feed("#") == StopScan("")
    assert scanner.feed("# more") == StopScan("", "###")


def test_text_that_only_looked_like_a_stop_is_released():
    scanner = StopStrings(["\n\nUser:"])
    assert scanner.feed("a\n\nUs") == StopScan("a")
    assert scanner.feed("ing") == StopScan("\n\nUsing")


def test_stop_that_ends_first_wins_over_one_that_starts_first():
    assert StopStrings(["abcd", "bc"]).feed("xabcd") == StopScan("xa", "bc")


def test_longest_stop_wins_when_several_end_together():
    assert StopStrings(["c", "abc", "bc"]).feed("xabc") == StopScan("x", "abc")


def test_include_stop_shows_the_stop_and_holds_nothing_back():
    scanner = StopStrings(["END"], include_stop=True)
    assert scanner.feed("the EN") == StopScan("the EN")
    assert scanner.feed("D of it") == StopScan("D", "END")
    assert scanner.flush() == ""


def test_text_after_the_stop_is_dropped():
    scanner = StopStrings(["b"])
    scanner.feed("abc")
    assert scanner.feed("more") == StopScan("", "b")
    assert scanner.flush() == ""


def test_flush_gives_held_text_once():
    scanner = StopStrings(["abc"])
    assert scanner.feed("xab") == StopScan("x")
    assert scanner.flush() == "ab"
    assert scanner.flush() == ""


def test_no_stops_let_everything_through():
    scanner = StopStrings([])
    assert scanner.feed("anything") == StopScan("anything")
    assert scanner.flush() == ""


def test_empty_stop_is_refused():
    with pytest.raises(EngineError) as caught:
        StopStrings(["a", ""])
    assert caught.value.reason is ErrorReason.INVALID_REQUEST
    assert caught.value.metadata == {"field": "stop"}


@pytest.mark.parametrize("length", [5000, 100_000])
def test_part_of_a_very_long_stop_is_held_back_and_released(length):
    scanner = StopStrings(["a" * length + "b"])
    assert scanner.feed("x" + "a" * 50) == StopScan("x")
    assert scanner.feed("c") == StopScan("a" * 50 + "c")


def test_very_long_stop_is_found_behind_a_longer_run_of_its_characters():
    stop = "a" * 5000 + "b"
    scanner = StopStrings([stop])
    assert scanner.feed("a" * 5001).text == "a"
    assert scanner.feed("b") == StopScan("", stop)


def test_thousand_nested_stops_need_no_recursion():
    stops = ["a" * count + "b" for count in range(1000)]
    scanner = StopStrings(stops)
    assert scanner.feed("c" + "a" * 998) == StopScan("c")
    assert scanner.feed("b") == StopScan("", stops[998])
