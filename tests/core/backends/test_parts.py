"""The rule by which a product with a stored kernel is cut into parts."""

import pytest

from keras_policy_ext.backends.parts import StoredMatrix

pytestmark = pytest.mark.any_backend

KERNEL = StoredMatrix(None, None, "float8_e4m3fn", (1, 8192, 2048), sums=True)


def size(rows=1, kernel=KERNEL, threads=1, **rule):
    return kernel.size(rows, threads, **rule)


@pytest.mark.parametrize("rows", [0, 1, 16])
def test_for_a_few_rows_a_part_has_so_many_numbers(rows):
    assert size(rows) * 2048 == 1 << 17


def test_for_more_rows_a_part_is_so_deep_that_sums_are_few():
    assert size(17) == size(5000) == 256
    assert size(17, KERNEL._replace(shape=(1, 8192, 16))) == 8192


def test_threads_share_larger_parts():
    assert size(threads=2) * 2048 == 2 << 19
    assert size(threads=2, threaded=1 << 17) * 2048 == 2 << 17


def test_one_row_that_is_summed_may_have_its_own_size():
    assert size(one_row=16) == 16
    assert size(one_row=16, kernel=KERNEL._replace(sums=False)) == 64
    assert size(2, one_row=16) == 64


def test_a_part_is_within_a_block_that_has_a_scale():
    for rows in (1, 100):
        for columns in (3, 100, 5000, 300_000):
            shape = 1, 8192, columns
            kernel = KERNEL._replace(shape=shape, blocks=())
            assert 128 % size(rows, kernel) == 0


def test_a_part_has_a_row_of_the_kernel_at_least_and_not_more_than_all():
    assert size(kernel=KERNEL._replace(shape=(1, 5, 1 << 20))) == 1
    assert size(kernel=KERNEL._replace(shape=(3, 5, 1 << 10))) == 5
