"""How few evaluations find a smallest set, and that what is found cannot be made smaller."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditto_core.debug.minimize import minimize, split


def counted(needed):
    """Return a property that holds when all of ``needed`` are there, and the list of sets it was asked about."""
    asked = []

    def holds(items):
        asked.append(items)
        return set(needed) <= items

    return holds, asked


@pytest.mark.parametrize("bad", [0, 7, 31, 32, 63])
def test_one_item_of_64_takes_seven_evaluations_wherever_it_is(bad):
    holds, asked = counted({bad})
    assert minimize(range(64), holds) == [bad]
    assert len(asked) <= 7


def test_a_right_guess_takes_one_evaluation():
    holds, asked = counted({41})
    assert minimize(range(64), holds, guesses=[[41]]) == [41]
    assert asked == [{41}]


def test_wrong_guesses_cost_themselves_and_parts_of_wrong_ones_nothing():
    holds, asked = counted({41})
    assert minimize(range(64), holds, guesses=[[1, 2], [2], [1, 41]]) == [41]
    assert asked[:2] == [{1, 2}, {1, 41}]


def test_two_items_that_are_only_bad_together_are_both_found():
    holds, asked = counted({5, 50})
    assert minimize(range(64), holds) == [5, 50]
    assert len(asked) <= 17


def test_a_run_of_items_that_are_all_needed_stays_whole():
    holds, _ = counted(range(20, 30))
    assert minimize(range(64), holds) == list(range(20, 30))


@settings(deadline=None)
@given(st.integers(1, 20), st.data())
def test_no_single_item_of_the_result_can_be_taken_away_even_if_the_property_is_not_monotone(count, data):
    sets = data.draw(st.lists(st.sets(st.integers(0, count - 1), min_size=1), min_size=1, max_size=5))
    spoilers = data.draw(st.sets(st.integers(0, count - 1), max_size=2))

    def holds(items):
        whole = len(items) == count
        return whole or (any(s <= items for s in sets) and len(items & spoilers) != 1)

    found = minimize(range(count), holds)
    assert found == sorted(found)
    assert holds(frozenset(found))
    assert len(found) == 1 or not any(holds(frozenset(found) - {item}) for item in found)


def test_no_set_is_asked_about_twice():
    holds, asked = counted({3, 4, 17})
    minimize(range(40), holds, guesses=[[3], [3, 4]])
    assert len(asked) == len(set(asked))


def test_chunks_differ_by_one_at_most_and_cover_everything():
    parts = split(list(range(11)), 4)
    assert [item for part in parts for item in part] == list(range(11))
    assert {len(part) for part in parts} == {2, 3}


@given(st.sets(st.integers(0, 23), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_judging_ahead_changes_neither_the_result_nor_what_is_asked(needed):
    holds, asked = counted(needed)
    announced = []
    guesses = [[1, 2, 3], list(range(8)), [5]]
    found = minimize(range(24), holds, guesses=guesses, ahead=announced.extend)
    plain, asked_before = counted(needed)
    assert found == minimize(range(24), plain, guesses=guesses) == sorted(needed)
    assert asked == asked_before
    assert frozenset({5}) in announced
