"""Every kernel of the library at small, odd shapes, for compute-sanitizer to watch:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
compute-sanitizer --tool synccheck python tests/gpu/sanitize.py
compute-sanitizer --tool racecheck --print-limit 0 python tests/gpu/sanitize.py >races.txt 2>&1
python tests/gpu/hazards.py races.txt

With its cache, torch takes memory in blocks, and what goes past the end of a small tensor stays within one.

racecheck reports hazards in cuBLAS's own kernels (nvjet_...); hazards.py passes these and no others. Told by
--kernel-name to watch these alone, it fails on the cluster kernel with an internal error; tests/csrc/test_cluster_exchange.py
shows that no order of the stores between blocks is one. synccheck says "Missing wait" in `largest_cluster`, and does so for
any barrier in clusters of 16 whose blocks share nothing, where there are 192 blocks (bench/NOTES.md). Names of parts run those
alone: in `head` a cluster is one block, which stores nothing into another.
"""

from __future__ import annotations

import itertools
import sys

import torch

from fastgrpo import Objective, left_pack, linear_grpo_loss, linear_logprob, pack, unpack
from fastgrpo.kernels.flash import merge_attention
from fastgrpo.pack_ops import sum_rows, take_rows
from fastgrpo.rotary import rotary
from fastgrpo.swiglu import swiglu, swiglu_grad

DEVICE = torch.device("cuda")


def head() -> None:
    """Both row kernels' users, the scaling of gradients, compaction."""
    _head(7, 2049, 5003)


def clusters() -> None:
    """Rows that two, four and eight blocks share."""
    _head(33000, 60001, 151936)


def two_reads() -> None:
    """Rows that no cluster holds, as all rows are on cards without clusters: read twice, and written in place."""
    _head(400_003)


def largest_cluster() -> None:
    """Rows that sixteen blocks share."""
    _head(262144)


def _head(*vocabularies: int) -> None:
    # A width that the fused product does not serve. Gradients of a bias are those of a head that trains.
    for vocabulary, dtype in itertools.product(vocabularies, (torch.bfloat16, torch.float16)):
        for trains in (False, True):
            hidden = torch.randn(37, 60, device=DEVICE).to(dtype).requires_grad_()
            weight = torch.randn(vocabulary, 60, device=DEVICE).to(dtype).requires_grad_(trains)
            bias = torch.randn(vocabulary, device=DEVICE).to(dtype).requires_grad_(trains)
            targets = torch.randint(-1, vocabulary, (37,), device=DEVICE)
            out = linear_logprob(hidden, weight, targets, bias=bias, softcap=20.0, return_entropy=True, num_chunks=2)
            (out.logprobs.sum() + out.entropy.sum()).backward()
            linear_logprob(hidden, weight, targets.int()).logprobs.sum().backward()


def fused_head() -> None:
    """Both passes of the fused head and the gradients from given statistics, rows whose shift is wrong, targets that repeat."""
    for softcap, trains, vocabulary in itertools.product((None, 20.0), (False, True), (1056, 1003, 1063, 31)):
        hidden = torch.randn(301, 72, device=DEVICE).to(torch.bfloat16)
        hidden[3] *= 1000
        hidden.requires_grad_()
        weight = torch.randn(vocabulary, 72, device=DEVICE).to(torch.bfloat16).requires_grad_(trains)
        targets = torch.randint(-1, vocabulary, (301,), device=DEVICE)
        targets[::3] = 5
        out = linear_logprob(
            hidden,
            weight,
            targets,
            softcap=softcap,
            return_entropy=True,
            entropy_requires_grad=trains,
            skip_ignored=False,
        )
        (out.logprobs.sum() + out.entropy.sum()).backward()
        segments, advantages = torch.tensor([0, 301], device=DEVICE), torch.ones(1, device=DEVICE)
        for ids in (targets, targets.int()):
            linear_grpo_loss(hidden, weight, ids, segments, advantages, Objective(), softcap=softcap)[0].backward()


def waiting_product() -> None:
    """The weight's gradient of a single batch, whose product rounds."""
    hidden = torch.randn(301, 512, device=DEVICE).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(16416, 512, device=DEVICE).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(-1, 16416, (301,), device=DEVICE)
    targets[::2] = 7
    segments, advantages = torch.tensor([0, 100, 301], device=DEVICE), torch.tensor([1.0, -1.0], device=DEVICE)
    loss, _ = linear_grpo_loss(hidden, weight, targets, segments, advantages, Objective())
    (0.3 * loss).backward()
    linear_logprob(hidden, weight, targets).logprobs.sum().backward()


