"""A thousand steps of DistributedDataParallel, two processes over gloo.

The loop is that of `tests/torch_loops.py`, as it is written for any model.
"""

import concurrent.futures
import json
import pathlib

import pytest

import processes

TRAIN = """
import datetime, json, sys
rank, folder, tests = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, tests)
import numpy as np, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch_loops as loops
from converted_models import states_of
from steps import numpy

torch.set_num_threads(1)
dist.init_process_group(
    "gloo",
    init_method=f"file://{folder}/meeting",
    rank=rank,
    world_size=2,
    timeout=datetime.timedelta(seconds=120),  # a deadlock is an error
)


def on_a_half(model, optimizer, parameters, x, y):
    part = slice(rank, None, 2)
    loops.clipped(model, optimizer, parameters, x[part], y[part])


model = loops.network()
wrapped = DistributedDataParallel(model)
loops.trained(on_a_half, loops.adamw, 1000, True, model, wrapped)
states = [numpy(state) for state in states_of(model)]
dist.destroy_process_group()
found = {
    "error": loops.forward_error(model),
    "observed": all(np.all(matrix[:, 10:] > 0.0) for matrix in states),
}
if rank == 0:  # one process with the whole batch, by `kpe.loops`
    alone = loops.error_with_kpe_loops(loops.clipped, loops.adamw)
    found["error_alone"] = alone
print(json.dumps({key: float(value) for key, value in found.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not processes.is_installed("torch"), reason="torch is not installed"
)
def test_after_1000_steps_on_two_ranks_float8_is_as_exact_as_on_one(tmp_path):
    tests = pathlib.Path(processes.__file__).parent

    def train(rank):
        printed = processes.run("torch", TRAIN, rank, tmp_path, tests)
        return json.loads(printed.splitlines()[-1])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(train, (0, 1))
    assert first["observed"] and second["observed"]
    assert first["error"] == second["error"], "ranks have the same weights"
    assert first["error"] <= 1.2 * first["error_alone"]
