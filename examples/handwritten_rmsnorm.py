"""RMSNorm and LayerNorm, written by hand over HTile's primitives as one kernel.

A weight, a bias, a residual (in and out), rstd and the mean are optional. Emitted kernels are
measured against it.
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, const_expr

from examples.handwritten_softmax import DTYPES, alignment, arch_limits, device_arch
from htile.compute.reduce import ADD
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseLoader, ElementwiseStorer
from htile.utils import make_fake_tensor

# Both count values of a row that a thread holds (64 where N is 4096). With more than the first,
# columns are loaded only after the reductions, so that registers allow two CTAs on an SM. With more
# than the second, the row is read again from shared memory after the reductions. It would spill
# otherwise (N = 6144, 16384).
MAX_EARLY_COLUMNS, MAX_ROW_IN_REGISTERS = 32, 64


def load_optional(ctx, mW):
    """Load a column (N,) into a fragment. None stays None."""
    return None if mW is None else ctx.load_column(mW)


class RMSNorm:
    """Write each row of mX + mRes (M, N), normalised, times mW (N,), plus mB (N,), to mO (M, N).

    dependent: the kernel may start while the one before it ends (sm_90 and newer).
    """

    def __init__(self, dtype, N, is_layernorm=False, dependent=True, **config):
        self.is_layernorm, self.dependent = is_layernorm, dependent
        self.config = ElementwiseTileConfig(dtype, N, stage=2 if is_layernorm else 1, **config)

    @cute.jit
    def __call__(self, mX, mW, mB, mRes, mO, mResO, mRstd, mMean, eps: Float32,
                 stream: cuda.CUstream):  # fmt: skip
        rows = [t.element_type for t in (mX, mRes, mO, mResO) if t is not None]
        vec_size = const_expr(self.config.vec_size(*rows))
        tiled_copy = self.config.make_vector_copy(vec_size).tiled_copy_2d()
        tiler_mn = const_expr(self.config.tiler_mn(vec_size))
        self.kernel(mX, mW, mB, mRes, mO, mResO, mRstd, mMean, eps, tiler_mn, tiled_copy).launch(
            grid=self.config.grid(mX.shape[0]),
            block=self.config.block,
            cluster=self.config.cluster,
            stream=stream,
            use_pdl=self.dependent,
        )

    @cute.kernel
    def kernel(self, mX, mW, mB, mRes, mO, mResO, mRstd, mMean, eps: Float32,
               tiler_mn: cutlass.Constexpr, tiled_copy: cute.TiledCopy):  # fmt: skip
        ctx = ElementwiseKernelContext(self.config)
        ctx.setup(mX, tiler_mn, tiled_copy, 0 if const_expr(mRes is None) else (mRes.element_type,))
        loader, storer = ElementwiseLoader(ctx), ElementwiseStorer(ctx)
        values = const_expr(cute.size(ctx.vector_shape))

        if const_expr(self.dependent):
            cute.arch.griddepcontrol_wait()
        tXrX = loader.start(mX)
        tXrRes = None if const_expr(mRes is None) else loader.start(mRes)
        if const_expr(values <= MAX_EARLY_COLUMNS):
            tXrW, tXrB = load_optional(ctx, mW), load_optional(ctx, mB)
        loader.finish()
        if const_expr(self.dependent):
            cute.arch.griddepcontrol_launch_dependents()
        x = tXrX.load().to(Float32)
        if const_expr(mRes is not None):
            x = x + tXrRes.load().to(Float32)
        if const_expr(mResO is not None):
            storer.store(mResO, x)

        mean = Float32(0.0)
        if const_expr(self.is_layernorm):
            mean = ctx.row_reduce(x, ADD) * (1.0 / self.config.N)
            x = x - mean
        # The squares are of differences from the mean, so the row is reduced twice. Padded
        # elements are masked after that, because their differences are not 0.
        square = ctx.row_reduce(x * x, ADD, slot=1 if self.is_layernorm else 0)
        rstd = cute.math.rsqrt(square * (1.0 / self.config.N) + eps, fastmath=True)
        if const_expr(mRstd is not None):
            ctx.store_row_value(mRstd, rstd)
        if const_expr(mMean is not None):
            ctx.store_row_value(mMean, mean)

        if const_expr(values > MAX_ROW_IN_REGISTERS):
            loader.reload()
            x = tXrX.load().to(Float32)
            if const_expr(mRes is not None):
                x = x + tXrRes.load().to(Float32)
            x = x - mean
        if const_expr(values > MAX_EARLY_COLUMNS):
            tXrW, tXrB = load_optional(ctx, mW), load_optional(ctx, mB)
        y = x * rstd
        if const_expr(mW is not None):
            y = y * tXrW.load().to(Float32)
        if const_expr(mB is not None):
            y = y + tXrB.load().to(Float32)
        storer.store(mO, y)


@functools.cache
def compile_rmsnorm(N, arch, x, w, b, res, out, res_out, rstd, mean, *, align=16,
                    is_layernorm=False, options="", **config):  # fmt: skip
    """Compile for any number of rows of N elements.

    x ... mean: torch dtypes, or None for an operand that the kernel lacks.
    """
    M = cute.sym_int()

    def fake(dtype, *shape):
        if dtype is None:
            return None
        if shape == (M,):
            return make_fake_tensor(DTYPES[dtype], shape)
        return make_fake_tensor(DTYPES[dtype], shape, max(1, align * 8 // DTYPES[dtype].width))

    row_bytes = N * sum(t.itemsize for t in (x, res) if t is not None)
    limits = arch_limits(arch, N, row_bytes)
    kernel = RMSNorm(DTYPES[x], N, is_layernorm, copy_bytes=align, **{**limits, **config})
    return cute.compile(
        kernel,
        fake(x, M, N),
        fake(w, N),
        fake(b, N),
        fake(res, M, N),
        fake(out, M, N),
        fake(res_out, M, N),
        fake(rstd, M),
        fake(mean, M),
        Float32(0.0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch} {options}",
    )


def norm_fwd(x, weight, bias, residual, eps, returns, is_layernorm):
    """Compute (out, residual, rstd, mean) of x (M, N); the last three if `returns` names them."""
    operands = [t for t in (x, weight, bias, residual) if t is not None]
    spread = any(t.stride(-1) != 1 < t.shape[-1] for t in operands)
    if x.dim() != 2 or spread or any(t.dtype not in DTYPES for t in operands):
        raise ValueError(f"expected contiguous rows (M, N) of {list(DTYPES)}, got {x.shape}")
    (M, N), wide = x.shape, x.dtype if residual is None else residual.dtype
    empty = functools.partial(torch.empty, device=x.device)
    out = empty(M, N, dtype=x.dtype)
    res_out = empty(M, N, dtype=wide) if returns[0] else None
    rstd, mean = (empty(M, dtype=torch.float32) if r else None for r in returns[1:])
    if M:
        tensors = (x, weight, bias, residual, out, res_out, rstd, mean)
        rows = [t for t in tensors[:6] if t is not None]
        compiled = compile_rmsnorm(
            N,
            device_arch(x.device),
            *(None if t is None else t.dtype for t in tensors),
            align=alignment(*rows),
            is_layernorm=is_layernorm,
        )
        compiled(*tensors, eps)
    return out, res_out, rstd, mean


def rmsnorm_fwd(
    x, weight=None, bias=None, residual=None, eps=1e-6, return_residual=False, return_rstd=False
):
    """RMSNorm of x (M, N) on the current stream.

    Returns the output, or a tuple of it and of what the flags return_* ask for.
    """
    returns = (return_residual, return_rstd, False)
    out, *rest = norm_fwd(x, weight, bias, residual, eps, returns, False)
    return (out, *(t for t in rest if t is not None)) if any(returns) else out


def layernorm_fwd(
    x, weight=None, bias=None, residual=None, eps=1e-5,
    return_residual=False, return_rstd=False, return_mean=False,
):  # fmt: skip
    """LayerNorm of x (M, N) on the current stream. It returns what `rmsnorm_fwd` returns."""
    returns = (return_residual, return_rstd, return_mean)
    out, *rest = norm_fwd(x, weight, bias, residual, eps, returns, True)
    return (out, *(t for t in rest if t is not None)) if any(returns) else out


def main():
    """Check the kernel against torch in float64, or compile it for sm_90a if there is no GPU."""
    bf16, f32 = torch.bfloat16, torch.float32
    if not torch.cuda.is_available():
        for name, args in (("rmsnorm", (bf16, bf16, None)), ("layernorm", (bf16, f32, f32))):
            row = (bf16, bf16, bf16, f32, f32 if name == "layernorm" else None)
            compile_rmsnorm(4096, "sm_90a", *args, *row, is_layernorm=name == "layernorm")
            print(f"no GPU: compiled {name} for sm_90a")
        return
    for N in (1, 7, 100, 1000, 4096, 4097, 6144, 16384, 131072, 262144):
        x, residual = (torch.randn(33, N, device="cuda", dtype=bf16) for _ in range(2))
        w, b = (torch.randn(N, device="cuda", dtype=bf16) for _ in range(2))
        h, columns = x.double() + residual.double(), (w.double(), b.double())
        expected = torch.rms_norm(h, (N,), columns[0], 1e-6)
        check(f"rmsnorm 33x{N}", rmsnorm_fwd(x, w, residual=residual), expected)
        expected = torch.layer_norm(h, (N,), *columns, 1e-5)
        check(f"layernorm 33x{N}", layernorm_fwd(x, w, b, residual), expected)


def check(name, actual, expected):
    """Assert that no error is larger than one bf16 rounding of the largest expected magnitude."""
    error = (actual.double() - expected).abs().max().item()
    assert error <= 2**-8 * expected.abs().max().item(), (name, error)
    print(f"{name}: max |error| {error:.2e}")


if __name__ == "__main__":
    main()
