"""Tokens to text with stops: the same outcome for every grouping, and exact counts."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output_fold import OutputFold, OutputRule
from services.gateway.ports import Finish, FinishReason, TokenEvent
from tests.unit.gateway.api_harness import END_ID, MARK_ID, TOKENIZER, token_ids


def rule(*stops: str, **changes):
    fields = {
        "stop_text_by_id": {},
        "stop_token_ids": frozenset(),
        "includes_stop": False,
        "skips_special_tokens": True,
        "at_text_start": False,
    }
    return OutputRule(stop_strings=stops, **(fields | changes))


def finish(reason=FinishReason.LENGTH, stop_token_id=None, num_output_tokens=0):
    return Finish(reason, stop_token_id, 1, num_output_tokens, 0)


def fold(a_rule, ids, cuts=(), end=None):
    """Fold ids cut at positions; returns text, counted tokens and the stop."""
    folder = OutputFold(TOKENIZER, a_rule)
    borders = [0, *sorted(set(cuts)), len(ids)]
    text = ""
    for start, stop in pairwise(borders):
        is_last = stop == len(ids)
        folded = folder.take(TokenEvent(start, tuple(ids[start:stop]), (end or finish()) if is_last else None))
        text += folded.text
        if folded.is_end:
            return text, folded.num_tokens, folded.stop
    raise AssertionError("no end")


def test_fold_hides_and_counts_the_end_token():
    end = finish(FinishReason.STOP, END_ID)
    assert fold(rule(), [*token_ids("ab"), END_ID], end=end) == ("ab", 3, None)


def test_fold_shows_an_ordinary_stop_token_when_it_is_to_be_included():
    end = finish(FinishReason.STOP, ord("!"))
    assert fold(rule(includes_stop=True), token_ids("ab!"), end=end) == ("ab!", 3, None)


def test_fold_cuts_text_at_a_stop_string_and_counts_the_tokens_up_to_it():
    assert fold(rule("cd"), token_ids("abcdef")) == ("ab", 4, "cd")


def test_fold_keeps_the_stop_string_when_it_is_to_be_included():
    assert fold(rule("cd", includes_stop=True), token_ids("abcdef")) == ("abcd", 4, "cd")


def test_fold_releases_what_was_held_back_when_the_output_ends_without_a_match():
    assert fold(rule("cde"), token_ids("abcd")) == ("abcd", 4, None)


def test_fold_replaces_an_incomplete_character_once_at_the_end():
    assert fold(rule(), token_ids("日")[:2]) == ("�", 2, None)


def test_fold_names_the_stop_string_that_is_a_special_token():
    a_rule = rule("<mark>", stop_text_by_id={MARK_ID: "<mark>"})
    end = finish(FinishReason.STOP, MARK_ID)
    assert fold(a_rule, [*token_ids("ab"), MARK_ID], end=end) == ("ab", 3, "<mark>")


@given(
    st.text(alphabet="ab日\n", max_size=12),
    st.lists(st.text(alphabet="ab日", min_size=1, max_size=3), max_size=3),
    st.sets(st.integers(1, 30)),
    st.booleans(),
)
def test_fold_gives_the_same_text_count_and_stop_for_every_grouping(text, stops, cuts, includes_stop):
    ids = token_ids(text)
    a_rule = rule(*stops, includes_stop=includes_stop)
    whole = fold(a_rule, ids)
    assert fold(a_rule, ids, [cut for cut in cuts if cut < len(ids)]) == whole
