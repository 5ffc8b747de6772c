"""What is done with a row-wise function besides calling it: `inspect`, `compile` and `tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..build.arch import ARCHS, DEFAULT, arch_named, arch_of_capability
from ..frontend.captures import Captures
from ..frontend.roles import Signature, classify
from .detours import as_in_a_process
from .kernel import Kernel
from .operands import device_of, refuse_fake, runs_kernels

if TYPE_CHECKING:
    from ..tune.search import Tuned
    from ..tune.tiles import TunedProducts
    from .differentiation.training import Training


class Ahead:
    """The part of a row-wise function (htile.run.rowwise) that makes kernels without a call."""

    _signature: Signature
    _captures: Captures

    def inspect(self, *args, arch: str | None = None, **kwargs) -> Kernel:
        """The kernel that a call with these arguments (but no `out=`) runs, without running it.

        The tensors may be on any device, `meta` included, so no GPU is needed. For DTensors it is
        the kernel of this process. A function with products has several (`kernels`):

            x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
            print(softmax.inspect(x, arch="sm_100a"))

        arch: the architecture; by default that of the tensors' GPU, else sm_90a.

        Raises what a call raises for its arguments, and CompileError for an unknown architecture.
        """
        values = as_in_a_process(self, self._signature.bind(args, kwargs))
        refuse_fake(self._signature, values)
        call = classify(self._signature, values)
        device = device_of(self._signature, values)
        request, _ = self._request(call, self._captures.fingerprint(), values)
        capability = torch.cuda.get_device_capability(device) if runs_kernels(device) else None
        if arch is not None:
            chosen = arch_named(arch)
        else:
            chosen = arch_of_capability(capability) if capability else DEFAULT
        if request.specialization.has_products:
            from .products.kernels import ProductKernels

            return ProductKernels(request, chosen)
        gpu = device if ARCHS.get(capability) == chosen else None

        def train() -> Training:
            from .differentiation.training import training_kernels  # which few need

            return training_kernels(self, request, chosen, gpu)

        return Kernel(request.lower(chosen, gpu), chosen.name, request.copied, train)

    def compile(
        self, *args, arch: str | None = None, backward: bool = False, **kwargs
    ) -> Kernel:
        """Compile the kernel that `inspect` shows, ahead of a call, and keep it in the disk cache.

        It takes what `inspect` takes, and needs no GPU. The kernel is for the dtypes, N, the number
        of leading dimensions, the dimensions that repeat, and the alignment of these tensors. It
        serves any number of rows, with an exception: one row alone may have a kernel of its own,
        and if N > 2048, so may batches of at least 64, 256 and 1024 rows. If each element is
        computed by itself and rows are no multiple of 16 bytes, then 1024 rows or more, in a
        multiple of 2, 4, 8 or 16, have kernels that join that many rows into one. With
        `dynamic_n=True` it serves every N of the bucket.

        The memory of `meta` tensors counts as allocated by torch, so their rows begin at multiples
        of 16 bytes if N and the strides allow it. For rows that begin elsewhere, pass a view of a
        CPU tensor, such as `torch.empty(4, 4097)[:, 1:]`.

        backward: also compile the kernels of a call that is differentiated, with contiguous
            gradients of all results (`Kernel.training`). Those of products with matrices are
            compiled at their first use: run one step before a capture.

        Raises what `inspect` raises, CompileError where CuTe-DSL is not installed, and
        UnsupportedError for `backward` of a function with products.
        """
        kernel = self.inspect(*args, arch=arch, **kwargs)
        for each in (kernel, *((kernel.training.forward, kernel.backward) if backward else ())):
            each.build_ahead()
        return kernel

    def tune(
        self, *args, seconds: float = 60.0, numerics: bool = False, progress: bool = True, **kwargs
    ) -> Tuned | TunedProducts:
        """Time the kernel's plans on the GPU with these CUDA tensors, and keep the fastest.

        Plans are tried in the order of their expected times, and compiled ahead in processes side
        by side. Each is timed beside the default one, in turns, with a cold L2 cache. A plan wins
        only if it is faster beyond the noise, twice. From then on similar calls run it, in all
        processes that share the disk cache, on GPUs of this name, until `python -m htile cache
        --clear`. The results of the timed calls are thrown away, and the arguments are not written
        to. If an argument requires grad, the kernels of both passes are tuned as well, each for as
        long. The return value has them as `forward` and `backward`. A forward pass that keeps no
        number of a row is the kernel itself.

            print(softmax.tune(logits, seconds=30))

        seconds: how long to go on. No other plan is begun after that.
        numerics: also try plans that sum in another order. All batches of this N and these dtypes
            then get the bits of the winner. Without it, no bit of a result changes. Products with
            matrices are only summed in one order: other tiles are tried, and the result is a
            `TunedProducts`. Their backward passes are not tuned.
        progress: show a bar on stderr, if that is a terminal.

        If a parameter of `fn` has one of these three names, pass it by position. Raises
        ArgumentError for tensors that are not on a GPU or have no rows, while a CUDA graph is
        captured, and where the disk cache is turned off.
        """
        from .tuning import tuned  # which few calls need

        values = as_in_a_process(self, self._signature.bind(args, kwargs))
        return tuned(self, values, seconds, numerics, progress)
