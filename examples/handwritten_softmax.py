"""Softmax over the last dimension, written by hand over HTile's primitives.

It is one kernel that holds the row in registers and reduces it twice, or once if `online_softmax`
is set. Emitted kernels are measured against it.
"""

import functools
import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

from htile.compute.online import online_softmax_reduce
from htile.compute.powers import exp_bounded
from htile.compute.reduce import ADD, MAX
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseLoader, ElementwiseStorer
from htile.utils import make_fake_tensor

DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}


class Softmax:
    """Write the softmax of each row of mX (M, N) to mO (M, N).

    dependent: the kernel may start while the one before it ends (sm_90 and newer).
    """

    def __init__(self, dtype, N, cluster_n=None, online_softmax=False, dependent=True, **config):
        self.online_softmax, self.dependent = online_softmax, dependent
        self.config = ElementwiseTileConfig(
            dtype,
            N,
            cluster_n=cluster_n,
            stage=1 if online_softmax else 2,  # a slot for both numbers, or one for each
            reduction_dtype=cutlass.Int64 if online_softmax else cutlass.Float32,
            **config,
        )

    @cute.jit
    def __call__(self, mX: cute.Tensor, mO: cute.Tensor, stream: cuda.CUstream):
        vec_size = self.config.vec_size(mX.element_type, mO.element_type)
        tiled_copy = self.config.make_vector_copy(vec_size).tiled_copy_2d()
        self.kernel(mX, mO, self.config.tiler_mn(vec_size), tiled_copy).launch(
            grid=self.config.grid(mX.shape[0]),
            block=self.config.block,
            cluster=self.config.cluster,
            stream=stream,
            use_pdl=self.dependent,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mO: cute.Tensor,
        tiler_mn: cutlass.Constexpr,
        tiled_copy: cute.TiledCopy,
    ):
        ctx = ElementwiseKernelContext(self.config)
        ctx.setup(mX, tiler_mn, tiled_copy)
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
        x = ElementwiseLoader(ctx).load(mX).load().to(cutlass.Float32)
        if cutlass.const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.online_softmax):
            if cutlass.const_expr(ctx.mask is not None):
                x = cute.where(ctx.mask, x, ctx.full(-cutlass.Float32.inf, cutlass.Float32))
            _, denom, exp = online_softmax_reduce(
                x, self.config.threads_per_row, ctx.reduction_buffer, ctx.mbar_ptr
            )
        else:
            x = x - ctx.row_reduce(x, MAX, slot=0)  # before exp scales it: exact for close numbers
            exp = exp_bounded(x)
            denom = ctx.row_reduce(exp, ADD, slot=1)
        ElementwiseStorer(ctx).store(mO, exp * cute.arch.rcp_approx(denom))


def arch_limits(arch: str, N: int, row_bytes: int) -> dict:
    """What must be set differently for an architecture.

    Without clusters one CTA must hold the row. Some architectures have no dependent launch either.
    Raises ValueError for a row that does not fit the shared memory of a CTA.
    """
    if arch.startswith(("sm_90", "sm_10")):
        return {}
    limit = {"sm_80": 163}.get(arch, 99) * 1024 - 1024  # bytes of shared memory that a CTA has
    if N > 32768 or row_bytes > limit:
        raise ValueError(f"rows of {N} elements, {row_bytes} bytes, need clusters, not {arch}")
    limits = {"cluster_n": 1, "dependent": not arch.startswith("sm_8")}
    return limits | ({"threads_per_row": 512} if N > 8192 else {})


@functools.cache
def compile_softmax(dtype, N, arch, *, align=16, options="", **variant):
    """Compile for any number of rows of N elements.

    The data pointers and the rows are aligned to `align` bytes.
    """
    M, dtype = cute.sym_int(), DTYPES[dtype]
    rows = [make_fake_tensor(dtype, (M, N), align * 8 // dtype.width) for _ in range(2)]
    softmax = Softmax(
        dtype, N, copy_bytes=align, **{**arch_limits(arch, N, N * dtype.width // 8), **variant}
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    return cute.compile(softmax, *rows, stream, options=options)


def device_arch(device) -> str:
    """What --gpu-arch says for a CUDA device."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def alignment(*tensors) -> int:
    """How many bytes the rows of all these tensors, (M, N) or (N,), are aligned to, at most 16."""
    steps = [v * t.element_size() for t in tensors for v in t.stride()[:-1]]
    return math.gcd(16, *steps, *(t.data_ptr() for t in tensors))


def softmax_fwd(x: torch.Tensor, online_softmax: bool = False) -> torch.Tensor:
    """softmax(x, dim=-1) on the current stream, of a CUDA tensor (M, N) with contiguous rows."""
    if x.dim() != 2 or (x.stride(1) != 1 < x.shape[1]) or x.dtype not in DTYPES:
        raise ValueError(f"expected rows (M, N) of {list(DTYPES)}, got {x.dtype} {x.shape}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        arch, align = device_arch(x.device), alignment(x, out)
        compile_softmax(x.dtype, x.shape[1], arch, align=align, online_softmax=online_softmax)(
            x, out
        )
    return out


def main():
    """Check the kernel against torch in float64, or compile it for sm_90a if there is no GPU."""
    for online in (False, True):
        if not torch.cuda.is_available():
            compile_softmax(torch.bfloat16, 4096, "sm_90a", online_softmax=online)
            print(f"no GPU: compiled softmax, online={online}, for sm_90a")
            continue
        for N in (1, 7, 100, 1000, 4096, 4097, 32768, 131072, 262144):
            x = torch.randn(33, N, device="cuda", dtype=torch.bfloat16) * 4
            expected = torch.softmax(x.double(), dim=-1)
            error = (softmax_fwd(x, online).double() - expected).abs().max().item()
            assert error <= 2**-8 * expected.max().item(), (N, error)
            print(f"softmax online={online} 33x{N}: max |error| {error:.2e}")


if __name__ == "__main__":
    main()
