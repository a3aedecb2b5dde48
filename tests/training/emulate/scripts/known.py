"""What the host can know of values on the device: each case asserts it."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import run

TOKENS, EXPERTS, TOP_K = 96, 8, 2
EACH = TOKENS * TOP_K // EXPERTS


def routed():
    scores = torch.randn(TOKENS, EXPERTS, device="cuda").softmax(-1)
    return torch.topk(scores, TOP_K, dim=-1)


def case_counts_of_what_is_chosen_are_balanced():
    weights, chosen = routed()
    even = [EACH] * EXPERTS
    assert torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist() == even
    assert torch.histc(chosen.view(-1), bins=EXPERTS, min=0, max=EXPERTS).tolist() == even
    assert F.one_hot(chosen, EXPERTS).sum((0, 1)).tolist() == even
    ones = torch.ones_like(chosen.flatten())
    counted = torch.zeros(EXPERTS, dtype=torch.int64, device="cuda").scatter_add_(0, chosen.flatten(), ones)
    assert counted.tolist() == even
    assert torch.zeros(EXPERTS, device="cuda").index_add_(0, chosen.flatten(), ones.float()).tolist() == even
    assert counted.cumsum(0)[-1].item() == TOKENS * TOP_K
    assert all(len(set(row)) == TOP_K for row in chosen.tolist()), "a row chooses each once"
    assert weights[0].tolist() == [0.0, 0.0], "how much is not known"


def case_sizes_that_depend_on_what_is_chosen():
    _, chosen = routed()
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    hit = torch.greater(mask.sum((-1, -2)), 0).nonzero()
    assert hit.shape == (EXPERTS, 1)
    x = torch.randn(TOKENS, 16, device="cuda", requires_grad=True)
    out = torch.zeros_like(x)
    for expert in hit:
        which, token = torch.where(mask[expert].squeeze(0))
        assert which.shape == token.shape == (EACH,)
        out.index_add_(0, token, x[token] * 2)
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert x[chosen[:, 0] == 2].shape == (TOKENS // (EXPERTS // TOP_K), 16)


def case_what_is_not_known_is_finite():
    layer = torch.nn.Linear(4, 4).cuda()
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert torch.isfinite(norm) and layer.weight.grad.isfinite().all()
    assert torch.isfinite(torch.tensor([1.0, float("inf")]).cuda()).tolist() == [True, False]


def case_what_a_distribution_checks_of_what_is_chosen():
    out = torch.nn.Linear(4, 4).cuda()(torch.ones(2, 4, device="cuda"))
    policy = torch.distributions.Categorical(logits=out)
    policy.log_prob(policy.sample()).sum().backward()
    action = torch.distributions.Normal(out, out.exp()).rsample()
    torch.distributions.Independent(torch.distributions.Normal(out, out.exp()), 1).log_prob(action)
    try:
        torch.distributions.Normal(torch.zeros(2).cuda(), torch.tensor([1.0, -1.0]).cuda())
    except ValueError:
        return
    raise AssertionError("a scale that is known to be negative")


def case_what_came_from_the_host_is_true():
    ids = torch.tensor([[5, 0, 7, 7, 0], [1, 2, 0, 3, 3]]).cuda()
    assert (ids != 0).sum().item() == 7
    assert (ids == 7).nonzero().tolist() == [[0, 2], [0, 3]]
    assert ids[ids > 2].tolist() == [5, 7, 7, 3, 3]
    assert ids.masked_select(ids == 3).tolist() == [3, 3]
    assert torch.randn(2, 5, device="cuda").masked_select(ids == 3).shape == (2,)
    assert ids.unique().tolist() == [0, 1, 2, 3, 5, 7]
    assert torch.repeat_interleave(ids[1]).shape == (9,)
    assert torch.bincount(ids.flatten()).tolist() == [3, 1, 1, 2, 0, 1, 0, 2]
    ids[0, 1:3] = torch.tensor([8, 9]).cuda()
    assert ids[0].tolist() == [5, 8, 9, 7, 0]
    ids[1].add_(1)
    assert ids.T.contiguous().flatten().tolist() == [5, 2, 8, 3, 9, 1, 7, 4, 0, 4]
    assert torch.equal(ids, ids.clone()) and not torch.equal(ids, ids + 1)


def case_what_is_written_over_is_forgotten():
    counts = torch.arange(4, device="cuda")
    assert counts.tolist() == [0, 1, 2, 3]
    counts.random_(100)
    assert counts.tolist() == [0, 0, 0, 0]
    mixed = torch.arange(4, device="cuda")
    mixed[1:2] = torch.randint(5, (1,), device="cuda")
    assert mixed.tolist() == [0, 0, 0, 0]


def case_true_or_unknown_is_true():
    unknown = torch.rand(3, device="cuda") > 0.5
    some, every = torch.tensor([True, False, True]).cuda(), torch.ones(3, dtype=torch.bool, device="cuda")
    assert (every | unknown).all().item() and torch.logical_or(unknown, every).tolist() == [True] * 3
    assert (some | unknown).any().item(), "one is enough"
    assert not (some | unknown).all().item() and (some | unknown)[0].item() and not (some | unknown)[1].item()
    assert (unknown | False).tolist() == [False] * 3, "zeros stand for what is not known"
    done = unknown.clone()
    done |= some
    assert done[2].item() and not done[1].item()
    done |= ~some
    assert done.all().item() and not (~done).any().item()


def case_false_and_unknown_is_false():
    unknown = torch.randint(5, (2, 3), device="cuda")
    none, some = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.tensor([[1], [0]]).cuda()
    assert (unknown & none).max().item() == 0 and (none * unknown).tolist() == [[0] * 3] * 2
    assert (unknown * some)[1].tolist() == [0] * 3 and (unknown * some)[0].max().item() == 1
    assert (some.bool() & (unknown > 2)).all(0).tolist() == [False] * 3
    assert not torch.logical_and(some, unknown)[1].any().item()
    known = torch.tensor([[6], [0]]).cuda()
    assert (known & 3).tolist() == [[2], [0]] and (known * 2.5).tolist() == [[15.0], [0.0]]


def case_a_loop_ends_where_its_length_is_known():
    tokens, unfinished = (
        torch.ones(4, 1, dtype=torch.int64, device="cuda"),
        torch.ones(4, device="cuda").long(),
    )
    while not (unfinished.max() == 0).item():
        drawn = (torch.rand(4, 1, device="cuda") * 100).long()
        tokens = torch.cat([tokens, drawn], dim=1)
        stop = torch.full((4,), tokens.shape[1] >= 10, device="cuda")
        unfinished = unfinished & ~(stop | torch.isin(drawn[:, 0], torch.tensor([7]).cuda()))
    assert tokens.shape == (4, 10)


def case_what_is_followed_is_not_kept():
    first = torch.arange(8, device="cuda")
    before = torch.cuda.memory_allocated()
    second = (first * 2) * 3 & 7
    assert torch.cuda.memory_allocated() - before == second.untyped_storage().nbytes()
    assert second.tolist() == [number * 6 & 7 for number in range(8)]


def case_counts_are_exchanged():
    dist.init_process_group("nccl")
    size, rank = dist.get_world_size(), dist.get_rank()
    counts = torch.tensor([10 * target + 1 for target in range(size)]).cuda()
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts)
    assert coming.tolist() == [10 * rank + 1] * size, "every rank sends what this one does"


if __name__ == "__main__":
    run(globals(), ["by-rank"])
