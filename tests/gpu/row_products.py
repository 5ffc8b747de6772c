"""Runs functions with products on a GPU: `python -m tests.gpu.row_products values swiglu`.

`warps values swiglu` runs the kernel for GPUs without wgmma. It prints `right` at the end.
`test_products.py` starts it in a process of its own with a time limit, because a kernel whose
barriers do not match hangs.
"""

import sys

import torch
from torch.utils import _pytree as pytree

from benchmarks import linear_cross_entropy
from htile.run.products import chunks as product_chunks
from htile.run.products.kernels import ProductKernel
from htile.testing import assert_close
from tests import products, whole_rows
from tests.forced_tiles import compile_ahead, count_of, each_form, forced, fresh, in_turns
from tests.products import BF16, F16, FUNCTIONS, arguments
from tests.without_wgmma import force

from .matrix import assert_same_bits

SIZES = ((1, 512, 256), (17, 1000, 328), (64, 2048, 1024), (129, 1001, 512), (300, 776, 64),
         (1000, 256, 2048), (5, 264, 40), (2, 8, 8), (70, 16, 64), (700, 100, 72),
         (0, 64, 32), (9, 1, 64), (33, 72, 100))  # fmt: skip
SEVERAL = (1, 17, 64, 129)  # numbers of rows with which a row must have the same bits
LAUNCHES = 10000


def values(name: str) -> None:
    """A function at every size against float64, with operands of both dtypes, and once again."""
    f = named(name)
    for m, n, k in SIZES:
        for dtype in (BF16, F16):
            args = arguments(f, m, n, k, dtype, "cuda")
            first = f(*args)
            assert_close(f, first, *args)
            assert_same_bits(f(*args), first)  # some sizes have NaN


def layouts(name: str) -> None:
    """Matrices and rows that lie otherwise in memory, with the bits of those that do not.

    The shortcut of the others is there already, and must not take them.
    """
    f = named(name)
    args = arguments(f, 40, 512, 256, device="cuda")
    expected = pytree.tree_leaves(f(*args))
    for change in (transposed, apart, misaligned, repeated, transposed, apart):
        given = change(f, args)
        found = pytree.tree_leaves(f(*given))
        for a, b in zip(expected, found, strict=True):
            if change in (misaligned, repeated):  # cuBLAS multiplies, or there are other rows
                continue
            assert a.equal(b), (name, change.__name__)
        assert_close(f, f(*given), *given)
    lead = [v.unflatten(0, (5, 8)) if len(v) == 40 else v for v in args]
    for a, b in zip(expected, pytree.tree_leaves(f(*lead)), strict=True):
        assert a.equal(b.flatten(0, 1))


def transposed(f, args):
    """Matrices whose columns are contiguous, not their rows."""
    return [v.t().contiguous().t() if is_matrix(v) else v for v in args]


def apart(f, args):
    """Rows with NaN between them."""

    def spaced(v):
        if v.ndim < 2:
            return v
        wide = v.new_full((len(v), v.shape[1] + 16), torch.nan)
        wide[:, 8:-8] = v
        return wide[:, 8:-8]

    return [spaced(v) for v in args]


def misaligned(f, args):
    """Rows that begin at 2 bytes more than a multiple of 16."""
    return [torch.cat([v, v], 1)[:, 1 : v.shape[1] + 1] if v.ndim == 2 else v for v in args]


def repeated(f, args):
    """One row for all."""
    return [v[:1].expand_as(v) if v.ndim == 2 and len(v) == 40 else v for v in args]


def is_matrix(v):
    return v.ndim == 2 and len(v) != 40


def bits(name: str) -> None:
    """A row has the same bits in every number of rows, and in every place."""
    f = named(name)
    args = arguments(f, 4096, 1024, 512, device="cuda")
    whole = pytree.tree_leaves(f(*args))
    for m in SEVERAL:
        for at in (0, 777, 4096 - m):
            part = [v[at : at + m] if len(v) == 4096 else v for v in args]
            for a, b in zip(whole, pytree.tree_leaves(f(*part)), strict=True):
                assert a[at : at + m].equal(b), (name, m, at)


FORMED = 2500, 1000, 328  # M, N and K: several tiles for each thread block, none of them whole


