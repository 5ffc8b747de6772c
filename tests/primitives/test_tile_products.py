"""The products written by hand over tiles: what they use, and what their PTX computes."""

import functools
import re

import numpy as np
import pytest
import torch

from examples import (
    handwritten_fused_matmul,
    handwritten_hopper_matmul,
    handwritten_matmul,
    handwritten_matmul_registers,
)
from htile.build.compile import _dynamic_shared
from htile.build.cubin import read_resources
from htile.types.register import WarpLayout
from tests.primitives.device_code import ARCHS
from tests.primitives.device_memory import Memory
from tests.primitives.ptx_device import launch

BF16, F16 = torch.bfloat16, torch.float16
MAJORS = ("k", "mn")
# Bytes that one thread block may use, as the CUDA C++ Programming Guide has it, in KiB.
SHARED_KIB = {"sm_80": 163, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}


@functools.cache
def compiled(name, dtype, arch, *majors, **variant):
    """A kernel with its PTX and its cubin."""
    compilers = {
        "registers": handwritten_matmul_registers.compile_matmul,
        "shared": handwritten_matmul.compile_matmul,
        "fused": handwritten_fused_matmul.compile_fused,
    }
    return compilers[name](dtype, arch, *majors, options="--keep-ptx --keep-cubin", **variant)


KERNELS = [("registers", (m,)) for m in MAJORS]
KERNELS += [("shared", (m,)) for m in MAJORS]
KERNELS += [("fused", ("k", "k")), ("fused", ("mn", "mn"))]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "majors"), KERNELS)
def test_compiles_without_a_stack(name, majors, arch):
    kernel = compiled(name, BF16, arch, *majors)
    used = read_resources(kernel.__cubin__, _dynamic_shared(str(kernel.ir_module)))
    assert used.stack == 0, "nothing is spilled"
    assert used.registers * used.threads <= 65536, "or the launch fails"
    assert used.dynamic_shared == (0 if name == "registers" else 65536)
    assert used.dynamic_shared <= SHARED_KIB[arch] * 1024
    ptx = kernel.__ptx__
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
    staged = name != "registers"
    assert ("cp.async.cg.shared.global" in ptx) == ("ldmatrix" in ptx) == staged
    assert ("ldmatrix.sync.aligned.m8n8.x4.trans" in ptx) == (staged and "mn" in majors)
    assert ("stmatrix.sync.aligned.m8n8.x4" in ptx) == (staged and arch != "sm_80")


def matrix(rows, columns, dtype, major="k", space=0):
    """Random numbers, whose lines are `space` elements apart; NaN beside them."""
    shape = (rows, columns) if major == "k" else (columns, rows)
    lines = torch.full((shape[0], shape[1] + space), torch.nan).to(dtype)
    lines[:, : shape[1]] = torch.randn(shape).to(dtype)
    lines = lines[:, : shape[1]]
    return lines if major == "k" else lines.T


