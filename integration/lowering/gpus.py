"""Programs for GPUs that are not there, compiled by XLA from a description.

Import this before JAX: it says how XLA is to compile. What a program computes
is not seen, and how fast it would be is an estimate by which designs are
compared: no measurement.
"""

import collections
import dataclasses
import os

os.environ.update(
    JAX_PLATFORMS="cpu",
    # The CUDA libraries are not needed to compile.
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    # There is no device to time variants on, and command buffers only hide
    # kernels from a reader. All else is as users have it, so that a matmul
    # which XLA would hand to Triton goes there.
    XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
)

import hlo
import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client

# What is traced is for a GPU, whose paths are to be taken.
jax.default_backend = lambda: "gpu"

DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class GPU:
    """A GPU as XLA is told of it, and its speeds.

    Attributes:
        major: Of the compute capability.
        float8: Operations a second at best; half of it in bfloat16.
    """

    name: str
    major: int
    cores: int
    bandwidth: int
    memory: int
    float8: float

    def device(self):
        """What XLA compiles for."""
        text = DESCRIPTION.format(**dataclasses.asdict(self))
        topology = topologies.get_topology_desc(
            platform="cuda", topology="1x1x1", target_config=text
        )
        return topology.devices[0]

    def compiled(self, module, triton=True):
        """An executable of a StableHLO module, which cannot run here.

        Args:
            module: The module.
            triton: False if no matmul may be written in Triton, as a user may
                ask. XLA then leaves them to cuBLASLt.
        """
        _refuse_if_too_new()
        device = self.device()
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=1,
            env_options_overrides=None
            if triton
            else {"xla_gpu_enable_triton_gemm": False},
        )
        return device.client.compile(
            module,
            executable_devices=_jax.DeviceList((device,)),
            compile_options=options,
        )

    def seconds(self, kernel):
        """About how long a kernel takes.

        At 72 % of the peak, 80 % of the bandwidth and 2 µs a kernel; float8
        matmuls that accumulate accurately at 0.85 of the others.
        """
        seconds = kernel.bytes / (0.8 * self.bandwidth)
        if kernel.flops:
            rate = {"f8": 1.0, "bf": 0.5, "f1": 0.5}
            speed = 0.72 * self.float8 * rate.get(kernel.operand[:2], 0.25)
            if kernel.exact and kernel.kind == hlo.FLOAT8:
                speed *= 0.85
            seconds = max(seconds, kernel.flops / speed)
        return kernel.times * (seconds + 2e-6)


def _refuse_if_too_new():
    """Raise an error where JAX cannot describe float8 products to XLA.

    JAX 0.12 writes the program for a device that is not there as StableHLO
    1.16.3, which knows no algorithms of float8 (1.21 does): XLA then says
    "failed to legalize operation 'vhlo.dot_general_v2'". For a device that is
    there it writes what the plugin reads, 1.22.
    """
    if jax.__version_info__ >= (0, 12):
        raise RuntimeError(
            "Programs for GPUs that are not there cannot be compiled by this "
            f"JAX. Received: jax {jax.__version__}. Allowed: jax 0.9 to 0.11. "
            "Run `tox run -e lowering`, which installs one."
        )


GPUS = {
    "H200": GPU(
        "NVIDIA H200", 9, 132, 4_800_000_000_000, 150_754_820_096, 1979e12
    ),
    "B200": GPU(
        "NVIDIA B200", 10, 148, 8_000_000_000_000, 192_000_000_000, 4500e12
    ),
}


def traced_by_jax(function, *arguments):
    """The module of a function whose first argument is given away."""
    traced = jax.jit(function, donate_argnums=0).trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir("stablehlo")


def traced_by_tensorflow(serialized):
    """The module of what TensorFlow wrote as `hlo_serialized`.

    To be called, and compiled, inside of `mlir.make_ir_context()`.
    """
    computation = xla_client.XlaComputation(serialized)
    return ir.Module.parse(
        _jax.mlir.xla_computation_to_mlir_module(computation)
    )


make_ir_context = mlir.make_ir_context


def summary(executable, gpu, large=1 << 20):
    """What a program does, as numbers.

    Args:
        executable: From `GPU.compiled`.
        gpu: That GPU.
        large: Bytes from which a kernel counts as large.
    """
    text = executable.hlo_modules()[0].to_string()
    kernels = hlo.kernels(text)
    matmuls = [each for each in kernels if each.flops]
    others = [each for each in kernels if not each.flops]
    big = [each for each in others if each.bytes >= large]
    float8 = [each for each in matmuls if each.kind == hlo.FLOAT8]
    mx = [each for each in matmuls if each.kind == hlo.MX_MATMUL]
    memory = executable.get_compiled_memory_stats()
    return {
        "float8": _runs(float8),
        "exact": _runs(each for each in float8 if each.exact),
        "scaled": _runs(each for each in float8 if each.scaled),
        "written": dict(collections.Counter(each.result for each in float8)),
        "with scales of blocks": _runs(mx),
        "other matmuls": _runs(matmuls) - _runs(float8) - _runs(mx),
        "by Triton": _runs(
            each for each in matmuls if each.kind == hlo.TRITON_MATMUL
        ),
        "conditionals": _runs(
            each for each in others if each.kind == "conditional"
        ),
        "large": _runs(big),
        "transposes": _runs(each for each in big if "transpose" in each.ops),
        "codes alone": _runs(each for each in big if each.moves_codes_alone),
        "small": _runs(others) - _runs(big),
        "rounded scales": hlo.rounded_scales(text),
        "bytes": sum(each.times * each.bytes for each in others),
        "seconds": sum(map(gpu.seconds, kernels)),
        "temporaries": memory.temp_size_in_bytes,
        "kernels": [
            f"{each.times}x {each.kind} {each.bytes / 2**20:.1f} MiB "
            f"{'exact ' * each.exact}{sorted(each.ops & INTERESTING)} "
            f"{each.text}"
            for each in kernels
            if each.flops or each.bytes >= large
        ],
    }


INTERESTING = {"transpose", "reduce", "divide", "copy", "convert", "dot"}


def _runs(kernels):
    return sum(each.times for each in kernels)
