"""Einsum equations: checked, and written out."""

import pytest

from keras_policy_ext.contractions import equations

pytestmark = pytest.mark.any_backend

MALFORMED = [
    "",
    "ab,bc",
    "ab->ab",
    "ab,bc,cd->ad",
    "ab,bc->ac->ac",
    "ab,b1->a1",
    "ab,bc->a.c",
    "a..b,bc->ac",
    "......ab,bc->ac",
    "ab,bc-ac",
]


# Splitting


def test_spaces_do_not_matter():
    assert equations.split(" ab , bc -> ac ") == ("ab", "bc", "ac")
    assert equations.split("...x, xy -> ...y") == ("...x", "xy", "...y")


@pytest.mark.parametrize("equation", MALFORMED)
def test_another_form_is_refused_with_an_example(equation):
    with pytest.raises(ValueError, match="'ab,bc->ac'") as error:
        equations.split(equation)
    assert repr(equation) in str(error.value)


@pytest.mark.parametrize("equation", ["aa,ab->b", "ab,bb->a", "ab,bc->cc"])
def test_a_repeated_axis_is_refused(equation):
    with pytest.raises(ValueError, match="repeats an axis"):
        equations.split(equation)


def test_an_output_axis_of_no_operand_is_refused():
    with pytest.raises(ValueError, match="no operand"):
        equations.split("ab,bc->ad")


# Writing out


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        ("ab,bc->ac", (2, 2), "ab,bc->ac"),
        ("...x,xy->...y", (1, 2), "x,xy->y"),
        ("...x,xy->...y", (4, 2), "abcx,xy->abcy"),
        ("a...x,xy->y...a", (3, 2), "abx,xy->yba"),
        ("x...,xy->...y", (3, 2), "xab,xy->aby"),
        ("...ab,...bc->...ac", (4, 4), "deab,debc->deac"),
        ("...ab,...bc->...ac", (4, 3), "deab,ebc->deac"),
        ("...ab,...bc->...ac", (2, 3), "ab,dbc->dac"),
        ("ab,...->ab...", (2, 1), "ab,c->abc"),
    ],
)
def test_an_ellipsis_becomes_letters(equation, ranks, expected):
    assert equations.explicit(equation, *ranks) == expected


def test_a_malformed_equation_is_refused_before_its_ranks():
    with pytest.raises(ValueError, match="repeats an axis"):
        equations.explicit("aa,ab->b", 7, 7)


@pytest.mark.parametrize(
    ("equation", "ranks"),
    [
        ("ab,bc->ac", (3, 2)),
        ("ab,bc->ac", (2, 1)),
        ("...ab,bc->...ac", (1, 2)),
        ("ab,...bc->a...c", (2, 1)),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(equation, ranks):
    with pytest.raises(ValueError, match="does not fit") as error:
        equations.explicit(equation, *ranks)
    assert repr(equation) in str(error.value)
    assert "Received: rank" in str(error.value)


def test_an_ellipsis_that_the_output_lacks_is_summed_as_in_jax_and_torch():
    assert equations.explicit("...x,xy->y", 3, 2) == "abx,xy->y"