def run(kernel, tile, operands, out, **order):
    grid = tuple(-(-size // step) for size, step in zip(out.shape, tile, strict=True))
    launch(kernel if isinstance(kernel, str) else kernel.__ptx__, grid, [*operands, out], **order)
    return out


def is_right(a, b, out):
    exact = a.double() @ b.double().T
    bound = handwritten_matmul.error_bound(a, b, exact, out.dtype)
    return bool(((out.double() - exact).abs() <= bound).all())


ORDERS = [{"late": True}, {"late": False}, {"late": False, "reverse": True}]
RUNS = [*(("sm_80", order) for order in ORDERS), ("sm_90a", ORDERS[0])]
# M, N and K, and bytes that rows of C start and end at multiples of
SIZES = [((1, 8, 8), 16), ((136, 120, 200), 16), ((17, 129, 64), 2), ((130, 4, 136), 8)]


@pytest.mark.parametrize(("arch", "order"), RUNS, ids=str)
@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("sizes", "out_bytes"), SIZES)
def test_through_shared_memory(sizes, out_bytes, major, arch, order):
    m, n, k = sizes
    n += -n % 8 if major == "mn" else 0
    torch.manual_seed(m)
    a, b = matrix(m, k, BF16, space=8), matrix(n, k, BF16, major, space=16)
    kernel = compiled("shared", BF16, arch, major, out_bytes=out_bytes)
    assert is_right(a, b, run(kernel, (128, 128), (a, b), matrix(m, n, BF16), **order))


@pytest.mark.parametrize("name", ["shared", "registers"])
def test_rows_that_are_more_than_32_bits_of_elements_apart(name):
    """Memory that nobody touches costs nothing."""
    far = (1 << 31) + 8
    a, b = torch.empty(far + 64, dtype=BF16).as_strided((2, 64), (far, 1)), matrix(8, 64, BF16)
    a.copy_(matrix(2, 64, BF16))
    out = run(compiled(name, BF16, "sm_80", "k"), (64, 64), (a, b), matrix(2, 8, BF16))
    assert is_right(a, b, out)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
@pytest.mark.parametrize("name", ["shared", "registers"])
def test_newer_architectures(name, arch):
    a, b = matrix(136, 200, BF16), matrix(120, 200, BF16)
    tile = (128, 128) if name == "shared" else (64, 64)
    out = run(compiled(name, BF16, arch, "k"), tile, (a, b), matrix(136, 120, BF16))
    assert is_right(a, b, out)


@pytest.mark.parametrize(
    "variant",
    [
        {"tile": (64, 64, 64), "stages": 3},
        {"tile": (128, 64, 32), "warps": WarpLayout(4, 1), "stages": 2},
        {"tile": (32, 128, 32), "warps": WarpLayout(1, 4), "stages": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("major", MAJORS)
def test_other_configurations(variant, major):
    """The data flow is apart from the configuration: any of them gives the same bits."""
    torch.manual_seed(2)
    a, b = matrix(70, 168, F16), matrix(72, 168, F16, major)
    outs = []
    for options in ({}, variant):
        kernel = compiled("shared", F16, "sm_80", major, **options)
        tile = options.get("tile", (128, 128, 32))[:2]
        outs.append(run(kernel, tile, (a, b), matrix(70, 72, F16)))
    assert is_right(a, b, outs[0]) and outs[0].equal(outs[1])


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (70, 50, 40), (65, 130, 33), (3, 7, 100)])
def test_over_registers(sizes, major):
    m, n, k = sizes
    torch.manual_seed(n)
    a, b = matrix(m, k, F16), matrix(n, k, F16, major)
    pairs = k % 2 == 0, k % 2 == 0 and major == "k", n % 2 == 0
    kernel = compiled("registers", F16, "sm_80", major, pairs=pairs)
    assert is_right(a, b, run(kernel, (64, 64), (a, b), matrix(m, n, F16)))


TWO_PRODUCTS = [((130, 136, 72, 24), ("k", "mn"), *run) for run in RUNS]
TWO_PRODUCTS += [((17, 72, 40, 8), ("k", "k"), arch, ORDERS[0]) for arch in ARCHS]
TWO_PRODUCTS += [
    (sizes, majors, "sm_80", ORDERS[0])
    for sizes in ((1, 8, 8, 8), (16, 72, 200, 136))
    for majors in (("mn", "mn"), ("k", "k"))
]


@pytest.mark.parametrize(("sizes", "majors", "arch", "order"), TWO_PRODUCTS, ids=str)
def test_two_products(sizes, majors, arch, order):
    m, n, k, p = sizes
    torch.manual_seed(k)
    operands = matrix(m, k, BF16), matrix(n, k, BF16, majors[0]), matrix(p, n, BF16, majors[1])
    kernel = compiled("fused", BF16, arch, *majors)
    out = run(kernel, (128, 128), operands, matrix(m, p, BF16), **order)
    a, b, c = (each.double() for each in operands)
    exact = a @ b.T @ c.T
    bound = handwritten_fused_matmul.error_bound(*operands, exact)
    assert ((out.double() - exact).abs() <= bound).all()


# ---- what the device of the tests would see ------------------------------------------------------


def places(ptx, pattern):
    """Where a pattern is in PTX, as slices."""
    return [slice(*match.span()) for match in re.finditer(pattern, ptx)]


@pytest.mark.parametrize("pattern", [r"bar\.sync \t?0;", r"cp\.async\.wait_group[ \t]*\d+;"])
def test_every_barrier_and_every_wait_is_needed(pattern):
    """Without any of them, some order of warps and copies gives wrong results, or NaN."""
    a, b = matrix(64, 264, F16), matrix(64, 264, F16)
    variant = {"tile": (64, 64, 32), "stages": 3}
    ptx = compiled("shared", F16, "sm_80", "k", **variant).__ptx__
    found = places(ptx, pattern)
    assert len(found) == (4 if "bar" in pattern else 3)
    # The last wait is for zeros beyond K, which could arrive in the result. In none of the orders
    # they come as late as that.
    for place in found if "bar" in pattern else found[:-1]:
        broken = ptx[: place.start] + ptx[place.stop :]
        outs = [run(broken, (64, 64), (a, b), matrix(64, 64, F16), **o) for o in ORDERS]
        assert not all(is_right(a, b, out) for out in outs), ptx[place]


def test_an_access_beyond_a_tensor_is_seen():
    memory = Memory([torch.arange(8), torch.arange(4)])
    assert memory.at(memory.address[0] + 56, 8).view("int64") == 7
    for address, message in ((64, "tensor 0 ends before"), (4, "not aligned to 8 bytes")):
        with pytest.raises(AssertionError, match=message):
            memory.at(memory.address[0] + address, 8)
        with pytest.raises(AssertionError, match=message):
            memory.load(memory.address[0] + np.array([0, address, 56]), 8)
        with pytest.raises(AssertionError, match=message):
            memory.store(memory.address[0] + np.array([0, address]), np.zeros((2, 8), np.uint8))
    with pytest.raises(AssertionError, match="no tensor is at"):
        memory.at(3 * memory.address[0], 8)
    with pytest.raises(AssertionError, match="no tensor is at"):
        memory.load(memory.address[0] * np.array([1, 3]), 8)


def test_an_access_of_many_addresses_is_one_of_each():
    """The last one wins where several write to one address; and addresses of several tensors."""
    tensors = torch.arange(8), torch.arange(100, 104)
    memory = Memory(tensors)
    first, second = memory.address
    for places in ([first + 8, first + 56, first + 8], [first, second + 16, second + 24]):
        found = memory.load(np.array(places), 8).view(np.int64)[:, 0]
        assert found.tolist() == [int(memory.at(each, 8).view("int64")[0]) for each in places]
        values = np.arange(20, 23)
        memory.store(np.array(places), values[:, None].view(np.uint8))
    assert tensors[0].tolist() == [20, 22, 2, 3, 4, 5, 6, 21]
    assert tensors[1].tolist() == [100, 101, 21, 22]


# ---- mistakes of callers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(torch.ones(4, 8)), "expected matrices of one dtype of .* got a torch.float32"),
        (lambda f: f(torch.ones(8, dtype=BF16)), r"got a torch.bfloat16 \(8,\)"),
        (lambda f: f(matrix(4, 8, F16)), "expected matrices of one dtype"),
        (lambda f: f(matrix(4, 16, BF16)), r"a \(4, 16\) and b \(16, 8\) differ in K"),
        (lambda f: f(matrix(4, 8, BF16, "mn")), r"rows of a must be contiguous.* \(1, 4\)"),
        (lambda f: f(matrix(4, 8, BF16, space=4)), "multiples of 8 bytes only: pad them"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("example", [handwritten_matmul, handwritten_hopper_matmul],
                         ids=lambda module: module.__name__)  # fmt: skip
def test_operands_that_are_refused(example, call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda a: example.matmul(a, matrix(16, 8, BF16)))


def test_the_example_for_hopper_refuses_results_that_tma_does_not_store():
    with pytest.raises(ValueError, match=r"the result is copied .* multiples of 8 bytes only"):
        handwritten_hopper_matmul.matmul(matrix(16, 8, BF16), matrix(12, 8, BF16))


def test_a_configuration_that_cannot_be():
    with pytest.raises(ValueError, match="got 1 stages of 32"):
        compiled("shared", BF16, "sm_80", "k", stages=1)
    with pytest.raises(ValueError, match="got 4 stages of 16"):
        compiled("shared", BF16, "sm_80", "k", tile=(128, 128, 16))