def forms(name: str) -> None:
    """Every form of tile in every number of rows has the bits of the tile that is chosen.

    Some of the tiles of the last wave are cut into narrower ones.
    """
    f, (m, n, k) = named(name), FORMED
    args = [v.to("meta") for v in arguments(f, m, n, k)]
    picks = [each_form(i) for i in range(count_of(f, args))]
    compile_ahead(f, args, picks)
    args = arguments(f, m, n, k, device="cuda")
    expected = f(*args)
    assert_close(f, expected, *args)
    expected = pytree.tree_leaves(expected)
    for i, pick in enumerate(picks):
        again = fresh(f)
        with forced(pick):
            for rows in (*SEVERAL, m):
                part = [v[:rows] if len(v) == m else v for v in args]
                for a, b in zip(expected, pytree.tree_leaves(again(*part)), strict=True):
                    assert a[:rows].equal(b), (name, i, rows)


WHOLE_SIZES = (8, 72), (100, 264), (128, 256)  # N and K: all columns of a row are in one tile
SHARED_SIZES = (264, 72), (520, 136), (1032, 40)  # they are in the tiles of a cluster


def whole(name: str) -> None:
    """Rows that are reduced in a tile: values, and the same bits in all forms and numbers of rows.
    """
    compare_whole(named(name), WHOLE_SIZES)


def shared(name: str) -> None:
    """The same of rows that several tiles share."""
    compare_whole(named(name), SHARED_SIZES[: 2 if name in ("rms_after", "gated_norm") else None])


def compare_whole(f, sizes) -> None:
    name, m = f._signature.name, FORMED[0]
    made = [whole_rows.arguments(f, m, n, k) for n, k in sizes]
    picks = [[each_form(i) for i in range(count_of(f, args))] for args in made]
    for args, of_size in zip(made, picks, strict=True):
        compile_ahead(f, args, of_size)
    for args, of_size in zip(made, picks, strict=True):
        args = [v.cuda() for v in args]
        (kernel,) = f.inspect(*args).kernels
        assert isinstance(kernel, ProductKernel) and kernel.plan.kernel.is_whole
        assert (kernel.plan.kernel.shares > 1) == (sizes is not WHOLE_SIZES)
        results = f(*args)
        assert_close(f, results, *args)
        results = pytree.tree_leaves(results)
        turned = [v.t().contiguous().t() if v.ndim == 2 and len(v) != m else v for v in args]
        if len(args[1]) % 8 == 0:  # else torch multiplies, with other bits
            assert_same_bits(pytree.tree_leaves(f(*turned)), results)
        for i, pick in enumerate(of_size):
            again = fresh(f)
            with forced(pick):
                for rows in (*SEVERAL, m):
                    part = [v[m - rows :] if len(v) == m else v for v in args]
                    for a, b in zip(results, pytree.tree_leaves(again(*part)), strict=True):
                        assert a[m - rows :].equal(b), (name, len(args[1]), i, rows)
    repeat(f, args)


def turns(name: str) -> None:
    """Values of all sizes in turns, and many launches on two streams without a hang."""
    f = named(name)
    compile_ahead(f, [v.to("meta") for v in arguments(f, 2000, 2048, 256)], [in_turns])
    with forced(in_turns):
        own = fresh(f)
        for m, n, k in SIZES:
            args = arguments(f, m, n, k, device="cuda")
            assert_close(f, own(*args), *args)
        args = arguments(f, 2000, 2048, 256, device="cuda")
        repeat(own, args)


