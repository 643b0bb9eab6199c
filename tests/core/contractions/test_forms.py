"""The matrices of an equation: what is multiplied, and both gradients."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_policy_ext.contractions import Einsum
from keras_policy_ext.contractions.equations import form_of, split
from keras_policy_ext.contractions.operands import Operands
from keras_policy_ext.recipes import CurrentScaling, RowwiseScaling


@pytest.mark.parametrize(
    ("equation", "expected"),
    [
        ("ab,bc->ac", ("", "a", "c", "b")),
        ("abc,cde->abde", ("", "ab", "de", "c")),
        ("abcd,cde->abe", ("", "ab", "e", "cd")),
        ("ab,bc->ca", ("", "a", "c", "b")),
        ("abd,dk->bak", ("", "ab", "k", "d")),  # rows as the inputs have them
        ("gab,gbc->agc", ("g", "a", "c", "b")),
        ("ab,ab->ab", ("ab", "", "", "")),
        ("ab,cd->dbca", ("", "ab", "dc", "")),
        ("ab,bc->c", ("", "", "c", "b")),  # `a` is summed before
        ("ab,bcd->ac", ("", "a", "c", "b")),  # and `d`
    ],
)
def test_the_axes_of_a_matmul_are_told_apart(equation, expected):
    assert form_of(equation)[3:] == expected


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
    for term in split(equation):
        yield rng.integers(-4, 5, [sizes[c] for c in term]).astype("float64")


# Gradients: the einsum is linear in each operand, so that the derivative by
# an element is the einsum of a unit vector.


def numeric_gradient(function, g, shape):
    gradient = np.empty(shape)
    for index in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[index] = 1
        gradient[index] = np.sum(g * function(unit))
    return gradient


def matrices(form, **operands):
    """The home matrix of each operand, as NumPy has it."""
    return [
        ops.convert_to_numpy(form.matrix(name, form.summed(name, tensor)))
        for name, tensor in (
            (name, ops.convert_to_tensor(x, "float32"))
            for name, x in operands.items()
        )
    ]


@pytest.mark.full
@settings(max_examples=60)
@given(equations())
@pytest.mark.slow_except()
def test_three_products_of_matrices_are_the_einsum_and_its_gradients(case):
    equation, (x, w, g) = case[0], operands(*case)
    form = form_of(equation)
    home = matrices(form, inputs=x, kernel=w, outputs_grad=g)
    a, b, c = home
    stored_transposed = [matrix.transpose(0, 2, 1) for matrix in home]
    sizes = form.sizes(x.shape, w.shape)
    products = (
        ("forward", a @ stored_transposed[1]),
        ("inputs_grad", c @ b),
        ("kernel_grad", stored_transposed[0] @ c),
    )
    expected = (
        np.einsum(equation, x, w),
        numeric_gradient(lambda x: np.einsum(equation, x, w), g, x.shape),
        numeric_gradient(lambda w: np.einsum(equation, x, w), g, w.shape),
    )
    for (matmul, matrix), exact in zip(products, expected, strict=True):
        found = form.result(matmul, ops.convert_to_tensor(matrix), sizes)
        np.testing.assert_array_equal(ops.convert_to_numpy(found), exact)


X, Y, WHOLE = ("x",), ("y",), ()


@pytest.mark.parametrize(
    ("equation", "axes", "expected"),
    [
        ("ab,bc->ac", (X, Y), (WHOLE, Y, X)),
        ("gab,gbc->agc", (X, WHOLE, Y), (X, Y, WHOLE)),
        ("abc,cde->abde", (X, Y, WHOLE), (WHOLE, Y, X)),
        ("abc,cde->abde", (X, WHOLE, Y), (WHOLE, None, X)),  # `e` is in `d`
        ("abde,dec->abc", (Y, WHOLE, X), (WHOLE, X, Y)),
        ("ab,bcd->ac", (X, WHOLE, Y), (WHOLE, WHOLE, X)),  # `d` is summed
    ],
)
def test_what_is_said_of_axes_is_said_of_those_of_the_matrix(
    equation, axes, expected
):
    asked = RowwiseScaling().quantization("kernel", "forward")
    assert Einsum(equation).kernel_axes(axes, asked) == expected


def test_a_tensor_with_one_scale_has_the_axes_that_are_not_summed():
    asked = CurrentScaling().quantization("kernel", "forward")
    axes = Einsum("abc,cde->abde").kernel_axes((X, WHOLE, Y), asked)
    assert axes == (X, WHOLE, Y)
    axes = Einsum("ab,bcd->ac").kernel_axes((X, WHOLE, Y), asked)
    assert axes == (X, WHOLE)


def test_a_kernel_that_is_turned_has_its_axes_turned():
    operands = Operands(Einsum("ab,bc->ac"), RowwiseScaling())
    for matmul in ("forward", "inputs_grad"):
        assert operands.stored_transposed["kernel", matmul]
        assert operands.kernel_axes((X, Y), matmul) == (WHOLE, X, Y)


@pytest.mark.extension("recurrent")
def test_a_gate_has_the_rows_of_its_kernel():
    from keras_policy_ext.ext.recurrent.rnn import gates_of

    contraction = gates_of(2, False, 0, 2, 3)
    whole = CurrentScaling().quantization("kernel", "forward")
    cut = RowwiseScaling().quantization("kernel", "forward")
    assert contraction.kernel_axes((X, Y), whole) == (X, Y)
    assert contraction.kernel_axes((X, WHOLE), cut) == (WHOLE, WHOLE, X)
    assert contraction.kernel_axes((X, Y), cut) == (WHOLE, None, X)