def loss() -> None:
    """Coefficients and sums, with everything that is optional and without."""
    for loss_type, dtype in itertools.product(("grpo", "vespo"), (torch.bfloat16, torch.float16)):
        for full in (False, True):
            hidden = torch.randn(301, 64, device=DEVICE).to(dtype).requires_grad_()
            weight = torch.randn(515, 64, device=DEVICE).to(dtype).requires_grad_()
            value, _ = linear_grpo_loss(
                hidden,
                weight,
                torch.randint(0, 515, (301,), device=DEVICE),
                torch.tensor([0, 100, 100, 299, 301], device=DEVICE),
                torch.randn(4, device=DEVICE),
                Objective(loss_type=loss_type, beta=0.1 * full, entropy_coef=0.1 * full),
                ref_logprobs=torch.randn(301, device=DEVICE) if full else None,
                sampler_ratio=torch.rand(301, device=DEVICE) if full else None,
                loss_mask=torch.rand(301, device=DEVICE) > 0.5 if full else None,
                num_chunks=3,
            )
            value.backward()


def rows_of_16_bit() -> None:
    """16-bit logits, gradients in place."""
    for dtype in (torch.bfloat16, torch.float16):
        logits = torch.randn(5, 5056, device=DEVICE).to(dtype)[:, :5003]
        out = torch.empty(3, 5, device=DEVICE)
        targets = torch.tensor([0, 5002, -1, 4096, 17], device=DEVICE)
        torch.ops.fastgrpo.row_pass(logits, targets, None, 1.0, 1.0, None, *out, logits, None, 1.0)


def packs() -> None:
    """Packing, taking rows and their gradients, at widths of every alignment."""
    for width in (1, 33, 255, 257, 1000):
        ids, mask = torch.randint(0, 9, (5, width), device=DEVICE), torch.rand(5, width, device=DEVICE) > 0.4
        packed = left_pack(ids, mask)
        packed.restore(packed.input_ids)
        row = pack(ids, mask, torch.zeros(5, dtype=torch.long, device=DEVICE), True)
        values = torch.randn(row.tokens.shape[1], device=DEVICE, requires_grad=True)
        unpack(values, row).sum().backward()
        for dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.int64):
            source = torch.ones(width, 3, device=DEVICE).to(dtype)
            index = torch.randint(-1, width, (77,), device=DEVICE)
            taken = take_rows(source, index, 1.0)
            if dtype.is_floating_point:
                sum_rows(taken, index, width)


def gate() -> None:
    """The gate of an MLP and its gradients, in place and not, a last block of threads partly idle."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (8, 2056, 50_000):
            gate, up, grad, *other = (torch.randn(count, device=DEVICE).to(dtype) for _ in range(6))
            swiglu(gate, up, other[0])
            swiglu_grad(gate, up, grad, *other)
            swiglu_grad(gate, up, grad, gate, up, None)


def heads() -> None:
    """Rotary embeddings and their gradient, and attention merged over two sets of keys."""
    for width, dtype in itertools.product((16, 96, 128), (torch.bfloat16, torch.float16)):
        query, key = (torch.randn(2, 77, count, width, device=DEVICE).to(dtype).transpose(1, 2) for count in (3, 1))
        cos, sin = (torch.randn(2, 77, width, device=DEVICE).to(dtype) for _ in range(2))
        sum(x.sum() for x in rotary(query.requires_grad_(), key.requires_grad_(), cos, sin)).backward()
        out, more = (torch.randn(77, 3, width, device=DEVICE).to(dtype) for _ in range(2))
        lse, more_lse = (torch.randn(3, 77, device=DEVICE) for _ in range(2))
        merge_attention(out, lse, more, more_lse, torch.rand(77, device=DEVICE) > 0.3)


if __name__ == "__main__":
    torch.manual_seed(0)
    # The last, so that what synccheck says of it ends no other.
    every = (
        head,
        clusters,
        two_reads,
        fused_head,
        waiting_product,
        loss,
        rows_of_16_bit,
        packs,
        gate,
        heads,
        largest_cluster,
    )
    parts = {part.__name__: part for part in every}
    for part in [parts[name] for name in sys.argv[1:]] or parts.values():
        part()
        torch.cuda.synchronize()
        print(part.__name__, "ran", flush=True)
