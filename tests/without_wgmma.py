"""Makes warps multiply by mma.sync where there is wgmma too, to run such kernels on an H200."""

from dataclasses import replace

from htile.build.arch import arch_named, arch_of_capability
from htile.run.products import calls as products


def without_wgmma(name):
    """An architecture as if it had no wgmma."""
    return replace(arch_named(name), has_wgmma=False)


def force():
    """Have all calls with products of this process do so; the texts of their kernels from now on.

    A text is None where torch multiplies.
    """
    made, text_for = [], products.text_for

    def kept(*args):
        made.append(text_for(*args))
        return made[-1]

    products.arch_of_capability = lambda capability: without_wgmma(
        arch_of_capability(capability).name
    )
    products.text_for = kept
    return made
