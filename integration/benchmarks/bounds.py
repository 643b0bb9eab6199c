"""What a step of a Dense layer moves beside its matmuls, pass by pass.

What XLA makes of it was read in its programs, JAX 0.10; the sums are those of
`results/counts.json`, which a test holds them to. A pass is that of one
kernel over a matrix.
"""

import textwrap
from typing import NamedTuple


class Program(NamedTuple):
    """Bytes for each number of a matrix.

    Attributes:
        inputs_amax: Of inputs in bfloat16, read before they are cast.
        inputs: Read and cast, into as many layouts as matmuls read.
        kernel_amax: Of a kernel in float32; 0 where that is found while the
            kernel is updated.
        kernel: Likewise.
        grad_amax: Of the output gradient in bfloat16, with the sum of its
            columns for the bias; 0 where that is done while it is cast.
        grad: Likewise.
        update: Kernel and gradient read, kernel written.
    """

    inputs_amax: int
    inputs: int
    kernel_amax: int
    kernel: int
    grad_amax: int
    grad: int
    update: int = 10


DELAYED, FROM_ONE, CURRENT = (
    "float8 delayed",
    "float8 delayed, initial_scale=1.0",
    "float8 current",
)
PROGRAMS = {
    ("H200", DELAYED): Program(2, 4, 0, 6, 0, 5),
    ("H200", FROM_ONE): Program(2, 4, 0, 6, 0, 5),
    ("H200", CURRENT): Program(2, 4, 4, 6, 2, 4),
    ("B200", DELAYED): Program(2, 3, 0, 5, 0, 3),
    ("B200", FROM_ONE): Program(0, 3, 0, 5, 0, 3),
    ("B200", CURRENT): Program(2, 3, 4, 5, 2, 3),
}
LEAST = Program(0, 4, 0, 6, 0, 4)
"""On an H200, if one kernel cast, transposed and found amax and sums."""

TEXT = """
The table has the memory traffic of a `dense` step beside its matmuls, in bytes
per matrix element, summed over the three matrices. Float8 numbers are one byte.
A Hopper's matmuls read one layout only, so inputs and kernel are cast into two
layouts. Output gradients are cast once and then transposed.

Under current scaling the amax has to be found before a tensor is cast, so all
three tensors are read twice. Under delayed scaling only the inputs are read
twice, because the first step scales them by their own amax. A branch for that
step would make XLA store inputs that it otherwise computes inside each kernel
that reads them, such as outputs of a normalization or an activation.
`initial_scale=1.0` needs no second pass.

XLA cannot fuse the amax with a transpose. A Pallas kernel can cast, transpose
and find the amax with 4 bytes of traffic, but its input must first be written
to memory, which costs 4 more. A prototype was compiled for an H200 and
estimated as above. When it cast the inputs, a `dense` step took 0.99 of the
time, ReLU and GELU 1.00, SwiGLU and the block 1.01. When it also cast the
output gradients, which then have to be read again for the bias, GELU and
SwiGLU took 0.98 and ReLU 1.03. The prototype is not in this package.

The matmuls and the softmax inside attention take 26% of the estimated time
of the `block` in bfloat16, and they are not in float8. If a float8 step moved
no more bytes than a bfloat16 step, the block would be 1.36 times as fast.
"""


def section(table):
    """The lines of the page.

    Args:
        table: Makes a table of heads and rows.
    """
    heads = ["", *(name.replace("_", " ") for name in Program._fields), "sum"]
    programs = {f"{gpu}, {way}": each for (gpu, way), each in PROGRAMS.items()}
    programs["H200, all in one pass"] = LEAST
    yield "#### What bounds a step\n"
    for paragraph in TEXT.strip().split("\n\n"):
        yield textwrap.fill(paragraph, 79, break_on_hyphens=False) + "\n"
    yield table(
        heads,
        [
            [name, *map(str, each), str(sum(each))]
            for name, each in programs.items()
        ],
    )
