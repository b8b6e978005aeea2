"""Prompt lookup: which occurrence counts, how far a copy goes, and that the index finds what a search does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.drafting import DraftSettings, TokenHistory


def draft(token_ids, max_num_tokens=4, *, min_ngram=2, max_ngram=3):
    return TokenHistory(token_ids, DraftSettings(max_num_tokens, min_ngram, max_ngram)).draft(max_num_tokens)


def test_draft_is_what_followed_the_last_tokens_before():
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4, 5, 6, 7]


def test_nothing_is_drafted_when_the_last_tokens_are_new():
    assert draft([1, 2, 3, 4, 5, 9, 8]) == []


def test_nothing_is_drafted_for_fewer_tokens_than_must_match():
    assert draft([7], min_ngram=1) == []
    assert draft([7, 7], min_ngram=2) == []


def test_longer_match_counts_though_a_shorter_one_is_later():
    assert draft([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3], 1) == [70]


def test_latest_of_equally_long_matches_counts():
    assert draft([1, 2, 3, 70, 1, 2, 3, 80, 1, 2, 3], 1) == [80]


def test_match_longer_than_the_longest_ngram_counts_no_more_than_one_of_that_length():
    token_ids = [1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3]
    assert draft(token_ids, 1, max_ngram=2) == [80]


def test_copy_goes_on_into_what_it_has_drafted():
    assert draft([9, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert draft([5, 5, 5], 4) == [5, 5, 5, 5]


def test_draft_is_no_longer_than_asked_for():
    assert draft([1, 2, 3, 4, 5, 6, 1, 2], 1) == [3]


def test_appended_tokens_are_found_and_looked_for():
    history = TokenHistory([1, 2, 3], DraftSettings(4, 2, 3))
    assert history.draft(2) == []
    for token_id in (4, 1, 2):
        history.append(token_id)
    assert history.draft(2) == [3, 4]
    for token_id in (3, 8, 1, 2):
        history.append(token_id)
    assert history.draft(2) == [3, 8]


@pytest.mark.parametrize(
    ("outputs", "num_drafted"),
    [
        ([90], 1),  # nothing of the draft 3, 4, 5, 6 came true
        ([3, 90], 3),
        ([3, 4, 90], 4),  # five would be allowed, four are asked for
        ([3, 4, 5, 6, 90], 4),
    ],
)
def test_draft_is_at_most_twice_as_long_as_what_came_true_of_the_last_and_one_token(outputs, num_drafted):
    history = TokenHistory([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], DraftSettings(4, 2, 3))
    assert history.draft(4) == [3, 4, 5, 6]
    for token_id in outputs:
        history.append(token_id)
    assert history.draft(4) == []  # 90 is new; that nothing was guessed changes nothing
    for token_id in (1, 2):
        history.append(token_id)
    assert len(history.draft(4)) == num_drafted


def test_length_does_not_suffer_from_what_a_plan_did_not_allow():
    history = TokenHistory([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], DraftSettings(4, 2, 3))
    assert history.draft(1) == [3]
    for token_id in (3, 4):
        history.append(token_id)
    assert history.draft(4) == [5, 6, 7]


def searched(token_ids, max_num_tokens, min_ngram, max_ngram):
    """The definition, by searching from the end."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if token_ids[start : start + length] == token_ids[len(token_ids) - length :]:
                following = list(token_ids[start + length :])
                period = len(following)
                return [following[index % period] for index in range(max_num_tokens)]
    return []


def check(found, expected):
    assert found == expected[: len(found)]
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    more=st.lists(st.integers(0, 3), max_size=20),
    draws=st.data(),
)
def test_index_finds_what_a_search_finds_however_the_tokens_came(min_ngram, max_ngram, token_ids, more, draws):
    history = TokenHistory(token_ids, DraftSettings(4, min_ngram, max_ngram))
    known = list(token_ids)
    for token_id in more:
        if draws.draw(st.booleans()):
            check(history.draft(4), searched(known, 4, min_ngram, max_ngram))
        history.append(token_id)
        known.append(token_id)
    check(history.draft(4), searched(known, 4, min_ngram, max_ngram))
