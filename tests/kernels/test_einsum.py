"""Einsum equations: written out, classified, and differentiated."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_policy_ext.kernels import einsum

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
    assert einsum.split(" ab , bc -> ac ") == ("ab", "bc", "ac")
    assert einsum.split("...x, xy -> ...y") == ("...x", "xy", "...y")


@pytest.mark.parametrize("equation", MALFORMED)
def test_another_form_is_refused_with_an_example(equation):
    with pytest.raises(ValueError, match="'ab,bc->ac'") as error:
        einsum.split(equation)
    assert repr(equation) in str(error.value)


@pytest.mark.parametrize("equation", ["aa,ab->b", "ab,bb->a", "ab,bc->cc"])
def test_a_repeated_axis_is_refused(equation):
    with pytest.raises(ValueError, match="repeats an axis"):
        einsum.split(equation)


def test_an_output_axis_of_no_operand_is_refused():
    with pytest.raises(ValueError, match="no operand"):
        einsum.split("ab,bc->ad")


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
    assert einsum.explicit(equation, *ranks) == expected


def test_a_malformed_equation_is_refused_before_its_ranks():
    with pytest.raises(ValueError, match="repeats an axis"):
        einsum.explicit("aa,ab->b", 7, 7)


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
        einsum.explicit(equation, *ranks)
    assert repr(equation) in str(error.value)
    assert "Received: rank" in str(error.value)


def test_an_ellipsis_that_the_output_lacks_is_summed_as_in_jax_and_torch():
    assert einsum.explicit("...x,xy->y", 3, 2) == "abx,xy->y"


# The form of a matmul


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("ab,bc->ac", ("", "a", "c", "b")),
        ("abc,cde->abde", ("", "ab", "de", "c")),
        ("abcd,cde->abe", ("", "ab", "e", "cd")),
        ("ab,bc->ca", ("", "a", "c", "b")),
        ("gab,gbc->agc", ("g", "a", "c", "b")),
        ("ab,ab->ab", ("ab", "", "", "")),
        ("ab,cd->dbca", ("", "ba", "dc", "")),
        ("ab,bc->c", None),
        ("ab,bcd->ac", None),
    ],
)
def test_the_axes_of_a_matmul_are_told_apart(equation, expected):
    assert einsum.matmul_form(equation) == expected


KINDS = ["batch", "rows", "columns", "contracted", "lone first", "lone second"]
IN_FIRST = {"batch", "rows", "contracted", "lone first"}
IN_SECOND = {"batch", "columns", "contracted", "lone second"}
IN_OUT = {"batch", "rows", "columns"}


@st.composite
def equations(draw):
    """A random equation and the size of each axis; every kind of axis."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    letters = "abcde"[: len(kinds)]
    shuffle = random.Random(draw(st.integers(0, 2**16))).sample

    def term(members):
        chosen = [
            c for c, k in zip(letters, kinds, strict=True) if k in members
        ]
        return "".join(shuffle(chosen, len(chosen)))

    equation = f"{term(IN_FIRST)},{term(IN_SECOND)}->{term(IN_OUT)}"
    sizes = [draw(st.integers(1, 3)) for _ in letters]
    return equation, dict(zip(letters, sizes, strict=True))


def operands(equation, sizes):
    """Small integers, so that float64 sums are exact."""
    rng = np.random.default_rng(0)
    for term in einsum.split(equation):
        yield rng.integers(-4, 5, [sizes[c] for c in term]).astype("float64")


@given(equations())
def test_the_form_rebuilds_the_einsum(case):
    equation, sizes = case
    form = einsum.matmul_form(equation)
    first, second, out = einsum.split(equation)
    if (set(first) ^ set(second)) - set(out):
        assert form is None
        return
    x, w, _ = operands(equation, sizes)
    batched = (
        f"{form.batch}{form.rows}{form.contracted},"
        f"{form.batch}{form.contracted}{form.columns}->"
        f"{form.batch}{form.rows}{form.columns}"
    )
    assert sorted(form.batch + form.rows + form.columns) == sorted(out)
    x = np.einsum(f"{first}->{batched.partition(',')[0]}", x)
    middle = batched.partition(",")[2].partition("->")[0]
    w = np.einsum(f"{second}->{middle}", w)
    product = np.einsum(batched, x, w)
    product = np.einsum(f"{batched.partition('->')[2]}->{out}", product)
    expected = np.einsum(equation, *list(operands(equation, sizes))[:2])
    np.testing.assert_array_equal(product, expected)


# Gradients: the einsum is linear in each operand, so that the derivative by
# an element is the einsum of a unit vector.


def numeric_gradient(function, g, shape):
    gradient = np.empty(shape)
    for index in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[index] = 1
        gradient[index] = np.sum(g * function(unit))
    return gradient


def broadcast(gradient, axes, shape):
    for axis in axes:
        gradient = np.expand_dims(gradient, axis)
    return np.broadcast_to(gradient, shape)


def dot_general(a, b, form):
    """XLA's, in NumPy: batch axes, then what each operand has left."""
    moved = []
    axes = zip((a, b), form.contracted, form.batch, strict=True)
    for term, contracted, batch in axes:
        left = [i for i in range(term.ndim) if i not in (*contracted, *batch)]
        sizes = [
            math.prod(term.shape[i] for i in axes)
            for axes in (batch, left, contracted)
        ]
        flat = term.transpose(*batch, *left, *contracted).reshape(sizes)
        moved.append((flat, [term.shape[i] for i in left]))
    (first, rows), (second, columns) = moved
    product = np.matmul(first, second.transpose(0, 2, 1))
    sizes = [a.shape[i] for i in form.batch[0]]
    return product.reshape(sizes + rows + columns).transpose(form.transposed)


@given(equations())
def test_the_dot_general_of_an_einsum_is_that_einsum(case):
    equation = case[0]
    if einsum.matmul_form(equation) is None:
        return
    x, w, _ = operands(*case)
    product = dot_general(x, w, einsum.dot_form(equation))
    np.testing.assert_array_equal(product, np.einsum(equation, x, w))


@given(equations())
def test_the_gradient_of_the_inputs_is_the_derivative(case):
    x, w, g = operands(*case)
    equation, axes = einsum.inputs_grad(case[0])
    gradient = broadcast(np.einsum(equation, g, w), axes, x.shape)
    expected = numeric_gradient(lambda x: np.einsum(case[0], x, w), g, x.shape)
    np.testing.assert_array_equal(gradient, expected)
    pairing = np.sum(g * np.einsum(case[0], x, w))
    assert np.sum(gradient * x) == pairing


@given(equations())
def test_the_gradient_of_the_kernel_is_the_derivative(case):
    x, w, g = operands(*case)
    equation, axes = einsum.kernel_grad(case[0])
    gradient = broadcast(np.einsum(equation, x, g), axes, w.shape)
    expected = numeric_gradient(lambda w: np.einsum(case[0], x, w), g, w.shape)
    np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize(
    ("equation", "inputs_grad", "kernel_grad"),
    [
        ("ab,bc->ac", ("ac,bc->ab", ()), ("ab,ac->bc", ())),
        ("ab,bc->c", ("c,bc->b", (0,)), ("ab,c->bc", ())),
        ("ab,bcd->ac", ("ac,bcd->ab", ()), ("ab,ac->bc", (2,))),
    ],
)
def test_an_axis_that_was_summed_alone_is_named(
    equation, inputs_grad, kernel_grad
):
    assert einsum.inputs_grad(equation) == inputs_grad
    assert einsum.kernel_grad(equation) == kernel_grad
