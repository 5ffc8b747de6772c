"""The operands of products and what else their kernels read, as the kernels take them."""

from __future__ import annotations

import torch

from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Output, Role
from ...lower.products.fused import Fused, Operand
from ...lower.products.levels import Product

GIVES_FLOAT32 = "dtype" in torch.ops.aten.mm.overloads()  # of operands of 16 bits, on a GPU
Values = dict[str, object]  # arguments by parameter, and what the steps have computed by name


def flat(value: torch.Tensor, whole: tuple, flat: tuple) -> torch.Tensor:
    """An argument of rows with one leading dimension."""
    if value.shape == flat:
        return value
    return value.expand(whole).reshape(flat)


def is_apart(value: torch.Tensor, whole: tuple, flat: tuple) -> bool:
    """Whether an argument of rows is copied to have one leading dimension.

    It is where its rows are not equally far apart in memory.
    """
    try:
        value.expand(whole).view(flat)
    except RuntimeError:
        return True
    return False


def copied(kernel: Fused, found: Values) -> frozenset[str]:
    """The names of what is made contiguous for a kernel of products, each time that it runs."""
    names = {kernel.operands[0].product.left}
    names |= {i.name for i in kernel.others if i.role in (Role.ROW, Role.COLUMN)}
    return frozenset(name for name in names if found[name].stride(-1) != 1)


def dense(left: torch.Tensor) -> torch.Tensor:
    return left if left.stride(-1) == 1 else left.contiguous()


def width(kernel: Fused, output: Output) -> int:
    """How many elements a result has of a row: its columns, or its groups of them."""
    return kernel.n if output.inner[0] == kernel.graph.n else output.inner[0]


def by_torch(product: Product, found: Values) -> None:
    """A product in float32, as torch computes it.

    torch 2.7 gives a product the dtype of its operands, as torch does on a CPU. There they become
    float32 first, which holds them exactly, as TF32 does.
    """
    left, right = found[product.left], found[product.matrix]
    right = right.t() if product.is_transposed else right
    if GIVES_FLOAT32 and left.is_cuda:
        found[product.name] = torch.mm(left, right, out_dtype=torch.float32)
    else:
        found[product.name] = torch.mm(left.float(), right.float())


def columns_of(matrix: torch.Tensor, operand: Operand, n: int) -> torch.Tensor:
    """The part of a matrix, as (n, K), that an operand's columns come of."""
    matrix = matrix if operand.product.is_transposed else matrix.t()
    is_whole = operand.start == 0 and len(matrix) == n
    return matrix if is_whole else matrix[operand.start : operand.start + n]


def major_of(matrix: torch.Tensor) -> str:
    """Along which dimension of a matrix (N, K) a line of contiguous elements can be."""
    return "k" if matrix.stride(1) == 1 else "mn"


def has_lines(matrix: torch.Tensor, major: str) -> bool:
    """Whether the lines of a matrix (N, K) are what kernels load: TMA, or cp.async.

    They are contiguous and do not overlap, and they begin at multiples of 16 bytes. A tensor on the
    meta device has an address, too: that of a view is its offset.
    """
    between, along = (0, 1) if major == "k" else (1, 0)
    apart, size = matrix.stride(between), matrix.element_size()
    is_line = matrix.stride(along) == 1 and apart >= matrix.shape[along]
    return is_line and matrix.data_ptr() % ACCESS_BYTES == apart * size % ACCESS_BYTES == 0


def is_whole(matrix: torch.Tensor, major: str) -> bool:
    """Whether the lines of operands, of which this is the right one, are whole pieces of 16 bytes.

    The tensor memory accelerator knows where a line ends, and cp.async copies whole pieces.
    """
    lengths = {matrix.shape[1], matrix.shape[1 if major == "k" else 0]}
    return all(n * matrix.element_size() % ACCESS_BYTES == 0 for n in lengths)


def in_pairs(kernel: Fused, others: list) -> bool:
    """Whether two neighbours of each row and column that is read may be loaded at a time."""
    both = zip(kernel.others, others, strict=True)
    read = [value for i, value in both if i.role in (Role.ROW, Role.COLUMN)]
    return kernel.n % 2 == 0 and all(
        value.data_ptr() % (2 * value.element_size()) == 0
        and all(step % 2 == 0 for step in value.stride()[:-1])
        for value in read
    )


def argument(value: object, i, n: int) -> object:
    """An input as the kernel takes it: rows, columns and numbers of rows without other axes."""
    if i.role is Role.SCALAR:
        return float(value) if i.formula is None else i.formula.number(value)
    if i.role is Role.DEVICE_SCALAR:
        return value.reshape(1)
    if i.role is Role.PER_ROW:
        return value if value.ndim == 1 else value.reshape(value.shape[0])
    start = i.view.start[0] if i.view is not None else 0
    value = value if value.stride(-1) == 1 else value.contiguous()
    is_whole = start == 0 and value.shape[-1] == n
    return value if is_whole else value[..., start : start + n]
