"""Large host tensors that nobody looks at, and what is there for who does: each case asserts it."""

import copy
import math
import re
import tempfile
from pathlib import Path

import torch
from cases import run
from torch import nn

LARGE = (1024, 1536)  # 6 MiB in float32, not a whole number of chunks of 1 MiB in bfloat16


def held():
    """Bytes of this process that lie in memory."""
    resident = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(resident[1]) * 1024


def case_a_model_that_is_built_and_moved_takes_no_memory():
    before = held()
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))  # 2 GiB
    for layer in model:
        layer.weight.data.normal_(0.0, 0.02)
        nn.init.zeros_(layer.bias)
    torch.nn.init.trunc_normal_(model[0].weight, std=0.02)
    reference = copy.deepcopy(model)
    half = copy.deepcopy(model).to(torch.bfloat16)
    model.cuda()
    assert held() - before < 256 << 20
    assert abs(reference[1].weight[17].std().item() - 0.02) < 0.002
    assert reference[1].weight[17].bfloat16().tolist() == half[1].weight[17].tolist()
    assert model[0].weight.is_cuda and held() - before < 256 << 20


def case_numbers_are_of_their_distribution():
    torch.manual_seed(1)
    normal, uniform = torch.randn(LARGE), torch.empty(LARGE).uniform_(-3, 1)
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs((normal < 1).double().mean() - 0.8413) < 0.002
    assert abs((normal[:, 1:] * normal[:, :-1]).mean()) < 0.01, "neighbours do not know of each other"
    assert -3 <= uniform.min() < -2.99 and 0.99 < uniform.max() < 1 and abs(uniform.mean() + 1) < 0.01
    cut = torch.nn.init.trunc_normal_(torch.empty(LARGE), mean=1.0, std=2.0, a=0.0, b=2.0)
    assert cut.min() >= 0 and cut.max() <= 2 and abs(cut.mean() - 1) < 0.01
    assert abs(cut.std() - 2 * math.sqrt(1 - 2 * 0.5 * 0.35207 / 0.38292)) < 0.01
    assert torch.equal(torch.full(LARGE, 3.5, dtype=torch.float64), torch.ones(LARGE).double() * 3.5)
    assert not torch.zeros(LARGE).any() and not torch.randn(LARGE).zero_().any()


def case_what_is_written_over_a_part_stays():
    weight = torch.randn(LARGE)
    kept = weight[1].clone()
    weight[0].zero_()
    weight[1023, 5] = 7.0
    moved = weight.clone()
    half = weight.to(torch.float16)
    assert not moved[0].any() and moved[1023, 5] == 7 and torch.equal(moved[1], kept)
    assert torch.equal(moved, weight) and torch.equal(half, weight.half())
    assert half[1023, 5] == 7 and not half[0].any()
    weight.fill_(2.0)
    assert weight.mean() == 2 and moved[1023, 5] == 7, "a copy is its own"
    weight.copy_(moved.view(-1)[: weight.numel()].view(LARGE))
    assert torch.equal(weight, moved)


def case_views_and_arrays_see_the_same():
    weight = torch.randn(LARGE)
    view, array = weight.T[3:5], weight.numpy()
    assert view[1, 2] == array[2, 4] and weight.storage()[1536 * 2 + 4] == array[2, 4]
    assert weight.max() == array.max()


def case_files_are_written_and_read():
    weight = torch.randn(LARGE)
    with tempfile.TemporaryFile() as file:
        weight.numpy().tofile(file)
        file.seek(0)
        again = torch.randn(LARGE)
        file.readinto(again.numpy())
    assert torch.equal(weight, again)


def case_a_worker_of_a_data_loader_looks():
    weight = torch.randn(LARGE)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, row):
            return weight[row] * torch.tril(torch.ones(LARGE))[row]

    (rows,) = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1)
    assert torch.equal(rows, torch.tril(weight)[:2])


if __name__ == "__main__":
    torch.ones(1, device="cuda")  # a rank has to do something there
    run(globals(), ["by-rank"])
