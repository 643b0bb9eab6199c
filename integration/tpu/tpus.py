"""Programs for TPUs that are not there, compiled by libtpu.

What a program computes is not seen, nor how fast it would be.
"""

import os
import re

# Nothing is asked of a machine in Google's cloud.
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

TOPOLOGIES = {"tpu7x": "tpu7x:2x2x1", "v6e": "v6e:2x2", "v5e": "v5e:2x2"}
"""The smallest that libtpu has, by the name of the device."""

_MADE = re.compile(r"%([\w.-]+) = \(?([a-z]\w*)\[")
_PRODUCT = re.compile(r" (?:convolution|dot)\(%([\w.-]+), %([\w.-]+)\)")


def device(name):
    """What libtpu compiles for."""
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[name]
    )
    return topology.devices[0]


def compiled(name, function, *arguments):
    """The text of a program.

    Args:
        name: A key of `TOPOLOGIES`.
        function: Of arrays.
        *arguments: Nested arrays, or shapes with dtypes.
    """
    place = SingleDeviceSharding(device(name))
    shaped = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        arguments,
    )
    return jax.jit(function).lower(*shaped).compile().as_text()


def products(text):
    """The dtypes of both operands of each matmul of a program, sorted.

    A TPU has no other matmul than its convolution.
    """
    dtypes = dict(_MADE.findall(text))
    return sorted(
        tuple(sorted(dtypes[operand] for operand in each))
        for each in _PRODUCT.findall(text)
    )
