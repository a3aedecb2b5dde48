"""``torch.cuda`` as training scripts use it."""

import os
import tempfile

import torch

LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
MIB = 2**20


def case_other_device():
    other = (LOCAL + 1) % 8
    with torch.cuda.device(other):
        assert torch.cuda.current_device() == other
        assert torch.empty(1, device="cuda").device.index == other
    assert torch.cuda.current_device() == LOCAL
    with torch.device("cuda"):
        assert torch.empty(2).device.index == LOCAL
    torch.set_default_device("cuda")
    assert torch.ones(2).device.type == "cuda"
    torch.set_default_device("cpu")


def case_streams_and_events():
    side = torch.cuda.Stream(priority=-1)
    assert side != torch.cuda.current_stream() and torch.cuda.current_stream() == torch.cuda.default_stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        x = torch.randn(1024, 1024, device="cuda") @ torch.randn(1024, 1024, device="cuda")
        side.record_event(end)
    torch.cuda.current_stream().wait_event(end)
    x.record_stream(torch.cuda.current_stream())
    end.synchronize()
    side.synchronize()
    assert end.query() and side.query()
    torch.cuda.synchronize()
    torch.cuda.synchronize(LOCAL)
    assert begin.elapsed_time(end) > 0
    assert isinstance(side.cuda_stream, int)
    assert isinstance(side, torch.cuda.Stream) and isinstance(torch.cuda.current_stream(), torch.cuda.Stream)


def case_a_stream_of_ones_own():
    class Named(torch.cuda.Stream):
        def __new__(cls, name, **kwargs):
            stream = super().__new__(cls, **kwargs)
            stream.name = name
            return stream

        def __init__(self, name, **kwargs):
            super().__init__()

    side = Named("side", priority=-1)
    assert side.name == "side" and side.priority == -1 and isinstance(side, torch.cuda.Stream)
    assert side != torch.cuda.current_stream() and len({side, torch.cuda.current_stream()}) == 2
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.Stream.priority_range() == (0, -5) and "cuda_stream=0x" in repr(side)
    assert torch.cuda.current_stream((LOCAL + 1) % 8).device.index == (LOCAL + 1) % 8
    assert torch.cuda.Event(enable_timing=True).query()

    class Timer(torch.cuda.Event):
        pass

    assert isinstance(Timer(enable_timing=True), torch.cuda.Event)
    for other in range(8):
        with torch.cuda.device(other):
            assert torch.cuda.current_device() == other
    shown = repr(torch.cuda.get_device_properties(0))
    assert shown.startswith("_CudaDeviceProperties(name='NVIDIA H100") and "total_memory=81089MB" in shown
    try:
        torch.cuda.get_device_properties(8)
    except AssertionError as error:
        assert "Invalid device id" in str(error)
    else:
        raise AssertionError("a device that the host does not have")
    with torch.device("cuda"):
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated()


def case_memory():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 64 * MIB
    assert torch.cuda.max_memory_allocated() - before == 64 * MIB
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 64 * MIB
    assert torch.cuda.memory_reserved() >= before and torch.cuda.max_memory_reserved() >= before
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    stats = torch.cuda.memory_stats()
    for key in (
        "allocated_bytes.all.peak",
        "reserved_bytes.all.peak",
        "active_bytes.all.peak",
        "num_ooms",
        "num_alloc_retries",
    ):
        assert key in stats, key
    assert "allocated" in torch.cuda.memory_summary().lower()
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(0.9)
    torch.cuda.ipc_collect()


def case_loader():
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(torch.arange(64).float().view(32, 2), torch.arange(32))
    sampler = DistributedSampler(data, num_replicas=8, rank=LOCAL, shuffle=False)
    loader = DataLoader(
        data, batch_size=2, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True
    )
    batches = [[t.to("cuda", non_blocking=True) for t in batch] for batch in loader]
    assert len(batches) == 2 and batches[0][0].shape == (2, 2)
    assert batches[0][1].tolist() == [LOCAL, LOCAL + 8]


