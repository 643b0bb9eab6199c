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
        results: Outputs and gradient of the inputs, read in float32 and
            written in bfloat16, after they are multiplied by the scales.
        update: Kernel and gradient read, both in float32, kernel written.
    """

    inputs_amax: int
    inputs: int
    kernel_amax: int
    kernel: int
    grad_amax: int
    grad: int
    results: int = 12
    update: int = 12


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

TEXT = """ The table below shows how many bytes a `dense` step reads and writes
in memory, apart from its matmuls, in an earlier version of this package, in
which XLA cast the operands. The unit is bytes per matrix element, summed
over the three matrices (inputs, kernel, output gradient). A float8 number
takes one byte. The matmuls of a Hopper GPU read only one memory layout, so
XLA's program casts inputs and kernel into two layouts each. The program casts
output gradients once and then transposes them. The matmuls write float32, and
other kernels multiply the results by the scales: outputs and gradients of the
inputs are read in float32 and written in bfloat16, and the update of a kernel
reads its gradient in float32.

Under current scaling, a step must find the amax (largest absolute value) of a
tensor before it casts the tensor, so the step reads all three tensors twice.
Under delayed scaling, the step reads only the inputs twice, because the
program must be able to scale the inputs by their own amax in the first step. A
branch for the first step would avoid the second read in all other steps. But
the branch would make XLA store some inputs in memory, such as the outputs of a
normalization or an activation. Without the branch, XLA computes such inputs
inside each kernel that reads these inputs. With `initial_scale=1.0`, no step
needs to read the inputs twice; in the table this saves traffic on a B200 but
not on an H200.

XLA cannot compute the amax and transpose a tensor in one kernel. A kernel
written in Pallas can cast, transpose and find the amax with 4 bytes of
traffic. But XLA must first write the input of a Pallas kernel to memory, which
costs 4 bytes more. We compiled a prototype of such a Pallas kernel for an
H200, in programs whose matmuls took the scales themselves, and estimated the
time of a step as above. In the first variant, the
prototype cast the inputs. With this variant, a `dense` step took 0.99 of the
time without the prototype, steps with ReLU and GELU took 1.00, and steps with
SwiGLU and of the block took 1.01. In the second variant, the prototype also
cast the output gradients, and the step had to read the output gradients again
for the gradient of the bias. With this variant, steps with GELU and SwiGLU
took 0.98 of the time, and steps with ReLU took 1.03. The prototype is not in
this package. The package now has another kernel, which writes both layouts, the
amax and the gradient of the bias, and its matmuls apply the scales and write
bfloat16. On an H200 a `dense` step then has 1.44 times bfloat16's speed, and
1.25 times with the same matmuls if XLA casts (measured, JAX 0.11.2).

The matmuls and the softmax inside attention are not in float8. These two parts
take 26% of the estimated time of the `block` in bfloat16. If a float8 step
moved no more bytes than a bfloat16 step, a float8 step of the `block` would be
1.36 times as fast as a bfloat16 step.
"""


def section(table):
    """The lines of the page.

    Args:
        table: Makes a table of heads and rows.
    """
    heads = ["", *(name.replace("_", " ") for name in Program._fields), "sum"]
    programs = {f"{gpu}, {way}": each for (gpu, way), each in PROGRAMS.items()}
    programs["H200, all in one pass"] = LEAST
    yield "### What bounds a step\n"
    for paragraph in TEXT.strip().split("\n\n"):
        yield textwrap.fill(paragraph, 79, break_on_hyphens=False) + "\n"
    yield table(
        heads,
        [
            [name, *map(str, each), str(sum(each))]
            for name, each in programs.items()
        ],
    )