def repeat(f, args) -> None:
    """Calls on two streams all have the same results."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    expected, found = pytree.tree_leaves(f(*args)), {}
    torch.cuda.synchronize()
    for k in range(LAUNCHES // 2):
        for stream in streams:
            with torch.cuda.stream(stream):
                found[stream] = pytree.tree_leaves(f(*args))
        if k % 100 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for results in found.values():
        assert all(a.equal(b) for a, b in zip(results, expected, strict=True))


def tuned(name: str) -> None:
    """The tile that wins has the same bits, and later calls have it."""
    f, args = fresh(named(name)), arguments(named(name), 1500, 2048, 512, device="cuda")
    expected = pytree.tree_leaves(f(*args))
    found = f.tune(*args, seconds=20, progress=False)
    print(found)
    assert all(each.tried > 1 for each in found.kernels)
    for a, b in zip(expected, pytree.tree_leaves(f(*args)), strict=True):
        assert a.equal(b)
    shown = [k for k in f.inspect(*args).kernels if isinstance(k, ProductKernel)]
    assert [k.plan.tile for k in shown] == [each.plan.tile for each in found.kernels]


def gradients(name: str) -> None:
    """Gradients against autograd in float64, of products that the forward pass stores."""
    product_chunks.FLOPS_PER_BYTE = 0
    compare_gradients(name)


def compare_gradients(name: str) -> None:
    f = named(name)
    args = arguments(f, 60, 256, 128, device="cuda")
    ours = [v.clone().requires_grad_() if v.is_floating_point() else v for v in args]
    exact = [v.double().requires_grad_() if v.is_floating_point() else v for v in args]
    dims = tuple(0 if len(v) == 60 else None for v in args)
    results = pytree.tree_leaves(f(*ours))
    with torch.device("cuda"):  # for torch.arange
        expected = pytree.tree_leaves(torch.vmap(f._fn, in_dims=dims)(*exact))
    sum(r.float().square().sum() for r in results).backward()
    sum(r.square().sum() for r in expected).backward()
    for a, b in zip(ours, exact, strict=True):
        if a.is_floating_point():
            assert (a.grad.double() - b.grad).norm() <= 0.02 * b.grad.norm() + 1e-3


def chunks(name: str) -> None:
    """The same of products that are computed again in chunks of about 40 rows; no rows, and bits.
    """
    product_chunks.FLOPS_PER_BYTE, product_chunks.CHUNK_BYTES = 10**9, 1
    compare_gradients(name)
    f = named(name)
    args = arguments(f, 60, 256, 128, device="cuda")
    expected = pytree.tree_leaves(f(*args))
    for none in (False, True):
        given = [v[:0] if none and len(v) == 60 else v.clone() for v in args]
        given = [v.requires_grad_() if v.is_floating_point() else v for v in given]
        results = pytree.tree_leaves(f(*given))
        passes = []
        for _ in range(2):
            sum(r.float().square().sum() for r in results).backward(retain_graph=True)
            passes.append([v.grad for v in given if v.is_floating_point()])
            for v in given:
                v.grad = None
        for a, b in zip(*passes, strict=True):
            assert a.equal(b) and not (none and a.any())
        assert none or all(a.equal(b) for a, b in zip(results, expected, strict=True))


def memory(name: str) -> None:
    """Logits are never stored: what a pass takes, and its gradients against float64."""
    f, (m, n, k) = named(name), (8192, 32000, 1024)
    args = arguments(f, m, n, k, device="cuda")
    h, head = (v.requires_grad_() for v in args[:2])
    labels = args[2] % n
    loss = f(h, head, labels)
    torch.autograd.grad(loss.mean(), (h, head))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = f(h, head, labels)
    forward = torch.cuda.max_memory_allocated() - before
    found = torch.autograd.grad(loss.mean(), (h, head))
    both = torch.cuda.max_memory_allocated() - before
    logits = 4 * m * n
    # Float32 sums of the matrix's gradient, the gradient of h, and a chunk.
    chunk = max(product_chunks.CHUNK_BYTES, head.nbytes)
    print(f"forward {forward / logits:.3f}, both {both / logits:.3f} of the logits")
    assert forward <= 0.05 * logits
    assert both <= 2 * head.nbytes + h.nbytes + chunk + 0.02 * logits <= 0.3 * logits
    with torch.no_grad():
        right = linear_cross_entropy.exact(h, head, labels)
        z = h.double() @ head.double().t()
        expected = z.logsumexp(-1) - z.gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, right, strict=True):
        assert (a - b).norm() <= 0.006 * b.norm(), ((a - b).norm() / b.norm()).item()


def graphs(name: str) -> None:
    """A CUDA graph that is replayed with new data, and calls on two streams."""
    f = named(name)
    args = arguments(f, 100, 512, 256, device="cuda")
    f(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pytree.tree_leaves(f(*args))
    for seed in range(5):
        for v, new in zip(args, arguments(f, 100, 512, 256, device="cuda", seed=seed), strict=True):
            v.copy_(new)
        graph.replay()
        for a, b in zip(captured, pytree.tree_leaves(f(*args)), strict=True):
            assert a.equal(b)
    repeat(f, args)


def named(name: str):
    every = (*FUNCTIONS, *whole_rows.WHOLE)
    return next(f for f in every if f._signature.name == name)


if __name__ == "__main__":
    torch.manual_seed(0)
    is_forced = sys.argv[1] == "warps"
    texts = force() if is_forced else []
    what, *names = sys.argv[1 + is_forced :]
    for each in names or [f._signature.name for f in FUNCTIONS]:
        if what in ("gradients", "chunks") and named(each) is products.mlp:
            continue  # its float64 form does not round
        globals()[what](each)
        assert not is_forced or any(text is not None for text in texts), "torch has multiplied"
        assert not is_forced or all(text is None or text.tile.warps for text in texts)
        texts.clear()
    print("right")