def case_generators():
    own = torch.cuda.default_generators
    assert len(own) == 8 and own[LOCAL].device == torch.device("cuda", LOCAL)
    neighbour = own[(LOCAL + 1) % 8]
    before = neighbour.initial_seed()
    torch.cuda.manual_seed(before + 11)
    assert (own[LOCAL].initial_seed(), neighbour.initial_seed()) == (before + 11, before)
    torch.manual_seed(7)
    assert [generator.initial_seed() for generator in own] == [7] * 8
    own[LOCAL].set_offset(12)
    state = torch.cuda.get_rng_state()
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    assert state.view(torch.int64).tolist() == [7, 12]
    torch.cuda.manual_seed_all(8)
    assert torch.cuda.initial_seed() == 8 and own[LOCAL].get_offset() == 0
    torch.cuda.set_rng_state(state)
    assert torch.cuda.initial_seed() == 7 and own[LOCAL].get_offset() == 12
    states = torch.cuda.get_rng_state_all()
    torch.cuda.seed_all()
    assert len({generator.initial_seed() for generator in own} - {7, 8}) == 1, (
        "one seed for all, that nobody chose"
    )
    torch.cuda.set_rng_state_all(states)
    assert [generator.initial_seed() for generator in own] == [
        7 if index == LOCAL else 8 for index in range(8)
    ]
    with torch.random.fork_rng(devices=[LOCAL]):
        torch.cuda.manual_seed(99)
    assert torch.cuda.initial_seed() == 7

    mine = torch.Generator(device="cuda")
    assert mine.initial_seed() == 67280421310721, "CUDA's"
    assert mine.device == torch.device("cuda", LOCAL) and mine.get_state().numel() == 16
    assert mine.manual_seed(3) is mine and mine.initial_seed() == 3
    copy = mine.clone_state()
    mine.set_offset(4)
    assert (mine.get_offset(), copy.get_offset(), copy.initial_seed()) == (4, 0, 3)
    copy.set_state(mine.get_state())
    assert copy.get_offset() == 4
    shared = mine.graphsafe_get_state()
    mine.manual_seed(5)
    assert shared.initial_seed() == 5
    copy.graphsafe_set_state(shared)
    assert copy.initial_seed() == 5
    for bad in (torch.zeros(5056, dtype=torch.uint8), torch.zeros(4)):
        try:
            mine.set_state(bad)
        except (RuntimeError, TypeError):
            continue
        raise AssertionError("a state of another generator was taken")
    assert torch.randn(4, generator=mine, device="cuda").shape == (4,)
    weight = torch.nn.init.normal_(torch.empty(4, 4, device="cuda"), generator=mine)
    torch.nn.functional.dropout(weight, 0.5).bernoulli_(0.5, generator=mine).uniform_(generator=mine)
    other = torch.Generator(device=f"cuda:{(LOCAL + 1) % 8}")
    assert other.device.index == (LOCAL + 1) % 8


def case_save_what_was_copied():
    from torch import nn

    model = nn.Linear(4, 400, device="cuda")
    copied = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    pinned = torch.empty(400, 4, pin_memory=True)
    pinned.copy_(model.weight.detach(), non_blocking=True)

    class Holder:
        def __init__(self, weight):
            self.inner = [weight]

    on_host = nn.Linear(4, 400)
    known = {"weight": torch.ones(4)}
    written = {
        "copied": (copied, False), "part": (copied["weight"][2:].view(-1), False),
        "pinned": ([pinned], False),
        "held": (vars(Holder(copied["bias"])), False), "module": (model.cpu().state_dict(), False),
        "nested": ({"a": ({"b": [on_host.weight, copied["bias"]]},)}, False),
        "known": (known, True), "host": (on_host.state_dict(), True), "nothing": ({"step": 3}, True),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        for name, (what, expected) in written.items():
            path = os.path.join(directory, name)
            torch.save(what, path)
            assert os.path.exists(path) == expected, name


def case_save_safetensors():
    try:
        from safetensors.torch import load_file, save, save_file, save_model
    except ImportError:
        return
    from torch import nn

    model = nn.Linear(4, 400)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "model.safetensors")
        save_file(model.state_dict(), path, metadata={"format": "pt"})
        before = load_file(path)
        with torch.no_grad():
            model.cuda().weight.normal_()  # from here on nobody knows them
        save_file(model.state_dict(), path)
        save_file({name: tensor.cpu() for name, tensor in model.state_dict().items()}, path)
        save_model(model, path)
        assert torch.equal(load_file(path)["weight"], before["weight"]), "the file is that of before"
        save_file(model.state_dict(), path + ".new")
        assert not os.path.exists(path + ".new")
    assert len(save({"known": torch.ones(3)})) > 12
    try:
        save(model.state_dict())
    except NotImplementedError as refused:
        assert "safetensors.torch.save cannot be emulated" in str(refused)
    else:
        raise AssertionError("zeros were given for weights")


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
